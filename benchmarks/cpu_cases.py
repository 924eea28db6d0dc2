"""What the CPU benchmark times: the same work by this library and by its peers, as calls over cold memory.

Every builder returns named *variants*, lists of calls. A variant walks over layers, together more than the caches hold,
so each call finds its keys and values in memory. Block tables are shuffled and pools made as the library makes them.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from torch_paged_kv import huge_pages, ops
from torch_paged_kv.cache import PagedKVCache
from torch_paged_kv.storage import KVPool

BLOCK_SIZE = 16
VLLM_BLOCK_SIZE = 128  # its default on CPU
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
Variants = dict[str, list[Call]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """One case. `heads` are those of the queries; `context` counts keys, the new ones included."""

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
    def layers(self) -> int:
        return max(2, math.ceil(COLD_BYTES / self.cache_bytes))

    @property
    def operations(self) -> float:
        pairs = self.q_len * self.context - self.q_len * (self.q_len - 1) / 2
        return 4.0 * self.batch * self.heads * self.head_size * pairs

    @property
    def scale(self) -> float:
        return self.head_size**-0.5

    def __str__(self) -> str:
        dtypes = self.cache if self.cache == self.query else f"{self.cache}/{self.query}"
        size = f" D{self.head_size}" if self.head_size != 128 else ""
        return f"{dtypes} {self.heads}/{self.kv_heads}{size} B{self.batch} {self.q_len} on {self.context}"


def decode(cache: str, kv_heads: int, batch: int, context: int, query: str = "", head_size: int = 128) -> Shape:
    return Shape(cache, query or cache, 32, kv_heads, head_size, batch, context)


# ---------------------------------------------------------------------------------------------------------------------
# Timing


def seconds_of(calls: list[Call], clock: Clock, at_least: float = 0.02) -> float:
    """Median seconds of calls made in turn, until they took `at_least` seconds or each was made once."""
    times: list[float] = []
    for call in random.sample(calls, len(calls)):
        begin = clock()
        call()
        times.append(clock() - begin)
        if sum(times) > at_least and len(times) > 1:
            break
    return statistics.median(times)


def measure(variants: Variants, clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Seconds of every variant in every round; the first round warms up and does not count."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(rounds + 1):
        for name in random.sample(list(variants), len(variants)):
            seconds = seconds_of(variants[name], clock)
            if index:
                times[name].append(seconds)
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str = "paged") -> float:
    """Median over the rounds of how many times faster `fast` was."""
    return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def fill(memory: Tensor) -> Tensor:
    """Random data in contiguous memory: a few MiB of it over and over, since drawing it all would take longest."""
    flat = memory.view(-1)
    pattern = torch.randn(min(flat.numel(), 1 << 21))
    pattern = (pattern * 30).clamp(-100, 100).to(flat.dtype) if flat.dtype.itemsize == 1 else pattern.to(flat.dtype)
    for part in flat.split(pattern.numel()):
        part.copy_(pattern[: part.numel()])
    return memory


class Layer:
    """One layer's paged cache, full of random data, with the layout and the pages of the library's own pools."""

    def __init__(self, shape: Shape) -> None:
        blocks_per_row = math.ceil(shape.context / BLOCK_SIZE)
        num_blocks = shape.batch * blocks_per_row
        half = BLOCK_SIZE * shape.head_size
        memory = torch.empty(num_blocks, shape.kv_heads, 2 * half, dtype=DTYPES[shape.cache])
        self.storage = fill(huge_pages.advise(memory))
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
            scale=shape.scale,
        )

    return [partial(call, layer) for layer in layers]


def sdpa(query: Tensor, kv: Tensor, mask: Tensor | None, causal: bool, gqa: bool) -> Tensor:
    key, value = kv
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=gqa)


def sdpa_calls(shape: Shape) -> Variants:
    """SDPA on contiguous caches: with enable_gqa, and for decode with the group folded into the query's length."""
    dtype = DTYPES[shape.query]
    group = shape.heads // shape.kv_heads
    cache_shape = (2, shape.batch, shape.kv_heads, shape.context, shape.head_size)
    caches = [fill(torch.empty(cache_shape, dtype=dtype)) for _ in range(shape.layers if shape.q_len == 1 else 1)]
    query = torch.randn(shape.batch, shape.heads, shape.q_len, shape.head_size, dtype=dtype)
    if shape.q_len > 1:
        mask = None
        if shape.q_len < shape.context:  # is_causal aligns top-left
            mask = torch.ones(shape.q_len, shape.context, dtype=torch.bool).tril(shape.context - shape.q_len)
        return {"enable_gqa": [partial(sdpa, query, kv, mask, mask is None, True) for kv in caches]}
    folded = query.view(shape.batch, shape.kv_heads, group, shape.head_size)
    calls: Variants = {"fold": [partial(sdpa, folded, kv, None, False, False) for kv in caches]}
    if group > 1:
        calls["enable_gqa"] = [partial(sdpa, query, kv, None, False, True) for kv in caches]
    return calls


def attention_variants(shape: Shape, *, vllm: bool = False) -> Variants:
    """`paged`; for decode also `read`, the bytes alone; SDPA where it has the dtypes; vLLM's kernel if it is loaded."""
    layers = [Layer(shape) for _ in range(shape.layers if shape.q_len == 1 else 1)]
    variants: Variants = {"paged": paged_calls(shape, layers)}
    if shape.q_len == 1:
        variants["read"] = [layer.read for layer in layers]
    if shape.cache == shape.query:
        variants |= sdpa_calls(shape)
        if vllm:
            variants["vllm"] = vllm_calls(shape)
    return variants


def eight_bit_variants(shape: Shape) -> Variants:
    """`paged` on a cache of 8 bits and `wide` on one in the queries' dtype, as many keys each."""
    wide = dataclasses.replace(shape, cache=shape.query)
    layers, wide_layers = ([Layer(s) for _ in range(wide.layers)] for s in (shape, wide))
    return {"paged": paged_calls(shape, layers), "wide": paged_calls(wide, wide_layers)}


# ---------------------------------------------------------------------------------------------------------------------
# vLLM's CPU kernel, from the library in its wheel: `load_library(<wheel>/vllm/_C_AVX2.abi3.so)`


def vllm_calls(shape: Shape) -> list[Call]:
    """vLLM's decode over its own layout and default block size; its plan is made once, as it is once for a step."""
    kernel: Any = torch.ops._C
    dtype, tokens = DTYPES[shape.query], shape.batch * shape.q_len
    columns = math.ceil(shape.context / VLLM_BLOCK_SIZE)
    num_blocks = shape.batch * columns
    query = torch.randn(tokens, shape.heads, shape.head_size).to(dtype)
    out = torch.empty_like(query)
    seq_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32)
    starts = torch.arange(0, tokens + 1, shape.q_len, dtype=torch.int32)
    plan = kernel.get_scheduler_metadata(
        *(
            shape.batch,
            shape.heads,
            shape.kv_heads,
            shape.head_size,
            seq_lens,
            dtype,
            starts,
            True,
            -1,
            "vec",
            True,
            None,
        )
    )

    def call(cache: Tensor, table: Tensor) -> Tensor:
        keys, values = cache.chunk(2, dim=2)
        kernel.cpu_attention_with_kv_cache(
            *(query, keys, values, out, starts, seq_lens, shape.scale, True, None, -1, table, 0.0, plan, None, None)
        )
        return out

    calls: list[Call] = []
    for _ in range(shape.layers):
        cache = fill(torch.empty(num_blocks, shape.kv_heads, 2 * VLLM_BLOCK_SIZE, shape.head_size, dtype=dtype))
        table = torch.randperm(num_blocks).to(torch.int32).view(shape.batch, columns)
        calls.append(partial(call, cache, table))
    return calls


# ---------------------------------------------------------------------------------------------------------------------
# A whole decode step: new keys are written, then attended to


def states(shape: Shape, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of `length` new tokens a row: [batch, heads or kv heads, length, head_size]."""
    dtype, size = DTYPES[shape.query], shape.head_size
    key, value = (fill(torch.empty(shape.batch, shape.kv_heads, length, size, dtype=dtype)) for _ in range(2))
    return torch.randn(shape.batch, shape.heads, length, size, dtype=dtype), key, value


def paged_step(shape: Shape) -> Call:
    """A step over all layers of a cache whose blocks lie in random order."""
    room = shape.batch * (math.ceil(shape.context / BLOCK_SIZE) + 8)
    pool = KVPool(room, BLOCK_SIZE, torch.device("cpu"), growable=False)
    pool.free_ring.copy_(torch.randperm(room))
    cache = PagedKVCache([None] * shape.layers, pool=pool)
    _, key, value = states(shape, shape.context - 1)
    for layer in range(shape.layers):
        cache.write(layer, key, value)
    new = states(shape, 1)

    def step() -> None:
        for layer in range(shape.layers):
            now = cache.write(layer, new[1], new[2])
            cache.attend(now, layer, new[0], scale=shape.scale)

    return step


def dynamic_step(shape: Shape) -> Call:
    """The same over Transformers' DynamicCache and the attention function that its models call."""
    from transformers import DynamicCache
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    cache: Any = DynamicCache()
    _, key, value = states(shape, shape.context - 1)
    for layer in range(shape.layers):
        cache.update(key.clone(), value.clone(), layer)
    new = states(shape, 1)
    module: Any = SimpleNamespace(num_key_value_groups=shape.heads // shape.kv_heads, is_causal=True)

    def step() -> None:
        for layer in range(shape.layers):
            keys, values = cache.update(new[1], new[2], layer)
            sdpa_attention_forward(module, new[0], keys, values, None, scaling=shape.scale)

    return step


def step_variants(shape: Shape) -> Variants:
    return {"paged": [paged_step(shape)], "dynamic": [dynamic_step(shape)]}


def write_variants(tokens: int, kv_heads: int, head_size: int = 128) -> Variants:
    """New keys and values of one layer into random slots: the op, and index_copy_ into a cache [slots, heads, size]."""
    shape = Shape("bf16", "bf16", kv_heads, kv_heads, head_size, 1, 2 * tokens)
    layers = [Layer(shape) for _ in range(shape.layers)]
    flat = [fill(torch.empty(2, shape.context, kv_heads, head_size, dtype=torch.bfloat16)) for _ in layers]
    key, value = (fill(torch.empty(tokens, kv_heads, head_size, dtype=torch.bfloat16)) for _ in range(2))
    # A sequence's tokens fill its blocks one after the other.
    blocks = torch.randperm(shape.context // BLOCK_SIZE)[: tokens // BLOCK_SIZE]
    slots = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()

    def paged(layer: Layer) -> None:
        ops.reshape_and_cache(key, value, layer.key_cache, layer.value_cache, slots)

    def copied(caches: Tensor) -> None:
        caches[0].index_copy_(0, slots, key)
        caches[1].index_copy_(0, slots, value)

    return {"paged": [partial(paged, x) for x in layers], "index_copy": [partial(copied, x) for x in flat]}
