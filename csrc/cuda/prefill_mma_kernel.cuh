// The prefill kernel of every chip: mma.sync, float16 and bfloat16 queries, head sizes up to 256, any block size, caches
// of the queries' dtype or of 8 bits. docs/kernels/prefill_mma.md.
//
// Thread blocks stay and take units from the counter of the schedule. A block holds the queries of its rows in shared
// memory, and one tile of keys and one of values, each on its way while the other is multiplied. A warp has 16 packed rows,
// or 32 that share what it reads of the tiles. Several blocks an SM work under each other's barriers. Tiles of 8 bits are
// copied ahead, both, and become tiles of the queries' dtype before the products, a fifth of the time.
#pragma once

#include "attention_formats.cuh"
#include "prefill_rows.cuh"

namespace paged_kv::cuda::prefill::mma_sync {

using mma::copy_async;
using mma::Fragment;
using mma::has_slot_scales;
using mma::shared_address;
using mma::static_scale;
using mma::swizzled;

template <int kHeadSize, bool kEightBit>
struct Shape {
  static constexpr int kWarps = 4, kThreads = kWarps * kWarp;
  static constexpr int kGroups = kHeadSize == 256 ? 1 : 2;  // of 64 rows: a warp has 16 of each
  static constexpr int kKeys = keys_of(kHeadSize);  // of a tile
  static constexpr int kBlocksOfSm = blocks_of_sm(kHeadSize);  // that registers leave room for
  static constexpr int kRowBytes = 2 * kHeadSize, kChunks = kHeadSize / 8;
  static constexpr int kTileBytes = kKeys * kRowBytes, kQueryBytes = 64 * kGroups * kRowBytes;
  // Rows of a cache that are copied: chunks of 16 bytes of one, rows that all threads copy at once, that one does in all.
  static constexpr int kElementBytes = kEightBit ? 1 : 2, kCopyChunks = kHeadSize * kElementBytes / 16;
  static constexpr int kRowsAtOnce = kThreads / kCopyChunks, kRowsOfThread = kKeys / kRowsAtOnce;
  static constexpr int kRawBytes = kEightBit ? kKeys * kHeadSize : 0;  // a tile as it was stored
  static constexpr int kSharedBytes = kQueryBytes + 2 * kTileBytes + 2 * kRawBytes;
  static_assert(64 * kGroups == rows_of(kHeadSize));
};

inline constexpr uint32_t kNowhere = UINT32_MAX;

// Where the keys of a tile lie, for the tile that is copied and the one before it: units from the begin of a cache, or
// kNowhere if no row sees a key. What one thread copies stands side by side.
template <int kKeys, bool kEightBit>
struct alignas(16) Places {
  uint32_t keys[2][kKeys], values[2][kKeys];
  uint32_t there[2][kKeys / kWarp];  // a bit for each key that has a place
  float key_scales[2][kEightBit ? kKeys : 1], value_scales[2][kEightBit ? kKeys : 1];
};

// A key and its value: where they lie, their scales.
struct Found {
  uint32_t key = kNowhere, value = kNowhere;
  float key_scale = 1.0f, value_scale = 1.0f;
};

__device__ inline float scale_at(const Scale& s, int64_t block, int64_t slot, int64_t head) {
  if (s.kind == ScaleKind::none) return 1.0f;
  return s.data[block * s.block_stride + slot * s.slot_stride + head * s.head_stride];
}

__device__ inline uint4 load_chunk(uint32_t address) {
  uint4 chunk;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "r"(address)
               : "memory");
  return chunk;
}

__device__ inline void store_chunk(uint32_t address, const uint32_t* words) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

template <class T, int kHeadSize, bool kSoftcap, bool kEightBit>
class Worker {
 public:
  using S = Shape<kHeadSize, kEightBit>;
  static constexpr int kScores = S::kKeys / 2, kOut = kHeadSize / 2;  // registers of a group of rows

  __device__ Worker(const Launch& a, Places<S::kKeys, kEightBit>& places, uint32_t queries)
      : a_(a), places_(places), queries_(queries), keys_(queries + S::kQueryBytes), values_(keys_ + S::kTileBytes) {}

  // Called by all threads, behind a barrier after the item before.
  __device__ void attend(const Item& item) {
    const Tile& tile = item.tile;
    const int first = first_tile<S::kKeys>(tile);
    int number = last_tile<S::kKeys>(tile), slot = 0;
    scale_ = a_.params.scale;
    float value_scale = 1.0f;
    if constexpr (kEightBit) {
      const Cache &keys = a_.params.key_cache, &values = a_.params.value_cache;
      const float key_scale = static_scale(keys, item.kv_head);
      scales_by_key_ = has_slot_scales(keys) || !(key_scale > 0.0f);  // a base follows the largest of raw scores
      if (!scales_by_key_) scale_ *= key_scale;
      value_scale = static_scale(values, item.kv_head);
    }
    keep(look_up(item, number), slot);
    copy_queries(item);
    __syncthreads();
    copy_keys(slot);
    if constexpr (kEightBit) copy_values(slot);
    mma::commit_copies();
    Softmax softmax[S::kGroups];
    float out[S::kGroups][kOut] = {};
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) softmax[g].begin();
    const float factor = (kSoftcap ? a_.params.softcap : scale_) * kLog2e;
    // Keys that all rows see: that of the first and the last row do.
    const int32_t offset = tile.seq_len - tile.q_len, last_row = tile.first_row + tile.rows - 1;
    const int32_t all_begin = visible_begin(a_, offset + last_row / a_.group);
    const int32_t all_end = visible_end(a_, offset + tile.first_row / a_.group, tile.seq_len);
#pragma unroll 1
    for (; number >= first; --number, slot ^= 1) {
      const bool more = number > first;
      float scores[S::kGroups][kScores] = {};
      if constexpr (kEightBit)
        score_eight_bit(scores, item, number, slot, more);
      else
        score(scores, item, number, slot, more);
      const int32_t first_key = number * S::kKeys;
      const bool whole = all_there(slot) && first_key >= all_begin && first_key + S::kKeys <= all_end;
      uint32_t weights[S::kGroups][S::kKeys / 16][4];
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        to_logits(scores[g], item, g, first_key, whole, slot);
        softmax[g].follow(scores[g], factor);
        if (softmax[g].shrinks) {
#pragma unroll
          for (int i = 0; i < kOut; ++i) out[g][i] *= softmax[g].shrink[i / 2 % 2];
        }
        softmax[g].weigh(scores[g], factor);
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i)
          weights[g][i / 4][i % 4] = pack(scores[g][2 * i], scores[g][2 * i + 1], T{});
      }
      multiply_values(out, weights);
    }
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      softmax[g].finish();
      if constexpr (kEightBit) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) out[g][i] *= value_scale;
      }
      if (tile.num_parts > 1)
        store_part<kHeadSize>(a_, out[g], softmax[g], tile, item.kv_head, g * 64, factor);
      else
        store_rows<T, kHeadSize>(a_, out[g], softmax[g], rows_of_thread(a_, tile, item.kv_head, g * 64), factor);
    }
  }

 private:
  // The scores of a tile whose keys are on their way; its values and the next tile's keys go on theirs.
  __device__ void score(float (&scores)[S::kGroups][kScores], const Item& item, int number, int slot, bool more) {
    const Found next = more ? look_up(item, number - 1) : Found{};  // on its way under the product
    mma::wait_for_copies<0>();
    __syncthreads();  // the keys are there; the values before are used up
    copy_values(slot);
    mma::commit_copies();
    multiply_keys(scores);
    keep(next, slot ^ 1);
    mma::wait_for_copies<0>();
    __syncthreads();  // the values are there; the keys are used up; the next places are known
    if (more) copy_keys(slot ^ 1);
    mma::commit_copies();
  }

  // The same where keys and values are both on their way, of 8 bits.
  __device__ void score_eight_bit(float (&scores)[S::kGroups][kScores], const Item& item, int number, int slot,
                                  bool more) {
    const Found next = more ? look_up(item, number - 1) : Found{};
    mma::wait_for_copies<0>();
    __syncthreads();  // the tiles before are used up; what this thread copied is there, and it alone reads that
    switch (a_.params.key_cache.dtype) {
      case DType::float8_e4m3fn: expand<mma::E4M3>(slot); break;
      case DType::float8_e5m2: expand<mma::E5M2>(slot); break;
      default: expand<mma::Int8>(slot);
    }
    keep(next, slot ^ 1);
    __syncthreads();  // the tiles are there; the next places are known
    if (more) {
      copy_keys(slot ^ 1);
      copy_values(slot ^ 1);
    }
    mma::commit_copies();
    multiply_keys(scores);
    if (!scales_by_key_) return;
    const float* scales = places_.key_scales[slot] + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g)
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[g][i] *= scales[i / 4 * 8 + i % 2];
  }

  template <class Format>
  __device__ void expand(int slot) const {
    expand_rows<Format, false>(copied_keys(), keys_, nullptr);
    if (has_slot_scales(a_.params.value_cache))
      expand_rows<Format, true>(copied_values(), values_, places_.value_scales[slot]);
    else
      expand_rows<Format, false>(copied_values(), values_, nullptr);
  }

  // The chunks that this thread copied, as operands.
  template <class Format, bool kScaled>
  __device__ void expand_rows(uint32_t source, uint32_t target, const float* scales) const {
    const int chunk = threadIdx.x % S::kCopyChunks, first = threadIdx.x / S::kCopyChunks;
#pragma unroll 2
    for (int i = 0; i < S::kRowsOfThread; ++i) {
      const int row = first + i * S::kRowsAtOnce;
      const uint4 raw = load_chunk(source + row * kHeadSize + chunk * 16);
      const float scale = kScaled ? scales[row] : 1.0f;
      const uint32_t stored[4] = {raw.x, raw.y, raw.z, raw.w};
      uint32_t words[8];
#pragma unroll
      for (int w = 0; w < 4; ++w) Format::template expand<0, 1, 2, 3>(stored[w], words[2 * w], words[2 * w + 1]);
#pragma unroll
      for (int w = 0; w < 8; ++w) words[w] = operand<kScaled>(words[w], scale);
      store_chunk(target + swizzled<S::kRowBytes>(row, 2 * chunk), words);
      store_chunk(target + swizzled<S::kRowBytes>(row, 2 * chunk + 1), words + 4);
    }
  }

  // Two float16s as an operand of the products.
  template <bool kScaled>
  __device__ static uint32_t operand(uint32_t halves, float scale) {
    if (!kScaled && std::is_same<T, Float16>::value) return halves;
    float low, high;
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
        : "=f"(low), "=f"(high)
        : "r"(halves));
    return kScaled ? pack(low * scale, high * scale, T{}) : pack(low, high, T{});
  }

  // Key threadIdx.x of a tile and its value. Its block is looked up once for both.
  __device__ Found look_up(const Item& item, int number) const {
    const Tile& tile = item.tile;
    Found found;
    const int32_t key = number * S::kKeys + int32_t(threadIdx.x);
    if (int(threadIdx.x) >= S::kKeys || key < tile.keys_begin || key >= tile.keys_end) return found;
    const int32_t column = a_.block_size.divide(key);
    const uint32_t block = a_.params.block_table[tile.sequence * a_.params.block_table_stride + column];
    if (block >= uint32_t(a_.params.num_blocks)) return found;
    const uint32_t row = key - column * a_.block_size.value, head = item.kv_head;
    const auto place = [&](const RowPlaces& p) { return block * p.block + row * p.slot + head * p.head; };
    found.key = place(a_.key_places);
    found.value = place(a_.value_places);
    if constexpr (kEightBit) {
      if (scales_by_key_) found.key_scale = scale_at(a_.params.key_cache.scale, block, row, head);
      if (has_slot_scales(a_.params.value_cache))
        found.value_scale = scale_at(a_.params.value_cache.scale, block, row, head);
    }
    return found;
  }

  __device__ void keep(const Found& found, int slot) {
    const int key = threadIdx.x;
    if (key >= S::kKeys) return;
    const int position = key % S::kRowsAtOnce * S::kRowsOfThread + key / S::kRowsAtOnce;
    places_.keys[slot][position] = found.key;
    places_.values[slot][position] = found.value;
    if constexpr (kEightBit) {
      places_.key_scales[slot][key] = found.key_scale;
      places_.value_scales[slot][key] = found.value_scale;
    }
    const uint32_t there = __ballot_sync(kFullMask, found.key != kNowhere);
    if (key % kWarp == 0) places_.there[slot][key / kWarp] = there;
  }

  __device__ bool all_there(int slot) const {
    uint32_t all = kFullMask;
#pragma unroll
    for (int i = 0; i < S::kKeys / kWarp; ++i) all &= places_.there[slot][i];
    return all == kFullMask;
  }

  // The packed rows of an item, zeros past its end: a part of the first group of copies.
  __device__ void copy_queries(const Item& item) const {
    const AttentionParams& p = a_.params;
    const Tile& tile = item.tile;
    const int chunk = threadIdx.x % S::kChunks;
#pragma unroll 1
    for (int row = threadIdx.x / S::kChunks; row < 64 * S::kGroups; row += S::kThreads / S::kChunks) {
      const int32_t packed = tile.first_row + row, query = packed / a_.group;
      const int64_t head = item.kv_head * a_.group + packed - query * a_.group;
      const bool valid = row < tile.rows && chunk * 8 < p.key_cache.head_size;
      const uint16_t* source = static_cast<const uint16_t*>(p.query) + (tile.token + query) * p.query_token_stride +
                               head * p.query_head_stride + chunk * 8;
      copy_async(queries_ + swizzled<S::kRowBytes>(row, chunk), valid ? source : p.query, valid);
    }
  }

  // Where tiles are copied to, as they are stored.
  __device__ uint32_t copied_keys() const { return kEightBit ? keys_ + 2 * S::kTileBytes : keys_; }
  __device__ uint32_t copied_values() const { return kEightBit ? copied_keys() + S::kRawBytes : values_; }

  __device__ void copy_keys(int slot) const {
    copy_tile(a_.params.key_cache, a_.key_places.unit_bytes, copied_keys(), places_.keys[slot], all_there(slot));
  }

  __device__ void copy_values(int slot) const {
    copy_tile(a_.params.value_cache, a_.value_places.unit_bytes, copied_values(), places_.values[slot],
              all_there(slot));
  }

  // A tile of keys or values, zeros where no row sees a key: what lies there must not meet even a weight of zero.
  __device__ void copy_tile(const Cache& cache, uint32_t unit, uint32_t target, const uint32_t* places,
                            bool all_there) const {
    const int chunk = threadIdx.x % S::kCopyChunks, first = threadIdx.x / S::kCopyChunks;
    const uint32_t own = target + (kEightBit ? first * kHeadSize + chunk * 16 : swizzled<S::kRowBytes>(first, chunk));
    const auto target_of = [own](int number) {
      const int row = number * S::kRowsAtOnce;
      return kEightBit ? own + row * kHeadSize : (own ^ mma::swizzle<S::kRowBytes>(row)) + row * S::kRowBytes;
    };
    const char* base;  // as asm: the compiler would add the two once more for each row
    asm("add.u64 %0, %1, %2;" : "=l"(base) : "l"(cache.data), "l"(uint64_t(chunk) * 16));
    places += first * S::kRowsOfThread;
    const bool in_row = chunk * (16 / S::kElementBytes) < cache.head_size;
    if (in_row && all_there) {  // nearly always
      constexpr int kAtOnce = S::kRowsOfThread < 4 ? S::kRowsOfThread : 4;
#pragma unroll
      for (int i = 0; i < S::kRowsOfThread; i += kAtOnce) {
        const auto some = *reinterpret_cast<const Vector<uint32_t, kAtOnce>*>(places + i);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) copy_async(target_of(i + j), base + uint64_t(some.data[j]) * unit, true);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < S::kRowsOfThread; ++i) {
        const bool valid = in_row && places[i] != kNowhere;
        copy_async(target_of(i), valid ? base + uint64_t(places[i]) * unit : cache.data, valid);
      }
    }
  }

  // S = Q K^T. A fragment of keys serves all groups of rows.
  __device__ void multiply_keys(float (&scores)[S::kGroups][kScores]) const {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const uint32_t own_rows = queries_ + swizzled<S::kRowBytes>(warp * 16 + lane % 16, lane / 16);
    const uint32_t own_keys = keys_ + swizzled<S::kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int step = 0; step < kHeadSize / 16; ++step) {
      const uint32_t flip = step * 2 % 8 << 4, offset = step * 2 / 8 * 128;
      Fragment rows[S::kGroups];
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g)
        rows[g] = mma::load_matrices((own_rows ^ flip) + offset + g * 64 * S::kRowBytes);
#pragma unroll
      for (int pair = 0; pair < S::kKeys / 16; ++pair) {
        const Fragment keys = mma::load_matrices((own_keys ^ flip) + offset + pair * 16 * S::kRowBytes);
#pragma unroll
        for (int g = 0; g < S::kGroups; ++g) multiply_pair(scores[g], pair, rows[g], keys);
      }
    }
  }

  // O += P V.
  __device__ void multiply_values(float (&out)[S::kGroups][kOut],
                                  const uint32_t (&weights)[S::kGroups][S::kKeys / 16][4]) const {
    const int lane = threadIdx.x % kWarp;
    const uint32_t own = values_ + swizzled<S::kRowBytes>(lane % 16, lane / 16);
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step)
#pragma unroll
      for (int pair = 0; pair < kHeadSize / 16; ++pair) {
        const Fragment values =
            mma::load_matrices_transposed((own ^ (pair * 2 % 8 << 4)) + pair * 2 / 8 * 128 + step * 16 * S::kRowBytes);
#pragma unroll
        for (int g = 0; g < S::kGroups; ++g) {
          const uint32_t (&w)[4] = weights[g][step];
          multiply_pair(out[g], pair, Fragment{{w[0], w[1], w[2], w[3]}}, values);
        }
      }
  }

  // Products of 16 rows with 16 columns (keys, or dims), of which `columns` holds two B operands.
  template <int kCount>
  __device__ static void multiply_pair(float (&sums)[kCount], int pair, const Fragment& rows, const Fragment& columns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t operand[2] = {columns.data[2 * half], columns.data[2 * half + 1]};
      mma::multiply(reinterpret_cast<float (&)[4]>(sums[8 * pair + 4 * half]), rows, operand, T{});
    }
  }

  __device__ void to_logits(float (&scores)[kScores], const Item& item, int group, int32_t first, bool whole,
                            int slot) const {
    if constexpr (kSoftcap) {
      const float factor = scale_ / a_.params.softcap;
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = bounded_tanh(scores[i] * factor);
    }
    if (whole) return;
    const Rows rows = rows_of_thread(a_, item.tile, item.kv_head, group * 64);  // rarely: it takes many registers
    const int shift = threadIdx.x % 4 * 2;  // a thread's columns of eight are 2 * (lane % 4) and the next
    uint32_t there[S::kKeys / kWarp];
#pragma unroll
    for (int i = 0; i < S::kKeys / kWarp; ++i) there[i] = places_.there[slot][i] >> shift;
    hide<S::kKeys>(scores, rows, first, [&](int key) { return there[key / kWarp] >> key % kWarp & 1; });
  }

  const Launch& a_;
  Places<S::kKeys, kEightBit>& places_;
  const uint32_t queries_, keys_, values_;
  float scale_;  // of raw scores, those of the keys with it where one number is that of all
  bool scales_by_key_ = false;
};

template <class T, int kHeadSize, bool kSoftcap, bool kEightBit>
__global__ void __launch_bounds__(Shape<kHeadSize, kEightBit>::kThreads, Shape<kHeadSize, kEightBit>::kBlocksOfSm)
    attention(const __grid_constant__ Launch a) {
  using S = Shape<kHeadSize, kEightBit>;
  extern __shared__ __align__(1024) char memory[];  // queries, a tile of keys, one of values, both as they are stored
  __shared__ Places<S::kKeys, kEightBit> places;
  __shared__ Item item;
  wait_for_predecessor();
  let_dependents_start();  // not before: they read what the schedule says
  if (threadIdx.x / kWarp == 0) zero_outside_spans(a);
  const Units units = units_of(a, true);
  Worker<T, kHeadSize, kSoftcap, kEightBit> worker(a, places, shared_address(memory));
#pragma unroll 1
  for (;;) {
    __syncthreads();  // the item before is done with
    if (threadIdx.x / kWarp == 0) {
      const int32_t unit = __shfl_sync(kFullMask, take_unit(a), 0), word = read_item(a, units, unit);
      if (threadIdx.x < kItemWords) reinterpret_cast<int32_t*>(&item)[threadIdx.x] = word;
    }
    __syncthreads();
    if (item.kv_head < 0) return;
    worker.attend(item);
  }
}

template <class T, bool kEightBit>
void launch_class(const Launch& launch, int head_size_class, cudaStream_t stream) {
  dispatch_instance(launch, head_size_class, [&](auto size, auto softcap) {
    constexpr int kHeadSize = decltype(size)::value;
    using S = Shape<kHeadSize, kEightBit>;
    launch_blocks<attention<T, kHeadSize, decltype(softcap)::value, kEightBit>>(launch, S::kThreads, S::kSharedBytes,
                                                                                stream);
  });
}

}  // namespace paged_kv::cuda::prefill::mma_sync
