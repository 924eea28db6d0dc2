"""BlockPool: the allocator's state, and the host's view of it.

The state is three tensors that the ops `allocate`, `free` and `fork` change, on the device of the caches; nothing here
is consulted in a step. Whatever reads numbers back (`num_free`, `stats`, `check`, `grow`, `raise_if_exhausted`) waits
for the device on CUDA.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from . import ops
from .errors import OutOfBlocksError
from .reference import FAILURES, HEAD, TAIL, WANTED

__all__ = ["BlockPool", "blocks_for", "free_memory"]


class BlockPool(nn.Module):
    """Numbered blocks that the rows of any number of block tables share.

    Blocks are taken longest-released first. A block is held by table entries, counted in ``ref_counts``, and free when
    nobody holds it. The pool owns numbers, not memory: caches keep keys and values ``[num_blocks, block_size, ...]``.

    Args:
        num_blocks: blocks to begin with, all free.
        block_size: tokens in a block.
        device: of the state; that of the caches.

    Buffers (not saved with a model: they say nothing without the tables and the caches):
        free_ring: int32 [num_blocks], numbers of the free blocks; queue position p lies at ``p % num_blocks``.
        ref_counts: int32 [num_blocks], table entries that hold each block.
        counters: int64 [4]: queue head, queue tail, failed allocations, blocks wanted by the first of them.
    """

    free_ring: Tensor
    ref_counts: Tensor
    counters: Tensor

    def __init__(self, num_blocks: int, block_size: int = 16, device: torch.device | str = "cpu") -> None:
        super().__init__()
        _require_at_least("num_blocks", num_blocks, 1)
        _require_at_least("block_size", block_size, 1)
        self.block_size = block_size
        with torch.inference_mode(False):  # a pool made in inference mode serves outside of it too
            state = {
                "free_ring": torch.arange(num_blocks, dtype=torch.int32, device=device),
                "ref_counts": torch.zeros(num_blocks, dtype=torch.int32, device=device),
                "counters": torch.tensor([0, num_blocks, 0, 0], dtype=torch.int64, device=device),
            }
        for name, tensor in state.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def num_blocks(self) -> int:
        """Blocks, free or held."""
        return self.free_ring.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the state."""
        return self.free_ring.device

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds. Synchronises on CUDA."""
        counters: list[int] = self.counters.tolist()
        return counters[TAIL] - counters[HEAD]

    def extra_repr(self) -> str:
        """What ``print`` shows of the pool."""
        return f"num_blocks={self.num_blocks}, block_size={self.block_size}, device={self.device}"

    def allocate(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        num_tokens: int,
        *,
        num_new: Tensor | None = None,
        retain: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """:func:`torch_paged_kv.ops.allocate` on this pool: slot_mapping and block_mapping of a step."""
        return ops.allocate(
            block_table,
            seq_lens,
            self.free_ring,
            self.ref_counts,
            self.counters,
            cu_seqlens_q,
            num_tokens,
            self.block_size,
            num_new=num_new,
            retain=retain,
        )

    def free(self, block_table: Tensor, seq_lens: Tensor, new_lens: Tensor) -> None:
        """:func:`torch_paged_kv.ops.free` on this pool: shorten rows to ``new_lens`` int32 [num_seqs]."""
        ops.free(block_table, seq_lens, self.free_ring, self.ref_counts, self.counters, new_lens, self.block_size)

    def fork(self, block_table: Tensor, seq_lens: Tensor, source_rows: Tensor, destination_rows: Tensor) -> None:
        """:func:`torch_paged_kv.ops.fork` on this pool: destination rows share the blocks of source rows, int64 [n]."""
        ops.fork(
            block_table,
            seq_lens,
            self.free_ring,
            self.ref_counts,
            self.counters,
            source_rows,
            destination_rows,
            self.block_size,
        )

    def acquire(self, num_blocks: int) -> Tensor:
        """Take free blocks, each held once: int32 ``[num_blocks]``. :meth:`release` gives them back.

        For what moves whole blocks between steps (loading, swapping). Synchronises on CUDA.

        Raises:
            OutOfBlocksError: fewer are free; nothing has changed.
        """
        _require_at_least("num_blocks", num_blocks, 0)
        row = torch.full((1, num_blocks), -1, dtype=torch.int32, device=self.device)
        tokens = num_blocks * self.block_size
        span = torch.tensor([0, tokens], dtype=torch.int32, device=self.device)
        self.allocate(row, torch.zeros(1, dtype=torch.int32, device=self.device), span, tokens)
        self.raise_if_exhausted()
        return row[0]

    def retain(self, blocks: Tensor) -> None:
        """Hold blocks once more for each time they are among ``blocks``: int32 of any shape, -1 = none.

        They must be held by somebody already. Does not synchronise.
        """
        blocks = blocks.to(self.device).flatten()
        self.ref_counts.index_add_(0, blocks.clamp(min=0), (blocks >= 0).to(torch.int32))

    def release(self, blocks: Tensor) -> None:
        """Hold each of ``blocks`` once less: int32 of any shape, -1 = none, no block twice.

        Those that nobody holds any more are free, last ones first. Does not synchronise.
        """
        row = blocks.to(self.device).reshape(1, -1).clone()
        tokens = torch.full((1,), row.shape[1] * self.block_size, dtype=torch.int32, device=self.device)
        self.free(row, tokens, torch.zeros_like(tokens))

    def grow(self, num_blocks: int) -> None:
        """Add blocks up to ``num_blocks``; they queue behind those free now, and tables stay valid.

        Eager only: buffers are replaced, so compiled code sees new tensors and captured CUDA graphs the old ones.
        """
        _require_at_least("num_blocks", num_blocks, self.num_blocks)
        added = num_blocks - self.num_blocks
        counters: list[int] = self.counters.tolist()
        with torch.inference_mode(False):
            free = self._queue(counters)
            fresh = torch.arange(self.num_blocks, num_blocks, dtype=torch.int32, device=self.device)
            unused = torch.full((num_blocks - len(free) - added,), -1, dtype=torch.int32, device=self.device)
            self.free_ring = torch.cat([free, fresh, unused])
            self.ref_counts = torch.cat([self.ref_counts, torch.zeros_like(fresh)])
            counters[HEAD], counters[TAIL] = 0, len(free) + added
            self.counters = torch.tensor(counters, dtype=torch.int64, device=self.device)

    def reset(self) -> None:
        """Make every block free, in the order of their numbers. Tables that held any must be cleared or forgotten."""
        self.free_ring.copy_(torch.arange(self.num_blocks, dtype=torch.int32, device=self.device))
        self.ref_counts.zero_()
        self.counters.copy_(torch.tensor([0, self.num_blocks, 0, 0], dtype=torch.int64, device=self.device))

    def raise_if_exhausted(self) -> None:
        """Raise if an ``allocate`` has run out of blocks since the last call, and forget that it did.

        On the CPU ``allocate`` raises by itself; on CUDA, where it must not wait for the device, this is how the host
        learns of it: after a step, or after any number of steps.

        Raises:
            OutOfBlocksError: ``wanted`` of the first failed call, ``free`` now.
        """
        counters: list[int] = self.counters.tolist()
        if counters[FAILURES] == 0:
            return
        self.counters[FAILURES:].zero_()
        raise OutOfBlocksError(counters[WANTED], counters[TAIL] - counters[HEAD])

    def stats(self) -> dict[str, int]:
        """Exact numbers of blocks, and of allocations that failed since the last `raise_if_exhausted`.

        Returns:
            ``total``, ``free``, ``referenced`` (held by somebody), ``shared`` (held more than once), ``failures``.
        """
        counters: list[int] = self.counters.tolist()
        return {
            "total": self.num_blocks,
            "free": counters[TAIL] - counters[HEAD],
            "referenced": int((self.ref_counts > 0).sum()),
            "shared": int((self.ref_counts > 1).sum()),
            "failures": counters[FAILURES],
        }

    def check(self, *tables: tuple[Tensor, Tensor]) -> None:
        """Raise unless the accounts close: every block is either free, once in the queue, or held.

        Args:
            *tables: (block_table, seq_lens) of every table whose rows hold blocks of this pool. With any given,
                ``ref_counts`` must equal the number of their entries that hold each block.

        Raises:
            RuntimeError: names the first block that is wrong.
        """
        counters: list[int] = self.counters.tolist()
        num_free, counts = counters[TAIL] - counters[HEAD], self.ref_counts.cpu()
        if not 0 <= num_free <= self.num_blocks:
            raise RuntimeError(f"free blocks must be 0 .. {self.num_blocks}, got {num_free}")
        queued = self._count_entries(self._queue(counters).cpu(), "the free queue")
        _require_nowhere(queued > 1, "block {} is {} times in the free queue", queued)
        _require_nowhere((queued > 0) & (counts != 0), "block {} is free, but its reference count is {}", counts)
        _require_nowhere((queued == 0) & (counts <= 0), "block {} is not free, but its reference count is {}", counts)
        if not tables:
            return
        held = torch.zeros_like(queued)
        for block_table, seq_lens in tables:
            held += self._count_entries(_used_entries(block_table.cpu(), seq_lens.cpu(), self.block_size), "a table")
        for block in (held != counts).nonzero().flatten().tolist():
            raise RuntimeError(
                f"block {block} is held by {int(held[block])} table entries, but its reference count is "
                f"{int(counts[block])}"
            )

    def _queue(self, counters: list[int]) -> Tensor:
        """Numbers of the free blocks, longest-released first: int32 [num_free]."""
        positions = torch.arange(counters[HEAD], counters[TAIL], device=self.device)
        return self.free_ring[positions % self.num_blocks]

    def _count_entries(self, entries: Tensor, place: str) -> Tensor:
        """How often each block is among ``entries`` [n]: int64 [num_blocks]."""
        for entry in entries[(entries < 0) | (entries >= self.num_blocks)].tolist():
            raise RuntimeError(f"block {entry} in {place} must be in 0 .. {self.num_blocks - 1}")
        return torch.bincount(entries.long(), minlength=self.num_blocks)


def _used_entries(block_table: Tensor, seq_lens: Tensor, block_size: int) -> Tensor:
    """The mapped entries among those columns of a table that its lengths say are in use: [n]."""
    columns = torch.arange(block_table.shape[-1])
    used = columns < ((seq_lens + block_size - 1) // block_size)[:, None]  # [num_seqs, max_blocks]
    return block_table[used.expand_as(block_table) & (block_table != -1)]


def _require_nowhere(wrong: Tensor, message: str, numbers: Tensor) -> None:
    for block in wrong.nonzero().flatten().tolist():
        raise RuntimeError(message.format(block, int(numbers[block])))


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def blocks_for(
    *,
    block_size: int,
    block_bytes: int,
    device: torch.device | str = "cpu",
    num_blocks: int | None = None,
    num_tokens: int | None = None,
    bytes: int | None = None,
    fraction: float | None = None,
) -> int:
    """Number of blocks of a pool whose size is given in one of four ways.

    Args:
        block_size: tokens in a block.
        block_bytes: bytes that a block takes over all layers.
        device: where the pool will be; matters to ``fraction``.
        num_blocks: blocks.
        num_tokens: tokens of one sequence, rounded up to whole blocks.
        bytes: bytes that the pool may take, rounded down to whole blocks.
        fraction: share of the memory that is free on ``device`` now, above 0 and up to 1.

    Raises:
        ValueError: not exactly one size is given, or it does not make one block.
    """
    sizes = {"num_blocks": num_blocks, "num_tokens": num_tokens, "bytes": bytes, "fraction": fraction}
    given = [name for name, size in sizes.items() if size is not None]
    if len(given) != 1:
        raise ValueError(f"size must be exactly one of {', '.join(sizes)}, got {' and '.join(given) or 'none'}")
    if num_blocks is not None:
        _require_at_least("num_blocks", num_blocks, 1)
        return num_blocks
    if num_tokens is not None:
        _require_at_least("num_tokens", num_tokens, 1)
        return -(-num_tokens // block_size)
    if bytes is not None:
        _require_at_least("bytes", bytes, block_bytes)
        return bytes // block_bytes
    assert fraction is not None
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
    free = free_memory(device)
    if int(free * fraction) < block_bytes:
        raise ValueError(
            f"fraction must make at least one block of {block_bytes} bytes, got {fraction} of {free} free bytes"
        )
    return int(free * fraction) // block_bytes


def free_memory(device: torch.device | str) -> int:
    """Bytes that can be allocated on a device now, as far as the system tells.

    Raises:
        ValueError: neither the CPU nor CUDA is asked for, or the system does not tell.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    if device.type != "cpu":
        raise ValueError(f"device must be a CPU or CUDA device for a fraction of free memory, got {device}")
    known = [amount for amount in (_available_to_system(), _available_to_container()) if amount is not None]
    if not known:
        raise ValueError("fraction must be given on a system that tells its free memory; give num_blocks or bytes")
    return min(known)


def _available_to_system() -> int | None:
    """What can be used without swapping (Linux), else the memory that is unused or, where not told, installed."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if name in getattr(os, "sysconf_names", {}):
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return None


def _available_to_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves (cgroup v2); file pages it could drop are not in use."""
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
