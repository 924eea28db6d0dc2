// Writes new keys and values into the slots of the pool. Memory bound: docs/kernels/reshape_and_cache.md.
#include <cfloat>
#include <type_traits>

#include "device.cuh"
#include "kernels.h"
#include "launch.h"

namespace paged_kv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTokensPerThread = 4;  // loads in flight before the first store

// One of the two tensors a token has: its source rows and the cache they go to.
struct Side {
  const void* source;  // [num_tokens, num_kv_heads, head_size]
  int64_t token_stride, head_stride;
  Cache cache;
  int vectors_per_head;
};

struct Params {
  Side key, value;
  const int64_t* slot_mapping;  // [num_tokens]
  int64_t num_tokens, num_slots, block_size;
  int num_kv_heads;
};

// New keys and values are read once: they shall not push anything out of the caches.
template <class T, int kCount>
__device__ Vector<T, kCount> load_once(const T* source) {
  Vector<T, kCount> result;
  if constexpr (sizeof(result) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < int(sizeof(result) / 16); ++i)
      reinterpret_cast<uint4*>(&result)[i] = __ldcs(reinterpret_cast<const uint4*>(source) + i);
  } else {
    result = *reinterpret_cast<const Vector<T, kCount>*>(source);
  }
  return result;
}

// What every element of a row is divided by; none == 1.0, and dividing by 1.0 is exact.
__device__ float row_scale(const Scale& scale, int64_t head) {
  return scale.kind == ScaleKind::none ? 1.0f : *scale_of(scale, 0, 0, head);
}

template <class Stored, class Source, int kVector>
__device__ Vector<Stored, kVector> convert(const Vector<Source, kVector>& source, float scale) {
  Vector<Stored, kVector> stored;
#pragma unroll
  for (int i = 0; i < kVector; ++i) stored.data[i] = from_float<Stored>(__fdiv_rn(to_float(source.data[i]), scale));
  return stored;
}

// None of the work of `convert` where the cache's dtype is the source's: the bits are stored as they are.
template <class Stored, class Source, int kVector>
__device__ Vector<Stored, kVector> convert_unscaled(const Vector<Source, kVector>& source) {
  if constexpr (std::is_same_v<Source, Stored>) {
    return source;
  } else {
    Vector<Stored, kVector> stored;
#pragma unroll
    for (int i = 0; i < kVector; ++i) stored.data[i] = from_float<Stored>(to_float(source.data[i]));
    return stored;
  }
}

// A thread keeps one (side, head, vector) position and walks over tokens, so that the address arithmetic of a position
// is done once. Threads along x hold neighbouring vectors of a token, along y neighbouring tokens.
template <class Source, class Stored, int kVector>
__global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ Params p) {
  let_dependents_start();  // attention comes up meanwhile, and waits
  const int position = blockIdx.y * blockDim.x + threadIdx.x;
  const int key_positions = p.num_kv_heads * p.key.vectors_per_head;
  const bool is_key = position < key_positions;
  const Side& side = is_key ? p.key : p.value;
  const int index = is_key ? position : position - key_positions;
  if (index >= p.num_kv_heads * side.vectors_per_head) return wait_for_predecessor();
  const int64_t head = index / side.vectors_per_head;
  const int64_t element = int64_t(index % side.vectors_per_head) * kVector;
  const Source* source = static_cast<const Source*>(side.source) + head * side.head_stride + element;
  Stored* stored = static_cast<Stored*>(side.cache.data) + head * side.cache.head_stride + element;

  wait_for_predecessor();
  const int64_t first = (int64_t(blockIdx.x) * blockDim.y + threadIdx.y);
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  int64_t slots[kTokensPerThread];
  Vector<Source, kVector> rows[kTokensPerThread];
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    const int64_t token = first + i * step;
    slots[i] = token < p.num_tokens ? p.slot_mapping[token] : -1;
    if (token < p.num_tokens) rows[i] = load_once<Source, kVector>(source + token * side.token_stride);
  }
  const bool scaled = side.cache.scale.kind != ScaleKind::none;
  const float scale = row_scale(side.cache.scale, head);
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    if (uint64_t(slots[i]) >= uint64_t(p.num_slots)) continue;
    const Slot slot = split_slot(slots[i], p.block_size);
    auto* target = reinterpret_cast<Vector<Stored, kVector>*>(stored + slot.block * side.cache.block_stride +
                                                              slot.offset * side.cache.slot_stride);
    *target = scaled ? convert<Stored>(rows[i], scale) : convert_unscaled<Stored>(rows[i]);
  }
}

// Scales made on the fly: one warp per (token, side, head) finds the absolute maximum, then stores the scaled row.
template <class Source, class Stored>
__global__ void __launch_bounds__(kThreads) quantise_rows(const __grid_constant__ Params p) {
  let_dependents_start();
  wait_for_predecessor();
  const int64_t warp = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = warp / 2;
  const int64_t token = row / p.num_kv_heads, head = row % p.num_kv_heads;
  if (token >= p.num_tokens) return;
  const Side& side = warp % 2 == 0 ? p.key : p.value;
  const int64_t slot_index = p.slot_mapping[token];
  if (uint64_t(slot_index) >= uint64_t(p.num_slots)) return;
  const Slot slot = split_slot(slot_index, p.block_size);
  const Source* source = static_cast<const Source*>(side.source) + token * side.token_stride + head * side.head_stride;
  float scale = 1.0f;
  if (side.cache.scale.kind == ScaleKind::per_slot) {
    float largest = 0.0f;
    for (int64_t i = lane; i < side.cache.head_size; i += kWarp) largest = fmaxf(largest, fabsf(to_float(source[i])));
    largest = fminf(warp_max(largest), FLT_MAX);  // infinities saturate, NaN does not count
    scale = __fdiv_rn(largest, max_of(side.cache.dtype));
    if (scale == 0.0f) scale = 1.0f;
    if (lane == 0) *scale_of(side.cache.scale, slot.block, slot.offset, head) = scale;
  } else {
    scale = row_scale(side.cache.scale, head);
  }
  Stored* stored = reinterpret_cast<Stored*>(row_of(side.cache, slot.block, slot.offset, head));
  for (int64_t i = lane; i < side.cache.head_size; i += kWarp)
    stored[i] = from_float<Stored>(__fdiv_rn(to_float(source[i]), scale));
}

bool divides(int64_t value, int64_t divisor) { return value % divisor == 0; }

// Can rows be read and written as vectors of 8 elements?
bool vectors_fit(const Side& side, int64_t source_bytes) {
  const Cache& cache = side.cache;
  const int64_t stored_bytes = size_of(cache.dtype);
  const auto aligned = [](const void* data, int64_t bytes) {
    return divides(reinterpret_cast<intptr_t>(data), bytes < 16 ? bytes : 16);
  };
  return divides(cache.head_size, 8) && divides(side.token_stride, 8) && divides(side.head_stride, 8) &&
         divides(cache.block_stride, 8) && divides(cache.slot_stride, 8) && divides(cache.head_stride, 8) &&
         aligned(side.source, 8 * source_bytes) && aligned(cache.data, 8 * stored_bytes);
}

template <class Source, class Stored, int kVector>
void launch_copy(Params p, cudaStream_t stream) {
  p.key.vectors_per_head = int(p.key.cache.head_size / kVector);
  p.value.vectors_per_head = int(p.value.cache.head_size / kVector);
  const int64_t positions = int64_t(p.num_kv_heads) * (p.key.vectors_per_head + p.value.vectors_per_head);
  const int64_t width = positions < kThreads ? divide_up(positions, kWarp) * kWarp : kThreads;
  const int64_t rows = kThreads / width;  // tokens side by side in a thread block
  // Few tokens are spread over the chip, many give each thread several loads in flight.
  const int64_t spread = int64_t(current_device().num_sms) * 4;
  const int64_t most = divide_up(p.num_tokens, rows), least = divide_up(p.num_tokens, rows * kTokensPerThread);
  const int64_t columns = divide_up(positions, width);
  const int64_t blocks =
      least * columns >= spread ? least : (most * columns < spread ? most : divide_up(spread, columns));
  const dim3 grid(unsigned(blocks < least ? least : blocks), unsigned(columns));
  launch_in_order<copy_rows<Source, Stored, kVector>>(
      Order::beside_predecessor, grid, dim3(unsigned(width), unsigned(rows)), 0, p, stream, "reshape_and_cache");
}

template <class Source, class Stored>
void launch(const Params& p, cudaStream_t stream) {
  if (p.key.cache.scale.kind == ScaleKind::per_slot || p.value.cache.scale.kind == ScaleKind::per_slot) {
    if constexpr (sizeof(Stored) == 1) {
      const int64_t warps = p.num_tokens * p.num_kv_heads * 2;
      launch_in_order<quantise_rows<Source, Stored>>(Order::beside_predecessor,
                                                     dim3(unsigned(divide_up(warps * kWarp, kThreads))), dim3(kThreads),
                                                     0, p, stream, "reshape_and_cache");
      return;
    }
    throw std::invalid_argument("key_scale must be per tensor or per head for a cache of 16 or 32 bits, got per slot");
  }
  if (vectors_fit(p.key, sizeof(Source)) && vectors_fit(p.value, sizeof(Source)))
    return launch_copy<Source, Stored, 8>(p, stream);
  launch_copy<Source, Stored, 1>(p, stream);
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0 || params.num_kv_heads == 0) return;
  const Params p{{params.key, params.key_token_stride, params.key_head_stride, params.key_cache, 0},
                 {params.value, params.value_token_stride, params.value_head_stride, params.value_cache, 0},
                 params.slot_mapping,
                 params.num_tokens,
                 params.num_blocks * params.block_size,
                 params.block_size,
                 int(params.num_kv_heads)};
  dispatch_float(params.dtype, [&](auto source) {
    dispatch_cache(params.key_cache.dtype, [&](auto stored) {
      launch<typename decltype(source)::type, typename decltype(stored)::type>(p, stream);
    });
  });
}

}  // namespace paged_kv::cuda
