// Divides rows into the runs of neighbours that save most reads by reading their first blocks together.
#include <algorithm>
#include <vector>

#include "../common/shared_prefixes.h"
#include "kernels.h"

namespace paged_kv::cpu {
namespace {

constexpr int32_t kMost = INT32_MAX;

// Columns, from the first, in which a row and the one before it hold the same blocks.
int32_t common_blocks(const SharedPrefixParams& p, int64_t row) {
  const int32_t *before = entries_of(p, row - 1), *own = entries_of(p, row);
  return int32_t(std::mismatch(before, before + shareable_blocks(p, row), own).first - before);
}

// starts[end]: first row of the last run of the best division of rows 0 .. end - 1. Of equal ones, the shortest run.
std::vector<int64_t> best_starts(const SharedPrefixParams& p, const std::vector<int32_t>& common) {
  std::vector<int32_t> best(size_t(p.num_seqs) + 1, 0);
  std::vector<int64_t> starts(size_t(p.num_seqs) + 1, 0);
  std::vector<int32_t> least(size_t(p.num_seqs), kMost);  // [start]: blocks that all rows start .. row share
  int64_t first = 0;  // rows before it share nothing with `row`
  for (int64_t row = 0; row < p.num_seqs; ++row) {
    if (common[size_t(row)] == 0) first = row;
    int32_t saved = best[size_t(row)];
    int64_t start = row;
    for (int64_t i = row - 1; i >= first; --i) {
      least[size_t(i)] = std::min(least[size_t(i)], common[size_t(row)]);
      const int32_t candidate = best[size_t(i)] + saved_reads(p, int32_t(row - i + 1), least[size_t(i)]);
      if (candidate > saved) {
        saved = candidate;
        start = i;
      }
    }
    best[size_t(row) + 1] = saved;
    starts[size_t(row) + 1] = start;
  }
  return starts;
}

void write_row(const SharedPrefixParams& p, int64_t row, int64_t shared_blocks) {
  const int64_t suffix = length_of(p, row) - shared_blocks * p.block_size, columns = blocks_for(suffix, p.block_size);
  const int32_t* own = entries_of(p, row) + shared_blocks;
  int32_t* table = p.suffix_table + row * p.max_blocks;
  std::fill(std::copy(own, own + columns, table), table + p.max_blocks, -1);
  p.suffix_lens[row] = int32_t(suffix);
}

// Consecutive rows and the blocks that they share.
struct Run {
  int64_t start, end, shared_blocks;
};

std::vector<Run> runs_of(const SharedPrefixParams& p) {
  std::vector<int32_t> common(size_t(p.num_seqs), 0);
  for (int64_t row = 1; row < p.num_seqs; ++row) common[size_t(row)] = common_blocks(p, row);
  const std::vector<int64_t> starts = best_starts(p, common);
  std::vector<Run> runs;  // the last first
  for (int64_t end = p.num_seqs; end > 0; end = starts[size_t(end)]) {
    const int64_t start = starts[size_t(end)];
    const auto first = common.begin() + start + 1, last = common.begin() + end;
    runs.push_back({start, end, first == last ? 0 : *std::min_element(first, last)});
  }
  return runs;
}

}  // namespace

void find_shared_prefixes(const SharedPrefixParams& p) {
  const std::vector<Run> runs = runs_of(p);
  int64_t first = p.num_seqs, last = p.num_seqs;  // rows outside have no span
  for (const Run& run : runs) {
    if (run.shared_blocks == 0) continue;
    if (first == p.num_seqs) last = run.end;
    first = run.start;
  }
  p.prefix_cu_seqlens_q[p.num_seqs] = p.cu_seqlens_q[last];
  for (const Run& run : runs) {
    for (int64_t row = run.start; row < run.end; ++row) {
      const bool begins = row == run.start;
      p.prefix_lens[row] = begins ? int32_t(run.shared_blocks * p.block_size) : 0;
      p.prefix_cu_seqlens_q[row] = p.cu_seqlens_q[clamp(begins ? run.start : run.end, first, last)];
      write_row(p, row, run.shared_blocks);
    }
  }
}

}  // namespace paged_kv::cpu
