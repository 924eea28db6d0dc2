// The prefill kernel of every chip: mma.sync, float16 and bfloat16, head sizes up to 256, any block size.
// docs/kernels/prefill_mma.md.
//
// Thread blocks stay and take units from the counter of the schedule. A block holds the queries of its rows in shared
// memory, and one tile of keys and one of values, each on its way while the other is multiplied. A warp has 16 packed rows,
// or 32 that share what it reads of the tiles. Several blocks an SM work under each other's barriers.
#pragma once

#include "prefill_rows.cuh"

namespace paged_kv::cuda::prefill::mma_sync {

using mma::copy_async;
using mma::Fragment;
using mma::shared_address;
using mma::swizzled;

template <int kHeadSize>
struct Shape {
  static constexpr int kWarps = 4, kThreads = kWarps * kWarp;
  static constexpr int kGroups = kHeadSize == 256 ? 1 : 2;  // of 64 rows: a warp has 16 of each
  static constexpr int kKeys = kHeadSize == 256 ? 32 : 64;  // of a tile
  static constexpr int kBlocksOfSm = blocks_of_sm(kHeadSize);  // that registers leave room for
  static constexpr int kRowBytes = 2 * kHeadSize, kChunks = kHeadSize / 8;
  static constexpr int kTileBytes = kKeys * kRowBytes, kQueryBytes = 64 * kGroups * kRowBytes;
  static constexpr int kSharedBytes = kQueryBytes + 2 * kTileBytes;
  static_assert(64 * kGroups == rows_of(kHeadSize));
};

// Where the keys of a tile lie, for the tile that is copied and the one before it.
template <int kKeys>
struct Places {
  int2 places[2][kKeys];  // block and slot; block -1: nowhere, or no row sees it
  uint32_t there[2][kKeys / kWarp];  // a bit for each key that has a place
};

template <class T, int kHeadSize, bool kSoftcap>
class Worker {
 public:
  using S = Shape<kHeadSize>;
  static constexpr int kScores = S::kKeys / 2, kOut = kHeadSize / 2;  // registers of a group of rows

  __device__ Worker(const Launch& a, Places<S::kKeys>& places, uint32_t queries)
      : a_(a), places_(places), queries_(queries), keys_(queries + S::kQueryBytes), values_(keys_ + S::kTileBytes) {}

  // Called by all threads, behind a barrier after the item before.
  __device__ void attend(const Item& item) {
    const Tile& tile = item.tile;
    const int first = first_tile<S::kKeys>(tile);
    int number = last_tile<S::kKeys>(tile), slot = 0;
    keep(look_up(tile, number), slot);
    copy_queries(item);
    __syncthreads();
    copy_tile(a_.params.key_cache, keys_, item.kv_head, slot);
    copy_tile(a_.params.value_cache, values_, item.kv_head, slot);
    Rows rows[S::kGroups];
    Softmax softmax[S::kGroups];
    float out[S::kGroups][kOut] = {};
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      rows[g] = rows_of_thread(a_, tile, item.kv_head, g * 64);
      softmax[g].begin();
    }
    const float factor = (kSoftcap ? a_.params.softcap : a_.params.scale) * kLog2e;
#pragma unroll 1
    for (; number >= first; --number, slot ^= 1) {
      const bool more = number > first;
      const int2 next = more ? look_up(tile, number - 1) : int2{-1, 0};  // on its way under the product
      float scores[S::kGroups][kScores] = {};
      mma::wait_for_copies<1>();
      __syncthreads();  // the keys are there
      multiply_keys(scores);
      keep(next, slot ^ 1);
      __syncthreads();  // the keys are used up, the next places are known
      if (more)
        copy_tile(a_.params.key_cache, keys_, item.kv_head, slot ^ 1);
      else
        mma::commit_copies();
      uint32_t weights[S::kGroups][S::kKeys / 16][4];
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        to_logits(scores[g], rows[g], number * S::kKeys, slot);
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
      mma::wait_for_copies<1>();
      __syncthreads();  // the values are there
      multiply_values(out, weights);
      __syncthreads();  // the values are used up
      if (more)
        copy_tile(a_.params.value_cache, values_, item.kv_head, slot ^ 1);
      else
        mma::commit_copies();
    }
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      softmax[g].finish();
      store_rows<T, kHeadSize>(a_, out[g], softmax[g], rows[g], factor);
    }
  }

 private:
  // The place of key threadIdx.x of a tile. A block is looked up once and serves keys and values.
  __device__ int2 look_up(const Tile& tile, int number) const {
    const int32_t key = number * S::kKeys + int32_t(threadIdx.x);
    if (int(threadIdx.x) >= S::kKeys || key < tile.keys_begin || key >= tile.keys_end) return {-1, 0};
    const int32_t block_size = int32_t(a_.params.block_size);
    const int32_t column = a_.log2_block_size >= 0 ? key >> a_.log2_block_size : key / block_size;
    const int32_t block = a_.params.block_table[tile.sequence * a_.params.block_table_stride + column];
    return {uint32_t(block) < uint32_t(a_.params.num_blocks) ? block : -1, key - column * block_size};
  }

  __device__ void keep(int2 place, int slot) {
    if (int(threadIdx.x) >= S::kKeys) return;
    places_.places[slot][threadIdx.x] = place;
    const uint32_t there = __ballot_sync(kFullMask, place.x >= 0);
    if (threadIdx.x % kWarp == 0) places_.there[slot][threadIdx.x / kWarp] = there;
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

  // A tile of keys or values, zeros where no row sees a key: what lies there must not meet even a weight of zero.
  __device__ void copy_tile(const Cache& cache, uint32_t target, int32_t kv_head, int slot) const {
    constexpr int kRowsAtOnce = S::kThreads / S::kChunks;
    const int chunk = threadIdx.x % S::kChunks, first = threadIdx.x / S::kChunks;
    const bool in_row = chunk * 8 < cache.head_size;
    const uint16_t* base = static_cast<const uint16_t*>(cache.data) + kv_head * cache.head_stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < S::kKeys / kRowsAtOnce; ++i) {
      const int row = first + i * kRowsAtOnce;
      const int2 place = places_.places[slot][row];
      const bool valid = in_row && place.x >= 0;
      const uint16_t* source = base + place.x * cache.block_stride + place.y * cache.slot_stride;
      copy_async(target + swizzled<S::kRowBytes>(row, chunk), valid ? static_cast<const void*>(source) : cache.data,
                 valid);
    }
    mma::commit_copies();
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

  __device__ void to_logits(float (&scores)[kScores], const Rows& rows, int32_t first, int slot) const {
    if constexpr (kSoftcap) {
      const float factor = a_.params.scale / a_.params.softcap;
#pragma unroll
      for (int i = 0; i < kScores; ++i) scores[i] = bounded_tanh(scores[i] * factor);
    }
    uint32_t there[S::kKeys / kWarp], all = kFullMask;
#pragma unroll
    for (int i = 0; i < S::kKeys / kWarp; ++i) all &= there[i] = places_.there[slot][i];
    if (all == kFullMask && first >= rows.all_begin && first + S::kKeys <= rows.all_end) return;
    const int shift = threadIdx.x % 4 * 2;  // a thread's columns of eight are 2 * (lane % 4) and the next
    hide<S::kKeys>(scores, rows, first, [&](int key) { return there[key / kWarp] >> shift >> key % kWarp & 1; });
  }

  const Launch& a_;
  Places<S::kKeys>& places_;
  const uint32_t queries_, keys_, values_;
};

template <class T, int kHeadSize, bool kSoftcap>
__global__ void __launch_bounds__(Shape<kHeadSize>::kThreads, Shape<kHeadSize>::kBlocksOfSm)
    attention(const __grid_constant__ Launch a) {
  using S = Shape<kHeadSize>;
  extern __shared__ __align__(1024) char memory[];  // queries, a tile of keys, a tile of values
  __shared__ Places<S::kKeys> places;
  __shared__ Item item;
  let_dependents_start();
  wait_for_predecessor();
  if (a.outside && threadIdx.x / kWarp == 0) zero_outside_spans(a);
  const Units units = units_of(a, true);
  Worker<T, kHeadSize, kSoftcap> worker(a, places, shared_address(memory));
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

template <class T>
void launch_class(const Launch& launch, int head_size_class, cudaStream_t stream) {
  dispatch_instance(launch, head_size_class, [&](auto size, auto softcap) {
    constexpr int kHeadSize = decltype(size)::value;
    using S = Shape<kHeadSize>;
    launch_blocks<attention<T, kHeadSize, decltype(softcap)::value>>(launch, S::kThreads, S::kSharedBytes, stream);
  });
}

}  // namespace paged_kv::cuda::prefill::mma_sync
