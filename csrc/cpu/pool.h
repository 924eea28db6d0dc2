// The free queue and the reference counts, as the CPU kernels change them. Block numbers are checked at every use, so
// that no content of a table or ring leads outside the pool.
#pragma once

#include "../common/slots.h"
#include "../params.h"

namespace paged_kv::cpu {

inline int64_t num_free(const PoolState& pool) { return pool.counters[kTail] - pool.counters[kHead]; }

inline int32_t& ring_at(const PoolState& pool, int64_t position) {
  return pool.free_ring[uint64_t(position) % uint64_t(pool.num_blocks)];
}

inline void push(const PoolState& pool, int32_t block) { ring_at(pool, pool.counters[kTail]++) = block; }

// The longest-released free block, held once. There must be one.
inline int32_t pop(const PoolState& pool) {
  const int32_t block = ring_at(pool, pool.counters[kHead]++);
  if (is_block(block, pool.num_blocks)) pool.ref_counts[block] = 1;
  return block;
}

// One table entry fewer holds the block. True when it was the last.
inline bool drop(const PoolState& pool, int32_t block) {
  if (!is_block(block, pool.num_blocks) || pool.ref_counts[block] <= 0) return false;
  return --pool.ref_counts[block] == 0;
}

// Drops the block and puts it back into the queue if nobody holds it.
inline void release(const PoolState& pool, int32_t block) {
  if (drop(pool, block)) push(pool, block);
}

}  // namespace paged_kv::cpu
