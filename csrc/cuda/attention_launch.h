// Joins the parts of paged_attention: the choice of kernel and its grid (paged_attention.cu) and the instances of the
// tensor-core kernel (attention_mma_*.cu).
#pragma once

#include "attention_schedule.cuh"
#include "launch.h"
#include "prefill.h"

namespace paged_kv::cuda {

// Policy: how much of the chip an attention launch takes, and what that needs in memory.
struct AttentionPlan {
  bool tensor_cores;
  prefill::Kind prefill;  // who takes the long sequences
  int head_size_class;   // 64, 128 or 256, of the tensor-core kernel
  int rows;              // of an item
  int grid, resident;    // thread blocks, and those that run at once
  int warps;             // of a thread block
  int64_t num_slots;
  Workspace workspace;   // pointers are set when the memory is known
  int64_t bytes;
};

// What a thread block of the tensor-core kernel needs of shared memory besides its stages is less than this.
inline constexpr int64_t kFixedSharedBytes = 16 * 1024;

template <void (*kKernel)(AttentionLaunch)>
void launch_kernel(Order order, int grid, int threads, int64_t shared_bytes, const AttentionLaunch& launch,
                   cudaStream_t stream) {
  launch_in_order<kKernel>(order, dim3(unsigned(grid)), dim3(unsigned(threads)), shared_bytes, launch, stream,
                           "paged_attention");
}

// The tensor-core kernel, by the cache's dtype.
void launch_mma_float16(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream);
void launch_mma_bfloat16(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream);
void launch_mma_float8_e4m3fn(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream);
void launch_mma_float8_e5m2(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream);
void launch_mma_int8(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream);

}  // namespace paged_kv::cuda
