// Divides rows into the runs of neighbours that save most reads by reading their first blocks together. Three launches:
// what neighbours have in common (a warp a row), the division (one warp), the tables of the rest.
#include "../common/shared_prefixes.h"
#include "device.cuh"
#include "kernels.h"
#include "launch.h"

namespace paged_kv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;  // a lane compares at once: the loads of 256 columns are in flight together
constexpr int kPlentyOfShared = 40 * 1024;  // bytes that need no leave

// Columns, from the first, in which a row and the one before it hold the same blocks. Called by whole warps.
__device__ int32_t common_blocks(const SharedPrefixParams& p, int64_t row) {
  const int64_t limit = shareable_blocks(p, row);
  const int32_t *before = entries_of(p, row - 1), *own = entries_of(p, row);
  const int lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int64_t first = 0; first < limit; first += kColumns * kWarp) {
    bool differs[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int64_t column = first + i * kWarp + lane;
      differs[i] = column < limit && before[column] != own[column];
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const unsigned lanes = __ballot_sync(kFullMask, differs[i]);
      if (lanes != 0) return int32_t(first) + i * kWarp + __ffs(int(lanes)) - 1;
    }
  }
  return int32_t(limit);
}

__global__ void __launch_bounds__(kThreads) compare(const __grid_constant__ SharedPrefixParams p, int32_t* common) {
  const int64_t row = (int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (row >= p.num_seqs) return;
  const int32_t blocks = row == 0 ? 0 : common_blocks(p, row);
  if (threadIdx.x % kWarp == 0) common[row] = blocks;
}

// Memory of the division, in shared memory where it fits: reads of blocks that are saved, rows, blocks.
struct Division {
  int32_t* best;  // [num_seqs + 1] what the best division of rows 0 .. end - 1 saves
  int32_t* starts;  // [num_seqs + 1] first row of its last run; then [row + 1] whose cu_seqlens_q the row begins at
  int32_t* common;  // [num_seqs] in common with the row before
  int32_t* shared;  // [num_seqs] of a run that begins here and goes to the present row; then of each row's run

  __device__ Division(int32_t* memory, int64_t num_seqs)
      : best(memory), starts(best + num_seqs + 1), common(starts + num_seqs + 1), shared(common + num_seqs) {}
};

int64_t division_bytes(int64_t num_seqs) { return (num_seqs + 1) * 16; }

__device__ void find_starts(const SharedPrefixParams& p, const Division& d) {
  const int lane = threadIdx.x;
  const int32_t num_seqs = int32_t(p.num_seqs);
  int32_t first = 0;  // rows before it share nothing with `row`
  if (lane == 0) d.best[0] = 0;
  __syncwarp();
#pragma unroll 1
  for (int32_t row = 0; row < num_seqs; ++row) {
    const int32_t common = d.common[row];
    if (common == 0) first = row;
    int32_t most = lane == 0 ? d.best[row] : 0, start = lane == 0 ? row : 0;  // of this lane's starts
#pragma unroll 1
    for (int32_t i = row - 1 - lane; i >= first; i -= kWarp) {
      const int32_t shared = min(d.shared[i], common);
      d.shared[i] = shared;
      const int32_t saved = d.best[i] + saved_reads(p, row - i + 1, shared);
      if (saved <= most) continue;
      most = saved;
      start = i;
    }
    if (first < row) {  // of equal ones the shortest run
      const int32_t own = most;
      most = __reduce_max_sync(kFullMask, own);
      start = __reduce_max_sync(kFullMask, own == most ? start : 0);
    }
    __syncwarp();
    if (lane == 0) {
      d.best[row + 1] = most;
      d.starts[row + 1] = start;
      d.shared[row] = INT32_MAX;
    }
    __syncwarp();
  }
}

// Rows from the first run that shares to the last; those outside have no span.
struct Sharing {
  int32_t first, last;
};

// From starts of last runs to what each row needs to know of its own.
__device__ Sharing trace_runs(const SharedPrefixParams& p, const Division& d) {
  const int lane = threadIdx.x;
  const int32_t num_seqs = int32_t(p.num_seqs);
  Sharing sharing{num_seqs, num_seqs};
#pragma unroll 1
  for (int32_t end = num_seqs; end > 0;) {
    const int32_t start = d.starts[end];
    int32_t shared = INT32_MAX;
    for (int32_t row = start + 1 + lane; row < end; row += kWarp) shared = min(shared, d.common[row]);
    shared = end - start == 1 ? 0 : __reduce_min_sync(kFullMask, shared);
    if (shared > 0) sharing = {start, sharing.first == num_seqs ? end : sharing.last};
    __syncwarp();
    for (int32_t row = start + lane; row < end; row += kWarp) {
      d.shared[row] = shared;
      d.starts[row + 1] = row == start ? start : end;
    }
    __syncwarp();
    end = start;
  }
  return sharing;
}

__global__ void __launch_bounds__(kWarp)
    divide(const __grid_constant__ SharedPrefixParams p, const int32_t* common, int32_t* memory) {
  extern __shared__ int32_t own_memory[];
  const Division d(memory == nullptr ? own_memory : memory, p.num_seqs);
  for (int64_t row = threadIdx.x; row < p.num_seqs; row += kWarp) d.common[row] = common[row];
  __syncwarp();
  find_starts(p, d);
  const Sharing sharing = trace_runs(p, d);
  for (int64_t row = threadIdx.x; row < p.num_seqs; row += kWarp) {
    const int32_t shared = d.shared[row] * int32_t(p.block_size), source = d.starts[row + 1];
    p.prefix_lens[row] = source == row ? shared : 0;
    p.prefix_cu_seqlens_q[row] = p.cu_seqlens_q[min(max(source, sharing.first), sharing.last)];
    p.suffix_lens[row] = int32_t(length_of(p, row)) - shared;
  }
  if (threadIdx.x == 0) p.prefix_cu_seqlens_q[p.num_seqs] = p.cu_seqlens_q[sharing.last];
}

__global__ void __launch_bounds__(kThreads)
    write_tables(const __grid_constant__ SharedPrefixParams p, int64_t blocks_per_row) {
  const int64_t row = blockIdx.x / blocks_per_row;
  const int64_t column = (blockIdx.x - row * blocks_per_row) * kThreads + threadIdx.x;
  if (column >= p.max_blocks) return;
  const int64_t suffix = p.suffix_lens[row], shared = (length_of(p, row) - suffix) / p.block_size;
  const bool is_used = column < blocks_for(suffix, p.block_size);
  p.suffix_table[row * p.max_blocks + column] = is_used ? entries_of(p, row)[shared + column] : -1;
}

}  // namespace

int64_t shared_prefixes_workspace(const SharedPrefixParams& params) {
  const int64_t division = division_bytes(params.num_seqs);
  return 4 * params.num_seqs + (division > kPlentyOfShared ? division : 0);
}

void find_shared_prefixes(const SharedPrefixParams& params, cudaStream_t stream) {
  int32_t* common = static_cast<int32_t*>(params.workspace);
  const int64_t rows = params.num_seqs, bytes = division_bytes(rows);
  const bool fits = bytes <= kPlentyOfShared;
  int32_t* memory = fits ? nullptr : common + rows;
  if (rows > 0) compare<<<unsigned(divide_up(rows * kWarp, kThreads)), kThreads, 0, stream>>>(params, common);
  divide<<<1, kWarp, fits ? size_t(bytes) : 0, stream>>>(params, common, memory);
  const int64_t blocks_per_row = divide_up(params.max_blocks, kThreads), grid = rows * blocks_per_row;
  if (grid > 0) write_tables<<<unsigned(grid), kThreads, 0, stream>>>(params, blocks_per_row);
  check_launch("find_shared_prefixes");
}

}  // namespace paged_kv::cuda
