// Results of attention: softmax states, partial results and their merge, and what is written in the end.
#pragma once

#include "attention_schedule.cuh"

namespace paged_kv::cuda {

struct RowState {
  float maximum, sum;  // of exp(score - maximum)
};

// A softmax state with 4 dims of its weighted values.
struct Partial {
  RowState state{-INFINITY, 0.0f};
  float4 values{0.0f, 0.0f, 0.0f, 0.0f};
};

// Merges partial results at once: no step waits for another, since these run when nothing else is left to do. Parts
// that have seen no key have a maximum of -inf and zeros. kFast: good for 16-bit results.
template <bool kFast = false, int kCount>
__device__ Partial combine(const Partial (&parts)[kCount]) {
  Partial merged;
#pragma unroll
  for (int i = 0; i < kCount; ++i) merged.state.maximum = fmaxf(merged.state.maximum, parts[i].state.maximum);
  const float base = merged.state.maximum == -INFINITY ? 0.0f : merged.state.maximum;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float weight = kFast ? __expf(parts[i].state.maximum - base) : expf(parts[i].state.maximum - base);
    merged.state.sum = fmaf(parts[i].state.sum, weight, merged.state.sum);
    merged.values.x = fmaf(parts[i].values.x, weight, merged.values.x);
    merged.values.y = fmaf(parts[i].values.y, weight, merged.values.y);
    merged.values.z = fmaf(parts[i].values.z, weight, merged.values.z);
    merged.values.w = fmaf(parts[i].values.w, weight, merged.values.w);
  }
  return merged;
}

// [token, head] as one number, of packed row `packed` of a sequence.
__device__ inline int64_t output_row(const AttentionLaunch& a, int32_t token, int32_t kv_head, int32_t packed) {
  const int32_t query = a.group.divide(packed), group = a.group.value;
  return int64_t(token + query) * a.params.num_heads + kv_head * group + packed - query * group;
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
__device__ __noinline__ inline void store_result(const AttentionLaunch& a, int64_t output_row, int32_t dim,
                                                 Partial result) {
  const RowState state = result.state;
  float sum = state.sum;
  if (a.params.sinks && sum != 0.0f) {
    sum += expf(a.params.sinks[output_row % a.params.num_heads] - state.maximum);
  }
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  const float4 v = result.values;
  const float out[4] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
  if (dim < a.params.value_cache.head_size) store_out(a, output_row, dim, out);
  if (dim == 0 && a.params.lse)
    a.params.lse[output_row] = state.sum == 0.0f ? -INFINITY : state.maximum + logf(state.sum);
}

__device__ inline RowState* slot_states(const Workspace& w, int32_t slot) {
  return reinterpret_cast<RowState*>(w.slots + slot * w.slot_floats);
}

template <int kRows>
__device__ float* slot_values(const Workspace& w, int32_t slot, int32_t row) {
  return w.slots + slot * w.slot_floats + 2 * kRows + row * w.row_stride;
}

// This thread's share of a segment's result, dims dim .. dim + 3 of a row: final, or partial.
template <int kRows>
__device__ void put(const AttentionLaunch& a, const Segment& s, int32_t row, int32_t dim, const Partial& result) {
  if (s.slot < 0) {
    store_result(a, output_row(a, s.sequence.token, s.kv_head, s.first_row + row), dim, result);
    return;
  }
  if (dim == 0) slot_states(a.workspace, s.slot)[row] = result.state;
  *reinterpret_cast<float4*>(slot_values<kRows>(a.workspace, s.slot, row) + dim) = result.values;
}

// Tokens that belong to no sequence give zeros: those before and after the `owned` ones.
__device__ __noinline__ inline void zero_tokens(const AttentionLaunch& a, KeyRange owned) {
  const int64_t heads = a.params.num_heads, outside = owned.begin + a.num_tokens - owned.end;
#pragma unroll 1
  for (int64_t i = blockIdx.x; i < outside * heads; i += gridDim.x) {
    const int64_t token = i / heads < owned.begin ? i / heads : i / heads - owned.begin + owned.end;
#pragma unroll 1
    for (int32_t dim = threadIdx.x * 4; dim < a.workspace.row_stride; dim += blockDim.x * 4)
      store_result(a, token * heads + i % heads, dim, Partial{});
  }
}

__device__ inline void zero_outside(const AttentionLaunch& a, KeyRange owned) {
  if (a.has_decodes) return;  // the prefill kernel does
  if (owned.begin > 0 || owned.end < a.num_tokens) zero_tokens(a, owned);
}

// ---- The merging launch ----

inline constexpr int kMergeThreads = 256;
inline constexpr int kMergeWarps = kMergeThreads / kWarp;
inline constexpr int kMergeBatch = 6;  // partial results of a warp whose loads are in flight together

// A row of an item that several thread blocks shared, and, if max_seqlen_q was too low, every a.max_rows-th after it.
struct Task {
  Record record;
  int32_t row;
};

inline constexpr int kMaxTasks = 96;  // of a thread block: 3 borders of 32 rows

struct MergeMemory {
  ScheduleMemory<kMergeThreads> schedule;
  Task tasks[kMaxTasks];
  int32_t counts[kMergeWarps];
  Partial partials[kMergeWarps][kWarp];
};

// Merges the partial results `share`, `share` + `shares` ... of one row; a lane has 4 dims.
template <int kRows>
__device__ Partial merge_slots(const AttentionLaunch& a, const Record& r, int32_t row, int32_t dim, int share,
                               int shares) {
  Partial parts[kMergeBatch + 1];  // the last: what earlier batches gave
#pragma unroll 1
  for (int32_t first = share; first < r.num_slots; first += shares * kMergeBatch) {
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      const int32_t number = first + i * shares;
      const int32_t slot = number == 0 ? r.first_slot : r.second_slot + (number - 1) * r.slot_step;
      parts[i] = Partial{};
      if (number >= r.num_slots) continue;
      parts[i].state = slot_states(a.workspace, slot)[row];
      parts[i].values = *reinterpret_cast<const float4*>(slot_values<kRows>(a.workspace, slot, row) + dim);
    }
    parts[kMergeBatch] = combine(parts);
  }
  return parts[kMergeBatch];
}

// Merges one row with `shares` warps, this one being number `share`. Called by all threads; !works: without a part.
template <int kRows>
__device__ void merge_row(const AttentionLaunch& a, MergeMemory& memory, bool works, const Record& r, int32_t row,
                          int share, int shares) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int32_t start = 0; start < a.workspace.row_stride; start += 4 * kWarp) {
    const int32_t dim = start + 4 * lane;
    const bool has_dims = works && dim < a.workspace.row_stride;
    Partial own = has_dims ? merge_slots<kRows>(a, r, row, dim, share, shares) : Partial{};
    if (shares > 1) {
      memory.partials[warp][lane] = own;
      __syncthreads();
      if (share == 0 && has_dims) {
        Partial parts[kMergeWarps];
#pragma unroll
        for (int i = 0; i < kMergeWarps; ++i) parts[i] = i < shares ? memory.partials[warp + i][lane] : Partial{};
        own = combine(parts);
      }
      __syncthreads();
    }
    if (share == 0 && has_dims) store_result(a, output_row(a, r.token, r.kv_head, r.first_row + row), dim, own);
  }
}

// Merges tasks[0 .. count): the warps are dealt out evenly to them. Called by all threads.
template <int kRows>
__device__ void merge_tasks(const AttentionLaunch& a, MergeMemory& memory, int count) {
  const int warp = threadIdx.x / kWarp;
  // How many tasks a thread block has depends on the batch, and so does the order in which shares are summed.
  const int shares = a.deterministic || count >= kMergeWarps ? 1 : kMergeWarps / count;
  const int at_once = kMergeWarps / shares;
#pragma unroll 1
  for (int first = 0; first < count; first += at_once) {
    const int number = first + warp / shares;
    const bool works = warp / shares < at_once && number < count;
    const Task& task = memory.tasks[works ? number : 0];
#pragma unroll 1
    for (int32_t row = task.row, step = 0; step < kRows; row += a.max_rows, step += a.max_rows)
      merge_row<kRows>(a, memory, works && row < task.record.rows, task.record, row, warp % shares, shares);
  }
}

// The usual case of merge_tasks: no more tasks than warps, up to 128 dims, one row a task. Everything that does not
// depend on the partial results is made ready before they are waited for: this is the end of a step, and each
// instruction that is left to it adds to the time of all.
template <int kRows>
__device__ void merge_few_tasks(const AttentionLaunch& a, MergeMemory& memory, int count) {
  const int warp = threadIdx.x / kWarp, dim = threadIdx.x % kWarp * 4;
  const int shares = kMergeWarps / count, share = warp % shares;
  const bool works = warp / shares < count && dim < a.workspace.row_stride;
  const Task task = memory.tasks[works ? warp / shares : 0];
  const Record& r = task.record;
  const float* slots = a.workspace.slots;
  const int64_t slot_floats = a.workspace.slot_floats;
  int64_t offsets[kMergeBatch];
#pragma unroll
  for (int i = 0; i < kMergeBatch; ++i) {
    const int32_t number = min(share + i * shares, r.num_slots - 1);
    offsets[i] = (number == 0 ? r.first_slot : r.second_slot + (number - 1) * r.slot_step) * slot_floats;
  }
  const int parts = works ? (r.num_slots - share + shares - 1) / shares : 0;
  const float* states = slots + 2 * task.row;
  const float* values = slots + 2 * kRows + task.row * a.workspace.row_stride + dim;
  const int64_t out_row = output_row(a, r.token, r.kv_head, r.first_row + task.row);
  const int32_t head_size = int32_t(a.params.value_cache.head_size);
  const float sink = a.params.sinks ? a.params.sinks[out_row % a.params.num_heads] : -INFINITY;
  float* lse = a.params.lse;
  void* out = a.params.out;
  const DType dtype = a.params.query_dtype;

  wait_for_predecessor();
  Partial batch[kMergeBatch];
#pragma unroll
  for (int i = 0; i < kMergeBatch; ++i) {
    if (i >= parts) continue;
    batch[i].state = *reinterpret_cast<const RowState*>(states + offsets[i]);
    batch[i].values = *reinterpret_cast<const float4*>(values + offsets[i]);
  }
  Partial own = combine(batch);
  if (parts > kMergeBatch) {
    Record rest = r;  // without the first batch of all shares
    rest.num_slots -= kMergeBatch * shares;
    rest.first_slot = r.second_slot + (kMergeBatch * shares - 1) * r.slot_step;
    rest.second_slot = rest.first_slot + r.slot_step;
    const Partial pair[2] = {own, merge_slots<kRows>(a, rest, task.row, dim, share, shares)};
    own = combine(pair);
  }
  if (shares > 1) {
    memory.partials[warp][dim / 4] = own;
    __syncthreads();
    if (share != 0) return;
    Partial all[kMergeWarps];
#pragma unroll
    for (int i = 0; i < kMergeWarps; ++i)
      if (i < shares) all[i] = memory.partials[min(warp + i, kMergeWarps - 1)][dim / 4];
    own = combine(all);
  }
  if (!works || share != 0) return;
  const float factor = own.state.sum == 0.0f ? 0.0f : 1.0f / (own.state.sum + expf(sink - own.state.maximum));
  const float4 v = own.values;
  const float row[4] = {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
  if (dim == 0 && lse) lse[out_row] = own.state.sum == 0.0f ? -INFINITY : own.state.maximum + logf(own.state.sum);
  if (head_size % 4 == 0) {
    store_floats(out, dtype, out_row * head_size + dim, row);
  } else if (dim < head_size) {
    store_out(a, out_row, dim, row);
  }
}

// Has a task more than one row? Only if max_seqlen_q was too low.
__device__ inline bool has_second_rows(const AttentionLaunch& a, const MergeMemory& memory, int count) {
  const int number = threadIdx.x % kWarp;
  return __any_sync(kFullMask,
                    number < count && memory.tasks[number].row + a.max_rows < memory.tasks[number].record.rows);
}

// Appends the warps' tasks that have something to merge to the `count` tasks there are. Called by all threads.
__device__ inline int add_tasks(MergeMemory& memory, int count, const Task& own) {
  const int warp = threadIdx.x / kWarp;
  const bool live = own.record.num_slots > 0 && own.row < own.record.rows;
  if (threadIdx.x % kWarp == 0) memory.counts[warp] = live;
  __syncthreads();
  int before = count;
#pragma unroll
  for (int w = 0; w < kMergeWarps; ++w) {
    before += w < warp ? memory.counts[w] : 0;
    count += memory.counts[w];
  }
  if (live && threadIdx.x % kWarp == 0) memory.tasks[before] = own;
  __syncthreads();
  return count;
}

// Brought up while the attention launch runs: what there is to merge follows from the lengths, so it is known before
// the partial results are. A task is a (row, border between two thread blocks); a thread block looks at neighbouring
// borders, of which only the first inside an item counts: the fewer items there are, the more blocks share their rows.
template <int kRows, int kKeys>
__global__ void __launch_bounds__(kMergeThreads, 3) merge_parts(const __grid_constant__ AttentionLaunch a) {
  __shared__ MergeMemory memory;
  const Schedule<kRows, kKeys, false> schedule(a, memory.schedule);
  const int32_t num_tasks = a.grid * a.max_rows;
  const int32_t per_block = (num_tasks + gridDim.x - 1) / gridDim.x;
  const int32_t first = blockIdx.x * per_block, end = min(first + per_block, num_tasks);
  int count = 0;
#pragma unroll 1
  for (int32_t start = first; start < end; start += kMergeWarps) {
    const int32_t number = start + int32_t(threadIdx.x / kWarp), row = number / a.grid;
    Task own{};
    if (number < end) own = {schedule.shared_item(number - row * a.grid), row};
    count = add_tasks(memory, count, own);
  }
  // Every block waits, also one without a task: the next launch on the stream relies on this one alone.
  const bool few = count > 0 && count <= kMergeWarps && a.workspace.row_stride <= 4 * kWarp;
  if (few && !has_second_rows(a, memory, count)) return merge_few_tasks<kRows>(a, memory, count);
  wait_for_predecessor();
  if (count > 0) merge_tasks<kRows>(a, memory, count);
}

// Deterministic mode: pieces have told by their records.
template <int kRows>
__global__ void __launch_bounds__(kMergeThreads, 4) merge_pieces(const __grid_constant__ AttentionLaunch a) {
  __shared__ MergeMemory memory;
  wait_for_predecessor();
  const int64_t num_tasks = *a.workspace.num_records * a.max_rows;
#pragma unroll 1
  for (int64_t start = int64_t(blockIdx.x) * kMergeWarps; start < num_tasks;
       start += int64_t(gridDim.x) * kMergeWarps) {
    const int64_t number = start + threadIdx.x / kWarp;
    Task own{};
    if (number < num_tasks) own = {a.workspace.records[number / a.max_rows], int32_t(number % a.max_rows)};
    const int count = add_tasks(memory, 0, own);
    if (count > 0) merge_tasks<kRows>(a, memory, count);
    __syncthreads();
  }
}

}  // namespace paged_kv::cuda
