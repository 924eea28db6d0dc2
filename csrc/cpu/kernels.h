// Entry points of the CPU kernels. The host (ops.cpp) has checked every argument before it calls one.
#pragma once

#include "../params.h"

namespace paged_kv::cpu {

// What `allocate` found. Unless `ok`, it has changed nothing but set slot_mapping and block_mapping to -1.
struct AllocateResult {
  bool ok;
  int64_t wanted;     // blocks this call needs
  int64_t available;  // blocks free before it, those released by `retain` included
  int64_t row;        // -1, or the first row that needs more columns than max_blocks (then not ok)
  int64_t columns;    // the columns that row needs
};

void paged_attention(const AttentionParams& params);  // also paged_attention_with_lse
void reshape_and_cache(const ReshapeAndCacheParams& params);
void merge_attention_states(const MergeParams& params);
void copy_blocks(const CopyBlocksParams& params);
inline void swap_blocks(const CopyBlocksParams& params) { copy_blocks(params); }
void gather_blocks(const GatherParams& params);
void find_shared_prefixes(const SharedPrefixParams& params);

// The host has checked the contents too: cu_seqlens_q ascends within 0 .. num_tokens, num_new within 0 .. the span,
// retain >= -1, seq_lens within 0 .. max_blocks * block_size, new_lens >= 0, rows within 0 .. num_seqs - 1 and the
// destination rows distinct. Block numbers and reference counts are not checked.
AllocateResult allocate(const AllocateParams& params);
void free(const FreeParams& params);
void fork(const ForkParams& params);

}  // namespace paged_kv::cpu
