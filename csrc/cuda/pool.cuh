// The free queue and the reference counts, as one thread block changes them: many drops at once, but with the result
// that the CPU's loop gives. Block numbers are checked at every use. docs/kernels/allocate.md explains the steps.
#pragma once

#include "../common/allocator.h"
#include "device.cuh"

namespace paged_kv::cuda {

inline constexpr int kMaxThreads = 1024;
inline constexpr int kMaxWarps = kMaxThreads / kWarp;

// Columns and offsets of positions. Lengths have 31 bits; a 64-bit division would cost ten times as much.
struct BlockSize {
  int32_t size;
  int32_t log2;  // -1: no power of two

  __device__ int32_t column_of(int32_t position) const { return log2 >= 0 ? position >> log2 : position / size; }
  __device__ int32_t offset_of(int32_t position) const { return position - column_of(position) * size; }
  __device__ int32_t columns_for(int32_t length) const { return length > 0 ? column_of(length - 1) + 1 : 0; }
};

inline BlockSize block_size_of(const Rows& rows) {
  BlockSize result{int32_t(rows.block_size < INT32_MAX ? rows.block_size : INT32_MAX), -1};
  for (int32_t log = 0; log < 31; ++log)
    if (rows.block_size == int64_t(1) << log) result.log2 = log;
  return result;
}

// Ring position base + index, for a base that was read once. 32-bit arithmetic: num_blocks < 2^31.
class RingCursor {
 public:
  __device__ RingCursor(const PoolState& pool, int64_t position)
      : ring_(pool.free_ring), size_(uint32_t(pool.num_blocks)), base_(uint32_t(uint64_t(position) % size_)) {}
  __device__ int32_t& operator[](int64_t index) const { return ring_[(base_ + uint32_t(index)) % size_]; }

 private:
  int32_t* ring_;
  uint32_t size_, base_;
};

// Dropping in parallel. All droppers subtract; then, of those whose block nobody holds any more, the one that comes
// last in the CPU's order has to put it into the queue. They find out who by atomicMin of -(order + 1) in the count
// itself, which is 0 and read by nobody else meanwhile. A barrier must lie between the three steps.
__device__ inline void drop(const PoolState& pool, int32_t block) {
  if (is_block(block, pool.num_blocks)) atomicSub(&pool.ref_counts[block], 1);
}

__device__ inline void hold(const PoolState& pool, int32_t block) {
  if (is_block(block, pool.num_blocks)) atomicAdd(&pool.ref_counts[block], 1);
}

__device__ inline void claim(const PoolState& pool, int32_t block, int64_t order) {
  if (!is_block(block, pool.num_blocks)) return;
  if (*static_cast<volatile int32_t*>(&pool.ref_counts[block]) <= 0)
    atomicMin(&pool.ref_counts[block], int32_t(-order - 1));
}

__device__ inline bool has_claimed(const PoolState& pool, int32_t block, int64_t order) {
  return is_block(block, pool.num_blocks) &&
         *static_cast<volatile int32_t*>(&pool.ref_counts[block]) == int32_t(-order - 1);
}

// Exclusive prefix sum over the thread block; `total` is the sum. `sums` holds kMaxWarps values.
__device__ inline int64_t block_scan(int64_t value, int64_t* sums, int64_t& total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  const int64_t inclusive = warp_inclusive_sum(value);
  if (lane == kWarp - 1) sums[warp] = inclusive;
  __syncthreads();
  int64_t before = 0;
  total = 0;
  for (int w = 0; w < num_warps; ++w) {
    before += w < warp ? sums[w] : 0;
    total += sums[w];
  }
  __syncthreads();
  return before + inclusive - value;
}

// Puts the blocks that `items` released into the queue: item after item, each from its last column down, as the CPU
// does. columns_of(item) gives the range of released columns and their entries; an item is one (group, row).
struct Released {
  int32_t* entries;
  int64_t begin, end;  // columns
};

template <class ReleasedOf>
__device__ void release(const PoolState& pool, int64_t num_items, ReleasedOf&& released_of) {
  __shared__ int64_t sums[kMaxWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  for (int64_t item = warp; item < num_items; item += num_warps) {
    const Released r = released_of(item);
    for (int64_t column = r.begin + lane; column < r.end; column += kWarp) drop(pool, r.entries[column]);
  }
  __syncthreads();
  for (int64_t item = warp; item < num_items; item += num_warps) {
    const Released r = released_of(item);
    for (int64_t column = r.begin + lane; column < r.end; column += kWarp) claim(pool, r.entries[column], item);
  }
  __syncthreads();
  const int64_t tail = pool.counters[kTail];
  const RingCursor ring(pool, tail);
  int64_t pushed = 0;
  for (int64_t start = 0; start < num_items; start += num_warps) {
    const int64_t item = start + warp;
    const Released r = item < num_items ? released_of(item) : Released{nullptr, 0, 0};
    int64_t count = 0;
    for (int64_t column = r.begin + lane; column < r.end; column += kWarp)
      count += has_claimed(pool, r.entries[column], item);
    count = __reduce_add_sync(kFullMask, unsigned(count));
    int64_t total = 0;
    int64_t at = pushed + __shfl_sync(kFullMask, block_scan(lane == 0 ? count : 0, sums, total), 0);
    pushed += total;
    for (int64_t end = r.end; end > r.begin; end -= kWarp) {
      const int64_t column = end - 1 - lane;
      const int32_t block = column >= r.begin ? r.entries[column] : kUnmapped;
      const bool mine = has_claimed(pool, block, item);
      const unsigned votes = __ballot_sync(kFullMask, mine);
      if (mine) {
        ring[at + __popc(votes & ((1u << lane) - 1))] = block;
        pool.ref_counts[block] = 0;
      }
      at += __popc(votes);
    }
  }
  if (threadIdx.x == 0) pool.counters[kTail] = tail + pushed;
  __syncthreads();
}

// Threads for a launch that has `work` items of one thread each.
inline unsigned threads_for(int64_t work) {
  const int64_t threads = (work + kWarp - 1) / kWarp * kWarp;
  return unsigned(threads < 128 ? 128 : threads > kMaxThreads ? kMaxThreads : threads);
}

}  // namespace paged_kv::cuda
