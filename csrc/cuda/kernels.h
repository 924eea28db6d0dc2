// Entry points of the CUDA kernels: each launches on `stream` and never waits for it. The host (ops.cpp) has checked
// every argument's shape, not the contents of index tensors: kernels skip what is out of range.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace paged_kv::cuda {

void reshape_and_cache(const ReshapeAndCacheParams& params, cudaStream_t stream);
void copy_blocks(const CopyBlocksParams& params, cudaStream_t stream);
void swap_blocks(const CopyBlocksParams& params, cudaStream_t stream);  // block_mapping on the host or on the device
void paged_attention(const AttentionParams& params, cudaStream_t stream);  // also paged_attention_with_lse
int64_t paged_attention_workspace(const AttentionParams& params);  // bytes that params.workspace must point to
void merge_attention_states(const MergeParams& params, cudaStream_t stream);
void gather_blocks(const GatherParams& params, cudaStream_t stream);
void find_shared_prefixes(const SharedPrefixParams& params, cudaStream_t stream);
int64_t shared_prefixes_workspace(const SharedPrefixParams& params);  // bytes that params.workspace must point to

// A failed allocation is told by counters[kFailures] and counters[kWanted], never by an exception.
void allocate(const AllocateParams& params, cudaStream_t stream);
void free(const FreeParams& params, cudaStream_t stream);
void fork(const ForkParams& params, cudaStream_t stream);

}  // namespace paged_kv::cuda
