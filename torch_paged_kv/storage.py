"""The tensors behind a cache: the pool with the memory of its blocks, and the rows that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import huge_pages
from .pool import BlockPool

GROWTH = 1.5  # a pool without a given size grows by this factor


class KVPool(BlockPool):
    """A :class:`BlockPool` with the memory of its blocks: one *lane* of storage per layer of a group.

    Caches of the same model may share one (chat turns, forks): they hold rows, the pool holds blocks.

    Args:
        num_blocks: blocks to begin with.
        block_size: tokens in a block.
        device: of every lane and of the allocator's state.
        growable: whether :meth:`make_room` may add blocks.

    Buffers: ``lane_<i> [num_blocks, elements]`` beside those of :class:`BlockPool`.
    """

    def __init__(self, num_blocks: int, block_size: int, device: torch.device, *, growable: bool) -> None:
        super().__init__(num_blocks, block_size, device)
        self.growable = growable
        self.num_lanes = 0
        self.generation = 0  # changes when lanes move in memory
        self.shared = False  # True once any block may have had two holders
        self.free_bound = num_blocks  # host's lower bound of num_free: spares a sync per step
        self.bound_stale = False
        self._abandoned: list[Rows] = []  # of caches that are gone; their blocks go back when somebody counts

    def lane(self, index: int) -> Tensor:
        """Storage of lane ``index``: ``[num_blocks, elements]``."""
        lane: Tensor = getattr(self, f"lane_{index}")
        return lane

    def lanes(self) -> list[Tensor]:
        """All lanes, for ops that move whole blocks."""
        return [self.lane(index) for index in range(self.num_lanes)]

    @torch.inference_mode(False)  # memory made in inference mode serves outside of it too
    def ensure_lane(self, index: int, elements: int, dtype: torch.dtype) -> None:
        """Make lane ``index`` exist with at least ``elements`` elements a block."""
        while self.num_lanes <= index:
            self._set_lane(self.num_lanes, torch.empty(self.num_blocks, 0, dtype=dtype, device=self.device))
            self.num_lanes += 1
        lane = self.lane(index)
        if lane.shape[1] == 0:
            memory = torch.empty(self.num_blocks, elements, dtype=dtype, device=self.device)
            self._set_lane(index, huge_pages.advise(memory))
        elif lane.dtype != dtype:
            raise ValueError(f"key must be {lane.dtype} like the layers that share its lane, got {dtype}")
        elif lane.shape[1] < elements:
            self._set_lane(index, _resized(lane, self.num_blocks, elements))

    @torch.inference_mode(False)
    def grow(self, num_blocks: int) -> None:
        """Grow to ``num_blocks`` blocks, one lane at a time. Eager only: captured graphs hold the old memory."""
        added = num_blocks - self.num_blocks
        super().grow(num_blocks)
        for index, lane in enumerate(self.lanes()):
            self._set_lane(index, _resized(lane, num_blocks, lane.shape[1]))
        self.free_bound += added

    def abandon(self, rows: Rows) -> None:
        """Take the rows of a cache that is gone: called by the garbage collector, so no tensor is touched here."""
        self._abandoned.append(rows)

    def free_rows(self, rows: Rows) -> None:
        """Give all blocks of rows back."""
        self.free(rows.block_table, rows.seq_lens, torch.zeros_like(rows.seq_lens))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds. Synchronises on CUDA."""
        self._collect()
        return super().num_free

    def check(self, *tables: tuple[Tensor, Tensor]) -> None:
        """Raise unless the accounts close, as :meth:`BlockPool.check` says."""
        self._collect()
        super().check(*tables)

    def has_room(self, wanted: int) -> bool:
        """Whether ``wanted`` blocks are free; asks the device only if the host's bound leaves it open."""
        if self.bound_stale or wanted > self.free_bound:
            self.free_bound = self.num_free
            self.bound_stale = False
        return wanted <= self.free_bound

    def take(self, wanted: int) -> None:
        """Let the host's bound follow a step that takes at most ``wanted`` blocks."""
        self.free_bound = max(0, self.free_bound - wanted)
        self.bound_stale = False

    def make_room(self, wanted: int) -> bool:
        """See to ``wanted`` free blocks where the pool may grow; False if they may be lacking."""
        enough = self.has_room(wanted)
        if not enough and self.growable:
            self.grow(max(int(self.num_blocks * GROWTH), self.num_blocks + wanted - self.free_bound))
            enough = True
        self.take(wanted)
        return enough

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all its lanes."""
        return sum(lane.shape[1] * lane.element_size() for lane in self.lanes())

    def _collect(self) -> None:
        while self._abandoned:
            self.free_rows(self._abandoned.pop())

    def _set_lane(self, index: int, lane: Tensor) -> None:
        self.register_buffer(f"lane_{index}", lane, persistent=False)
        self.generation += 1


def _resized(lane: Tensor, num_blocks: int, elements: int) -> Tensor:
    resized = huge_pages.advise(lane.new_empty(num_blocks, elements))
    resized[: lane.shape[0], : lane.shape[1]] = lane
    return resized


class Rows(nn.Module):
    """The sequences of one cache: which blocks they hold and how long they are.

    Buffers: ``block_table`` int32 ``[num_groups, num_seqs, max_blocks]``, ``seq_lens`` int32 ``[num_seqs]``, ``retain``
    int32 ``[num_groups]`` (tokens before a step that stay readable, -1 = all), ``seen`` int64 ``[]`` (positions of the
    padded batch so far).
    """

    block_table: Tensor
    seq_lens: Tensor
    retain: Tensor
    seen: Tensor

    def __init__(self, num_seqs: int, max_blocks: int, windows: Sequence[int | None], device: torch.device) -> None:
        super().__init__()
        retain = [-1 if window is None else window - 1 for window in windows]
        with torch.inference_mode(False):
            state = {
                "block_table": torch.full((len(windows), num_seqs, max_blocks), -1, dtype=torch.int32, device=device),
                "seq_lens": torch.zeros(num_seqs, dtype=torch.int32, device=device),
                "retain": torch.tensor(retain, dtype=torch.int32, device=device),
                "seen": torch.zeros((), dtype=torch.int64, device=device),
            }
        for name, tensor in state.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def num_seqs(self) -> int:
        """Sequences, whatever their length."""
        return self.seq_lens.shape[0]

    @torch.inference_mode(False)
    def widen(self, max_blocks: int) -> None:
        """Make room for ``max_blocks`` blocks a sequence. Eager only."""
        lacking = max_blocks - self.block_table.shape[2]
        self.block_table = nn.functional.pad(self.block_table, (0, lacking), value=-1)

    @torch.inference_mode(False)
    def forked(self, source_rows: Tensor, pool: KVPool) -> Rows:
        """New rows that share the blocks of ``source_rows`` int64 ``[n]``."""
        old, new = self.num_seqs, source_rows.shape[0]
        # One table of both, since fork works within a table.
        table = nn.functional.pad(self.block_table, (0, 0, 0, new), value=-1)
        seq_lens = nn.functional.pad(self.seq_lens, (0, new))
        pool.fork(table, seq_lens, source_rows, torch.arange(old, old + new, device=seq_lens.device))
        rows = Rows(0, 0, [], self.seq_lens.device)
        rows.block_table, rows.seq_lens = table[:, old:].contiguous(), seq_lens[old:].contiguous()
        rows.retain, rows.seen = self.retain.clone(), self.seen.clone()
        return rows
