// The seam between host code (tensors, checks) and kernels (pointers, strides): one plain struct per op.
// Kernels see nothing else of torch. Strides count elements, not bytes. Sizes and strides are 64-bit everywhere.
// A comment beside each pointer gives the shape it points into; the names are those of the op's arguments.
#pragma once

#include <cstdint>

namespace paged_kv {

enum class DType : int32_t { float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8 };

inline constexpr int64_t size_of(DType dtype) {
  return dtype == DType::float32 ? 4 : dtype == DType::float16 || dtype == DType::bfloat16 ? 2 : 1;
}

// How an 8-bit (or any) cache is scaled: real value = stored value * scale.
// `slot` scales are written by reshape_and_cache itself from the absolute maximum of each (token, head) row.
enum class ScaleKind : int32_t { none, per_tensor, per_head, per_slot };

struct Scale {
  float* data;        // [] or [1] | [num_kv_heads] | [num_blocks, block_size, num_kv_heads]
  ScaleKind kind;
  int64_t block_stride, slot_stride, head_stride;  // zero where the kind has no such axis
};

struct Cache {        // [num_blocks, block_size, num_kv_heads, head_size], last dim contiguous
  void* data;
  DType dtype;
  int64_t block_stride, slot_stride, head_stride;
  int64_t head_size;
  Scale scale;
};

enum class MaskKind : int32_t { none, boolean, additive };  // bool: true = visible; float32: added to the score

// Columns are aligned bottom-right like the causal mask: column c speaks of key seq_len - width + c of the row's
// sequence. Keys before the first column are not masked; columns that fall before key 0 are not read.
struct Mask {         // [num_tokens, num_heads or 1, width], last dim contiguous
  const void* data;
  MaskKind kind;
  int64_t token_stride, head_stride;  // head_stride is 0 for a mask all heads share
  int64_t width;
};

struct AttentionParams {
  const void* query;             // [num_tokens, num_heads, head_size]
  DType query_dtype;
  int64_t query_token_stride, query_head_stride;
  void* out;                     // [num_tokens, num_heads, head_size_v] contiguous, dtype of query
  float* lse;                    // [num_tokens, num_heads] contiguous, or null
  Cache key_cache, value_cache;
  const int32_t* block_table;    // [num_seqs, max_blocks], last dim contiguous
  int64_t block_table_stride;
  const int32_t* seq_lens;       // [num_seqs] contiguous
  const int32_t* cu_seqlens_q;   // [num_seqs + 1] contiguous
  int64_t num_tokens, num_seqs, num_heads, num_kv_heads, num_blocks, block_size, max_blocks, max_seqlen_q;
  float scale;                   // natural units: score = scale * q.k
  float softcap;                 // 0 = off: score = softcap * tanh(score / softcap)
  bool causal;                   // bottom-right: query i of a row sees keys 0 .. seq_len - q_len + i
  int64_t window_left, window_right;  // -1 = unlimited; keys p - window_left .. p + window_right of position p
  const float* alibi_slopes;     // [num_heads] or null: score += slope * key position
  const float* sinks;            // [num_heads] or null: one logit more in the softmax, with no value
  Mask mask;
  bool deterministic;
  void* workspace;  // CUDA: scratch memory, which paged_attention itself asks for; CPU: null
};

struct ReshapeAndCacheParams {
  const void* key;  // [num_tokens, num_kv_heads, head_size], last dim contiguous
  const void* value;  // [num_tokens, num_kv_heads, head_size_v], last dim contiguous
  DType dtype;  // of key and value
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  Cache key_cache, value_cache;
  const int64_t* slot_mapping;  // [num_tokens] contiguous; outside 0 .. num_blocks * block_size - 1 = write nothing
  int64_t num_tokens, num_kv_heads, num_blocks, block_size;
};

// Copies whole blocks inside `num_caches` caches, or from one list of caches to another (swap_blocks).
// A cache is [num_blocks, ...] with a dense block: `block_bytes` contiguous bytes at block * stride_bytes.
// Where a cache's block is not one dense range (permuted views, K and V interleaved) the host splits it into several
// dense "lanes": each lane is an entry of these arrays.
struct CopyLane {
  const char* source;
  char* destination;
  int64_t source_stride, destination_stride;  // bytes from block to block
  int64_t bytes;  // contiguous bytes of a block
  int64_t source_blocks, destination_blocks;  // valid block numbers are 0 .. n - 1; a pair outside is skipped
};

struct CopyBlocksParams {
  const CopyLane* lanes;  // host memory, valid during the call
  int64_t num_lanes;
  const int64_t* block_mapping;  // [num_pairs, 2] contiguous (source, destination)
  int64_t num_pairs;
};

struct GatherParams {
  Cache key_cache, value_cache;
  const int32_t* block_table;  // [num_seqs, max_blocks], last dim contiguous
  int64_t block_table_stride;
  const int32_t* seq_lens;  // [num_seqs]
  int64_t num_seqs, num_kv_heads, num_blocks, block_size, max_blocks, max_len;
  void* key;  // [num_seqs, num_kv_heads, max_len, head_size] contiguous; row s ends at column max_len
  void* value;  // [num_seqs, num_kv_heads, max_len, head_size_v] contiguous
  DType dtype;  // of key and value
};

struct MergeParams {  // all contiguous
  const void* out_a;
  const void* out_b;  // [num_tokens, num_heads, head_size]
  const float* lse_a;
  const float* lse_b;  // [num_tokens, num_heads]
  const float* sinks;  // [num_heads] or null
  void* out;
  float* lse;
  DType dtype;
  int64_t num_tokens, num_heads, head_size;
};

struct SharedPrefixParams {
  const int32_t* block_table;  // [num_seqs, max_blocks], last dim contiguous
  int64_t block_table_stride;
  const int32_t* seq_lens;  // [num_seqs]
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]
  int64_t num_seqs, max_blocks, block_size;  // num_seqs * max_blocks < 2^31
  int32_t min_saved_blocks;  // reads of a block that a run must save, at least 1
  int32_t* prefix_lens;  // [num_seqs] out
  int32_t* prefix_cu_seqlens_q;  // [num_seqs + 1] out
  int32_t* suffix_table;  // [num_seqs, max_blocks] out, contiguous
  int32_t* suffix_lens;  // [num_seqs] out
  void* workspace;  // CUDA: scratch of shared_prefixes_workspace(params) bytes; CPU: null
};

// Allocator state. Ring positions only grow; position p lives at free_ring[p % num_blocks].
enum Counter : int { kHead, kTail, kFailures, kWanted, kNumCounters };

struct PoolState {
  int32_t* free_ring;  // [num_blocks] free block numbers, longest-released first from head to tail
  int32_t* ref_counts;  // [num_blocks] table entries that hold the block
  int64_t* counters;  // [kNumCounters]: head, tail, failed allocations, blocks wanted by the first of them
  int64_t num_blocks;
};

struct Rows {
  int32_t* block_table;  // [num_groups, num_seqs, max_blocks] contiguous; -1 = unmapped
  int32_t* seq_lens;  // [num_seqs] contiguous
  int64_t num_groups, num_seqs, max_blocks, block_size;
};

struct AllocateParams {
  Rows rows;
  PoolState pool;
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]
  const int32_t* num_new;  // [num_seqs] or null (= the whole span)
  const int32_t* retain;  // [num_groups] or null; tokens before this step that stay readable, -1 = all
  int64_t num_tokens;
  int64_t* slot_mapping;  // [num_groups, num_tokens] out
  int64_t* block_mapping;  // [num_groups * num_seqs, 2] out
};

struct FreeParams {
  Rows rows;
  PoolState pool;
  const int32_t* new_lens;  // [num_seqs]
};

struct ForkParams {
  Rows rows;
  PoolState pool;
  const int64_t* source_rows;  // [num_pairs]
  const int64_t* destination_rows;
  int64_t num_pairs;
};

}  // namespace paged_kv
