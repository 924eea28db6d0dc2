"""BlockPool: the host's view of the allocator, growth, and the sizes a pool can be asked for."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torch_paged_kv import BlockPool, OutOfBlocksError
from torch_paged_kv import pool as pool_module
from torch_paged_kv.pool import blocks_for, free_memory

Table = tuple[Tensor, Tensor]


def make_table(num_seqs: int, max_blocks: int, device: torch.device, num_groups: int = 1) -> Table:
    block_table = torch.full((num_groups, num_seqs, max_blocks), -1, dtype=torch.int32, device=device)
    return block_table, torch.zeros(num_seqs, dtype=torch.int32, device=device)


def add_tokens(pool: BlockPool, table: Table, news: list[int]) -> None:
    spans = torch.tensor([0, *news]).cumsum(0).to(torch.int32).to(pool.device)
    pool.allocate(*table, spans, sum(news))


def fork(pool: BlockPool, table: Table, source: int, destination: int) -> None:
    pool.fork(*table, torch.tensor([source], device=pool.device), torch.tensor([destination], device=pool.device))


def cut(pool: BlockPool, table: Table, lens: list[int]) -> None:
    pool.free(*table, torch.tensor(lens, dtype=torch.int32, device=pool.device))


def test_a_new_pool_is_free(device: torch.device) -> None:
    pool = BlockPool(10, device=device)
    assert (pool.num_blocks, pool.block_size, pool.num_free) == (10, 16, 10)
    assert pool.device.type == device.type
    assert {name: (b.dtype, tuple(b.shape)) for name, b in pool.named_buffers()} == {
        "free_ring": (torch.int32, (10,)),
        "ref_counts": (torch.int32, (10,)),
        "counters": (torch.int64, (4,)),
    }
    assert repr(pool).startswith("BlockPool(num_blocks=10, block_size=16, device=")
    pool.check()


def test_state_is_not_saved_with_a_model() -> None:
    assert not nn.ModuleDict({"pool": BlockPool(4)}).state_dict()


def test_stats_are_exact(device: torch.device) -> None:
    pool, table = BlockPool(10, 4, device), make_table(3, 5, device)
    add_tokens(pool, table, [10, 1, 0])
    assert pool.stats() == {"total": 10, "free": 6, "referenced": 4, "shared": 0, "failures": 0}
    fork(pool, table, 0, 2)
    assert pool.stats() == {"total": 10, "free": 6, "referenced": 4, "shared": 3, "failures": 0}
    add_tokens(pool, table, [0, 0, 1])
    assert pool.stats() == {"total": 10, "free": 5, "referenced": 5, "shared": 2, "failures": 0}
    cut(pool, table, [0, 0, 0])
    assert pool.stats() == {"total": 10, "free": 10, "referenced": 0, "shared": 0, "failures": 0}


def test_a_deepcopy_is_another_pool() -> None:
    pool, table = BlockPool(4, 4), make_table(1, 4, torch.device("cpu"))
    twin = copy.deepcopy(pool)
    add_tokens(pool, table, [5])
    assert (pool.num_free, twin.num_free) == (2, 4)


def test_a_pool_made_in_inference_mode_serves_outside() -> None:
    table = make_table(1, 4, torch.device("cpu"))
    with torch.inference_mode():
        pool = BlockPool(2, 4)
        pool.grow(3)
    add_tokens(pool, table, [5])
    pool.reset()
    assert pool.num_free == 3


@pytest.mark.parametrize(("name", "arguments"), [("num_blocks", (0, 16)), ("block_size", (4, 0))])
def test_sizes_below_one_are_refused(name: str, arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        BlockPool(*arguments)


# ---------------------------------------------------------------------------------------------------------------------
# grow, reset


def test_growth_keeps_tables_and_the_order_of_free_blocks(device: torch.device) -> None:
    pool, table = BlockPool(4, 2, device), make_table(2, 8, device)
    add_tokens(pool, table, [4, 2])
    cut(pool, table, [0, 2])  # the queue is now 3, 1, 0 and wraps around the ring's end
    pool.grow(6)
    assert (pool.num_blocks, pool.num_free) == (6, 5)
    pool.check(table)
    add_tokens(pool, table, [0, 10])
    assert table[0][0, 1, :6].tolist() == [2, 3, 1, 0, 4, 5]
    pool.check(table)
    assert pool.num_free == 0


def test_growth_of_an_exhausted_pool(device: torch.device) -> None:
    pool, table = BlockPool(1, 4, device), make_table(1, 4, device)
    add_tokens(pool, table, [4])
    pool.grow(2)
    add_tokens(pool, table, [4])
    assert table[0][0, 0, :2].tolist() == [0, 1]


def test_a_pool_never_shrinks() -> None:
    pool = BlockPool(4)
    pool.grow(4)
    with pytest.raises(ValueError, match="num_blocks must be >= 4, got 3"):
        pool.grow(3)


def test_reset_frees_everything_in_place(device: torch.device) -> None:
    pool, table = BlockPool(4, 2, device), make_table(2, 8, device)
    addresses = [buffer.data_ptr() for buffer in pool.buffers()]
    add_tokens(pool, table, [4, 2])
    cut(pool, table, [0, 2])
    pool.reset()
    assert [buffer.data_ptr() for buffer in pool.buffers()] == addresses
    pool.check()
    fresh = make_table(1, 4, device)
    add_tokens(pool, fresh, [8])
    assert fresh[0][0, 0].tolist() == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------------------------------------
# Running out


def test_running_out_raises_and_changes_nothing() -> None:
    pool, table = BlockPool(10, 4), make_table(1, 16, torch.device("cpu"))
    with pytest.raises(OutOfBlocksError) as raised:
        add_tokens(pool, table, [44])
    assert (raised.value.wanted, raised.value.free, raised.value.evictable) == (11, 10, 0)
    assert isinstance(raised.value, RuntimeError)
    assert pool.num_free == 10
    pool.check(table)
    pool.raise_if_exhausted()  # nothing is left to report
    add_tokens(pool, table, [40])


def test_the_sticky_status_is_reported_once(device: torch.device) -> None:
    pool = BlockPool(10, 4, device)
    pool.raise_if_exhausted()
    pool.counters[2:] = torch.tensor([3, 12])
    assert pool.stats()["failures"] == 3
    with pytest.raises(OutOfBlocksError, match="out of blocks: wanted 12, free 10, evictable 0"):
        pool.raise_if_exhausted()
    pool.raise_if_exhausted()
    pool.check()


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(OutOfBlocksError(5, 3, 1)))
    assert (error.wanted, error.free, error.evictable, str(error)) == (5, 3, 1, str(OutOfBlocksError(5, 3, 1)))


# ---------------------------------------------------------------------------------------------------------------------
# check


@pytest.fixture
def held() -> tuple[BlockPool, Table]:
    """Blocks 0 and 1 are held, 0 twice; 2, 3 and 4 are free."""
    pool, table = BlockPool(5, 4), make_table(2, 3, torch.device("cpu"))
    add_tokens(pool, table, [7, 0])
    fork(pool, table, 0, 1)
    cut(pool, table, [7, 4])
    pool.check(table)
    return pool, table


def test_check_counts_the_entries_of_all_tables(held: tuple[BlockPool, Table]) -> None:
    pool, table = held
    other = make_table(1, 3, torch.device("cpu"), num_groups=2)
    add_tokens(pool, other, [4])
    pool.check(table, other)
    pool.check(table, (other[0][0], other[1]), (other[0][1], other[1]))
    with pytest.raises(RuntimeError, match="block 2 is held by 0 table entries, but its reference count is 1"):
        pool.check(table)


def test_check_finds_a_lost_reference(held: tuple[BlockPool, Table]) -> None:
    pool, table = held
    pool.ref_counts[0] = 1
    pool.check()  # only the table tells
    with pytest.raises(RuntimeError, match="block 0 is held by 2 table entries, but its reference count is 1"):
        pool.check(table)


def test_check_finds_a_leaked_block(held: tuple[BlockPool, Table]) -> None:
    pool, _ = held
    pool.ref_counts[1] = 0
    with pytest.raises(RuntimeError, match="block 1 is not free, but its reference count is 0"):
        pool.check()


def test_check_finds_a_free_block_that_is_held(held: tuple[BlockPool, Table]) -> None:
    pool, _ = held
    pool.ref_counts[3] = 1
    with pytest.raises(RuntimeError, match="block 3 is free, but its reference count is 1"):
        pool.check()


def test_check_finds_a_block_freed_twice(held: tuple[BlockPool, Table]) -> None:
    pool, _ = held
    pool.free_ring[3] = 2
    with pytest.raises(RuntimeError, match="block 2 is 2 times in the free queue"):
        pool.check()


def test_check_finds_a_foreign_block(held: tuple[BlockPool, Table]) -> None:
    pool, table = held
    table[0][0, 1, 0] = 5
    with pytest.raises(RuntimeError, match=r"block 5 in a table must be in 0 \.\. 4"):
        pool.check(table)


def test_check_finds_a_queue_longer_than_the_pool(held: tuple[BlockPool, Table]) -> None:
    pool, _ = held
    pool.counters[1] += 3
    with pytest.raises(RuntimeError, match=r"free blocks must be 0 \.\. 5, got 6"):
        pool.check()


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def test_a_size_is_given_in_one_of_four_ways() -> None:
    assert blocks_for(block_size=16, block_bytes=1000, num_blocks=7) == 7
    assert [blocks_for(block_size=16, block_bytes=1000, num_tokens=n) for n in (1, 16, 17)] == [1, 1, 2]
    assert blocks_for(block_size=16, block_bytes=1000, bytes=7999) == 7
    half = free_memory("cpu") / 2 / 2**20
    assert blocks_for(block_size=16, block_bytes=2**20, fraction=0.5) == pytest.approx(half, rel=0.2)


def test_a_gibibyte_is_met_within_one_block() -> None:
    block_bytes = 16 * 8 * (128 + 128) * 32 * 2
    taken = blocks_for(block_size=16, block_bytes=block_bytes, bytes=2**30) * block_bytes
    assert 2**30 - block_bytes < taken <= 2**30


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({}, "size must be exactly one of num_blocks, num_tokens, bytes, fraction, got none"),
        ({"bytes": 1, "num_blocks": 1}, "size must be exactly one of .*, got num_blocks and bytes"),
        ({"num_blocks": 0}, "num_blocks must be >= 1, got 0"),
        ({"num_tokens": 0}, "num_tokens must be >= 1, got 0"),
        ({"bytes": 999}, "bytes must be >= 1000, got 999"),
        ({"fraction": 0.0}, "fraction must be above 0 and at most 1, got 0.0"),
        ({"fraction": 1.5}, "fraction must be above 0 and at most 1, got 1.5"),
        ({"fraction": 1e-12}, "fraction must make at least one block of 1000 bytes, got 1e-12 of"),
    ],
    ids=str,
)
def test_sizes_that_make_no_pool_are_refused(size: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks_for(block_size=16, block_bytes=1000, **size)  # type: ignore[arg-type]


def test_free_memory_is_refused_where_nothing_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"device must be a CPU or CUDA device .*, got meta"):
        free_memory("meta")
    monkeypatch.setattr(pool_module, "_available_to_system", lambda: None)
    monkeypatch.setattr(pool_module, "_available_to_container", lambda: None)
    with pytest.raises(ValueError, match="give num_blocks or bytes"):
        free_memory("cpu")


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 200\n")
    assert pool_module._available_to_container(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert pool_module._available_to_container(tmp_path) is None
    assert pool_module._available_to_container(tmp_path / "none") is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_free_memory_of_cuda() -> None:
    assert 0 < free_memory("cuda") <= torch.cuda.get_device_properties(0).total_memory
