// Entry points of the CUDA kernels: each launches on `stream` and never waits for it. The host (ops.cpp) has checked
// every argument's shape, not the contents of index tensors: kernels skip what is out of range.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "../params.h"

namespace paged_kv::cuda {

void reshape_and_cache(const ReshapeAndCacheParams& params, cudaStream_t stream);
void copy_blocks(const CopyBlocksParams& params, cudaStream_t stream);
void swap_blocks(const CopyBlocksParams& params, cudaStream_t stream);  // block_mapping on the host or on the device

// Gives so many bytes, 256-byte aligned, that are the stream's until the call has returned.
using Allocate = std::function<void*(int64_t bytes)>;

// Also paged_attention_with_lse. The scratch memory comes from `allocate`: how much follows from the plan, made once.
void paged_attention(AttentionParams params, const Allocate& allocate, cudaStream_t stream);

void merge_attention_states(const MergeParams& params, cudaStream_t stream);
void gather_blocks(const GatherParams& params, cudaStream_t stream);
void find_shared_prefixes(const SharedPrefixParams& params, cudaStream_t stream);
int64_t shared_prefixes_workspace(const SharedPrefixParams& params);  // bytes that params.workspace must point to

// A failed allocation is told by counters[kFailures] and counters[kWanted], never by an exception.
void allocate(const AllocateParams& params, cudaStream_t stream);
void free(const FreeParams& params, cudaStream_t stream);
void fork(const ForkParams& params, cudaStream_t stream);

}  // namespace paged_kv::cuda
