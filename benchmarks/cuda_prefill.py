"""Prefill attention: operations a second against a large matrix product, and a batch of prefills beside decodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.cuda_decode import attention
from benchmarks.pools import BLOCK_SIZE, Pool, tables
from benchmarks.timing import gpu_time
from torch_paged_kv import reference

# (query heads, kv heads, head size), batch, new tokens, tokens before, target as a share of the matrix product
SHAPES: list[tuple[tuple[int, int, int], int, int, int, float | None]] = [
    ((32, 8, 128), 1, 8192, 0, 0.86),
    ((32, 8, 128), 1, 8192, 8192, 0.85),
    ((32, 8, 128), 4, 4096, 0, 0.80),
    ((32, 8, 128), 4, 4096, 8192, None),
    ((32, 8, 128), 16, 1024, 0, None),
    ((32, 8, 128), 1, 512, 8192, None),
    ((32, 8, 128), 1, 64, 4096, None),
    ((32, 8, 128), 1, 64, 32768, None),
    ((64, 8, 128), 1, 8192, 0, None),
    ((32, 8, 64), 1, 8192, 0, 0.62),
    ((32, 8, 256), 1, 8192, 0, 0.90),
]
# Of the kernel of every chip, which Hopper takes where blocks are no multiple of 16 tokens.
PORTABLE_BLOCK_SIZE = 24
PORTABLE_SHAPES: list[tuple[tuple[int, int, int], int, int, int, float | None]] = [
    ((32, 8, 128), 1, 8192, 0, 0.40),
    ((32, 8, 128), 4, 4096, 8192, None),
    ((32, 32, 128), 1, 8192, 0, None),
    ((32, 8, 64), 1, 8192, 0, None),
    ((32, 8, 256), 1, 8192, 0, None),
]
EIGHT_BIT_SHAPES: list[tuple[tuple[int, int, int], int, int, int, float | None]] = [
    ((32, 8, 128), 1, 8192, 0, None),
    ((32, 8, 128), 4, 4096, 8192, None),
    ((32, 8, 128), 1, 64, 4096, None),
]
# Prefills beside decodes: batch, new tokens and keys of a prefill, batch and keys of the decodes, target in us.
MIXES: list[tuple[int, int, int, int, int, float | None]] = [
    (1, 2048, 2048, 63, 4096, 300.0),
    (1, 2048, 2048, 63, 1024, None),
    (1, 8192, 8192, 63, 4096, None),
    (4, 2048, 2048, 28, 8192, None),
    (1, 512, 512, 63, 4096, None),
    (1, 512, 8192, 63, 4096, None),
    (4, 256, 4352, 60, 4096, None),
    (8, 512, 512, 200, 512, None),
]


def check(pool: Pool, heads: int) -> float:
    """Relative error of a ragged batch against the float64 reference."""
    spans, lens = [300, 1, 513, 90], [300, 900, 700, 1000]
    head_size = pool.key_cache.shape[-1]
    query, cu, seq_lens = batch_tensors(spans, lens, heads, head_size)
    table = torch.randperm(pool.num_blocks)[: 4 * 64].view(4, 64).to("cuda", torch.int32)
    torch.full_like(query, float("nan"))  # freed at once: the memory of the result, so that what is not written shows
    out = attention(pool, query, table, seq_lens, cu, max(spans))
    exact, _ = reference.attention_in(
        torch.float64, query, pool.key_cache, pool.value_cache, table, seq_lens, cu, max(spans), scale=head_size**-0.5
    )
    return float((out.double() - exact).norm() / exact.norm())


def batch_tensors(spans: list[int], lens: list[int], heads: int, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [tokens, heads, head_size] bfloat16, cu_seqlens_q, seq_lens."""
    query = torch.randn(sum(spans), heads, head_size, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, *spans], device="cuda").cumsum(0).int()
    return query, cu, torch.tensor(lens, dtype=torch.int32, device="cuda")


def operations(heads: int, head_size: int, batch: int, new: int, prior: int) -> float:
    """4 x head size for each (query, visible key) pair."""
    return 4.0 * head_size * heads * batch * (new * prior + new * (new + 1) / 2)


def run(matmul_ceiling: float) -> list[dict[str, Any]]:
    rows = run_shapes("paged_attention", SHAPES, BLOCK_SIZE, matmul_ceiling)
    rows += run_shapes("paged_attention, every chip", PORTABLE_SHAPES, PORTABLE_BLOCK_SIZE, matmul_ceiling)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        name = f"paged_attention, {str(dtype).removeprefix('torch.')}"
        rows += run_shapes(name, EIGHT_BIT_SHAPES, BLOCK_SIZE, matmul_ceiling, dtype)
    return rows + run_mixes()


def run_shapes(
    op: str, shapes: Any, block_size: int, matmul_ceiling: float, dtype: torch.dtype = torch.bfloat16
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    pool, key = None, None
    for (heads, kv_heads, head_size), batch, new, prior, target in shapes:
        if key != (kv_heads, head_size):
            pool, key = None, (kv_heads, head_size)
            pool = Pool.random(2 << 30, kv_heads, head_size, block_size, dtype)
        assert pool is not None
        query, cu, lens = batch_tensors([new] * batch, [new + prior] * batch, heads, head_size)
        calls = [
            lambda table=table: attention(pool, query, table, lens, cu, new)  # noqa: B023
            for table in tables(pool, batch, new + prior)
        ]
        seconds = gpu_time(calls)
        rate = operations(heads, head_size, batch, new, prior) / seconds
        rows.append(
            {
                "op": op,
                "heads": f"{heads}/{kv_heads}",
                "head_size": head_size,
                "batch": batch,
                "new": new,
                "prior": prior,
                "us": seconds * 1e6,
                "TFLOP/s": rate * 1e-12,
                "share": rate / matmul_ceiling,
                "target": target,
                "error": check(pool, heads),
            }
        )
    return rows


def run_mixes() -> list[dict[str, Any]]:
    """Prefills and decodes in one call."""
    pool = Pool.random(4 << 30, 8, 128, BLOCK_SIZE, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    for prefills, new, keys, decodes, context, target in MIXES:
        spans, lens = [new] * prefills + [1] * decodes, [keys] * prefills + [context] * decodes
        query, cu, seq_lens = batch_tensors(spans, lens, 32, 128)
        calls = [
            lambda table=table: attention(pool, query, table, seq_lens, cu, new)  # noqa: B023
            for table in tables(pool, len(spans), max(lens))
        ]
        rows.append(
            {
                "op": "paged_attention",
                "heads": "32/8",
                "head_size": 128,
                "batch": f"{prefills} + {decodes} decodes",
                "new": f"{new}, 1",
                "prior": f"{keys - new}, {context - 1}",
                "us": gpu_time(calls) * 1e6,
                "target": f"{target:.0f} us" if target else None,
                "error": check(pool, 32),
            }
        )
    return rows
