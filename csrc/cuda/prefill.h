// The prefill kernels as paged_attention.cu sees them.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "../params.h"

namespace paged_kv::cuda::prefill {

// Packed rows (query token x head of the group) of a sequence up to which the decode kernel serves it.
inline constexpr int32_t kDecodeRows = 64;

// Which kernel takes the long sequences of a call: that of Hopper (docs/kernels/prefill.md), that of every chip
// (docs/kernels/prefill_mma.md), or none.
enum class Kind { none, wgmma, mma_sync };

Kind kind_for(const AttentionParams& params);

// Bytes of scratch memory, 256-byte aligned, that launch() needs.
int64_t workspace_bytes(const AttentionParams& params, Kind kind);

// Serves the sequences of more than `decode_rows` packed rows, and gives zeros to tokens of no sequence. `beside` launches
// what serves the others, and comes up beside this kernel, before anything is merged. That launch can read at the address
// given whether there are any.
void launch(const AttentionParams& params, Kind kind, int32_t decode_rows, void* workspace, cudaStream_t stream,
            const std::function<void(const int32_t*)>& beside);

}  // namespace paged_kv::cuda::prefill
