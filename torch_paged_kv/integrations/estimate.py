"""What a cache of a model will take, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_paged_kv.integrations.transformers import PagedKVCache
from torch_paged_kv.layout import LayerShape

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """Sizes of a pool of given size."""

    block_size: int  # tokens in a block
    block_bytes: int  # of one block of the pool, over the layers of one group
    num_groups: int  # a block of a sequence is a block of the pool for each
    num_blocks: int  # of the pool
    num_tokens: int  # of one sequence that fit, in every layer

    @property
    def bytes(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * self.block_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token over all layers, in full blocks."""
        return self.num_groups * self.block_bytes / self.block_size

    def __str__(self) -> str:
        groups = f" in {self.num_groups} groups of layers" if self.num_groups > 1 else ""
        return (
            f"{self.num_tokens} tokens: {self.num_blocks} blocks of {self.block_bytes} bytes{groups}, "
            f"{self.bytes / 2**20:.1f} MiB, {self.bytes_per_token:.0f} bytes a token"
        )


def estimate(
    config: Any,
    *,
    num_tokens: int | None = None,
    bytes: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> Estimate:
    """What ``PagedKVCache(config, ...)`` of the same size takes.

    Args:
        config: a model's config.
        num_tokens: tokens of one sequence; or
        bytes: of the pool.
        block_size: tokens in a block.
        dtype: of the stored keys and values; 8-bit ones with a scale for every slot and head.

    Raises:
        ValueError: not one of ``num_tokens`` and ``bytes`` is given, it does not make a block, or the config does not
            tell the sizes of keys and values.
    """
    if (num_tokens is None) == (bytes is None):
        raise ValueError(f"one of num_tokens and bytes must be given, got {num_tokens} and {bytes}")
    shape = _layer_shape(config.get_text_config(decoder=True))
    cache = PagedKVCache(config, block_size=block_size, dtype=dtype)
    num_groups = len(cache.group_windows)
    block_bytes = cache.block_bytes(shape, dtype)
    if num_tokens is None:
        assert bytes is not None
        num_blocks = bytes // block_bytes
        num_tokens = num_blocks // num_groups * block_size
    else:
        num_blocks = -(-num_tokens // block_size) * num_groups
    if num_blocks < 1:
        raise ValueError(f"bytes must make at least one block of {block_bytes}, got {bytes}")
    return Estimate(block_size, block_bytes, num_groups, num_blocks, num_tokens)


def _layer_shape(config: Any) -> LayerShape:
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"config must tell the sizes of keys and values, got {config.model_type} with latent ones")
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    if not heads or not size:
        raise ValueError(f"config must tell num_attention_heads and hidden_size, got {config.model_type} without")
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return LayerShape(1, size, size)
    return LayerShape(getattr(config, "num_key_value_heads", None) or heads, size, size)
