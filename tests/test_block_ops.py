"""copy_blocks, swap_blocks, gather_blocks: whole blocks, bit for bit."""

from __future__ import annotations

import pytest
import torch
from op_cases import (
    EIGHT_BIT_DTYPES,
    FLOAT_DTYPES,
    INT32_MAX,
    LAYOUTS,
    attention_case,
    dtype_id,
    fused_views,
    int32,
    make_caches,
    make_table,
)
from torch import Tensor

from torch_paged_kv import ops, reference


def pairs(*values: tuple[int, int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device).reshape(-1, 2)


def numbered(cache: Tensor) -> Tensor:
    """Fill every block with its own number."""
    for block in range(cache.shape[0]):
        cache[block] = torch.full(cache.shape[1:], float(block)).to(cache.dtype)
    return cache


def block_numbers(cache: Tensor) -> list[int]:
    """What `numbered` wrote, now: one number a block, the same in all of it."""
    flat = cache.float().flatten(1)
    assert (flat == flat[:, :1]).all()
    return [int(n) for n in flat[:, 0]]


CASES = {  # pairs of (source, destination), then what each of 6 blocks holds
    "one": (((1, 4),), [0, 1, 2, 3, 1, 5]),
    "chain": (((1, 2), (2, 3), (3, 4)), [0, 1, 1, 2, 3, 5]),
    "chain_backwards": (((3, 4), (2, 3), (1, 2)), [0, 1, 1, 2, 3, 5]),
    "swap": (((0, 5), (5, 0)), [5, 1, 2, 3, 4, 0]),
    "rotation": (((0, 1), (1, 2), (2, 0)), [2, 0, 1, 3, 4, 5]),
    "fan_out": (((2, 0), (2, 1), (2, 5)), [2, 2, 2, 3, 4, 2]),
    "onto_itself": (((3, 3),), [0, 1, 2, 3, 4, 5]),
    "none": ((), [0, 1, 2, 3, 4, 5]),
    "skipped": (((-1, -1), (1, 4), (-1, 2), (3, -1)), [0, 1, 2, 3, 1, 5]),
    "out_of_range": (((6, 0), (0, 6), (INT32_MAX, 1), (1, 2**40), (-(2**63), 3), (5, 1)), [0, 5, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_blocks(case: str, layout: str, device: torch.device) -> None:
    mapping, expected = CASES[case]
    keys, values = [], []
    for _ in range(3):  # layers
        key_cache, value_cache = make_caches(6, 5, 2, 16, 8, layout=layout, device=device)
        keys.append(numbered(key_cache))
        values.append(numbered(value_cache))
    ops.copy_blocks(keys, values, pairs(*mapping, device=device))
    for cache in keys + values:
        assert block_numbers(cache) == expected


@pytest.mark.parametrize("dtype", FLOAT_DTYPES + EIGHT_BIT_DTYPES, ids=dtype_id)
def test_copy_blocks_moves_bytes(dtype: torch.dtype, device: torch.device) -> None:
    """Any bit pattern, NaN payloads included; any block size, so any number of bytes."""
    for block_size, head_size in ((1, 1), (3, 5), (16, 64), (33, 100)):
        storage = torch.randint(0, 256, (5, block_size * 2 * head_size * dtype.itemsize), dtype=torch.uint8)
        cache = storage.to(device).view(dtype).reshape(5, block_size, 2, head_size)
        before = cache.view(torch.uint8).clone()
        ops.copy_blocks([cache], [], pairs((0, 3), (3, 1), device=device))
        assert torch.equal(cache.view(torch.uint8), before[[0, 3, 2, 0, 4]])


def test_copy_blocks_of_whole_storages_and_scales(device: torch.device) -> None:
    """What the library passes: fused storages, and per-slot scales that travel with their blocks."""
    storages = [torch.randn(6, 2, 4 * (16 + 8), device=device) for _ in range(2)]
    scales = [torch.randn(6, 4, 2, device=device) for _ in range(2)]
    expected = [tensor[[0, 1, 0, 3, 4, 2]] for tensor in storages + scales]
    ops.copy_blocks(storages, scales, pairs((0, 2), (2, 5), device=device))
    for actual, right in zip(storages + scales, expected):
        assert torch.equal(actual, right)
    keys, values = fused_views(storages[0], 4, 16)
    assert keys.shape == (6, 4, 2, 16)
    assert values.shape == (6, 4, 2, 8)


def test_copy_blocks_of_pools_of_different_size(device: torch.device) -> None:
    """Layers may differ in block bytes, dtype and number of blocks: a pair outside one of them is skipped there."""
    small, large = (
        torch.arange(3.0, device=device)[:, None].clone(),
        torch.arange(6, device=device).half()[:, None, None],
    )
    large = large.expand(6, 4, 2).contiguous()
    ops.copy_blocks([small, large], [], pairs((0, 2), (1, 5), device=device))
    assert small.flatten().tolist() == [0, 1, 0]
    assert block_numbers(large) == [0, 1, 0, 3, 4, 1]


def test_a_cycle_through_blocks_that_one_pool_lacks(device: torch.device) -> None:
    """There it is no cycle: the pairs that are left copy what was there before."""
    small, large = torch.arange(3.0, device=device)[:, None].clone(), torch.arange(6.0, device=device)[:, None].clone()
    mapping = pairs((10**4, 5), (1, 10**4), (0, 1), (1, 4), (4, 0), (5, 10**4), (2, 2), device=device)
    ops.copy_blocks([small, large], [], mapping)
    assert small.flatten().tolist() == [0, 0, 2]
    assert large.flatten().tolist() == [4, 0, 2, 3, 1, 5]


def test_copy_blocks_without_caches(device: torch.device) -> None:
    ops.copy_blocks([], [], pairs((0, 1), device=device))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_swap_blocks(case: str, layout: str, device: torch.device) -> None:
    mapping, expected = CASES[case]
    sources = [numbered(cache) for cache in make_caches(6, 5, 2, 16, 8, layout=layout, device=device)]
    destinations = [numbered(cache) for cache in make_caches(6, 5, 2, 16, 8, layout="plain", device=device)]
    ops.swap_blocks(sources, destinations, pairs(*mapping, device=device))
    for source, destination in zip(sources, destinations):
        assert block_numbers(source) == [0, 1, 2, 3, 4, 5]
        assert block_numbers(destination) == expected


def test_swap_blocks_between_pools_of_different_size(device: torch.device) -> None:
    source, destination = numbered(torch.zeros(9, 4, 2, device=device)), torch.full((3, 4, 2), -1.0, device=device)
    ops.swap_blocks([source], [destination], pairs((8, 0), (7, 2), (9, 1), (1, 3), device=device))
    assert block_numbers(destination) == [8, -1, 7]
    ops.swap_blocks([source], [destination], pairs((1, 1), (2, 2), device=device))  # the same number, other blocks
    assert block_numbers(destination) == [8, 1, 2]


RUNS = {  # (source, destination, blocks) of 64 KiB
    "long": [(3, 0, 30), (36, 31, 9)],  # of which the last reach past the end
    "short": [(index, 39 - index, 1) for index in range(40)],
    "mixed": [(20, 5, 16), (-1, 3, 1), (4, -1, 1), (0, 21, 1), (7, 22, 2)],
}


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("dense", [True, False], ids=["dense", "apart"])
@pytest.mark.parametrize("case", RUNS)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_swap_blocks_in_runs(case: str, dense: bool, pinned: bool) -> None:
    """Blocks that follow one another may go as one copy, by another engine: the same bytes, out and in."""
    mapping = [(a + i, b + i) if a >= 0 and b >= 0 else (a, b) for a, b, blocks in RUNS[case] for i in range(blocks)]
    width = 16384 if dense else 20000
    gpu = torch.arange(40 * width, device="cuda", dtype=torch.float32).view(40, width)[:, :16384]
    host = torch.full((38, 16384), -1.0)
    expected = host.clone()
    for a, b in mapping:
        if 0 <= a < 40 and 0 <= b < 38:
            expected[b] = gpu[a].cpu()
    host = host.pin_memory() if pinned else host
    ops.swap_blocks([gpu], [host], pairs(*mapping))
    torch.cuda.synchronize()
    assert torch.equal(host, expected)
    back = torch.zeros_like(gpu)
    ops.swap_blocks([host], [back], pairs(*((b, a) for a, b in mapping)))
    moved = [a for a, b in mapping if 0 <= a < 40 and 0 <= b < 38]
    assert torch.equal(back[moved], gpu[moved])
    assert int((back != 0).any(1).sum()) == len(moved)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_swap_blocks_between_devices() -> None:
    host = torch.randn(6, 5, 2, 16).pin_memory()
    gpu = torch.randn(4, 5, 2, 16, device="cuda")
    expected = host.clone()
    expected[5], expected[0] = gpu[1].cpu(), gpu[3].cpu()
    ops.swap_blocks([gpu], [host], pairs((1, 5), (3, 0)))
    torch.cuda.synchronize()
    assert torch.equal(host, expected)
    ops.swap_blocks([host], [gpu], pairs((2, 0), (3, 3)))
    assert torch.equal(gpu[[0, 3]].cpu(), host[[2, 3]])


# ---- gather_blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache_dtype", "scale_kind"),
    [(dtype, kind) for dtype in FLOAT_DTYPES + EIGHT_BIT_DTYPES for kind in ("none", "scalar", "tensor", "head")]
    + [(dtype, "slot") for dtype in EIGHT_BIT_DTYPES],
    ids=dtype_id,
)
def test_gather_blocks(cache_dtype: torch.dtype, scale_kind: str, device: torch.device) -> None:
    case = attention_case(
        [1, 1, 1, 1], [0, 5, 33, 16], cache_dtype=cache_dtype, scale_kind=scale_kind, head_size=24, head_size_v=40,
        device=device,
    )  # fmt: skip
    scales = {name: case.options[name] for name in ("key_scale", "value_scale")}
    tensors = (case.key_cache, case.value_cache, case.block_table, case.seq_lens)
    for max_len in (0, 1, 7, 33, 50):
        for dtype in (None, *FLOAT_DTYPES):
            actual = ops.gather_blocks(*tensors, max_len, dtype=dtype, **scales)
            expected = reference.gather_blocks(*tensors, max_len, dtype=dtype, **scales)
            for a, b in zip(actual, expected):
                assert a.dtype == b.dtype
                assert a.shape == b.shape
                assert torch.equal(a, b)


def test_gather_blocks_is_right_aligned(device: torch.device) -> None:
    cache = torch.arange(40.0, device=device).reshape(10, 4, 1, 1)
    table = int32([7, 2, 5, 1, 9, 8], device).reshape(2, 3)
    key, value = ops.gather_blocks(cache, cache, table, int32([6, 2], device), 8)
    assert key.flatten().tolist() == [0, 0, 28, 29, 30, 31, 8, 9, 0, 0, 0, 0, 0, 0, 4, 5]
    assert torch.equal(key, value)
    key, _ = ops.gather_blocks(cache, cache, table, int32([6, 2], device), 3)
    assert key.flatten().tolist() == [31, 8, 9, 0, 4, 5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_blocks_layouts(layout: str, device: torch.device) -> None:
    case = attention_case([1, 1], [37, 4], layout=layout, block_size=7, head_size=33, head_size_v=20, device=device)
    tensors = (case.key_cache, case.value_cache, case.block_table, case.seq_lens, 40)
    for a, b in zip(ops.gather_blocks(*tensors), reference.gather_blocks(*tensors)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("entry", [-1, 10**6, INT32_MAX, -(2**31)])
def test_gather_blocks_of_unmapped_entries_is_zero(entry: int, device: torch.device) -> None:
    case = attention_case([1], [30], block_size=8, device=device, tail=entry)
    case.block_table[0, 1] = entry
    tensors = (case.key_cache, case.value_cache, case.block_table, case.seq_lens, 30)
    for gathered in ops.gather_blocks(*tensors):
        assert not gathered.isnan().any()
        assert (gathered[0, :, 8:16] == 0).all()
        assert (gathered[0, :, :8] != 0).all()


@pytest.mark.parametrize("length", [-3, INT32_MAX])
def test_gather_blocks_clamps_lengths(length: int, device: torch.device) -> None:
    cache = torch.ones(4, 4, 1, 1, device=device)
    table = make_table([16], 4, 4, extra_columns=0).to(device)
    key, _ = ops.gather_blocks(cache, cache, table, int32([length], device), 20)
    assert int(key.sum()) == (0 if length < 0 else 16)
