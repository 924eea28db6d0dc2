// Results of attention: softmax states, partial results and their merge, and what is written in the end.
#pragma once

#include "attention_schedule.cuh"

namespace paged_kv::cuda {

struct RowState {
  float maximum, sum;  // of exp(score - maximum)
};

// A softmax state with 4 dims of its weighted values, growing by partial results.
struct Partial {
  RowState state{-INFINITY, 0.0f};
  float values[4] = {};

  __device__ void add(RowState other, const float4& other_values) {
    if (other.sum == 0.0f) return;  // has seen no key: its values are nothing
    const float maximum = fmaxf(state.maximum, other.maximum);
    const float own = state.sum == 0.0f ? 0.0f : expf(state.maximum - maximum);
    const float weight = expf(other.maximum - maximum);
    state = {maximum, state.sum * own + other.sum * weight};
    values[0] = values[0] * own + other_values.x * weight;
    values[1] = values[1] * own + other_values.y * weight;
    values[2] = values[2] * own + other_values.z * weight;
    values[3] = values[3] * own + other_values.w * weight;
  }
};

// [token, head] as one number, of packed row `row` of a sequence.
__device__ inline int64_t output_row(const AttentionLaunch& a, const Segment& s, int32_t row) {
  const int32_t packed = s.first_row + row, query = a.group.divide(packed), group = a.group.value;
  return int64_t(s.sequence.token + query) * a.params.num_heads + s.kv_head * group + packed - query * group;
}

__device__ inline void store_lse(const AttentionLaunch& a, int64_t output_row, RowState state) {
  if (a.params.lse)
    a.params.lse[output_row] = state.sum == 0.0f ? -INFINITY : state.maximum + logf(state.sum);
}

// Up to four values of an output row, whatever the alignment of head_size_v.
__device__ inline void store_out(const AttentionLaunch& a, int64_t output_row, int32_t dim, const float (&values)[4]) {
  const int64_t size = a.params.value_cache.head_size;
  const int64_t at = output_row * size + dim;
  if (size % 4 == 0) {
    store_floats(a.params.out, a.params.query_dtype, at, values);
    return;
  }
#pragma unroll 1
  for (int i = 0; i < 4 && dim + i < size; ++i) {
    const float one[1] = {values[i]};
    store_floats(a.params.out, a.params.query_dtype, at + i, one);
  }
}

// A finished row's dims dim .. dim + 3. The sink enters here, once; a row without keys gives zeros.
__device__ __noinline__ inline void store_result(const AttentionLaunch& a, int64_t output_row, int32_t dim, Partial result) {
  float sum = result.state.sum;
  if (a.params.sinks && sum != 0.0f) {
    sum += expf(a.params.sinks[output_row % a.params.num_heads] - result.state.maximum);
  }
  float values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = sum == 0.0f ? 0.0f : result.values[i] * (1.0f / sum);
  if (dim < a.params.value_cache.head_size) store_out(a, output_row, dim, values);
  if (dim == 0) store_lse(a, output_row, result.state);
}

__device__ inline RowState* slot_states(const Workspace& w, int64_t slot) {
  return reinterpret_cast<RowState*>(w.slots + slot * w.slot_floats);
}

template <int kRows>
__device__ float* slot_values(const Workspace& w, int64_t slot, int32_t row) {
  return w.slots + slot * w.slot_floats + 2 * kRows + int64_t(row) * w.row_stride;
}

// This thread's share of a segment's result, dims dim .. dim + 3 of a row: final, or into the piece's slot.
template <int kRows>
__device__ void put(const AttentionLaunch& a, const Segment& s, int32_t row, int32_t dim, const Partial& result) {
  if (s.pieces == 1) return store_result(a, output_row(a, s, row), dim, result);
  const int64_t slot = slot_of(a, s.first_piece, s.piece);
  if (dim == 0) slot_states(a.workspace, slot)[row] = result.state;
  const float4 values{result.values[0], result.values[1], result.values[2], result.values[3]};
  *reinterpret_cast<float4*>(slot_values<kRows>(a.workspace, slot, row) + dim) = values;
}

// Memory in which a thread block merges: no more threads than this share a row's four dims.
struct MergeMemory {
  Partial partials[kMaxAttentionThreads];
  bool is_last;
};

inline constexpr int kMergeBatch = 8;  // partial results of a thread whose loads are in flight together

// Merges all partial results of an item. Threads are laid out [shares, rows * columns].
template <int kRows>
__device__ void merge_pieces(const AttentionLaunch& a, const Segment& s, MergeMemory& memory) {
  const int32_t columns = a.workspace.row_stride / 4, cells = s.rows * columns;
  const int32_t shares = a.params.deterministic ? 1 : max(1, int32_t(blockDim.x) / cells);  // cells vary with the batch
  const int32_t share = threadIdx.x / cells;
#pragma unroll 1
  for (int32_t start = 0; start < cells; start += blockDim.x) {
    const int32_t cell = start + threadIdx.x - share * cells;
    const bool works = cell < cells && share < shares;
    const int32_t row = works ? cell / columns : 0, dim = works ? cell % columns * 4 : 0;
    Partial own;
#pragma unroll 1
    for (int32_t first = share; works && first < s.pieces; first += shares * kMergeBatch) {
      RowState states[kMergeBatch];
      float4 values[kMergeBatch];
#pragma unroll
      for (int i = 0; i < kMergeBatch; ++i) {
        const int32_t number = first + i * shares;
        const int64_t slot = slot_of(a, s.first_piece, s.first_piece + min(number, s.pieces - 1));
        const float2 state = __ldcg(reinterpret_cast<const float2*>(slot_states(a.workspace, slot) + row));
        states[i] = {state.x, number < s.pieces ? state.y : 0.0f};
        values[i] = __ldcg(reinterpret_cast<const float4*>(slot_values<kRows>(a.workspace, slot, row) + dim));
      }
#pragma unroll
      for (int i = 0; i < kMergeBatch; ++i) own.add(states[i], values[i]);
    }
    memory.partials[threadIdx.x] = own;
    __syncthreads();
    if (works && share == 0) {
      for (int32_t other = 1; other < shares; ++other) {
        const Partial& part = memory.partials[other * cells + cell];
        own.add(part.state, {part.values[0], part.values[1], part.values[2], part.values[3]});
      }
      store_result(a, output_row(a, s, row), dim, own);
    }
    __syncthreads();
  }
}

// Called by all threads when the block's part of a segment has been put. The block that brings the last part merges.
template <int kRows>
__device__ void arrive(const AttentionLaunch& a, const Segment& s, MergeMemory& memory) {
  if (s.pieces == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    wait_for_predecessor();  // the counts have been set to zero
    memory.is_last = atomicAdd(&a.workspace.arrivals[s.first_piece], 1u) == uint32_t(s.pieces - 1);
    __threadfence();
  }
  __syncthreads();
  if (memory.is_last) merge_pieces<kRows>(a, s, memory);
}

// Tokens that belong to no sequence give zeros.
__device__ __noinline__ inline void zero_outside_spans(const AttentionLaunch& a) {
  const AttentionParams& p = a.params;
  const int64_t begin = p.num_seqs ? clamp(p.cu_seqlens_q[0], 0, p.num_tokens) : p.num_tokens;
  const int64_t end = p.num_seqs ? clamp(p.cu_seqlens_q[p.num_seqs], begin, p.num_tokens) : p.num_tokens;
  const int64_t outside = begin + p.num_tokens - end;
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < outside * p.num_heads; i += gridDim.x) {
    const int64_t token = i / p.num_heads < begin ? i / p.num_heads : i / p.num_heads - begin + end;
    const int64_t row = token * p.num_heads + i % p.num_heads;
#pragma unroll 1
    for (int32_t dim = threadIdx.x * 4; dim < a.workspace.row_stride; dim += blockDim.x * 4)
      store_result(a, row, dim, Partial{});
  }
}

}  // namespace paged_kv::cuda
