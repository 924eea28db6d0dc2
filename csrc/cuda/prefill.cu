// The prefill kernels, host side, and the launch before them that finds out on the device what there is to do.

#include "attention_host.h"
#include "device.cuh"
#include "prefill.h"
#include "prefill_launch.h"

namespace paged_kv::cuda::prefill {
namespace {

constexpr int kScheduleThreads = 1024;
constexpr int kScheduleWarps = kScheduleThreads / kWarp;
constexpr int kBuckets = kScheduleThreads;  // of row tiles with about as many keys

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
  Tile t{sequence, s.token, s.q_len, s.seq_len, number * rows, min(rows, s.q_len * a.group - number * rows), 0, 0};
  const int32_t offset = s.seq_len - s.q_len;  // position of query 0
  const int32_t first = offset + t.first_row / a.group, last = offset + (t.first_row + t.rows - 1) / a.group;
  if (a.window_left >= 0) t.keys_begin = max(0, first - a.window_left);
  t.keys_end = s.seq_len;
  if (a.params.causal) t.keys_end = min(t.keys_end, last + 1);
  if (a.window_right >= 0) t.keys_end = min(t.keys_end, last + a.window_right + 1);
  t.keys_end = max(t.keys_end, 0);
  return t;
}

// Keys that a sequence of the decode kernel's reads, of one head.
__device__ int32_t decoded_keys(const Launch& a, const Spans& s) {
  if (s.row_tiles > 0 || s.q_len == 0) return 0;
  return a.window_left >= 0 ? min(s.seq_len, a.window_left + s.q_len) : s.seq_len;
}

// Thread blocks that shall work. Beside decodes not all: tensor cores and memory then work at the same time, on different
// SMs. `work`: key steps of the row tiles of one head, `decoded`: keys that the decode kernel reads of it.
__device__ int32_t blocks_for(const Launch& a, float work, float decoded) {
  constexpr float kStepCost = 300.0f;  // time of a step on one SM, in times that memory takes to read a key
  const float blocks = ceilf(kStepCost * work / decoded);
  return blocks < float(a.max_blocks) ? int32_t(fmaxf(blocks, 1.0f)) : a.max_blocks;
}

// Kv heads whose keys and values, of all our sequences, lie near together: their units come before those of other heads.
__device__ int32_t section_for(const Launch& a, float keys) {
  constexpr float kNearBytes = 20e6f;  // an SM's part of the L2 cache has 25 MB; measured: docs/kernels/prefill.md
  const float bytes = 2.0f * keys * float(a.params.key_cache.head_size + a.params.value_cache.head_size);
  const float heads = kNearBytes / fmaxf(bytes, 1.0f);
  const int32_t all = int32_t(a.params.num_kv_heads);
  return heads < float(all) ? max(int32_t(heads), 1) : all;
}

// Key steps of a tile: its keys, and what its begin and end take.
__device__ float steps_of(const Tile& t) { return float(max(t.keys_end - t.keys_begin, 0) + 256); }

// Calls function(tile) for every row tile, a warp a sequence.
template <class Function>
__device__ void for_each_tile(const Launch& a, Function&& function) {
#pragma unroll 1
  for (int32_t sequence = threadIdx.x / kWarp; sequence < a.params.num_seqs; sequence += kScheduleWarps) {
    const Spans s = spans_of(a, sequence);
#pragma unroll 1
    for (int32_t number = threadIdx.x % kWarp; number < s.row_tiles; number += kWarp)
      function(tile_of(a, sequence, s, number));
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

// Lists the row tiles, those with most keys first (a counting sort), and resets the counter that deals them out.
__global__ void __launch_bounds__(kScheduleThreads) schedule(const __grid_constant__ Launch a) {
  __shared__ int32_t positions[kBuckets], sums[kScheduleWarps], most_keys;
  __shared__ float work, decoded, keys_read;
  let_dependents_start();
  positions[threadIdx.x] = 0;
  if (threadIdx.x == 0) most_keys = 0, work = decoded = keys_read = 0.0f;
  __syncthreads();
  for (int32_t sequence = threadIdx.x; sequence < a.params.num_seqs; sequence += kScheduleThreads) {
    const Spans s = spans_of(a, sequence);
    atomicMax(&most_keys, s.seq_len);
    atomicAdd(&decoded, float(decoded_keys(a, s)));
    if (s.row_tiles > 0) atomicAdd(&keys_read, float(s.seq_len));
  }
  __syncthreads();
  int shift = 0;
  while (most_keys >> shift >= kBuckets) ++shift;
  const auto bucket = [shift](const Tile& t) { return kBuckets - 1 - (max(t.keys_end - t.keys_begin, 0) >> shift); };
  for_each_tile(a, [&](const Tile& t) {
    atomicAdd(&positions[bucket(t)], 1);
    atomicAdd(&work, steps_of(t));
  });
  __syncthreads();
  const int32_t count = positions[threadIdx.x], before = sum_before(count, sums);
  positions[threadIdx.x] = before;
  if (threadIdx.x == kBuckets - 1)
    *a.header = {min(before + count, a.max_tiles), 0, blocks_for(a, work, decoded), section_for(a, keys_read)};
  __syncthreads();
  for_each_tile(a, [&](const Tile& t) {
    const int32_t position = atomicAdd(&positions[bucket(t)], 1);
    if (position < a.max_tiles) a.tiles[position] = t;  // else cu_seqlens_q is no prefix sum
  });
}

// ---- Host ----

// Packed rows of a tile: whole tokens.
int32_t tile_rows(const AttentionParams& p, Kind kind) {
  const int32_t group = int32_t(p.num_heads / p.num_kv_heads);
  const int size_class = head_size_class(p);
  return (kind == Kind::wgmma ? rows_of(size_class) : mma_sync::rows_of(size_class)) / group * group;
}

int64_t max_tiles(const AttentionParams& p, Kind kind) {
  return divide_up(p.num_tokens * (p.num_heads / p.num_kv_heads), tile_rows(p, kind)) + p.num_seqs;
}

int32_t log2_of(int64_t value) {
  for (int32_t log = 0; log < 31; ++log)
    if (value == int64_t(1) << log) return log;
  return -1;
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

Launch launch_of(const AttentionParams& p, Kind kind, int32_t decode_rows, bool outside, void* workspace) {
  Launch a{};
  a.params = p;
  a.header = static_cast<Header*>(workspace);
  a.tiles = reinterpret_cast<Tile*>(static_cast<char*>(workspace) + kHeaderBytes);
  a.max_tiles = int32_t(max_tiles(p, kind));
  a.group = int32_t(p.num_heads / p.num_kv_heads);
  a.tile_rows = tile_rows(p, kind);
  a.max_blocks = current_device().num_sms;
  if (kind == Kind::wgmma) {
    a.keys = map_of(p, p.key_cache);
    a.values = map_of(p, p.value_cache);
    a.queries = map_of_queries(p, a.group, a.tile_rows);
  } else {
    a.max_blocks *= mma_sync::blocks_of_sm(head_size_class(p));
  }
  a.decode_rows = decode_rows;
  a.capacity = clipped_capacity(p);
  a.window_left = clip_window(p.window_left);
  a.window_right = clip_window(p.window_right);
  a.log2_block_size = log2_of(p.block_size);
  a.outside = outside;
  return a;
}

// Here one thread block does a unit of work from begin to end; the decode kernel splits keys among thread blocks, and is
// faster with units for less than an eighth of the SMs. (Deterministic results must not hang on a row's neighbours.)
bool fills_chip(const AttentionParams& p, Kind kind) {
  return 8 * p.num_tokens * p.num_heads >= int64_t(current_device().num_sms) * tile_rows(p, kind);
}

// What both kernels ask for: whole chunks of 16 bytes, and numbers that 32 bits hold.
bool fits_any(const AttentionParams& p) {
  const auto is_aligned = [](const void* data) { return reinterpret_cast<intptr_t>(data) % 16 == 0; };
  const auto in_chunks = [](int64_t stride, int64_t size) { return size == 1 || stride % 8 == 0; };
  const auto fits_cache = [&](const Cache& c) {
    return c.dtype == p.query_dtype && c.scale.kind == ScaleKind::none && c.head_size <= 256 && c.head_size % 8 == 0 &&
           is_aligned(c.data) && in_chunks(c.block_stride, p.num_blocks) && in_chunks(c.slot_stride, p.block_size) &&
           in_chunks(c.head_stride, p.num_kv_heads);
  };
  const auto fits_int32 = [](int64_t value) { return value > 0 && value < INT32_MAX; };
  const int64_t group = p.num_heads / p.num_kv_heads;
  return p.query_dtype != DType::float32 && p.mask.kind == MaskKind::none && !p.alibi_slopes && p.scale > 0.0f &&
         group <= 128 && fits_int32(p.block_size) && fits_int32(p.num_blocks) &&
         double(p.num_tokens) * double(p.num_heads) < double(1 << 30) && fits_cache(p.key_cache) &&
         fits_cache(p.value_cache) && is_aligned(p.query) && is_aligned(p.out) &&
         in_chunks(p.query_token_stride, p.num_tokens) && in_chunks(p.query_head_stride, p.num_heads) &&
         p.max_seqlen_q * group > kDecodeRows;
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

}  // namespace

Kind kind_for(const AttentionParams& p) {
  if (!fits_any(p)) return Kind::none;
  const Kind kind = is_hopper() && fits_tensor_maps(p) ? Kind::wgmma : Kind::mma_sync;
  const bool fits = tile_rows(p, kind) > 0 && (p.deterministic || fills_chip(p, kind));
  return fits ? kind : Kind::none;
}

int64_t workspace_bytes(const AttentionParams& p, Kind kind) {
  return kHeaderBytes + max_tiles(p, kind) * int64_t(sizeof(Tile));
}

void launch(const AttentionParams& p, Kind kind, int32_t decode_rows, bool outside, void* workspace,
            cudaStream_t stream) {
  const Launch a = launch_of(p, kind, decode_rows, outside, workspace);
  schedule<<<1, kScheduleThreads, 0, stream>>>(a);
  check_launch("paged_attention");
  const bool is_half = p.query_dtype == DType::float16;
  const auto run = kind == Kind::wgmma ? (is_half ? launch_float16 : launch_bfloat16)
                                       : (is_half ? mma_sync::launch_float16 : mma_sync::launch_bfloat16);
  run(a, head_size_class(p), stream);
}

}  // namespace paged_kv::cuda::prefill
