// What the three vector headers and the kernels above them share.
#pragma once

#include <cstdint>

#include "../common/float8.h"
#include "attention_plan.h"

namespace paged_kv::cpu {
namespace {

constexpr float kInfinity = __builtin_inff();

// load(p): a Pair of float vectors from 2 * kLanes elements; load(p, n): from the first n, then zeros.
// kInterleaved: even elements in a, odd ones in b (else the first half in a). kFactor: stored value / loaded value.
template <class T>
struct Elements;

template <bool interleaved>
struct Order {
  static constexpr bool kInterleaved = interleaved;
  static constexpr float kFactor = 1.0f;
};

// store(p, pair, n): the first n elements of a linear pair, rounded to nearest even.
template <class T>
struct Stored;

}  // namespace
}  // namespace paged_kv::cpu
