"""allocate, free, fork against a model of the allocator that follows its rules block by block."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from allocator_model import INT32_MAX, NEVER, WORLDS, Pair, Player, World, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_paged_kv import BlockPool, ops, reference

# ---------------------------------------------------------------------------------------------------------------------
# Random operations


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


@pytest.mark.parametrize("functions", [ops, reference], ids=["ops", "reference"])
def test_columns_past_the_length_are_not_read(functions: ModuleType, device: torch.device) -> None:
    both = World(6, 2, ((1, 2, 4),), device)
    both.allocate([3, 3])
    both.tables[0].block_table[:, 2:] = 0  # live, but of no meaning there
    state, spans = both.state(both.tables[0]), tensor([0, 0, 0], torch.int32, both.device)
    functions.fork(*state, tensor([0], torch.int64, both.device), tensor([1], torch.int64, both.device), 2)
    assert both.pool.ref_counts.tolist() == [2, 2, 0, 0, 0, 0]
    assert both.tables[0].block_table.tolist() == [[0, 1, 0, 0]] * 2
    functions.allocate(*state, spans, 0, 2)
    functions.free(*state, tensor([0, 0], torch.int32, both.device), 2)
    assert both.pool.ref_counts.tolist() == [0] * 6
    assert both.num_free == 6


@pytest.mark.parametrize("functions", [ops, reference], ids=["ops", "reference"])
def test_a_fork_touches_used_columns_alone(functions: ModuleType, device: torch.device) -> None:
    """A longer row becomes a copy of a shorter one: what it held more is unmapped, what was never used stays."""
    both = World(6, 2, ((1, 2, 5),), device)
    both.allocate([1, 5])
    both.tables[0].block_table[0, 1:], both.tables[0].block_table[1, 3:] = -7, 4711
    rows = [tensor([row], torch.int64, both.device) for row in (0, 1)]
    functions.fork(*both.state(both.tables[0]), *rows, 2)
    assert both.tables[0].block_table.tolist() == [[0, -7, -7, -7, -7], [0, -1, -1, 4711, 4711]]
    assert both.pool.ref_counts.tolist() == [2, 0, 0, 0, 0, 0]
    assert both.tables[0].seq_lens.tolist() == [1, 1]


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
