"""The other ops: writing, copying blocks, allocation, gathering, and the host time of an eager call."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.cuda_decode import attention, batch_tensors
from benchmarks.pools import BLOCK_SIZE, Pool
from benchmarks.timing import gpu_time, host_time
from torch_paged_kv import ops


def reshape_and_cache(num_tokens: int, cache_dtype: torch.dtype, *, whole_blocks: bool = False) -> dict[str, Any]:
    """New K and V of 8 heads x 128 into random slots, or a prompt into random blocks; all rotates past the L2."""
    pool = Pool.random(2 << 30, 8, 128, BLOCK_SIZE, cache_dtype)
    sets = 24 if num_tokens > 1000 else 96
    keys, values = (torch.randn(sets, num_tokens, 8, 128, device="cuda").bfloat16() for _ in range(2))
    if whole_blocks:
        blocks = [torch.randperm(pool.num_blocks, device="cuda")[: num_tokens // BLOCK_SIZE] for _ in range(sets)]
        offsets = torch.arange(BLOCK_SIZE, device="cuda")
        slots = torch.stack([(b[:, None] * BLOCK_SIZE + offsets).flatten() for b in blocks])
    else:
        num_slots = pool.num_blocks * BLOCK_SIZE
        slots = torch.stack([torch.randperm(num_slots, device="cuda")[:num_tokens] for _ in range(sets)])
    calls = [
        lambda i=i: ops.reshape_and_cache(keys[i], values[i], pool.key_cache, pool.value_cache, slots[i])
        for i in range(sets)
    ]
    seconds = gpu_time(calls)
    num_bytes = num_tokens * 8 * 128 * 2 * (2 + cache_dtype.itemsize)
    dtype = str(cache_dtype).removeprefix("torch.")
    name = f"reshape_and_cache {num_tokens} tokens, {dtype}" + (", whole blocks" if whole_blocks else "")
    return {"op": name, "us": seconds * 1e6, "GB/s": num_bytes / seconds * 1e-9}


def copy_blocks(num_pairs: int, live_pairs: int, num_layers: int = 32) -> dict[str, Any]:
    """Blocks of 32 KiB in K and V of every layer; `live_pairs` of `num_pairs` are no -1."""
    num_blocks = 2 * num_pairs + 64
    shape = (num_blocks, BLOCK_SIZE, 8, 128)
    caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2 * num_layers)]
    mapping = torch.full((num_pairs, 2), -1, dtype=torch.int64)
    mapping[:live_pairs] = torch.randperm(num_blocks)[: 2 * live_pairs].view(-1, 2)
    mapping = mapping.cuda()
    calls = [lambda: ops.copy_blocks(caches[:num_layers], caches[num_layers:], mapping)] * (
        4 if live_pairs > 100 else 32
    )
    seconds = gpu_time(calls)
    num_bytes = 2 * live_pairs * num_layers * 2 * (32 << 10)  # read and written
    name = f"copy_blocks {live_pairs} of {num_pairs} pairs, {num_layers} layers"
    return {"op": name, "us": seconds * 1e6, "GB/s": num_bytes / seconds * 1e-9}


def allocate(rows: int, tokens_per_row: int, num_groups: int = 1, window: int | None = None) -> dict[str, Any]:
    """A step's allocation, run `steps` times in a graph whose replays go on growing the rows."""
    steps, replays, length = 32, 7, 1000
    width = -(-(length + (replays + 4) * steps * tokens_per_row) // BLOCK_SIZE) + 1
    num_blocks = num_groups * rows * width
    table = torch.full((num_groups, rows, width), -1, dtype=torch.int32, device="cuda")
    lens = torch.zeros(rows, dtype=torch.int32, device="cuda")
    ring = torch.randperm(num_blocks).to("cuda", torch.int32)
    counts = torch.zeros(num_blocks, dtype=torch.int32, device="cuda")
    counters = torch.tensor([0, num_blocks, 0, 0], device="cuda")
    retain = None if window is None else torch.full((num_groups,), window - 1, dtype=torch.int32, device="cuda")
    state = (table, lens, ring, counts, counters)

    def step(tokens: int, cu: torch.Tensor) -> None:
        ops.allocate(*state, cu, rows * tokens, BLOCK_SIZE, retain=retain)

    def spans(tokens: int) -> torch.Tensor:
        return torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device="cuda")

    step(length, spans(length))
    cu = spans(tokens_per_row)
    seconds = gpu_time([lambda: step(tokens_per_row, cu)] * steps, replays)
    assert counters[2] == 0
    name = f"allocate {rows} rows x {tokens_per_row}, {num_groups} groups" + (f", window {window}" if window else "")
    return {"op": name, "us": seconds * 1e6}


def free_and_fork() -> list[dict[str, Any]]:
    """Beam reorder of 64 rows x 8k tokens, and freeing nothing of 256 rows (the cost of asking)."""
    rows, blocks = 64, 512
    num_blocks = 2 * rows * blocks
    table = torch.arange(rows * blocks, dtype=torch.int32, device="cuda").view(rows, blocks).contiguous()
    lens = torch.full((rows,), blocks * BLOCK_SIZE, dtype=torch.int32, device="cuda")
    ring = torch.arange(num_blocks, dtype=torch.int32, device="cuda").roll(rows * blocks)
    counts = torch.zeros(num_blocks, dtype=torch.int32, device="cuda")
    counts[: rows * blocks] = 1
    counters = torch.tensor([0, num_blocks - rows * blocks, 0, 0], device="cuda")
    state = (table, lens, ring, counts, counters)
    source = torch.arange(rows, device="cuda")
    target = source.roll(1)
    fork = gpu_time([lambda: ops.fork(*state, source, target, BLOCK_SIZE)] * 8)
    free = gpu_time([lambda: ops.free(*state, lens, BLOCK_SIZE)] * 8)
    return [
        {"op": f"fork {rows} rows x {blocks} blocks", "us": fork * 1e6},
        {"op": f"free 0 of {rows} rows", "us": free * 1e6},
    ]


def gather_and_merge() -> list[dict[str, Any]]:
    pool = Pool.random(4 << 30, 8, 128, BLOCK_SIZE, torch.bfloat16)
    table = torch.randperm(pool.num_blocks)[: 32 * 256].view(32, 256).to("cuda", torch.int32)
    lens = torch.full((32,), 4096, dtype=torch.int32, device="cuda")
    gather = gpu_time([lambda: ops.gather_blocks(pool.key_cache, pool.value_cache, table, lens, 4096)] * 10)
    gathered = 32 * 4096 * 8 * 128 * 2 * 2 * 2
    outs = [torch.randn(8192, 32, 128, device="cuda").bfloat16() for _ in range(2)]
    lses = [torch.randn(8192, 32, device="cuda") for _ in range(2)]
    merge = gpu_time([lambda: ops.merge_attention_states(outs[0], lses[0], outs[1], lses[1])] * 10)
    merged = 3 * outs[0].numel() * 2 + 3 * lses[0].numel() * 4
    return [
        {"op": "gather_blocks 32 x 4096", "us": gather * 1e6, "GB/s": gathered / gather * 1e-9},
        {"op": "merge_attention_states 8192 x 32", "us": merge * 1e6, "GB/s": merged / merge * 1e-9},
    ]


def swap_blocks(num_pairs: int = 256, num_layers: int = 32) -> list[dict[str, Any]]:
    """Blocks of 32 KiB in K and V of every layer, pinned host memory to GPU and back."""
    shape = (num_pairs, BLOCK_SIZE, 8, 128)
    gpu = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2 * num_layers)]
    host = [torch.zeros(shape, dtype=torch.bfloat16).pin_memory() for _ in range(2 * num_layers)]
    order = torch.randperm(num_pairs)
    mapping = torch.stack([order, order.roll(1)], dim=1)
    num_bytes = num_pairs * 2 * num_layers * (32 << 10)
    rows = []
    for name, source, target in (("in", host, gpu), ("out", gpu, host)):
        seconds = gpu_time([lambda: ops.swap_blocks(source, target, mapping)] * 2, 3)  # noqa: B023
        rows.append({"op": f"swap_blocks {name}", "us": seconds * 1e6, "GB/s": num_bytes / seconds * 1e-9})
    return rows


def host_times() -> list[dict[str, Any]]:
    """Eager calls of a batch of 1 x 16 tokens, so that the GPU keeps up."""
    pool = Pool.random(64 << 20, 8, 128, BLOCK_SIZE, torch.bfloat16)
    query, lens, cu = batch_tensors(32, 128, 1, 16, 1, torch.bfloat16)
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    key = torch.randn(1, 8, 128, device="cuda").bfloat16()
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    raw = torch.ops.paged_kv.paged_attention.default
    options = {"scale": 128**-0.5}
    return [
        {"op": "host: ops.paged_attention", "us": 1e6 * host_time(lambda: attention(pool, query, table, lens, cu, 1))},
        {
            "op": "host: torch.ops.paged_kv.paged_attention",
            "us": 1e6 * host_time(lambda: raw(query, pool.key_cache, pool.value_cache, table, lens, cu, 1, **options)),
        },
        {
            "op": "host: ops.reshape_and_cache",
            "us": 1e6 * host_time(lambda: ops.reshape_and_cache(key, key, pool.key_cache, pool.value_cache, slots)),
        },
    ]


def run() -> list[dict[str, Any]]:
    return [
        reshape_and_cache(1, torch.bfloat16),
        reshape_and_cache(64, torch.bfloat16),
        reshape_and_cache(8192, torch.bfloat16),
        reshape_and_cache(8192, torch.bfloat16, whole_blocks=True),
        reshape_and_cache(8192, torch.float8_e4m3fn),
        copy_blocks(1024, 1024),
        copy_blocks(256, 1),
        copy_blocks(256, 0),
        allocate(256, 1),
        allocate(1, 1),
        allocate(256, 1, num_groups=2, window=512),
        allocate(8, 1024),
        *free_and_fork(),
        *gather_and_merge(),
        *swap_blocks(),
        *host_times(),
    ]
