// What the host sides of the decode and the prefill kernels make of a call's parameters.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "../params.h"

namespace paged_kv::cuda {

// 64, 128 or 256: kernels are built for these; others are a class with zeros at the end.
inline int head_size_class(const AttentionParams& p) {
  const int64_t key_size = p.key_cache.head_size, value_size = p.value_cache.head_size;
  const int64_t size = key_size > value_size ? key_size : value_size;
  return size <= 64 ? 64 : size <= 128 ? 128 : 256;
}

// Calls function(class of head sizes) with it as a constant.
template <class Function>
void dispatch_head_size(int head_size_class, Function&& function) {
  switch (head_size_class) {
    case 64: return function(std::integral_constant<int, 64>{});
    case 128: return function(std::integral_constant<int, 128>{});
    case 256: return function(std::integral_constant<int, 256>{});
    default: throw std::logic_error("no attention kernel has head size " + std::to_string(head_size_class));
  }
}

// Tokens of a row of the table, clipped to 2^30: the product may pass 2^63.
inline int32_t clipped_capacity(const AttentionParams& p) {
  const double capacity = double(p.max_blocks) * double(p.block_size);
  return capacity < double(1 << 30) ? int32_t(capacity) : 1 << 30;
}

// -1: no window.
inline int32_t clip_window(int64_t window) { return window < 0 || window > (1 << 30) ? -1 : int32_t(window); }

}  // namespace paged_kv::cuda
