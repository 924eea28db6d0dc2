// Gives rows the blocks of their next tokens. All or nothing: the first half of the work (drop what `retain` gives up,
// find the shared blocks, count) touches reference counts alone and keeps a list of them, so that it can be undone.
#include <algorithm>
#include <vector>

#include "../common/allocator.h"
#include "kernels.h"
#include "pool.h"

namespace paged_kv::cpu {
namespace {

// Reference counts this call has lowered, in order.
class Drops {
 public:
  explicit Drops(const PoolState& pool) : pool_(pool) {}

  void drop(int32_t block) {
    if (!is_block(block, pool_.num_blocks) || pool_.ref_counts[block] <= 0) return;
    blocks_.push_back(block);
    if (cpu::drop(pool_, block)) freed_.push_back(block);
  }

  void undo() const {
    for (const int32_t block : blocks_) ++pool_.ref_counts[block];
  }

  const std::vector<int32_t>& freed() const { return freed_; }  // held by nobody any more, in order

 private:
  const PoolState& pool_;
  std::vector<int32_t> blocks_, freed_;
};

// Calls visit(column) for the columns of a row that `retain` gives up and that are still mapped, ascending. Columns
// before an unmapped one were given up by an earlier call, so that the work does not grow with the sequence.
template <class Visit>
void for_each_stale_column(const AllocateParams& params, int64_t group, int64_t row, int64_t old_len, Visit visit) {
  const int32_t* entries = entries_of(params.rows, group, row);
  const int64_t end = first_retained_column(params, group, old_len);
  int64_t begin = end;
  while (begin > 0 && entries[begin - 1] != kUnmapped) --begin;
  for (int64_t column = begin; column < end; ++column) visit(column);
}

// Calls visit(group, row, growth) group-major: the order in which blocks are released and taken.
template <class Visit>
void for_each_row(const Rows& rows, const std::vector<Growth>& growths, Visit visit) {
  for (int64_t group = 0; group < rows.num_groups; ++group)
    for (int64_t row = 0; row < rows.num_seqs; ++row) visit(group, row, growths[row]);
}

// The block a row must copy before it writes, or -1. Of several writers that share a block, all but the last copy.
int32_t shared_last_block(const AllocateParams& params, int64_t group, int64_t row, const Growth& growth) {
  if (!writes_begun_block(growth, params.rows.block_size)) return kUnmapped;
  const int32_t block = entries_of(params.rows, group, row)[growth.old_len / params.rows.block_size];
  return is_block(block, params.pool.num_blocks) && params.pool.ref_counts[block] > 1 ? block : kUnmapped;
}

void map_slots(const AllocateParams& params, int64_t group, int64_t row, const Growth& growth) {
  const int64_t block_size = params.rows.block_size;
  const int32_t* entries = entries_of(params.rows, group, row);
  int64_t* slots = params.slot_mapping + group * params.num_tokens + growth.span.end - growth.num_new;
  for (int64_t position = growth.old_len; position < growth.new_len;) {
    const int32_t block = entries[position / block_size];
    const int64_t end = std::min((position / block_size + 1) * block_size, growth.new_len);
    const int64_t first = is_block(block, params.pool.num_blocks) ? block * block_size + position % block_size : -1;
    for (int64_t i = 0; position < end; ++position, ++i) *slots++ = first < 0 ? -1 : first + i;
  }
}

// Rows whose new length no table row can hold are reported before anything is looked at.
bool all_fit(const Rows& rows, const std::vector<Growth>& growths, AllocateResult& result) {
  for (int64_t row = 0; row < rows.num_seqs; ++row) {
    if (growths[row].new_len <= capacity_of(rows)) continue;
    result = {false, 0, 0, row, blocks_for(growths[row].new_len, rows.block_size)};
    return false;
  }
  return true;
}

}  // namespace

AllocateResult allocate(const AllocateParams& params) {
  const Rows& rows = params.rows;
  const PoolState& pool = params.pool;
  std::fill_n(params.slot_mapping, rows.num_groups * params.num_tokens, -1);
  std::fill_n(params.block_mapping, rows.num_groups * rows.num_seqs * 2, -1);
  std::vector<Growth> growths(rows.num_seqs);
  for (int64_t row = 0; row < rows.num_seqs; ++row) growths[row] = growth_of(params, row);
  AllocateResult result{true, 0, num_free(pool), -1, 0};
  if (!all_fit(rows, growths, result)) return result;

  Drops drops(pool);
  for_each_row(rows, growths, [&](int64_t group, int64_t row, const Growth& growth) {
    const int32_t* entries = entries_of(rows, group, row);
    for_each_stale_column(params, group, row, growth.old_len, [&](int64_t column) { drops.drop(entries[column]); });
  });
  for_each_row(rows, growths, [&](int64_t group, int64_t row, const Growth& growth) {
    const int32_t shared = shared_last_block(params, group, row, growth);
    if (shared != kUnmapped) drops.drop(shared);
    params.block_mapping[(group * rows.num_seqs + row) * 2] = shared;
    result.wanted += blocks_for(growth.new_len, rows.block_size) - blocks_for(growth.old_len, rows.block_size);
    result.wanted += shared != kUnmapped;
  });
  result.available += int64_t(drops.freed().size());
  if (result.wanted > result.available) {
    drops.undo();
    std::fill_n(params.block_mapping, rows.num_groups * rows.num_seqs * 2, -1);
    result.ok = false;
    return result;
  }

  for (const int32_t block : drops.freed()) push(pool, block);
  for_each_row(rows, growths, [&](int64_t group, int64_t row, const Growth& growth) {
    int32_t* entries = entries_of(rows, group, row);
    for_each_stale_column(params, group, row, growth.old_len, [&](int64_t column) { entries[column] = kUnmapped; });
    int64_t* pair = params.block_mapping + (group * rows.num_seqs + row) * 2;
    if (pair[0] != kUnmapped) pair[1] = entries[growth.old_len / rows.block_size] = pop(pool);
    const int64_t end = blocks_for(growth.new_len, rows.block_size);
    for (int64_t column = blocks_for(growth.old_len, rows.block_size); column < end; ++column)
      entries[column] = pop(pool);
    map_slots(params, group, row, growth);
  });
  for (int64_t row = 0; row < rows.num_seqs; ++row) rows.seq_lens[row] = int32_t(growths[row].new_len);
  return result;
}

}  // namespace paged_kv::cpu
