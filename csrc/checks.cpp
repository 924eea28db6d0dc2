#include "checks.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cmath>

#include "argument.h"
#include "contents.h"

namespace paged_kv {
namespace {

constexpr int64_t kMaxHeadSize = 576;

// ---- parts that several ops share ------------------------------------------------------------------------------

struct PoolShape {
  int64_t num_blocks, block_size, num_kv_heads;
};

PoolShape check_caches(const Argument& key_cache, const Argument& value_cache, const Device& device) {
  require_device(key_cache, device);
  require_device(value_cache, device);
  require_shape(key_cache, {{"num_blocks"}, {"block_size"}, {"num_kv_heads"}, {"head_size"}});
  const int64_t* sizes = key_cache.sizes;
  require_shape(value_cache,
                {{"num_blocks", sizes[0]}, {"block_size", sizes[1]}, {"num_kv_heads", sizes[2]}, {"head_size_v"}});
  require_cache_dtype(key_cache);
  require_dtype(value_cache, key_cache.dtype);
  require_dim_within(key_cache, "num_blocks", sizes[0], 0, kMaxInt32);
  require_dim_within(key_cache, "block_size", sizes[1], 1, kMaxInt32);
  require_dim_within(key_cache, "num_kv_heads", sizes[2], 1, kMaxInt32);
  require_dim_within(key_cache, "head_size", sizes[3], 1, kMaxHeadSize);
  require_dim_within(value_cache, "head_size_v", value_cache.sizes[3], 1, kMaxHeadSize);
  require_last_dim_contiguous(key_cache);
  require_last_dim_contiguous(value_cache);
  return {sizes[0], sizes[1], sizes[2]};
}

// The number of dimensions tells the kinds apart: a scale per slot has three, even in a pool of one slot.
Scale check_scale(const char* name, const OptionalTensor& tensor, const PoolShape& pool, const Device& device,
                  Access access = Access::read) {
  if (!tensor) return {nullptr, ScaleKind::none, 0, 0, 0};
  const bool per_slot = tensor->dim() == 3;
  const Argument scale(name, *tensor, per_slot ? access : Access::read);  // the other kinds are only read
  require_device(scale, device);
  require_float32(scale);
  if (has_shape(scale, {}) || has_shape(scale, {{"", 1}})) {
    if (debug_mode()) check_scale_values(scale);
    return {scale.as<float>(), ScaleKind::per_tensor, 0, 0, 0};
  }
  if (has_shape(scale, {{"", pool.num_kv_heads}})) {
    require_contiguous(scale);
    if (debug_mode()) check_scale_values(scale);
    return {scale.as<float>(), ScaleKind::per_head, 0, 0, 1};
  }
  if (!has_shape(scale, {{"", pool.num_blocks}, {"", pool.block_size}, {"", pool.num_kv_heads}})) {
    const std::string heads = "num_kv_heads=" + text(pool.num_kv_heads);
    fail(name,
         "have shape [], [1], [" + heads + "] or [num_blocks=" + text(pool.num_blocks) +
             ", block_size=" + text(pool.block_size) + ", " + heads + "]",
         scale.shape());
  }
  if (access == Access::write) require_no_overlap(scale);
  return {scale.as<float>(), ScaleKind::per_slot, scale.strides[0], scale.strides[1], scale.strides[2]};
}

// Scales that are read where a row of the table has a token; for debug mode, after the table.
void check_read_scales(const OptionalTensor& key_scale, const OptionalTensor& value_scale, const Argument& block_table,
                       const Argument& seq_lens) {
  if (key_scale && key_scale->dim() == 3) check_slot_scales(Argument("key_scale", *key_scale), block_table, seq_lens);
  if (value_scale && value_scale->dim() == 3)
    check_slot_scales(Argument("value_scale", *value_scale), block_table, seq_lens);
}

Cache cache_of(const Argument& cache, const Scale& scale) {
  return {cache.data, *kernel_dtype(cache.dtype), cache.strides[0], cache.strides[1], cache.strides[2], cache.sizes[3],
          scale};
}

const float* check_per_head(const char* name, const OptionalTensor& tensor, int64_t num_heads, const Device& device) {
  if (!tensor) return nullptr;
  const Argument argument(name, *tensor);
  require_vector(argument, device, {"num_heads", num_heads});
  require_float32(argument);
  return argument.as<float>();
}

void check_table_shape(const Argument& block_table, const Argument& seq_lens, const Device& device) {
  require_device(block_table, device);
  require_shape(block_table, {{"num_seqs"}, {"max_blocks"}});
  require_int32(block_table);
  require_last_dim_contiguous(block_table);
  require_int32(seq_lens);
  require_vector(seq_lens, device, {"num_seqs", block_table.sizes[0]});
}

Mask check_mask(const OptionalTensor& tensor, int64_t num_tokens, int64_t num_heads, const Device& device) {
  if (!tensor) return {nullptr, MaskKind::none, 0, 0, 0};
  const Argument mask("mask", *tensor);
  require_device(mask, device);
  if (!is_bool(mask) && kernel_dtype(mask.dtype) != DType::float32)
    fail("mask", "have dtype bool or float32", dtype_name(mask.dtype));
  if (mask.dim != 3 || mask.sizes[0] != num_tokens || (mask.sizes[1] != 1 && mask.sizes[1] != num_heads)) {
    fail("mask", "have shape [num_tokens=" + text(num_tokens) + ", num_heads=" + text(num_heads) + " or 1, width]",
         mask.shape());
  }
  require_last_dim_contiguous(mask);
  return {mask.data, is_bool(mask) ? MaskKind::boolean : MaskKind::additive, mask.strides[0],
          mask.sizes[1] == 1 ? 0 : mask.strides[1], mask.sizes[2]};
}

// The five state tensors that allocate, free and fork change.
struct State {
  Rows rows;
  PoolState pool;
};

struct StateArguments {
  Argument block_table, seq_lens, free_ring, ref_counts, counters;

  StateArguments(const Tensor& block_table, const Tensor& seq_lens, const Tensor& free_ring, const Tensor& ref_counts,
                 const Tensor& counters)
      : block_table("block_table", block_table, Access::write),
        seq_lens("seq_lens", seq_lens, Access::write),
        free_ring("free_ring", free_ring, Access::write),
        ref_counts("ref_counts", ref_counts, Access::write),
        counters("counters", counters, Access::write) {}

  const Device& device() const { return block_table.device; }

  State check(int64_t block_size) const {
    const bool grouped = block_table.dim == 3;
    if (!grouped && block_table.dim != 2)
      fail("block_table", "have shape [num_seqs, max_blocks] or [num_groups, num_seqs, max_blocks]",
           block_table.shape());
    require_int32(block_table);
    require_contiguous(block_table);
    const int64_t num_groups = grouped ? block_table.sizes[0] : 1;
    const int64_t num_seqs = block_table.sizes[grouped ? 1 : 0];
    const int64_t max_blocks = block_table.sizes[grouped ? 2 : 1];
    require_int32(seq_lens);
    require_vector(seq_lens, device(), {"num_seqs", num_seqs});
    require_int32(free_ring);
    require_vector(free_ring, device(), {"num_blocks"});
    const int64_t num_blocks = free_ring.sizes[0];
    require_dim_within(free_ring, "num_blocks", num_blocks, 0, kMaxInt32);
    require_int32(ref_counts);
    require_vector(ref_counts, device(), {"num_blocks", num_blocks});
    require_int64(counters);
    require_vector(counters, device(), {"", kNumCounters});
    require_within("block_size", block_size, 1, kMaxInt32);
    if (device().is_cpu() || debug_mode()) check_lengths(seq_lens, std::min(max_blocks * block_size, kMaxInt32));
    if (debug_mode()) check_counts(block_table, ref_counts);
    return {{block_table.as<int32_t>(), seq_lens.as<int32_t>(), num_groups, num_seqs, max_blocks, block_size},
            {free_ring.as<int32_t>(), ref_counts.as<int32_t>(), counters.as<int64_t>(), num_blocks}};
  }
};

// ---- lanes of copy_blocks and swap_blocks ----------------------------------------------------------------------

void require_same_block(const Argument& a, const Argument& b) {
  require_dtype(b, a.dtype);
  const bool same = a.dim == b.dim && std::equal(a.sizes + 1, a.sizes + a.dim, b.sizes + 1);
  if (!same) fail(b.full_name(), "have blocks of shape " + text(a.sizes + 1, a.dim - 1), text(b.sizes + 1, b.dim - 1));
}

// Splits a block into the longest runs of bytes that are dense in both caches, and appends a lane for each.
// Both have shape [num_blocks, ...] with equal sizes after the first.
void append_lanes(const Argument& source, const Argument& destination, std::vector<CopyLane>& lanes) {
  const int64_t bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(source.dtype));
  if (source.numel() == 0 || destination.numel() == 0) return;
  struct Axis {
    int64_t size, source_stride, destination_stride;
  };
  std::vector<Axis> axes;  // of one block, innermost first
  for (int64_t d = 1; d < source.dim; ++d) {
    if (source.sizes[d] != 1) axes.push_back({source.sizes[d], source.strides[d], destination.strides[d]});
  }
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) { return a.source_stride < b.source_stride; });
  int64_t dense = 1;
  size_t outer = 0;
  while (outer < axes.size() && axes[outer].source_stride == dense && axes[outer].destination_stride == dense)
    dense *= axes[outer++].size;
  int64_t count = 1;
  for (size_t i = outer; i < axes.size(); ++i) count *= axes[i].size;
  for (int64_t lane = 0; lane < count; ++lane) {
    int64_t source_offset = 0, destination_offset = 0, rest = lane;
    for (size_t i = outer; i < axes.size(); rest /= axes[i++].size) {
      source_offset += rest % axes[i].size * axes[i].source_stride;
      destination_offset += rest % axes[i].size * axes[i].destination_stride;
    }
    lanes.push_back({source.as<const char>() + source_offset * bytes,
                     destination.as<char>() + destination_offset * bytes, source.strides[0] * bytes,
                     destination.strides[0] * bytes, dense * bytes, source.sizes[0], destination.sizes[0]});
  }
}

void require_block_tensor(const Argument& cache) {
  if (cache.dim < 1) fail(cache.full_name(), "have shape [num_blocks, ...]", cache.shape());
}

// A cache listed twice would be copied twice, which breaks chained pairs.
void require_distinct(const std::vector<Tensor>& first, const std::vector<Tensor>& second, const char* name) {
  std::vector<const void*> starts;
  for (const std::vector<Tensor>* list : {&first, &second}) {
    for (const Tensor& cache : *list) {
      if (cache.numel() > 0) starts.push_back(cache.const_data_ptr());
    }
  }
  std::sort(starts.begin(), starts.end());
  if (std::adjacent_find(starts.begin(), starts.end()) != starts.end())
    fail(name, "hold each cache once", "one that is listed twice");
}

void check_block_mapping_shape(const Argument& block_mapping, const Device& device) {
  require_device(block_mapping, device);
  require_shape(block_mapping, {{"num_pairs"}, {"", 2}});
  require_int64(block_mapping);
  require_contiguous(block_mapping);
}

}  // namespace

// ---- one check per op ------------------------------------------------------------------------------------------

AllocateParams check_allocate(const Tensor& block_table, const Tensor& seq_lens, const Tensor& free_ring,
                              const Tensor& ref_counts, const Tensor& counters, const Tensor& cu_seqlens_q,
                              int64_t num_tokens, int64_t block_size, const OptionalTensor& num_new,
                              const OptionalTensor& retain) {
  const StateArguments arguments(block_table, seq_lens, free_ring, ref_counts, counters);
  const State state = arguments.check(block_size);
  const Device& device = arguments.device();
  const int64_t num_seqs = state.rows.num_seqs;
  const bool check_contents = device.is_cpu() || debug_mode();

  const Argument spans("cu_seqlens_q", cu_seqlens_q);
  require_int32(spans);
  require_vector(spans, device, {"num_seqs + 1", num_seqs + 1});
  require_within("num_tokens", num_tokens, 0, kMaxInt32);
  if (check_contents) check_spans(spans, num_seqs, num_tokens);

  const int32_t* num_new_data = nullptr;
  if (num_new) {
    const Argument counts("num_new", *num_new);
    require_int32(counts);
    require_vector(counts, device, {"num_seqs", num_seqs});
    num_new_data = counts.as<int32_t>();
    if (check_contents) {
      const HostView<int32_t> new_tokens(counts);
      const HostView<int32_t> starts(spans);
      for (int64_t row = 0; row < num_seqs; ++row)
        new_tokens.require_within(row, 0, starts[row + 1] - starts[row], "row");
    }
  }

  const int32_t* retain_data = nullptr;
  if (retain) {
    const Argument kept("retain", *retain);
    require_int32(kept);
    require_vector(kept, device, {"num_groups", state.rows.num_groups});
    retain_data = kept.as<int32_t>();
    if (check_contents) {
      const HostView<int32_t> values(kept);
      for (int64_t group = 0; group < values.size(); ++group) values.require_within(group, -1, kMaxInt32, "group");
    }
  }
  return {state.rows, state.pool, spans.as<int32_t>(), num_new_data, retain_data, num_tokens, nullptr, nullptr};
}

void fail_table_too_narrow(int64_t row, int64_t columns, int64_t max_blocks) {
  fail("block_table", "have max_blocks >= " + text(columns) + " for row " + text(row), text(max_blocks));
}

FreeParams check_free(const Tensor& block_table, const Tensor& seq_lens, const Tensor& free_ring,
                      const Tensor& ref_counts, const Tensor& counters, const Tensor& new_lens, int64_t block_size) {
  const StateArguments arguments(block_table, seq_lens, free_ring, ref_counts, counters);
  const State state = arguments.check(block_size);
  const Argument lengths("new_lens", new_lens);
  require_int32(lengths);
  require_vector(lengths, arguments.device(), {"num_seqs", state.rows.num_seqs});
  if (arguments.device().is_cpu() || debug_mode()) check_lengths(lengths, kMaxInt32);
  return {state.rows, state.pool, lengths.as<int32_t>()};
}

ForkParams check_fork(const Tensor& block_table, const Tensor& seq_lens, const Tensor& free_ring,
                      const Tensor& ref_counts, const Tensor& counters, const Tensor& source_rows,
                      const Tensor& destination_rows, int64_t block_size) {
  const StateArguments arguments(block_table, seq_lens, free_ring, ref_counts, counters);
  const State state = arguments.check(block_size);
  const Argument sources("source_rows", source_rows);
  const Argument destinations("destination_rows", destination_rows);
  require_int64(sources);
  require_vector(sources, arguments.device(), {"num_pairs"});
  require_int64(destinations);
  require_vector(destinations, arguments.device(), {"num_pairs", sources.sizes[0]});
  if (arguments.device().is_cpu() || debug_mode()) {
    const HostView<int64_t> from(sources);
    const HostView<int64_t> to(destinations);
    std::vector<bool> taken(static_cast<size_t>(state.rows.num_seqs));
    for (int64_t pair = 0; pair < from.size(); ++pair) {
      from.require_within(pair, 0, state.rows.num_seqs - 1, "pair");
      to.require_within(pair, 0, state.rows.num_seqs - 1, "pair");
      if (taken[static_cast<size_t>(to[pair])])
        fail("destination_rows", "hold each row once", text(to[pair]) + " again at pair " + text(pair));
      taken[static_cast<size_t>(to[pair])] = true;
    }
  }
  return {state.rows, state.pool, sources.as<int64_t>(), destinations.as<int64_t>(), sources.sizes[0]};
}

ReshapeAndCacheParams check_reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                                              const Tensor& value_cache, const Tensor& slot_mapping,
                                              const OptionalTensor& key_scale, const OptionalTensor& value_scale) {
  const Argument keys("key", key);
  const Argument values("value", value);
  const Argument k_cache("key_cache", key_cache, Access::write);
  const Argument v_cache("value_cache", value_cache, Access::write);
  const Argument slots("slot_mapping", slot_mapping);
  const Device& device = keys.device;

  const PoolShape pool = check_caches(k_cache, v_cache, device);
  require_no_overlap(k_cache);
  require_no_overlap(v_cache);
  const Dim heads = {"num_kv_heads", pool.num_kv_heads};
  require_token_rows(keys, {"num_tokens"}, heads, {"head_size", k_cache.sizes[3]});
  const int64_t num_tokens = keys.sizes[0];
  require_device(values, device);
  require_token_rows(values, {"num_tokens", num_tokens}, heads, {"head_size_v", v_cache.sizes[3]});
  const DType dtype = require_float_dtype(keys);
  require_dtype(values, keys.dtype);
  require_last_dim_contiguous(keys);
  require_last_dim_contiguous(values);
  require_int64(slots);
  require_vector(slots, device, {"num_tokens", num_tokens});

  const Scale k_scale = check_scale("key_scale", key_scale, pool, device, Access::write);
  const Scale v_scale = check_scale("value_scale", value_scale, pool, device, Access::write);
  const bool quantised = size_of(*kernel_dtype(k_cache.dtype)) == 1;
  if (!quantised && (k_scale.kind == ScaleKind::per_slot || v_scale.kind == ScaleKind::per_slot)) {
    fail(k_scale.kind == ScaleKind::per_slot ? "key_scale" : "value_scale",
         "be None, per tensor or per head for a cache of dtype " + dtype_name(k_cache.dtype), "a scale per slot");
  }
  if (debug_mode()) check_slots(slots, pool.num_blocks * pool.block_size);

  ReshapeAndCacheParams params{};
  params.key = keys.data;
  params.value = values.data;
  params.dtype = dtype;
  params.key_token_stride = keys.strides[0];
  params.key_head_stride = keys.strides[1];
  params.value_token_stride = values.strides[0];
  params.value_head_stride = values.strides[1];
  params.key_cache = cache_of(k_cache, k_scale);
  params.value_cache = cache_of(v_cache, v_scale);
  params.slot_mapping = slots.as<int64_t>();
  params.num_tokens = num_tokens;
  params.num_kv_heads = pool.num_kv_heads;
  params.num_blocks = pool.num_blocks;
  params.block_size = pool.block_size;
  return params;
}

AttentionParams check_paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                                      const Tensor& block_table, const Tensor& seq_lens, const Tensor& cu_seqlens_q,
                                      int64_t max_seqlen_q, double scale, bool causal, int64_t window_left,
                                      int64_t window_right, double softcap, const OptionalTensor& alibi_slopes,
                                      const OptionalTensor& sinks, const OptionalTensor& key_scale,
                                      const OptionalTensor& value_scale, const OptionalTensor& mask,
                                      bool deterministic) {
  const Argument queries("query", query);
  const Argument k_cache("key_cache", key_cache);
  const Argument v_cache("value_cache", value_cache);
  const Argument table("block_table", block_table);
  const Argument lengths("seq_lens", seq_lens);
  const Argument spans("cu_seqlens_q", cu_seqlens_q);
  const Device& device = queries.device;

  const PoolShape pool = check_caches(k_cache, v_cache, device);
  require_token_rows(queries, {"num_tokens"}, {"num_heads"}, {"head_size", k_cache.sizes[3]});
  const DType dtype = require_float_dtype(queries);
  require_last_dim_contiguous(queries);
  const int64_t num_tokens = queries.sizes[0], num_heads = queries.sizes[1];
  if (num_heads < 1 || num_heads % pool.num_kv_heads != 0)
    fail("query", "have num_heads a multiple of num_kv_heads=" + text(pool.num_kv_heads), text(num_heads));
  check_table_shape(table, lengths, device);
  const int64_t num_seqs = table.sizes[0], max_blocks = table.sizes[1];
  require_int32(spans);
  require_vector(spans, device, {"num_seqs + 1", num_seqs + 1});

  require_at_least("max_seqlen_q", max_seqlen_q, 0);
  if (!std::isfinite(scale)) fail("scale", "be finite", text(scale));
  require_at_least("window_left", window_left, -1);
  require_at_least("window_right", window_right, -1);
  if (!std::isfinite(softcap) || softcap < 0) fail("softcap", "be finite and >= 0", text(softcap));

  if (debug_mode()) {
    check_spans(spans, num_seqs, num_tokens);
    check_longest_query(spans, num_seqs, max_seqlen_q);
    check_lengths(lengths, max_blocks * pool.block_size);
    check_table(table, lengths, pool.block_size, pool.num_blocks);
  }

  AttentionParams params{};
  params.query = queries.data;
  params.query_dtype = dtype;
  params.query_token_stride = queries.strides[0];
  params.query_head_stride = queries.strides[1];
  params.key_cache = cache_of(k_cache, check_scale("key_scale", key_scale, pool, device));
  params.value_cache = cache_of(v_cache, check_scale("value_scale", value_scale, pool, device));
  if (debug_mode()) check_read_scales(key_scale, value_scale, table, lengths);
  params.block_table = table.as<int32_t>();
  params.block_table_stride = table.strides[0];
  params.seq_lens = lengths.as<int32_t>();
  params.cu_seqlens_q = spans.as<int32_t>();
  params.num_tokens = num_tokens;
  params.num_seqs = num_seqs;
  params.num_heads = num_heads;
  params.num_kv_heads = pool.num_kv_heads;
  params.num_blocks = pool.num_blocks;
  params.block_size = pool.block_size;
  params.max_blocks = max_blocks;
  params.max_seqlen_q = max_seqlen_q;
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap);
  params.causal = causal;
  params.window_left = window_left;
  params.window_right = window_right;
  params.alibi_slopes = check_per_head("alibi_slopes", alibi_slopes, num_heads, device);
  params.sinks = check_per_head("sinks", sinks, num_heads, device);
  params.mask = check_mask(mask, num_tokens, num_heads, device);
  params.deterministic = deterministic;
  return params;
}

MergeParams check_merge_attention_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                         const Tensor& lse_b, const OptionalTensor& sinks) {
  const Argument a("out_a", out_a);
  const Argument a_lse("lse_a", lse_a);
  const Argument b("out_b", out_b);
  const Argument b_lse("lse_b", lse_b);
  require_shape(a, {{"num_tokens"}, {"num_heads"}, {"head_size"}});
  const DType dtype = require_float_dtype(a);
  const int64_t num_tokens = a.sizes[0], num_heads = a.sizes[1], head_size = a.sizes[2];
  require_device(b, a.device);
  require_shape(b, {{"num_tokens", num_tokens}, {"num_heads", num_heads}, {"head_size", head_size}});
  require_dtype(b, a.dtype);
  require_contiguous(a);
  require_contiguous(b);
  for (const Argument* lse : {&a_lse, &b_lse}) {
    require_device(*lse, a.device);
    require_shape(*lse, {{"num_tokens", num_tokens}, {"num_heads", num_heads}});
    require_float32(*lse);
    require_contiguous(*lse);
  }
  MergeParams params{};
  params.out_a = a.data;
  params.out_b = b.data;
  params.lse_a = a_lse.as<float>();
  params.lse_b = b_lse.as<float>();
  params.sinks = check_per_head("sinks", sinks, num_heads, a.device);
  params.dtype = dtype;
  params.num_tokens = num_tokens;
  params.num_heads = num_heads;
  params.head_size = head_size;
  return params;
}

SharedPrefixParams check_find_shared_prefixes(const Tensor& block_table, const Tensor& seq_lens,
                                              const Tensor& cu_seqlens_q, int64_t block_size, int64_t min_saved) {
  const Argument table("block_table", block_table);
  const Argument lengths("seq_lens", seq_lens);
  const Argument spans("cu_seqlens_q", cu_seqlens_q);
  check_table_shape(table, lengths, table.device);
  require_int32(spans);
  require_vector(spans, table.device, {"num_seqs + 1", table.sizes[0] + 1});
  require_within("block_size", block_size, 1, kMaxInt32);
  require_at_least("min_saved", min_saved, 1);
  require_dim_within(table, "num_seqs * max_blocks", table.numel(), 0, kMaxInt32);
  if (debug_mode()) {
    check_spans(spans, table.sizes[0], kMaxInt32);
    check_lengths(lengths, table.sizes[1] * block_size);
  }
  SharedPrefixParams params{};
  params.block_table = table.as<int32_t>();
  params.block_table_stride = table.strides[0];
  params.seq_lens = lengths.as<int32_t>();
  params.cu_seqlens_q = spans.as<int32_t>();
  params.num_seqs = table.sizes[0];
  params.max_blocks = table.sizes[1];
  params.block_size = block_size;
  const int64_t min_blocks = min_saved / block_size + (min_saved % block_size != 0);
  params.min_saved_blocks = static_cast<int32_t>(std::min(min_blocks, kMaxInt32));
  return params;
}

CopyBlocksParams check_copy_blocks(const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
                                   const Tensor& block_mapping, std::vector<CopyLane>& lanes) {
  const Argument pairs("block_mapping", block_mapping);
  check_block_mapping_shape(pairs, pairs.device);
  int64_t num_blocks = kMaxInt32;
  const auto append = [&](const char* name, const std::vector<Tensor>& caches) {
    for (size_t i = 0; i < caches.size(); ++i) {
      const Argument cache(name, caches[i], Access::write, static_cast<int64_t>(i));
      require_device(cache, pairs.device);
      require_block_tensor(cache);
      require_no_overlap(cache);
      num_blocks = std::min(num_blocks, cache.sizes[0]);
      append_lanes(cache, cache, lanes);
    }
  };
  append("key_caches", key_caches);
  append("value_caches", value_caches);
  require_distinct(key_caches, value_caches, "key_caches and value_caches");
  if (debug_mode()) check_block_mapping(pairs, num_blocks, num_blocks);
  return {lanes.data(), static_cast<int64_t>(lanes.size()), pairs.as<int64_t>(), pairs.sizes[0]};
}

CopyBlocksParams check_swap_blocks(const std::vector<Tensor>& source_caches,
                                   const std::vector<Tensor>& destination_caches, const Tensor& block_mapping,
                                   std::vector<CopyLane>& lanes) {
  const Argument pairs("block_mapping", block_mapping);
  if (destination_caches.size() != source_caches.size())
    fail("destination_caches", "have as many caches as source_caches (" + text(int64_t(source_caches.size())) + ")",
         text(int64_t(destination_caches.size())));
  int64_t source_blocks = kMaxInt32, destination_blocks = kMaxInt32;
  Device mapping_device = pairs.device;
  for (size_t i = 0; i < source_caches.size(); ++i) {
    const Argument source("source_caches", source_caches[i], Access::read, static_cast<int64_t>(i));
    const Argument destination("destination_caches", destination_caches[i], Access::write, static_cast<int64_t>(i));
    require_block_tensor(source);
    require_block_tensor(destination);
    require_same_block(source, destination);
    require_no_overlap(destination);
    // A mapping is read where both ends can be reached: on the CPU unless both are on one other device.
    mapping_device = source.device == destination.device ? source.device : cpu_device();
    require_device(pairs, mapping_device);
    source_blocks = std::min(source_blocks, source.sizes[0]);
    destination_blocks = std::min(destination_blocks, destination.sizes[0]);
    append_lanes(source, destination, lanes);
  }
  check_block_mapping_shape(pairs, mapping_device);
  require_distinct(destination_caches, {}, "destination_caches");
  if (debug_mode()) check_block_mapping(pairs, source_blocks, destination_blocks);
  return {lanes.data(), static_cast<int64_t>(lanes.size()), pairs.as<int64_t>(), pairs.sizes[0]};
}

GatherParams check_gather_blocks(const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                                 const Tensor& seq_lens, int64_t max_len, const std::optional<ScalarType>& dtype,
                                 const OptionalTensor& key_scale, const OptionalTensor& value_scale) {
  const Argument k_cache("key_cache", key_cache);
  const Argument v_cache("value_cache", value_cache);
  const Argument table("block_table", block_table);
  const Argument lengths("seq_lens", seq_lens);
  const Device& device = k_cache.device;
  const PoolShape pool = check_caches(k_cache, v_cache, device);
  check_table_shape(table, lengths, device);
  require_within("max_len", max_len, 0, kMaxInt32);

  DType out_dtype = *kernel_dtype(k_cache.dtype);
  if (size_of(out_dtype) == 1) out_dtype = DType::float32;
  if (dtype) {
    const int32_t code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*dtype));
    const std::optional<DType> wanted = kernel_dtype(code);
    if (!wanted || size_of(*wanted) == 1) fail("dtype", "be float32, float16 or bfloat16", dtype_name(code));
    out_dtype = *wanted;
  }
  if (debug_mode()) {
    check_lengths(lengths, table.sizes[1] * pool.block_size);
    check_table(table, lengths, pool.block_size, pool.num_blocks);
  }
  GatherParams params{};
  params.key_cache = cache_of(k_cache, check_scale("key_scale", key_scale, pool, device));
  params.value_cache = cache_of(v_cache, check_scale("value_scale", value_scale, pool, device));
  if (debug_mode()) check_read_scales(key_scale, value_scale, table, lengths);
  params.block_table = table.as<int32_t>();
  params.block_table_stride = table.strides[0];
  params.seq_lens = lengths.as<int32_t>();
  params.num_seqs = table.sizes[0];
  params.num_kv_heads = pool.num_kv_heads;
  params.num_blocks = pool.num_blocks;
  params.block_size = pool.block_size;
  params.max_blocks = table.sizes[1];
  params.max_len = max_len;
  params.dtype = out_dtype;
  return params;
}

}  // namespace paged_kv
