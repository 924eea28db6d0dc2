"""The ops without Transformers: a prompt and a few decode steps of one attention layer, against dense attention."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from torch_paged_kv import BlockPool, ops

block_size, num_kv_heads, num_heads, head_size = 16, 2, 8, 64
pool = BlockPool(num_blocks=8, block_size=block_size)
key_cache = torch.empty(pool.num_blocks, block_size, num_kv_heads, head_size)
value_cache = torch.empty_like(key_cache)
block_table = torch.full((1, 8), -1, dtype=torch.int32)  # [num_seqs, max_blocks]
seq_lens = torch.zeros(1, dtype=torch.int32)
keys, values = torch.randn(2, 40, num_kv_heads, head_size)  # [tokens, num_kv_heads, head_size] each

start = 0
for length in [37, 1, 1, 1]:  # a prompt, then one token a step
    key, value = keys[start : start + length], values[start : start + length]
    query = torch.randn(length, num_heads, head_size)
    cu_seqlens_q = torch.tensor([0, length], dtype=torch.int32)
    slot_mapping, block_mapping = pool.allocate(block_table, seq_lens, cu_seqlens_q, num_tokens=length)
    ops.copy_blocks([key_cache], [value_cache], block_mapping)
    ops.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
    out = ops.paged_attention(
        query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, length, scale=head_size**-0.5
    )
    start += length
    dense = scaled_dot_product_attention(
        query.transpose(0, 1),
        keys[:start].transpose(0, 1),
        values[:start].transpose(0, 1),
        attn_mask=torch.ones(length, start, dtype=torch.bool).tril(start - length),
        enable_gqa=True,
    ).transpose(0, 1)  # [tokens, num_heads, head_size]
    torch.testing.assert_close(out, dense)
    print(f"{start} tokens in {pool.num_blocks - pool.num_free} blocks, table {block_table[0].tolist()}")
