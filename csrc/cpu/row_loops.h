// The loops behind RowKernels. The compiler vectorises them: conversions are branch-free (common/float8.h).
#pragma once

#include "../common/float8.h"
#include "row_kernels.h"

namespace paged_kv::cpu {
namespace {

template <class From, class To>
void divide_row(const void* source, void* destination, int64_t size, float scale) {
  const From* __restrict from = static_cast<const From*>(source);
  To* __restrict to = static_cast<To*>(destination);
  if (scale == 1.0f) {
    for (int64_t i = 0; i < size; ++i) to[i] = from_float<To>(to_float(from[i]));
  } else {
    for (int64_t i = 0; i < size; ++i) to[i] = from_float<To>(to_float(from[i]) / scale);
  }
}

template <class From, class To>
void multiply_row(const void* source, void* destination, int64_t size, float scale) {
  const From* __restrict from = static_cast<const From*>(source);
  To* __restrict to = static_cast<To*>(destination);
  for (int64_t i = 0; i < size; ++i) to[i] = from_float<To>(to_float(from[i]) * scale);
}

template <class T>
void blend_rows(const void* a, const void* b, void* out, int64_t size, float weight_a, float weight_b) {
  const T* __restrict first = static_cast<const T*>(a), * __restrict second = static_cast<const T*>(b);
  T* __restrict to = static_cast<T*>(out);
  for (int64_t i = 0; i < size; ++i)
    to[i] = from_float<T>(weight_a * to_float(first[i]) + weight_b * to_float(second[i]));
}

template <class From>
float absmax_of_row(const void* row, int64_t size) {
  constexpr uint32_t kLargestFinite = kInfinityBits - 1;
  const From* from = static_cast<const From*>(row);
  int32_t largest = 0;  // magnitudes order like the integers of their bits
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t magnitude = bits_of(to_float(from[i])) & 0x7fffffff;
    const uint32_t finite = smaller(magnitude, kLargestFinite);
    const int32_t counted = int32_t(choose_if_less(kInfinityBits, magnitude, 0, finite));
    largest = counted > largest ? counted : largest;
  }
  return float_of(uint32_t(largest));
}

template <class Visit>
auto visit_float_row(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::float32: return visit(float{});
    case DType::float16: return visit(Float16{});
    case DType::bfloat16: return visit(BFloat16{});
    default: return decltype(visit(float{}))(nullptr);
  }
}

template <class Visit>
auto visit_element_row(DType dtype, Visit visit) {
  switch (dtype) {
    case DType::float8_e4m3fn: return visit(Float8E4M3{});
    case DType::float8_e5m2: return visit(Float8E5M2{});
    case DType::int8: return visit(int8_t{});
    default: return visit_float_row(dtype, visit);
  }
}

RowFunction divide_of(DType from, DType to) {
  return visit_float_row(from, [to](auto x) -> RowFunction {
    return visit_element_row(to, [](auto y) -> RowFunction { return divide_row<decltype(x), decltype(y)>; });
  });
}

RowFunction multiply_of(DType from, DType to) {
  return visit_element_row(from, [to](auto x) -> RowFunction {
    return visit_float_row(to, [](auto y) -> RowFunction { return multiply_row<decltype(x), decltype(y)>; });
  });
}

BlendFunction blend_of(DType dtype) {
  return visit_float_row(dtype, [](auto x) -> BlendFunction { return blend_rows<decltype(x)>; });
}

AbsmaxFunction absmax_of(DType from) {
  return visit_float_row(from, [](auto x) -> AbsmaxFunction { return absmax_of_row<decltype(x)>; });
}

}  // namespace
}  // namespace paged_kv::cpu
