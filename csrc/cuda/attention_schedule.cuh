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
#include "divisor.cuh"

namespace paged_kv::cuda {

// Sizes of the tensor-core kernel that host and device must agree on. Expanding 8-bit elements is work between a tile's
// arrival and the next request: more thread blocks an SM, with the same bytes in flight, hide it.
__host__ __device__ constexpr int mma_blocks_of_sm(int element_bytes, int rows) {
  return element_bytes == 1 && rows == 8 ? 3 : 2;
}
__host__ __device__ constexpr int mma_max_warps(int head_size_class) { return head_size_class <= 128 ? 4 : 2; }
// Stages of one warp.
__host__ __device__ constexpr int mma_warp_bytes(int head_size_class, int blocks_of_sm) {
  return (blocks_of_sm == 3 ? 16 : 24) * 1024 * (head_size_class <= 128 ? 1 : 2);
}

inline constexpr int kPrefetched = 32;  // lengths or table entries: a line of the L2 cache
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

// Where the rows of a cache lie, in bytes, in numbers that 32 bits hold (the tensor-core kernel asks for that).
struct NarrowCache {
  const char* data;
  uint32_t block_bytes, slot_bytes, head_bytes;
  int32_t head_size;
};

// Parameters of the kernels. What a thread block needs first stands first and is narrow: constant memory is cold when a
// launch begins, and a small batch waits for every line of it.
struct AttentionLaunch {
  const int32_t* seq_lens;
  const int32_t* cu_seqlens_q;
  const int32_t* block_table;
  int64_t table_stride;
  int32_t num_seqs, num_tokens, num_kv_heads, num_blocks, capacity;
  Divisor block_size;
  int32_t log2_line_tiles;  // so many tiles are one step of the line, that its length fits 31 bits
  Divisor group, per_grid;  // query heads per kv head; `grid`
  Divisor table_lines;  // of a row, that are brought near before the launch before is waited for
  int32_t window_left, window_right;  // clipped to 2^30
  int32_t grid, warps;  // of the attention launch: thread blocks, and warps of one
  int32_t resident, least_share;  // blocks that run at once; steps of a part at least, if there are more than those
  int32_t max_rows;  // of an item, if max_seqlen_q is the bound it should be
  int32_t row_limit;  // sequences of more packed rows are another launch's
  bool causal, deterministic;
  // Beside prefills, else null: is there anything to do? The launch before is the prefill kernel's of the same call, and
  // nothing else here depends on it.
  const int32_t* has_decodes;
  NarrowCache key_cache, value_cache;  // tensor-core kernel
  const void* query;
  uint32_t query_token_stride, query_head_stride;  // tensor-core kernel
  float scale;
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

__device__ inline void prefetch(const int32_t* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// Brings the lengths and the begin of each row of the table near, all blocks together. Into the L2 cache: so it is done
// before the launch before is waited for, whatever that still writes. How far a row lies from the next one, that is how
// wide the table is, does not matter.
__device__ inline void prefetch_inputs(const AttentionLaunch& a) {
  const int32_t first = (blockIdx.x * blockDim.x + threadIdx.x) * kPrefetched;
  if (first < a.num_seqs) {
    prefetch(a.seq_lens + first);
    prefetch(a.cu_seqlens_q + first);
  }
  const int32_t line = threadIdx.x * gridDim.x + blockIdx.x, row = a.table_lines.divide(line);
  if (row >= a.num_seqs || a.capacity == 0) return;
  prefetch(a.block_table + row * a.table_stride + (line - row * int32_t(a.table_lines.value)) * kPrefetched);
}

template <int kThreads>
struct ScheduleMemory {
  uint32_t prefix[kThreads];  // line steps of a warp's sequences before those of a thread
  uint32_t sums[kThreads / kWarp];
  Sequence first[kThreads];  // each thread's first sequence
};

template <int kRows, int kKeys, bool kDeterministic>
class Schedule {
 public:
  // Called by all threads of the thread block.
  template <int kThreads>
  __device__ Schedule(const AttentionLaunch& a, ScheduleMemory<kThreads>& memory)
      : a_(a), prefix_(memory.prefix), sums_(memory.sums), first_(memory.first) {
    first_token_ = a.num_seqs > 0 ? a.cu_seqlens_q[0] : a.num_tokens;
    last_token_ = a.num_seqs > 0 ? a.cu_seqlens_q[a.num_seqs] : a.num_tokens;
    few_ = a.num_seqs <= kWarp;
    total_ = few_ ? scan_few() : scan();
    size_ = a.grid;
    if constexpr (kDeterministic) {
      total_ = min(int64_t(total_), a.workspace.max_records);  // more: cu_seqlens_q is no prefix sum
      if (blockIdx.x == 0 && threadIdx.x == 0) *a.workspace.num_records = total_;
      share_ = larger_ = 0;
      return;
    }
    share_ = a.per_grid.divide(total_);
    if (share_ < a.least_share) {
      const auto blocks_of = [&](int32_t share) { return (total_ + share - 1) / share; };
      int32_t blocks = blocks_of(a.warps);  // a step for each warp
      if (a.resident < a.grid) blocks = max(min(blocks, a.resident), blocks_of(a.least_share));
      size_ = min(size_, blocks);
      share_ = size_ > 0 ? uint32_t(total_) / uint32_t(size_) : 0;
    }
    larger_ = total_ - share_ * size_;
  }

  // Where this block's walk begins; every warp may walk on its own, and all see the same. Steps of the line.
  __device__ int32_t start() const {
    if (kDeterministic) return blockIdx.x;
    return int32_t(blockIdx.x) < size_ ? begin_of(int32_t(blockIdx.x)) : INT32_MAX;
  }

  // Moves past the next segment. False at the end of this block's work. Called by whole warps.
  __device__ bool next(int32_t& position, Segment& s) const {
    const int32_t end = kDeterministic ? total_ : begin_of(int32_t(blockIdx.x) + 1);
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
          s.slot, s.slot + 1, 1, first ? pieces_of(a_, work) : 0, s.sequence.token, s.kv_head, s.first_row, s.rows};
    }
  }

  // The item that the border before thread block `block` cuts, if no border further left cuts it too; else num_slots 0.
  // Called by whole warps.
  __device__ Record shared_item(int32_t block) const {
    Record r{};
    if (block < 1 || block >= size_) return r;
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

  // Query tokens begin .. end - 1 belong to the sequences.
  __device__ KeyRange owned_tokens() const {
    const int32_t begin = max(0, min(first_token_, a_.num_tokens));
    return {begin, max(begin, min(last_token_, a_.num_tokens))};
  }

 private:
  static constexpr uint32_t kMost = INT32_MAX;

  // One sequence's share of the line.
  struct Work {
    Sequence sequence;
    int32_t row_tiles, first_tile, tiles, steps;
  };

  __device__ static Sequence sequence_at(const AttentionLaunch& a, int32_t index) {
    const int32_t begin = max(0, min(a.cu_seqlens_q[index], a.num_tokens));
    const int32_t end = max(begin, min(a.cu_seqlens_q[index + 1], a.num_tokens));
    const bool ours = (end - begin) * int32_t(a.group.value) <= a.row_limit;
    return {index, begin, ours ? end - begin : 0, max(0, min(a.seq_lens[index], a.capacity))};
  }

  __device__ static Work work_of(const AttentionLaunch& a, const Sequence& sequence) {
    Work w;
    w.sequence = sequence;
    w.row_tiles = (sequence.q_len * int32_t(a.group.value) + kRows - 1) / kRows;
    const KeyRange keys = visible_to_any(a, sequence, 0, sequence.q_len - 1);
    w.first_tile = keys.begin / kKeys;
    w.tiles = max((keys.end + kKeys - 1) / kKeys - w.first_tile, 1);  // one at least: someone must write the zeros
    w.steps = (w.tiles + (1 << a.log2_line_tiles) - 1) >> a.log2_line_tiles;
    return w;
  }

  __device__ Work work_of(const Sequence& sequence) const { return work_of(a_, sequence); }

  __device__ static uint32_t size_of_work(const AttentionLaunch& a, const Work& w) {
    const uint32_t items = uint32_t(a.num_kv_heads) * uint32_t(w.row_tiles);
    const uint64_t size = uint64_t(items) * uint32_t(kDeterministic ? pieces_of(a, w) : w.steps);
    return size < kMost ? uint32_t(size) : kMost;
  }

  // Sums stop at 2^31 - 1: reached only if cu_seqlens_q is no prefix sum, see log2_line_tiles.
  __device__ static uint32_t add(uint32_t a, uint32_t b) { return min(a + b, kMost); }

  // Inclusive sums over the first kLanes lanes.
  template <int kLanes>
  __device__ static uint32_t warp_prefix(uint32_t sum) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      const uint32_t other = __shfl_up_sync(kFullMask, sum, step);
      if (lane >= step) sum = add(sum, other);
    }
    return sum;
  }

  // The line's length, for no more sequences than lanes: every warp finds it by itself, and keeps a sequence a lane.
  __device__ int32_t scan_few() {
    const int lane = threadIdx.x % kWarp;
    uint32_t sum = 0;
    if (lane < a_.num_seqs) {
      own_ = sequence_at(a_, lane);
      sum = size_of_work(a_, work_of(own_));
    }
    const uint32_t inclusive = warp_prefix<kWarp>(sum);
    before_ = inclusive - sum;
    return int32_t(__shfl_sync(kFullMask, inclusive, kWarp - 1));
  }

  // The line's length. prefix[t] = work before that of thread t in its warp, before_ of lane w = work before warp w.
  __device__ int32_t scan() {
    per_thread_ = a_.num_seqs > blockDim.x ? (uint32_t(a_.num_seqs) + blockDim.x - 1) / blockDim.x : 1;
    uint32_t sum = 0;
    const int32_t begin = int32_t(threadIdx.x) * per_thread_, end = min(begin + per_thread_, a_.num_seqs);
#pragma unroll 1
    for (int32_t index = begin; index < end; ++index) {
      const Sequence sequence = sequence_at(a_, index);
      if (index == begin) first_[threadIdx.x] = sequence;
      sum = add(sum, size_of_work(a_, work_of(sequence)));
    }
    constexpr int kMaxWarps = 8;
    const int lane = threadIdx.x % kWarp;
    const uint32_t inclusive = warp_prefix<kWarp>(sum);
    prefix_[threadIdx.x] = inclusive - sum;
    if (lane == kWarp - 1) sums_[threadIdx.x / kWarp] = inclusive;
    __syncthreads();
    const uint32_t own = lane < blockDim.x / kWarp ? sums_[lane] : 0;
    const uint32_t with_own = warp_prefix<kMaxWarps>(own);
    before_ = lane < blockDim.x / kWarp ? with_own - own : kMost;
    return int32_t(__shfl_sync(kFullMask, with_own, kMaxWarps - 1));
  }

  // The sequence that `offset` falls into; the offset becomes relative to it. Called by whole warps.
  __device__ Work find(int32_t& offset) const {
    // The last that begins at or before the offset: those after it begin later or, without work, not before.
    const auto last_at_or_before = [&](uint32_t begin) {
      return 31 - __clz(int(__ballot_sync(kFullMask, begin <= uint32_t(offset))));
    };
    const int warp = last_at_or_before(before_);  // few_: the sequence
    offset -= int32_t(__shfl_sync(kFullMask, before_, warp));
    if (few_) {
      const auto from = [&](int32_t value) { return __shfl_sync(kFullMask, value, warp); };
      return work_of({warp, from(own_.token), from(own_.q_len), from(own_.seq_len)});
    }
    const uint32_t begin = prefix_[warp * kWarp + threadIdx.x % kWarp];
    const int lane = last_at_or_before(begin);
    offset -= int32_t(__shfl_sync(kFullMask, begin, lane));
    Sequence sequence = first_[warp * kWarp + lane];
    if (per_thread_ > 1) {
      const Place place = walk(a_, {sequence, offset});
      sequence = place.sequence;
      offset = place.offset;
    }
    return work_of(sequence);
  }

  struct Place {
    Sequence sequence;
    int32_t offset;  // on the line, from the sequence's begin
  };

  // From a sequence and an offset, perhaps past its end, to the sequence that the offset falls into.
  __device__ __noinline__ static Place walk(const AttentionLaunch& a, Place place) {
#pragma unroll 1
    for (uint32_t size; uint32_t(place.offset) >= (size = size_of_work(a, work_of(a, place.sequence)));
         place.sequence = sequence_at(a, place.sequence.index + 1))
      place.offset -= int32_t(size);
    return place;
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

  __device__ static int32_t steps_per_piece(const AttentionLaunch& a, const Work& w) {
    if (w.sequence.q_len * int32_t(a.group.value) > kMaxSplitRows) return w.steps;
    const int32_t pieces = min((w.tiles * kKeys + kPieceKeys - 1) / kPieceKeys, kPieces);
    return (w.steps + pieces - 1) / pieces;
  }

  __device__ static int32_t pieces_of(const AttentionLaunch& a, const Work& w) {
    const int32_t steps = steps_per_piece(a, w);
    return (w.steps + steps - 1) / steps;
  }

  __device__ bool next_piece(int32_t& position, int32_t offset, const Work& work, Segment& s) const {
    const int32_t pieces = pieces_of(a_, work), steps = steps_per_piece(a_, work);
    const int32_t item = offset / pieces, piece = offset - item * pieces;
    place(s, work, item, piece * steps, min(work.steps, (piece + 1) * steps));
    s.slot = pieces == 1 ? -1 : position;
    position += gridDim.x;
    return true;
  }

  const AttentionLaunch& a_;
  uint32_t* prefix_;  // see ScheduleMemory
  uint32_t* sums_;
  Sequence* first_;
  int32_t total_;  // steps of the line
  int32_t share_, larger_;  // steps of a part; how many parts have one more
  int32_t per_thread_ = 1, size_;  // sequences of a thread, blocks with work
  uint32_t before_;  // line steps before sequence l (few_) or before those of warp l, l being the lane
  Sequence own_{};  // few_: sequence l
  int32_t first_token_, last_token_;
  bool few_;
};

}  // namespace paged_kv::cuda
