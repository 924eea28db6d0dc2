// Sizes chosen for paged_attention: pure functions. docs/kernels/cpu_attention.md has the measurements behind them.
#pragma once

#include "attention_plan.h"

namespace paged_kv::cpu::policy {

// Packing keys pays from about this many rows per KV head.
static inline bool use_tiles(int64_t rows_per_head) { return rows_per_head >= 28; }

// Queries of a tile job: its rows' queries and accumulators stay in the L2 cache beside the packed keys.
static inline int64_t tile_queries(int64_t group, int64_t head_size, int64_t head_size_v) {
  const int64_t rows = clamp(int64_t{288} * 256 / (head_size + head_size_v), 48, 576);
  return rows < group ? 1 : rows / group;
}

// KV heads of a stream job: their queries and accumulators stay in the L2 cache.
static inline int64_t stream_heads(int64_t rows_per_head, int64_t head_size, int64_t head_size_v) {
  const int64_t heads = int64_t{256} * 1024 / (4 * rows_per_head * (head_size + head_size_v));
  return heads < 1 ? 1 : heads;
}

// Jobs to divide the KV heads of a sequence among, where chunks of its `keys` keys are too few for the threads.
static inline int64_t head_parts(int64_t keys, int64_t num_seqs, int threads, bool deterministic) {
  if (threads == 1 || deterministic || keys < 64) return 1;
  const int64_t items = num_seqs * (keys < 128 ? 1 : keys / 128);
  return (2 * int64_t{threads} + items - 1) / items;
}

// Keys of a stream tile: 8 KiB of one head's keys, the distance at which prefetching pays best.
static inline int stream_tile_keys(int row_bytes, int most) { return int(clamp(8192 / row_bytes / 16 * 16, 16, most)); }

// Most of `keys` keys that are summed up in one state. `precise`: several float32 queries, whose naive computation is a
// matrix product that sums in blocks; one running sum over all keys errs several times as much. For a deterministic
// result parts have a fixed size, whoever sums them.
static inline int64_t part_keys(int64_t keys, bool tiled, bool deterministic, bool precise) {
  if (precise) return deterministic && !tiled ? 256 : 512;
  if (deterministic) return tiled ? 1024 : 256;
  return keys > 0 ? keys : 1;
}

// Keys of a chunk of a job that sees `keys` keys and does `share` of a thread's fair part of the whole call. Chunks are
// merged in the order in which parts are: chunks of one part make a sequence's result independent of the share.
static inline int64_t chunk_keys(int64_t keys, double share, int64_t part, bool tiled, bool deterministic) {
  int64_t chunks = int64_t(share * 4.0 + 0.5);  // four items a thread even out what runs beside
  const int64_t most = keys / (tiled ? 256 : 128);
  chunks = chunks > most ? most : chunks;
  if (chunks <= 1) return keys > 0 ? keys : 1;
  return deterministic ? part : (keys + chunks - 1) / chunks;
}

// Relative time of a job: bytes it streams and products it computes, in units that need only compare.
static inline int64_t cost(const Job& job, int64_t head_size, int64_t head_size_v) {
  const int64_t keys = job.keys.end - job.keys.begin + 16;
  const int64_t per_key = job.tiled ? job.rows_per_head() + 32 : 16 + job.rows_per_head();
  return keys * job.num_kv_heads() * per_key * (head_size + head_size_v);
}

// Below this cost a second thread costs more than it brings.
static inline bool is_worth_threads(int64_t total_cost) { return total_cost > 1 << 20; }

}  // namespace paged_kv::cpu::policy
