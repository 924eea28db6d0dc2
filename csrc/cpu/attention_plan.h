// What the dispatcher of paged_attention hands to the kernels of an instruction set. No torch, no std.
#pragma once

#include <cstdint>

#include "../common/slots.h"
#include "../params.h"

// Forces inlining: into register-resident loops, and so that no copy made for one instruction set serves another.
#define PAGED_KV_INLINE inline __attribute__((always_inline))

namespace paged_kv::cpu {

struct KeyRange {
  int64_t begin, end;  // end >= begin
};

// Keys that a query at `position` of a sequence of `seq_len` keys may see. Causal 4 of 6 and window_left = 1:
//   position 2: 0 1 1 0 0 0
//   position 3: 0 0 1 1 0 0
static inline KeyRange visible_keys(const AttentionParams& p, int64_t seq_len, int64_t position) {
  const int64_t begin = p.window_left >= 0 && position > p.window_left ? position - p.window_left : 0;
  int64_t end = seq_len;
  if (p.window_right >= 0 && p.window_right < seq_len - 1 - position) end = position + p.window_right + 1;
  if (p.causal && position + 1 < end) end = position + 1;
  return {begin, end < begin ? begin : end};
}

// Rows that are finished together: some queries of one sequence times the query heads of some KV heads.
// Rows are numbered KV head first, then query, then head inside the group.
struct Job {
  int64_t seq, seq_len;
  int64_t query_begin, query_end;      // tokens of the batch
  int64_t position;                    // of query_begin; the queries behind it follow one by one
  int64_t kv_head_begin, kv_head_end;
  int64_t group_begin, group_end;      // query heads of each KV head: 0 .. num_heads / num_kv_heads
  KeyRange keys;                       // what any of the queries sees
  int64_t chunk_keys, num_chunks;      // the keys are split so that threads can share a job
  int64_t part_keys;                   // most keys that are summed up before they are merged with those before
  int64_t states;                      // num_chunks > 1: where its first partial state lies, in floats
  int32_t pending;                     // chunks not yet done; whoever does the last one merges
  bool tiled;                          // tile kernel (many rows per KV head) or stream kernel (few)

  PAGED_KV_INLINE int64_t num_queries() const { return query_end - query_begin; }
  PAGED_KV_INLINE int64_t num_kv_heads() const { return kv_head_end - kv_head_begin; }
  PAGED_KV_INLINE int64_t group() const { return group_end - group_begin; }
  PAGED_KV_INLINE int64_t rows_per_head() const { return num_queries() * group(); }
  PAGED_KV_INLINE int64_t num_rows() const { return rows_per_head() * num_kv_heads(); }
};

// One table per instruction set.
struct AttentionKernels {
  int64_t (*state_floats)(const AttentionParams&, const Job&);   // a partial state of one chunk
  int64_t (*scratch_bytes)(const AttentionParams&, const Job&);  // 64-byte aligned working memory of `run`
  void (*run)(const AttentionParams&, Job&, int64_t chunk, float* states, char* scratch);
};

extern const AttentionKernels kAttentionGeneric, kAttentionAvx2, kAttentionAvx512, kAttentionAmx;

}  // namespace paged_kv::cpu
