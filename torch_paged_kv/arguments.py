"""What the arguments of a cache must be, and what those that are left open come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .scales import EIGHT_BIT_DTYPES, Scales, StaticScales, choose_scales
from .storage import KVPool

CACHE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, *EIGHT_BIT_DTYPES)


def kind_of(dtype: torch.dtype | None, scales: Scales, pool: KVPool | None) -> tuple[torch.dtype | None, Scales]:
    """Dtype and scales of a cache; left open, they are those of its pool if that holds 8-bit blocks."""
    if dtype is None and scales == "auto" and pool is not None and pool.num_lanes > 0:
        stored = pool.lane(0).dtype
        if stored in EIGHT_BIT_DTYPES:
            return stored, pool.scales
    return dtype, choose_scales(dtype, scales)


def check_arguments(
    size: dict[str, Any],
    block_size: int,
    dtype: torch.dtype | None,
    scales: Scales,
    windows: Sequence[int | None] | None,
    pool: KVPool | None,
) -> None:
    """Raise ValueError for the arguments of a cache that do not fit."""
    if len(size) + (pool is not None) > 1:
        raise ValueError(f"at most one of num_blocks, num_tokens, bytes, fraction and pool must be given, got {size}")
    for name, value in size.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if size.keys() & {"bytes", "fraction"} and windows is None:
        raise ValueError("bytes and fraction must come with the model's config, which tells how many layers there are")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if dtype is not None and dtype not in CACHE_DTYPES:
        raise ValueError(f"dtype must be one of {CACHE_DTYPES}, got {dtype}")
    if isinstance(scales, StaticScales) and windows is not None and scales.num_layers != len(windows):
        raise ValueError(f"scales must have a scale for each of {len(windows)} layers, got {scales.num_layers}")
    for window in windows or ():
        if window is not None and window < 1:
            raise ValueError(f"windows must be positive or None, got {window}")
