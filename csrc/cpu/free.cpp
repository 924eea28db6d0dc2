// Shortens rows and gives back what nobody holds any more.
#include "../common/allocator.h"
#include "kernels.h"
#include "pool.h"

namespace paged_kv::cpu {
namespace {

// Releases the columns of a row from its end down to `new_len`, so that in the queue a prefix outlives its tail.
void cut(const FreeParams& params, int64_t group, int64_t row, int64_t new_len) {
  int32_t* entries = entries_of(params.rows, group, row);
  const int64_t first = blocks_for(new_len, params.rows.block_size);
  for (int64_t column = blocks_for(length_of(params.rows, row), params.rows.block_size); column-- > first;) {
    release(params.pool, entries[column]);
    entries[column] = kUnmapped;
  }
}

}  // namespace

void free(const FreeParams& params) {
  const Rows& rows = params.rows;
  const auto shortens = [&](int64_t row) {
    return params.new_lens[row] >= 0 && params.new_lens[row] < length_of(rows, row);
  };
  for (int64_t group = 0; group < rows.num_groups; ++group) {
    for (int64_t row = 0; row < rows.num_seqs; ++row) {
      if (shortens(row)) cut(params, group, row, params.new_lens[row]);
    }
  }
  for (int64_t row = 0; row < rows.num_seqs; ++row) {
    if (shortens(row)) rows.seq_lens[row] = params.new_lens[row];
  }
}

}  // namespace paged_kv::cpu
