// What the two prefill kernels share: units of work, which rows a thread has and what they see, softmax, results. Four warps
// hold 64 packed rows; a thread's scores and sums lie as both wgmma and mma.sync have them: two rows, pairs of columns.
#pragma once

#include "device.cuh"
#include "mma_instructions.cuh"
#include "prefill_launch.h"

namespace paged_kv::cuda::prefill {

using mma::fast_exp2;
using mma::kLn2;
using mma::kLog2e;
using mma::pack;

// ---- Units of work ----

// A unit of work in shared memory; kv_head < 0: there is no more.
struct Item {
  Tile tile;
  int32_t kv_head;
};

inline constexpr int kItemWords = sizeof(Tile) / 4 + 1;  // each written by a lane of its own

// The tiles of keys that an item reads: one at least, as someone must write the zeros.
template <int kKeys>
__device__ int first_tile(const Tile& t) {
  return t.keys_begin / kKeys;
}

template <int kKeys>
__device__ int last_tile(const Tile& t) {
  return (max(t.keys_end, t.keys_begin + 1) - 1) / kKeys;
}

// The next unit, to lane 0 alone.
__device__ inline int32_t take_unit(const Launch& a) {
  int32_t unit = 0;
  if (threadIdx.x % kWarp == 0) unit = atomicAdd(&a.header->next_unit, 1);
  return unit;
}

// Units in their order: heads in sections that the L2 cache holds, in a section tile by tile.
struct Units {
  int32_t num_tiles, kv_heads, section, end;

  __device__ void place(int32_t unit, int32_t& tile, int32_t& head) const {
    const int32_t first = unit / (num_tiles * section) * section, heads = min(section, kv_heads - first);
    const int32_t inside = unit - first * num_tiles;
    tile = inside / heads;
    head = first + inside - tile * heads;
  }
};

__device__ inline Units units_of(const Launch& a, bool works) {
  const Header& h = *a.header;
  const int32_t kv_heads = int32_t(a.params.num_kv_heads);
  return {h.num_tiles, kv_heads, h.section, works ? h.num_tiles * kv_heads : 0};
}

// Word `lane` of a unit's item: its tile, then its head; head -1 where there is none.
__device__ inline int32_t read_item(const Launch& a, const Units& units, int32_t unit) {
  const int lane = threadIdx.x % kWarp;
  constexpr int kTileWords = kItemWords - 1;
  if (unit >= units.end) return lane < kTileWords ? 0 : -1;
  int32_t tile, head;
  units.place(unit, tile, head);
  return lane < kTileWords ? reinterpret_cast<const int32_t*>(a.tiles + tile)[lane] : head;
}

// Tokens that belong to no sequence give zeros. Called by a warp of each thread block.
__device__ inline void zero_outside_spans(const Launch& a) {
  const AttentionParams& p = a.params;
  const int32_t tokens = int32_t(p.num_tokens);
  const int32_t begin = p.num_seqs ? max(0, min(p.cu_seqlens_q[0], tokens)) : tokens;
  const int32_t end = p.num_seqs ? max(begin, min(p.cu_seqlens_q[p.num_seqs], tokens)) : tokens;
  const int64_t outside = begin + tokens - end, chunks = p.value_cache.head_size / 8;
#pragma unroll 1
  for (int64_t row = blockIdx.x; row < outside * p.num_heads; row += gridDim.x) {
    const int64_t index = row / p.num_heads, token = index < begin ? index : index - begin + end;
    const int64_t out_row = token * p.num_heads + row % p.num_heads;
#pragma unroll 1
    for (int64_t chunk = threadIdx.x % kWarp; chunk < chunks; chunk += kWarp)
      static_cast<uint4*>(p.out)[out_row * chunks + chunk] = {0, 0, 0, 0};
    if (threadIdx.x % kWarp == 0 && p.lse) p.lse[out_row] = -INFINITY;
  }
}

// ---- Rows of a thread ----

// This thread's two rows: lane / 4 and lane / 4 + 8 of its warp's 16.
struct Rows {
  int32_t begin[2], end[2];  // keys that they see
  int32_t all_begin, all_end;  // keys that all 64 rows of four warps see
  int32_t out_row[2];  // [token, head] as one number; -1: past the end
};

__device__ inline int32_t visible_begin(const Launch& a, int32_t position) {
  return a.window_left >= 0 ? max(0, position - a.window_left) : 0;
}

__device__ inline int32_t visible_end(const Launch& a, int32_t position, int32_t seq_len) {
  int32_t end = seq_len;
  if (a.params.causal) end = min(end, position + 1);
  if (a.window_right >= 0) end = min(end, position + a.window_right + 1);
  return max(end, 0);
}

__device__ inline Rows rows_of_thread(const Launch& a, const Tile& t, int32_t kv_head, int group_row) {
  Rows r;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % 4;
  const int32_t offset = t.seq_len - t.q_len;  // position of query 0
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = group_row + warp * 16 + lane / 4 + 8 * i;
    const int32_t packed = t.first_row + min(row, t.rows - 1), query = packed / a.group;
    r.begin[i] = visible_begin(a, offset + query);
    r.end[i] = visible_end(a, offset + query, t.seq_len);
    const int32_t head = kv_head * a.group + packed - query * a.group;
    r.out_row[i] = row < t.rows ? (t.token + query) * int32_t(a.params.num_heads) + head : -1;
  }
  const int32_t first = (t.first_row + min(group_row, t.rows - 1)) / a.group;
  const int32_t last = (t.first_row + min(group_row + 63, t.rows - 1)) / a.group;
  r.all_begin = visible_begin(a, offset + last);
  r.all_end = visible_end(a, offset + first, t.seq_len);
  return r;
}

// tanh with an absolute error of a few 2^-24.
__device__ inline float bounded_tanh(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + fast_exp2(2.0f * kLog2e * x)));
  return 1.0f - 2.0f * reciprocal;
}

// Scores of keys that a row must not see become -inf. is_there(key): is this of a tile's keys in a block?
template <int kKeys, class IsThere>
__device__ void hide(float (&scores)[kKeys / 2], const Rows& rows, int32_t first, const IsThere& is_there) {
  const int32_t lane_key = first + 2 * (threadIdx.x % 4);
  const int32_t begin[2] = {rows.begin[0] - lane_key, rows.begin[1] - lane_key};
  const int32_t end[2] = {rows.end[0] - lane_key, rows.end[1] - lane_key};
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    const int key = i / 4 * 8 + i % 2, row = i / 2 % 2;
    const bool seen = key >= begin[row] && key < end[row] && is_there(key);
    if (!seen) scores[i] = -INFINITY;
  }
}

// Softmax state of this thread's two rows; the sums are over this thread's columns only. `base` is a maximum of scores
// that follows the true one only when that has outgrown it by 2^kSlack: sums are rarely rescaled, weights stay small.
struct Softmax {
  static constexpr float kSlack = 8.0f;
  float base[2], sum[2];  // base: of raw scores
  float shrink[2];  // what the sums of values are to be multiplied by before the next product
  bool shrinks;  // any of the warp

  __device__ void begin() {
    base[0] = base[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }

  // The base for the raw scores of one more tile.
  template <int kCount>
  __device__ void follow(const float (&scores)[kCount], float factor) {
    constexpr int kChains = 4;  // of dependent maxima, for each row: a chain's steps wait for each other
    float chains[2][2 * kChains];
#pragma unroll
    for (int i = 0; i < 4 * kChains; ++i) chains[i / 2 % 2][i / 4 * 2 + i % 2] = scores[i];
#pragma unroll
    for (int i = 4 * kChains; i < kCount; ++i) {
      float& chain = chains[i / 2 % 2][i / 4 % kChains * 2 + i % 2];
      chain = fmaxf(chain, scores[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int step = kChains; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < step; ++i) chains[r][i] = fmaxf(chains[r][i], chains[r][i + step]);
      float largest = chains[r][0];
      largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 2));
      const bool grown = (largest - base[r]) * factor > kSlack;  // not where both are -inf
      shrink[r] = grown ? fast_exp2((base[r] - largest) * factor) : 1.0f;
      base[r] = grown ? largest : base[r];
    }
    shrinks = __any_sync(kFullMask, shrink[0] != 1.0f || shrink[1] != 1.0f);
  }

  // Raw scores -> weights, unrounded.
  template <int kCount>
  __device__ void weigh(float (&scores)[kCount], float factor) {
    float offset[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) offset[r] = base[r] == -INFINITY ? 0.0f : base[r] * factor;
#pragma unroll
    for (int i = 0; i < kCount; ++i) scores[i] = fast_exp2(fmaf(scores[i], factor, -offset[i / 2 % 2]));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = scores[2 * r] + scores[2 * r + 1];
#pragma unroll
      for (int i = 4; i < kCount; i += 4) total += scores[i + 2 * r] + scores[i + 2 * r + 1];
      sum[r] = fmaf(sum[r], shrink[r], total);
    }
  }

  __device__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(kFullMask, sum[r], 1);
      sum[r] += __shfl_xor_sync(kFullMask, sum[r], 2);
    }
  }
};

// Four lanes hold two columns each of four blocks of 8 columns; after this lane q holds block q whole.
__device__ inline uint4 gather_block(const uint32_t (&words)[4]) {
  const int lane = threadIdx.x % 4;
  const bool odd = lane & 1, high = lane & 2;
  uint32_t pairs[2][2];  // of blocks 2i + odd: the columns of lanes lane & 2, (lane & 2) + 1
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t kept = odd ? words[2 * i + 1] : words[2 * i];
    const uint32_t other = __shfl_xor_sync(kFullMask, odd ? words[2 * i] : words[2 * i + 1], 1);
    pairs[i][0] = odd ? other : kept;
    pairs[i][1] = odd ? kept : other;
  }
  const uint32_t first = __shfl_xor_sync(kFullMask, high ? pairs[0][0] : pairs[1][0], 2);
  const uint32_t second = __shfl_xor_sync(kFullMask, high ? pairs[0][1] : pairs[1][1], 2);
  return high ? uint4{first, second, pairs[1][0], pairs[1][1]} : uint4{pairs[0][0], pairs[0][1], first, second};
}

// The results of this thread's two rows; `factor` takes raw scores to logits in base 2.
template <class T, int kHeadSize>
__device__ void store_rows(const Launch& a, const float (&out)[kHeadSize / 2], const Softmax& softmax, const Rows& rows,
                           float factor) {
  const AttentionParams& p = a.params;
  const int lane = threadIdx.x % 4;
  const int32_t chunks = int32_t(p.value_cache.head_size) / 8;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int32_t out_row = rows.out_row[r];
    const float sum = softmax.sum[r], base = softmax.base[r] * factor;  // in base 2
    float total = sum;
    if (p.sinks && sum != 0.0f && out_row >= 0)
      total += fast_exp2(p.sinks[out_row % int32_t(p.num_heads)] * kLog2e - base);
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    uint4* target = static_cast<uint4*>(p.out) + int64_t(out_row) * chunks;
#pragma unroll
    for (int chunk = 0; chunk < kHeadSize / 8; chunk += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = out + 4 * (chunk + i) + 2 * r;
        words[i] = pack(pair[0] * inverse, pair[1] * inverse, T{});
      }
      const uint4 block = gather_block(words);
      if (out_row >= 0 && chunk + lane < chunks) target[chunk + lane] = block;
    }
    if (p.lse && lane == 0 && out_row >= 0) p.lse[out_row] = sum == 0.0f ? -INFINITY : base * kLn2 + logf(sum);
  }
}

// The same of a tile that is one of several parts: the rows' states and sums, for the merging launch.
template <int kHeadSize>
__device__ void store_part(const Launch& a, const float (&out)[kHeadSize / 2], const Softmax& softmax, const Tile& tile,
                           int32_t kv_head, int group_row, float factor) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp % 4;
  const int64_t number = int64_t(tile.first_slot + tile.part) * a.params.num_kv_heads + kv_head;
  float* slot = a.slots.data + number * a.slots.slot_floats;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = group_row + warp * 16 + lane / 4 + 8 * r;
    if (row >= tile.rows) continue;
    if (lane % 4 == 0) reinterpret_cast<float2*>(slot)[row] = {softmax.base[r] * factor, softmax.sum[r]};
    float* target = slot + 2 * a.slots.rows + row * kHeadSize + 2 * (lane % 4);
#pragma unroll
    for (int chunk = 0; chunk < kHeadSize / 8; ++chunk)
      *reinterpret_cast<float2*>(target + 8 * chunk) = {out[4 * chunk + 2 * r], out[4 * chunk + 2 * r + 1]};
  }
}

}  // namespace paged_kv::cuda::prefill
