// Slot arithmetic: which block, offset and address a token position has. Host and device; 64-bit throughout.
#pragma once

#include <cstdint>

#include "../params.h"
#include "float8.h"

namespace paged_kv {

PAGED_KV_HOST_DEVICE static inline int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

PAGED_KV_HOST_DEVICE static inline int64_t blocks_for(int64_t num_tokens, int64_t block_size) {
  return (num_tokens + block_size - 1) / block_size;
}

PAGED_KV_HOST_DEVICE static inline bool is_block(int64_t block, int64_t num_blocks) {
  return uint64_t(block) < uint64_t(num_blocks);
}

// The row of (block, offset, head): head_size elements.
PAGED_KV_HOST_DEVICE static inline char* row_of(const Cache& cache, int64_t block, int64_t offset, int64_t head) {
  const int64_t element = block * cache.block_stride + offset * cache.slot_stride + head * cache.head_stride;
  return static_cast<char*>(cache.data) + element * size_of(cache.dtype);
}

// Where the scale of (block, offset, head) lies; strides are zero along axes that the scale does not have.
PAGED_KV_HOST_DEVICE static inline float* scale_of(const Scale& scale, int64_t block, int64_t offset, int64_t head) {
  return scale.data + block * scale.block_stride + offset * scale.slot_stride + head * scale.head_stride;
}

// A row's tokens in this step's batch, kept inside it whatever cu_seqlens_q holds.
struct Span {
  int64_t begin, end;  // end >= begin
};

PAGED_KV_HOST_DEVICE static inline Span span_of(const int32_t* cu_seqlens_q, int64_t row, int64_t num_tokens) {
  const int64_t begin = clamp(cu_seqlens_q[row], 0, num_tokens);
  return {begin, clamp(cu_seqlens_q[row + 1], begin, num_tokens)};
}

}  // namespace paged_kv
