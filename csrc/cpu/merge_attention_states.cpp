// Joins two attention results over disjoint keys by their log-sum-exps; sinks enter the output, never the LSE.
#include <algorithm>
#include <cmath>

#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace paged_kv::cpu {
namespace {

constexpr int64_t kElementsPerThread = 16 << 10;  // below, a second thread costs more than it saves

struct Weights {
  float a, b;  // what each side's output is multiplied by; 0 for a side that saw no key
  float lse;   // over the keys of both sides
};

Weights weigh(float lse_a, float lse_b, const float* sink) {
  const float max = std::max(lse_a, lse_b);
  if (max == -INFINITY) return {0.0f, 0.0f, -INFINITY};
  const float a = std::exp(lse_a - max), b = std::exp(lse_b - max);
  const float lse = max + std::log(a + b);
  // The sink may exceed every key: exp(sink - max) overflows to infinity, and the weights become 0, as they should.
  const float total = a + b + (sink ? std::exp(*sink - max) : 0.0f);
  return {a / total, b / total, lse};
}

// A side without weight is not read into arithmetic: its rows may hold anything.
template <class T>
void merge_row(const T* __restrict a, const T* __restrict b, T* __restrict out, int64_t size, Weights weights) {
  if (weights.a == 0.0f && weights.b == 0.0f) {
    for (int64_t i = 0; i < size; ++i) out[i] = from_float<T>(0.0f);
  } else if (weights.a == 0.0f || weights.b == 0.0f) {
    const T* only = weights.a == 0.0f ? b : a;
    const float weight = weights.a == 0.0f ? weights.b : weights.a;
    for (int64_t i = 0; i < size; ++i) out[i] = from_float<T>(weight * to_float(only[i]));
  } else {
    for (int64_t i = 0; i < size; ++i) out[i] = from_float<T>(weights.a * to_float(a[i]) + weights.b * to_float(b[i]));
  }
}

// Row = token * num_heads + head.
template <class T>
void merge_rows(void* pointer, int64_t first, int64_t last) {
  const MergeParams& params = *static_cast<const MergeParams*>(pointer);
  const int64_t size = params.head_size;
  for (int64_t row = first; row < last; ++row) {
    const float* sink = params.sinks ? params.sinks + row % params.num_heads : nullptr;
    const Weights weights = weigh(params.lse_a[row], params.lse_b[row], sink);
    params.lse[row] = weights.lse;
    merge_row(static_cast<const T*>(params.out_a) + row * size, static_cast<const T*>(params.out_b) + row * size,
              static_cast<T*>(params.out) + row * size, size, weights);
  }
}

}  // namespace

void merge_attention_states(const MergeParams& params) {
  MergeParams copy = params;
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, params.head_size));
  visit_float(params.dtype, [&](auto element) {
    parallel_for(0, params.num_tokens * params.num_heads, grain, merge_rows<decltype(element)>, &copy);
  });
}

}  // namespace paged_kv::cpu
