// Gives rows the blocks of their next tokens, in one thread block and in the CPU's order. docs/kernels/allocate.md.
#include "kernels.h"
#include "launch.h"
#include "pool.cuh"

namespace paged_kv::cuda {
namespace {

struct Params : AllocateParams {
  BlockSize blocks;
  int32_t capacity;  // tokens of a row
};

// growth_of in 32 bits.
struct ShortGrowth {
  int32_t begin, end;  // span
  int32_t num_new, old_len, new_len;
  bool overlong;       // longer than a row can be
};

__device__ ShortGrowth short_growth_of(const Params& p, int32_t row) {
  const int32_t num_tokens = int32_t(p.num_tokens);
  ShortGrowth g;
  g.begin = max(0, min(p.cu_seqlens_q[row], num_tokens));
  g.end = max(g.begin, min(p.cu_seqlens_q[row + 1], num_tokens));
  g.num_new = g.end - g.begin;
  if (p.num_new) g.num_new = max(0, min(p.num_new[row], g.num_new));
  g.old_len = max(0, min(p.rows.seq_lens[row], p.capacity));
  g.overlong = g.num_new > p.capacity - g.old_len;
  g.new_len = g.overlong ? p.capacity : g.old_len + g.num_new;
  return g;
}

__device__ bool writes_begun_block(const Params& p, const ShortGrowth& growth) {
  return growth.num_new > 0 && p.blocks.offset_of(growth.old_len) != 0;
}

// first_retained_column in 32 bits.
__device__ int32_t first_retained(const Params& p, int64_t group, int32_t old_len) {
  const int32_t retain = p.retain ? p.retain[group] : -1;
  return retain < 0 || retain >= old_len ? 0 : p.blocks.column_of(old_len - retain);
}

// The work item of one table row: row `row` of group `group`. Items are numbered group-major, the order of everything.
struct Item {
  int64_t group, row;
  int32_t* entries;
  ShortGrowth growth;
};

__device__ Item item_at(const Params& p, int64_t index) {
  const int32_t group = p.rows.num_groups == 1 ? 0 : int32_t(index) / int32_t(p.rows.num_seqs);
  const int32_t row = int32_t(index) - group * int32_t(p.rows.num_seqs);
  return {group, row, entries_of(p.rows, group, row), short_growth_of(p, row)};
}

// Calls function(index, is_item) in rounds of one item per thread, so that the function may use barriers.
template <class Function>
__device__ void for_rounds(int64_t num_items, Function&& function) {
  for (int64_t start = 0; start < num_items; start += blockDim.x)
    function(start + threadIdx.x, start + threadIdx.x < num_items);
}

// Columns that `retain` gives up and that are still mapped: those before an unmapped one went in earlier calls.
template <class Visit>
__device__ void for_each_stale_column(const Params& p, const Item& item, Visit&& visit) {
  const int64_t end = first_retained(p, item.group, item.growth.old_len);
  int64_t begin = end;
  while (begin > 0 && item.entries[begin - 1] != kUnmapped) --begin;
  for (int64_t column = begin; column < end; ++column) visit(column);
}

// Lowers the counts of stale blocks and settles who frees them. Returns how many become free.
__device__ int64_t drop_stale(const Params& p, int64_t num_items, int64_t* sums) {
  const auto for_each = [&](auto&& function) {
    for_rounds(num_items, [&](int64_t index, bool is_item) {
      if (!is_item) return;
      const Item item = item_at(p, index);
      for_each_stale_column(p, item, [&](int64_t column) { function(index, item.entries[column]); });
    });
    __syncthreads();
  };
  for_each([&](int64_t, int32_t block) { drop(p.pool, block); });
  for_each([&](int64_t index, int32_t block) { claim(p.pool, block, index); });
  int64_t freed = 0, total = 0;
  for_each([&](int64_t index, int32_t block) { freed += has_claimed(p.pool, block, index); });
  block_scan(freed, sums, total);
  return total;
}

__device__ void undo_stale(const Params& p, int64_t num_items) {
  for_rounds(num_items, [&](int64_t index, bool is_item) {
    if (!is_item) return;
    const Item item = item_at(p, index);
    for_each_stale_column(p, item, [&](int64_t column) {
      if (has_claimed(p.pool, item.entries[column], index)) p.pool.ref_counts[item.entries[column]] = 0;
    });
  });
  __syncthreads();
  for_rounds(num_items, [&](int64_t index, bool is_item) {
    if (!is_item) return;
    const Item item = item_at(p, index);
    for_each_stale_column(p, item, [&](int64_t column) { hold(p.pool, item.entries[column]); });
  });
}

__device__ void push_stale(const Params& p, int64_t num_items, int64_t tail, int64_t* sums) {
  const RingCursor ring(p.pool, tail);
  int64_t pushed = 0;
  for_rounds(num_items, [&](int64_t index, bool is_item) {
    int64_t count = 0, total = 0;
    const Item item = is_item ? item_at(p, index) : Item{};
    if (is_item)
      for_each_stale_column(p, item,
                            [&](int64_t column) { count += has_claimed(p.pool, item.entries[column], index); });
    int64_t at = pushed + block_scan(count, sums, total);
    pushed += total;
    if (!is_item) return;
    for_each_stale_column(p, item, [&](int64_t column) {
      const int32_t block = item.entries[column];
      if (has_claimed(p.pool, block, index)) {
        ring[at++] = block;
        p.pool.ref_counts[block] = 0;
      }
    });
    // Ascending removal would hide the columns above from for_each_stale_column, so entries go in a second loop.
    const int64_t end = first_retained(p, item.group, item.growth.old_len);
    for (int64_t column = end; column-- > 0 && item.entries[column] != kUnmapped;) item.entries[column] = kUnmapped;
  });
  __syncthreads();
}

// block_mapping[index] = (block that the item must copy before it writes or -1, scratch). Of several writers that hold
// all references of a block, all but the last one copy.
__device__ void find_shared(const Params& p, int64_t num_items) {
  bool any = false;
  for_rounds(num_items, [&](int64_t index, bool is_item) {
    if (!is_item) return;
    const Item item = item_at(p, index);
    int32_t shared = kUnmapped;
    if (writes_begun_block(p, item.growth)) {
      const int32_t block = item.entries[p.blocks.column_of(item.growth.old_len)];
      if (is_block(block, p.pool.num_blocks) && p.pool.ref_counts[block] > 1) shared = block;
    }
    p.block_mapping[2 * index] = shared;
    any |= shared != kUnmapped;
  });
  if (!__syncthreads_or(any)) return;
  const auto for_each = [&](auto&& function) {
    for_rounds(num_items, [&](int64_t index, bool is_item) {
      if (is_item && p.block_mapping[2 * index] != kUnmapped) function(index, int32_t(p.block_mapping[2 * index]));
    });
    __syncthreads();
  };
  for_each([&](int64_t, int32_t block) { drop(p.pool, block); });
  for_each([&](int64_t index, int32_t block) { claim(p.pool, block, index); });
  for_each([&](int64_t index, int32_t block) {  // the last writer of a block that only writers hold stays in place
    if (has_claimed(p.pool, block, index)) p.block_mapping[2 * index] = -2 - int64_t(block);
  });
  for_rounds(num_items, [&](int64_t index, bool is_item) {
    if (!is_item || p.block_mapping[2 * index] > -2) return;
    p.pool.ref_counts[-2 - p.block_mapping[2 * index]] = 1;
    p.block_mapping[2 * index] = kUnmapped;
  });
  __syncthreads();
}

// Undoes find_shared. Each copying item lowered its block's count by one, and so did the writer that stays in place,
// whose count was set back to one.
__device__ void undo_shared(const Params& p, int64_t num_items) {
  for_rounds(num_items, [&](int64_t index, bool is_item) {
    if (is_item) hold(p.pool, int32_t(p.block_mapping[2 * index]));
  });
}

// The columns that get a block: [first, first + count), after the copied one.
struct Columns {
  int32_t first, count;
};

__device__ Columns new_columns(const Params& p, const ShortGrowth& growth) {
  const int32_t first = p.blocks.columns_for(growth.old_len);
  return {first, p.blocks.columns_for(growth.new_len) - first};
}

__device__ void take(const Params& p, const RingCursor& ring, int64_t index, int32_t* entry) {
  const int32_t block = ring[index];
  *entry = block;
  if (is_block(block, p.pool.num_blocks)) p.pool.ref_counts[block] = 1;
}

// Pops blocks. An item takes from position block_mapping[index][1] on: its copy, then its new columns. One thread an
// item takes up to two blocks; items that need more (prefill) get a warp afterwards.
__device__ void take_blocks(const Params& p, int64_t num_items, int64_t head) {
  const RingCursor ring(p.pool, head);
  constexpr int64_t kFew = 2;
  bool any_long = false;
  for_rounds(num_items, [&](int64_t index, bool is_item) {
    if (!is_item) return;
    const Item item = item_at(p, index);
    const Columns columns = new_columns(p, item.growth);
    const bool copies = p.block_mapping[2 * index] != kUnmapped;
    const int64_t at = p.block_mapping[2 * index + 1] + copies;
    any_long |= columns.count > kFew;
    if (columns.count <= kFew)
      for (int64_t i = 0; i < columns.count; ++i) take(p, ring, at + i, &item.entries[columns.first + i]);
  });
  if (__syncthreads_or(any_long)) {
    const int lane = threadIdx.x % kWarp;
    for (int64_t index = threadIdx.x / kWarp; index < num_items; index += blockDim.x / kWarp) {
      const Item item = item_at(p, index);
      const Columns columns = new_columns(p, item.growth);
      const int64_t at = p.block_mapping[2 * index + 1] + (p.block_mapping[2 * index] != kUnmapped);
      if (columns.count <= kFew) continue;
      for (int64_t i = lane; i < columns.count; i += kWarp) take(p, ring, at + i, &item.entries[columns.first + i]);
    }
    __syncthreads();
  }
  for_rounds(num_items, [&](int64_t index, bool is_item) {  // last: it overwrites the positions
    if (!is_item) return;
    int64_t* pair = p.block_mapping + 2 * index;
    if (pair[0] == kUnmapped) {
      pair[1] = kUnmapped;
      return;
    }
    const Item item = item_at(p, index);
    int32_t* entry = &item.entries[p.blocks.column_of(item.growth.old_len)];
    take(p, ring, pair[1], entry);
    pair[1] = *entry;
  });
  __syncthreads();
}

// The slot of a token of group `group`: the row whose span holds the token is found by bisection.
__device__ int64_t slot_of(const Params& p, int32_t group, int32_t token) {
  int32_t low = 0, high = int32_t(p.rows.num_seqs);  // the number of rows that begin at or before the token
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (p.cu_seqlens_q[middle] <= token)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == 0) return -1;
  const ShortGrowth growth = short_growth_of(p, low - 1);
  const int32_t first = growth.end - growth.num_new;
  if (token < first || token >= growth.end) return -1;
  const int32_t position = growth.old_len + token - first;
  const int32_t block = entries_of(p.rows, group, low - 1)[p.blocks.column_of(position)];
  return is_block(block, p.pool.num_blocks) ? block * p.rows.block_size + p.blocks.offset_of(position) : -1;
}

__device__ void fail(const Params& p, int64_t num_items, int64_t wanted) {
  for (int64_t i = threadIdx.x; i < 2 * num_items; i += blockDim.x) p.block_mapping[i] = kUnmapped;
  for (int64_t i = threadIdx.x; i < p.rows.num_groups * p.num_tokens; i += blockDim.x) p.slot_mapping[i] = -1;
  if (threadIdx.x != 0) return;
  ++p.pool.counters[kFailures];
  if (p.pool.counters[kWanted] == 0) p.pool.counters[kWanted] = wanted;
}

__global__ void __launch_bounds__(kMaxThreads) allocate_rows(const __grid_constant__ Params p) {
  __shared__ int64_t sums[kMaxWarps];
  const int64_t num_items = p.rows.num_groups * p.rows.num_seqs;
  const int64_t head = p.pool.counters[kHead], tail = p.pool.counters[kTail];
  const int64_t freed = p.retain ? drop_stale(p, num_items, sums) : 0;
  find_shared(p, num_items);

  int64_t wanted = 0;
  bool overlong = false;
  for_rounds(num_items, [&](int64_t index, bool is_item) {
    int64_t count = 0, total = 0;
    if (is_item) {
      const ShortGrowth growth = item_at(p, index).growth;
      count = new_columns(p, growth).count + (p.block_mapping[2 * index] != kUnmapped);
      overlong |= growth.overlong;
    }
    const int64_t before = block_scan(count, sums, total);
    if (is_item) p.block_mapping[2 * index + 1] = wanted + before;
    wanted += total;
  });
  if (__syncthreads_or(overlong) || wanted > tail - head + freed) {
    undo_shared(p, num_items);
    if (p.retain) undo_stale(p, num_items);
    __syncthreads();
    return fail(p, num_items, wanted);
  }

  if (p.retain) push_stale(p, num_items, tail, sums);
  take_blocks(p, num_items, head);
  for (int64_t i = threadIdx.x; i < p.rows.num_groups * p.num_tokens; i += blockDim.x) {
    const int64_t group = p.rows.num_groups == 1 ? 0 : i / p.num_tokens;
    p.slot_mapping[i] = slot_of(p, int32_t(group), int32_t(i - group * p.num_tokens));
  }
  __syncthreads();
  for (int64_t row = threadIdx.x; row < p.rows.num_seqs; row += blockDim.x)
    p.rows.seq_lens[row] = short_growth_of(p, int32_t(row)).new_len;
  if (threadIdx.x == 0) {
    p.pool.counters[kHead] = head + wanted;
    p.pool.counters[kTail] = tail + freed;
  }
}

}  // namespace

void allocate(const AllocateParams& params, cudaStream_t stream) {
  const int64_t num_items = params.rows.num_groups * params.rows.num_seqs;
  const int64_t slots = params.rows.num_groups * params.num_tokens;
  if (num_items == 0 && slots == 0) return;
  const Params p{params, block_size_of(params.rows), int32_t(capacity_of(params.rows))};
  allocate_rows<<<1, threads_for(num_items > slots ? num_items : slots), 0, stream>>>(p);
  check_launch("allocate");
}

}  // namespace paged_kv::cuda
