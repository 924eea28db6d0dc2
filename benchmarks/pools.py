"""Pools of random data in the library's layout, and shuffled block tables over them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

BLOCK_SIZE = 16
TOUCHED_BYTES = 400 << 20  # a graph should touch this much, many times the L2
MIN_TABLES, MAX_TABLES = 10, 96  # few calls in a graph would share out the graph's own launch among them


@dataclasses.dataclass
class Pool:
    """One layer: storage [num_blocks, num_kv_heads, block_size * 2 * head_size] and its two views."""

    storage: Tensor
    key_cache: Tensor
    value_cache: Tensor

    @staticmethod
    def random(
        num_bytes: int, num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype, device: str = "cuda"
    ) -> Pool:
        row = num_kv_heads * block_size * 2 * head_size
        num_blocks = num_bytes // (row * dtype.itemsize)
        storage = torch.empty(num_blocks, num_kv_heads, block_size * 2 * head_size, dtype=dtype, device=device)
        for part in storage.split(max(1, (1 << 30) // row)):
            part.copy_(torch.randn(part.shape, dtype=torch.float16, device=device))
        keys, values = storage.split(block_size * head_size, dim=-1)
        views = [x.unflatten(-1, (block_size, head_size)).transpose(1, 2) for x in (keys, values)]
        return Pool(storage, *views)

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[0]

    @property
    def block_size(self) -> int:
        return self.key_cache.shape[1]


def tables(pool: Pool, batch: int, context: int) -> list[Tensor]:
    """Block tables [batch, blocks] for as many calls as it takes to touch TOUCHED_BYTES."""
    blocks = -(-context // pool.block_size)
    bytes_per_call = batch * blocks * pool.storage[0].numel() * pool.storage.element_size()
    count = min(MAX_TABLES, max(MIN_TABLES, -(-TOUCHED_BYTES // bytes_per_call)))
    made: list[Tensor] = []
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(count):
        if order.numel() < batch * blocks:
            order = torch.randperm(pool.num_blocks)
        made.append(order[: batch * blocks].view(batch, blocks).to("cuda", torch.int32))
        order = order[batch * blocks :]
    return made
