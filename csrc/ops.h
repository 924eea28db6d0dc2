// Every op of torch_paged_kv: its schema, once. ops.cpp registers the kernels of one backend against this table.
#pragma once

namespace paged_kv {

struct OpSchema {
  const char* name;
  const char* schema;
};

// Order of arguments: tensors, ints, then optionals. `!` marks what an op writes.
inline constexpr OpSchema kOps[] = {
    {"allocate",
     "allocate(Tensor(a!) block_table, Tensor(b!) seq_lens, Tensor(c!) free_ring, Tensor(d!) ref_counts, "
     "Tensor(e!) counters, Tensor cu_seqlens_q, SymInt num_tokens, SymInt block_size, *, Tensor? num_new=None, "
     "Tensor? retain=None) -> (Tensor slot_mapping, Tensor block_mapping)"},
    {"free",
     "free(Tensor(a!) block_table, Tensor(b!) seq_lens, Tensor(c!) free_ring, Tensor(d!) ref_counts, "
     "Tensor(e!) counters, Tensor new_lens, SymInt block_size) -> ()"},
    {"fork",
     "fork(Tensor(a!) block_table, Tensor(b!) seq_lens, Tensor(c!) free_ring, Tensor(d!) ref_counts, "
     "Tensor(e!) counters, Tensor source_rows, Tensor destination_rows, SymInt block_size) -> ()"},
    {"reshape_and_cache",
     "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
     "Tensor(c!)? key_scale=None, Tensor(d!)? value_scale=None) -> ()"},
    {"paged_attention",
     "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
     "Tensor cu_seqlens_q, SymInt max_seqlen_q, *, float scale, bool causal=True, SymInt window_left=-1, "
     "SymInt window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
     "Tensor? key_scale=None, Tensor? value_scale=None, Tensor? mask=None, bool deterministic=False) -> Tensor"},
    {"paged_attention_with_lse",
     "paged_attention_with_lse(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
     "Tensor seq_lens, Tensor cu_seqlens_q, SymInt max_seqlen_q, *, float scale, bool causal=True, "
     "SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
     "Tensor? sinks=None, Tensor? key_scale=None, Tensor? value_scale=None, Tensor? mask=None, "
     "bool deterministic=False) -> (Tensor out, Tensor lse)"},
    {"merge_attention_states",
     "merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, *, Tensor? sinks=None) "
     "-> (Tensor out, Tensor lse)"},
    {"find_shared_prefixes",
     "find_shared_prefixes(Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt block_size, "
     "SymInt min_saved) -> (Tensor prefix_lens, Tensor prefix_cu_seqlens_q, Tensor suffix_table, Tensor suffix_lens)"},
    {"copy_blocks", "copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()"},
    {"swap_blocks", "swap_blocks(Tensor[] source_caches, Tensor(a!)[] destination_caches, Tensor block_mapping) -> ()"},
    {"gather_blocks",
     "gather_blocks(Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, SymInt max_len, *, "
     "ScalarType? dtype=None, Tensor? key_scale=None, Tensor? value_scale=None) -> (Tensor key, Tensor value)"},
};

}  // namespace paged_kv
