// Paged -> dense: [num_seqs, num_kv_heads, max_len, head_size], rows right-aligned. Memory bound; off the hot path, so
// dtypes are run-time values and one kernel serves all.
#include "device.cuh"
#include "kernels.h"
#include "launch.h"

namespace paged_kv::cuda {
namespace {

constexpr int kThreads = 256;

// One thread per kVector elements of one (row, head, column).
template <int kVector>
__global__ void __launch_bounds__(kThreads) gather(const __grid_constant__ GatherParams p, Cache cache, void* dense) {
  const int64_t vectors = cache.head_size / kVector;
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t position = index / vectors;  // of [num_seqs, num_kv_heads, max_len]
  if (position >= p.num_seqs * p.num_kv_heads * p.max_len) return;
  const int64_t element = index % vectors * kVector;
  const int64_t column = position % p.max_len;
  const int64_t head = position / p.max_len % p.num_kv_heads, row = position / p.max_len / p.num_kv_heads;
  const int64_t seq_len = clamp(p.seq_lens[row], 0, p.max_blocks * p.block_size);
  const int64_t key = seq_len - p.max_len + column;

  float values[kVector] = {};
  if (key >= 0) {
    const Slot at = split_slot(key, p.block_size);
    const int64_t block = p.block_table[row * p.block_table_stride + at.block];
    if (is_block(block, p.num_blocks)) {
      load_floats(row_of(cache, block, at.offset, head), cache.dtype, element, values);
      const float scale = cache.scale.kind == ScaleKind::none ? 1.0f : *scale_of(cache.scale, block, at.offset, head);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] *= scale;
    }
  }
  store_floats(dense, p.dtype, position * cache.head_size + element, values);
}

void launch(const GatherParams& p, const Cache& cache, void* dense, cudaStream_t stream) {
  const int64_t elements = p.num_seqs * p.num_kv_heads * p.max_len * cache.head_size;
  if (elements == 0) return;
  const auto divides8 = [](int64_t value) { return value % 8 == 0; };
  const int64_t bytes = 8 * size_of(cache.dtype);
  const bool wide = divides8(cache.head_size) && divides8(cache.block_stride) && divides8(cache.slot_stride) &&
                    divides8(cache.head_stride) &&
                    reinterpret_cast<intptr_t>(cache.data) % (bytes < 16 ? bytes : 16) == 0;
  if (wide) {
    gather<8><<<unsigned(divide_up(elements / 8, kThreads)), kThreads, 0, stream>>>(p, cache, dense);
  } else {
    gather<1><<<unsigned(divide_up(elements, kThreads)), kThreads, 0, stream>>>(p, cache, dense);
  }
  check_launch("gather_blocks");
}

}  // namespace

void gather_blocks(const GatherParams& params, cudaStream_t stream) {
  launch(params, params.key_cache, params.key, stream);
  launch(params, params.value_cache, params.value, stream);
}

}  // namespace paged_kv::cuda
