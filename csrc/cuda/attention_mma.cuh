// The decode kernel: tensor cores, 16-bit and 8-bit caches, head sizes up to 256. docs/kernels/decode.md.
//
// Scores are made transposed, S^T = K Q^T: the 16-wide side of the matrix instruction holds keys, the 8-wide side
// packed rows (query token x head of the group), so one token of a group of 4 or 8 heads wastes nothing. O^T = V^T P^T
// likewise. Every warp is on its own: it loads its tiles of 16 keys with cp.async into its own ring of stages, ahead of
// the tile it computes and across the borders of items, and keeps its own softmax state. Warps meet only at the end of
// an item.
#pragma once

#include "attention_loader.cuh"
#include "attention_merge.cuh"

namespace paged_kv::cuda::mma {

// Softcap and ALiBi on logits in base 2, apart from the loop that most models run.
__device__ __noinline__ inline float4 special_logits(const AttentionParams& p, float4 scores, float slope_0,
                                                     float slope_1, int32_t key) {
  float values[4] = {scores.x, scores.y, scores.z, scores.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] *= kLn2;
    if (p.softcap > 0.0f) values[i] = p.softcap * tanhf(values[i] / p.softcap);
    values[i] = (values[i] + (i % 2 ? slope_1 : slope_0) * float(key + i / 2 * 8)) * kLog2e;
  }
  return {values[0], values[1], values[2], values[3]};
}

// ---- Computing ----

// One warp's softmax state and sums for kTiles x 8 packed rows. In a fragment c[16 x 8], lane l holds rows (keys or
// dims) l / 4 and l / 4 + 8 of columns (packed rows) 2 * (l % 4) and 2 * (l % 4) + 1.
template <class Format, int kHeadSize, int kTiles>
struct State {
  using S = Shape<Format, kHeadSize, kTiles>;
  using Operand = typename Format::Operand;
  static constexpr int kSteps = kHeadSize / 16;
  static constexpr bool kExpands = Format::kBytes == 1;
  static constexpr int kAtOnce = S::kAtOnce;
  uint32_t key_lane, value_lane;  // where this lane's rows of a stage begin, for ldmatrix
  bool special, slot_scales;  // softcap or ALiBi; a scale for each slot
  uint32_t queries[S::kQueriesInShared ? 1 : kTiles][kSteps][2];
  const uint2* shared_queries;  // [kTiles][kSteps][kWarp]
  float out[kTiles][kSteps][4];
  float maximum[kTiles][2], sum[kTiles][2];  // of logits in base 2; sum: this lane's keys only
  KeyRange keys[kTiles][2];  // visible to this lane's two columns of each tile
  KeyRange all;  // visible to every row: tiles inside need no comparison
  float slopes[kTiles][2];
  // 8-bit caches: logits in base 2 are scores times `factors`; weighted values are `out` times `value_unit`.
  float factors[kExpands ? kTiles : 1][2];
  float value_unit;

  __device__ explicit State(const AttentionParams& p) {
    const int lane = threadIdx.x % kWarp;
    key_lane = kept(swizzled<S::kRowBytes>(lane % 16, lane / 16));
    value_lane = kept(S::kStageBytes / 2 + swizzled<S::kRowBytes>(lane % 8 + lane / 16 * 8, lane / 8 % 2));
    special = p.softcap > 0.0f || p.alibi_slopes;
    slot_scales = has_slot_scales(p);
  }

  // Called by all threads of the block, behind a barrier.
  __device__ void begin(const AttentionLaunch& a, const Segment& s, uint2* query_memory) {
    const AttentionParams& p = a.params;
    const int lane = threadIdx.x % kWarp;
    shared_queries = query_memory;
    if constexpr (S::kQueriesInShared) {
      for (int index = threadIdx.x / kWarp; index < kTiles * kSteps; index += num_warps()) {
        uint32_t pair[2];
        load_queries(a, query_row(a, s, index / kSteps), index % kSteps, pair);
        query_memory[index * kWarp + lane] = {pair[0], pair[1]};
      }
      __syncthreads();
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if constexpr (kExpands) {
        load_scaled_queries(a, s, t);
      } else if constexpr (!S::kQueriesInShared) {
        const uint16_t* row = query_row(a, s, t);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) load_queries(a, row, step, queries[t][step]);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[t][step][i] = 0.0f;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = t * 8 + 2 * (lane % 4) + c;
        const int32_t packed = s.first_row + (row < s.rows ? row : 0), query = a.group.divide(packed);
        const int32_t group = a.group.value;
        maximum[t][c] = -INFINITY;
        sum[t][c] = 0.0f;
        keys[t][c] = visible_to_any(a, s.sequence, query, query);
        slopes[t][c] = p.alibi_slopes ? p.alibi_slopes[s.kv_head * group + packed - query * group] : 0.0f;
      }
    }
    if constexpr (kExpands) {
      constexpr float kSmallest = 1.17549435e-38f;  // any scale of a slot is a larger unit
      value_unit = has_slot_scales(p.value_cache) ? kSmallest : static_scale(p.value_cache, s.kv_head);
    }
    const int32_t first = a.group.divide(s.first_row), last = a.group.divide(s.first_row + s.rows - 1);
    all = {visible_to_any(a, s.sequence, last, last).begin, visible_to_any(a, s.sequence, first, first).end};
  }

  // The query row that column l / 4 of tile t stands for; null: none.
  __device__ static const uint16_t* query_row(const AttentionLaunch& a, const Segment& s, int t) {
    const int row = t * 8 + threadIdx.x % kWarp / 4;
    if (row >= s.rows) return nullptr;
    const int32_t packed = s.first_row + row, query = a.group.divide(packed), group = a.group.value;
    const uint32_t head = s.kv_head * group + packed - query * group;
    return static_cast<const uint16_t*>(a.query) + uint64_t(uint32_t(s.sequence.token + query)) * a.query_token_stride +
           head * a.query_head_stride;
  }

  // B operand: lane l holds dims 2 * (l % 4) + {0, 1} and + 8 of column l / 4.
  __device__ static void load_queries(const AttentionLaunch& a, const uint16_t* row, int step, uint32_t (&pair)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int dim = step * 16 + i * 8;  // rows are whole numbers of 8
      pair[i] = row && dim < a.key_cache.head_size
                    ? *reinterpret_cast<const uint32_t*>(row + dim + 2 * (threadIdx.x % 4))
                    : 0u;
    }
  }

  // The same for keys that come as bytes: lane l holds dims 4 * (l % 4) .. + 3 of a step, as it does of the keys. Rows
  // are divided by a power of two that float16 holds them; their logits are multiplied by it.
  __device__ void load_scaled_queries(const AttentionLaunch& a, const Segment& s, int t) {
    const int lane = threadIdx.x % kWarp;
    const uint16_t* row = query_row(a, s, t);
    const bool is_half = a.params.query_dtype == DType::float16;
    uint2 raw[kSteps];
    uint32_t largest = 0;  // bits of the largest magnitude
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool valid = row && step * 16 < a.key_cache.head_size;  // rows are whole numbers of 16
      raw[step] = valid ? *reinterpret_cast<const uint2*>(row + step * 16 + 4 * (lane % 4)) : uint2{0, 0};
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        largest = max(largest, __float_as_uint(fabsf(sixteen_bits(i < 2 ? raw[step].x : raw[step].y, i % 2, is_half))));
    largest = max(largest, __shfl_xor_sync(kFullMask, largest, 1));
    largest = max(largest, __shfl_xor_sync(kFullMask, largest, 2));
    const uint32_t exponent = largest >> 23;
    const bool scales = exponent > 0 && exponent < 254;
    const float unit = scales ? __uint_as_float(exponent << 23) : 1.0f;
    const float inverse = scales ? __uint_as_float((254 - exponent) << 23) : 1.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = sixteen_bits(i < 2 ? raw[step].x : raw[step].y, i % 2, is_half) * inverse;
#pragma unroll
      for (int i = 0; i < 2; ++i) queries[t][step][i] = pack(values[2 * i], values[2 * i + 1], Float16{});
    }
    const float factor = a.scale * kLog2e * static_scale(a.params.key_cache, s.kv_head);
#pragma unroll
    for (int c = 0; c < 2; ++c) factors[t][c] = factor * __shfl_sync(kFullMask, unit, 8 * (lane % 4) + 4 * c);
  }

  __device__ static float sixteen_bits(uint32_t word, int half, bool is_half) {
    const uint32_t bits = half ? word >> 16 : word & 0xffff;
    return is_half ? to_float(Float16{uint16_t(bits)}) : __uint_as_float(bits << 16);
  }

  __device__ void multiply_keys(float (&scores)[4], const Fragment& keys_fragment, int t, int step) const {
    if constexpr (S::kQueriesInShared) {
      const uint2 pair = shared_queries[(t * kSteps + step) * kWarp + threadIdx.x % kWarp];
      const uint32_t query[2] = {pair.x, pair.y};
      multiply(scores, keys_fragment, query, Operand{});
    } else {
      multiply(scores, keys_fragment, queries[t][step], Operand{});
    }
  }

  // Calls use(step, A operand of keys) for each 16 dims.
  template <class Use>
  __device__ void for_keys(uint32_t stage, const Use& use) const {
    const uint32_t own = stage + key_lane;
    if constexpr (kExpands) {  // matrices (keys 0-7, 8-15) x (dims 0-15, 16-31): a lane's word is four dims of a key
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        const Fragment k = load_matrices((own ^ (step % 8 << 4)) + step / 8 * 128);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Fragment halves;
          Format::template expand<0, 1, 2, 3>(k.data[2 * i], halves.data[0], halves.data[2]);
          Format::template expand<0, 1, 2, 3>(k.data[2 * i + 1], halves.data[1], halves.data[3]);
          use(step + i, halves);
        }
      }
    } else {  // matrices (keys 0-7, 8-15) x (dims 0-7, 8-15)
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        use(step, load_matrices((own ^ (step * 2 % 8 << 4)) + step * 2 / 8 * 128));
    }
  }

  // Calls use(step, A operand of transposed values) for each 16 dims. Of bytes, row r of the operand is dim 2 r for the
  // upper 8 rows and dim 2 (r - 8) + 1 for the lower: see dim_of.
  template <class Use>
  __device__ void for_values(uint32_t stage, const Use& use) const {
    const uint32_t own = stage + value_lane;
    if constexpr (kExpands) {  // matrices (dims 0-15, 16-31) x (keys 0-7, 8-15): a word is two dims of two keys
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
        const Fragment v = load_matrices_transposed((own ^ (step % 8 << 4)) + step / 8 * 128);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Fragment halves;
          Format::template expand<0, 2, 1, 3>(v.data[i], halves.data[0], halves.data[1]);
          Format::template expand<0, 2, 1, 3>(v.data[i + 2], halves.data[2], halves.data[3]);
          use(step + i, halves);
        }
      }
    } else {  // matrices (dims 0-7, 8-15) x (keys 0-7, 8-15)
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        use(step, load_matrices_transposed((own ^ (step * 2 % 8 << 4)) + step * 2 / 8 * 128));
    }
  }

  // The dim that out[..][step][i] is a sum of.
  __device__ static int dim_of(int step, int i) {
    const int lane = threadIdx.x % kWarp;
    return step * 16 + (kExpands ? lane / 4 * 2 + i / 2 : lane / 4 + i / 2 * 8);
  }

  // S^T = K Q^T, as two sums that do not wait for one another.
  __device__ void score(float (&scores)[kTiles][4], uint32_t stage) const {
    float even[kTiles][4] = {}, odd[kTiles][4] = {};
    for_keys(stage, [&](int step, const Fragment& k) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) multiply_keys(step % 2 ? odd[t] : even[t], k, t, step);
    });
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[t][i] = even[t][i] + odd[t][i];
  }

  // kAtOnce tiles of this warp, the first of which is `tile`.
  __device__ void attend(const AttentionLaunch& a, uint32_t stage, const TileNotes<Format>* notes, int32_t tile) {
    float scores[kAtOnce][kTiles][4], value_factors[kAtOnce][2];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      score(scores[n], stage + n * S::kStageBytes);
      value_factors[n][0] = value_factors[n][1] = 1.0f;
    }
    if constexpr (kExpands) {
      if (slot_scales) apply_slot_scales(a, notes, scores, value_factors);
    }
    uint32_t weights[kAtOnce][kTiles][2];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) to_logits(a, scores[n], notes[n].visible, tile + n * num_warps());
    soften(scores, value_factors, weights);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
      for_values(stage + n * S::kStageBytes, [&](int step, const Fragment& v) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) multiply(out[t][step], v, weights[n][t], Operand{});
      });
  }

  // Where each slot has its scale: K's goes into the scores, V's into the weights, in units of a power of two that all
  // of a warp's sums share, for float16 would not hold the smallest of them.
  __device__ void apply_slot_scales(const AttentionLaunch& a, const TileNotes<Format>* notes,
                                    float (&scores)[kAtOnce][kTiles][4], float (&value_factors)[kAtOnce][2]) {
    const int key = threadIdx.x % kWarp / 4;
    if (has_slot_scales(a.params.key_cache)) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const float low = notes[n].scales[0][key], high = notes[n].scales[0][key + 8];
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[n][t][i] *= i < 2 ? low : high;
      }
    }
    if (!has_slot_scales(a.params.value_cache)) return;
    uint32_t largest = 0;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        value_factors[n][i] = notes[n].scales[1][key + 8 * i];
        largest = max(largest, __float_as_uint(fabsf(value_factors[n][i])));
      }
    largest = __reduce_max_sync(kFullMask, largest);
    const float unit = __uint_as_float(min(largest, 0x7e800000u) & 0x7f800000u);
    if (unit > value_unit) {
      scale_sums(value_unit / unit);
      value_unit = unit;
    }
    const float inverse = 1.0f / value_unit;
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) value_factors[n][i] *= inverse;
  }

  __device__ void scale_sums(float factor) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[t][step][i] *= factor;
  }

  // Scores -> logits in base 2, -inf where a row must not see a key.
  __device__ void to_logits(const AttentionLaunch& a, float (&scores)[kTiles][4], uint32_t visible, int32_t tile) {
    const int32_t first = tile * kKeys;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[t][i] *= kExpands ? factors[t][i % 2] : a.scale * kLog2e;
    const bool whole = visible == 0xffff && first >= all.begin && first + kKeys <= all.end;
    if (whole && !special) return;
    const int lane = threadIdx.x % kWarp;
    if (special) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const float4 logits = special_logits(a.params, {scores[t][0], scores[t][1], scores[t][2], scores[t][3]},
                                             slopes[t][0], slopes[t][1], first + lane / 4);
        scores[t][0] = logits.x;
        scores[t][1] = logits.y;
        scores[t][2] = logits.z;
        scores[t][3] = logits.w;
      }
    }
    if (whole) return;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int offset = lane / 4 + i / 2 * 8;
        const int32_t key = first + offset;
        const bool seen = visible >> offset & 1 && key >= keys[t][i % 2].begin && key < keys[t][i % 2].end;
        if (!seen) scores[t][i] = -INFINITY;
      }
  }

  // Online softmax: logits -> weights, times the factors of keys l / 4 and l / 4 + 8, as the B operand of
  // O^T += V^T P^T. The base is the maximum of an earlier tile until some logit outgrows it by 2^8: no sum comes near
  // the end of its range by that, and hardly any tile but the first has to look for maxima and change the sums.
  __device__ void soften(float (&logits)[kAtOnce][kTiles][4], const float (&value_factors)[kAtOnce][2],
                         uint32_t (&weights)[kAtOnce][kTiles][2]) {
    constexpr float kMostGrowth = 8.0f;
    bool outgrown = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int c = 0; c < 2; ++c) outgrown |= largest_of(logits, t, c) > maximum[t][c] + kMostGrowth;
    if (__any_sync(kFullMask, outgrown)) raise_maxima(logits);
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        float (&values)[4] = logits[n][t];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float base = base_of(maximum[t][c]);
          values[c] = fast_exp2(values[c] - base);
          values[c + 2] = fast_exp2(values[c + 2] - base);
          sum[t][c] += values[c] + values[c + 2];
        }
        if constexpr (kExpands) {
#pragma unroll
          for (int i = 0; i < 4; ++i) values[i] *= value_factors[n][i / 2];
        }
        weights[n][t][0] = transpose_matrix(pack(values[0], values[1], Operand{}));
        weights[n][t][1] = transpose_matrix(pack(values[2], values[3], Operand{}));
      }
  }

  // Of this lane's logits of one packed row.
  __device__ static float largest_of(const float (&logits)[kAtOnce][kTiles][4], int t, int c) {
    float largest = fmaxf(logits[0][t][c], logits[0][t][c + 2]);
#pragma unroll
    for (int n = 1; n < kAtOnce; ++n) largest = fmaxf(largest, fmaxf(logits[n][t][c], logits[n][t][c + 2]));
    return largest;
  }

  __device__ static float base_of(float maximum) { return maximum == -INFINITY ? 0.0f : maximum; }

  // Takes the maxima of all logits so far, and brings the sums to them.
  __device__ void raise_maxima(const float (&logits)[kAtOnce][kTiles][4]) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      float shrink[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float largest = largest_of(logits, t, c);
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, step));
        largest = fmaxf(largest, maximum[t][c]);
        shrink[c] = fast_exp2(maximum[t][c] - base_of(largest));
        maximum[t][c] = largest;
        sum[t][c] *= shrink[c];
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[t][step][i] *= shrink[i % 2];
    }
  }

  // This warp's states of all rows into shared memory.
  __device__ void store_states(RowState* states) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float total = sum[t][c];
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) total += __shfl_xor_sync(kFullMask, total, step);
        if (lane < 4) states[t * 8 + 2 * lane + c] = {maximum[t][c] * kLn2, total};
      }
  }

  // Rows first .. first + count of this warp's sums as floats [count][kHeadSize]; dims permuted against bank conflicts.
  __device__ void store_values(float* target, int first, int count) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t * 8 < first || t * 8 >= first + count) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = t * 8 + 2 * (lane % 4) + i % 2 - first, dim = dim_of(step, i);
          target[row * kHeadSize + (dim ^ (lane % 4 << 3))] = kExpands ? out[t][step][i] * value_unit : out[t][step][i];
        }
    }
  }
};

// Where dims dim .. dim + 3 of a row lie in what store_values wrote.
template <int kHeadSize>
__device__ int value_at(int row, int dim) {
  return row * kHeadSize + (dim ^ ((row >> 1 & 3) << 3));
}

// ---- The kernel ----

template <class Format, int kHeadSize, int kTiles>
struct Shared {
  using S = Shape<Format, kHeadSize, kTiles>;
  ScheduleMemory<S::kMaxWarps * kWarp> schedule;
  RowState states[S::kMaxWarps][S::kRows];
  TileNotes<Format> notes[S::kMaxWarps][S::kStages];
  int stage[S::kMaxWarps];  // where a warp's values are
};

// Merges rows first .. first + count of all warps and puts them: final, or a partial result.
template <class Format, int kHeadSize, int kTiles>
__device__ void finish(const AttentionLaunch& a, const Segment& s, const Shared<Format, kHeadSize, kTiles>& shared,
                       const char* stages, int first, int count) {
  using S = Shape<Format, kHeadSize, kTiles>;
  constexpr int kColumns = kHeadSize / 4;
  const int rows = min(count, s.rows - first);
#pragma unroll 1
  for (int index = threadIdx.x; index < rows * kColumns; index += blockDim.x) {
    const int row = index / kColumns, dim = index % kColumns * 4;
    if (dim >= a.workspace.row_stride) continue;
    Partial parts[S::kMaxWarps];
#pragma unroll
    for (int w = 0; w < S::kMaxWarps; ++w) {
      // A warp that has seen no key has perhaps stored no values: what lies there is its next tile, on its way.
      if (w >= num_warps() || shared.states[w][first + row].sum == 0.0f) continue;
      const char* stage = stages + (w * S::kStages + shared.stage[w]) * S::kStageBytes;
      parts[w].state = shared.states[w][first + row];
      parts[w].values = *reinterpret_cast<const float4*>(stage + 4 * value_at<kHeadSize>(row, dim));
    }
    put<S::kRows>(a, s, first + row, dim, combine<true>(parts));
  }
}

// Who waits for this launch waits for the prefill kernel beside it too: one block does that, the others leave their places.
__device__ inline void leave(const AttentionLaunch& a) {
  if (a.has_decodes && blockIdx.x == gridDim.x - 1) wait_for_predecessor();
}

template <class Format, int kHeadSize, int kTiles, bool kDeterministic>
__global__ void __launch_bounds__(Shape<Format, kHeadSize, kTiles>::kMaxWarps* kWarp,
                                  Shape<Format, kHeadSize, kTiles>::kBlocksOfSm)
    attention(const __grid_constant__ AttentionLaunch a) {
  using S = Shape<Format, kHeadSize, kTiles>;
  using Tiles = Loader<Format, kHeadSize, kTiles, kDeterministic>;
  constexpr int kRows = S::kRows, kCount = kRows < S::kRowsPerMerge ? kRows : S::kRowsPerMerge;
  extern __shared__ __align__(1024) char stages[];  // [warps][kStages][kStageBytes], then the queries
  __shared__ Shared<Format, kHeadSize, kTiles> shared;
  const int warp = threadIdx.x / kWarp;
  char* own = stages + warp * S::kStages * S::kStageBytes;
  uint2* queries = reinterpret_cast<uint2*>(stages + num_warps() * S::kStages * S::kStageBytes);
  const uint32_t own_address = kept(shared_address(own));

  prefetch_inputs(a);
  if (!a.has_decodes) wait_for_predecessor();
  // Deterministic mode goes on: a block notes how many pieces there are.
  if (!kDeterministic && a.has_decodes && !__ldcg(a.has_decodes)) return leave(a);
  const typename Tiles::Planned schedule(a, shared.schedule);
  Tiles loader(a, schedule);
  State<Format, kHeadSize, kTiles> state(a.params);
  Segment s;
  int32_t position = schedule.start();
  int stage = 0, ahead = 0;  // tiles that have been asked for and not computed

  // One copy of each piece of code, in the order of its first use: a launch begins with a cold instruction cache, and
  // small batches wait for every line of it.
#pragma unroll 1
  while (schedule.next(position, s)) {
    if (ahead == 0) {
      loader.begin(s, position);  // asks for the table's entries
      let_dependents_start();  // not before the wait: the merging launch reads the lengths at once
    }
    state.begin(a, s, queries);  // queries go on their way before the keys, which are many
    if (threadIdx.x == 0) schedule.record(s, position);
    const int32_t end = Tiles::end_tile(s);
    int32_t tile = Tiles::first_tile(s);
    const bool works = tile < end;
    // A round computes a tile (of the segment's last round: merges), then refills the stage that is free now. The first
    // rounds only fill the stages.
    bool more = true;
#pragma unroll 1
    while (more) {
      const uint32_t stage_address = own_address + stage * S::kStageBytes;
      TileNotes<Format>* notes = shared.notes[warp] + stage;
      const bool fills = ahead < S::kStages, has_tile = !fills && tile < end;
      if (has_tile) {
        wait_for_copies<S::kStages - S::kAtOnce>();
        __syncwarp();
        state.attend(a, stage_address, notes, tile);
        __syncwarp();
        tile += S::kAtOnce * num_warps();
      }
      more = fills || tile < end;
      if (!more) {  // the stage just used holds this warp's part of the merge
        state.store_states(shared.states[warp]);
        float* values = reinterpret_cast<float*>(own + stage * S::kStageBytes);
        if (threadIdx.x % kWarp == 0) shared.stage[warp] = stage;
#pragma unroll
        for (int first = 0; first < kRows; first += kCount) {
          if (works) state.store_values(values, first, kCount);
          __syncthreads();
          finish<Format, kHeadSize, kTiles>(a, s, shared, stages, first, kCount);
          __syncthreads();
        }
      }
      if (fills || has_tile) {
#pragma unroll 1
        for (int n = 0; n < S::kAtOnce; ++n) loader.load(stage_address + n * S::kStageBytes, notes[n]);
        ahead += fills ? S::kAtOnce : 0;
        stage = stage + S::kAtOnce == S::kStages ? 0 : stage + S::kAtOnce;
      }
    }
  }
  zero_outside(a, schedule.owned_tokens());
  leave(a);
}

}  // namespace paged_kv::cuda::mma
