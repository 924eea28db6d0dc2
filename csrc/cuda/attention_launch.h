// Joins the parts of paged_attention: the choice of kernel and its grid (paged_attention.cu) and the instances of the
// tensor-core kernel (attention_mma_*.cu).
#pragma once

#include "attention_schedule.cuh"
#include "launch.h"

namespace paged_kv::cuda {

// Policy: how much of the chip an attention launch takes, and what that needs in memory.
struct AttentionPlan {
  bool tensor_cores;
  int head_size_class;   // 64, 128 or 256, of the tensor-core kernel
  int rows;              // of an item
  int grid;
  int warps;             // of a thread block
  int64_t num_slots;
  Workspace workspace;   // pointers are set when the memory is known
  int64_t bytes;
};

// What a thread block of the tensor-core kernel needs of shared memory besides its stages is less than this.
inline constexpr int64_t kFixedSharedBytes = 16 * 1024;

enum class Order { after_predecessor, beside_predecessor };

// Launches a kernel. `beside_predecessor`: it comes up while its predecessor runs, if it was compiled to wait for it.
template <void (*kKernel)(AttentionLaunch)>
void launch_kernel(Order order, int grid, int threads, int64_t shared_bytes, const AttentionLaunch& launch,
                   cudaStream_t stream) {
  struct Known {
    bool asked = false, waits = false;
    int64_t shared_bytes = 0;
  };
  static Known devices[64];  // of this kernel
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  Known& known = devices[device];
  if (!known.asked || known.shared_bytes < shared_bytes) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kKernel), "cudaFuncGetAttributes");
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)),
          "paged_attention");
    known = {true, attributes.ptxVersion >= 90, shared_bytes};
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(grid));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = order == Order::beside_predecessor && known.waits ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kKernel, launch), "paged_attention");
}

// The tensor-core kernel, by the cache's dtype.
void launch_mma_float16(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream);
void launch_mma_bfloat16(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream);
void launch_mma_float8_e4m3fn(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream);
void launch_mma_float8_e5m2(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream);
void launch_mma_int8(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream);

}  // namespace paged_kv::cuda
