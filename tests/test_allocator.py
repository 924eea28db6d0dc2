"""allocate, free, fork against a model of the allocator that follows its rules block by block.

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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_paged_kv import BlockPool, OutOfBlocksError, ops, reference

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


@pytest.mark.parametrize("world", WORLDS)
def test_random_operations(world: str, device: torch.device) -> None:
    """10^5 operations over all worlds on the CPU."""
    player = Player(world, seed=1, device=device, functions=ops)
    for _ in range(20_000 if device.type == "cpu" else 500):
        player.step()
    never = {outcome for outcome, times in player.done.items() if times == 0}
    assert never == NEVER.get(world, set())


@pytest.mark.parametrize("world", WORLDS)
def test_reference_follows_the_same_rules(world: str) -> None:
    player = Player(world, seed=2, device="cpu", functions=reference)
    for _ in range(500):
        player.step()


# num_seqs = 3, one full and one sliding group; news, pads and cuts are per row
_news = st.lists(st.integers(0, 7), min_size=3, max_size=3)
_pads = st.none() | st.lists(st.integers(0, 2), min_size=4, max_size=4)
_retain = st.none() | st.tuples(st.just(-1), st.integers(0, 5))
_cuts = st.lists(st.integers(0, 20), min_size=3, max_size=3)
_forks = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=3, unique_by=lambda pair: pair[1])
_operations = st.lists(
    st.tuples(st.just("allocate"), _news, _pads, _retain)
    | st.tuples(st.just("free"), _cuts)
    | st.tuples(st.just("fork"), _forks),
    max_size=25,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_blocks=st.integers(1, 20), block_size=st.integers(1, 5), operations=_operations)
def test_any_operations(device: torch.device, num_blocks: int, block_size: int, operations: list[tuple]) -> None:  # type: ignore[type-arg]
    both = World(num_blocks, block_size, ((2, 3, 12),), device)
    for name, *arguments in operations:
        if name == "allocate":
            news, pads, retain = arguments
            room = [12 * block_size - length for length in both.tables[0].model.lens]
            both.allocate([min(new, left) for new, left in zip(news, room, strict=True)], pads=pads, retain=retain)
        elif name == "free":
            both.free(arguments[0])
        else:
            both.fork(arguments[0])
    both.free([0, 0, 0])
    assert both.num_free == num_blocks


# ---------------------------------------------------------------------------------------------------------------------
# Running out


def test_asking_for_one_block_too_many(device: torch.device) -> None:
    both = World(10, 4, ((1, 1, 16),), device)
    assert both.allocate([41]) is None
    assert both.num_free == 10
    assert both.allocate([40]) == []
    assert both.num_free == 0


def test_running_out_at_the_very_last_block_then_freeing_and_going_on(device: torch.device) -> None:
    both = World(3, 4, ((1, 2, 4),), device)
    both.allocate([8, 4])
    assert both.allocate([1, 0]) is None
    assert both.allocate([0, 1]) is None
    both.free([8, 0])
    assert both.allocate([1, 0]) == []
    assert both.entries(0) == [0, 1, 2]
    both.free([0, 0])
    assert both.num_free == 3


def test_exhaustion_counts_all_groups_and_rows_together(device: torch.device) -> None:
    both = World(7, 2, ((2, 2, 4),), device)
    assert both.allocate([4, 4]) is None  # 2 groups x 2 rows x 2 blocks
    assert both.allocate([4, 2]) == []  # 2 groups x 3 blocks


def test_what_the_call_itself_releases_may_be_taken(device: torch.device) -> None:
    both = World(2, 4, ((1, 1, 8),), device)
    both.allocate([8], retain=[3])
    for length in range(8, 32):
        assert both.allocate([1], retain=[3]) == []
        assert len(both.entries(0)) <= 2, f"a window of 4 keys over blocks of 4 spans 2 blocks at {length}"


def test_a_failed_release_is_undone(device: torch.device) -> None:
    both = World(3, 4, ((1, 2, 8),), device)
    both.allocate([8, 4], retain=[0])
    both.fork([(0, 1)])
    assert both.allocate([12, 12], retain=[0]) is None
    assert both.entries(0) == both.entries(1) == [0, 1]


@pytest.mark.parametrize("functions", [ops, reference], ids=["ops", "reference"])
def test_a_row_needs_more_columns_than_its_table_has(functions: ModuleType) -> None:
    both = World(10, 16, ((1, 2, 2),), functions=functions)
    both.allocate([5, 32])
    before = [part.clone() for part in both.state(both.tables[0])]
    spans = torch.tensor([0, 0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_table must have .*3.*row 1.*got 2"):
        functions.allocate(*both.state(both.tables[0]), spans, 1, 16)
    for old, now in zip(before, both.state(both.tables[0]), strict=True):
        assert torch.equal(old, now)
    both.compare()


def test_a_length_beyond_the_table_is_refused() -> None:
    both = World(10, 16, ((1, 1, 2),))
    both.tables[0].seq_lens.fill_(33)
    spans = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"seq_lens must .*got 33"):
        ops.allocate(*both.state(both.tables[0]), spans, 1, 16)


# ---------------------------------------------------------------------------------------------------------------------
# Order: first in, first out, longest-released first


def test_blocks_come_back_tail_first_and_go_out_again_in_that_order(device: torch.device) -> None:
    both = World(6, 2, ((1, 2, 6),), device)
    both.allocate([6, 2])
    both.free([0, INT32_MAX])
    assert list(both.model.free_blocks) == [4, 5, 2, 1, 0]
    both.allocate([0, 8])
    assert both.entries(1) == [3, 4, 5, 2, 1]


def test_groups_come_before_rows(device: torch.device) -> None:
    both = World(8, 2, ((2, 2, 4),), device)
    both.allocate([2, 4])
    assert [both.entries(row, group) for group in range(2) for row in range(2)] == [[0], [1, 2], [3], [4, 5]]
    both.free([0, 0])
    assert list(both.model.free_blocks) == [6, 7, 0, 2, 1, 3, 5, 4]


# ---------------------------------------------------------------------------------------------------------------------
# Sharing


def test_of_the_writers_of_a_shared_block_the_last_writes_in_place(device: torch.device) -> None:
    both = World(8, 4, ((1, 3, 4),), device)
    both.allocate([3, 0, 0])
    both.fork([(0, 1), (0, 2)])
    assert both.allocate([1, 1, 1]) == [(0, 1), (0, 2)]
    assert [both.entries(row) for row in range(3)] == [[1], [2], [0]]


def test_a_holder_that_does_not_write_keeps_the_block(device: torch.device) -> None:
    both = World(8, 4, ((1, 3, 4),), device)
    both.allocate([3, 0, 0])
    both.fork([(0, 1), (0, 2)])
    assert both.allocate([1, 0, 1]) == [(0, 1), (0, 2)]
    assert both.allocate([0, 1, 0]) == []


def test_fork_of_a_fork_then_both_written(device: torch.device) -> None:
    both = World(8, 4, ((1, 3, 4),), device)
    both.allocate([6, 0, 0])
    both.fork([(0, 1)])
    both.fork([(1, 2)])
    assert both.allocate([0, 1, 0]) == [(1, 2)]
    assert both.allocate([0, 0, 1]) == [(1, 3)]
    assert both.allocate([1, 0, 0]) == []
    assert [both.entries(row) for row in range(3)] == [[0, 1], [0, 2], [0, 3]]
    both.free([0, INT32_MAX, INT32_MAX])
    assert list(both.model.free_blocks)[-1] == 1  # block 0 still has two holders


def test_full_blocks_are_never_copied(device: torch.device) -> None:
    both = World(8, 4, ((1, 2, 4),), device)
    both.allocate([8, 0])
    both.fork([(0, 1)])
    assert both.allocate([1, 1]) == []
    assert both.entries(0)[:2] == both.entries(1)[:2] == [0, 1]


def test_crop_to_a_boundary_and_grow_again(device: torch.device) -> None:
    both = World(8, 4, ((1, 2, 4),), device)
    both.allocate([7, 0])
    both.fork([(0, 1)])
    both.free([4, INT32_MAX])
    assert both.allocate([1, 0]) == []  # a new block: nothing of the shared one is written
    both.free([3, INT32_MAX])
    assert both.allocate([1, 0]) == [(0, 3)]  # into the block that both share
    assert both.entries(1) == [0, 1]


@pytest.mark.parametrize(
    "pairs",
    [[], [(0, 0)], [(0, 1), (1, 0)], [(0, 1), (1, 2), (2, 0)], [(3, 0)], [(0, 3)], [(2, 0), (2, 1), (2, 2), (2, 3)]],
    ids=str,
)
def test_rows_are_read_before_any_is_written(pairs: list[Pair], device: torch.device) -> None:
    both = World(12, 2, ((2, 4, 4),), device)
    both.allocate([3, 4, 1, 0])
    both.fork(pairs)
    both.free([0, 0, 0, 0])
    assert both.num_free == 12


def test_reordering_beams_copies_at_most_a_block_each(device: torch.device) -> None:
    both, dice = World(40, 4, ((1, 4, 8),), device), random.Random(0)
    both.allocate([9, 0, 0, 0])
    both.fork([(0, 1), (0, 2), (0, 3)])
    for _ in range(20):
        both.fork([(dice.randrange(4), row) for row in range(4)])
        pairs = both.allocate([1, 1, 1, 1])
        assert pairs is not None
        assert len(pairs) <= 3
    both.free([0, 0, 0, 0])
    assert both.num_free == 40


def test_32_beams_need_no_more_than_the_prompt_and_a_block_each(device: torch.device) -> None:
    both = World(65 + 32, 4, ((1, 32, 66),), device)
    both.allocate([65 * 4 + 1, *[0] * 31])
    both.fork([(0, row) for row in range(1, 32)])
    assert len(both.allocate([1] * 32) or ()) == 31
    assert both.num_free == 0


def test_source_stays_usable_when_a_fork_finds_no_room(device: torch.device) -> None:
    both = World(2, 4, ((1, 2, 4),), device)
    both.allocate([7, 0])
    both.fork([(0, 1)])
    assert both.allocate([1, 1]) is None
    both.free([INT32_MAX, 0])
    assert both.allocate([1, 0]) == []


def test_rejected_tokens_leak_nothing(device: torch.device) -> None:
    both = World(16, 4, ((1, 1, 16),), device)
    both.allocate([5])
    for length in range(5, 30):
        both.allocate([5])
        both.free([length + 1])
        assert both.num_free == 16 - -(-(length + 1) // 4)


def test_rows_of_two_tables_share_a_pool_not_blocks(device: torch.device) -> None:
    both = World(6, 4, ((1, 1, 4), (2, 1, 4)), device)
    both.allocate([5], table=0)
    both.allocate([5], table=1)
    assert both.num_free == 0
    both.free([0], table=0)
    assert both.allocate([3], table=1) == []
    assert both.allocate([1], table=1) == []


# ---------------------------------------------------------------------------------------------------------------------
# Tables of any content


@pytest.mark.parametrize("foreign", [-1, -2, 4, INT32_MAX, -(2**31)])
def test_entries_outside_the_pool_are_not_followed(foreign: int, device: torch.device) -> None:
    both = World(4, 2, ((1, 2, 4),), device)
    table = both.tables[0]
    table.block_table.fill_(foreign)
    table.seq_lens.copy_(torch.tensor([5, 8], dtype=torch.int32))
    spans, zeros = tensor([0, 1, 1], torch.int32, both.device), tensor([0, 0], torch.int32, both.device)
    retain = tensor([0], torch.int32, both.device)
    rows = tensor([0, 1], torch.int64, both.device)
    slots, pairs = ops.allocate(*both.state(table), spans, 1, 2, retain=retain)
    assert slots.tolist() == [-1]  # its block is not one of the pool
    assert (pairs == -1).all()
    ops.fork(*both.state(table), rows, rows.flip(0), 2)
    ops.free(*both.state(table), zeros, 2)
    assert table.seq_lens.tolist() == [0, 0]
    assert both.pool.ref_counts.tolist() == [0, 0, 0, 0]
    assert both.pool.counters.tolist() == [0, 4, 0, 0]


def test_columns_past_the_length_are_not_read(device: torch.device) -> None:
    both = World(6, 2, ((1, 2, 4),), device)
    both.allocate([3, 3])
    both.tables[0].block_table[:, 2:] = 0  # live, but of no meaning there
    state, spans = both.state(both.tables[0]), tensor([0, 0, 0], torch.int32, both.device)
    ops.fork(*state, tensor([0], torch.int64, both.device), tensor([1], torch.int64, both.device), 2)
    ops.allocate(*state, spans, 0, 2)
    ops.free(*state, tensor([0, 0], torch.int32, both.device), 2)
    assert both.pool.ref_counts.tolist() == [0] * 6
    assert both.num_free == 6


# ---------------------------------------------------------------------------------------------------------------------
# Inside a compiled graph


def test_compiled_step_changes_the_same_state(device: torch.device) -> None:
    def step(pool: BlockPool, table: Tensor, lens: Tensor, spans: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        pool.fork(table, lens, rows, rows.flip(0))
        pool.free(table, lens, lens - 1)
        return pool.allocate(table, lens, spans, 6)

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        both = World(16, 4, ((2, 2, 4),), device)
        both.allocate([3, 6])
        table, spans = both.tables[0], tensor([0, 2, 6], torch.int32, both.device)
        rows = tensor([0, 1], torch.int64, both.device)
        mappings = run(both.pool, table.block_table, table.seq_lens, spans, rows)
        results.append([part.tolist() for part in (*both.state(table), *mappings)])
    assert results[0] == results[1]
