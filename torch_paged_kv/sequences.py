"""Sequences apart from their cache: which blocks they take and where they stand. For what moves them elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import PagedKVCache
from .errors import OutOfBlocksError

__all__ = ["Sequences", "restore"]


@dataclass(frozen=True)
class Sequences:
    """Sequences of one cache. Blocks are numbered anew, from 0 on, each once however many rows share it."""

    table: Tensor  # int32 [num_groups, num_seqs, columns] on the CPU, -1 = none
    real: Tensor  # bool [num_seqs, seen] on the CPU: which positions of the padded batch hold a token

    @classmethod
    def of(cls, cache: PagedKVCache, rows: Sequence[int] | None = None) -> tuple[Sequences, list[int]]:
        """The sequences of a cache, and the number in its pool of each of their blocks.

        Args:
            cache: between two steps.
            rows: which of its rows; None = all.
        """
        if cache.within_step:
            raise ValueError("the cache must be between two steps: every layer written")
        table, real = cache.table(), cache.stored()
        if rows is not None:
            if len(rows) == 0:
                raise ValueError(f"rows must name at least one row, got {list(rows)}")
            real = real[list(rows)]
            columns = -(-int(real.sum(1).max()) // cache.block_size)
            table = table[:, list(rows), :columns]  # others may have been longer
        blocks, numbers = table[table >= 0].unique(return_inverse=True)
        renumbered = table.clone()
        renumbered[table >= 0] = numbers.to(torch.int32)
        return cls(renumbered, real), blocks.tolist()

    @property
    def num_blocks(self) -> int:
        """Blocks they take."""
        return int(self.table.max()) + 1 if self.table.numel() else 0

    @property
    def num_seqs(self) -> int:
        """Rows."""
        return self.real.shape[0]

    def seq_lens(self) -> list[int]:
        """Tokens of each row."""
        lens: list[int] = self.real.sum(1).tolist()
        return lens

    def filled(self, block_size: int) -> Tensor:
        """How many slots of each block hold a token that some row sees: int64 ``[num_blocks]``."""
        columns = torch.arange(self.table.shape[2]) * block_size
        slots = (torch.tensor(self.seq_lens())[:, None] - columns).clamp(0, block_size)  # [num_seqs, columns]
        held = self.table >= 0
        filled = torch.zeros(self.num_blocks, dtype=torch.int64)
        return filled.scatter_reduce_(0, self.table[held].long(), slots.expand(self.table.shape)[held], "amax")


def restore(cache: PagedKVCache, sequences: Sequences, fill: Callable[[list[int]], None]) -> None:
    """Begin an empty cache with sequences, in whatever blocks are free.

    Args:
        cache: whose layers are prepared.
        sequences: of a cache of the same layout.
        fill: writes their blocks, given the number in the pool of each.

    Raises:
        OutOfBlocksError: too few blocks are free; nothing has changed.
        ValueError: the cache is not empty.
    """
    pool = cache.pool
    if cache.seen:
        raise ValueError(f"the cache must be empty, got {cache.seen} positions")
    if not pool.has_room(sequences.num_blocks):
        if not pool.growable:
            raise OutOfBlocksError(sequences.num_blocks, pool.num_free)
        pool.grow(pool.num_blocks + sequences.num_blocks - pool.free_bound)
    pool.take(sequences.num_blocks)
    acquired = pool.acquire(sequences.num_blocks)
    try:
        blocks: list[int] = sorted(acquired.tolist())  # those that follow one another may be filled as one
        table = torch.tensor([*blocks, -1], dtype=torch.int32)[sequences.table.long()]  # -1 finds the last entry
        cache.adopt(table, sequences.real.shape[1], None if bool(sequences.real.all()) else sequences.real)
        try:  # last: what comes behind it on the current stream waits for it, and the host with what it has to send
            fill(blocks)
        except BaseException:
            cache.reset()
            raise
    finally:
        pool.release(acquired)
