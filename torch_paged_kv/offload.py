"""HostTier: sequences swapped out of a pool to host memory, and back.

On CUDA all copies of a tier run on one stream of its own, between pinned host memory and the pool, with no wait on the
host. What orders them:

- a copy starts after everything that the current stream was given before, so it reads what is written;
- blocks that are copied out stay held until the copy is done. When the pool needs them before, the current stream waits
  for the copy first: whatever is written into them afterwards comes later;
- whoever reads a sequence that came back does so on a stream that waited for its copy;
- room in host memory is taken again at once, as the copy into it follows the copy out of it on the same stream.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import ops
from .cache import PagedKVCache
from .errors import OutOfBlocksError
from .sequences import Sequences, restore
from .storage import KVPool

__all__ = ["HostTier", "Swapped"]


ALIGNMENT = 4096  # bytes, a page: memory is pinned in whole ones


@dataclass(eq=False)
class Swapped:
    """Sequences in host memory, for :meth:`HostTier.swap_in`. Dropping it gives its room back."""

    sequences: Sequences
    slots: list[int]  # of the tier, one per block
    tier: HostTier

    def __post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, self.tier._free.extend, self.slots)
        self._finalizer.atexit = False

    def seq_lens(self) -> list[int]:
        """Tokens of each sequence."""
        return self.sequences.seq_lens()

    @property
    def num_blocks(self) -> int:
        """Blocks they take, here and in the pool."""
        return len(self.slots)

    def drop(self) -> None:
        """Give the room back; the sequences are gone."""
        self._finalizer()


@dataclass
class _Leaving:
    """Blocks whose copy out may still run."""

    blocks: Tensor  # int32 [n]
    done: Any  # a CUDA event, None on the CPU


@dataclass
class _Counts:
    swapped_out: int = 0
    swapped_in: int = 0
    times: list[tuple[Any, Any]] = field(default_factory=list)  # pairs of CUDA events
    milliseconds: float = 0.0


class HostTier:
    """Host memory for sequences of one pool that others need the blocks of.

    On CUDA the memory is pinned, exactly as many bytes as asked for, but for whole pages of each lane.

    Args:
        pool: whose blocks are swapped; every layer of its caches was written at least once.
        num_blocks: blocks that the tier has room for.

    Raises:
        ValueError: the pool has no memory yet, or on several devices, or ``num_blocks`` is not positive.
    """

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be >= 1, got {num_blocks}")
        if pool.num_lanes == 0:
            raise ValueError("pool must have its memory: write every layer of a cache first")
        _check_device(pool)
        self.pool = pool
        self.num_blocks = num_blocks
        memory, self._lanes = _host_lanes(pool.lanes(), num_blocks)
        self._free: deque[int] = deque(range(num_blocks))
        self._leaving: deque[_Leaving] = deque()
        self._counts = _Counts()
        self._stream = torch.cuda.Stream(pool.device) if pool.device.type == "cuda" else None
        pool.add_reclaimer(self.reclaim)
        if self._stream is not None:
            _pin(memory)
        weakref.finalize(self, _let_go, pool, memory, self._leaving, self._stream).atexit = False

    # ---- moving -------------------------------------------------------------------------------------------------

    def swap_out(self, cache: PagedKVCache) -> Swapped:
        """Copy the sequences of a cache out, and empty it. Its blocks are free as soon as the copy is done.

        Blocks that others hold too (forks, a prefix cache) are copied, and stay theirs.

        Args:
            cache: of the pool, between two steps.

        Returns:
            What :meth:`swap_in` takes.

        Raises:
            OutOfBlocksError: the tier has too little room; nothing has changed.
            ValueError: the cache is of another pool, or within a step.
        """
        self._check(cache)
        sequences, blocks = Sequences.of(cache)
        if len(blocks) > len(self._free):
            raise OutOfBlocksError(len(blocks), len(self._free))
        held = torch.tensor(blocks, dtype=torch.int32)
        self.pool.retain(held)
        slots = [self._free.popleft() for _ in blocks]
        with self._copying() as events:
            ops.swap_blocks(self.pool.lanes(), self._lanes, _pairs(blocks, slots))
        self._leaving.append(_Leaving(held, None if events is None else events[1]))
        self._counts.swapped_out += len(blocks)
        cache.reset()
        self.settle()
        return Swapped(sequences, slots, self)

    def swap_in(self, cache: PagedKVCache, swapped: Swapped) -> None:
        """Bring sequences back into an empty cache, in whatever blocks are free; ``swapped`` is used up.

        Raises:
            OutOfBlocksError: the pool has too few free blocks; nothing has changed.
            ValueError: the cache is not empty or of another pool, or ``swapped`` is of another tier or used up.
        """
        self._check(cache)
        if swapped.tier is not self:
            raise ValueError("swapped must be of this tier")
        if not swapped._finalizer.alive:
            raise ValueError("swapped must not be used up: its room was given back")
        self.settle()

        def fill(blocks: list[int]) -> None:
            with self._copying() as events:
                ops.swap_blocks(self._lanes, self.pool.lanes(), _pairs(swapped.slots, blocks))
            if events is not None:
                torch.cuda.current_stream(self.pool.device).wait_event(events[1])

        restore(cache, swapped.sequences, fill)
        self._counts.swapped_in += swapped.num_blocks
        swapped.drop()

    def settle(self) -> None:
        """Let go of the blocks whose copies are done. Does not wait."""
        while self._leaving and (self._leaving[0].done is None or self._leaving[0].done.query()):
            self.pool.release(self._leaving.popleft().blocks)

    def reclaim(self, wanted: int) -> int:
        """What the pool calls when it is short of blocks: the current stream waits for copies, the host does not."""
        released = 0
        while self._leaving and released < wanted:
            leaving = self._leaving.popleft()
            if leaving.done is not None:
                torch.cuda.current_stream(self.pool.device).wait_event(leaving.done)
            self.pool.release(leaving.blocks)
            released += len(leaving.blocks)
        return released

    def synchronize(self) -> None:
        """Wait for all copies, and let go of the blocks that were copied out."""
        if self._stream is not None:
            self._stream.synchronize()
        self.settle()

    # ---- numbers ------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that the tier has room for."""
        return len(self._free)

    @property
    def bytes(self) -> int:
        """Host memory it takes."""
        return sum(lane.numel() * lane.element_size() for lane in self._lanes)

    def holdings(self) -> tuple[Tensor, Tensor]:
        """Blocks of the pool that are still being copied, as a table and its lengths, for :meth:`BlockPool.check`."""
        blocks = [leaving.blocks for leaving in self._leaving]
        held = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.int32)
        return held[None, None], torch.tensor([len(held) * self.pool.block_size])

    def stats(self) -> dict[str, int | float]:
        """Exact numbers.

        ``host_blocks``, ``host_free_blocks``, ``host_bytes`` of the tier; ``leaving_blocks`` whose copies may run;
        ``swapped_out_bytes``, ``swapped_in_bytes``; on CUDA ``swap_seconds`` of the copies that are done.
        """
        counts = self._counts
        done = [pair for pair in counts.times if pair[1].query()]
        counts.milliseconds += sum(start.elapsed_time(end) for start, end in done)
        counts.times = [pair for pair in counts.times if pair not in done]
        return {
            "host_blocks": self.num_blocks,
            "host_free_blocks": self.num_free,
            "host_bytes": self.bytes,
            "leaving_blocks": sum(len(leaving.blocks) for leaving in self._leaving),
            "swapped_out_bytes": counts.swapped_out * self.pool.block_bytes,
            "swapped_in_bytes": counts.swapped_in * self.pool.block_bytes,
            "swap_seconds": counts.milliseconds / 1000,
        }

    # ---- within -------------------------------------------------------------------------------------------------

    def _check(self, cache: PagedKVCache) -> None:
        if not cache.has_pool or cache.pool is not self.pool:
            raise ValueError("the cache must be of the pool of the tier: PagedKVCache(..., pool=tier.pool)")
        _check_device(self.pool)
        lanes = [lane.shape[1:] for lane in self.pool.lanes()]
        if lanes != [lane.shape[1:] for lane in self._lanes]:
            raise ValueError("the tier must be made after every layer of the pool's caches was written")

    @contextmanager
    def _copying(self) -> Iterator[tuple[Any, Any] | None]:
        """The copy stream, after all that the current one was given; the events before and after what it does."""
        if self._stream is None:
            yield None
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.pool.device))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            start.record()
            yield start, end
            end.record()
        for lane in self.pool.lanes():  # a pool that grows or is dropped must not give this memory away before
            lane.record_stream(self._stream)
        self._counts.times.append((start, end))


def _check_device(pool: KVPool) -> None:
    for lane in pool.lanes():
        if lane.device != pool.device:
            raise ValueError(f"pool must have all its memory on {pool.device}, got some on {lane.device}")


def _pairs(sources: list[int], destinations: list[int]) -> Tensor:
    """``block_mapping`` int64 ``[n, 2]`` on the CPU."""
    return torch.tensor([sources, destinations], dtype=torch.int64).T.contiguous()


def _host_lanes(lanes: list[Tensor], num_blocks: int) -> tuple[Tensor, list[Tensor]]:
    """Host memory for blocks of every lane: all of it in one piece, and as ``[num_blocks, elements]`` each."""
    sizes = [num_blocks * lane[0].numel() * lane.element_size() for lane in lanes]
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    # A private mapping begins a page, so that all of a storage gets pinned: its tensors answer `is_pinned()` by that.
    memory = torch.frombuffer(mmap.mmap(-1, end, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    parts = [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    return memory, [part.view(lane.dtype).view(num_blocks, *lane.shape[1:]) for part, lane in zip(parts, lanes)]


def _pin(memory: Tensor) -> None:
    """Register memory with CUDA: torch's own pinned allocator rounds up to powers of two."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))


def _let_go(pool: KVPool, memory: Tensor, leaving: deque[_Leaving], stream: Any) -> None:
    """The tier is gone: its copies must be done before its memory and the blocks they read are."""
    if stream is not None:
        stream.synchronize()
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostUnregister(memory.data_ptr())))
    for each in leaving:
        pool.abandon_blocks(each.blocks.tolist())
