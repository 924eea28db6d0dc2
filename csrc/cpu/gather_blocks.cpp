// Paged to dense: each sequence's keys and values in order, right-aligned, zeros where there are none.
#include <algorithm>
#include <cstring>

#include "../common/slots.h"
#include "elements.h"
#include "kernels.h"
#include "parallel.h"

namespace paged_kv::cpu {
namespace {

constexpr int64_t kBytesPerThread = 128 << 10;  // below, a second thread costs more than it saves

struct Side {
  const Cache& cache;
  char* out;              // [num_seqs, num_kv_heads, max_len, head_size] contiguous
  int64_t element_bytes;  // of out
  RowFunction load;
  bool joins_rows;        // consecutive slots of a head are adjacent and are scaled alike: a block is one long row
};

Side make_side(const Cache& cache, void* out, DType dtype) {
  const bool copies = dtype == cache.dtype && cache.scale.kind == ScaleKind::none;
  const bool joins_rows = cache.slot_stride == cache.head_size && cache.scale.kind != ScaleKind::per_slot;
  const RowFunction load = copies ? copy_row_of(dtype) : row_kernels().multiply(cache.dtype, dtype);
  return {cache, static_cast<char*>(out), size_of(dtype), load, joins_rows};
}

float row_scale(const Scale& scale, int64_t block, int64_t offset, int64_t head) {
  return scale.kind == ScaleKind::none ? 1.0f : *scale_of(scale, block, offset, head);
}

// Slots offset .. offset + count - 1 of a block, one head, to consecutive rows of `out`.
void load_slots(const Side& side, int64_t block, int64_t offset, int64_t count, int64_t head, char* out) {
  const int64_t size = side.cache.head_size;
  const int64_t rows = side.joins_rows ? count : 1;
  for (const int64_t end = offset + count; offset < end; offset += rows, out += rows * size * side.element_bytes) {
    const float scale = row_scale(side.cache.scale, block, offset, head);
    side.load(row_of(side.cache, block, offset, head), out, rows * size, scale);
  }
}

void gather_head(const GatherParams& params, const Side& side, int64_t seq, int64_t head) {
  const int64_t row_bytes = side.cache.head_size * side.element_bytes;
  const int64_t seq_len = clamp(params.seq_lens[seq], 0, params.max_blocks * params.block_size);
  const int64_t kept = std::min(seq_len, params.max_len);
  char* out = side.out + (seq * params.num_kv_heads + head) * params.max_len * row_bytes;
  std::memset(out, 0, size_t((params.max_len - kept) * row_bytes));
  out += (params.max_len - kept) * row_bytes;
  for (int64_t position = seq_len - kept; position < seq_len;) {
    const int64_t offset = position % params.block_size;
    const int64_t count = std::min(params.block_size - offset, seq_len - position);
    const int64_t block = params.block_table[seq * params.block_table_stride + position / params.block_size];
    if (is_block(block, params.num_blocks)) {
      load_slots(side, block, offset, count, head, out);
    } else {
      std::memset(out, 0, size_t(count * row_bytes));
    }
    position += count;
    out += count * row_bytes;
  }
}

struct Context {
  const GatherParams& params;
  Side key, value;
};

// Item = seq * num_kv_heads + head.
void gather_items(void* pointer, int64_t first, int64_t last) {
  const auto& [params, key, value] = *static_cast<const Context*>(pointer);
  for (int64_t item = first; item < last; ++item) {
    gather_head(params, key, item / params.num_kv_heads, item % params.num_kv_heads);
    gather_head(params, value, item / params.num_kv_heads, item % params.num_kv_heads);
  }
}

}  // namespace

void gather_blocks(const GatherParams& params) {
  if (params.max_len == 0) return;
  Context context{params, make_side(params.key_cache, params.key, params.dtype),
                  make_side(params.value_cache, params.value, params.dtype)};
  const int64_t item_bytes =
      params.max_len * (params.key_cache.head_size + params.value_cache.head_size) * size_of(params.dtype);
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / std::max<int64_t>(1, item_bytes));
  parallel_for(0, params.num_seqs * params.num_kv_heads, grain, gather_items, &context);
}

}  // namespace paged_kv::cpu
