// Vectors for AVX2, FMA and F16C. See simd_generic.h for what each function does.
#pragma once

#include <immintrin.h>

#include "simd_types.h"

namespace paged_kv::cpu {
namespace {

using Vec = __m256;
constexpr int kLanes = 8;
constexpr int kPair = 2 * kLanes;
constexpr int kMicroRows = 6;  // 6 x 2 accumulators, 2 vectors of B and a broadcast in 16 registers
constexpr bool kHasBFloat16Dot = false;

struct Pair {
  Vec a, b;
};

PAGED_KV_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
PAGED_KV_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
PAGED_KV_INLINE Vec zero() { return _mm256_setzero_ps(); }
PAGED_KV_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
PAGED_KV_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
PAGED_KV_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
PAGED_KV_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
PAGED_KV_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
PAGED_KV_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
PAGED_KV_INLINE Vec max_(Vec a, Vec b) { return _mm256_max_ps(a, b); }
PAGED_KV_INLINE Vec min_(Vec a, Vec b) { return _mm256_min_ps(a, b); }
PAGED_KV_INLINE Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PAGED_KV_INLINE Vec scale_by_power(Vec a, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
constexpr float kLowestExponent = -127.0f;
PAGED_KV_INLINE bool any_greater(Vec a, Vec b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }
PAGED_KV_INLINE bool all_finite(Vec a) {
  const Vec difference = _mm256_sub_ps(a, a);
  return _mm256_movemask_ps(_mm256_cmp_ps(difference, difference, _CMP_UNORD_Q)) == 0;
}
PAGED_KV_INLINE void keep_in_register(Vec& v) { asm("" : "+x"(v)); }

PAGED_KV_INLINE float reduce_max(Vec v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

PAGED_KV_INLINE float reduce_sum(Vec v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

PAGED_KV_INLINE Vec lane_numbers() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

PAGED_KV_INLINE Vec keep_range(Vec v, int low, int high) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), lane),
                                          _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(high - 1)));
  return _mm256_blendv_ps(v, set1(-kInfinity), _mm256_castsi256_ps(outside));
}

PAGED_KV_INLINE Vec keep_true(Vec v, const uint8_t* visible) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(visible)));
  const __m256i hidden = _mm256_cmpeq_epi32(wide, _mm256_setzero_si256());
  return _mm256_blendv_ps(v, set1(-kInfinity), _mm256_castsi256_ps(hidden));
}

PAGED_KV_INLINE Vec add_bias(Vec v, Vec bias) {
  const Vec hidden = _mm256_cmp_ps(bias, set1(-kInfinity), _CMP_EQ_OQ);
  return _mm256_blendv_ps(_mm256_add_ps(v, bias), set1(-kInfinity), hidden);
}

PAGED_KV_INLINE Vec from_int(const int32_t* p) {
  return _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

PAGED_KV_INLINE Pair interleave(Pair p) {
  const Vec low = _mm256_unpacklo_ps(p.a, p.b), high = _mm256_unpackhi_ps(p.a, p.b);
  return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}

PAGED_KV_INLINE Pair deinterleave(Pair p) {
  const Vec low = _mm256_permute2f128_ps(p.a, p.b, 0x20), high = _mm256_permute2f128_ps(p.a, p.b, 0x31);
  return {_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd)};
}

// Loads of fewer than 16 elements go through a zeroed buffer: nothing past the row is touched.
template <class T, class E>
struct Tail {
  PAGED_KV_INLINE static Pair load(const void* p, int n) {
    T buffer[kPair] = {};
    for (int i = 0; i < n && i < kPair; ++i) buffer[i] = static_cast<const T*>(p)[i];
    return E::load(buffer);
  }
};

template <>
struct Elements<float> : Order<false> {
  PAGED_KV_INLINE static Pair load(const void* p) {
    const float* x = static_cast<const float*>(p);
    return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
  }
  PAGED_KV_INLINE static Pair load(const void* p, int n) { return Tail<float, Elements>::load(p, n); }
};

template <>
struct Elements<Float16> : Order<false> {
  PAGED_KV_INLINE static Pair convert(__m256i x) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
  }
  PAGED_KV_INLINE static Pair load(const void* p) {
    const __m128i* x = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(x)), _mm256_cvtph_ps(_mm_loadu_si128(x + 1))};
  }
  PAGED_KV_INLINE static Pair load(const void* p, int n) { return Tail<Float16, Elements>::load(p, n); }
};

template <>
struct Elements<BFloat16> : Order<true> {
  PAGED_KV_INLINE static Pair load(const void* p) {
    const __m256i x = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000))))};
  }
  PAGED_KV_INLINE static Pair load(const void* p, int n) { return Tail<BFloat16, Elements>::load(p, n); }
};

template <>
struct Elements<Float8E4M3> : Order<false> {
  // Read as the float16 with the same exponent field: the value times 2^-8, subnormal ones included.
  static constexpr float kFactor = 256.0f;
  PAGED_KV_INLINE static Pair load(const void* p) {
    const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(int16_t(0xbf80)));
    const __m256i magnitude = _mm256_or_si256(x, _mm256_set1_epi16(int16_t(0xff80)));
    const __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(-1));
    return Elements<Float16>::convert(_mm256_or_si256(half, nan));
  }
  PAGED_KV_INLINE static Pair load(const void* p, int n) { return Tail<Float8E4M3, Elements>::load(p, n); }
};

template <>
struct Elements<Float8E5M2> : Order<false> {
  PAGED_KV_INLINE static Pair load(const void* p) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
    return Elements<Float16>::convert(_mm256_slli_epi16(x, 8));
  }
  PAGED_KV_INLINE static Pair load(const void* p, int n) { return Tail<Float8E5M2, Elements>::load(p, n); }
};

template <>
struct Elements<int8_t> : Order<false> {
  PAGED_KV_INLINE static Pair load(const void* p) {
    const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
  }
  PAGED_KV_INLINE static Pair load(const void* p, int n) { return Tail<int8_t, Elements>::load(p, n); }
};

PAGED_KV_INLINE void store_first(char* p, const void* values, int bytes) {
  for (int i = 0; i < bytes; ++i) p[i] = static_cast<const char*>(values)[i];
}

template <>
struct Stored<float> {
  PAGED_KV_INLINE static void store(void* p, Pair v, int n) {
    float values[kPair];
    float* x = n >= kPair ? static_cast<float*>(p) : values;
    _mm256_storeu_ps(x, v.a);
    _mm256_storeu_ps(x + 8, v.b);
    if (n < kPair) store_first(static_cast<char*>(p), values, n * 4);
  }
};

PAGED_KV_INLINE void store_halves(void* p, __m256i halves, int n) {
  if (n >= kPair) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), halves);
  } else {
    uint16_t values[kPair];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), halves);
    store_first(static_cast<char*>(p), values, n * 2);
  }
}

template <>
struct Stored<Float16> {
  PAGED_KV_INLINE static void store(void* p, Pair v, int n) {
    const __m128i a = _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
    const __m128i b = _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);
    store_halves(p, _mm256_set_m128i(b, a), n);
  }
};

template <>
struct Stored<BFloat16> {
  PAGED_KV_INLINE static __m256i convert(Vec v) {  // in the low half of each lane
    const __m256i x = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
  }
  PAGED_KV_INLINE static void store(void* p, Pair v, int n) {
    const __m256i packed = _mm256_packus_epi32(convert(v.a), convert(v.b));
    store_halves(p, _mm256_permute4x64_epi64(packed, 0xd8), n);
  }
};

PAGED_KV_INLINE Vec sum_each(const Vec (&a)[kLanes]) {
  const Vec ab = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
  const Vec cd = _mm256_hadd_ps(_mm256_hadd_ps(a[4], a[5]), _mm256_hadd_ps(a[6], a[7]));
  return add(_mm256_permute2f128_ps(ab, cd, 0x20), _mm256_permute2f128_ps(ab, cd, 0x31));
}

template <int kRows>
PAGED_KV_INLINE void store_rows(float* p, int stride, Vec v) {
  const __m128 low = _mm256_castps256_ps128(v), high = _mm256_extractf128_ps(v, 1);
  if constexpr (kRows == 1) {
    store(p, v);
  } else if constexpr (kRows == 2) {
    _mm_storeu_ps(p, low);
    _mm_storeu_ps(p + stride, high);
  } else {
    _mm_storel_pi(reinterpret_cast<__m64*>(p), low);
    _mm_storeh_pi(reinterpret_cast<__m64*>(p + stride), low);
    _mm_storel_pi(reinterpret_cast<__m64*>(p + 2 * stride), high);
    _mm_storeh_pi(reinterpret_cast<__m64*>(p + 3 * stride), high);
  }
}

PAGED_KV_INLINE void transpose(Vec (&r)[kLanes]) {
  Vec t[8];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {  // 4x4 blocks inside the 128-bit halves
    const Vec a = _mm256_unpacklo_ps(r[4 * i], r[4 * i + 1]), b = _mm256_unpackhi_ps(r[4 * i], r[4 * i + 1]);
    const Vec c = _mm256_unpacklo_ps(r[4 * i + 2], r[4 * i + 3]), d = _mm256_unpackhi_ps(r[4 * i + 2], r[4 * i + 3]);
    t[4 * i] = _mm256_shuffle_ps(a, c, 0x44);
    t[4 * i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[4 * i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[4 * i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(t[i], t[4 + i], 0x20);
    r[4 + i] = _mm256_permute2f128_ps(t[i], t[4 + i], 0x31);
  }
}

}  // namespace
}  // namespace paged_kv::cpu
