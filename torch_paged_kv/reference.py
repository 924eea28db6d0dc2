"""Plain-PyTorch twin of every op: the same names, order of arguments and meanings as `torch_paged_kv.ops`.

It is the oracle of tests, docs and benchmarks, and what runs on a device type without kernels. It is written to be
read: one sequence after the other, allocator state as Python lists, nothing fused. `csrc/ops.h` has the schemas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from .errors import OutOfBlocksError

# The largest finite value of each 8-bit cache dtype: what a stored number saturates at, and what the absolute
# maximum of a row is mapped to when its scale is made on the fly.
MAX_OF_DTYPE = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}

# Places in `counters`: ring head, ring tail, failed allocations, blocks wanted by the first of them.
HEAD, TAIL, FAILURES, WANTED = range(4)
NUM_COUNTERS = 4

_F = TypeVar("_F", bound=Callable[..., object])


def _no_grad(function: _F) -> _F:
    return torch.no_grad()(function)  # type: ignore[no-any-return, no-untyped-call, unused-ignore]


def _token_rows(states: Tensor) -> Tensor:
    """[num_tokens, heads, size]; one token of each sequence may come as [num_seqs, heads, 1, size]."""
    return states.squeeze(2) if states.dim() == 4 else states


def _blocks_of(length: int, block_size: int) -> int:
    return -(-length // block_size)


def _spans(cu_seqlens_q: Tensor, num_tokens: int) -> list[tuple[int, int]]:
    """[num_seqs + 1] prefix sum -> (begin, end) of every row, clamped into the batch."""
    edges = [min(max(edge, 0), num_tokens) for edge in cu_seqlens_q.tolist()]
    return [(begin, max(begin, end)) for begin, end in pairwise(edges)]


# ---------------------------------------------------------------------------------------------------------------------
# Allocator


class _AllocatorState:
    """The allocator's tensors as Python lists. Nothing reaches the tensors before `store`, so errors leave no trace."""

    def __init__(
        self,
        block_table: Tensor,  # [num_groups, num_seqs, max_blocks] or [num_seqs, max_blocks]
        seq_lens: Tensor,  # [num_seqs]
        free_ring: Tensor,  # [num_blocks]
        ref_counts: Tensor,  # [num_blocks]
        counters: Tensor,  # [NUM_COUNTERS]
        block_size: int,
    ) -> None:
        self.tensors = (block_table, seq_lens, free_ring, ref_counts, counters)
        self.table: list[list[list[int]]] = (block_table if block_table.dim() == 3 else block_table[None]).tolist()
        self.lens: list[int] = seq_lens.tolist()
        self.ring: list[int] = free_ring.tolist()
        self.counts: list[int] = ref_counts.tolist()
        self.counters: list[int] = counters.tolist()
        self.block_size = block_size
        self.max_blocks = block_table.shape[-1]
        self.wanted = 0
        self.available = 0

    def store(self) -> None:
        lists = (self.table, self.lens, self.ring, self.counts, self.counters)
        for tensor, values in zip(self.tensors, lists):
            tensor.copy_(torch.tensor(values, dtype=tensor.dtype).reshape(tensor.shape))

    @property
    def num_free(self) -> int:
        return self.counters[TAIL] - self.counters[HEAD]

    def pop(self) -> int:
        """The longest-released free block, held once. Past the last one it only counts what was wanted."""
        self.wanted += 1
        if self.num_free == 0:
            return -1
        block = self.ring[self.counters[HEAD] % len(self.ring)]
        self.counters[HEAD] += 1
        self.counts[block] = 1
        return block

    def drop(self, block: int) -> None:
        """One table entry fewer holds the block; the last one gives it back."""
        if not 0 <= block < len(self.counts):
            return
        self.counts[block] -= 1
        if self.counts[block] == 0:
            self.ring[self.counters[TAIL] % len(self.ring)] = block
            self.counters[TAIL] += 1

    def release(self, entries: list[int], columns: range) -> None:
        for column in columns:
            self.drop(entries[column])
            entries[column] = -1


@_no_grad
def allocate(
    block_table: Tensor,
    seq_lens: Tensor,
    free_ring: Tensor,
    ref_counts: Tensor,
    counters: Tensor,
    cu_seqlens_q: Tensor,
    num_tokens: int,
    block_size: int,
    *,
    num_new: Tensor | None = None,
    retain: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Give rows the blocks of their next tokens: (slot_mapping, block_mapping)."""
    state = _AllocatorState(block_table, seq_lens, free_ring, ref_counts, counters, block_size)
    spans = _spans(cu_seqlens_q, num_tokens)
    news = [end - begin for begin, end in spans] if num_new is None else num_new.tolist()
    news = [min(max(new, 0), end - begin) for new, (begin, end) in zip(news, spans)]
    keep = [-1] * len(state.table) if retain is None else retain.tolist()
    for row, (length, new) in enumerate(zip(state.lens, news)):
        columns = _blocks_of(length + new, block_size)
        if columns > state.max_blocks:
            raise ValueError(
                f"block_table must have at least {columns} columns for row {row} of {length} + {new} tokens, "
                f"got {state.max_blocks}"
            )

    # 1. Blocks that lie wholly behind what stays readable go first: they may serve this very call.
    for entries_of_group, kept in zip(state.table, keep):
        for entries, length in zip(entries_of_group, state.lens):
            if kept >= 0:
                state.release(entries, range(max(length - kept, 0) // block_size))
    state.available = state.num_free

    # 2. A shared last block is replaced before it is written; 3. new blocks up to the new length.
    pairs = []
    for entries_of_group in state.table:
        for entries, length, new in zip(entries_of_group, state.lens, news):
            pair = (-1, -1)
            last = length // block_size
            if new > 0 and length % block_size and 0 <= entries[last] < len(state.counts):
                shared = entries[last]
                if state.counts[shared] > 1:
                    state.counts[shared] -= 1
                    entries[last] = state.pop()
                    pair = (shared, entries[last])
            pairs.append(pair)
            for column in range(_blocks_of(length, block_size), _blocks_of(length + new, block_size)):
                entries[column] = state.pop()
    if state.wanted > state.available:
        raise OutOfBlocksError(state.wanted, state.available)

    slots = [[-1] * num_tokens for _ in state.table]
    for group, entries_of_group in enumerate(state.table):
        for (_, end), entries, length, new in zip(spans, entries_of_group, state.lens, news):
            for i in range(new):
                block, offset = entries[(length + i) // block_size], (length + i) % block_size
                slots[group][end - new + i] = block * block_size + offset if block >= 0 else -1
    state.lens = [length + new for length, new in zip(state.lens, news)]
    state.store()
    device = block_table.device
    slot_mapping = torch.tensor(slots, dtype=torch.int64, device=device).reshape(len(state.table), num_tokens)
    block_mapping = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
    return slot_mapping if block_table.dim() == 3 else slot_mapping[0], block_mapping


@_no_grad
def free(
    block_table: Tensor,
    seq_lens: Tensor,
    free_ring: Tensor,
    ref_counts: Tensor,
    counters: Tensor,
    new_lens: Tensor,
    block_size: int,
) -> None:
    """Cut rows to `new_lens` and give back what nobody holds any more."""
    state = _AllocatorState(block_table, seq_lens, free_ring, ref_counts, counters, block_size)
    cuts = new_lens.tolist()
    for row, cut in enumerate(cuts):
        if cut < 0:
            raise ValueError(f"new_lens must be >= 0, got {cut} for row {row}")
    for entries_of_group in state.table:
        for entries, length, cut in zip(entries_of_group, state.lens, cuts):
            first, end = _blocks_of(cut, block_size), _blocks_of(length, block_size)
            state.release(entries, range(first, end)[::-1])
    state.lens = [min(length, cut) for length, cut in zip(state.lens, cuts)]
    state.store()


@_no_grad
def fork(
    block_table: Tensor,
    seq_lens: Tensor,
    free_ring: Tensor,
    ref_counts: Tensor,
    counters: Tensor,
    source_rows: Tensor,
    destination_rows: Tensor,
    block_size: int,
) -> None:
    """Make rows share the blocks of other rows."""
    state = _AllocatorState(block_table, seq_lens, free_ring, ref_counts, counters, block_size)
    sources, destinations = source_rows.tolist(), destination_rows.tolist()
    for name, rows in (("source_rows", sources), ("destination_rows", destinations)):
        for row in rows:
            if not 0 <= row < len(state.lens):
                raise ValueError(f"{name} must be in 0 .. {len(state.lens) - 1}, got {row}")
    if len(set(destinations)) < len(destinations):
        raise ValueError(f"destination_rows must name no row twice, got {destinations}")

    # Used columns alone: what stands past a row's length says nothing. A row forked onto itself stays as it is.
    pairs = [(source, destination) for source, destination in zip(sources, destinations) if source != destination]
    lens_before = list(state.lens)
    columns = [_blocks_of(length, block_size) for length in lens_before]
    for entries_of_group in state.table:
        taken = [entries_of_group[source][: columns[source]] for source, _ in pairs]
        for block in itertools.chain.from_iterable(taken):
            if 0 <= block < len(state.counts):
                state.counts[block] += 1
        for (_, destination), blocks in zip(pairs, taken):
            entries = entries_of_group[destination]
            state.release(entries, range(columns[destination])[::-1])
            entries[: len(blocks)] = blocks
    for source, destination in zip(sources, destinations):
        state.lens[destination] = lens_before[source]
    state.store()


# ---------------------------------------------------------------------------------------------------------------------
# Data movement


def _bits(cache: Tensor) -> Tensor:
    """Indexing is not implemented for float8: move such a cache as bytes."""
    return cache.view(torch.uint8) if cache.dtype in MAX_OF_DTYPE else cache


def _is_per_slot(scale: Tensor | None) -> bool:
    return scale is not None and scale.dim() == 3


def _store(x: Tensor, cache: Tensor, block: Tensor, offset: Tensor, scale: Tensor | None) -> None:
    """x: [num_tokens, num_kv_heads, head_size] -> cache[block, offset], both [num_tokens]."""
    largest = MAX_OF_DTYPE.get(cache.dtype)
    if scale is not None:
        x = x.float()
    if scale is not None and largest is not None and _is_per_slot(scale):
        absmax = x.abs().nan_to_num(0.0, posinf=torch.finfo(torch.float32).max).amax(-1)  # [num_tokens, num_kv_heads]
        made = absmax / absmax.new_tensor(largest)  # by a number, CUDA would multiply by its rounded reciprocal
        made = torch.where(made > 0, made, 1.0)
        scale[block, offset] = made
        x = x / made[:, :, None]
    elif scale is not None:
        x = x / scale.reshape(-1, 1)  # [1 or num_kv_heads, 1]
    if largest is not None:
        x = x.float()
        if cache.dtype == torch.int8:
            x = torch.where(x.isnan(), 0.0, x.round()).clamp(-largest - 1, largest)  # round: to nearest, ties to even
        else:
            x = x.clamp(-largest, largest)
    _bits(cache)[block, offset] = _bits(x.to(cache.dtype))


@_no_grad
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write keys and values [num_tokens, num_kv_heads, head_size(_v)] into their slots."""
    key, value = _token_rows(key), _token_rows(value)
    for name, cache, scale in (("key_scale", key_cache, key_scale), ("value_scale", value_cache, value_scale)):
        if _is_per_slot(scale) and cache.dtype not in MAX_OF_DTYPE:
            raise ValueError(f"{name} must be per tensor or per head for a {cache.dtype} cache, got a scale per slot")
    num_blocks, block_size = key_cache.shape[:2]
    written = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    slots = slot_mapping[written]
    block, offset = slots // max(block_size, 1), slots % max(block_size, 1)
    _store(key[written], key_cache, block, offset, key_scale)
    _store(value[written], value_cache, block, offset, value_scale)


def _move_blocks(sources: Sequence[Tensor], destinations: Sequence[Tensor], block_mapping: Tensor) -> None:
    read = []
    for source, destination in zip(sources, destinations):
        old, new = block_mapping[:, 0], block_mapping[:, 1]
        valid = (old >= 0) & (old < source.shape[0]) & (new >= 0) & (new < destination.shape[0])
        read.append((_bits(source)[old[valid].to(source.device)], new[valid].to(destination.device)))
    for destination, (blocks, new) in zip(destinations, read):
        _bits(destination)[new] = blocks.to(destination.device)


@_no_grad
def copy_blocks(key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copy whole blocks inside caches; every read happens before any write."""
    caches = [*key_caches, *value_caches]
    _move_blocks(caches, caches, block_mapping)


@_no_grad
def swap_blocks(source_caches: Sequence[Tensor], destination_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copy whole blocks from one list of caches to another."""
    _move_blocks(source_caches, destination_caches, block_mapping)


def _real_scale(scale: Tensor, blocks: Tensor) -> Tensor:
    """The scales of the given blocks [n], broadcastable to [n, block_size, num_kv_heads, 1]."""
    return scale[blocks][..., None] if _is_per_slot(scale) else scale.reshape(-1, 1)


def _sequence(
    cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_size]
    scale: Tensor | None,
    entries: Tensor,  # [max_blocks], a row of the block table
    length: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """One sequence's keys or values [length, num_kv_heads, head_size], zero where unmapped; and [length], mapped."""
    block_size = cache.shape[1]
    blocks = entries[: _blocks_of(length, block_size)].long()
    mapped = (blocks >= 0) & (blocks < cache.shape[0])
    rows = cache.new_zeros(len(blocks), *cache.shape[1:], dtype=dtype)
    read = blocks[mapped]
    rows[mapped] = _bits(cache)[read].view(cache.dtype).to(dtype)
    if scale is not None:
        rows[mapped] *= _real_scale(scale, read).to(dtype)
    return rows.flatten(0, 1)[:length], mapped.repeat_interleave(block_size)[:length]


@_no_grad
def gather_blocks(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_len: int,
    *,
    dtype: torch.dtype | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense, right-aligned keys and values [num_seqs, num_kv_heads, max_len, head_size(_v)]."""
    if dtype is None:
        dtype = torch.float32 if key_cache.dtype in MAX_OF_DTYPE else key_cache.dtype
    dense = []
    for cache, scale in ((key_cache, key_scale), (value_cache, value_scale)):
        num_seqs, capacity = block_table.shape[0], block_table.shape[1] * cache.shape[1]
        out = cache.new_zeros(num_seqs, cache.shape[2], max_len, cache.shape[3], dtype=dtype)
        for row, length in enumerate(seq_lens.tolist()):
            length = min(max(length, 0), capacity)
            kept = min(length, max_len)
            rows, _ = _sequence(cache, scale, block_table[row], length, torch.float32)  # [length, num_kv_heads, D]
            out[row, :, max_len - kept :] = rows[length - kept :].transpose(0, 1)
        dense.append(out)
    return dense[0], dense[1]


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def _visible(
    positions: Tensor,  # [q_len, 1], absolute, negative for a query that stands before key 0
    mapped: Tensor,  # [length]
    causal: bool,
    window_left: int,
    window_right: int,
) -> Tensor:
    """[q_len, length], True where a query sees a key."""
    keys = torch.arange(mapped.shape[0], device=mapped.device)
    visible = mapped.expand(positions.shape[0], -1)
    if causal:
        visible = visible & (keys <= positions)
    if window_left >= 0:
        visible = visible & (keys >= positions - window_left)
    if window_right >= 0:
        visible = visible & (keys <= positions + window_right)
    return visible


def _mask_columns(mask: Tensor, length: int) -> Tensor:
    """[q_len, heads, width] -> [heads, q_len, length]: columns end at the last key, keys before them are unmasked."""
    missing = length - mask.shape[-1]
    neutral = 1 if mask.dtype == torch.bool else 0.0
    columns = torch.nn.functional.pad(mask, (max(missing, 0), 0), value=neutral)
    return columns[..., columns.shape[-1] - length :].transpose(0, 1)


def _product(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """A matrix product summed in float32 at least, as the matmul of every backend does, and rounded once."""
    wide = torch.promote_types(a.dtype, torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        return torch.einsum(equation, a.to(wide), b.to(wide)).to(a.dtype)


def attention_in(
    compute_dtype: torch.dtype,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    mask: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """`paged_attention_with_lse` with every step, and both results, in `compute_dtype`.

    float64 gives what a kernel is measured against, the query's own dtype the naive computation whose error it may
    at most double.
    """
    num_tokens, num_heads = query.shape[:2]
    num_kv_heads, head_size_v = value_cache.shape[2:]
    capacity = block_table.shape[1] * key_cache.shape[1]
    out = query.new_zeros(num_tokens, num_heads, head_size_v, dtype=compute_dtype)
    lse = query.new_full((num_tokens, num_heads), float("-inf"), dtype=compute_dtype)
    for row, (begin, end) in enumerate(_spans(cu_seqlens_q, num_tokens)):
        length = min(max(int(seq_lens[row]), 0), capacity)
        if begin == end or length == 0:
            continue
        keys, mapped = _sequence(key_cache, key_scale, block_table[row], length, compute_dtype)
        values, _ = _sequence(value_cache, value_scale, block_table[row], length, compute_dtype)
        positions = torch.arange(length - (end - begin), length, device=query.device)[:, None]
        visible = _visible(positions, mapped, causal, window_left, window_right)  # [q_len, length]
        added = None
        if mask is not None:
            columns = _mask_columns(mask[begin:end], length)  # [heads, q_len, length]
            visible = visible & (columns if mask.dtype == torch.bool else columns > float("-inf"))
            added = None if mask.dtype == torch.bool else columns.to(compute_dtype)
        seen = visible.reshape(-1, length).any(0)[:, None, None]
        keys, values = torch.where(seen, keys, 0.0), torch.where(seen, values, 0.0)  # never 0 * NaN

        group = num_heads // num_kv_heads
        q = query[begin:end].to(compute_dtype)
        scores = _product("qhd,khd->hqk", q, keys.repeat_interleave(group, dim=1)) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            key_positions = torch.arange(length, device=query.device, dtype=compute_dtype)
            scores = scores + alibi_slopes.to(compute_dtype)[:, None, None] * key_positions
        if added is not None:
            scores = scores + added
        scores = scores.masked_fill(~visible, float("-inf"))  # [num_heads, q_len, length]
        lse[begin:end] = torch.logsumexp(scores, -1).transpose(0, 1)
        if sinks is not None:  # one key more, without a value
            sink = sinks.to(compute_dtype)[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat([scores, sink], -1)
        weights = torch.softmax(scores, -1)[..., :length]
        weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0.0)  # no key: 0, not NaN
        out[begin:end] = _product("hqk,khd->qhd", weights, values.repeat_interleave(group, dim=1))
    return out, lse


@_no_grad
def paged_attention_with_lse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    mask: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of packed queries over paged keys: (out, lse)."""
    out, lse = attention_in(
        torch.float32,
        _token_rows(query),
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_seqlen_q,
        scale=scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        mask=mask,
        deterministic=deterministic,
    )
    out = out.to(query.dtype)
    return (out.unsqueeze(1) if query.dim() == 4 else out), lse


@_no_grad
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    mask: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Attention of packed queries over paged keys [num_tokens, num_heads, head_size_v]."""
    out, _ = paged_attention_with_lse(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        max_seqlen_q,
        scale=scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        mask=mask,
        deterministic=deterministic,
    )
    return out


@_no_grad
def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys: (out, lse)."""
    out, lse = merge_in(torch.float32, out_a, lse_a, out_b, lse_b, sinks=sinks)
    return out.to(out_a.dtype), lse


def merge_in(
    compute_dtype: torch.dtype,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`merge_attention_states` with every step, and both results, in `compute_dtype`."""
    lse_a, lse_b = lse_a.to(compute_dtype), lse_b.to(compute_dtype)  # [num_tokens, num_heads]
    sink = torch.full_like(lse_a, float("-inf")) if sinks is None else sinks.to(compute_dtype).expand_as(lse_a)
    largest = torch.maximum(torch.maximum(lse_a, lse_b), sink)
    largest = torch.where(largest == float("-inf"), 0.0, largest)  # both empty: weights 0, not exp(-inf - -inf)
    weight_a, weight_b, rest = (torch.exp(x - largest)[..., None] for x in (lse_a, lse_b, sink))
    # An empty part's out says nothing, whatever it holds.
    parts = [torch.where(w > 0, w * out.to(compute_dtype), 0.0) for w, out in ((weight_a, out_a), (weight_b, out_b))]
    total = weight_a + weight_b + rest
    out = torch.where(total > 0, (parts[0] + parts[1]) / total, 0.0)
    return out, torch.logaddexp(lse_a, lse_b)


# ---------------------------------------------------------------------------------------------------------------------
# Shared prefixes


def _common_blocks(rows: Sequence[Sequence[int]], before_queries: Sequence[int], row: int) -> int:
    """Columns, from the first, in which a row and the one before it hold the same blocks."""
    limit = min(before_queries[row - 1], before_queries[row])
    return next((column for column in range(limit) if rows[row - 1][column] != rows[row][column]), limit)


def _best_runs(common: Sequence[int], block_size: int, min_saved: int) -> list[tuple[int, int, int]]:
    """(first row, row after the last, blocks shared) of the runs that save most; of equal ones the shorter runs."""
    best: list[tuple[int, list[tuple[int, int, int]]]] = [(0, [])]  # of rows 0 .. end - 1: keys saved, runs
    for end in range(1, len(common) + 1):
        saved, runs = best[end - 1]
        choice = (saved, [*runs, (end - 1, end, 0)])
        for start in range(end - 2, -1, -1):
            shared = min(common[start + 1 : end])
            gain = (end - start - 1) * shared * block_size
            if gain >= min_saved and best[start][0] + gain > choice[0]:
                choice = (best[start][0] + gain, [*best[start][1], (start, end, shared)])
        best.append(choice)
    return best[-1][1]


@_no_grad
def find_shared_prefixes(
    block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, block_size: int, min_saved: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs of rows that begin with the same blocks: (prefix_lens, prefix_cu_seqlens_q, suffix_table, suffix_lens)."""
    num_seqs, max_blocks = block_table.shape
    rows, edges = block_table.tolist(), cu_seqlens_q.tolist()
    lens = [min(max(length, 0), max_blocks * block_size) for length in seq_lens.tolist()]
    before_queries = [
        max(0, length - max(0, end - begin)) // block_size for length, (begin, end) in zip(lens, pairwise(edges))
    ]
    common = [_common_blocks(rows, before_queries, row) if row else 0 for row in range(num_seqs)]
    runs = _best_runs(common, block_size, min_saved)
    sharing = [run for run in runs if run[2] > 0] or [(num_seqs, num_seqs, 0)]
    first, last = sharing[0][0], sharing[-1][1]  # rows outside have no span
    prefix_lens, prefix_edges = [0] * num_seqs, [edges[last]] * (num_seqs + 1)
    for start, end, shared in runs:
        prefix_lens[start] = shared * block_size
        for row in range(start, end):
            prefix_edges[row] = edges[min(max(start if row == start else end, first), last)]
            lens[row] -= shared * block_size
            blocks = rows[row][shared : shared + _blocks_of(lens[row], block_size)]
            rows[row] = blocks + [-1] * (max_blocks - len(blocks))

    def like(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=block_table.device)

    return like(prefix_lens), like(prefix_edges), like(rows).reshape(num_seqs, max_blocks), like(lens)
