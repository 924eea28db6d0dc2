// Writes new keys and values into the slots of the pool: rows are copied where dtypes agree, else cast or quantised.
#include <algorithm>

#include "../common/slots.h"
#include "elements.h"
#include "kernels.h"
#include "parallel.h"
#include "stream.h"

namespace paged_kv::cpu {
namespace {

constexpr int64_t kBytesPerThread = 128 << 10;  // below, a second thread costs more than it saves

template <int64_t kBytes>
void stream_row(const void* source, void* destination, int64_t size, float) {
  stream_copy(destination, source, size * kBytes);
}

RowFunction stream_row_of(DType dtype) {
  return size_of(dtype) == 4 ? stream_row<4> : size_of(dtype) == 2 ? stream_row<2> : stream_row<1>;
}

// Keys or values: where they come from, where they go and how.
struct Side {
  const char* source;  // [num_tokens, num_kv_heads, head_size]
  int64_t token_bytes, head_bytes;  // strides of source
  Cache cache;
  RowFunction store;
  AbsmaxFunction absmax;
};

// Tokens token .. token + count - 1 of the batch go to offsets offset .. of one block.
struct Run {
  int64_t token, block, offset, count;
};

// Do all rows of a cache consist of whole cache lines?
bool rows_can_stream(const Cache& cache) {
  const int64_t strides = cache.block_stride | cache.slot_stride | cache.head_stride | cache.head_size;
  return can_stream(cache.data, strides * size_of(cache.dtype));
}

Side make_side(const void* source, DType dtype, int64_t token_stride, int64_t head_stride, const Cache& cache,
               bool large) {
  const int64_t bytes = size_of(dtype);
  Side side{static_cast<const char*>(source), token_stride * bytes, head_stride * bytes, cache, nullptr, nullptr};
  if (dtype == cache.dtype && cache.scale.kind == ScaleKind::none) {
    side.store = large && rows_can_stream(cache) ? stream_row_of(dtype) : copy_row_of(dtype);
    return side;
  }
  side.store = row_kernels().divide(dtype, cache.dtype);
  side.absmax = row_kernels().absmax(dtype);
  return side;
}

// What a row is divided by. Scales per slot are made here, from the row.
float row_scale(const Side& side, const void* row, int64_t block, int64_t offset, int64_t head) {
  const Scale& scale = side.cache.scale;
  if (scale.kind == ScaleKind::none) return 1.0f;
  float* stored = scale_of(scale, block, offset, head);
  if (scale.kind == ScaleKind::per_slot) {
    const float made = side.absmax(row, side.cache.head_size) / max_of(side.cache.dtype);
    *stored = made > 0.0f ? made : 1.0f;
  }
  return *stored;
}

// Head by head: with the keys of a (block, head) adjacent, the writes of a run are sequential.
void store_run(const Side& side, int64_t num_kv_heads, const Run& run) {
  for (int64_t head = 0; head < num_kv_heads; ++head) {
    const char* row = side.source + run.token * side.token_bytes + head * side.head_bytes;
    for (int64_t offset = run.offset; offset < run.offset + run.count; ++offset, row += side.token_bytes) {
      const float scale = row_scale(side, row, run.block, offset, head);
      side.store(row, row_of(side.cache, run.block, offset, head), side.cache.head_size, scale);
    }
  }
}

struct Context {
  const ReshapeAndCacheParams& params;
  Side key, value;
};

// The longest run that starts at a token, before `last`; its block is -1 where the slot is outside the pool.
Run run_at(const ReshapeAndCacheParams& params, int64_t token, int64_t last) {
  const int64_t slot = params.slot_mapping[token];
  if (uint64_t(slot) >= uint64_t(params.num_blocks * params.block_size)) return {token, -1, 0, 1};
  Run run{token, slot / params.block_size, slot % params.block_size, 1};
  const int64_t longest = std::min(last - token, params.block_size - run.offset);
  while (run.count < longest && params.slot_mapping[token + run.count] == slot + run.count) ++run.count;
  return run;
}

void store_tokens(void* context, int64_t first, int64_t last) {
  const auto& [params, key, value] = *static_cast<const Context*>(context);
  for (int64_t token = first; token < last;) {
    const Run run = run_at(params, token, last);
    if (run.block >= 0) {
      store_run(key, params.num_kv_heads, run);
      store_run(value, params.num_kv_heads, run);
    }
    token += run.count;
  }
  stream_fence();
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& params) {
  const int64_t token_bytes =
      params.num_kv_heads * (params.key_cache.head_size + params.value_cache.head_size) * size_of(params.dtype);
  const bool large = params.num_tokens * token_bytes >= kStreamBytes;
  Context context{
      params,
      make_side(params.key, params.dtype, params.key_token_stride, params.key_head_stride, params.key_cache, large),
      make_side(params.value, params.dtype, params.value_token_stride, params.value_head_stride, params.value_cache,
                large)};
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / std::max<int64_t>(1, token_bytes));
  parallel_for(0, params.num_tokens, grain, store_tokens, &context);
}

}  // namespace paged_kv::cpu
