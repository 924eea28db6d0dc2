// What all kernels share: small vectors of elements, exact scaling, index arithmetic that stays cheap when it can.
#pragma once

#include <cuda_runtime.h>

#include "../common/float8.h"
#include "../common/slots.h"
#include "../params.h"

namespace paged_kv::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Vector {
  T data[kCount];
};

// Elements of one cache or tensor as floats, the dtype known only at run time: the branch is the same for all threads.
template <int kCount>
__device__ inline void load_floats(const void* row, DType dtype, int64_t index, float (&values)[kCount]) {
  const auto load = [&](auto element) {
    using T = decltype(element);
    const auto vector = *reinterpret_cast<const Vector<T, kCount>*>(static_cast<const T*>(row) + index);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = to_float(vector.data[i]);
  };
  switch (dtype) {
    case DType::float32: return load(float{});
    case DType::float16: return load(Float16{});
    case DType::bfloat16: return load(BFloat16{});
    case DType::float8_e4m3fn: return load(Float8E4M3{});
    case DType::float8_e5m2: return load(Float8E5M2{});
    case DType::int8: return load(int8_t{});
  }
}

template <int kCount>
__device__ inline void store_floats(void* row, DType dtype, int64_t index, const float (&values)[kCount]) {
  const auto store = [&](auto element) {
    using T = decltype(element);
    Vector<T, kCount> vector;
#pragma unroll
    for (int i = 0; i < kCount; ++i) vector.data[i] = from_float<T>(values[i]);
    *reinterpret_cast<Vector<T, kCount>*>(static_cast<T*>(row) + index) = vector;
  };
  switch (dtype) {
    case DType::float32: return store(float{});
    case DType::float16: return store(Float16{});
    case DType::bfloat16: return store(BFloat16{});
    default: return;  // results are never 8-bit
  }
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kFullMask, value, step));
  return value;
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullMask, value, step);
  return value;
}

// Sums over this lane and those before it.
template <class T>
__device__ T warp_inclusive_sum(T value) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T other = __shfl_up_sync(kFullMask, value, step);
    if (int(threadIdx.x % kWarp) >= step) value += other;
  }
  return value;
}

// Programmatic dependent launch: the next launch on the stream is brought up while this one runs ...
__device__ inline void let_dependents_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ... and waits here until everything the launch before it wrote can be seen.
__device__ inline void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

struct Slot {
  int64_t block, offset;
};

// slot -> (block, offset). A 64-bit division costs some hundred instructions, a 32-bit one twenty.
__device__ inline Slot split_slot(int64_t slot, int64_t block_size) {
  if ((uint64_t(slot) | uint64_t(block_size)) >> 32 == 0) {
    const uint32_t block = uint32_t(slot) / uint32_t(block_size);
    return {int64_t(block), int64_t(uint32_t(slot) - block * uint32_t(block_size))};
  }
  return {slot / block_size, slot % block_size};
}

}  // namespace paged_kv::cuda
