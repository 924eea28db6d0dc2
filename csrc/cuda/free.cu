// Shortens rows and gives back what nobody holds any more, in one thread block. docs/kernels/allocate.md.
#include "kernels.h"
#include "launch.h"
#include "pool.cuh"

namespace paged_kv::cuda {
namespace {

__device__ bool shortens(const FreeParams& p, int64_t row) {
  return p.new_lens[row] >= 0 && p.new_lens[row] < length_of(p.rows, row);
}

__device__ Released cut_of(const FreeParams& p, int64_t item) {
  const int64_t group = item / p.rows.num_seqs, row = item % p.rows.num_seqs;
  if (!shortens(p, row)) return {nullptr, 0, 0};
  return {entries_of(p.rows, group, row), blocks_for(p.new_lens[row], p.rows.block_size),
          blocks_for(length_of(p.rows, row), p.rows.block_size)};
}

__global__ void __launch_bounds__(kMaxThreads) free_rows(const __grid_constant__ FreeParams p) {
  const int64_t num_items = p.rows.num_groups * p.rows.num_seqs;
  release(p.pool, num_items, [&](int64_t item) { return cut_of(p, item); });
  for (int64_t item = threadIdx.x / kWarp; item < num_items; item += blockDim.x / kWarp) {
    const Released cut = cut_of(p, item);
    for (int64_t column = cut.begin + threadIdx.x % kWarp; column < cut.end; column += kWarp)
      cut.entries[column] = kUnmapped;
  }
  __syncthreads();
  for (int64_t row = threadIdx.x; row < p.rows.num_seqs; row += blockDim.x)
    if (shortens(p, row)) p.rows.seq_lens[row] = p.new_lens[row];
}

}  // namespace

void free(const FreeParams& params, cudaStream_t stream) {
  const int64_t num_items = params.rows.num_groups * params.rows.num_seqs;
  if (num_items == 0 || params.pool.num_blocks == 0) return;
  free_rows<<<1, threads_for(num_items * kWarp), 0, stream>>>(params);
  check_launch("free");
}

}  // namespace paged_kv::cuda
