"""Builders that the op tests share: pools, tables, ragged batches, and the one rule for tolerances."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from torch_paged_kv import ops, reference

FLOAT_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EIGHT_BIT_DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
LAYOUTS = ["plain", "heads_first", "fused", "interleaved", "slice"]

INT32_MAX = 2**31 - 1

# Off under compute-sanitizer alone (run_compute_sanitizer.sh), where what counts is how kernels access memory.
VALUES_COUNT = os.environ.get("PAGED_KV_VALUES_COUNT", "1") != "0"


def dtype_id(value: object) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def bits(x: Tensor) -> Tensor:
    """The bytes, so that NaN equals NaN and -0 differs from 0."""
    return x.reshape(-1).view(torch.uint8)


def assert_same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        assert torch.equal(bits(a), bits(b))


def captured(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the step, and its result, which each replay writes anew."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


# ---------------------------------------------------------------------------------------------------------------------
# Tolerances


def assert_at_most_twice_naive(actual: Tensor, naive: Sequence[Tensor], exact: Tensor) -> None:
    """The largest error of `actual` is at most twice that of a naive computation in its dtype, both against float64.

    `naive` holds the same sums in several orders, of which the worst counts: one order may be exact by luck. One
    rounding of the result comes on top, as that is all that is left to anyone where every order is exact.
    """
    assert actual.shape == exact.shape
    rounding = torch.finfo(actual.dtype).eps / 2 * _largest(exact)
    allowed = 2 * max(_largest_error(one, exact) for one in naive) + rounding
    error = _largest_error(actual, exact)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}: {error / max(allowed, 1e-45):.2f} times"


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()].abs().double()
    return float(finite.max()) if finite.numel() else 0.0


def _largest_error(actual: Tensor, exact: Tensor) -> float:
    """NaN where either has a NaN, and infinite where only one is infinite."""
    actual, exact = actual.double().cpu(), exact.double().cpu()
    error = torch.where(actual == exact, 0.0, (actual - exact).abs())
    return float(error.max()) if error.numel() else 0.0


def product_one_by_one(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """The textbook loop: one running sum per result, in the dtype of the operands. Very long sums are left to torch."""
    left, right, result = re.fullmatch(r"(\w+),(\w+)->(\w+)", equation).groups()  # type: ignore[union-attr]
    (summed,) = set(left) - set(result)
    terms = a.shape[left.index(summed)]
    if terms > 1024:
        return torch.einsum(equation, a, b)
    term = equation.replace(summed, "")
    slices = zip(a.unbind(left.index(summed)), b.unbind(right.index(summed)))
    return sum((torch.einsum(term, x, y) for x, y in slices), start=torch.zeros((), dtype=a.dtype, device=a.device))


# ---------------------------------------------------------------------------------------------------------------------
# Pools and tables


def blocks_of(length: int, block_size: int) -> int:
    return -(-length // block_size)


def make_caches(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    head_size_v: int,
    *,
    dtype: torch.dtype = torch.float32,
    layout: str = "plain",
    poison: float = float("nan"),
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """(key_cache, value_cache) [num_blocks, block_size, num_kv_heads, head_size(_v)], every byte poisoned."""

    def poisoned(*shape: int) -> Tensor:
        if dtype == torch.int8:
            return torch.full(shape, 0 if poison == 0 else 113, dtype=dtype, device=device)
        return torch.full(shape, poison, device=device).to(dtype)

    shape = (num_blocks, block_size, num_kv_heads)
    if layout == "plain":
        return poisoned(*shape, head_size), poisoned(*shape, head_size_v)
    if layout == "heads_first":
        return (
            poisoned(num_blocks, num_kv_heads, block_size, head_size).transpose(1, 2),
            poisoned(num_blocks, num_kv_heads, block_size, head_size_v).transpose(1, 2),
        )
    if layout == "fused":  # what the library makes: one storage a layer, K rows of a (block, head), then its V rows
        storage = poisoned(num_blocks, num_kv_heads, block_size * (head_size + head_size_v))
        return fused_views(storage, block_size, head_size)
    if layout == "interleaved":  # [num_blocks, 2, ...]; heads of unequal size are slices of the larger
        storage = poisoned(num_blocks, 2, block_size, num_kv_heads, max(head_size, head_size_v))
        return storage[:, 0, ..., :head_size], storage[:, 1, ..., :head_size_v]
    if layout == "slice":  # every other block of a bigger pool, some heads of it, an odd offset in the last dim
        storage = poisoned(2 * num_blocks, block_size + 1, num_kv_heads + 2, head_size + head_size_v + 3)
        view = storage[1::2, 1:, 1 : num_kv_heads + 1]
        return view[..., 1 : head_size + 1], view[..., head_size + 2 : head_size + head_size_v + 2]
    raise ValueError(layout)


def fused_views(storage: Tensor, block_size: int, head_size: int) -> tuple[Tensor, Tensor]:
    """[num_blocks, num_kv_heads, block_size * (head_size + head_size_v)] -> key_cache, value_cache views."""
    keys = storage[..., : block_size * head_size].unflatten(-1, (block_size, head_size))
    values = storage[..., block_size * head_size :].unflatten(-1, (block_size, -1))
    return keys.transpose(1, 2), values.transpose(1, 2)


def make_table(
    seq_lens: Sequence[int], block_size: int, num_blocks: int, *, tail: int = -1, extra_columns: int = 2
) -> Tensor:
    """int32 [num_seqs, max_blocks]: blocks in random order, no block twice, and `tail` past each row's last."""
    columns = max((blocks_of(n, block_size) for n in seq_lens), default=0) + extra_columns
    table = torch.full((len(seq_lens), columns), tail, dtype=torch.int32)
    order = torch.randperm(num_blocks, dtype=torch.int32)
    for row, length in enumerate(seq_lens):
        count = blocks_of(length, block_size)
        table[row, :count], order = order[:count], order[count:]
    return table


def slots_of(table: Tensor, row: int, begin: int, end: int, block_size: int) -> Tensor:
    """int64 slots of positions begin .. end - 1 of a row."""
    positions = torch.arange(begin, end, device=table.device)
    return table[row].long()[positions // block_size] * block_size + positions % block_size


def all_slots(table: Tensor, seq_lens: Sequence[int], block_size: int) -> Tensor:
    """int64 slots of every live token, row after row."""
    parts = [slots_of(table, row, 0, length, block_size) for row, length in enumerate(seq_lens)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def int32(values: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def prefix_sum(lens: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    return int32([sum(lens[:i]) for i in range(len(lens) + 1)], device)


def make_scales(
    kind: str, num_blocks: int, block_size: int, num_kv_heads: int, cache_dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor | None, Tensor | None]:
    """(key_scale, value_scale) that fit values of a standard normal distribution into the dtype."""
    if kind == "none":
        return None, None
    if kind == "slot":
        shape: tuple[int, ...] = (num_blocks, block_size, num_kv_heads)
        return tuple(torch.full(shape, float("nan"), device=device) for _ in range(2))  # type: ignore[return-value]
    shape = {"scalar": (), "tensor": (1,), "head": (num_kv_heads,)}[kind]
    unit = 4.0 / reference.MAX_OF_DTYPE.get(cache_dtype, 4.0)
    return tuple((torch.rand(shape, device=device) + 0.5) * unit for _ in range(2))  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------------------------------
# Attention


@dataclasses.dataclass
class AttentionCase:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    options: dict[str, Any]

    def tensors(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "options")

    def run(self, function: Callable[..., Any] = ops.paged_attention, **changes: Any) -> Any:
        # Freed at once, this is the memory that the op gets for its result: what it leaves unwritten is NaN.
        self.query.new_full((*self.query.shape[:2], self.value_cache.shape[-1]), float("nan"))
        return function(*self.tensors(), **(self.options | changes))

    def assert_threads_do_not_matter(self, counts: Sequence[int]) -> None:
        """The same bits on a CPU whatever the number of threads."""
        before, outs = torch.get_num_threads(), []
        try:
            for count in counts:
                torch.set_num_threads(count)
                outs.append(self.run())
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(out, outs[0]) for out in outs[1:])

    def in_dtype(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(out, lse) by the reference, computed in `dtype`."""
        return reference.attention_in(dtype, *self.tensors(), **self.options)

    def naive(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(outs, lses) in the query's dtype: q.k summed in several orders, and for float32 all sums one by one too."""
        orders = [torch.randperm(self.query.shape[-1], device=self.query.device) for _ in range(4)]
        bits = self.key_cache.view(torch.uint8) if self.key_cache.dtype in EIGHT_BIT_DTYPES else self.key_cache
        permuted = [
            dataclasses.replace(
                self, query=self.query[..., order], key_cache=bits[..., order].view(self.key_cache.dtype)
            )
            for order in orders
        ]
        results = [case.in_dtype(self.query.dtype) for case in [self, *permuted]]
        if self.query.dtype == torch.float32:
            with mock.patch.object(reference, "_product", product_one_by_one):
                results.append(self.in_dtype(torch.float32))
        outs, lses = zip(*results)
        return outs, lses

    def check(self) -> tuple[Tensor, Tensor]:
        """Run both attention ops against the reference."""
        out, lse = self.run(ops.paged_attention_with_lse)
        assert out.dtype == self.query.dtype
        assert lse.dtype == torch.float32
        assert torch.equal(self.run(), out)
        if not VALUES_COUNT:
            return out, lse
        exact_out, exact_lse = self.in_dtype(torch.float64)
        naive_outs, naive_lses = self.naive()
        assert_at_most_twice_naive(out, naive_outs, exact_out)
        assert_at_most_twice_naive(lse, naive_lses, exact_lse)
        return out, lse

    def row(self, row: int) -> AttentionCase:
        """The same row alone in its batch, over the same pool."""
        begin, end = self.cu_seqlens_q[row : row + 2].tolist()
        options = dict(self.options)
        if options.get("mask") is not None:
            options["mask"] = options["mask"][begin:end]
        return dataclasses.replace(
            self,
            query=self.query[begin:end],
            block_table=self.block_table[row : row + 1],
            seq_lens=self.seq_lens[row : row + 1],
            cu_seqlens_q=int32([0, end - begin], self.query.device),
            max_seqlen_q=end - begin,
            options=options,
        )


def attention_case(
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 64,
    head_size_v: int | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    scale_kind: str = "none",
    layout: str = "plain",
    poison: float = float("nan"),
    tail: int = -1,
    spare_blocks: int = 3,
    device: torch.device | str = "cpu",
    **options: Any,
) -> AttentionCase:
    """A ragged batch over a pool in which everything but the live slots is poisoned."""
    head_size_v = head_size if head_size_v is None else head_size_v
    cache_dtype = cache_dtype or dtype
    num_blocks = sum(blocks_of(n, block_size) for n in seq_lens) + spare_blocks
    key_cache, value_cache = make_caches(
        num_blocks,
        block_size,
        num_kv_heads,
        head_size,
        head_size_v,
        dtype=cache_dtype,
        layout=layout,
        poison=poison,
        device=device,
    )
    key_scale, value_scale = make_scales(scale_kind, num_blocks, block_size, num_kv_heads, cache_dtype, device)
    table = make_table(seq_lens, block_size, num_blocks, tail=tail).to(device)
    key = torch.randn(sum(seq_lens), num_kv_heads, head_size).to(device, dtype)
    value = torch.randn(sum(seq_lens), num_kv_heads, head_size_v).to(device, dtype)
    slots = all_slots(table, seq_lens, block_size).to(device)
    reference.reshape_and_cache(key, value, key_cache, value_cache, slots, key_scale, value_scale)
    return AttentionCase(
        query=torch.randn(sum(q_lens), num_heads, head_size).to(device, dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=table,
        seq_lens=int32(seq_lens, device),
        cu_seqlens_q=prefix_sum(q_lens, device),
        max_seqlen_q=max(q_lens, default=0),
        options={"scale": head_size**-0.5, "key_scale": key_scale, "value_scale": value_scale} | options,
    )
