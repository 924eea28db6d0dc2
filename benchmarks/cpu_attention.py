"""Attention on CPU against SDPA on a contiguous cache: ``python -m benchmarks.cpu_attention``.

Both sides do the same work in the same run, in shuffled rounds; a ratio is the median over the rounds. Decode walks
over layers, more than the caches hold, with shuffled block tables. ``--cpu-time`` counts the CPU time of one thread,
for a machine that does other things too. ``PAGED_KV_CPU_CAPABILITY`` picks the instruction set.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from torch_paged_kv import ops

BLOCK_SIZE = 16
COLD_BYTES = 160 << 20  # touched in turn, so that no cache holds them
DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}

Call = Callable[[], object]
Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What one row of a table measures."""

    cache: str
    query: str
    heads: int
    kv_heads: int
    head_size: int
    batch: int
    context: int
    q_len: int = 1

    @property
    def cache_bytes(self) -> int:
        return 2 * self.batch * self.kv_heads * self.context * self.head_size * DTYPES[self.cache].itemsize

    @property
    def operations(self) -> float:
        pairs = self.q_len * self.context - self.q_len * (self.q_len - 1) / 2
        return 4.0 * self.batch * self.heads * self.head_size * pairs

    def __str__(self) -> str:
        return (
            f"{self.cache}/{self.query} {self.heads}/{self.kv_heads} D{self.head_size} "
            f"B{self.batch} {self.q_len} on {self.context}"
        )


DECODE = [
    Shape("bf16", "bf16", 32, 8, 128, 1, 512),
    Shape("bf16", "bf16", 32, 8, 128, 1, 4096),
    Shape("bf16", "bf16", 32, 8, 128, 8, 4096),
    Shape("bf16", "bf16", 32, 8, 128, 32, 512),
    Shape("bf16", "bf16", 32, 32, 128, 1, 4096),
    Shape("bf16", "bf16", 32, 32, 128, 8, 1024),
    Shape("bf16", "bf16", 32, 8, 64, 8, 4096),
    Shape("f32", "f32", 32, 8, 128, 8, 4096),
    Shape("f32", "f32", 32, 32, 128, 1, 4096),
    Shape("f16", "f16", 32, 8, 128, 8, 1024),
    Shape("int8", "bf16", 32, 8, 128, 8, 4096),
    Shape("int8", "bf16", 32, 32, 128, 1, 4096),
    Shape("e4m3", "bf16", 32, 8, 128, 8, 4096),
    Shape("e4m3", "bf16", 32, 32, 128, 1, 4096),
    Shape("e5m2", "bf16", 32, 8, 128, 8, 4096),
]

PREFILL = [
    Shape("bf16", "bf16", 32, 8, 128, 1, 2048, 2048),
    Shape("bf16", "bf16", 32, 8, 128, 1, 4096, 512),
    Shape("bf16", "bf16", 32, 32, 128, 1, 2048, 2048),
    Shape("bf16", "bf16", 32, 8, 64, 1, 2048, 2048),
    Shape("f32", "f32", 32, 8, 128, 1, 2048, 2048),
    Shape("f32", "f32", 32, 8, 128, 1, 4096, 512),
    Shape("int8", "bf16", 32, 8, 128, 1, 4096, 512),
]


class Layer:
    """One layer's paged cache, full of random data, with the layout of the library's own pools."""

    def __init__(self, shape: Shape) -> None:
        blocks_per_row = math.ceil(shape.context / BLOCK_SIZE)
        num_blocks = shape.batch * blocks_per_row
        half = BLOCK_SIZE * shape.head_size
        dtype = DTYPES[shape.cache]
        self.storage = torch.empty(num_blocks, shape.kv_heads, 2 * half, dtype=dtype)
        if dtype.itemsize == 1:
            self.storage.view(torch.uint8).random_(0, 100)
        else:
            self.storage.normal_()
        keys, values = (x.unflatten(-1, (BLOCK_SIZE, shape.head_size)) for x in self.storage.split(half, dim=-1))
        self.key_cache = keys.transpose(1, 2)  # [num_blocks, block_size, num_kv_heads, head_size]
        self.value_cache = values.transpose(1, 2)
        self.block_table = torch.randperm(num_blocks).to(torch.int32).view(shape.batch, blocks_per_row)

    def read(self) -> Tensor:
        """Reads the same bytes and does next to nothing with them."""
        return self.storage.view(torch.float32).sum()


def paged_calls(shape: Shape, layers: list[Layer]) -> list[Call]:
    tokens = shape.batch * shape.q_len
    query = torch.randn(tokens, shape.heads, shape.head_size).to(DTYPES[shape.query])
    seq_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32)
    cu_seqlens_q = torch.arange(0, tokens + 1, shape.q_len, dtype=torch.int32)

    def call(layer: Layer) -> Tensor:
        return ops.paged_attention(
            query,
            layer.key_cache,
            layer.value_cache,
            layer.block_table,
            seq_lens,
            cu_seqlens_q,
            shape.q_len,
            scale=shape.head_size**-0.5,
        )

    return [partial(call, layer) for layer in layers]


def sdpa(query: Tensor, kv: Tensor, mask: Tensor | None, causal: bool, gqa: bool) -> Tensor:
    key, value = kv
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=gqa)


def sdpa_calls(shape: Shape, num_layers: int) -> dict[str, list[Call]]:
    """SDPA on contiguous caches: with enable_gqa, and for decode with the group folded into the query's length."""
    dtype = DTYPES[shape.query]
    group = shape.heads // shape.kv_heads
    cache_shape = (2, shape.batch, shape.kv_heads, shape.context, shape.head_size)
    caches = [torch.randn(cache_shape, dtype=dtype) for _ in range(num_layers)]
    query = torch.randn(shape.batch, shape.heads, shape.q_len, shape.head_size, dtype=dtype)
    if shape.q_len > 1:
        mask = None
        if shape.q_len < shape.context:  # is_causal aligns top-left
            mask = torch.ones(shape.q_len, shape.context, dtype=torch.bool).tril(shape.context - shape.q_len)
        return {"enable_gqa": [partial(sdpa, query, kv, mask, mask is None, True) for kv in caches]}
    folded = query.view(shape.batch, shape.kv_heads, group, shape.head_size)
    calls: dict[str, list[Call]] = {"fold": [partial(sdpa, folded, kv, None, False, False) for kv in caches]}
    if group > 1:
        calls["enable_gqa"] = [partial(sdpa, query, kv, None, False, True) for kv in caches]
    return calls


def seconds_of(calls: list[Call], clock: Clock, at_least: float = 0.02) -> float:
    """Median seconds of calls made in turn, until they took `at_least` seconds or each was made once."""
    times: list[float] = []
    for call in calls:
        begin = clock()
        call()
        times.append(clock() - begin)
        if sum(times) > at_least and len(times) > 1:
            break
    return statistics.median(times)


def measure(variants: dict[str, list[Call]], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Seconds of every variant in every round; the first round warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(rounds + 1):
        for name in random.sample(list(variants), len(variants)):
            calls = variants[name]
            seconds = seconds_of(random.sample(calls, len(calls)), clock)
            if index:
                times[name].append(seconds)
    return times


def ratio(times: dict[str, list[float]], name: str) -> str:
    if name not in times:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(times[name], times['paged'], strict=True)):.2f}"


def decode_row(shape: Shape, clock: Clock, rounds: int) -> str:
    layers = [Layer(shape) for _ in range(max(2, math.ceil(COLD_BYTES / shape.cache_bytes)))]
    variants: dict[str, list[Call]] = {"paged": paged_calls(shape, layers)}
    variants["read"] = [layer.read for layer in layers]
    if shape.cache == shape.query:
        variants |= sdpa_calls(shape, len(layers))
    times = measure(variants, clock, rounds)
    seconds = statistics.median(times["paged"])
    cells = [f"{seconds * 1e3:.3f}", f"{shape.cache_bytes / seconds / 1e9:.1f}"]
    return f"| {shape} | {' | '.join(cells + [ratio(times, name) for name in ('read', 'fold', 'enable_gqa')])} |"


def prefill_row(shape: Shape, clock: Clock, rounds: int) -> str:
    variants = {"paged": paged_calls(shape, [Layer(shape)])} | sdpa_calls(shape, 1)
    times = measure(variants, clock, rounds)
    seconds = statistics.median(times["paged"])
    return f"| {shape} | {seconds * 1e3:.1f} | {shape.operations / seconds / 1e9:.0f} | {ratio(times, 'enable_gqa')} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, its CPU time instead of wall time")
    options = parser.parse_args()
    clock: Clock = time.thread_time if options.cpu_time else time.perf_counter
    threads = 1 if options.cpu_time else options.threads
    torch.set_num_threads(threads)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {threads} threads\n")
    print("| decode: cache/query, heads, batch, queries on keys | ms | GB/s | read | SDPA fold | SDPA enable_gqa |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in DECODE:
        print(decode_row(shape, clock, options.rounds), flush=True)
    print("\n| prefill: cache/query, heads, batch, queries on keys | ms | GFLOP/s | SDPA enable_gqa |")
    print("| --- | --- | --- | --- |")
    for shape in PREFILL:
        print(prefill_row(shape, clock, min(3, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
