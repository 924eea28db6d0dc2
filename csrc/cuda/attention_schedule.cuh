// Which part of the attention work a thread block does, found on the device from seq_lens: no host plan, no sync, and a
// captured graph replays right for other lengths. docs/kernels/decode.md draws it.
//
// An item is one (sequence, kv head, row tile): kRows packed rows (query token, head of the group) that share keys. Its
// keys are cut into tiles of kKeys. All tiles of all items lie on one line; thread block w takes the w-th of equal
// parts of it, so all have the same work whatever the lengths are. A part may begin and end inside an item: then the
// block has a partial result, and a second launch merges those. Deterministic mode instead cuts each item into pieces
// that depend on its own sequence alone, and deals the pieces out.
#pragma once

#include "device.cuh"

namespace paged_kv::cuda {

inline constexpr int kMaxAttentionThreads = 256;
inline constexpr int kPieces = 8;  // deterministic mode: most pieces of an item
inline constexpr int kPieceKeys = 512;  // ... and fewest keys of a piece
inline constexpr int kMaxSplitRows = 128;  // ... sequences with more rows than this are not cut

// An item that several thread blocks shared, as the merging launch needs it. In key order, its partial results lie in
// first_slot and then every slot_step-th slot from second_slot on. num_slots 0: nothing to do.
struct alignas(16) Record {
  int32_t first_slot, second_slot, slot_step, num_slots;
  int32_t token, kv_head, first_row, rows;
};

// Scratch memory of a launch. A slot holds a partial result: kRows states, kRows rows of weighted values.
struct Workspace {
  int64_t* num_records;  // deterministic mode
  Record* records;  // deterministic mode: one of each piece
  float* slots;  // [2 of each thread block or one of each piece, slot_floats]
  int64_t max_records;
  int64_t slot_floats;
  int32_t row_stride;  // floats of one row of weighted values: head_size_v rounded up to 4
};

// Division by a number that the host knows: one multiplication. For values below 2^31.
struct Divisor {
  uint32_t value, multiplier, shift;

  __device__ int32_t divide(int32_t number) const {
    return int32_t(value == 1 ? number : __umulhi(uint32_t(number), multiplier) >> shift);
  }
};

// Parameters of the kernels. What a thread block needs first stands first and is narrow: constant memory is cold when a
// launch begins, and a small batch waits for every line of it.
struct AttentionLaunch {
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;
  const int32_t* block_table;
  int64_t table_stride;
  int32_t num_seqs, num_tokens, num_kv_heads, num_blocks, capacity, block_size;
  int32_t log2_block_size;  // -1: no power of two
  int32_t log2_line_tiles;  // so many tiles are one step of the line, that its length fits 31 bits
  Divisor group;  // query heads per kv head
  int32_t window_left, window_right;  // clipped to 2^30
  int32_t grid, warps;  // of the attention launch: thread blocks, and warps of one
  int32_t max_rows;  // of an item, if max_seqlen_q is the bound it should be
  int32_t row_limit;  // sequences of more packed rows are another launch's
  bool causal, deterministic;
  Workspace workspace;
  AttentionParams params;
};

struct Sequence {
  int32_t index, token, q_len, seq_len;
};

struct KeyRange {
  int32_t begin, end;  // empty where end <= begin
};

// Keys visible to at least one of the queries first .. last of a sequence.
__device__ inline KeyRange visible_to_any(const AttentionLaunch& a, const Sequence& s, int32_t first, int32_t last) {
  const int32_t offset = s.seq_len - s.q_len;  // position of query 0
  int32_t begin = 0, end = s.seq_len;
  if (a.window_left >= 0) begin = max(0, offset + first - a.window_left);
  if (a.causal) end = min(end, offset + last + 1);
  if (a.window_right >= 0) end = min(end, offset + last + a.window_right + 1);
  return {begin, max(end, 0)};
}

// A run of tiles of one item that one thread block computes.
struct Segment {
  Sequence sequence;
  int32_t kv_head;
  int32_t first_row, rows;  // packed rows of this row tile
  int32_t tile_begin, tile_end;  // of keys, counted from key 0
  KeyRange keys;  // visible to any row of this tile; tiles outside are skipped
  int32_t slot;  // where the partial result goes, -1: it is the whole
};

struct ScheduleMemory {
  uint32_t prefix[kMaxAttentionThreads];  // line steps before the sequences of a thread
  uint32_t sums[kMaxAttentionThreads / kWarp];
  Sequence first[kMaxAttentionThreads];  // each thread's first sequence
};

template <int kRows, int kKeys, bool kDeterministic>
class Schedule {
 public:
  // Called by all threads.
  __device__ Schedule(const AttentionLaunch& a, ScheduleMemory& memory) : a_(a), memory_(memory) {
    per_thread_ = a.num_seqs > blockDim.x ? (uint32_t(a.num_seqs) + blockDim.x - 1) / blockDim.x : 1;
    total_ = scan();
    num_blocks_ = a.grid;
    if constexpr (kDeterministic) {
      total_ = min(int64_t(total_), a.workspace.max_records);  // more: cu_seqlens_q is no prefix sum
      if (blockIdx.x == 0 && threadIdx.x == 0) *a.workspace.num_records = total_;
      share_ = larger_ = 0;
      return;
    }
    if (total_ < a.warps * num_blocks_) num_blocks_ = (total_ + a.warps - 1) / a.warps;  // a step for each warp
    share_ = num_blocks_ > 0 ? uint32_t(total_) / uint32_t(num_blocks_) : 0;
    larger_ = total_ - share_ * num_blocks_;
  }

  // Where this block's walk begins; every warp may walk on its own, and all see the same. Steps of the line.
  __device__ int32_t start() const {
    if (kDeterministic) return blockIdx.x;
    return int32_t(blockIdx.x) < num_blocks_ ? begin_of(blockIdx.x) : INT32_MAX;
  }

  // Moves past the next segment. False at the end of this block's work. Called by whole warps.
  __device__ bool next(int32_t& position, Segment& s) const {
    const int32_t end = kDeterministic ? total_ : begin_of(blockIdx.x + 1);
    if (position >= end) return false;
    int32_t offset = position;
    const Work work = find(offset);
    if constexpr (kDeterministic) return next_piece(position, offset, work, s);
    const int32_t item = uint32_t(offset) / uint32_t(work.steps), first = offset - item * work.steps;
    const int32_t last = min(first + end - position, work.steps);
    place(s, work, item, first, last);
    s.slot = last - first == work.steps ? -1 : 2 * int32_t(blockIdx.x) + (first == 0);
    position += last - first;
    return true;
  }

  // Deterministic mode: tells the merging launch about a segment that next() gave. One thread calls it.
  __device__ void record(const Segment& s, int32_t position_after) const {
    if constexpr (kDeterministic) {
      const Work work = work_of(s.sequence);
      const bool first = s.slot >= 0 && s.tile_begin == work.first_tile;
      a_.workspace.records[position_after - int32_t(gridDim.x)] = {
          s.slot, s.slot + 1, 1, first ? pieces_of(work) : 0, s.sequence.token, s.kv_head, s.first_row, s.rows};
    }
  }

  // The item that the border before thread block `block` cuts, if no border further left cuts it too; else num_slots 0.
  // Called by whole warps.
  __device__ Record shared_item(int32_t block) const {
    Record r{};
    if (block < 1 || block >= num_blocks_) return r;
    const int32_t border = begin_of(block);
    int32_t offset = border;
    const Work work = find(offset);
    const int32_t item = uint32_t(offset) / uint32_t(work.steps), first = offset - item * work.steps;
    const int32_t begin = border - first;
    if (first == 0 || begin < begin_of(block - 1)) return r;
    Segment s;
    place(s, work, item, 0, 0);
    const int32_t last_block = block_of(begin + work.steps - 1);
    return {2 * (block - 1) + 1, 2 * block, 2,           last_block - block + 2,
            s.sequence.token,    s.kv_head, s.first_row, s.rows};
  }

  // While the lengths are on their way: all blocks together bring the table near, if it is small.
  __device__ static void prefetch_table(const AttentionLaunch& a) {
    constexpr int64_t kLine = 32;  // entries
    const int64_t line = int64_t(threadIdx.x) * gridDim.x + blockIdx.x;
    const int64_t entries = a.num_seqs * a.table_stride;
    if (entries > kLine * kWarp * gridDim.x || line * kLine >= entries) return;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(a.block_table + line * kLine));
  }

 private:
  static constexpr uint32_t kMost = INT32_MAX;

  // One sequence's share of the line.
  struct Work {
    Sequence sequence;
    int32_t row_tiles, first_tile, tiles, steps;
  };

  __device__ Sequence sequence_at(int32_t index) const {
    const int32_t begin = max(0, min(a_.cu_seqlens_q[index], a_.num_tokens));
    const int32_t end = max(begin, min(a_.cu_seqlens_q[index + 1], a_.num_tokens));
    const bool ours = (end - begin) * int32_t(a_.group.value) <= a_.row_limit;
    return {index, begin, ours ? end - begin : 0, max(0, min(a_.seq_lens[index], a_.capacity))};
  }

  __device__ Work work_of(const Sequence& sequence) const {
    Work w;
    w.sequence = sequence;
    w.row_tiles = (sequence.q_len * int32_t(a_.group.value) + kRows - 1) / kRows;
    const KeyRange keys = visible_to_any(a_, sequence, 0, sequence.q_len - 1);
    w.first_tile = keys.begin / kKeys;
    w.tiles = max((keys.end + kKeys - 1) / kKeys - w.first_tile, 1);  // one at least: someone must write the zeros
    w.steps = (w.tiles + (1 << a_.log2_line_tiles) - 1) >> a_.log2_line_tiles;
    return w;
  }

  __device__ uint32_t size_of_work(const Work& w) const {
    const uint32_t items = uint32_t(a_.num_kv_heads) * uint32_t(w.row_tiles);
    const uint64_t size = uint64_t(items) * uint32_t(kDeterministic ? pieces_of(w) : w.steps);
    return size < kMost ? uint32_t(size) : kMost;
  }

  // Sums stop at 2^31 - 1: reached only if cu_seqlens_q is no prefix sum, see log2_line_tiles.
  __device__ static uint32_t add(uint32_t a, uint32_t b) { return min(a + b, kMost); }

  // prefix[t] = work of the sequences before those of thread t. Returns the sum.
  __device__ int32_t scan() {
    uint32_t sum = 0;
    const int32_t begin = int32_t(threadIdx.x) * per_thread_, end = min(begin + per_thread_, a_.num_seqs);
#pragma unroll 1
    for (int32_t index = begin; index < end; ++index) {
      const Sequence sequence = sequence_at(index);
      if (index == begin) memory_.first[threadIdx.x] = sequence;
      sum = add(sum, size_of_work(work_of(sequence)));
    }
    uint32_t inclusive = sum;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const uint32_t other = __shfl_up_sync(kFullMask, inclusive, step);
      if (lane >= step) inclusive = add(inclusive, other);
    }
    if (lane == kWarp - 1) memory_.sums[warp] = inclusive;
    __syncthreads();
    uint32_t before = 0, total = 0;
#pragma unroll 1
    for (int w = 0; w < blockDim.x / kWarp; ++w) {
      if (w < warp) before = add(before, memory_.sums[w]);
      total = add(total, memory_.sums[w]);
    }
    memory_.prefix[threadIdx.x] = add(before, inclusive) - sum;
    __syncthreads();
    return int32_t(total);
  }

  // The sequence that `offset` falls into; the offset becomes relative to it. Called by whole warps.
  __device__ Work find(int32_t& offset) const {
    int count = 0;
#pragma unroll 1
    for (int thread = threadIdx.x % kWarp; thread < blockDim.x; thread += kWarp)
      count += memory_.prefix[thread] <= uint32_t(offset);
    const int thread = int(__reduce_add_sync(kFullMask, unsigned(count))) - 1;  // the last that begins before
    offset -= int32_t(memory_.prefix[thread]);
    Work work = work_of(memory_.first[thread]);
    if (per_thread_ == 1) return work;
#pragma unroll 1
    for (uint32_t size; uint32_t(offset) >= (size = size_of_work(work));
         work = work_of(sequence_at(work.sequence.index + 1)))
      offset -= int32_t(size);
    return work;
  }

  // Where the part of block `block` begins on the line: the first `larger_` parts have a step more.
  __device__ int32_t begin_of(int32_t block) const { return block * share_ + min(block, larger_); }

  __device__ int32_t block_of(int32_t position) const {
    const int32_t border = larger_ * (share_ + 1);
    return position < border ? position / (share_ + 1) : larger_ + (position - border) / share_;
  }

  // Items of a sequence: kv head after kv head, its row tiles side by side (they read the same keys).
  __device__ void place(Segment& s, const Work& work, int32_t item, int32_t begin, int32_t end) const {
    s.sequence = work.sequence;
    s.kv_head = work.row_tiles == 1 ? item : item / work.row_tiles;
    s.first_row = (item - s.kv_head * work.row_tiles) * kRows;
    s.rows = min(work.sequence.q_len * int32_t(a_.group.value) - s.first_row, kRows);
    s.tile_begin = work.first_tile + (begin << a_.log2_line_tiles);
    s.tile_end = work.first_tile + min(end << a_.log2_line_tiles, work.tiles);
    s.keys = visible_to_any(a_, work.sequence, a_.group.divide(s.first_row), a_.group.divide(s.first_row + s.rows - 1));
  }

  // ---- Deterministic mode ----

  __device__ int32_t steps_per_piece(const Work& w) const {
    if (w.sequence.q_len * int32_t(a_.group.value) > kMaxSplitRows) return w.steps;
    const int32_t pieces = min((w.tiles * kKeys + kPieceKeys - 1) / kPieceKeys, kPieces);
    return (w.steps + pieces - 1) / pieces;
  }

  __device__ int32_t pieces_of(const Work& w) const {
    const int32_t steps = steps_per_piece(w);
    return (w.steps + steps - 1) / steps;
  }

  __device__ bool next_piece(int32_t& position, int32_t offset, const Work& work, Segment& s) const {
    const int32_t pieces = pieces_of(work), steps = steps_per_piece(work);
    const int32_t item = offset / pieces, piece = offset - item * pieces;
    place(s, work, item, piece * steps, min(work.steps, (piece + 1) * steps));
    s.slot = pieces == 1 ? -1 : position;
    position += gridDim.x;
    return true;
  }

  const AttentionLaunch& a_;
  ScheduleMemory& memory_;
  int32_t total_;  // steps of the line
  int32_t share_, larger_;  // steps of a part; how many parts have one more
  int32_t per_thread_, num_blocks_;
};

}  // namespace paged_kv::cuda
