// What allocate, free and fork mean by a row's tokens and columns: arithmetic that both backends share.
#pragma once

#include <cstdint>

#include "../params.h"
#include "slots.h"

namespace paged_kv {

inline constexpr int32_t kUnmapped = -1;

// Tokens a row can hold; lengths are int32.
PAGED_KV_HOST_DEVICE static inline int64_t capacity_of(const Rows& rows) {
  return clamp(rows.max_blocks * rows.block_size, 0, INT32_MAX);
}

PAGED_KV_HOST_DEVICE static inline int64_t length_of(const Rows& rows, int64_t row) {
  return clamp(rows.seq_lens[row], 0, capacity_of(rows));
}

// A row of a group's table: [max_blocks].
PAGED_KV_HOST_DEVICE static inline int32_t* entries_of(const Rows& rows, int64_t group, int64_t row) {
  return rows.block_table + (group * rows.num_seqs + row) * rows.max_blocks;
}

// A row in one `allocate`: its span in the batch, the tokens it gets (right-aligned in the span), its length before.
struct Growth {
  Span span;
  int64_t num_new, old_len, new_len;
};

PAGED_KV_HOST_DEVICE static inline Growth growth_of(const AllocateParams& params, int64_t row) {
  const Span span = span_of(params.cu_seqlens_q, row, params.num_tokens);
  const int64_t width = span.end - span.begin;
  const int64_t num_new = params.num_new ? clamp(params.num_new[row], 0, width) : width;
  const int64_t old_len = length_of(params.rows, row);
  return {span, num_new, old_len, old_len + num_new};
}

// The first column that `retain` keeps: blocks before it lie wholly before position old_len - retain.
PAGED_KV_HOST_DEVICE static inline int64_t first_retained_column(const AllocateParams& params, int64_t group,
                                                                 int64_t old_len) {
  const int64_t retain = params.retain ? params.retain[group] : -1;
  return retain < 0 || retain >= old_len ? 0 : (old_len - retain) / params.rows.block_size;
}

// Does the row write into a block that it has begun before? Only then can a copy be needed.
PAGED_KV_HOST_DEVICE static inline bool writes_begun_block(const Growth& growth, int64_t block_size) {
  return growth.num_new > 0 && growth.old_len % block_size != 0;
}

}  // namespace paged_kv
