// Merges two attention results over disjoint keys by their log-sum-exps. Memory bound: one warp per (token, head).
#include <cmath>

#include "device.cuh"
#include "kernels.h"
#include "launch.h"

namespace paged_kv::cuda {
namespace {

constexpr int kThreads = 256;

template <int kVector>
__global__ void __launch_bounds__(kThreads) merge(const __grid_constant__ MergeParams p) {
  const int64_t row = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;  // of [num_tokens, num_heads]
  if (row >= p.num_tokens * p.num_heads) return;
  const float lse_a = p.lse_a[row], lse_b = p.lse_b[row];
  const float sink = p.sinks ? p.sinks[row % p.num_heads] : -INFINITY;
  const float largest = fmaxf(lse_a, lse_b);
  const float top = fmaxf(largest, sink);
  // No key on either side: weights 0, not exp(-inf + inf).
  const float sum = largest == -INFINITY ? 0.0f : expf(lse_a - largest) + expf(lse_b - largest);
  const float total = largest == -INFINITY ? 1.0f : expf(lse_a - top) + expf(lse_b - top) + expf(sink - top);
  const float weight_a = largest == -INFINITY ? 0.0f : expf(lse_a - top) / total;
  const float weight_b = largest == -INFINITY ? 0.0f : expf(lse_b - top) / total;
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) p.lse[row] = largest == -INFINITY ? -INFINITY : largest + logf(sum);
  for (int64_t element = lane * kVector; element < p.head_size; element += kWarp * kVector) {
    float a[kVector], b[kVector];
    load_floats(p.out_a, p.dtype, row * p.head_size + element, a);
    load_floats(p.out_b, p.dtype, row * p.head_size + element, b);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      a[i] = (weight_a == 0.0f ? 0.0f : weight_a * a[i]) + (weight_b == 0.0f ? 0.0f : weight_b * b[i]);
    store_floats(p.out, p.dtype, row * p.head_size + element, a);
  }
}

}  // namespace

void merge_attention_states(const MergeParams& params, cudaStream_t stream) {
  const int64_t rows = params.num_tokens * params.num_heads;
  if (rows == 0) return;
  const unsigned grid = unsigned(divide_up(rows * kWarp, kThreads));
  const uint64_t addresses = reinterpret_cast<uint64_t>(params.out_a) | reinterpret_cast<uint64_t>(params.out_b) |
                             reinterpret_cast<uint64_t>(params.out);
  if (params.head_size % 4 == 0 && addresses % 16 == 0) {
    merge<4><<<grid, kThreads, 0, stream>>>(params);
  } else {
    merge<1><<<grid, kThreads, 0, stream>>>(params);
  }
  check_launch("merge_attention_states");
}

}  // namespace paged_kv::cuda
