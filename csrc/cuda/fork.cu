// Makes rows share the blocks of other rows: tables and counts only, in one thread block. docs/kernels/allocate.md.
#include "kernels.h"
#include "launch.h"
#include "pool.cuh"

namespace paged_kv::cuda {
namespace {

struct Pair {
  int64_t source, destination;
  bool valid;  // changes something: both rows exist and differ
};

__device__ Pair pair_at(const ForkParams& p, int64_t index) {
  const int64_t source = p.source_rows[index], destination = p.destination_rows[index];
  return {source, destination,
          source != destination && is_block(source, p.rows.num_seqs) && is_block(destination, p.rows.num_seqs)};
}

__device__ int64_t columns_of(const Rows& rows, int64_t row) {
  return blocks_for(length_of(rows, row), rows.block_size);
}

__device__ Released given_up(const ForkParams& p, int64_t item) {
  const Pair pair = pair_at(p, item % p.num_pairs);
  if (!pair.valid) return {nullptr, 0, 0};
  return {entries_of(p.rows, item / p.num_pairs, pair.destination), 0, columns_of(p.rows, pair.destination)};
}

// Copies columns of one group's rows through shared memory, `width` at a time: destinations may be sources of others,
// so all are read before one is written.
__device__ void copy_columns(const ForkParams& p, int64_t group, int64_t begin, int64_t width, int32_t* staged) {
  const auto for_each = [&](auto&& function) {
    for (int64_t i = threadIdx.x; i < p.num_pairs * width; i += blockDim.x) {
      const Pair pair = pair_at(p, i / width);
      const int64_t column = begin + i % width;
      if (pair.valid && column < p.rows.max_blocks) function(i, pair, column);
    }
    __syncthreads();
  };
  for_each([&](int64_t i, Pair pair, int64_t column) {
    staged[i] = column < columns_of(p.rows, pair.source) ? entries_of(p.rows, group, pair.source)[column] : kUnmapped;
  });
  for_each([&](int64_t i, Pair pair, int64_t column) {
    const int64_t source_columns = columns_of(p.rows, pair.source), own = columns_of(p.rows, pair.destination);
    if (column < (source_columns > own ? source_columns : own))
      entries_of(p.rows, group, pair.destination)[column] = staged[i];
  });
}

__device__ int64_t longest(const ForkParams& p) {
  __shared__ int columns;
  if (threadIdx.x == 0) columns = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.num_pairs; i += blockDim.x) {
    const Pair pair = pair_at(p, i);
    if (!pair.valid) continue;
    const int64_t source = columns_of(p.rows, pair.source), own = columns_of(p.rows, pair.destination);
    atomicMax(&columns, int(source > own ? source : own));
  }
  __syncthreads();
  return columns;
}

__global__ void __launch_bounds__(kMaxThreads) fork_rows(const __grid_constant__ ForkParams p, int64_t width) {
  extern __shared__ int32_t staged[];  // [num_pairs, width]
  const int64_t num_items = p.rows.num_groups * p.num_pairs;
  for (int64_t item = threadIdx.x / kWarp; item < num_items; item += blockDim.x / kWarp) {
    const Pair pair = pair_at(p, item % p.num_pairs);
    if (!pair.valid) continue;
    const int32_t* entries = entries_of(p.rows, item / p.num_pairs, pair.source);
    const int64_t columns = columns_of(p.rows, pair.source);
    for (int64_t column = threadIdx.x % kWarp; column < columns; column += kWarp) hold(p.pool, entries[column]);
  }
  __syncthreads();
  release(p.pool, num_items, [&](int64_t item) { return given_up(p, item); });
  const int64_t columns = longest(p);
  for (int64_t group = 0; group < p.rows.num_groups; ++group)
    for (int64_t begin = 0; begin < columns; begin += width) copy_columns(p, group, begin, width, staged);
  for (int64_t i = threadIdx.x; i < p.num_pairs; i += blockDim.x) {
    const Pair pair = pair_at(p, i);
    staged[i] = pair.valid ? int32_t(length_of(p.rows, pair.source)) : 0;
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.num_pairs; i += blockDim.x) {
    const Pair pair = pair_at(p, i);
    if (pair.valid) p.rows.seq_lens[pair.destination] = staged[i];
  }
}

}  // namespace

void fork(const ForkParams& params, cudaStream_t stream) {
  if (params.num_pairs == 0 || params.rows.num_groups * params.rows.num_seqs == 0) return;
  const int64_t most = current_device().shared_bytes - 1024;
  constexpr int64_t kPlenty = 32 * 1024;
  int64_t width = kPlenty / (4 * params.num_pairs);
  width = width < 1 ? 1 : width;
  const int64_t bytes = params.num_pairs * width * 4;
  if (bytes > most)
    throw std::invalid_argument("source_rows must hold at most " + std::to_string(most / 4) + " rows, got " +
                                std::to_string(params.num_pairs));
  if (bytes > 40 * 1024)
    check(cudaFuncSetAttribute(fork_rows, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), "fork");
  fork_rows<<<1, kMaxThreads, size_t(bytes), stream>>>(params, width);
  check_launch("fork");
}

}  // namespace paged_kv::cuda
