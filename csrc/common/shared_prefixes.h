// What rows may share, and what that saves: said once for the CPU and CUDA. ops.py (find_shared_prefixes) has the rules.
#pragma once

#include "slots.h"

namespace paged_kv {

PAGED_KV_HOST_DEVICE static inline int64_t length_of(const SharedPrefixParams& p, int64_t row) {
  return clamp(p.seq_lens[row], 0, p.max_blocks * p.block_size);
}

// Blocks of a row that lie wholly before its first query, which every query of the row sees.
PAGED_KV_HOST_DEVICE static inline int64_t blocks_before_queries(const SharedPrefixParams& p, int64_t row) {
  const int64_t queries = int64_t(p.cu_seqlens_q[row + 1]) - p.cu_seqlens_q[row];
  const int64_t before = length_of(p, row) - (queries > 0 ? queries : 0);
  return before > 0 ? before / p.block_size : 0;
}

// Columns that a row and the one before it can have in common.
PAGED_KV_HOST_DEVICE static inline int64_t shareable_blocks(const SharedPrefixParams& p, int64_t row) {
  const int64_t before = blocks_before_queries(p, row - 1), own = blocks_before_queries(p, row);
  return before < own ? before : own;
}

PAGED_KV_HOST_DEVICE static inline const int32_t* entries_of(const SharedPrefixParams& p, int64_t row) {
  return p.block_table + row * p.block_table_stride;
}

// Reads of a block that fall away when so many rows read so many blocks together; 0 where that is not worth it.
PAGED_KV_HOST_DEVICE static inline int32_t saved_reads(const SharedPrefixParams& p, int32_t rows, int32_t blocks) {
  const int32_t saved = (rows - 1) * blocks;
  return saved < p.min_saved_blocks ? 0 : saved;
}

}  // namespace paged_kv
