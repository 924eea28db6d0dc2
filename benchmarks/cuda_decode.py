"""Decode attention: GPU time against the read ceiling, over batch, context, heads and query length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.pools import BLOCK_SIZE, Pool, tables
from benchmarks.timing import Call, gpu_time
from torch_paged_kv import ops, reference

# (query heads, kv heads, head size), batch, context, target as a share of the read ceiling (None: none was set)
SHAPES: list[tuple[tuple[int, int, int], int, int, float | None]] = [
    ((32, 8, 128), 1, 1024, None),
    ((32, 8, 128), 1, 8192, 0.55),
    ((32, 8, 128), 1, 32768, None),
    ((32, 8, 128), 8, 1024, 0.55),
    ((32, 8, 128), 8, 8192, 0.88),
    ((32, 8, 128), 64, 1024, 0.85),
    ((32, 8, 128), 64, 8192, 0.97),
    ((32, 8, 128), 256, 1024, 0.92),
    ((64, 8, 128), 1, 8192, 0.55),
    ((64, 8, 128), 8, 1024, 0.55),
    ((64, 8, 128), 8, 8192, 0.88),
    ((64, 8, 128), 64, 1024, 0.85),
    ((64, 8, 128), 64, 8192, 0.97),
    ((64, 8, 128), 256, 1024, 0.92),
    ((32, 32, 128), 1, 8192, 0.80),
    ((32, 32, 128), 8, 1024, None),
    ((32, 32, 128), 64, 1024, None),
    ((32, 8, 64), 64, 8192, None),
    ((32, 8, 256), 64, 8192, None),
]


def attention(pool: Pool, query: Tensor, table: Tensor, lens: Tensor, cu: Tensor, q_len: int, **options: Any) -> Tensor:
    return ops.paged_attention(
        query, pool.key_cache, pool.value_cache, table, lens, cu, q_len, scale=query.shape[-1] ** -0.5, **options
    )


def batch_tensors(
    heads: int, head_size: int, batch: int, context: int, q_len: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    query = torch.randn(batch * q_len, heads, head_size, device="cuda").to(dtype)
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    cu = torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device="cuda")
    return query, lens, cu


def check(pool: Pool, heads: int, head_size: int, q_len: int) -> float:
    """Relative error of a ragged batch against the float64 reference."""
    context = [700, 33, 1, 2048][:4]
    context = [max(c, q_len) for c in context]
    query, _, cu = batch_tensors(heads, head_size, len(context), 0, q_len, pool.storage.dtype)
    lens = torch.tensor(context, dtype=torch.int32, device="cuda")
    table = torch.randperm(pool.num_blocks)[: 4 * 128].view(4, 128).to("cuda", torch.int32)
    out = attention(pool, query, table, lens, cu, q_len)
    exact, _ = reference.attention_in(
        torch.float64, query, pool.key_cache, pool.value_cache, table, lens, cu, q_len, scale=head_size**-0.5
    )
    return float((out.double() - exact).norm() / exact.norm())


def measured(
    op: str,
    heads: tuple[int, int, int],
    batch: int,
    context: int,
    itemsize: int,
    calls: list[Call],
    read_ceiling: float,
) -> dict[str, Any]:
    """A row of a table: calls that each read `context` keys and values of `batch` sequences, `itemsize` bytes each."""
    num_heads, kv_heads, head_size = heads
    seconds = gpu_time(calls)
    num_bytes = batch * context * kv_heads * head_size * 2 * itemsize
    return {
        "op": op,
        "heads": f"{num_heads}/{kv_heads}",
        "head_size": head_size,
        "batch": batch,
        "context": context,
        "us": seconds * 1e6,
        "GB/s": num_bytes / seconds * 1e-9,
        "share": num_bytes / seconds / read_ceiling,
    }


def run(read_ceiling: float, q_lens: tuple[int, ...] = (1,), shapes: Any = SHAPES) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    pool, key = None, None
    for (heads, kv_heads, head_size), batch, context, target in shapes:
        if key != (kv_heads, head_size):
            pool, key = None, (kv_heads, head_size)
            pool = Pool.random(10 << 30, kv_heads, head_size, BLOCK_SIZE, torch.bfloat16)
        assert pool is not None
        for q_len in q_lens:
            query, lens, cu = batch_tensors(heads, head_size, batch, context, q_len, torch.bfloat16)
            calls = [
                lambda table=table: attention(pool, query, table, lens, cu, q_len)  # noqa: B023
                for table in tables(pool, batch, context)
            ]
            row = measured("paged_attention", (heads, kv_heads, head_size), batch, context, 2, calls, read_ceiling)
            rows.append(
                row
                | {
                    "q_len": q_len,
                    "target": target if q_len == 1 else None,
                    "error": check(pool, heads, head_size, q_len),
                }
            )
    return rows


EIGHT_BIT_SHAPES = [((h, 8, 128), b, c, t) for h in (32, 64) for b, c, t in ((8, 8192, 0.70), (64, 8192, 0.90))]


def scales_of(kind: str, pool: Pool, kv_heads: int) -> dict[str, Tensor]:
    if kind == "head":
        return {name: torch.rand(kv_heads, device="cuda") + 0.5 for name in ("key_scale", "value_scale")}
    # [num_blocks, block_size, num_kv_heads], the slots of a (block, head) side by side
    shape = (pool.num_blocks, kv_heads, pool.block_size)
    return {name: (torch.rand(shape, device="cuda") + 0.5).transpose(1, 2) for name in ("key_scale", "value_scale")}


def run_eight_bit(read_ceiling: float) -> list[dict[str, Any]]:
    """8-bit caches under bfloat16 queries; the scales' own bytes are not counted as read."""
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float8_e4m3fn, torch.int8):
        for (heads, kv_heads, head_size), batch, context, target in EIGHT_BIT_SHAPES:
            pool = Pool.random(6 << 30, kv_heads, head_size, BLOCK_SIZE, dtype)
            query, lens, cu = batch_tensors(heads, head_size, batch, context, 1, torch.bfloat16)
            for kind in ("head", "slot"):
                scales = scales_of(kind, pool, kv_heads)
                calls = [
                    lambda table=table, scales=scales: attention(pool, query, table, lens, cu, 1, **scales)  # noqa: B023
                    for table in tables(pool, batch, context)
                ]
                op = f"paged_attention, {str(dtype).removeprefix('torch.')}, scale per {kind}"
                row = measured(op, (heads, kv_heads, head_size), batch, context, 1, calls, read_ceiling)
                rows.append(row | {"target": target})
    return rows
