// The prefill kernels, host side, and the launch before them that finds out on the device what there is to do.

#include "attention_host.h"
#include "device.cuh"
#include "mma_instructions.cuh"
#include "prefill.h"
#include "prefill_launch.h"

namespace paged_kv::cuda::prefill {
namespace {

constexpr int kScheduleThreads = 1024;
constexpr int kScheduleWarps = kScheduleThreads / kWarp;
constexpr int kBuckets = kScheduleThreads;  // of row tiles with about as many keys
constexpr int kMergeThreads = 256, kMergeBlocksOfSm = 6;
constexpr int kMostParts = kWarp;  // of a tile: as many as a warp has lanes

struct Spans {
  int32_t token, q_len, seq_len, row_tiles;  // row_tiles: 0 if the sequence is not ours
};

__device__ Spans spans_of(const Launch& a, int32_t sequence) {
  const AttentionParams& p = a.params;
  const int32_t tokens = int32_t(p.num_tokens);
  Spans s;
  s.token = max(0, min(p.cu_seqlens_q[sequence], tokens));
  s.q_len = max(s.token, min(p.cu_seqlens_q[sequence + 1], tokens)) - s.token;
  s.seq_len = max(0, min(p.seq_lens[sequence], a.capacity));
  const int32_t packed = s.q_len * a.group;
  s.row_tiles = packed > a.decode_rows ? (packed + a.tile_rows - 1) / a.tile_rows : 0;
  return s;
}

__device__ Tile tile_of(const Launch& a, int32_t sequence, const Spans& s, int32_t number) {
  const int32_t rows = a.tile_rows;
  Tile t{sequence, s.token, s.q_len, s.seq_len, number * rows, min(rows, s.q_len * a.group - number * rows), 0,
         0,        0,       1,       0};
  const int32_t offset = s.seq_len - s.q_len;  // position of query 0
  const int32_t first = offset + t.first_row / a.group, last = offset + (t.first_row + t.rows - 1) / a.group;
  if (a.window_left >= 0) t.keys_begin = max(0, first - a.window_left);
  t.keys_end = s.seq_len;
  if (a.params.causal) t.keys_end = min(t.keys_end, last + 1);
  if (a.window_right >= 0) t.keys_end = min(t.keys_end, last + a.window_right + 1);
  t.keys_end = max(t.keys_end, 0);
  return t;
}

// Keys that a sequence's rows read, of one head: those of a prompt's first rows are fewer.
__device__ int32_t most_keys_of(const Launch& a, const Spans& s) {
  return a.window_left >= 0 ? min(s.seq_len, a.window_left + s.q_len) : s.seq_len;
}

// Steps of a tile's keys.
__device__ int32_t steps_of_keys(const Launch& a, int32_t begin, int32_t end) {
  return (max(end, begin + 1) + a.tile_keys - 1) / a.tile_keys - begin / a.tile_keys;
}

// Costs are counted in times of a key, that is of a tile's work for one: this is what a unit's begin and end take.
// docs/kernels/prefill.md
constexpr float kUnitCost = 240.0f;

// The first lane with the least cost. Called by a warp.
__device__ int lane_of_least(float cost) { return __ffs(int(__ballot_sync(kFullMask, cost == -warp_max(-cost)))) - 1; }

// ---- Parts ----
// Where there are few row tiles, their keys are shared by several units, and another launch adds up what those found.

// Steps of a part's keys, for `row_tiles` tiles of `steps` steps in all: a number of parts for a tile of average length
// is chosen by the time that the rounds of the thread blocks take. Called by a warp; each lane looks at a number.
__device__ int32_t steps_of_part(const Launch& a, int32_t row_tiles, float steps) {
  constexpr float kPartCost = 80.0f, kMergeCost = 300.0f;  // of storing a part, of the merging launch
  if (row_tiles == 0 || row_tiles > a.max_row_tiles || a.slots.most == 0) return INT32_MAX;
  const int32_t parts = int32_t(threadIdx.x % kWarp) + 1;
  const float length = ceilf(steps / float(row_tiles * parts)) * float(a.tile_keys);
  const float units = float(row_tiles * parts) * float(a.params.num_kv_heads);
  const float rounds = ceilf(units / float(a.max_blocks));
  float cost = rounds * (length + kUnitCost);
  if (parts > 1) cost += rounds * kPartCost + kMergeCost + units;
  if (parts > 1 && row_tiles * parts > a.slots.most - a.max_row_tiles) cost = INFINITY;
  const int best = lane_of_least(cost) + 1;
  return best == 1 ? INT32_MAX : int32_t(ceilf(steps / float(row_tiles * best)));
}

__device__ int32_t parts_of(const Launch& a, const Tile& t, int32_t part_steps) {
  return min((steps_of_keys(a, t.keys_begin, t.keys_end) - 1) / part_steps + 1, kMostParts);
}

// Part `part` of so many: all of about as many steps, none without any.
__device__ Tile part_of(const Launch& a, Tile t, int32_t part, int32_t num_parts) {
  if (num_parts == 1) return t;
  const int32_t first = t.keys_begin / a.tile_keys, steps = steps_of_keys(a, t.keys_begin, t.keys_end);
  const auto border = [&](int32_t number) { return (first + steps * number / num_parts) * a.tile_keys; };
  t.keys_begin = max(t.keys_begin, border(part));
  t.keys_end = min(t.keys_end, border(part + 1));
  t.part = part;
  t.num_parts = num_parts;
  return t;
}

// Thread blocks that shall work. Beside decodes perhaps not all: tensor cores and memory then work at the same time, on
// different SMs. `units` of `cost` each; the decode kernel reads `decoded` keys. Called by a warp; each lane looks at a
// number of blocks, and the least time until all is done decides.
__device__ int32_t blocks_for(const Launch& a, float units, float cost, float decoded) {
  // Time of a packed row and a key on one SM, in times that memory takes to read a key. A tenth more than measured, as
  // prefills that end late cost more than SMs that they do not need. docs/kernels/prefill.md
  constexpr float kRowCost = 1.0f;
  if (decoded == 0.0f) return a.max_blocks;
  const int32_t blocks = max((int32_t(threadIdx.x % kWarp) + 1) * a.max_blocks / kWarp, 1);
  const float share = float(blocks) / float(a.max_blocks), speed = 1.0f - share * share;  // of the decodes meanwhile
  const float prefills = ceilf(units / float(blocks)) * cost * kRowCost * float(a.tile_rows);
  const float time = prefills + fmaxf(decoded - speed * prefills, 0.0f);
  return __shfl_sync(kFullMask, blocks, lane_of_least(time));
}

// Kv heads whose keys and values, of all our sequences, lie near together: their units come before those of other heads.
__device__ int32_t section_for(const Launch& a, float keys) {
  constexpr float kNearBytes = 20e6f;  // an SM's part of the L2 cache has 25 MB; measured: docs/kernels/prefill.md
  const float bytes = 2.0f * keys * float(a.params.key_cache.head_size + a.params.value_cache.head_size);
  const float heads = kNearBytes / fmaxf(bytes, 1.0f);
  const int32_t all = int32_t(a.params.num_kv_heads);
  return heads < float(all) ? max(int32_t(heads), 1) : all;
}

__device__ float cost_of(const Tile& t) { return float(max(t.keys_end - t.keys_begin, 0)) + kUnitCost; }

// Calls function(tile, part, num_parts) for every row tile. Without parts a warp takes a sequence, a lane a tile of it. With
// parts, which few tiles have, a warp takes a tile, a lane each of the parts that it may have.
template <class Function>
__device__ void for_each_tile(const Launch& a, int32_t part_steps, Function&& function) {
  static_assert(kMostParts == kWarp);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const bool has_parts = part_steps != INT32_MAX;
  const int first = has_parts ? warp : lane, step = has_parts ? kScheduleWarps : kWarp;
#pragma unroll 1
  for (int32_t sequence = has_parts ? 0 : warp; sequence < a.params.num_seqs;
       sequence += has_parts ? 1 : kScheduleWarps) {
    const Spans s = spans_of(a, sequence);
#pragma unroll 1
    for (int32_t number = first; number < s.row_tiles; number += step) {
      const Tile t = tile_of(a, sequence, s, number);
      function(t, has_parts ? lane : 0, parts_of(a, t, part_steps));
    }
  }
}

// Exclusive sum over the threads' values. Called by all threads.
__device__ int32_t sum_before(int32_t value, int32_t (&sums)[kScheduleWarps]) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int32_t inclusive = warp_inclusive_sum(value);
  if (lane == kWarp - 1) sums[warp] = inclusive;
  __syncthreads();
  int32_t before = inclusive - value;
#pragma unroll
  for (int w = 0; w < kScheduleWarps; ++w) before += w < warp ? sums[w] : 0;
  return before;
}

// What there is to do, of one head.
struct Batch {
  int32_t most_keys, row_tiles;
  float steps;  // of all row tiles
  float keys_read, decoded;  // keys of the long sequences, keys that the decode kernel reads
};

// This thread's sequences of it.
__device__ Batch own_sequences(const Launch& a) {
  Batch b{};
  for (int32_t sequence = threadIdx.x; sequence < a.params.num_seqs; sequence += kScheduleThreads) {
    const Spans s = spans_of(a, sequence);
    b.most_keys = max(b.most_keys, s.seq_len);
    if (s.row_tiles == 0) {
      if (s.q_len > 0) b.decoded += float(max(most_keys_of(a, s), 1));  // without keys zeros are written
      continue;
    }
    b.keys_read += float(s.seq_len);
    b.row_tiles += s.row_tiles;
    const int32_t steps = steps_of_keys(a, 0, most_keys_of(a, s)) + 1;  // + 1: a window begins anywhere
    b.steps += float(s.row_tiles) * float(steps);
  }
  return b;
}

// Of all sequences. Called by all threads.
__device__ Batch whole_batch(const Launch& a, Batch (&batches)[kScheduleWarps]) {
  static_assert(kScheduleWarps == kWarp);
  const auto join = [](const Batch& b) {
    return Batch{__reduce_max_sync(kFullMask, b.most_keys), __reduce_add_sync(kFullMask, b.row_tiles),
                 warp_sum(b.steps), warp_sum(b.keys_read), warp_sum(b.decoded)};
  };
  const Batch own = join(own_sequences(a));
  if (threadIdx.x % kWarp == 0) batches[threadIdx.x / kWarp] = own;
  __syncthreads();
  return join(batches[threadIdx.x % kWarp]);
}

// Lists the row tiles or their parts, those with most keys first (a counting sort), and resets the counter that deals
// them out.
__global__ void __launch_bounds__(kScheduleThreads) schedule(const __grid_constant__ Launch a) {
  __shared__ Batch batches[kScheduleWarps];
  __shared__ int32_t positions[kBuckets], sums[kScheduleWarps], num_merges, num_slots;
  __shared__ float work;
  wait_for_predecessor();
  let_dependents_start();  // not before: some wait for this launch alone
  positions[threadIdx.x] = 0;
  if (threadIdx.x == 0) num_merges = num_slots = 0, work = 0.0f;
  const Batch batch = whole_batch(a, batches);
  const int32_t part_steps = steps_of_part(a, batch.row_tiles, batch.steps);
  int shift = 0;
  while (batch.most_keys >> shift >= kBuckets) ++shift;
  const auto bucket = [shift](const Tile& t) { return kBuckets - 1 - (max(t.keys_end - t.keys_begin, 0) >> shift); };
  float own_work = 0.0f;
  for_each_tile(a, part_steps, [&](const Tile& whole, int32_t part, int32_t num_parts) {
    if (part >= num_parts) return;
    const Tile t = part_of(a, whole, part, num_parts);
    atomicAdd(&positions[bucket(t)], 1);
    own_work += cost_of(t);
  });
  own_work = warp_sum(own_work);  // hundreds of atomic additions to one number would wait in line
  if (threadIdx.x % kWarp == 0 && own_work > 0.0f) atomicAdd(&work, own_work);
  __syncthreads();
  const int32_t count = positions[threadIdx.x], before = sum_before(count, sums);
  positions[threadIdx.x] = before;
  if (threadIdx.x / kWarp == kScheduleWarps - 1) {
    const int32_t tiles = __shfl_sync(kFullMask, before + count, kWarp - 1);
    const float heads = float(a.params.num_kv_heads);
    const int32_t blocks = blocks_for(a, float(tiles) * heads, work / float(max(tiles, 1)), batch.decoded * heads);
    if (threadIdx.x % kWarp == 0) {
      a.header->num_tiles = min(tiles, a.max_tiles);
      a.header->next_unit = 0;
      a.header->num_blocks = blocks;
      a.header->section = section_for(a, batch.keys_read);
      a.header->has_decodes = batch.decoded > 0.0f;
    }
  }
  __syncthreads();
  for_each_tile(a, part_steps, [&](const Tile& whole, int32_t part, int32_t num_parts) {
    int32_t slot = 0;
    if (num_parts > 1) slot = __shfl_sync(kFullMask, part == 0 ? atomicAdd(&num_slots, num_parts) : 0, 0);
    if (part >= num_parts) return;
    Tile t = part_of(a, whole, part, num_parts);
    t.first_slot = slot;
    const int32_t position = atomicAdd(&positions[bucket(t)], 1);
    if (position < a.max_tiles) a.tiles[position] = t;  // else cu_seqlens_q is no prefix sum
    if (num_parts > 1 && part == 0) a.merges[atomicAdd(&num_merges, 1)] = t;
  });
  __syncthreads();
  if (threadIdx.x == 0) a.header->num_merges = num_merges;
}

// Adds up the parts of a row, a warp a row of a kv head: as many at a time as the chip has room for.
template <int kHeadSize>
__global__ void __launch_bounds__(kMergeThreads, kMergeBlocksOfSm) merge(const __grid_constant__ Launch a) {
  constexpr int kDims = kHeadSize / kWarp;  // of a lane
  using Values = Vector<float, kDims>;
  let_dependents_start();
  wait_for_predecessor();
  const AttentionParams& p = a.params;
  const int lane = threadIdx.x % kWarp, kv_heads = int(p.num_kv_heads);
  const int32_t rows = a.header->num_merges * kv_heads * a.slots.rows;
#pragma unroll 1
  for (int32_t index = (blockIdx.x * kMergeThreads + threadIdx.x) / kWarp; index < rows;
       index += gridDim.x * (kMergeThreads / kWarp)) {
    const int32_t item = index / a.slots.rows, row = index - item * a.slots.rows;
    const Tile& t = a.merges[item / kv_heads];
    const int32_t kv_head = item % kv_heads;
    if (row >= t.rows) continue;
    const float* first = a.slots.data + (int64_t(t.first_slot) * kv_heads + kv_head) * a.slots.slot_floats;
    const int64_t step = kv_heads * a.slots.slot_floats;
    // A lane knows the state of a part.
    float2 state = {-INFINITY, 0.0f};
    if (lane < t.num_parts) state = reinterpret_cast<const float2*>(first + lane * step)[row];
    const float maximum = warp_max(state.x);
    const float weight = maximum == -INFINITY ? 0.0f : exp2f(state.x - maximum), sum = warp_sum(state.y * weight);
    float sums[kDims] = {};
#pragma unroll 4
    for (int part = 0; part < t.num_parts; ++part) {
      const float own = __shfl_sync(kFullMask, weight, part);
      const Values values =
          *reinterpret_cast<const Values*>(first + part * step + 2 * a.slots.rows + row * kHeadSize + lane * kDims);
#pragma unroll
      for (int i = 0; i < kDims; ++i) sums[i] = fmaf(values.data[i], own, sums[i]);
    }
    const int32_t packed = t.first_row + row, query = packed / a.group, head = kv_head * a.group + packed % a.group;
    const int64_t out_row = int64_t(t.token + query) * p.num_heads + head;
    float total = sum;
    if (p.sinks && sum != 0.0f) total += exp2f(p.sinks[head] * mma::kLog2e - maximum);
#pragma unroll
    for (int i = 0; i < kDims; ++i) sums[i] *= total == 0.0f ? 0.0f : 1.0f / total;
    if (lane * kDims < p.value_cache.head_size)
      store_floats(p.out, p.query_dtype, out_row * p.value_cache.head_size + lane * kDims, sums);
    if (p.lse && lane == 0) p.lse[out_row] = sum == 0.0f ? -INFINITY : maximum * mma::kLn2 + logf(sum);
  }
}

// ---- Host ----

// Packed rows that a tile has room for.
int32_t most_rows(const AttentionParams& p, Kind kind) {
  const int size_class = head_size_class(p);
  return kind == Kind::wgmma ? rows_of(size_class) : mma_sync::rows_of(size_class);
}

// ... and those that it has: whole tokens.
int32_t tile_rows(const AttentionParams& p, Kind kind) {
  const int32_t group = int32_t(p.num_heads / p.num_kv_heads);
  return most_rows(p, kind) / group * group;
}

// What a launch has room for, and its scratch memory: behind the header tiles, merges and slots.
struct Sizes {
  int64_t blocks;  // thread blocks
  int64_t row_tiles, tiles;  // tiles: with their parts
  int64_t slots, slot_floats;  // slots of a kv head, floats of a slot
  int64_t slots_at, bytes;  // where the slots begin, where they end
};

Sizes sizes_of(const AttentionParams& p, Kind kind) {
  Sizes s{};
  s.blocks = current_device().num_sms;
  if (kind == Kind::mma_sync) s.blocks *= mma_sync::blocks_of_sm(head_size_class(p));
  // A sequence may end inside a tile. Of many sequences those with few rows are the decode kernel's.
  const int64_t packed = p.num_tokens * (p.num_heads / p.num_kv_heads), with_many = packed / (kDecodeRows + 1);
  const int64_t sequences = p.num_seqs > 1 && with_many < p.num_seqs ? with_many : p.num_seqs;
  s.row_tiles = divide_up(packed, tile_rows(p, kind)) + sequences;
  // Parts for twice as many units as there are thread blocks, and a broken one for each tile. None where there are enough
  // row tiles, or where results must not hang on the neighbours of a row.
  const bool has_parts = !p.deterministic && s.row_tiles * p.num_kv_heads <= s.blocks;
  s.slots = has_parts ? s.row_tiles + 2 * s.blocks / p.num_kv_heads : 0;
  s.tiles = has_parts ? s.slots : s.row_tiles;
  s.slot_floats = int64_t(most_rows(p, kind)) * (2 + head_size_class(p));
  const int64_t listed = s.tiles + (has_parts ? s.row_tiles : 0);
  s.slots_at = kHeaderBytes + divide_up(listed * int64_t(sizeof(Tile)), 256) * 256;
  s.bytes = s.slots_at + 4 * s.slots * p.num_kv_heads * s.slot_floats;
  return s;
}

bool is_hopper() {
  if (current_device().compute_capability != 90) return false;
  static int8_t known[kMaxDevices];  // 1: the library has code for it, 2: it has not
  int8_t& device = known[current_device_index()];
  if (device == 0) device = can_run() ? 1 : 2;
  return device == 1;
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function; the library links to no driver.
Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
#else
    check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
#endif
    if (result != cudaDriverEntryPointSuccess)
      throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  return found;
}

CUtensorMap encode(DType dtype, void* data, const cuuint64_t (&sizes)[4], const int64_t (&strides)[3],
                   const cuuint32_t (&box)[4]) {
  cuuint64_t bytes[3];
  for (int i = 0; i < 3; ++i)  // the stride of an axis of one element is never used, but must pass for one
    bytes[i] = cuuint64_t(sizes[i + 1] > 1 ? 2 * strides[i] : 16);
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto type = dtype == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map{};
  const CUresult result =
      encoder()(&map, type, 4, data, sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(int(result)));
  return map;
}

// A pool as [blocks, heads, slots, dims], copied in boxes of 16 slots x 64 dims; outside it everything is zero.
CUtensorMap map_of(const AttentionParams& p, const Cache& c) {
  return encode(
      c.dtype, c.data,
      {cuuint64_t(c.head_size), cuuint64_t(p.block_size), cuuint64_t(p.num_kv_heads), cuuint64_t(p.num_blocks)},
      {c.slot_stride, c.head_stride, c.block_stride}, {64, kBoxKeys, 1, 1});
}

// The queries as [tokens, heads, dims], copied in boxes of the tokens of a tile x the heads of a group x 64 dims.
CUtensorMap map_of_queries(const AttentionParams& p, int32_t group, int32_t tile_rows) {
  return encode(p.query_dtype, const_cast<void*>(p.query),
                {cuuint64_t(p.key_cache.head_size), cuuint64_t(p.num_heads), cuuint64_t(p.num_tokens), 1},
                {p.query_head_stride, p.query_token_stride, 0},
                {64, cuuint32_t(group), cuuint32_t(tile_rows / group), 1});
}

template <int kHeadSize>
void launch_merge(const Launch& launch, cudaStream_t stream) {
  launch_in_order<merge<kHeadSize>>(Order::beside_predecessor,
                                    dim3(unsigned(kMergeBlocksOfSm * current_device().num_sms)), dim3(kMergeThreads), 0,
                                    launch, stream, "paged_attention");
}

// The unit is the largest that all strides are multiples of.
RowPlaces places_of(const AttentionParams& p, const Cache& c) {
  const int64_t bytes = size_of(c.dtype);
  const auto stride = [&](int64_t value, int64_t size) { return size > 1 ? bytes * value : 0; };
  const int64_t block = stride(c.block_stride, p.num_blocks), slot = stride(c.slot_stride, p.block_size);
  const int64_t head = stride(c.head_stride, p.num_kv_heads), all = block | slot | head | int64_t(1) << 30;
  const int64_t unit = all & -all;
  return {uint32_t(block / unit), uint32_t(slot / unit), uint32_t(head / unit), uint32_t(unit)};
}

// Do 32 bits count the units up to a cache's end?
bool fits_places(const AttentionParams& p, const Cache& c) {
  const RowPlaces places = places_of(p, c);
  const double unit = places.unit_bytes, bytes = double(size_of(c.dtype));
  const double most = double(c.block_stride) * double(p.num_blocks) + double(c.slot_stride) * double(p.block_size) +
                      double(c.head_stride) * double(p.num_kv_heads);
  return bytes * most / unit < double(UINT32_MAX);
}

Launch launch_of(const AttentionParams& p, Kind kind, int32_t decode_rows, void* workspace) {
  Launch a{};
  a.params = p;
  char* memory = static_cast<char*>(workspace);
  a.header = reinterpret_cast<Header*>(memory);
  a.tiles = reinterpret_cast<Tile*>(memory + kHeaderBytes);
  const Sizes sizes = sizes_of(p, kind);
  a.max_row_tiles = int32_t(sizes.row_tiles);
  a.max_tiles = int32_t(sizes.tiles);
  a.max_blocks = int32_t(sizes.blocks);
  a.merges = a.tiles + a.max_tiles;
  a.slots = {reinterpret_cast<float*>(memory + sizes.slots_at), sizes.slot_floats, most_rows(p, kind),
             int32_t(sizes.slots)};
  a.group = int32_t(p.num_heads / p.num_kv_heads);
  a.tile_rows = tile_rows(p, kind);
  const int size_class = head_size_class(p);
  a.tile_keys = kind == Kind::wgmma ? keys_of(size_class) : mma_sync::keys_of(size_class);
  if (kind == Kind::wgmma) {
    a.keys = map_of(p, p.key_cache);
    a.values = map_of(p, p.value_cache);
    a.queries = map_of_queries(p, a.group, a.tile_rows);
  } else {
    a.key_places = places_of(p, p.key_cache);
    a.value_places = places_of(p, p.value_cache);
  }
  a.decode_rows = decode_rows;
  a.capacity = clipped_capacity(p);
  a.window_left = clip_window(p.window_left);
  a.window_right = clip_window(p.window_right);
  a.block_size = divisor_of(p.block_size);
  return a;
}

// With fewer units than this the decode kernel is faster than that of every chip: it splits keys finer and stores less.
bool fills_chip(const AttentionParams& p, Kind kind) {
  return 8 * p.num_tokens * p.num_heads >= int64_t(current_device().num_sms) * tile_rows(p, kind);
}

// What both kernels ask for: whole chunks of 16 bytes, and numbers that 32 bits hold.
bool fits_any(const AttentionParams& p) {
  const DType dtype = p.key_cache.dtype;
  const auto is_aligned = [](const void* data) { return reinterpret_cast<intptr_t>(data) % 16 == 0; };
  const auto in_chunks = [](int64_t stride, int64_t size, int64_t bytes) {
    return size == 1 || stride * bytes % 16 == 0;
  };
  const auto fits_cache = [&](const Cache& c) {
    const int64_t bytes = size_of(c.dtype);
    return c.dtype == dtype && c.head_size <= 256 && c.head_size * bytes % 16 == 0 && is_aligned(c.data) &&
           in_chunks(c.block_stride, p.num_blocks, bytes) && in_chunks(c.slot_stride, p.block_size, bytes) &&
           in_chunks(c.head_stride, p.num_kv_heads, bytes);
  };
  const auto fits_int32 = [](int64_t value) { return value > 0 && value < INT32_MAX; };
  const int64_t group = p.num_heads / p.num_kv_heads;
  return p.query_dtype != DType::float32 && p.mask.kind == MaskKind::none && !p.alibi_slopes && p.scale > 0.0f &&
         group <= 128 && fits_int32(p.block_size) && fits_int32(p.num_blocks) &&
         double(p.num_tokens) * double(p.num_heads) < double(1 << 30) && fits_cache(p.key_cache) &&
         fits_cache(p.value_cache) && is_aligned(p.query) && is_aligned(p.out) &&
         in_chunks(p.query_token_stride, p.num_tokens, 2) && in_chunks(p.query_head_stride, p.num_heads, 2) &&
         p.max_seqlen_q * group > kDecodeRows;
}

bool is_eight_bit(const AttentionParams& p) { return size_of(p.key_cache.dtype) == 1; }

// Chips expand float8_e4m3fn from compute capability 8.9 on; other dtypes are multiplied as they are, without scales.
bool fits_dtype(const AttentionParams& p) {
  if (is_eight_bit(p)) return p.key_cache.dtype != DType::float8_e4m3fn || current_device().compute_capability >= 89;
  return p.key_cache.dtype == p.query_dtype && p.key_cache.scale.kind == ScaleKind::none &&
         p.value_cache.scale.kind == ScaleKind::none;
}

// The copy engine's boxes are 16 slots of a block; a tensor map has 40 bits for the bytes of a stride.
bool fits_tensor_maps(const AttentionParams& p) {
  const auto fits_stride = [](int64_t stride, int64_t size) {
    return size == 1 || (stride > 0 && stride < int64_t(1) << 38);
  };
  const auto fits_cache = [&](const Cache& c) {
    return fits_stride(c.block_stride, p.num_blocks) && fits_stride(c.slot_stride, p.block_size) &&
           fits_stride(c.head_stride, p.num_kv_heads);
  };
  return p.block_size % kBoxKeys == 0 && fits_cache(p.key_cache) && fits_cache(p.value_cache) &&
         fits_stride(p.query_token_stride, p.num_tokens) && fits_stride(p.query_head_stride, p.num_heads);
}

using Run = void (*)(const Launch&, int, cudaStream_t);

Run attention_for(const AttentionParams& p, Kind kind) {
  const bool is_half = p.query_dtype == DType::float16;
  if (kind == Kind::wgmma) return is_half ? launch_float16 : launch_bfloat16;
  if (is_eight_bit(p)) return is_half ? mma_sync::launch_eight_bit_float16 : mma_sync::launch_eight_bit_bfloat16;
  return is_half ? mma_sync::launch_float16 : mma_sync::launch_bfloat16;
}

}  // namespace

Kind kind_for(const AttentionParams& p) {
  if (!fits_any(p) || !fits_dtype(p)) return Kind::none;
  const Kind kind = !is_eight_bit(p) && is_hopper() && fits_tensor_maps(p) ? Kind::wgmma : Kind::mma_sync;
  if (tile_rows(p, kind) == 0) return Kind::none;
  if (kind == Kind::wgmma) return kind;
  const bool fits = fits_places(p, p.key_cache) && fits_places(p, p.value_cache);
  // Deterministic results must not hang on a row's neighbours.
  return fits && (p.deterministic || fills_chip(p, kind)) ? kind : Kind::none;
}

int64_t workspace_bytes(const AttentionParams& p, Kind kind) { return sizes_of(p, kind).bytes; }

void launch(const AttentionParams& p, Kind kind, int32_t decode_rows, void* workspace, cudaStream_t stream,
            const std::function<void(const int32_t*)>& beside) {
  const Launch a = launch_of(p, kind, decode_rows, workspace);
  launch_in_order<schedule>(Order::beside_predecessor, dim3(1), dim3(kScheduleThreads), 0, a, stream,
                            "paged_attention");
  const auto run = attention_for(p, kind);
  const int size_class = head_size_class(p);
  run(a, size_class, stream);
  beside(&a.header->has_decodes);
  if (a.slots.most == 0) return;
  dispatch_head_size(size_class, [&](auto size) { launch_merge<decltype(size)::value>(a, stream); });
}

}  // namespace paged_kv::cuda::prefill
