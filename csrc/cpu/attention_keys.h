// The keys of a sequence in the order of their positions, as addresses: the only place that reads the block table.
// A list holds nothing but keys that some row of the job sees, so no other key ever reaches arithmetic.
#pragma once

#include "attention_plan.h"
#include "simd_types.h"

namespace paged_kv::cpu {
namespace {

constexpr int kMaxKeys = 128;

struct KeyList {
  int count;
  bool contiguous;                                     // positions follow one by one
  int32_t position[kMaxKeys];
  int64_t key[kMaxKeys], value[kMaxKeys];              // bytes from the cache's start to the row of KV head 0
  int64_t key_scale[kMaxKeys], value_scale[kMaxKeys];  // per-slot scales: elements to that of KV head 0
};

struct KeyCursor {
  int64_t next, end;
};

// Bytes from the cache's start to the row of (block, offset) and KV head 0.
PAGED_KV_INLINE int64_t row_offset(const Cache& cache, int64_t block, int64_t offset) {
  return (block * cache.block_stride + offset * cache.slot_stride) * size_of(cache.dtype);
}

void append_run(const AttentionParams& p, int64_t block, int64_t offset, int64_t position, int64_t run, KeyList& list) {
  for (int64_t i = 0; i < run; ++i) {
    const int at = list.count++;
    list.position[at] = int32_t(position + i);
    list.key[at] = row_offset(p.key_cache, block, offset + i);
    list.value[at] = row_offset(p.value_cache, block, offset + i);
    const Scale& key_scale = p.key_cache.scale;
    const Scale& value_scale = p.value_cache.scale;
    list.key_scale[at] = block * key_scale.block_stride + (offset + i) * key_scale.slot_stride;
    list.value_scale[at] = block * value_scale.block_stride + (offset + i) * value_scale.slot_stride;
  }
}

void collect_mapped(const AttentionParams& p, int64_t seq, KeyCursor& cursor, int capacity, KeyList& list) {
  list.count = 0;
  while (cursor.next < cursor.end && list.count < capacity) {
    const int64_t offset = cursor.next % p.block_size,
                  block = p.block_table[seq * p.block_table_stride + cursor.next / p.block_size];
    int64_t run = p.block_size - offset;
    if (run > cursor.end - cursor.next) run = cursor.end - cursor.next;
    if (run > capacity - list.count) run = capacity - list.count;
    if (is_block(block, p.num_blocks)) append_run(p, block, offset, cursor.next, run, list);
    cursor.next += run;
  }
}

// Entries of the list that lie in a range of positions.
PAGED_KV_INLINE int first_at_or_past(const KeyList& list, int64_t position) {
  if (list.contiguous) return int(clamp(position - list.position[0], 0, list.count));
  int i = 0;
  while (i < list.count && list.position[i] < position) ++i;
  return i;
}

struct LocalRange {
  int begin, end;
};

PAGED_KV_INLINE LocalRange visible_entries(const AttentionParams& p, const Job& job, const KeyList& list,
                                           int64_t query) {
  const KeyRange range = visible_keys(p, job.seq_len, job.position + query);
  return {first_at_or_past(list, range.begin), first_at_or_past(list, range.end)};
}

constexpr uint32_t kMinusInfinityBits = 0xff800000u;

PAGED_KV_INLINE bool is_visible(const Mask& mask, int64_t at) {
  if (mask.kind == MaskKind::boolean) return static_cast<const uint8_t*>(mask.data)[at] != 0;
  return static_cast<const uint32_t*>(mask.data)[at] != kMinusInfinityBits;
}

PAGED_KV_INLINE void add_visible(const Mask& mask, int64_t row, int64_t shift, const KeyList& list, LocalRange range,
                                 uint8_t* seen) {
  for (int i = range.begin; i < range.end; ++i) {
    const int64_t column = list.position[i] - shift;
    if (column < 0 || is_visible(mask, row + column)) seen[i] = 1;
  }
}

// Drops the keys that no row of the job sees, by the mask, causality and the window together.
void drop_masked(const AttentionParams& p, const Job& job, KeyList& list) {
  uint8_t seen[kMaxKeys] = {};
  const int64_t group = p.num_heads / p.num_kv_heads, shift = job.seq_len - p.mask.width;
  const bool shared = p.mask.head_stride == 0;
  const int64_t kv_head_end = shared ? job.kv_head_begin + 1 : job.kv_head_end;
  const int64_t group_end = shared ? job.group_begin + 1 : job.group_end;
  for (int64_t query = 0; query < job.num_queries(); ++query) {
    const LocalRange range = visible_entries(p, job, list, query);
    const int64_t row = (job.query_begin + query) * p.mask.token_stride;
    for (int64_t kv_head = job.kv_head_begin; kv_head < kv_head_end; ++kv_head)
      for (int64_t g = job.group_begin; g < group_end; ++g)
        add_visible(p.mask, row + (kv_head * group + g) * p.mask.head_stride, shift, list, range, seen);
  }
  int kept = 0;
  for (int i = 0; i < list.count; ++i) {
    if (!seen[i]) continue;
    list.position[kept] = list.position[i];
    list.key[kept] = list.key[i];
    list.value[kept] = list.value[i];
    list.key_scale[kept] = list.key_scale[i];
    list.value_scale[kept] = list.value_scale[i];
    ++kept;
  }
  list.count = kept;
}

PAGED_KV_INLINE void set_contiguous(KeyList& list) {
  list.contiguous = list.count > 0 && list.position[list.count - 1] - list.position[0] == list.count - 1;
}

// Fills the list with the next keys, at most `capacity`; empty at the end. Up to a multiple of `padding`, entries past
// `count` repeat the first: kernels may compute with them and drop the result.
void next_keys(const AttentionParams& p, const Job& job, KeyCursor& cursor, int capacity, int padding, KeyList& list) {
  do {
    collect_mapped(p, job.seq, cursor, capacity, list);
    set_contiguous(list);
    if (p.mask.kind != MaskKind::none) drop_masked(p, job, list);
  } while (list.count == 0 && cursor.next < cursor.end);
  if (list.count == 0) return;
  set_contiguous(list);
  for (int i = list.count; i % padding != 0; ++i) {
    list.key[i] = list.key[0];
    list.value[i] = list.value[0];
    list.key_scale[i] = list.key_scale[0];
    list.value_scale[i] = list.value_scale[0];
    list.position[i] = list.position[0];
  }
}

// Fetches the lines of per-slot scales, each once where slots are in order.
PAGED_KV_INLINE void fetch_scales(const Scale& scale, const int64_t* offsets, int count, int64_t kv_head) {
  if (scale.kind != ScaleKind::per_slot) return;
  const float* data = scale.data + kv_head * scale.head_stride;
  uintptr_t fetched = 0;
  for (int i = 0; i < count; ++i) {
    const uintptr_t line = reinterpret_cast<uintptr_t>(data + offsets[i]) / 64;
    if (line != fetched) __builtin_prefetch(data + offsets[i]);
    fetched = line;
  }
}

// Gathers per-slot scales times `factor`.
PAGED_KV_INLINE void gather_scales(const Scale& scale, const int64_t* offsets, int count, int64_t kv_head, float factor,
                                   float* out) {
  const float* data = scale.data + kv_head * scale.head_stride;
  for (int i = 0; i < count; ++i) out[i] = data[offsets[i]] * factor;
}

// The scale that all keys of a KV head share; 1 where each slot has its own.
PAGED_KV_INLINE float head_scale(const Scale& scale, int64_t kv_head) {
  if (scale.kind == ScaleKind::none || scale.kind == ScaleKind::per_slot) return 1.0f;
  return scale.data[kv_head * scale.head_stride];
}

}  // namespace
}  // namespace paged_kv::cpu
