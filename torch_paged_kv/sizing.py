"""How large a pool without a given size is made. Pure numbers, but for what a device has free."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .pool import free_memory

GROWTH = 4  # a pool grows by its GROWTH-th part, if not told how much is to come
SMALL = 16  # blocks; below that it doubles
SHARE = 0.5  # of free memory: what is taken on the word of the caller alone; the rest as it is needed


def growth(num_blocks: int) -> int:
    """Blocks to add to a pool of ``num_blocks`` that has run out, of which nothing more is known.

    Growing copies the pool: by a share of its size, each block is copied ``GROWTH`` times at most on average.
    """
    return max(num_blocks // GROWTH, min(num_blocks, SMALL))


def blocks_to_come(
    lens: Sequence[int], counts: Sequence[int], later: int, windows: Sequence[int | None], block_size: int
) -> int:
    """Blocks that rows take in all, from this step to their expected end.

    Args:
        lens: tokens each row holds.
        counts: tokens each row gets in this step.
        later: tokens each row gets after it.
        windows: per group of layers, its sliding window or None.
        block_size: tokens in a block.
    """

    def columns(tokens: int) -> int:
        return -(-tokens // block_size)

    total = 0
    for old, count in zip(lens, counts, strict=True):
        now, end = columns(old + count), columns(old + count + later)
        for window in windows:
            # A window is held in one block more than it fills, and takes the next one before it gives that back.
            last = end if window is None else max(now, min(end, columns(window) + 2))
            total += last - columns(old)
    return total


def affordable_blocks(device: torch.device, block_bytes: int) -> int:
    """Blocks that may be taken ahead of need: in ``SHARE`` of the free memory, none where that is not told."""
    try:
        free = free_memory(device)
    except ValueError:
        return 0
    if device.type == "cuda":  # the caching allocator keeps what was freed
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free * SHARE) // block_bytes
