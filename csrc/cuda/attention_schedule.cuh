// Which part of the attention work a thread block does, found on the device from seq_lens: no host plan, no sync, and a
// captured graph replays right for other lengths. docs/kernels/decode.md draws it.
//
// An item is one (sequence, kv head, row tile): kRows packed rows (query token, head of the group) that share keys. Its
// keys are cut into tiles of kKeys. All tiles of all items lie on one line, and the line is cut into pieces: first one
// large piece for each thread block, then many small ones that blocks take from a queue when they are done, since
// memory does not serve all SMs equally fast. So blocks end together whatever the lengths are. A piece may begin and end
// inside an item; then its part of the item is a partial result, and the last block to bring one merges them all.
// Deterministic mode instead cuts each item into pieces that depend on its own sequence alone.
#pragma once

#include "device.cuh"

namespace paged_kv::cuda {

inline constexpr int kMaxAttentionThreads = 256;
inline constexpr int kMaxUnits = 1024;       // of the queue
inline constexpr int kUnitsPerBlock = 4;     // of the queue, for each thread block
inline constexpr int kPieces = 8;            // deterministic mode: most pieces of an item
inline constexpr int kPieceKeys = 512;       // ... and fewest keys of a piece
inline constexpr int kMaxSplitRows = 128;    // ... sequences with more rows than this are not cut

// Scratch memory of a launch. A slot holds a partial result: kRows states, kRows rows of weighted values.
struct Workspace {
  uint32_t* queue;        // units taken so far
  uint32_t* arrivals;     // [max_pieces]: partial results that an item, named by its first piece, has got
  float* slots;           // [2 * max_pieces or, in deterministic mode, max_pieces, slot_floats]
  int64_t max_pieces;
  int64_t slot_floats;
  int32_t row_stride;     // floats of one row of weighted values: head_size_v rounded up to 4
};

// Division by a number that the host knows: one multiplication. For values below 2^31.
struct Divisor {
  uint32_t value, multiplier, shift;

  __device__ int32_t divide(int32_t number) const {
    return int32_t(value == 1 ? number : __umulhi(uint32_t(number), multiplier) >> shift);
  }
};

struct AttentionLaunch {
  AttentionParams params;
  Workspace workspace;
  int32_t window_left, window_right;  // clipped to 2^30
  Divisor group;                      // query heads per kv head
  int32_t log2_block_size;            // -1: no power of two
  int32_t log2_line_tiles;            // so many tiles are one step of the line, that its length fits 31 bits
};

struct Sequence {
  int32_t index, token, q_len, seq_len;
};

__device__ inline Sequence sequence_at(const AttentionParams& p, int64_t index) {
  const Span span = span_of(p.cu_seqlens_q, index, p.num_tokens);
  const int64_t capacity = p.max_blocks * p.block_size;
  const int32_t most = capacity < (1 << 30) ? int32_t(capacity) : 1 << 30;
  return {int32_t(index), int32_t(span.begin), int32_t(span.end - span.begin), max(0, min(p.seq_lens[index], most))};
}

struct KeyRange {
  int32_t begin, end;  // empty where end <= begin
};

// Keys visible to at least one of the queries first .. last of a sequence.
__device__ inline KeyRange visible_to_any(const AttentionLaunch& a, const Sequence& s, int32_t first, int32_t last) {
  const int32_t offset = s.seq_len - s.q_len;  // position of query 0
  int32_t begin = 0, end = s.seq_len;
  if (a.window_left >= 0) begin = max(0, offset + first - a.window_left);
  if (a.params.causal) end = min(end, offset + last + 1);
  if (a.window_right >= 0) end = min(end, offset + last + a.window_right + 1);
  return {begin, max(end, 0)};
}

// A run of tiles of one item that one thread block computes.
struct Segment {
  Sequence sequence;
  int32_t kv_head;
  int32_t first_row, rows;        // packed rows of this row tile
  int32_t tile_begin, tile_end;   // of keys, counted from key 0
  KeyRange keys;                  // visible to any row of this tile; tiles outside are skipped
  int32_t first_piece, pieces;    // that the item is spread over
  int32_t piece;                  // this one
};

// The slot of piece p for an item. A piece of the line may have part of two: slot 2 * p is for the item in which the
// piece begins, 2 * p + 1 for the one in which it ends, which it is the first to have a part of.
__device__ inline int64_t slot_of(const AttentionLaunch& a, int32_t first_piece, int32_t piece) {
  return a.params.deterministic ? piece : 2 * int64_t(piece) + (piece == first_piece);
}

struct ScheduleMemory {
  uint32_t prefix[kMaxAttentionThreads];         // line steps before the sequences of a thread
  uint32_t sums[kMaxAttentionThreads / kWarp];
  int32_t units[kMaxUnits];                      // the n-th unit this block took: its piece, kOpen or kTaking
};

template <int kRows, int kKeys>
class Schedule {
 public:
  // A walk over this block's segments; every warp has its own, and all walks see the same. Steps of the line.
  struct Cursor {
    int32_t position, end, piece, taken;
  };

  // Called by all threads.
  __device__ Schedule(const AttentionLaunch& a, ScheduleMemory& memory) : a_(a), memory_(memory) {
    prefetch_table();
    for (int i = threadIdx.x; i < kMaxUnits; i += blockDim.x) memory_.units[i] = kOpen;
    per_thread_ = 1;
    if (a_.params.num_seqs > blockDim.x) per_thread_ = (uint32_t(a_.params.num_seqs) + blockDim.x - 1) / blockDim.x;
    total_ = scan();
    num_blocks_ = gridDim.x;
    dealt_ = total_;
    unit_ = 1;
    const int32_t warps = blockDim.x / kWarp;
    if (a_.params.deterministic) {
      dealt_ = 0;
      total_ = min(int64_t(total_), a_.workspace.max_pieces);  // more: cu_seqlens_q is no prefix sum
    } else if (total_ < warps * num_blocks_) {
      num_blocks_ = (total_ + warps - 1) / warps;  // a step for each warp
    } else if (total_ >= kStepsWorthAQueue * warps * num_blocks_) {
      dealt_ = total_ - total_ / 16 * 3;  // SMs differ by a tenth and more
      const int32_t units = min(num_blocks_ * kUnitsPerBlock, kMaxUnits);
      unit_ = max((total_ - dealt_ + units - 1) / units, 2 * warps);
    }
    share_ = num_blocks_ > 0 ? uint32_t(dealt_) / uint32_t(num_blocks_) : 0;
    larger_ = dealt_ - share_ * num_blocks_;
  }

  __device__ Cursor start() const {
    const int32_t block = blockIdx.x;
    if (a_.params.deterministic) return {block, total_, block, 0};
    if (block >= num_blocks_) return {0, 0, 0, 0};
    return {begin_of(block), begin_of(block + 1), block, 0};
  }

  // Moves the cursor past its next segment. False at the end of this block's work. Called by whole warps.
  __device__ bool next(Cursor& c, Segment& s) const {
    if (c.position >= c.end && !take(c)) return false;
    int32_t offset = c.position;
    const Work work = find(offset);
    const int32_t size = a_.params.deterministic ? work.pieces : work.steps;
    const int32_t item = uint32_t(offset) / uint32_t(size), first = offset - item * size;
    if (a_.params.deterministic) {
      const int32_t steps = (work.steps + work.pieces - 1) / work.pieces;
      place(s, work, item, first * steps, min(work.steps, (first + 1) * steps));
      s.piece = c.position;
      s.first_piece = s.piece - first;
      s.pieces = work.pieces;
      c.position += gridDim.x;
      return true;
    }
    const int32_t last = min(first + c.end - c.position, size);
    place(s, work, item, first, last);
    s.piece = c.piece;
    s.first_piece = first == 0 ? c.piece : piece_of(c.position - first);
    s.pieces = 1 - s.first_piece + (last == size ? c.piece : piece_of(c.position - first + size - 1));
    c.position += last - first;
    return true;
  }

 private:
  static constexpr int32_t kOpen = -1, kTaking = -2;
  static constexpr int32_t kStepsWorthAQueue = 8;  // per warp
  static constexpr uint32_t kMost = INT32_MAX;

  // One sequence's share of the line.
  struct Work {
    Sequence sequence;
    int32_t row_tiles, first_tile, tiles, steps, pieces;
  };

  __device__ Work work_of(int64_t index) const {
    Work w;
    w.sequence = sequence_at(a_.params, index);
    const int32_t rows = w.sequence.q_len * int32_t(a_.group.value);
    w.row_tiles = (rows + kRows - 1) / kRows;
    const KeyRange keys = visible_to_any(a_, w.sequence, 0, w.sequence.q_len - 1);
    w.first_tile = keys.begin / kKeys;
    w.tiles = max((keys.end + kKeys - 1) / kKeys - w.first_tile, 1);  // one at least: someone must write the zeros
    w.steps = (w.tiles + (1 << a_.log2_line_tiles) - 1) >> a_.log2_line_tiles;
    w.pieces = 1;
    if (a_.params.deterministic && rows <= kMaxSplitRows) {
      const int32_t wanted = min((w.tiles * kKeys + kPieceKeys - 1) / kPieceKeys, kPieces);
      const int32_t steps = (w.steps + wanted - 1) / wanted;
      w.pieces = (w.steps + steps - 1) / steps;  // none is empty
    }
    return w;
  }

  __device__ uint32_t size_of_work(const Work& w) const {
    const uint64_t size =
        uint64_t(uint32_t(a_.params.num_kv_heads) * uint32_t(w.row_tiles)) * uint32_t(a_.params.deterministic ? w.pieces : w.steps);
    return size < kMost ? uint32_t(size) : kMost;
  }

  // Sums stop at 2^31 - 1: reached only if cu_seqlens_q is no prefix sum, see log2_line_tiles.
  __device__ static uint32_t add(uint32_t a, uint32_t b) { return min(a + b, kMost); }

  // prefix[t] = work of the sequences before those of thread t. Returns the sum.
  __device__ int32_t scan() {
    uint32_t sum = 0;
#pragma unroll 1
    for (int32_t i = 0; i < per_thread_; ++i) {
      const int64_t index = int64_t(threadIdx.x) * per_thread_ + i;
      if (index < a_.params.num_seqs) sum = add(sum, size_of_work(work_of(index)));
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
    const int warps = blockDim.x / kWarp;
#pragma unroll
    for (int w = 0; w < kMaxAttentionThreads / kWarp; ++w) {
      const uint32_t part = w < warps ? memory_.sums[w] : 0;
      if (w < warp) before = add(before, part);
      total = add(total, part);
    }
    memory_.prefix[threadIdx.x] = add(before, inclusive) - sum;
    __syncthreads();
    return int32_t(total);
  }

  // The sequence that `offset` falls into; the offset becomes relative to it. Called by whole warps.
  __device__ Work find(int32_t& offset) const {
    const int lane = threadIdx.x % kWarp;
    int count = 0;
#pragma unroll
    for (int i = 0; i < kMaxAttentionThreads / kWarp; ++i) {
      const int thread = i * kWarp + lane;
      count += thread < blockDim.x && memory_.prefix[thread] <= uint32_t(offset);
    }
    const int thread = int(__reduce_add_sync(kFullMask, unsigned(count))) - 1;  // the last that begins before
    offset -= int32_t(memory_.prefix[thread]);
    int64_t index = int64_t(thread) * per_thread_;
#pragma unroll 1
    while (true) {
      const Work work = work_of(index);
      const uint32_t size = size_of_work(work);
      if (uint32_t(offset) < size || per_thread_ == 1) return work;
      offset -= int32_t(size);
      ++index;
    }
  }

  // Where dealt piece `block` begins on the line: the first `larger_` pieces have a step more.
  __device__ int32_t begin_of(int32_t block) const { return block * share_ + min(block, larger_); }

  __device__ int32_t piece_of(int32_t position) const {
    if (position >= dealt_) return num_blocks_ + (position - dealt_) / unit_;
    const int32_t border = larger_ * (share_ + 1);
    return position < border ? position / (share_ + 1) : larger_ + (position - border) / share_;
  }

  // Puts the cursor on the next unit of the queue. The first warp of the block to ask takes it for all.
  __device__ bool take(Cursor& c) const {
    if (a_.params.deterministic || dealt_ == total_) return false;
    int32_t piece = 0;
    if (threadIdx.x % kWarp == 0) {
      volatile int32_t* unit = &memory_.units[min(c.taken, kMaxUnits - 1)];
      if (atomicCAS(const_cast<int32_t*>(unit), kOpen, kTaking) == kOpen) {
        wait_for_predecessor();
        *unit = num_blocks_ + int32_t(min(atomicAdd(a_.workspace.queue, 1u), uint32_t(kMaxUnits)));
      }
      do piece = *unit;
      while (piece < 0);
    }
    piece = __shfl_sync(kFullMask, piece, 0);
    ++c.taken;
    const int64_t begin = dealt_ + int64_t(piece - num_blocks_) * unit_;
    if (begin >= total_) return false;
    c.position = int32_t(begin);
    c.end = int32_t(min(begin + unit_, int64_t(total_)));
    c.piece = piece;
    return true;
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

  // While the lengths are on their way: all blocks together bring the table near, if it is small.
  __device__ void prefetch_table() const {
    constexpr int64_t kLine = 32;  // entries
    const AttentionParams& p = a_.params;
    const int64_t lines = (p.num_seqs * p.block_table_stride + kLine - 1) / kLine;
    if (lines > 32 * gridDim.x || p.block_table_stride < p.max_blocks) return;
    const int64_t line = int64_t(threadIdx.x) * gridDim.x + blockIdx.x;
    const int64_t end = (p.num_seqs - 1) * p.block_table_stride + p.max_blocks;
    if (line * kLine < end) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.block_table + line * kLine));
  }

  const AttentionLaunch& a_;
  ScheduleMemory& memory_;
  int32_t total_, dealt_, unit_;  // steps: of the line, of the pieces dealt out from the start, of a unit of the queue
  int32_t share_, larger_;        // steps of a dealt piece; how many pieces have one more
  int32_t per_thread_, num_blocks_;
};

}  // namespace paged_kv::cuda
