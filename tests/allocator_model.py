"""A model of the allocator that follows its rules block by block, and a world in which the ops run beside it.

The model knows queues, lists and counts, no tensors. After every operation the tables, lengths, reference counts, free
queue, slots and copy pairs of the op equal the model's, and every block is either free or held.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from torch_paged_kv import BlockPool, OutOfBlocksError, ops

Pair = tuple[int, int]
State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # block_table, seq_lens, free_ring, ref_counts, counters
INT32_MAX = 2**31 - 1


# ---------------------------------------------------------------------------------------------------------------------
# The model


class ModelOutOfBlocks(Exception):
    def __init__(self, wanted: int, available: int) -> None:
        super().__init__(wanted, available)
        self.wanted, self.available = wanted, available


class ModelTable:
    def __init__(self, num_groups: int, num_seqs: int, max_blocks: int) -> None:
        self.entries = [[[-1] * max_blocks for _ in range(num_seqs)] for _ in range(num_groups)]
        self.lens = [0] * num_seqs
        self.max_blocks = max_blocks

    def rows(self) -> list[tuple[int, int]]:
        return [(group, row) for group in range(len(self.entries)) for row in range(len(self.lens))]


class Model:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free_blocks = deque(range(num_blocks))
        self.holders = [0] * num_blocks
        self.block_size = block_size

    def columns(self, length: int) -> int:
        return (length + self.block_size - 1) // self.block_size

    def let_go(self, entries: list[int], column: int) -> None:
        block, entries[column] = entries[column], -1
        if block >= 0:
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free_blocks.append(block)

    def take(self) -> int:
        block = self.free_blocks.popleft()
        self.holders[block] = 1
        return block

    def allocate(
        self, table: ModelTable, ends: Sequence[int], num_tokens: int, news: Sequence[int], retain: Sequence[int]
    ) -> tuple[list[list[int]], list[Pair]]:
        """`ends`: where each row's span of the batch ends; its last `new` tokens get slots."""
        before = (deque(self.free_blocks), list(self.holders), [[list(r) for r in g] for g in table.entries])
        for group, row in table.rows():
            if retain[group] >= 0:
                for column in range(max(0, table.lens[row] - retain[group]) // self.block_size):
                    self.let_go(table.entries[group][row], column)
        available, wanted = len(self.free_blocks), 0
        slots = [[-1] * num_tokens for _ in table.entries]
        pairs = []
        for group, row in table.rows():
            entries, length, new = table.entries[group][row], table.lens[row], news[row]
            missing = list(range(self.columns(length), self.columns(length + new)))
            last = length // self.block_size
            source = entries[last] if new and length % self.block_size else -1
            copies = source >= 0 and self.holders[source] > 1
            if copies:
                self.holders[source] -= 1
                missing.insert(0, last)
            wanted += len(missing)
            if wanted <= available:
                for column in missing:
                    entries[column] = self.take()
                for i in range(new):
                    block, offset = entries[(length + i) // self.block_size], (length + i) % self.block_size
                    slots[group][ends[row] - new + i] = block * self.block_size + offset if block >= 0 else -1
            pairs.append((source, entries[last]) if copies else (-1, -1))
        if wanted > available:
            self.free_blocks, self.holders, table.entries = before
            raise ModelOutOfBlocks(wanted, available)
        table.lens = [length + new for length, new in zip(table.lens, news, strict=True)]
        return slots, pairs

    def free(self, table: ModelTable, new_lens: Sequence[int]) -> None:
        for group, row in table.rows():
            for column in reversed(range(self.columns(new_lens[row]), self.columns(table.lens[row]))):
                self.let_go(table.entries[group][row], column)
        table.lens = [min(length, cut) for length, cut in zip(table.lens, new_lens, strict=True)]

    def fork(self, table: ModelTable, pairs: Sequence[Pair]) -> None:
        old_lens = list(table.lens)
        for group, rows in enumerate(table.entries):
            sources = [list(rows[source]) for source, _ in pairs]
            for source in sources:
                for block in source:
                    if block >= 0:
                        self.holders[block] += 1
            for _, destination in pairs:
                for column in reversed(range(table.max_blocks)):
                    self.let_go(rows[destination], column)
            for (_, destination), source in zip(pairs, sources, strict=True):
                table.entries[group][destination] = source
        for source_row, destination in pairs:
            table.lens[destination] = old_lens[source_row]


# ---------------------------------------------------------------------------------------------------------------------
# The ops beside it


@dataclass
class Table:
    block_table: Tensor  # [num_groups, num_seqs, max_blocks], or [num_seqs, max_blocks] for one group
    seq_lens: Tensor  # [num_seqs]
    model: ModelTable


def tensor(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


class World:
    """A pool with its tables and their model; every method does a thing to both and compares."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        tables: Sequence[tuple[int, int, int]] = ((1, 4, 8),),  # (num_groups, num_seqs, max_blocks)
        device: torch.device | str = "cpu",
        functions: ModuleType = ops,
    ) -> None:
        self.device = torch.device(device)
        self.functions = functions
        self.pool = BlockPool(num_blocks, block_size, self.device)
        self.model = Model(num_blocks, block_size)
        self.tables = [self._table(*shape) for shape in tables]

    def _table(self, num_groups: int, num_seqs: int, max_blocks: int) -> Table:
        shape = (num_seqs, max_blocks) if num_groups == 1 else (num_groups, num_seqs, max_blocks)
        block_table = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        seq_lens = torch.zeros(num_seqs, dtype=torch.int32, device=self.device)
        return Table(block_table, seq_lens, ModelTable(num_groups, num_seqs, max_blocks))

    def state(self, table: Table) -> State:
        pool = self.pool
        return table.block_table, table.seq_lens, pool.free_ring, pool.ref_counts, pool.counters

    def allocate(
        self,
        news: Sequence[int],
        *,
        pads: Sequence[int] | None = None,  # [num_seqs + 1]: batch tokens before each row's new ones; after the last
        retain: Sequence[int] | None = None,
        table: int = 0,
    ) -> list[Pair] | None:
        """Pairs to copy, or None when blocks ran out."""
        this = self.tables[table]
        num_groups = len(this.model.entries)
        spans, ends, position = [0 if pads is None else pads[-1]], [], 0 if pads is None else pads[-1]
        for row, new in enumerate(news):
            position += new + (0 if pads is None else pads[row])
            spans.append(position)
            ends.append(position)
        num_tokens = position + (0 if pads is None else pads[-1])
        arguments = (*self.state(this), tensor(spans, torch.int32, self.device), num_tokens, self.pool.block_size)
        options = {
            "num_new": None if pads is None else tensor(news, torch.int32, self.device),
            "retain": None if retain is None else tensor(retain, torch.int32, self.device),
        }
        try:
            slots, pairs = self.model.allocate(this.model, ends, num_tokens, news, retain or [-1] * num_groups)
        except ModelOutOfBlocks as error:
            self._run_out(error, this, lambda: self.functions.allocate(*arguments, **options))
            return None
        slot_mapping, block_mapping = self.functions.allocate(*arguments, **options)
        assert slot_mapping.tolist() == (slots if this.block_table.dim() == 3 else slots[0])
        assert block_mapping.tolist() == [list(pair) for pair in pairs]
        self.compare()
        return [pair for pair in pairs if pair != (-1, -1)]

    def _run_out(self, error: ModelOutOfBlocks, table: Table, allocate: Callable[[], tuple[Tensor, Tensor]]) -> None:
        before = [part.clone() for part in self.state(table)]
        if self.device.type == "cpu":
            with pytest.raises(OutOfBlocksError) as raised:
                allocate()
            assert (raised.value.wanted, raised.value.free) == (error.wanted, error.available)
        else:
            for mapping in allocate():
                assert (mapping == -1).all()
            assert self.pool.counters[2:].tolist() == [1, error.wanted]
            self.pool.counters[2:].zero_()
        for old, now in zip(before, self.state(table), strict=True):
            assert torch.equal(old, now)
        self.compare()

    def free(self, new_lens: Sequence[int], *, table: int = 0) -> None:
        this = self.tables[table]
        lens = tensor(new_lens, torch.int32, self.device)
        self.functions.free(*self.state(this), lens, self.pool.block_size)
        self.model.free(this.model, new_lens)
        self.compare()

    def fork(self, pairs: Sequence[Pair], *, table: int = 0) -> None:
        this = self.tables[table]
        rows = tensor(pairs, torch.int64, self.device).reshape(-1, 2).t().contiguous()
        self.functions.fork(*self.state(this), rows[0], rows[1], self.pool.block_size)
        self.model.fork(this.model, pairs)
        self.compare()

    def compare(self) -> None:
        for table in self.tables:
            grouped = table.block_table if table.block_table.dim() == 3 else table.block_table[None]
            assert grouped.tolist() == table.model.entries
            assert table.seq_lens.tolist() == table.model.lens
        counts, ring = self.pool.ref_counts.tolist(), self.pool.free_ring.tolist()
        head, tail, failures, wanted = self.pool.counters.tolist()
        queue = [ring[position % len(ring)] for position in range(head, tail)]
        assert counts == self.model.holders
        assert queue == list(self.model.free_blocks)
        assert (failures, wanted) == (0, 0)
        assert len(queue) + sum(count > 0 for count in counts) == len(counts)

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def entries(self, row: int, group: int = 0, table: int = 0) -> list[int]:
        return [entry for entry in self.tables[table].model.entries[group][row] if entry >= 0]


# ---------------------------------------------------------------------------------------------------------------------
# Random operations

WORLDS = {  # num_blocks, block_size, tables, retain of each table's groups
    "two_groups": (28, 3, ((2, 4, 7),), ((-1, 4),)),
    "two_tables": (24, 4, ((1, 3, 6), (3, 2, 5)), ((-1,), (-1, 0, 5))),
    "block_size_1": (20, 1, ((2, 3, 9),), ((-1, 2),)),
    "plenty": (200, 5, ((1, 6, 20),), ((-1,),)),
    "one_block": (1, 2, ((1, 3, 2),), ((0,),)),
}
NEVER = {"block_size_1": {"copied"}, "one_block": {"copied"}, "plenty": {"exhausted"}}  # what cannot come up there


class Player:
    """Plays random operations on a world. Rows grow by steps of a token and by prompts; most steps find a full pool."""

    def __init__(self, world: str, seed: int, device: torch.device | str, functions: ModuleType) -> None:
        num_blocks, block_size, tables, self.retain = WORLDS[world]
        self.both = World(num_blocks, block_size, tables, device, functions)
        self.random = random.Random(seed)
        self.done = dict.fromkeys(("allocate", "exhausted", "copied", "free", "fork"), 0)

    def step(self) -> None:
        table = self.random.randrange(len(self.both.tables))
        choice = self.random.random()
        if choice < 0.6:
            self._allocate(table)
        elif choice < 0.8:
            self._free(table)
        else:
            self._fork(table)

    def _allocate(self, table: int) -> None:
        model, dice, block_size = self.both.tables[table].model, self.random, self.both.pool.block_size
        room = [model.max_blocks * block_size - length for length in model.lens]
        wishes = [dice.choice((0, 1, 1, 1, 2, block_size, 2 * block_size + 1)) for _ in room]
        news = [min(wish, left) for wish, left in zip(wishes, room, strict=True)]
        pads = [dice.randrange(3) for _ in range(len(news) + 1)] if dice.random() < 0.3 else None
        retain = [kept + dice.randrange(3) if kept >= 0 else -1 for kept in self.retain[table]]
        pairs = self.both.allocate(news, pads=pads, retain=retain if dice.random() < 0.9 else None, table=table)
        self.done["allocate" if pairs is not None else "exhausted"] += 1
        self.done["copied"] += len(pairs or ())

    def _free(self, table: int) -> None:
        def cut(length: int) -> int:
            block_size = self.both.pool.block_size
            edge = length // block_size * block_size
            whole = (0, edge, max(0, edge - block_size), self.random.randint(0, length))
            return self.random.choice((*whole, length, length + 1, INT32_MAX))

        self.both.free([cut(length) for length in self.both.tables[table].model.lens], table=table)
        self.done["free"] += 1

    def _fork(self, table: int) -> None:
        num_seqs = len(self.both.tables[table].model.lens)
        destinations = self.random.sample(range(num_seqs), self.random.randint(0, num_seqs))
        self.both.fork([(self.random.randrange(num_seqs), row) for row in destinations], table=table)
        self.done["fork"] += 1
