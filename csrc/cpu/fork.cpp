// Makes rows share the blocks of other rows: tables and reference counts only.
#include <algorithm>
#include <vector>

#include "../common/allocator.h"
#include "kernels.h"
#include "pool.h"

namespace paged_kv::cpu {
namespace {

struct Pair {
  int64_t source, destination;
  int64_t source_columns, destination_columns;  // columns in use before the call
  int32_t source_len;
};

// The pairs that change something. A row forked onto itself would gain and lose each reference.
std::vector<Pair> pairs_of(const ForkParams& params) {
  const Rows& rows = params.rows;
  std::vector<Pair> pairs;
  for (int64_t i = 0; i < params.num_pairs; ++i) {
    const int64_t source = params.source_rows[i], destination = params.destination_rows[i];
    if (source == destination || !is_block(source, rows.num_seqs) || !is_block(destination, rows.num_seqs)) continue;
    const int64_t source_len = length_of(rows, source);
    pairs.push_back({source, destination, blocks_for(source_len, rows.block_size),
                     blocks_for(length_of(rows, destination), rows.block_size), int32_t(source_len)});
  }
  return pairs;
}

void hold(const PoolState& pool, int32_t block) {
  if (is_block(block, pool.num_blocks)) ++pool.ref_counts[block];
}

void fork_group(const ForkParams& params, int64_t group, const std::vector<Pair>& pairs) {
  const Rows& rows = params.rows;
  std::vector<int32_t> taken, given_up;  // entries of all sources; of all destinations, tail first
  for (const Pair& pair : pairs) {
    const int32_t* source = entries_of(rows, group, pair.source);
    const int32_t* destination = entries_of(rows, group, pair.destination);
    taken.insert(taken.end(), source, source + pair.source_columns);
    for (int64_t column = pair.destination_columns; column-- > 0;) given_up.push_back(destination[column]);
  }
  for (const int32_t block : taken) hold(params.pool, block);
  for (const int32_t block : given_up) release(params.pool, block);
  auto next = taken.begin();
  for (const Pair& pair : pairs) {
    int32_t* destination = entries_of(rows, group, pair.destination);
    std::copy(next, next + pair.source_columns, destination);
    next += pair.source_columns;
    if (pair.destination_columns > pair.source_columns)
      std::fill(destination + pair.source_columns, destination + pair.destination_columns, kUnmapped);
  }
}

}  // namespace

void fork(const ForkParams& params) {
  const std::vector<Pair> pairs = pairs_of(params);
  for (int64_t group = 0; group < params.rows.num_groups; ++group) fork_group(params, group, pairs);
  for (const Pair& pair : pairs) params.rows.seq_lens[pair.destination] = pair.source_len;
}

}  // namespace paged_kv::cpu
