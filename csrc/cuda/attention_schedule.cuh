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

struct AttentionLaunch {
  AttentionParams params;
  Workspace workspace;
  int32_t window_left, window_right;  // clipped to 2^30
  int32_t group;                      // query heads per kv head
  int32_t log2_block_size;            // -1: no power of two
};

// value / divisor for non-negative values; a 64-bit division costs some hundred instructions, a 32-bit one twenty.
__device__ __noinline__ inline int64_t divide_long(int64_t value, int64_t divisor) { return value / divisor; }

__device__ inline int64_t divide(int64_t value, int64_t divisor) {
  if ((uint64_t(value) | uint64_t(divisor)) >> 32 == 0) return uint32_t(value) / uint32_t(divisor);
  return divide_long(value, divisor);
}

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
  int64_t prefix[kMaxAttentionThreads + 1];
  int64_t sums[kMaxAttentionThreads / kWarp];
  int32_t units[kMaxUnits];  // the n-th unit this block took: its piece, kOpen or kTaking
};

template <int kRows, int kKeys>
class Schedule {
 public:
  // A walk over this block's segments; every warp has its own, and all walks see the same.
  struct Cursor {
    int64_t position, end;
    int32_t piece, taken;
  };

  // Called by all threads.
  __device__ Schedule(const AttentionLaunch& a, ScheduleMemory& memory)
      : a_(a), memory_(memory), per_thread_(int32_t(divide(a.params.num_seqs + blockDim.x - 1, blockDim.x))) {
    for (int i = threadIdx.x; i < kMaxUnits; i += blockDim.x) memory_.units[i] = kOpen;
    scan();
    total_ = memory_.prefix[blockDim.x];
    const int32_t warps = blockDim.x / kWarp;
    const int64_t tiles_per_block = divide(total_, gridDim.x);
    if (a_.params.deterministic) {
      num_blocks_ = gridDim.x;
      if (total_ > a_.workspace.max_pieces) total_ = a_.workspace.max_pieces;  // cu_seqlens_q is no prefix sum
      dealt_ = 0;
    } else if (tiles_per_block < warps * kTilesWorthAQueue) {
      const int64_t blocks = divide(total_ + warps - 1, warps);  // a tile for each warp
      num_blocks_ = blocks < gridDim.x ? int32_t(blocks) : gridDim.x;
      dealt_ = total_;
      unit_ = 1;
    } else {
      num_blocks_ = gridDim.x;
      dealt_ = total_ - total_ / 16 * 3;  // SMs differ by a tenth and more
      const int64_t units = min(int64_t(gridDim.x) * kUnitsPerBlock, int64_t(kMaxUnits));
      unit_ = max(divide(total_ - dealt_ + units - 1, units), int64_t(2 * warps));
    }
  }

  __device__ Cursor start() const {
    if (a_.params.deterministic) return {blockIdx.x, total_, int32_t(blockIdx.x), 0};
    if (int32_t(blockIdx.x) >= num_blocks_) return {0, 0, 0, 0};
    return {begin_of(blockIdx.x), begin_of(blockIdx.x + 1), int32_t(blockIdx.x), 0};
  }

  // Moves the cursor past its next segment. False at the end of this block's work. Called by whole warps.
  __device__ bool next(Cursor& c, Segment& s) const {
    if (c.position >= c.end && !take(c)) return false;
    int64_t offset = c.position;
    const Work work = find(offset);
    if (a_.params.deterministic) {
      const int64_t item = divide(offset, work.pieces);
      const int32_t piece = int32_t(offset - item * work.pieces);
      const int32_t tiles = (work.tiles + work.pieces - 1) / work.pieces;
      place(s, work, item, piece * tiles, min(work.tiles, (piece + 1) * tiles));
      s.piece = int32_t(c.position);
      s.first_piece = s.piece - piece;
      s.pieces = work.pieces;
      c.position += gridDim.x;
      return true;
    }
    const int64_t item = divide(offset, work.tiles);
    const int32_t first = int32_t(offset - item * work.tiles);
    const int64_t left = c.end - c.position;
    const int32_t last = left < work.tiles - first ? first + int32_t(left) : work.tiles;
    place(s, work, item, first, last);
    s.piece = c.piece;
    s.first_piece = first == 0 ? c.piece : piece_of(c.position - first);
    const int32_t last_piece = last == work.tiles ? c.piece : piece_of(c.position - first + work.tiles - 1);
    s.pieces = last_piece - s.first_piece + 1;
    c.position += last - first;
    return true;
  }

 private:
  static constexpr int32_t kOpen = -1, kTaking = -2;
  static constexpr int kTilesWorthAQueue = 8;  // tiles per warp from which on a queue pays

  // One sequence's share of the line.
  struct Work {
    Sequence sequence;
    int32_t row_tiles, first_tile, tiles, pieces;
  };

  __device__ Work work_of(int64_t index) const {
    Work w;
    w.sequence = sequence_at(a_.params, index);
    const int64_t rows = int64_t(w.sequence.q_len) * a_.group;
    w.row_tiles = int32_t((rows + kRows - 1) / kRows);
    const KeyRange keys = visible_to_any(a_, w.sequence, 0, w.sequence.q_len - 1);
    w.first_tile = keys.begin / kKeys;
    w.tiles = max((keys.end + kKeys - 1) / kKeys - w.first_tile, 1);  // one at least: someone must write the zeros
    w.pieces = 1;
    if (a_.params.deterministic && rows <= kMaxSplitRows) {
      const int32_t wanted = min((w.tiles * kKeys + kPieceKeys - 1) / kPieceKeys, kPieces);
      const int32_t tiles_per_piece = (w.tiles + wanted - 1) / wanted;
      w.pieces = (w.tiles + tiles_per_piece - 1) / tiles_per_piece;  // none is empty
    }
    return w;
  }

  __device__ int64_t size_of_work(const Work& w) const {
    return a_.params.num_kv_heads * w.row_tiles * (a_.params.deterministic ? w.pieces : w.tiles);
  }

  // prefix[t] = work of the sequences before those of thread t.
  __device__ void scan() {
    int64_t sum = 0;
#pragma unroll 1
    for (int32_t i = 0; i < per_thread_; ++i) {
      const int64_t index = int64_t(threadIdx.x) * per_thread_ + i;
      if (index < a_.params.num_seqs) sum += size_of_work(work_of(index));
    }
    int64_t inclusive = sum;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int64_t other = __shfl_up_sync(kFullMask, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    if (lane == kWarp - 1) memory_.sums[warp] = inclusive;
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < warp; ++w) inclusive += memory_.sums[w];
    memory_.prefix[threadIdx.x + 1] = inclusive;
    if (threadIdx.x == 0) memory_.prefix[0] = 0;
    __syncthreads();
  }

  // The sequence that `offset` falls into; the offset becomes relative to it.
  __device__ Work find(int64_t& offset) const {
    int low = 0, high = blockDim.x;  // prefix[low] <= offset < prefix[high]
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (memory_.prefix[middle] <= offset) low = middle;
      else high = middle;
    }
    offset -= memory_.prefix[low];
    int64_t index = int64_t(low) * per_thread_;
#pragma unroll 1
    while (true) {
      const Work work = work_of(index);
      const int64_t size = size_of_work(work);
      if (offset < size) return work;
      offset -= size;
      ++index;
    }
  }

  // Where dealt piece `block` begins on the line.
  __device__ int64_t begin_of(int64_t block) const { return divide(dealt_ * block, num_blocks_); }

  __device__ int32_t piece_of(int64_t position) const {
    if (position < dealt_) return int32_t(divide((position + 1) * num_blocks_ - 1, dealt_));
    return num_blocks_ + int32_t(divide(position - dealt_, unit_));
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
    const int64_t begin = dealt_ + (piece - num_blocks_) * unit_;
    if (begin >= total_) return false;
    c.position = begin;
    c.end = begin + unit_ < total_ ? begin + unit_ : total_;
    c.piece = piece;
    return true;
  }

  // Items of a sequence: kv head after kv head, its row tiles side by side (they read the same keys).
  __device__ void place(Segment& s, const Work& work, int64_t item, int32_t begin, int32_t end) const {
    s.sequence = work.sequence;
    s.kv_head = int32_t(divide(item, work.row_tiles));
    s.first_row = int32_t(item - int64_t(s.kv_head) * work.row_tiles) * kRows;
    s.rows = min(work.sequence.q_len * a_.group - s.first_row, kRows);
    s.tile_begin = work.first_tile + begin;
    s.tile_end = work.first_tile + end;
    s.keys = visible_to_any(a_, work.sequence, s.first_row / a_.group, (s.first_row + s.rows - 1) / a_.group);
  }

  const AttentionLaunch& a_;
  ScheduleMemory& memory_;
  int64_t total_, dealt_, unit_;  // tiles: of the line, of the pieces dealt out from the start, of a unit of the queue
  int32_t per_thread_, num_blocks_;
};

}  // namespace paged_kv::cuda
