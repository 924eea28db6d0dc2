// Loads of the tensor-core attention kernel: the shape of its tiles and stages, and the walk of a warp over its tiles.
#pragma once

#include <type_traits>

#include "attention_formats.cuh"
#include "attention_schedule.cuh"

namespace paged_kv::cuda::mma {

inline constexpr int kKeys = 16;  // of a tile

// Sizes that follow from the cache's elements, the head-size class and the number of 8-row tiles of an item. Queries live
// in registers, where they fit beside the sums. The number of warps is a matter of shared memory: of run time.
template <class Format, int kHeadSize, int kTiles>
struct Shape {
  static constexpr int kRows = kTiles * 8;
  static constexpr int kMaxWarps = mma_max_warps(kHeadSize);
  static constexpr int kRowBytes = kHeadSize * Format::kBytes;
  static constexpr int kStageBytes = kKeys * kRowBytes * 2;  // K rows, then V rows
  static constexpr int kBlocksOfSm = mma_blocks_of_sm(Format::kBytes, kRows);
  static constexpr int kWarpBytes = mma_warp_bytes(kHeadSize, kBlocksOfSm);
  static constexpr int kStages = kWarpBytes / kStageBytes;  // of a warp
  static constexpr int kAtOnce =
      Format::kBytes == 1 && kTiles == 1 ? 2 : 1;  // tiles: chains that do not wait for each other
  static_assert(kStages % kAtOnce == 0);
  static constexpr int kRowsPerMerge = kStageBytes / (kHeadSize * 4);  // rows of float results a stage has room for
  static constexpr bool kQueriesInShared = Format::kBytes == 2 && kHeadSize * kTiles >= 512;
  static constexpr int kQueryBytes = kQueriesInShared ? kRows * kHeadSize * 2 : 0;
};

// What is known of a tile in a stage: a bit for each key that some row sees; scales of K, then of V, where each slot
// has its own.
template <class Format, int kBytes = Format::kBytes>
struct TileNotes {
  uint32_t visible;
  float scales[2][kKeys];
};

template <class Format>
struct TileNotes<Format, 2> {
  uint32_t visible;
};

__device__ inline int num_warps() { return blockDim.x / kWarp; }

__device__ inline bool has_slot_scales(const AttentionParams& p) {
  return has_slot_scales(p.key_cache) || has_slot_scales(p.value_cache);
}

// The value, to the compiler a number from nowhere: it keeps it in a register and does not compute it anew at each use.
__device__ inline uint32_t kept(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Copies a tile of which not all keys are there, or whose keys lie in several blocks. Lane l knows where key l % 16 is.
template <int kRowBytes, int kElementBytes>
__device__ __noinline__ void copy_scattered_rows(const NarrowCache& cache, int32_t kv_head, int32_t block,
                                                 int32_t offset, uint32_t visible, uint32_t target) {
  constexpr int kChunks = kRowBytes / 16, kRowsAtOnce = kWarp / kChunks;
  const int lane = threadIdx.x % kWarp, chunk = lane % kChunks;
  const bool in_row = chunk * 16 < cache.head_size * kElementBytes;
  const char* base = cache.data + kv_head * cache.head_bytes + 16 * chunk;
  const int64_t own = int64_t(block) * cache.block_bytes + uint32_t(offset) * cache.slot_bytes;
#pragma unroll 1
  for (int row = lane / kChunks; row < kKeys; row += kRowsAtOnce) {
    const int64_t bytes = __shfl_sync(kFullMask, own, row);
    const bool valid = in_row && (visible >> row & 1);
    copy_async(target + swizzled<kRowBytes>(row, chunk), valid ? base + bytes : cache.data, valid, streaming_policy());
  }
}

// Walks over the tiles of one warp, through all segments of its thread block, and loads them. Where tiles do not cross
// blocks, a warp reads its next 32 table entries at once and far ahead: a load that waited for its own table entry
// would also wait for all loads issued before.
template <class Format, int kHeadSize, int kTiles, bool kDeterministic>
class Loader {
 public:
  using S = Shape<Format, kHeadSize, kTiles>;
  using Notes = TileNotes<Format>;
  using Planned = Schedule<S::kRows, kKeys, kDeterministic>;

  __device__ Loader(const AttentionLaunch& a, const Planned& schedule) : a_(a), schedule_(schedule) {
    lane_target_ = kept(swizzled<kRowBytes>(lane() / kChunks, lane() % kChunks));
    key_in_row_ = lane() % kChunks * 16 < a.key_cache.head_size * Format::kBytes;
    value_in_row_ = lane() % kChunks * 16 < a.value_cache.head_size * Format::kBytes;
    whole_blocks_ = a.block_size.value % kKeys == 0;
    plain_ = whole_blocks_ && a.key_cache.slot_bytes == kRowBytes && a.value_cache.slot_bytes == kRowBytes;
    slot_scales_ = has_slot_scales(a.params);
  }

  // Begins with segment `s`, which the schedule has given and moved past.
  __device__ void begin(const Segment& s, int32_t position) {
    position_ = position;
    done_ = false;
    if (!enter(s)) next_segment();
  }

  // Loads the next tile (if any is left) into a stage, and notes what is there.
  __device__ void load(uint32_t stage, Notes& notes) {
    if (!done_) {
      if (tile_ < last_) {
        copy(stage, notes);
      } else {
        copy_nothing(stage, notes);
      }
      tile_ += num_warps();
      odd_ = S::kAtOnce > 1 && !odd_;
      if (tile_ >= last_ && !odd_) next_segment();
    }
    commit_copies();
  }

  // Tiles of a segment go to the warps in turn, counted from the segment's begin; those no row sees are left out.
  __device__ static int32_t first_tile(const Segment& s) {
    const int32_t skipped = s.keys.begin / kKeys - s.tile_begin, first = threadIdx.x / kWarp;
    if (skipped <= first) return s.tile_begin + first;
    return s.tile_begin + first + (skipped - first + num_warps() - 1) / num_warps() * num_warps();
  }

  __device__ static int32_t end_tile(const Segment& s) {
    const int32_t visible = s.keys.end > s.keys.begin ? (s.keys.end + kKeys - 1) / kKeys : s.tile_begin;
    return min(visible, s.tile_end);
  }

 private:
  static constexpr int kRowBytes = S::kRowBytes;
  static constexpr int kChunks = kRowBytes / 16;  // 16-byte chunks of a row
  static constexpr int kRowsAtOnce = kWarp / kChunks;  // rows that one instruction of the warp loads

  __device__ static int lane() { return threadIdx.x % kWarp; }

  // The next segment in which this warp has a tile.
  __device__ void next_segment() {
    Segment s;
    while (schedule_.next(position_, s))
      if (enter(s)) return;
    done_ = true;
  }

  __device__ bool enter(const Segment& s) {
    tile_ = first_tile(s);
    last_ = end_tile(s);
    if (tile_ >= last_) return false;
    keys_ = s.keys;
    kv_head_ = s.kv_head;
    table_ = a_.block_table + s.sequence.index * a_.table_stride;
    entry_ = 0;
    if (whole_blocks_) {
      entries_ = read_entries(tile_);
      if (last_ - tile_ > kWarp * num_warps()) next_entries_ = read_entries(tile_ + kWarp * num_warps());
    }
    key_lane_ = lane_offset(a_.key_cache);
    value_lane_ = lane_offset(a_.value_cache);
    return true;
  }

  // Table entries of this warp's 32 tiles from `tile` on, one a lane.
  __device__ int32_t read_entries(int32_t tile) const {
    tile += lane() * num_warps();
    return tile < last_ ? table_[column_of(tile * kKeys)] : -1;
  }

  __device__ int32_t column_of(int32_t key) const { return a_.block_size.divide(key); }

  // Of a key in its block.
  __device__ int32_t slot_of(int32_t key) const { return key - column_of(key) * int32_t(a_.block_size.value); }

  // The table entry of the coming tile, where tiles do not cross blocks.
  __device__ int32_t next_entry() {
    const int32_t block = __shfl_sync(kFullMask, entries_, entry_);
    if (++entry_ == kWarp) {
      entry_ = 0;
      entries_ = next_entries_;
      const int32_t ahead = tile_ + (kWarp + 1) * num_warps();
      if (ahead < last_) next_entries_ = read_entries(ahead);
    }
    return block;
  }

  // This lane's chunk of its first row, in bytes from the block's begin, were the tile at the block's begin.
  __device__ uint32_t lane_offset(const NarrowCache& cache) const {
    return kv_head_ * cache.head_bytes + lane() / kChunks * cache.slot_bytes + lane() % kChunks * 16;
  }

  __device__ bool is_mapped(int32_t block) const { return uint32_t(block) < uint32_t(a_.num_blocks); }

  // The tile that makes the number of a segment's even: no key of it is there.
  __device__ void copy_nothing(uint32_t stage, Notes& notes) {
    if (lane() == 0) notes.visible = 0;
    copy_scales(0, 0, false, notes);
    copy_scattered_rows<kRowBytes, Format::kBytes>(a_.key_cache, kv_head_, 0, 0, 0, stage);
    copy_scattered_rows<kRowBytes, Format::kBytes>(a_.value_cache, kv_head_, 0, 0, 0, stage + S::kStageBytes / 2);
  }

  // Nearly all tiles take one branch here: each more costs the warp as much as copying a row.
  __device__ void copy(uint32_t stage, Notes& notes) {
    const int32_t first = tile_ * kKeys, block = next_entry(), slot = slot_of(first);
    const bool whole = is_mapped(block) && first >= keys_.begin && first + kKeys <= keys_.end;
    if (plain_ && whole) {
      // With rows side by side, as in a pool that the library made, all addresses are constants away from the first.
      constexpr std::integral_constant<uint32_t, kRowsAtOnce * kRowBytes> step;
      copy_whole(step, step, block, slot, stage, notes);
    } else if (!whole_blocks_) {
      copy_across_blocks(stage, notes);
    } else if (whole) {
      copy_whole(kRowsAtOnce * a_.key_cache.slot_bytes, kRowsAtOnce * a_.value_cache.slot_bytes, block, slot, stage,
                 notes);
    } else {
      copy_scattered(block, slot + lane() % kKeys, stage, notes);
    }
  }

  // A tile of one block, of which all keys are there. The steps are those of copy_rows.
  template <class Step>
  __device__ void copy_whole(Step key_step, Step value_step, int32_t block, int32_t slot, uint32_t stage,
                             Notes& notes) const {
    if (lane() == 0) notes.visible = 0xffff;
    copy_scales(block, slot + lane() % kKeys, true, notes);
    copy_rows(a_.key_cache, key_lane_, key_step, key_in_row_, block, slot, stage);
    copy_rows(a_.value_cache, value_lane_, value_step, value_in_row_, block, slot, stage + S::kStageBytes / 2);
  }

  __device__ void copy_across_blocks(uint32_t stage, Notes& notes) {
    const int32_t key = tile_ * kKeys + lane() % kKeys;
    const int32_t block = key >= keys_.begin && key < keys_.end ? table_[column_of(key)] : -1;
    copy_scattered(block, slot_of(key), stage, notes);
  }

  // Lane l says where key l % 16 of the tile lies.
  __device__ void copy_scattered(int32_t block, int32_t offset, uint32_t stage, Notes& notes) {
    const int32_t key = tile_ * kKeys + lane() % kKeys;
    const bool seen = is_mapped(block) && key >= keys_.begin && key < keys_.end;
    const uint32_t bits = __ballot_sync(kFullMask, seen) & 0xffff;
    if (lane() == 0) notes.visible = bits;
    copy_scales(block, offset, seen, notes);
    const auto copy_rows_of = copy_scattered_rows<kRowBytes, Format::kBytes>;
    copy_rows_of(a_.key_cache, kv_head_, block, offset, bits, stage);
    copy_rows_of(a_.value_cache, kv_head_, block, offset, bits, stage + S::kStageBytes / 2);
  }

  // Scales of the slots, where each has its own: lanes 0-15 those of K, lanes 16-31 those of V. 0 where nothing is seen.
  __device__ void copy_scales(int32_t block, int32_t offset, bool seen, Notes& notes) const {
    if constexpr (Format::kBytes == 1) {
      if (!slot_scales_) return;
      const Scale& scale = lane() < kKeys ? a_.params.key_cache.scale : a_.params.value_cache.scale;
      if (scale.kind != ScaleKind::per_slot) return;
      const float* source = scale.data;
      if (seen) source += block * scale.block_stride + offset * scale.slot_stride + kv_head_ * scale.head_stride;
      copy_word_async(shared_address(&notes.scales[lane() / kKeys][lane() % kKeys]), source, seen);
    }
  }

  // All 16 rows lie in one block; `step` is the distance of those that a lane copies, in bytes.
  template <class Step>
  __device__ void copy_rows(const NarrowCache& cache, uint32_t lane_offset, Step step, bool in_row, int32_t block,
                            int32_t slot, uint32_t target) const {
    const char* row = cache.data + uint64_t(uint32_t(block)) * cache.block_bytes + lane_offset;
    row += uint32_t(slot) * cache.slot_bytes;
    target += lane_target_;
#pragma unroll
    for (int i = 0; i < kKeys / kRowsAtOnce; ++i)
      copy_async((target ^ ((i * kRowsAtOnce & 7) << 4)) + i * kRowsAtOnce * kRowBytes, row + uint64_t(i) * step,
                 in_row, policy_);
  }

  const AttentionLaunch& a_;
  const Planned& schedule_;
  int32_t position_ = 0;
  const int32_t* table_ = nullptr;
  uint32_t key_lane_ = 0, value_lane_ = 0;
  KeyRange keys_{};
  int32_t kv_head_ = 0, tile_ = 0, last_ = 0;
  int32_t entries_ = -1, next_entries_ = -1, entry_ = 0;
  uint32_t lane_target_;
  uint64_t policy_ = streaming_policy();
  bool done_ = true, odd_ = false, whole_blocks_, plain_, slot_scales_, key_in_row_, value_in_row_;
};

}  // namespace paged_kv::cuda::mma
