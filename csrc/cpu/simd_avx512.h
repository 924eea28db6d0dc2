// Vectors for AVX-512 (F, BW, VL, DQ, BF16). The three simd_<isa>.h headers offer one interface; see simd_generic.h for
// what each function does. Everything has internal linkage: code compiled for an instruction set stays in its file.
#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own intrinsics
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "../common/float8.h"
#include "simd_types.h"

namespace paged_kv::cpu {
namespace {

using Vec = __m512;
constexpr int kLanes = 16;
constexpr int kPair = 2 * kLanes;
#ifdef __AMX_BF16__
constexpr int kMicroRows = 32;  // 2 x 2 tiles of 16 x 16 accumulators, 2 of A and 2 of B
#else
constexpr int kMicroRows = 12;  // 12 x 2 accumulators, 2 vectors of B and a broadcast in 32 registers
#endif
constexpr bool kHasBFloat16Dot = true;

struct Pair {
  Vec a, b;
};

PAGED_KV_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
PAGED_KV_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
PAGED_KV_INLINE Vec zero() { return _mm512_setzero_ps(); }
PAGED_KV_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
PAGED_KV_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
PAGED_KV_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
PAGED_KV_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
PAGED_KV_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
PAGED_KV_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
PAGED_KV_INLINE Vec max_(Vec a, Vec b) { return _mm512_max_ps(a, b); }
PAGED_KV_INLINE Vec min_(Vec a, Vec b) { return _mm512_min_ps(a, b); }
PAGED_KV_INLINE Vec round(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n, or 0 where that comes near the subnormal numbers: many processors take a hundred cycles for a subnormal number.
PAGED_KV_INLINE Vec scale_by_power(Vec a, Vec n) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, set1(-125.0f), _CMP_NLT_UQ), a, n);  // NaN stays
}
constexpr float kLowestExponent = -127.0f;
PAGED_KV_INLINE bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }
PAGED_KV_INLINE bool all_finite(Vec a) { return _mm512_fpclass_ps_mask(a, 0x99) == 0; }
PAGED_KV_INLINE float reduce_max(Vec a) { return _mm512_reduce_max_ps(a); }
PAGED_KV_INLINE float reduce_sum(Vec a) { return _mm512_reduce_add_ps(a); }
PAGED_KV_INLINE void keep_in_register(Vec& v) { asm("" : "+v"(v)); }

PAGED_KV_INLINE Vec lane_numbers() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

PAGED_KV_INLINE Vec keep_range(Vec v, int low, int high) {
  const uint32_t below_high = high >= kLanes ? 0xffffu : high <= 0 ? 0u : (1u << high) - 1;
  const uint32_t below_low = low >= kLanes ? 0xffffu : low <= 0 ? 0u : (1u << low) - 1;
  return _mm512_mask_blend_ps(__mmask16(below_high & ~below_low), set1(-kInfinity), v);
}

PAGED_KV_INLINE Vec keep_true(Vec v, const uint8_t* visible) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(visible));
  return _mm512_mask_blend_ps(_mm_test_epi8_mask(bytes, bytes), set1(-kInfinity), v);
}

PAGED_KV_INLINE Vec add_bias(Vec v, Vec bias) {
  const __mmask16 visible = _mm512_cmp_ps_mask(bias, set1(-kInfinity), _CMP_NEQ_UQ);
  return _mm512_mask_add_ps(set1(-kInfinity), visible, v, bias);
}

PAGED_KV_INLINE Vec from_int(const int32_t* p) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(p)); }

PAGED_KV_INLINE Pair interleave(Pair p) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return {_mm512_permutex2var_ps(p.a, low, p.b), _mm512_permutex2var_ps(p.a, high, p.b)};
}

PAGED_KV_INLINE Pair deinterleave(Pair p) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return {_mm512_permutex2var_ps(p.a, even, p.b), _mm512_permutex2var_ps(p.a, odd, p.b)};
}

// 32 elements of a cache or query, or the first n of them and zeros.
PAGED_KV_INLINE __mmask32 first_lanes(int n) { return n >= 32 ? 0xffffffffu : (1u << n) - 1; }

template <class T>
struct Elements;

template <>
struct Elements<float> : Order<false> {
  PAGED_KV_INLINE static Pair load(const void* p) {
    const float* x = static_cast<const float*>(p);
    return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16)};
  }
  PAGED_KV_INLINE static Pair load(const void* p, int n) {
    const float* x = static_cast<const float*>(p);
    const __mmask32 mask = first_lanes(n);
    return {_mm512_maskz_loadu_ps(__mmask16(mask), x), _mm512_maskz_loadu_ps(__mmask16(mask >> 16), x + 16)};
  }
};

template <>
struct Elements<Float16> : Order<false> {
  PAGED_KV_INLINE static Pair convert(__m512i x) {
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(x)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1))};
  }
  PAGED_KV_INLINE static Pair load(const void* p) {
    const __m256i* x = static_cast<const __m256i*>(p);
    return {_mm512_cvtph_ps(_mm256_loadu_si256(x)), _mm512_cvtph_ps(_mm256_loadu_si256(x + 1))};
  }
  PAGED_KV_INLINE static Pair load(const void* p, int n) {
    return convert(_mm512_maskz_loadu_epi16(first_lanes(n), p));
  }
};

template <>
struct Elements<BFloat16> : Order<true> {
  PAGED_KV_INLINE static __m512i load_raw(const void* p) { return _mm512_loadu_si512(p); }
  PAGED_KV_INLINE static __m512i load_raw(const void* p, int n) { return _mm512_maskz_loadu_epi16(first_lanes(n), p); }
  PAGED_KV_INLINE static Pair convert(__m512i x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000))))};
  }
  PAGED_KV_INLINE static Pair load(const void* p) { return convert(load_raw(p)); }
  PAGED_KV_INLINE static Pair load(const void* p, int n) { return convert(load_raw(p, n)); }
};

// 8-bit elements: load 32 bytes, convert.
template <class T>
struct ByteElements : Order<false> {
  PAGED_KV_INLINE static Pair load(const void* p) {
    return Elements<T>::convert(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  PAGED_KV_INLINE static Pair load(const void* p, int n) {
    return Elements<T>::convert(_mm256_maskz_loadu_epi8(first_lanes(n), p));
  }
};

template <>
struct Elements<Float8E4M3> : ByteElements<Float8E4M3> {
  // Read as the float16 with the same exponent field: the value times 2^-8, subnormal ones included.
  static constexpr float kFactor = 256.0f;
  PAGED_KV_INLINE static Pair convert(__m256i bytes) {
    const __m512i x = _mm512_cvtepi8_epi16(bytes);
    const __m512i half = _mm512_and_si512(_mm512_slli_epi16(x, 7), _mm512_set1_epi16(int16_t(0xbf80)));
    const __m512i all = _mm512_set1_epi16(-1);
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_or_si512(x, _mm512_set1_epi16(int16_t(0xff80))), all);
    return Elements<Float16>::convert(_mm512_mask_mov_epi16(half, nan, all));
  }
};

template <>
struct Elements<Float8E5M2> : ByteElements<Float8E5M2> {
  PAGED_KV_INLINE static Pair convert(__m256i bytes) {
    return Elements<Float16>::convert(_mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8));
  }
};

template <>
struct Elements<int8_t> : ByteElements<int8_t> {
  PAGED_KV_INLINE static Pair convert(__m256i bytes) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes))),
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)))};
  }
};

template <>
struct Stored<float> {
  PAGED_KV_INLINE static void store(void* p, Pair v, int n) {
    float* x = static_cast<float*>(p);
    const __mmask32 mask = first_lanes(n);
    _mm512_mask_storeu_ps(x, __mmask16(mask), v.a);
    _mm512_mask_storeu_ps(x + 16, __mmask16(mask >> 16), v.b);
  }
};

template <>
struct Stored<Float16> {
  PAGED_KV_INLINE static void store(void* p, Pair v, int n) {
    const __m256i a = _mm512_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT);
    const __m256i b = _mm512_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT);
    _mm512_mask_storeu_epi16(p, first_lanes(n), _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
  }
};

template <>
struct Stored<BFloat16> {
  PAGED_KV_INLINE static void store(void* p, Pair v, int n) {
    _mm512_mask_storeu_epi16(p, first_lanes(n), __m512i(_mm512_cvtne2ps_pbh(v.b, v.a)));
  }
};

// Lane i of the result is the sum of the lanes of a[i].
PAGED_KV_INLINE Vec sum_each(const Vec (&a)[kLanes]) {
  Vec t[8], u[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    t[i] = add(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(t[2 * i]), y = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  const Vec v = add(_mm512_shuffle_f32x4(u[0], u[1], 0x88), _mm512_shuffle_f32x4(u[0], u[1], 0xdd));
  const Vec w = add(_mm512_shuffle_f32x4(u[2], u[3], 0x88), _mm512_shuffle_f32x4(u[2], u[3], 0xdd));
  return add(_mm512_shuffle_f32x4(v, w, 0x88), _mm512_shuffle_f32x4(v, w, 0xdd));
}

template <int kRows>
PAGED_KV_INLINE void store_rows(float* p, int stride, Vec v) {
  if constexpr (kRows == 1) {
    store(p, v);
  } else if constexpr (kRows == 2) {
    _mm256_storeu_ps(p, _mm512_castps512_ps256(v));
    _mm256_storeu_ps(p + stride, _mm512_extractf32x8_ps(v, 1));
  } else {
    _mm_storeu_ps(p, _mm512_castps512_ps128(v));
    _mm_storeu_ps(p + stride, _mm512_extractf32x4_ps(v, 1));
    _mm_storeu_ps(p + 2 * stride, _mm512_extractf32x4_ps(v, 2));
    _mm_storeu_ps(p + 3 * stride, _mm512_extractf32x4_ps(v, 3));
  }
}

// Lane j of the result's row i was lane i of row j.
PAGED_KV_INLINE void transpose(Vec (&r)[kLanes]) {
  Vec t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512d x = _mm512_castps_pd(t[4 * i + j]), y = _mm512_castps_pd(t[4 * i + 2 + j]);
      r[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      r[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {  // r[4 * i + j]: 128-bit lane l holds rows 4i .. 4i + 3 of column 4l + j
    const Vec low01 = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x44), high01 = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xee);
    const Vec low23 = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x44);
    const Vec high23 = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xee);
    t[j] = _mm512_shuffle_f32x4(low01, low23, 0x88);
    t[4 + j] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    t[8 + j] = _mm512_shuffle_f32x4(high01, high23, 0x88);
    t[12 + j] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// What the tile kernel multiplies in bfloat16: 32-bit lanes are pairs (even, odd) along the summed dimension.
PAGED_KV_INLINE Vec madd_bfloat16(Vec sum, Vec a, Vec b) {
  return _mm512_dpbf16_ps(sum, __m512bh(_mm512_castps_si512(a)), __m512bh(_mm512_castps_si512(b)));
}

template <class T>
PAGED_KV_INLINE Vec load_bfloat16(const void* p, int n) {  // 32 elements, n of them valid, linear
  if constexpr (sizeof(T) == 2) {
    return _mm512_castsi512_ps(n >= 32 ? Elements<BFloat16>::load_raw(p) : Elements<BFloat16>::load_raw(p, n));
  } else {
    const Pair v = n >= 32 ? Elements<T>::load(p) : Elements<T>::load(p, n);
    return _mm512_castsi512_ps(__m512i(_mm512_cvtne2ps_pbh(v.b, v.a)));
  }
}

PAGED_KV_INLINE Vec to_bfloat16(Pair v) { return _mm512_castsi512_ps(__m512i(_mm512_cvtne2ps_pbh(v.b, v.a))); }

// Rows x and y of bfloat16 -> pairs (x[i], y[i]): even i in a, odd i in b.
PAGED_KV_INLINE Pair pair_rows(Vec x, Vec y) {
  const __m512i u = _mm512_castps_si512(x), v = _mm512_castps_si512(y);
  const __mmask32 odd = 0xaaaaaaaau;
  return {_mm512_castsi512_ps(_mm512_mask_blend_epi16(odd, u, _mm512_slli_epi32(v, 16))),
          _mm512_castsi512_ps(_mm512_mask_blend_epi16(odd, _mm512_srli_epi32(u, 16), v))};
}

}  // namespace
}  // namespace paged_kv::cpu
