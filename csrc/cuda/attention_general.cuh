// Attention for everything the tensor-core kernel does not take: any dtypes, head sizes to 576, masks, scales, any
// alignment. A lane owns a key while scores are made and a few dims while values are summed up; dtypes and features are
// run-time values. Keys that a row must not see are never multiplied, whatever the pool holds there.
#pragma once

#include "attention_merge.cuh"

namespace paged_kv::cuda::general {

inline constexpr int kRows = 4;  // packed rows of an item, held in registers by every warp
inline constexpr int kKeys = kWarp;  // keys of a tile
inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kWarp;

struct Shared {
  ScheduleMemory<kThreads> schedule;
  RowState states[kWarps][kRows];
  // then: float queries[kRows][head_size rounded up to 8], float values[kWarps][kRows][row_stride]
};

__host__ __device__ inline int64_t query_stride(const AttentionParams& p) {
  return (p.key_cache.head_size + 7) / 8 * 8;
}

inline int64_t shared_bytes(const AttentionLaunch& a) {
  const int64_t floats = kRows * query_stride(a.params) + int64_t(kWarps) * kRows * a.workspace.row_stride;
  return (int64_t(sizeof(Shared)) + 15) / 16 * 16 + 4 * floats;
}

// A row of the tile as all threads need it.
struct Row {
  int32_t token, head;
  KeyRange keys;
  float slope;
};

__device__ inline Row row_at(const AttentionLaunch& a, const Segment& s, int row) {
  if (row >= s.rows) return {0, 0, {0, 0}, 0.0f};
  const int32_t packed = s.first_row + row, query = a.group.divide(packed), group = a.group.value;
  const int32_t head = s.kv_head * group + packed - query * group;
  return {s.sequence.token + query, head, visible_to_any(a, s.sequence, query, query),
          a.params.alibi_slopes ? a.params.alibi_slopes[head] : 0.0f};
}

// What the mask adds to the score of (row, key): 0, a float, or -inf.
__device__ inline float mask_bias(const AttentionParams& p, const Row& row, int32_t seq_len, int32_t key) {
  if (p.mask.kind == MaskKind::none) return 0.0f;
  const int64_t column = key - (seq_len - p.mask.width);
  if (column < 0) return 0.0f;
  const int64_t at = row.token * p.mask.token_stride + row.head * p.mask.head_stride + column;
  if (p.mask.kind == MaskKind::additive) return static_cast<const float*>(p.mask.data)[at];
  return static_cast<const uint8_t*>(p.mask.data)[at] ? 0.0f : -INFINITY;
}

// Products are summed eight by eight: that rounds less than one by one, and alike whatever the alignment.
template <int kVector>
__device__ void dot_rows(const void* key, DType dtype, const float* queries, int64_t stride, int64_t size,
                         float (&scores)[kRows]) {
  constexpr int kTogether = 8;
#pragma unroll 1
  for (int64_t start = 0; start < size; start += kTogether) {
    float parts[kRows] = {};
#pragma unroll
    for (int d = 0; d < kTogether; d += kVector) {
      if (start + d >= size) break;
      float values[kVector];
      load_floats(key, dtype, start + d, values);
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int i = 0; i < kVector; ++i) parts[r] = fmaf(queries[r * stride + start + d + i], values[i], parts[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) scores[r] += parts[r];
  }
}

__device__ inline float load_float(const void* row, DType dtype, int64_t index) {
  float value[1];
  load_floats(row, dtype, index, value);
  return value[0];
}

// The scores of this lane's key for all rows; -inf where the row must not see it.
template <int kVector>
__device__ void score(const AttentionLaunch& a, const Segment& s, const Row (&rows)[kRows], const float* queries,
                      int32_t key, int64_t block, int64_t offset, float (&scores)[kRows]) {
  const AttentionParams& p = a.params;
  float biases[kRows];
  bool any = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool in_range = block >= 0 && key >= rows[r].keys.begin && key < rows[r].keys.end;
    biases[r] = in_range ? mask_bias(p, rows[r], s.sequence.seq_len, key) : -INFINITY;
    any |= biases[r] != -INFINITY;
    scores[r] = 0.0f;
  }
  if (any)
    dot_rows<kVector>(row_of(p.key_cache, block, offset, s.kv_head), p.key_cache.dtype, queries, query_stride(p),
                      p.key_cache.head_size, scores);
  const Scale& scale = p.key_cache.scale;
  const float factor =
      any && scale.kind != ScaleKind::none ? p.scale * *scale_of(scale, block, offset, s.kv_head) : p.scale;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float value = scores[r] * factor;
    if (p.softcap > 0.0f) value = p.softcap * tanhf(value / p.softcap);
    scores[r] = biases[r] == -INFINITY ? -INFINITY : value + rows[r].slope * float(key) + biases[r];
  }
}

// One warp's pass over its tiles of a segment. acc[r][i] belongs to dim lane + 32 * i.
template <int kDims, int kVector>
__device__ void attend(const AttentionLaunch& a, const Segment& s, const float* queries, RowState (&states)[kRows],
                       float (&acc)[kRows][kDims]) {
  const AttentionParams& p = a.params;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  Row rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = row_at(a, s, r);
  for (int32_t tile = s.tile_begin + warp; tile < s.tile_end; tile += kWarps) {
    if ((tile + 1) * kKeys <= s.keys.begin || tile * kKeys >= s.keys.end) continue;
    const int32_t key = tile * kKeys + lane;
    int64_t block = -1, offset = 0;
    if (key >= s.keys.begin && key < s.keys.end) {
      const Slot at = split_slot(key, p.block_size);
      const int64_t entry = p.block_table[s.sequence.index * p.block_table_stride + at.block];
      block = is_block(entry, p.num_blocks) ? entry : -1;
      offset = at.offset;
    }
    float weights[kRows];
    score<kVector>(a, s, rows, queries, key, block, offset, weights);
    bool used = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float maximum = fmaxf(states[r].maximum, warp_max(weights[r]));
      const float base = maximum == -INFINITY ? 0.0f : maximum;
      const float shrink = expf(states[r].maximum - base);
      weights[r] = expf(weights[r] - base);
      states[r] = {maximum, states[r].sum * shrink + weights[r]};  // this lane's share of the sum
#pragma unroll
      for (int i = 0; i < kDims; ++i) acc[r][i] *= shrink;
      used |= weights[r] != 0.0f;
    }
    const Scale& scale = p.value_cache.scale;
    if (used && scale.kind != ScaleKind::none) {
      const float factor = *scale_of(scale, block, offset, s.kv_head);
#pragma unroll
      for (int r = 0; r < kRows; ++r) weights[r] *= factor;
    }
    const char* own_row = used ? row_of(p.value_cache, block, offset, s.kv_head) : nullptr;
    for (unsigned votes = __ballot_sync(kFullMask, used); votes != 0; votes &= votes - 1) {
      const int from = __ffs(votes) - 1;
      const auto* value_row =
          reinterpret_cast<const char*>(__shfl_sync(kFullMask, reinterpret_cast<uintptr_t>(own_row), from));
      float shares[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) shares[r] = __shfl_sync(kFullMask, weights[r], from);
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        const int64_t dim = lane + i * kWarp;
        const float value = dim < p.value_cache.head_size ? load_float(value_row, p.value_cache.dtype, dim) : 0.0f;
#pragma unroll
        for (int r = 0; r < kRows; ++r) acc[r][i] += shares[r] == 0.0f ? 0.0f : shares[r] * value;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) states[r].sum = warp_sum(states[r].sum);
}

// Merges the warps' results in shared memory and puts the segment's: final or partial.
__device__ inline void finish(const AttentionLaunch& a, const Segment& s, const RowState (*states)[kRows],
                              const float* values) {
  const int32_t stride = a.workspace.row_stride, columns = stride / 4;
#pragma unroll 1
  for (int32_t index = threadIdx.x; index < s.rows * columns; index += kThreads) {
    const int32_t row = index / columns, dim = index % columns * 4;
    Partial parts[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      parts[w] = {states[w][row], *reinterpret_cast<const float4*>(values + (w * kRows + row) * stride + dim)};
    put<kRows>(a, s, row, dim, combine(parts));
  }
}

// kDims: dims of V per lane. kVector: elements of K read at once, 1 where K's rows are not aligned.
template <int kDims, int kVector, bool kDeterministic>
__global__ void __launch_bounds__(kThreads) attention(const __grid_constant__ AttentionLaunch a) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  float* queries = reinterpret_cast<float*>(memory + (sizeof(Shared) + 15) / 16 * 16);  // [kRows, query_stride]
  const AttentionParams& p = a.params;
  const int64_t stride = query_stride(p);
  float* values = queries + kRows * stride;  // [kWarps, kRows, row_stride]
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  let_dependents_start();
  const Schedule<kRows, kKeys, kDeterministic> schedule(a, shared.schedule);
  int32_t position = schedule.start();
  Segment s;
  while (schedule.next(position, s)) {
    if (threadIdx.x == 0) schedule.record(s, position);
    for (int row = warp; row < kRows; row += kWarps) {
      const Row r = row_at(a, s, row);
      const int64_t at = r.token * p.query_token_stride + r.head * p.query_head_stride;
      for (int64_t d = lane; d < stride; d += kWarp)
        queries[row * stride + d] =
            row < s.rows && d < p.key_cache.head_size ? load_float(p.query, p.query_dtype, at + d) : 0.0f;
    }
    __syncthreads();
    RowState states[kRows];
    float acc[kRows][kDims] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) states[r] = {-INFINITY, 0.0f};
    attend<kDims, kVector>(a, s, queries, states, acc);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (lane == 0) shared.states[warp][r] = states[r];
#pragma unroll
      for (int i = 0; i < kDims; ++i) {
        const int dim = lane + i * kWarp;
        if (dim < a.workspace.row_stride) values[(warp * kRows + r) * a.workspace.row_stride + dim] = acc[r][i];
      }
    }
    __syncthreads();
    finish(a, s, shared.states, values);
    __syncthreads();
  }
  zero_outside(a, schedule.owned_tokens());
}

}  // namespace paged_kv::cuda::general
