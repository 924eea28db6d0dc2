"""The tensors behind a cache: the pool with the memory of its blocks, and the rows that hold them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import huge_pages, ops
from .layout import LayerKind, LayerTensors
from .pool import BlockPool
from .scales import Scales


class Backoff:
    """When to try again what costs a tenth of a second and is seldom of use: after twice as many times as before."""

    def __init__(self) -> None:
        self._pause = self._left = 0

    def is_due(self) -> bool:
        """Whether to try this time."""
        self._left -= 1
        return self._left < 0

    def note(self, success: bool) -> None:
        """Say what came of it."""
        self._pause = 0 if success else 2 * self._pause + 1
        self._left = self._pause


class KVPool(BlockPool):
    """A :class:`BlockPool` with the memory of its blocks: one *lane* of storage per layer of a group (and device).

    Caches of the same model may share one (chat turns, forks): they hold rows, the pool holds blocks.

    Args:
        num_blocks: blocks to begin with.
        block_size: tokens in a block.
        device: of the allocator's state. Lanes are where their layers are.
        growable: whether caches may :meth:`grow` it.

    Buffers: ``lane_<i> [num_blocks, elements]`` beside those of :class:`BlockPool`.
    """

    def __init__(self, num_blocks: int, block_size: int, device: torch.device, *, growable: bool) -> None:
        super().__init__(num_blocks, block_size, device)
        self.growable = growable
        self.num_lanes = 0
        self._placed: dict[tuple[int, torch.device], int] = {}  # index of the storage of a lane on a device
        self.views: dict[Any, LayerTensors] = {}  # of lanes, for eager code; emptied when a lane moves
        self.layers: dict[int, LayerKind] = {}  # of the caches that share it, as far as written
        self.scales: Scales = None  # of every cache that shares the pool; the first one tells
        self.shared = False  # True once any block may have had two holders
        self.free_bound = num_blocks  # host's lower bound of num_free: spares a sync per step
        self.bound_stale = False
        self._abandoned: list[Rows] = []  # of caches that are gone; their blocks go back when somebody counts
        self._abandoned_blocks: list[list[int]] = []  # likewise, of holders without rows
        self._reclaimers: list[weakref.WeakMethod[Callable[[int], int]]] = []
        self._searches = Backoff()  # for caches that are gone

    def lane(self, index: int) -> Tensor:
        """Storage of lane ``index``: ``[num_blocks, elements]``."""
        lane: Tensor = getattr(self, f"lane_{index}")
        return lane

    def lanes(self) -> list[Tensor]:
        """All lanes, for ops that move whole blocks."""
        return [self.lane(index) for index in range(self.num_lanes)]

    def copy_blocks(self, block_mapping: Tensor) -> None:
        """Copy blocks in every lane: pairs (source, destination) int64 ``[num_pairs, 2]``, -1 for none."""
        lanes: dict[torch.device, list[Tensor]] = {}
        for lane in self.lanes():
            lanes.setdefault(lane.device, []).append(lane)
        for device, there in lanes.items():
            ops.copy_blocks(there[:1], there[1:], block_mapping.to(device))  # AOTInductor passes no list that is empty

    def adopt(self, scales: Scales) -> None:
        """Take a cache whose blocks are scaled by ``scales``; all caches of a pool read each other's blocks.

        Raises:
            ValueError: another cache's blocks are scaled otherwise.
        """
        if self.num_lanes == 0:
            self.scales = scales
        elif self.scales != scales:
            raise ValueError(
                f"scales must be {self.scales!r} like those of the caches that share the pool, got {scales!r}"
            )

    @torch.inference_mode(False)  # memory made in inference mode serves outside of it too
    def ensure_lane(self, lane: int, elements: int, dtype: torch.dtype, device: torch.device) -> int:
        """Index of the storage of a lane's layers on ``device``, made with at least ``elements`` elements a block."""
        if (lane, device) not in self._placed:
            memory = torch.empty(self.num_blocks, elements, dtype=dtype, device=device)
            self._set_lane(self.num_lanes, huge_pages.advise(memory))
            self._placed[lane, device] = self.num_lanes
            self.num_lanes += 1
        index = self._placed[lane, device]
        storage = self.lane(index)
        if storage.dtype != dtype:
            raise ValueError(f"key must be {storage.dtype} like the layers that share its lane, got {dtype}")
        if storage.shape[1] < elements:
            self._set_lane(index, _resized(storage, self.num_blocks, elements))
        return index

    def move_out(self, index: int) -> None:
        """Move a lane to host memory, pinned and asynchronously from an accelerator."""
        self._move(index, torch.device("cpu"))

    def move_in(self, index: int) -> None:
        """Move a lane back to the device of its layers."""
        self._move(index, next(device for (_, device), placed in self._placed.items() if placed == index))

    @torch.inference_mode(False)
    def _move(self, index: int, device: torch.device) -> None:
        lane = self.lane(index)
        if lane.device != device:
            self._set_lane(index, lane.to(device, non_blocking=True))

    @torch.inference_mode(False)
    def grow(self, num_blocks: int) -> None:
        """Grow to ``num_blocks`` blocks, one lane at a time. Eager only: captured graphs hold the old memory."""
        added = num_blocks - self.num_blocks
        for index in range(self.num_lanes):  # the old memory of each is free before the next one moves
            self._set_lane(index, _resized(self.lane(index), num_blocks))
        super().grow(num_blocks)  # last: if memory runs out above, longer lanes do no harm
        self.free_bound += added

    def abandon(self, rows: Rows) -> None:
        """Take the rows of a cache that is gone: called by the garbage collector, so no tensor is touched here."""
        self._abandoned.append(rows)

    def abandon_blocks(self, blocks: Iterable[int]) -> None:
        """Take blocks whose holder is gone: called by the garbage collector, so no tensor is touched here."""
        self._abandoned_blocks.append(list(blocks))

    def add_reclaimer(self, reclaim: Callable[[int], int]) -> None:
        """Ask ``reclaim(wanted)`` when there are too few free blocks.

        Args:
            reclaim: a method that lets go of as many blocks as are wanted, or as many as it can, and tells how many.
                The pool does not keep its object alive.
        """
        self._reclaimers.append(weakref.WeakMethod(reclaim))

    def free_rows(self, rows: Rows) -> None:
        """Give all blocks of rows back."""
        self.free(rows.block_table, rows.seq_lens, torch.zeros_like(rows.seq_lens))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds. Synchronises on CUDA."""
        self.collect()
        return super().num_free

    def check(self, *tables: tuple[Tensor, Tensor]) -> None:
        """Raise unless the accounts close, as :meth:`BlockPool.check` says."""
        self.collect()
        super().check(*tables)

    def has_room(self, wanted: int) -> bool:
        """Whether ``wanted`` blocks are free; asks the device only if the host's bound leaves it open."""
        if self.bound_stale or wanted > self.free_bound:
            self.free_bound = self.num_free
            self.bound_stale = False
            self._reclaim(wanted)
            if wanted > self.free_bound and not self.growable and self._searches.is_due():
                self._find_lost(wanted)
        return wanted <= self.free_bound

    def take(self, wanted: int) -> None:
        """Let the host's bound follow a step that takes at most ``wanted`` blocks."""
        # Most steps take no block, and a module's attributes are slow to set.
        if wanted > 0:
            self.free_bound = max(0, self.free_bound - wanted)
        if self.bound_stale:
            self.bound_stale = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all its lanes."""
        return sum(lane.shape[1] * lane.element_size() for lane in self.lanes())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KVPool:
        """Of ``to`` and its like: the buffers may become other tensors."""
        self.views.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _reclaim(self, wanted: int) -> None:
        """Let others give blocks up until ``wanted`` are free."""
        for reference in self._reclaimers:
            reclaim = reference()
            if reclaim is not None and wanted > self.free_bound and reclaim(wanted - self.free_bound) > 0:
                self.free_bound = self.num_free  # what they let go of may have other holders

    def _find_lost(self, wanted: int) -> None:
        """Take the blocks back of caches that refer to one another in a circle: only a garbage collector finds them."""
        gc.collect()
        found = bool(self._abandoned or self._abandoned_blocks)
        self._searches.note(found)
        if found:
            self.free_bound = self.num_free
            self._reclaim(wanted)

    def collect(self) -> None:
        """Take the blocks of holders that are gone back."""
        while self._abandoned:
            self.free_rows(self._abandoned.pop())
        while self._abandoned_blocks:
            self.release(torch.tensor(self._abandoned_blocks.pop(), dtype=torch.int32))

    def _set_lane(self, index: int, lane: Tensor) -> None:
        self.views.clear()  # else they would hold the old memory
        self.register_buffer(f"lane_{index}", lane, persistent=False)


def _resized(lane: Tensor, num_blocks: int, elements: int | None = None) -> Tensor:
    resized = huge_pages.advise(lane.new_empty(num_blocks, elements or lane.shape[1]))
    resized[: lane.shape[0], : lane.shape[1]] = lane
    return resized


class Rows(nn.Module):
    """The sequences of one cache: which blocks they hold and how long they are.

    Buffers: ``block_table`` int32 ``[num_groups, num_seqs, max_blocks]``, ``seq_lens`` int32 ``[num_seqs]``, ``retain``
    int32 ``[num_groups]`` (tokens before a step that stay readable, -1 = all), ``seen`` int64 ``[]`` (positions of the
    padded batch so far), ``starts`` int32 ``[num_seqs + 1]`` (0, 1, 2, ...: where rows of one token start).
    """

    block_table: Tensor
    seq_lens: Tensor
    retain: Tensor
    seen: Tensor
    starts: Tensor

    def __init__(self, num_seqs: int, max_blocks: int, windows: Sequence[int | None], device: torch.device) -> None:
        super().__init__()
        retain = [-1 if window is None else window - 1 for window in windows]
        with torch.inference_mode(False):
            state = {
                "block_table": torch.full((len(windows), num_seqs, max_blocks), -1, dtype=torch.int32, device=device),
                "seq_lens": torch.zeros(num_seqs, dtype=torch.int32, device=device),
                "retain": torch.tensor(retain, dtype=torch.int32, device=device),
                "seen": torch.zeros((), dtype=torch.int64, device=device),
                "starts": torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
            }
        for name, tensor in state.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def num_seqs(self) -> int:
        """Sequences, whatever their length."""
        return self.seq_lens.shape[0]

    def spans(self, length: int) -> Tensor:
        """``cu_seqlens_q`` of rows of ``length`` tokens each: int32 ``[num_seqs + 1]``.

        For a decode step it is a buffer: computed in a compiled graph, Inductor would compute it anew in every layer.
        """
        return self.starts if length == 1 else self.starts * length

    @torch.inference_mode(False)
    def widen(self, max_blocks: int) -> None:
        """Make room for ``max_blocks`` blocks a sequence. Eager only."""
        lacking = max_blocks - self.block_table.shape[2]
        self.block_table = nn.functional.pad(self.block_table, (0, lacking), value=-1)

    @torch.inference_mode(False)
    def forked(self, source_rows: Tensor, pool: KVPool, columns: int) -> Rows:
        """New rows that share the blocks of ``source_rows`` int64 ``[n]``.

        Args:
            source_rows: which rows.
            pool: that holds their blocks.
            columns: of the table that are in use; the others, which follow the capacity, are not read.
        """
        old, new, width = self.num_seqs, source_rows.shape[0], self.block_table.shape[2]
        # One table of both, since fork works within a table.
        table = nn.functional.pad(self.block_table[:, :, :columns], (0, 0, 0, new), value=-1)
        seq_lens = nn.functional.pad(self.seq_lens, (0, new))
        pool.fork(table, seq_lens, source_rows, torch.arange(old, old + new, device=seq_lens.device))
        rows = Rows(new, 0, [], self.seq_lens.device)
        rows.block_table = nn.functional.pad(table[:, old:], (0, width - columns), value=-1).contiguous()
        rows.seq_lens = seq_lens[old:].contiguous()
        rows.retain, rows.seen = self.retain.clone(), self.seen.clone()
        return rows
