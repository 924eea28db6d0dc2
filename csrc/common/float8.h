// Element types of caches and their conversions to and from float: one piece of code for host and device, so that
// every path stores the same bits. Branch-free, hence loops over them are vectorised. No torch and no std headers;
// every function has internal linkage, so that a copy compiled for one instruction set never serves another.
//
// Rounding is to nearest, ties to even. 8-bit types saturate (infinities too); 16-bit types overflow to infinity as a
// PyTorch cast does. NaN stays NaN, except in int8 where it becomes 0. Results do not depend on flush-to-zero modes
// for any value that a type distinguishes from zero.
#pragma once

#include <cstdint>

#include "../params.h"

#if defined(__CUDACC__)
#define PAGED_KV_HOST_DEVICE __host__ __device__
#else
#define PAGED_KV_HOST_DEVICE
#endif

namespace paged_kv {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

// The largest finite value of an 8-bit type: per-slot scales map a row's absolute maximum to it.
PAGED_KV_HOST_DEVICE static inline float max_of(DType dtype) {
  return dtype == DType::float8_e4m3fn ? 448.0f : dtype == DType::float8_e5m2 ? 57344.0f : 127.0f;
}

PAGED_KV_HOST_DEVICE static inline uint32_t bits_of(float value) {
  union {
    float value;
    uint32_t bits;
  } both;
  both.value = value;
  return both.bits;
}

PAGED_KV_HOST_DEVICE static inline float float_of(uint32_t bits) {
  union {
    uint32_t bits;
    float value;
  } both;
  both.bits = bits;
  return both.value;
}

// Choices by masks, since compilers turn `?:` over float arithmetic into branches and then do not vectorise it.
// Operands are magnitudes, which have no sign bit: signed comparisons exist as vector instructions everywhere.
PAGED_KV_HOST_DEVICE static inline uint32_t choose_if_less(uint32_t a, uint32_t b, uint32_t then, uint32_t otherwise) {
  const uint32_t mask = uint32_t(-int32_t(int32_t(a) < int32_t(b)));
  return (then & mask) | (otherwise & ~mask);
}

PAGED_KV_HOST_DEVICE static inline uint32_t smaller(uint32_t a, uint32_t b) { return choose_if_less(a, b, a, b); }

constexpr uint32_t kInfinityBits = 0x7f800000u;

// Magnitude of a float (its bits without sign) in a format with a smaller exponent range, for values below overflow.
// Normal numbers are rounded by adding half a unit, carry into the exponent included; subnormal ones by an addition
// whose unit in the last place is the format's smallest subnormal.
template <int kMantissaBits, int kExponentBias>
PAGED_KV_HOST_DEVICE static inline uint32_t round_magnitude(uint32_t magnitude) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kHalf = (1u << (kShift - 1)) - 1;
  constexpr uint32_t kRebias = uint32_t(127 - kExponentBias) << kMantissaBits;
  constexpr uint32_t kMinNormal = uint32_t(128 - kExponentBias) << 23;
  constexpr uint32_t kSubnormalUnit = uint32_t(127 + 24 - kExponentBias - kMantissaBits) << 23;
  const uint32_t normal = ((magnitude + kHalf + ((magnitude >> kShift) & 1)) >> kShift) - kRebias;
  const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kSubnormalUnit)) - kSubnormalUnit;
  return choose_if_less(magnitude, kMinNormal, subnormal, normal);
}

PAGED_KV_HOST_DEVICE static inline float to_float(float value) { return value; }

PAGED_KV_HOST_DEVICE static inline float to_float(int8_t value) { return float(value); }

PAGED_KV_HOST_DEVICE static inline float to_float(BFloat16 value) { return float_of(uint32_t(value.bits) << 16); }

PAGED_KV_HOST_DEVICE static inline float to_float(Float16 value) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | kInfinityBits;
  const uint32_t subnormal = bits_of(float(int32_t(magnitude)) * 0x1p-24f);
  const uint32_t finite = choose_if_less(magnitude, 0x0400, subnormal, normal);
  return float_of(sign | choose_if_less(magnitude, 0x7c00, finite, special));
#endif
}

PAGED_KV_HOST_DEVICE static inline float to_float(Float8E5M2 value) {
  return to_float(Float16{uint16_t(value.bits << 8)});
}

PAGED_KV_HOST_DEVICE static inline float to_float(Float8E4M3 value) {
  const uint32_t sign = uint32_t(value.bits & 0x80) << 24;
  const uint32_t magnitude = value.bits & 0x7f;
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t subnormal = bits_of(float(int32_t(magnitude)) * 0x1p-9f);
  const uint32_t finite = choose_if_less(magnitude, 0x08, subnormal, normal);
  return float_of(sign | choose_if_less(magnitude, 0x7f, finite, 0x7fc00000u));
}

// from_float<T>(value): the element of type T nearest to value.
template <class T>
struct FromFloat;

template <>
struct FromFloat<float> {
  PAGED_KV_HOST_DEVICE static float convert(float value) { return value; }
};

template <>
struct FromFloat<BFloat16> {
  PAGED_KV_HOST_DEVICE static BFloat16 convert(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(choose_if_less(kInfinityBits, bits & 0x7fffffff, 0x7fc0, rounded))};
  }
};

template <>
struct FromFloat<Float16> {
  PAGED_KV_HOST_DEVICE static Float16 convert(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t finite = smaller(round_magnitude<10, 15>(magnitude), 0x7c00);
    const uint32_t result = choose_if_less(magnitude, 0x47800000, finite, 0x7c00);  // 65536
    return {uint16_t((bits >> 16 & 0x8000) | choose_if_less(kInfinityBits, magnitude, 0x7e00, result))};
  }
};

template <>
struct FromFloat<Float8E4M3> {
  PAGED_KV_HOST_DEVICE static Float8E4M3 convert(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t finite = round_magnitude<3, 7>(smaller(magnitude, 0x43e00000)) | (bits >> 24 & 0x80);  // 448
    return {uint8_t(choose_if_less(kInfinityBits, magnitude, 0x7f, finite))};
  }
};

template <>
struct FromFloat<Float8E5M2> {
  PAGED_KV_HOST_DEVICE static Float8E5M2 convert(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t finite = round_magnitude<2, 15>(smaller(magnitude, 0x47600000)) | (bits >> 24 & 0x80);  // 57344
    return {uint8_t(choose_if_less(kInfinityBits, magnitude, 0x7f, finite))};
  }
};

template <>
struct FromFloat<int8_t> {
  PAGED_KV_HOST_DEVICE static int8_t convert(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t negative = bits >> 31;
    const uint32_t clamped = smaller(magnitude, 0x43000000);  // 128
    const uint32_t rounded = bits_of(float_of(clamped) + 0x1p23f) - 0x4b000000;  // the unit of 2^23 is 1
    const uint32_t finite = smaller(rounded, 127 + negative);
    const uint32_t result = choose_if_less(kInfinityBits, magnitude, 0, finite);
    return int8_t((result ^ (0 - negative)) + negative);
  }
};

template <class T>
PAGED_KV_HOST_DEVICE static inline T from_float(float value) {
  return FromFloat<T>::convert(value);
}

}  // namespace paged_kv
