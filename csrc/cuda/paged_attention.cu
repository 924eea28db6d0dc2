// paged_attention, host side: which kernel, how large a grid, where its partial results lie. The kernels find out on
// the device who does what (attention_schedule.cuh). docs/kernels/decode.md.
#include <algorithm>

#include "attention_general.cuh"
#include "attention_host.h"
#include "attention_launch.h"
#include "kernels.h"

namespace paged_kv::cuda {
namespace {

constexpr int64_t kHeaderBytes = 256;
constexpr int kTensorCoreKeys = 16;  // of a tile

int64_t round_up(int64_t value, int64_t unit) { return divide_up(value, unit) * unit; }

// ---- Policy ----

bool in_32_bits(int64_t value) { return value >= 0 && value < int64_t(1) << 32; }

// Do offsets of 32 bits reach all of a block?
bool is_narrow(const Cache& cache, const AttentionParams& p) {
  constexpr int64_t kMost = int64_t(1) << 31;
  const auto small = [](int64_t value) { return value >= 0 && value < kMost; };
  return in_32_bits(size_of(cache.dtype) * cache.block_stride) && small(cache.slot_stride) &&
         small(cache.head_stride) && small(p.block_size) && small(p.num_kv_heads) &&
         double(cache.slot_stride) * double(p.block_size) + double(cache.head_stride) * double(p.num_kv_heads) <
             double(kMost / 2);
}

// Does the tensor-core kernel take a cache? It reads rows in chunks of 16 bytes.
bool fits_tensor_cores(const Cache& cache, const AttentionParams& p) {
  const int64_t unit = 16 / size_of(cache.dtype);
  return cache.head_size <= 256 && cache.head_size % unit == 0 && cache.block_stride % unit == 0 &&
         cache.slot_stride % unit == 0 && cache.head_stride % unit == 0 &&
         reinterpret_cast<intptr_t>(cache.data) % 16 == 0 && is_narrow(cache, p);
}

// ... a call? 8-bit caches are expanded to float16, whatever 16-bit dtype the queries have.
bool fits_tensor_cores(const AttentionParams& p) {
  const DType dtype = p.key_cache.dtype;
  if (p.query_dtype == DType::float32 || p.mask.kind != MaskKind::none || p.value_cache.dtype != dtype) return false;
  if (!fits_tensor_cores(p.key_cache, p) || !fits_tensor_cores(p.value_cache, p)) return false;
  const bool eight_bit = size_of(dtype) == 1;
  if (eight_bit) {
    if (p.deterministic) return false;
    if (dtype == DType::float8_e4m3fn && current_device().compute_capability < 89) return false;
  } else if (dtype != p.query_dtype || p.key_cache.scale.kind != ScaleKind::none ||
             p.value_cache.scale.kind != ScaleKind::none) {
    return false;
  }
  const int64_t unit = eight_bit ? 4 : 2;  // elements of queries that are read at once
  return p.query_token_stride % unit == 0 && p.query_head_stride % unit == 0 &&
         reinterpret_cast<intptr_t>(p.query) % (2 * unit) == 0 && in_32_bits(p.query_token_stride) &&
         in_32_bits(p.query_head_stride * p.num_heads);
}

// Packed rows of an item: no more than a step's longest sequence has, and what registers hold.
// Beside prefills what is left are mostly single tokens, whatever the longest span.
int rows_for(const AttentionParams& p, int head_size_class, bool has_prefill) {
  const int64_t tokens = has_prefill ? 1 : p.max_seqlen_q;
  const int64_t rows = tokens * (p.num_heads / p.num_kv_heads);
  if (rows <= 8) return 8;
  return rows <= 16 || head_size_class == 256 || size_of(p.key_cache.dtype) == 1 ? 16 : 32;
}

// Warps of a thread block, by the stages that shared memory holds.
int mma_warps(int head_size_class, int blocks, int64_t shared_bytes) {
  const int most = mma_max_warps(head_size_class);
  const int64_t warp_bytes = mma_warp_bytes(head_size_class, blocks);
  const int64_t fit = (shared_bytes - kFixedSharedBytes) / warp_bytes;
  return int(fit < 1 ? 1 : fit < most ? fit : most);
}

// Beside the Hopper kernel, whose blocks leave when they are done, decodes are dealt out in more parts than run at once,
// of so many tiles at least. The merging launch has room for the borders of so many.
constexpr int kLeastTilesBesidePrefill = 64;

int waves_beside_prefill(int rows, int blocks_of_sm) {
  constexpr int kWaves = 4;
  return std::clamp(kMaxTasks / (rows * blocks_of_sm), 1, kWaves);
}

// Most pieces that deterministic mode can make, for any lengths.
int64_t max_units(const AttentionParams& p, int rows) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t row_tiles = (p.num_tokens * group + p.num_seqs * (rows - 1)) / rows;
  const int64_t cut = p.num_seqs * (kMaxSplitRows / rows);
  return p.num_kv_heads * (row_tiles + (kPieces - 1) * (row_tiles < cut ? row_tiles : cut));
}

// Tiles of one step of the line, as a power of two: the line of the longest possible batch has below 2^31 steps.
int32_t line_shift(const AttentionParams& p, const AttentionPlan& plan) {
  const int keys = plan.tensor_cores ? kTensorCoreKeys : general::kKeys;
  const double row_tiles = double(p.num_tokens) * double(p.num_heads / p.num_kv_heads) / plan.rows + double(p.num_seqs);
  double steps = double(p.num_kv_heads) * row_tiles * (double(p.max_blocks) * double(p.block_size) / keys + 1);
  int32_t shift = 0;
  for (; steps >= double(1 << 30) && shift < 30; steps /= 2) ++shift;
  return shift;
}

// Lines of each table row that a launch brings near: what a warp of each thread block can ask for, shared by the rows.
uint32_t table_lines(const AttentionParams& p, const AttentionPlan& plan) {
  const int64_t all = divide_up(p.max_blocks, kPrefetched);
  const int64_t share = int64_t(kWarp) * plan.grid / (p.num_seqs < 1 ? 1 : p.num_seqs);
  const int64_t lines = all < share ? all : share;
  return uint32_t(lines < 1 ? 1 : lines);
}

// ---- Launches ----

template <int kDims>
void launch_general(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  const Cache& cache = launch.params.key_cache;
  const int64_t bytes = 8 * size_of(cache.dtype);
  const bool wide = cache.head_size % 8 == 0 && cache.block_stride % 8 == 0 && cache.slot_stride % 8 == 0 &&
                    cache.head_stride % 8 == 0 &&
                    reinterpret_cast<intptr_t>(cache.data) % (bytes < 16 ? bytes : 16) == 0;
  const int64_t shared_bytes = general::shared_bytes(launch);
  const auto run = launch.deterministic ? (wide ? launch_kernel<general::attention<kDims, 8, true>>
                                                : launch_kernel<general::attention<kDims, 1, true>>)
                                        : (wide ? launch_kernel<general::attention<kDims, 8, false>>
                                                : launch_kernel<general::attention<kDims, 1, false>>);
  run(Order::after_predecessor, plan.grid, general::kThreads, shared_bytes, launch, stream);
}

void launch_mma(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  switch (launch.params.key_cache.dtype) {
    case DType::float16: return launch_mma_float16(launch, plan, stream);
    case DType::bfloat16: return launch_mma_bfloat16(launch, plan, stream);
    case DType::float8_e4m3fn: return launch_mma_float8_e4m3fn(launch, plan, stream);
    case DType::float8_e5m2: return launch_mma_float8_e5m2(launch, plan, stream);
    case DType::int8: return launch_mma_int8(launch, plan, stream);
    default: throw std::logic_error("the tensor-core kernel takes no cache of float32");
  }
}

void launch_attention(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  const int64_t head_size_v = launch.params.value_cache.head_size;
  if (plan.tensor_cores) return launch_mma(launch, plan, stream);
  if (head_size_v <= 4 * kWarp) return launch_general<4>(launch, plan, stream);
  if (head_size_v <= 18 * kWarp) return launch_general<18>(launch, plan, stream);
  throw std::invalid_argument("head_size_v must be at most 576, got " + std::to_string(head_size_v));
}

template <int kRows, int kKeys>
void launch_merge(const AttentionLaunch& launch, cudaStream_t stream) {
  const auto run = launch.deterministic ? launch_kernel<merge_pieces<kRows>> : launch_kernel<merge_parts<kRows, kKeys>>;
  run(Order::beside_predecessor, current_device().num_sms, kMergeThreads, 0, launch, stream);
}

void launch_decode(const AttentionLaunch& launch, const AttentionPlan& plan, cudaStream_t stream) {
  launch_attention(launch, plan, stream);
  switch (plan.rows) {
    case general::kRows: return launch_merge<general::kRows, general::kKeys>(launch, stream);
    case 8: return launch_merge<8, kTensorCoreKeys>(launch, stream);
    case 16: return launch_merge<16, kTensorCoreKeys>(launch, stream);
    case 32: return launch_merge<32, kTensorCoreKeys>(launch, stream);
    default: throw std::logic_error("no merge for items of " + std::to_string(plan.rows) + " rows");
  }
}

AttentionPlan plan_attention(const AttentionParams& params) {
  AttentionPlan plan{};
  const Device& device = current_device();
  plan.tensor_cores = fits_tensor_cores(params);
  plan.prefill = prefill::kind_for(params);
  plan.head_size_class = head_size_class(params);
  plan.rows =
      plan.tensor_cores ? rows_for(params, plan.head_size_class, plan.prefill != prefill::Kind::none) : general::kRows;
  const int blocks = plan.tensor_cores ? mma_blocks_of_sm(int(size_of(params.key_cache.dtype)), plan.rows) : 3;
  plan.resident = device.num_sms * blocks;
  plan.grid = plan.resident * (plan.prefill == prefill::Kind::wgmma ? waves_beside_prefill(plan.rows, blocks) : 1);
  plan.warps = plan.tensor_cores ? mma_warps(plan.head_size_class, blocks, device.shared_bytes) : general::kWarps;
  Workspace& w = plan.workspace;
  w.row_stride = int32_t(round_up(params.value_cache.head_size, 4));
  w.slot_floats = int64_t(plan.rows) * (2 + w.row_stride);
  w.max_records = params.deterministic ? max_units(params, plan.rows) : 0;
  plan.num_slots = params.deterministic ? w.max_records : 2 * plan.grid;
  plan.bytes = kHeaderBytes + w.max_records * int64_t(sizeof(Record)) + 4 * plan.num_slots * w.slot_floats;
  return plan;
}

NarrowCache narrow(const Cache& cache) {
  const int64_t bytes = size_of(cache.dtype);
  return {static_cast<const char*>(cache.data), uint32_t(bytes * cache.block_stride),
          uint32_t(bytes * cache.slot_stride), uint32_t(bytes * cache.head_stride), int32_t(cache.head_size)};
}

AttentionLaunch launch_of(const AttentionParams& p, const AttentionPlan& plan) {
  AttentionLaunch a{};
  a.row_limit = INT32_MAX;
  a.seq_lens = p.seq_lens;
  a.cu_seqlens_q = p.cu_seqlens_q;
  a.block_table = p.block_table;
  a.table_stride = p.block_table_stride;
  a.num_seqs = int32_t(p.num_seqs);
  a.num_tokens = int32_t(p.num_tokens);
  a.num_kv_heads = int32_t(p.num_kv_heads);
  a.num_blocks = int32_t(p.num_blocks);
  a.capacity = clipped_capacity(p);
  a.block_size = divisor_of(p.block_size);
  a.log2_line_tiles = line_shift(p, plan);
  a.group = divisor_of(p.num_heads / p.num_kv_heads);
  a.window_left = clip_window(p.window_left);
  a.window_right = clip_window(p.window_right);
  a.grid = plan.grid;
  a.per_grid = divisor_of(plan.grid);
  a.table_lines = divisor_of(table_lines(p, plan));
  a.warps = plan.warps;
  a.resident = plan.resident;
  const bool has_waves = plan.grid > plan.resident;
  a.least_share = std::max(plan.warps, has_waves ? kLeastTilesBesidePrefill >> a.log2_line_tiles : 0);
  const int64_t rows = p.max_seqlen_q * (p.num_heads / p.num_kv_heads);
  a.max_rows = int32_t(rows < 1 ? 1 : rows < plan.rows ? rows : plan.rows);
  a.causal = p.causal;
  a.deterministic = p.deterministic;
  if (plan.tensor_cores) {
    a.key_cache = narrow(p.key_cache);
    a.value_cache = narrow(p.value_cache);
    a.query = p.query;
    a.query_token_stride = uint32_t(p.query_token_stride);
    a.query_head_stride = uint32_t(p.query_head_stride);
    a.scale = p.scale;
  }
  a.params = p;
  char* memory = static_cast<char*>(p.workspace);
  a.workspace = plan.workspace;
  a.workspace.num_records = reinterpret_cast<int64_t*>(memory);
  a.workspace.records = reinterpret_cast<Record*>(memory + kHeaderBytes);
  a.workspace.slots = reinterpret_cast<float*>(a.workspace.records + plan.workspace.max_records);
  return a;
}

}  // namespace

void paged_attention(AttentionParams params, const Allocate& allocate, cudaStream_t stream) {
  if (params.num_tokens == 0 || params.num_heads == 0) return;
  const AttentionPlan plan = plan_attention(params);
  const bool has_prefill = plan.prefill != prefill::Kind::none;
  // A lone sequence is long, or the bound on its length is loose: the prefill kernel serves it either way.
  const bool alone = has_prefill && params.num_seqs == 1 && !params.deterministic;
  const int64_t decode_bytes = alone ? 0 : round_up(plan.bytes, 256);
  params.workspace = allocate(decode_bytes + (has_prefill ? prefill::workspace_bytes(params, plan.prefill) : 0));
  AttentionLaunch launch = launch_of(params, plan);
  if (!has_prefill) return launch_decode(launch, plan, stream);
  launch.row_limit = alone ? 0 : prefill::kDecodeRows;
  void* memory = static_cast<char*>(params.workspace) + decode_bytes;
  prefill::launch(params, plan.prefill, launch.row_limit, memory, stream, [&](const int32_t* has_decodes) {
    launch.has_decodes = has_decodes;
    if (!alone) launch_decode(launch, plan, stream);
  });
}

}  // namespace paged_kv::cuda
