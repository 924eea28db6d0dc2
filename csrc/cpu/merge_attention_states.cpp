// Joins two attention results over disjoint keys by their log-sum-exps; sinks enter the output, never the LSE.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "parallel.h"
#include "row_kernels.h"

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

struct Context {
  const MergeParams& params;
  int64_t row_bytes;
  RowFunction scale;
  BlendFunction blend;
};

// A side without weight is not read into arithmetic: its rows may hold anything.
void merge_row(const Context& context, const void* a, const void* b, void* out, Weights weights) {
  const int64_t size = context.params.head_size;
  if (weights.a == 0.0f && weights.b == 0.0f) {
    std::memset(out, 0, size_t(context.row_bytes));
  } else if (weights.a == 0.0f) {
    context.scale(b, out, size, weights.b);
  } else if (weights.b == 0.0f) {
    context.scale(a, out, size, weights.a);
  } else {
    context.blend(a, b, out, size, weights.a, weights.b);
  }
}

// Row = token * num_heads + head.
void merge_rows(void* pointer, int64_t first, int64_t last) {
  const Context& context = *static_cast<const Context*>(pointer);
  const MergeParams& params = context.params;
  const auto at = [&](const void* rows, int64_t row) {
    return static_cast<const char*>(rows) + row * context.row_bytes;
  };
  for (int64_t row = first; row < last; ++row) {
    const float* sink = params.sinks ? params.sinks + row % params.num_heads : nullptr;
    const Weights weights = weigh(params.lse_a[row], params.lse_b[row], sink);
    params.lse[row] = weights.lse;
    merge_row(context, at(params.out_a, row), at(params.out_b, row), const_cast<char*>(at(params.out, row)), weights);
  }
}

}  // namespace

void merge_attention_states(const MergeParams& params) {
  const RowKernels& kernels = row_kernels();
  Context context{params, params.head_size * size_of(params.dtype), kernels.multiply(params.dtype, params.dtype),
                  kernels.blend(params.dtype)};
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, params.head_size));
  parallel_for(0, params.num_tokens * params.num_heads, grain, merge_rows, &context);
}

}  // namespace paged_kv::cpu
