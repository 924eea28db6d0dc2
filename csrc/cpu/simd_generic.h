// Vectors of four floats through the compiler's vector extensions: SSE2, NEON, VSX, whatever the target has.
// This header says what the functions mean that all three simd_<isa>.h headers offer.
#pragma once

#include "simd_types.h"

namespace paged_kv::cpu {
namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int kPair = 2 * kLanes;  // caches are loaded and panels are as wide as two vectors
constexpr int kMicroRows = 4;      // rows of the tile kernel's register block
constexpr bool kHasBFloat16Dot = false;

struct Pair {
  Vec a, b;
};

PAGED_KV_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
PAGED_KV_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
PAGED_KV_INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
PAGED_KV_INLINE Vec zero() { return set1(0.0f); }
PAGED_KV_INLINE Vec add(Vec a, Vec b) { return a + b; }
PAGED_KV_INLINE Vec sub(Vec a, Vec b) { return a - b; }
PAGED_KV_INLINE Vec mul(Vec a, Vec b) { return a * b; }
PAGED_KV_INLINE Vec div(Vec a, Vec b) { return a / b; }
PAGED_KV_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }  // a * b + c, contracted where the target can
PAGED_KV_INLINE Vec select(IntVec condition, Vec a, Vec b) {
  return Vec((condition & IntVec(a)) | (~condition & IntVec(b)));
}
PAGED_KV_INLINE Vec max_(Vec a, Vec b) { return select(a > b, a, b); }  // b if either is NaN
PAGED_KV_INLINE Vec min_(Vec a, Vec b) { return select(a < b, a, b); }  // b if either is NaN
PAGED_KV_INLINE Vec round(Vec a) {                                      // to nearest even; |a| < 2^22
  const Vec magic = set1(0x1.8p23f);
  return a + magic - magic;
}
PAGED_KV_INLINE Vec scale_by_power(Vec a, Vec n) {  // a * 2^n, n whole and at least kLowestExponent, where it is 0
  return a * Vec((__builtin_convertvector(n, IntVec) + 127) << 23);
}
constexpr float kLowestExponent = -127.0f;
PAGED_KV_INLINE bool any(IntVec condition) { return (condition[0] | condition[1] | condition[2] | condition[3]) != 0; }
PAGED_KV_INLINE bool any_greater(Vec a, Vec b) { return any(a > b); }
PAGED_KV_INLINE bool all_finite(Vec a) { return !any((a - a) != (a - a)); }
PAGED_KV_INLINE float larger(float a, float b) { return a > b ? a : b; }
PAGED_KV_INLINE float reduce_max(Vec v) { return larger(larger(v[0], v[1]), larger(v[2], v[3])); }
PAGED_KV_INLINE float reduce_sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
PAGED_KV_INLINE void keep_in_register(Vec&) {}  // stops the compiler from loading the vector again at each use

PAGED_KV_INLINE Vec lane_numbers() { return Vec{0, 1, 2, 3}; }

PAGED_KV_INLINE Vec keep_range(Vec v, int low, int high) {  // lanes low .. high - 1; -infinity in the others
  const IntVec lane = {0, 1, 2, 3};
  return select((lane >= low) & (lane < high), v, set1(-kInfinity));
}

PAGED_KV_INLINE Vec keep_true(Vec v, const uint8_t* visible) {  // -infinity where the byte is 0
  const IntVec wide = {visible[0], visible[1], visible[2], visible[3]};
  return select(wide != 0, v, set1(-kInfinity));
}

PAGED_KV_INLINE Vec add_bias(Vec v, Vec bias) {  // -infinity where the bias is, even if v is NaN
  return select(bias == set1(-kInfinity), set1(-kInfinity), v + bias);
}

PAGED_KV_INLINE Vec from_int(const int32_t* p) {
  IntVec v;
  __builtin_memcpy(&v, p, sizeof v);
  return __builtin_convertvector(v, Vec);
}

PAGED_KV_INLINE Pair interleave(Pair p) {  // even elements in a, odd in b -> linear
  return {Vec{p.a[0], p.b[0], p.a[1], p.b[1]}, Vec{p.a[2], p.b[2], p.a[3], p.b[3]}};
}

PAGED_KV_INLINE Pair deinterleave(Pair p) {  // its inverse
  return {Vec{p.a[0], p.a[2], p.b[0], p.b[2]}, Vec{p.a[1], p.a[3], p.b[1], p.b[3]}};
}

template <class T>
struct Elements : Order<false> {
  PAGED_KV_INLINE static Pair load(const void* p) {
    const T* x = static_cast<const T*>(p);
    return {Vec{to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])},
            Vec{to_float(x[4]), to_float(x[5]), to_float(x[6]), to_float(x[7])}};
  }
  PAGED_KV_INLINE static Pair load(const void* p, int n) {
    T buffer[kPair] = {};
    for (int i = 0; i < n && i < kPair; ++i) buffer[i] = static_cast<const T*>(p)[i];
    return load(buffer);
  }
};

template <class T>
struct Stored {
  PAGED_KV_INLINE static void store(void* p, Pair v, int n) {
    float values[kPair];
    cpu::store(values, v.a);
    cpu::store(values + kLanes, v.b);
    for (int i = 0; i < n && i < kPair; ++i) static_cast<T*>(p)[i] = from_float<T>(values[i]);
  }
};

PAGED_KV_INLINE Vec sum_each(const Vec (&a)[kLanes]) {  // lane i: the sum of the lanes of a[i]
  return Vec{reduce_sum(a[0]), reduce_sum(a[1]), reduce_sum(a[2]), reduce_sum(a[3])};
}

// kRows rows of kLanes / kRows values each, row by row in v.
template <int kRows>
PAGED_KV_INLINE void store_rows(float* p, int stride, Vec v) {
  for (int i = 0; i < kLanes; ++i) p[i / (kLanes / kRows) * stride + i % (kLanes / kRows)] = v[i];
}

PAGED_KV_INLINE void transpose(Vec (&r)[kLanes]) {
  const Vec a = r[0], b = r[1], c = r[2], d = r[3];
  for (int i = 0; i < kLanes; ++i) r[i] = Vec{a[i], b[i], c[i], d[i]};
}

}  // namespace
}  // namespace paged_kv::cpu
