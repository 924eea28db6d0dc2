// One check per op, for both backends: every rule about arguments, before anything is written. A check returns the
// op's params filled in but for its outputs. A broken rule throws std::invalid_argument (Python: ValueError) that reads
// "<argument> must <rule>, got <value>".
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "argument.h"
#include "params.h"

namespace paged_kv {

using torch::headeronly::ScalarType;

AllocateParams check_allocate(const Tensor& block_table, const Tensor& seq_lens, const Tensor& free_ring,
                              const Tensor& ref_counts, const Tensor& counters, const Tensor& cu_seqlens_q,
                              int64_t num_tokens, int64_t block_size, const OptionalTensor& num_new,
                              const OptionalTensor& retain);

FreeParams check_free(const Tensor& block_table, const Tensor& seq_lens, const Tensor& free_ring,
                      const Tensor& ref_counts, const Tensor& counters, const Tensor& new_lens, int64_t block_size);

ForkParams check_fork(const Tensor& block_table, const Tensor& seq_lens, const Tensor& free_ring,
                      const Tensor& ref_counts, const Tensor& counters, const Tensor& source_rows,
                      const Tensor& destination_rows, int64_t block_size);

ReshapeAndCacheParams check_reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                              const Tensor& value_cache, const Tensor& slot_mapping,
                                              const OptionalTensor& key_scale, const OptionalTensor& value_scale);

AttentionParams check_paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                                      const Tensor& block_table, const Tensor& seq_lens, const Tensor& cu_seqlens_q,
                                      int64_t max_seqlen_q, double scale, bool causal, int64_t window_left,
                                      int64_t window_right, double softcap, const OptionalTensor& alibi_slopes,
                                      const OptionalTensor& sinks, const OptionalTensor& key_scale,
                                      const OptionalTensor& value_scale, const OptionalTensor& mask,
                                      bool deterministic);

MergeParams check_merge_attention_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                         const Tensor& lse_b, const OptionalTensor& sinks);

SharedPrefixParams check_find_shared_prefixes(const Tensor& block_table, const Tensor& seq_lens,
                                              const Tensor& cu_seqlens_q, int64_t block_size, int64_t min_saved);

// The params of copy_blocks and swap_blocks point into `lanes`.
CopyBlocksParams check_copy_blocks(const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
                                   const Tensor& block_mapping, std::vector<CopyLane>& lanes);

CopyBlocksParams check_swap_blocks(const std::vector<Tensor>& source_caches,
                                   const std::vector<Tensor>& destination_caches, const Tensor& block_mapping,
                                   std::vector<CopyLane>& lanes);

GatherParams check_gather_blocks(const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                                 const Tensor& seq_lens, int64_t max_len, const std::optional<ScalarType>& dtype,
                                 const OptionalTensor& key_scale, const OptionalTensor& value_scale);

// A row of `allocate` that needs more columns than its table has.
[[noreturn]] void fail_table_too_narrow(int64_t row, int64_t columns, int64_t max_blocks);

}  // namespace paged_kv
