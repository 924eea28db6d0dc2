"""Other kernels on the same decode shapes, if their packages are installed. A star: contiguous cache, no paging."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.pools import BLOCK_SIZE, Pool, tables
from benchmarks.timing import gpu_time

Shape = tuple[tuple[int, int, int], int, int]  # (heads, kv heads, head size), batch, context


def _dense(shape: Shape) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Query [batch, heads, 1, head_size] and enough dense (key, value) [batch, kv_heads, context, head_size]."""
    (heads, kv_heads, head_size), batch, context = shape
    count = max(2, (400 << 20) // (batch * context * kv_heads * head_size * 4))

    def made(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=torch.bfloat16, device="cuda")

    caches = [tuple(made(batch, kv_heads, context, head_size) for _ in range(2)) for _ in range(min(count, 96))]
    return made(batch, heads, 1, head_size), caches  # type: ignore[return-value]


def sdpa(shape: Shape, _: Pool) -> float:
    query, caches = _dense(shape)
    attend = torch.nn.functional.scaled_dot_product_attention
    return gpu_time([lambda k=k, v=v: attend(query, k, v, enable_gqa=True) for k, v in caches])


def flex(shape: Shape, _: Pool) -> float:
    from torch.nn.attention.flex_attention import flex_attention

    query, caches = _dense(shape)
    attend = torch.compile(flex_attention, dynamic=False)
    return gpu_time([lambda k=k, v=v: attend(query, k, v, enable_gqa=True) for k, v in caches])


def _nhd(pool: Pool) -> Pool:
    """The same pool as [num_blocks, block_size, num_kv_heads, head_size], which some kernels need."""
    return Pool(pool.storage, pool.key_cache.contiguous(), pool.value_cache.contiguous())


def flash_attn(shape: Shape, pool: Pool) -> float:
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

    (heads, _, head_size), batch, context = shape
    dense = _nhd(pool)
    query = torch.randn(batch, 1, heads, head_size, dtype=torch.bfloat16, device="cuda")
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    return gpu_time(
        [
            lambda table=table: flash_attn_with_kvcache(
                query, dense.key_cache, dense.value_cache, cache_seqlens=lens, block_table=table, causal=True
            )
            for table in tables(pool, batch, context)
        ]
    )


def flashinfer(shape: Shape, pool: Pool) -> float:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    (heads, kv_heads, head_size), batch, context = shape
    dense = _nhd(pool)
    query = torch.randn(batch, heads, head_size, dtype=torch.bfloat16, device="cuda")
    blocks = -(-context // BLOCK_SIZE)
    indptr = torch.arange(0, batch * blocks + 1, blocks, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), context - (blocks - 1) * BLOCK_SIZE, dtype=torch.int32, device="cuda")
    calls: list[Callable[[], object]] = []
    for table in tables(pool, batch, context):
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr.clone(),
            paged_kv_indices_buffer=table.flatten().clone(), paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        wrapper.plan(indptr, table.flatten(), last, heads, kv_heads, head_size, BLOCK_SIZE, q_data_type=torch.bfloat16)
        calls.append(lambda wrapper=wrapper: wrapper.run(query, (dense.key_cache, dense.value_cache)))
    return gpu_time(calls)


PEERS: dict[str, tuple[str | None, Callable[[Shape, Pool], float]]] = {
    "sdpa*": (None, sdpa),
    "flex*": (None, flex),
    "flash_attn": ("flash_attn", flash_attn),
    "flashinfer": ("flashinfer", flashinfer),
}


def run(shapes: list[Shape], read_ceiling: float) -> list[dict[str, Any]]:
    """A row per peer that is installed and shape that it takes; what fails is said, not hidden."""
    rows: list[dict[str, Any]] = []
    for name, (package, measure) in PEERS.items():
        if package is not None and importlib.util.find_spec(package) is None:
            continue
        for shape in shapes:
            (heads, kv_heads, head_size), batch, context = shape
            row: dict[str, Any] = {
                "op": name,
                "heads": f"{heads}/{kv_heads}",
                "head_size": head_size,
                "batch": batch,
                "context": context,
            }
            try:
                pool = Pool.random(4 << 30, kv_heads, head_size, BLOCK_SIZE, torch.bfloat16)
                seconds = measure(shape, pool)
            except Exception as error:
                rows.append(row | {"failed": f"{type(error).__name__}: {error}"[:200]})
                continue
            num_bytes = batch * context * kv_heads * head_size * 4
            rows.append(
                row
                | {
                    "us": seconds * 1e6,
                    "GB/s": num_bytes / seconds * 1e-9,
                    "share": num_bytes / seconds / read_ceiling,
                }
            )
    return rows
