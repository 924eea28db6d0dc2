// The ops: check, allocate outputs, launch. Compiled once for the CPU and once, with PAGED_KV_CUDA, for CUDA.
#include "ops.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>

#include "checks.h"

#ifdef PAGED_KV_CUDA
#include "cuda/kernels.h"
#define PAGED_KV_DISPATCH_KEY CUDA
namespace backend = paged_kv::cuda;
#else
#include "cpu/kernels.h"
#define PAGED_KV_DISPATCH_KEY CPU
namespace backend = paged_kv::cpu;
#endif

namespace paged_kv {
namespace {

void check(AOTITorchError error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string(what) + " failed");
}

// A new contiguous tensor on the device of `like`.
Tensor new_tensor(std::initializer_list<int64_t> sizes, int32_t dtype, const Tensor& like) {
  constexpr size_t kMaxDims = 4;
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes.begin()[d] > 0 ? sizes.begin()[d] : 1;  // as torch.empty strides an empty tensor
  }
  int32_t device_type = 0, device_index = 0;
  check(aoti_torch_get_device_type(like.get(), &device_type), "reading a device type");
  check(aoti_torch_get_device_index(like.get(), &device_index), "reading a device index");
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype, device_type,
                                 device_index, &handle),
        "allocating an output tensor");
  return Tensor(handle);
}

int32_t dtype_code(DType dtype) {
  switch (dtype) {
    case DType::float32: return aoti_torch_dtype_float32();
    case DType::float16: return aoti_torch_dtype_float16();
    case DType::bfloat16: return aoti_torch_dtype_bfloat16();
    default: throw std::logic_error("no output has dtype number " + std::to_string(static_cast<int>(dtype)));
  }
}

// Calls a kernel of this backend: on the CPU at once, on CUDA on the current stream of the device of `on`.
template <class Result, class Params>
Result launch(Result (*kernel)(const Params&), const Params& params, const Tensor& /*on*/) {
  return kernel(params);
}

#ifdef PAGED_KV_CUDA
// Calls function(stream): the current stream of the device of `on`, which is the current device meanwhile.
template <class Function>
void on_current_stream(const Tensor& on, Function&& function) {
  int32_t device_index = 0;
  check(aoti_torch_get_device_index(on.get(), &device_index), "reading a device index");
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  void* stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(device_index, &stream), "reading the current CUDA stream");
  function(static_cast<cudaStream_t>(stream));
}

template <class Params>
void launch(void (*kernel)(const Params&, cudaStream_t), const Params& params, const Tensor& on) {
  on_current_stream(on, [&](cudaStream_t stream) { kernel(params, stream); });
}

void launch_allocate(const AllocateParams& params, const Tensor& on) { launch(backend::allocate, params, on); }

// Memory of the caching allocator for the current stream, without a tensor around it. It may go back as soon as all is
// launched, since the allocator gives it to later work of the stream only; captured in a graph, it belongs to the graph.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (data_ != nullptr) aoti_torch_cuda_caching_allocator_raw_delete(data_);
  }

  void* allocate(int64_t bytes) {
    check(aoti_torch_cuda_caching_allocator_raw_alloc(static_cast<uint64_t>(bytes), &data_),
          "allocating scratch memory");
    return data_;
  }

 private:
  void* data_ = nullptr;
};

void launch_attention(const AttentionParams& params, const Tensor& on) {
  on_current_stream(on, [&](cudaStream_t stream) {
    Scratch scratch;
    backend::paged_attention(params, [&](int64_t bytes) { return scratch.allocate(bytes); }, stream);
  });
}

void launch_find_shared_prefixes(SharedPrefixParams params, const Tensor& on) {
  const Tensor workspace = new_tensor({backend::shared_prefixes_workspace(params)}, aoti_torch_dtype_uint8(), on);
  params.workspace = workspace.mutable_data_ptr();
  launch(backend::find_shared_prefixes, params, on);
}
#else
void launch_allocate(const AllocateParams& params, const Tensor& on) {
  const cpu::AllocateResult result = launch(backend::allocate, params, on);
  if (result.ok) return;
  if (result.row >= 0) fail_table_too_narrow(result.row, result.columns, params.rows.max_blocks);
  throw std::runtime_error("out of blocks: wanted " + std::to_string(result.wanted) + ", free " +
                           std::to_string(result.available));
}

void launch_attention(const AttentionParams& params, const Tensor& on) { launch(backend::paged_attention, params, on); }

void launch_find_shared_prefixes(const SharedPrefixParams& params, const Tensor& on) {
  launch(backend::find_shared_prefixes, params, on);
}
#endif

std::tuple<Tensor, Tensor> allocate(const Tensor& block_table, const Tensor& seq_lens, const Tensor& free_ring,
                                    const Tensor& ref_counts, const Tensor& counters, const Tensor& cu_seqlens_q,
                                    int64_t num_tokens, int64_t block_size, const OptionalTensor& num_new,
                                    const OptionalTensor& retain) {
  AllocateParams params = check_allocate(block_table, seq_lens, free_ring, ref_counts, counters, cu_seqlens_q,
                                         num_tokens, block_size, num_new, retain);
  const int64_t num_groups = params.rows.num_groups;
  const int32_t int64_code = aoti_torch_dtype_int64();
  Tensor slot_mapping = block_table.dim() == 3 ? new_tensor({num_groups, num_tokens}, int64_code, block_table)
                                               : new_tensor({num_tokens}, int64_code, block_table);
  Tensor block_mapping = new_tensor({num_groups * params.rows.num_seqs, 2}, int64_code, block_table);
  params.slot_mapping = static_cast<int64_t*>(slot_mapping.mutable_data_ptr());
  params.block_mapping = static_cast<int64_t*>(block_mapping.mutable_data_ptr());
  launch_allocate(params, block_table);
  return {slot_mapping, block_mapping};
}

void free(const Tensor& block_table, const Tensor& seq_lens, const Tensor& free_ring, const Tensor& ref_counts,
          const Tensor& counters, const Tensor& new_lens, int64_t block_size) {
  const FreeParams params = check_free(block_table, seq_lens, free_ring, ref_counts, counters, new_lens, block_size);
  launch(backend::free, params, block_table);
}

void fork(const Tensor& block_table, const Tensor& seq_lens, const Tensor& free_ring, const Tensor& ref_counts,
          const Tensor& counters, const Tensor& source_rows, const Tensor& destination_rows, int64_t block_size) {
  const ForkParams params =
      check_fork(block_table, seq_lens, free_ring, ref_counts, counters, source_rows, destination_rows, block_size);
  launch(backend::fork, params, block_table);
}

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& slot_mapping, const OptionalTensor& key_scale, const OptionalTensor& value_scale) {
  const ReshapeAndCacheParams params =
      check_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale);
  launch(backend::reshape_and_cache, params, key);
}

// `lse` null: the caller does not want it.
Tensor attend(AttentionParams params, const Tensor& query, const Tensor* lse) {
  const int64_t num_tokens = params.num_tokens, num_heads = params.num_heads, size = params.value_cache.head_size;
  const int32_t dtype = dtype_code(params.query_dtype);
  Tensor out = query.dim() == 4 ? new_tensor({num_tokens, 1, num_heads, size}, dtype, query)
                                : new_tensor({num_tokens, num_heads, size}, dtype, query);
  params.out = out.mutable_data_ptr();
  if (lse != nullptr) params.lse = static_cast<float*>(lse->mutable_data_ptr());
  launch_attention(params, query);
  return out;
}

Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& block_table, const Tensor& seq_lens, const Tensor& cu_seqlens_q,
                       int64_t max_seqlen_q, double scale, bool causal, int64_t window_left, int64_t window_right,
                       double softcap, const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                       const OptionalTensor& key_scale, const OptionalTensor& value_scale, const OptionalTensor& mask,
                       bool deterministic) {
  const AttentionParams params = check_paged_attention(
      query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, scale, causal, window_left,
      window_right, softcap, alibi_slopes, sinks, key_scale, value_scale, mask, deterministic);
  return attend(params, query, nullptr);
}

std::tuple<Tensor, Tensor> paged_attention_with_lse(const Tensor& query, const Tensor& key_cache,
                                                    const Tensor& value_cache, const Tensor& block_table,
                                                    const Tensor& seq_lens, const Tensor& cu_seqlens_q,
                                                    int64_t max_seqlen_q, double scale, bool causal,
                                                    int64_t window_left, int64_t window_right, double softcap,
                                                    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                                    const OptionalTensor& key_scale, const OptionalTensor& value_scale,
                                                    const OptionalTensor& mask, bool deterministic) {
  const AttentionParams params = check_paged_attention(
      query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, scale, causal, window_left,
      window_right, softcap, alibi_slopes, sinks, key_scale, value_scale, mask, deterministic);
  Tensor lse = new_tensor({params.num_tokens, params.num_heads}, aoti_torch_dtype_float32(), query);
  Tensor out = attend(params, query, &lse);
  return {out, lse};
}

std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                                  const Tensor& lse_b, const OptionalTensor& sinks) {
  MergeParams params = check_merge_attention_states(out_a, lse_a, out_b, lse_b, sinks);
  Tensor out = new_tensor({params.num_tokens, params.num_heads, params.head_size}, dtype_code(params.dtype), out_a);
  Tensor lse = new_tensor({params.num_tokens, params.num_heads}, aoti_torch_dtype_float32(), out_a);
  params.out = out.mutable_data_ptr();
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  launch(backend::merge_attention_states, params, out_a);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> find_shared_prefixes(const Tensor& block_table, const Tensor& seq_lens,
                                                                const Tensor& cu_seqlens_q, int64_t block_size,
                                                                int64_t min_saved) {
  SharedPrefixParams params = check_find_shared_prefixes(block_table, seq_lens, cu_seqlens_q, block_size, min_saved);
  const auto output = [&](std::initializer_list<int64_t> sizes, int32_t*& data) {
    Tensor tensor = new_tensor(sizes, aoti_torch_dtype_int32(), block_table);
    data = static_cast<int32_t*>(tensor.mutable_data_ptr());
    return tensor;
  };
  Tensor prefix_lens = output({params.num_seqs}, params.prefix_lens);
  Tensor prefix_cu_seqlens_q = output({params.num_seqs + 1}, params.prefix_cu_seqlens_q);
  Tensor suffix_table = output({params.num_seqs, params.max_blocks}, params.suffix_table);
  Tensor suffix_lens = output({params.num_seqs}, params.suffix_lens);
  launch_find_shared_prefixes(params, block_table);
  return {prefix_lens, prefix_cu_seqlens_q, suffix_table, suffix_lens};
}

void copy_blocks(const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
                 const Tensor& block_mapping) {
  std::vector<CopyLane> lanes;
  const CopyBlocksParams params = check_copy_blocks(key_caches, value_caches, block_mapping, lanes);
  launch(backend::copy_blocks, params, block_mapping);
}

void swap_blocks(const std::vector<Tensor>& source_caches, const std::vector<Tensor>& destination_caches,
                 const Tensor& block_mapping) {
  std::vector<CopyLane> lanes;
  const CopyBlocksParams params = check_swap_blocks(source_caches, destination_caches, block_mapping, lanes);
  const Tensor* on = &block_mapping;  // the accelerator's side of the copy, if there is one
  for (const std::vector<Tensor>* caches : {&source_caches, &destination_caches}) {
    if (!caches->empty() && !caches->front().is_cpu()) on = &caches->front();
  }
  launch(backend::swap_blocks, params, *on);
}

std::tuple<Tensor, Tensor> gather_blocks(const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                                         const Tensor& seq_lens, int64_t max_len, std::optional<ScalarType> dtype,
                                         const OptionalTensor& key_scale, const OptionalTensor& value_scale) {
  GatherParams params =
      check_gather_blocks(key_cache, value_cache, block_table, seq_lens, max_len, dtype, key_scale, value_scale);
  const int32_t code = dtype_code(params.dtype);
  Tensor key = new_tensor({params.num_seqs, params.num_kv_heads, max_len, params.key_cache.head_size}, code, key_cache);
  Tensor value =
      new_tensor({params.num_seqs, params.num_kv_heads, max_len, params.value_cache.head_size}, code, key_cache);
  params.key = key.mutable_data_ptr();
  params.value = value.mutable_data_ptr();
  launch(backend::gather_blocks, params, key_cache);
  return {key, value};
}

}  // namespace
}  // namespace paged_kv

#ifndef PAGED_KV_CUDA  // the CPU library is always loaded, and first: it brings the schemas
STABLE_TORCH_LIBRARY(paged_kv, library) {
  for (const paged_kv::OpSchema& op : paged_kv::kOps) library.def(op.schema);
}
#endif

STABLE_TORCH_LIBRARY_IMPL(paged_kv, PAGED_KV_DISPATCH_KEY, library) {
  library.impl("allocate", TORCH_BOX(&paged_kv::allocate));
  library.impl("free", TORCH_BOX(&paged_kv::free));
  library.impl("fork", TORCH_BOX(&paged_kv::fork));
  library.impl("reshape_and_cache", TORCH_BOX(&paged_kv::reshape_and_cache));
  library.impl("paged_attention", TORCH_BOX(&paged_kv::paged_attention));
  library.impl("paged_attention_with_lse", TORCH_BOX(&paged_kv::paged_attention_with_lse));
  library.impl("merge_attention_states", TORCH_BOX(&paged_kv::merge_attention_states));
  library.impl("find_shared_prefixes", TORCH_BOX(&paged_kv::find_shared_prefixes));
  library.impl("copy_blocks", TORCH_BOX(&paged_kv::copy_blocks));
  library.impl("swap_blocks", TORCH_BOX(&paged_kv::swap_blocks));
  library.impl("gather_blocks", TORCH_BOX(&paged_kv::gather_blocks));
}
