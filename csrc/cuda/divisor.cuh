// Division by a number that the host knows: one multiplication. For values below 2^31.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace paged_kv::cuda {

struct Divisor {
  uint32_t value, multiplier, shift;

  __device__ int32_t divide(int32_t number) const {
    return int32_t(value == 1 ? number : __umulhi(uint32_t(number), multiplier) >> shift);
  }
};

// Rounds the multiplier up: exact for numbers below 2^31 (Granlund and Montgomery, 1994).
inline Divisor divisor_of(int64_t number) {
  const uint32_t value = uint32_t(number < INT32_MAX ? number : INT32_MAX);
  uint32_t log = 0;
  while ((uint64_t(1) << log) < value) ++log;
  if (value == 1) return {1, 0, 0};
  const uint64_t multiplier = ((uint64_t(1) << (31 + log)) + value - 1) / value;
  return {value, uint32_t(multiplier), log - 1};
}

}  // namespace paged_kv::cuda
