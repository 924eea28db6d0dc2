"""Typed wrapper per op of `torch.ops.paged_kv`, with the fake that lets torch.compile and torch.export trace it.

A wrapper has its schema's names, order and defaults (`csrc/ops.h`, where each is typed once) and adds what a C++ kernel
cannot do: it refuses tensors that require grad, casts small per-head vectors to float32, and gives errors their types
(`OutOfBlocksError`, ValueError). Everything else, argument checks included, is the op's own.

Words used throughout: a *block* is `block_size` consecutive token positions of one sequence; a *slot* is one token
position in the pool, `block * block_size + offset`; -1 is "no block" in a table and "write nothing" in a slot mapping.
Lengths count tokens. Index tensors are int32 except slots and block pairs, which are int64.

Errors: ValueError or TypeError "<argument> must <rule>, got <value>" before anything is written. With
`PAGED_KV_DEBUG=1` in the environment the contents of index tensors are checked too; without it they are taken as they
are, and whatever they hold, no memory outside the caches is touched.

Autocast does not reach into an op: a key or value is cast to the cache's dtype when it is stored, and attention is
computed in the query's dtype with float32 accumulation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference
from ._library import load_libraries
from .errors import typed

__all__ = [
    "allocate",
    "copy_blocks",
    "find_shared_prefixes",
    "fork",
    "free",
    "gather_blocks",
    "merge_attention_states",
    "paged_attention",
    "paged_attention_with_lse",
    "reshape_and_cache",
    "swap_blocks",
]

load_libraries()


def _op(name: str) -> Callable[..., Any]:
    """An op whose errors have their types. Its overload is resolved here, once, and not in each call."""
    overload = getattr(torch.ops.paged_kv, name).default

    def call(*args: Any, **options: Any) -> Any:
        try:
            return overload(*args, **options)
        except RuntimeError as error:
            raise typed(error) from None

    return call


_allocate = _op("allocate")
_copy_blocks = _op("copy_blocks")
_find_shared_prefixes = _op("find_shared_prefixes")
_fork = _op("fork")
_free = _op("free")
_gather_blocks = _op("gather_blocks")
_merge_attention_states = _op("merge_attention_states")
_paged_attention = _op("paged_attention")
_paged_attention_with_lse = _op("paged_attention_with_lse")
_reshape_and_cache = _op("reshape_and_cache")
_swap_blocks = _op("swap_blocks")


def _refuse_grad(**tensors: Tensor | None) -> None:
    """The ops have no backward: without this a tensor that requires grad would be cut from the graph without a word."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name} must not require grad: torch_paged_kv ops are for inference; wrap the call in torch.no_grad()"
            )


def _float32(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.dtype == torch.float32 else vector.float()


# ---------------------------------------------------------------------------------------------------------------------
# Allocator


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
    """Give every sequence the blocks its next tokens need, and every new token its slot.

    Per group of layers, in this order: blocks wholly behind what `retain` keeps are released; a last block that others
    hold too is replaced before it is written (copy-on-write: copy the returned pairs with `copy_blocks` before
    `reshape_and_cache`); new blocks are taken, longest-released first. All or nothing over all groups and rows. State
    is in the tensors alone, so the call works in a compiled graph and in a CUDA graph.

    Args:
        block_table: int32 [num_groups, num_seqs, max_blocks], or [num_seqs, max_blocks] for one group. Written.
        seq_lens: int32 [num_seqs], tokens held; grows by the new tokens. Shared by the groups. Written.
        free_ring: int32 [num_blocks], numbers of free blocks; position p of the queue is at `p % num_blocks`. Written.
        ref_counts: int32 [num_blocks], table entries that hold each block. Written.
        counters: int64 [4]: ring head, ring tail, failed allocations, blocks wanted by the first of them. Written.
        cu_seqlens_q: int32 [num_seqs + 1], prefix sum: row s owns tokens `cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1`.
        num_tokens: tokens in the batch, padding included.
        block_size: tokens a block holds.
        num_new: int32 [num_seqs], tokens each row gets, right-aligned in its span. None: the whole span.
        retain: int32 [num_groups], tokens before this step that stay readable; -1 or None: all. A sliding window of W
            keys needs W - 1.

    Returns:
        slot_mapping: int64 [num_groups, num_tokens] ([num_tokens] for a two-dimensional table), -1 for padding.
        block_mapping: int64 [num_groups * num_seqs, 2], (source, destination) of each block to copy, else (-1, -1).

    Raises:
        OutOfBlocksError: on CPU, when fewer blocks are free than wanted; nothing has changed. On CUDA nothing is
            raised: `counters` records the failure, no table, length or count changes, and all slots are -1.
        ValueError: a row needs more columns than `block_table` has.

    Source: block tables and copy-on-write after Kwon et al., "Efficient Memory Management for Large Language Model
    Serving with PagedAttention", SOSP 2023, section 4.
    """
    return _allocate(  # type: ignore[no-any-return]
        block_table, seq_lens, free_ring, ref_counts, counters, cu_seqlens_q, num_tokens, block_size,
        num_new=num_new, retain=retain,
    )  # fmt: skip


def free(
    block_table: Tensor,
    seq_lens: Tensor,
    free_ring: Tensor,
    ref_counts: Tensor,
    counters: Tensor,
    new_lens: Tensor,
    block_size: int,
) -> None:
    """Shorten sequences, and give back the blocks that nobody holds any more.

    Blocks wholly past the new length leave the table, tail first, so that a prefix outlives its tail in the free queue.
    A block the new length lies in stays, shared or not: the next `allocate` copies it if it has to be written.

    Args:
        block_table: int32 [num_groups, num_seqs, max_blocks], or [num_seqs, max_blocks] for one group. Written.
        seq_lens: int32 [num_seqs]. Written.
        free_ring: int32 [num_blocks]. Written.
        ref_counts: int32 [num_blocks]. Written.
        counters: int64 [4]. Written.
        new_lens: int32 [num_seqs], length to keep of each row: 0 frees it whole, its length or more changes nothing.
        block_size: tokens a block holds.

    Raises:
        ValueError: on CPU, when a length is negative (on CUDA such a row does not change).
    """
    _free(block_table, seq_lens, free_ring, ref_counts, counters, new_lens, block_size)


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
    """Make rows share the blocks of other rows: beam reorder, parallel sampling, reuse of a prompt.

    A copy of table rows and reference counts; no key or value moves. All sources are read before a row is written, so
    any permutation is one call. What the destinations held before is given back.

    Args:
        block_table: int32 [num_groups, num_seqs, max_blocks], or [num_seqs, max_blocks] for one group. Written.
        seq_lens: int32 [num_seqs]. Written.
        free_ring: int32 [num_blocks]. Written.
        ref_counts: int32 [num_blocks]. Written.
        counters: int64 [4]. Written.
        source_rows: int64 [n], row each destination becomes a copy of.
        destination_rows: int64 [n], no row twice.
        block_size: tokens a block holds.

    Raises:
        ValueError: on CPU, when a row is outside 0 .. num_seqs - 1 or a destination is named twice.
    """
    _fork(block_table, seq_lens, free_ring, ref_counts, counters, source_rows, destination_rows, block_size)


# ---------------------------------------------------------------------------------------------------------------------
# Data movement


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots, casting or quantising on the way.

    A stored number is `round_to_nearest_even(x / scale)`, saturated to the range of an 8-bit cache: NaN stays NaN in
    float8 and becomes 0 in int8. A scale is one number, one per head, or one per slot and head; the last is written
    here, as the row's absolute maximum over the dtype's largest value (448, 57344, 127). No scale equals 1.0, bit for
    bit.

    Args:
        key: [num_tokens, num_kv_heads, head_size], float32, float16 or bfloat16; last dim contiguous. Or one token of
            each sequence as models have it, [num_seqs, num_kv_heads, 1, head_size]: a decode step needs no view.
        value: [num_tokens, num_kv_heads, head_size_v], or [num_seqs, num_kv_heads, 1, head_size_v]. Of another dtype
            than `key` (autocast): both are promoted.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], any strides, last dim contiguous; a float dtype or
            float8_e4m3fn, float8_e5m2, int8. Written.
        value_cache: [num_blocks, block_size, num_kv_heads, head_size_v]. Written.
        slot_mapping: int64 [num_tokens]; a slot outside 0 .. num_blocks * block_size - 1 writes nothing.
        key_scale: float32 [], [1], [num_kv_heads] or [num_blocks, block_size, num_kv_heads] (written).
        value_scale: likewise.

    Raises:
        ValueError: key or value requires grad while grad mode is on; a shape, dtype or device does not fit.
    """
    if torch.is_grad_enabled():
        _refuse_grad(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    if key.dtype != value.dtype:  # a promotion loses nothing: the cast to the cache's dtype comes once, at the end
        dtype = torch.promote_types(key.dtype, value.dtype)
        key, value = key.to(dtype), value.to(dtype)
    _reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


def copy_blocks(key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copy whole blocks inside the caches of all layers, in one launch.

    Every read happens before any write, so pairs may chain: (1, 2), (2, 3) puts the old block 2 into 3.

    Args:
        key_caches: one [num_blocks, ...] tensor per layer. Any tensors with blocks in front will do, whole storages and
            per-slot scales included. Written.
        value_caches: likewise, of any number. Written.
        block_mapping: int64 [num_pairs, 2], (source, destination); a pair with a number outside 0 .. num_blocks - 1
            is skipped. No destination twice.
    """
    _copy_blocks(list(key_caches), list(value_caches), block_mapping)


def swap_blocks(source_caches: Sequence[Tensor], destination_caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    """Copy blocks from one list of caches to another: between GPU and pinned host memory, or between two pools.

    Between devices the copy is asynchronous and ordered on the current stream of the GPU; host memory must be pinned
    and stay untouched until the stream has passed.

    Args:
        source_caches: one [num_blocks, ...] tensor per layer.
        destination_caches: as many, with blocks of the same shape and dtype. Written.
        block_mapping: int64 [num_pairs, 2], (source, destination), on the CPU when one side is; a pair with a number
            out of range is skipped.
    """
    _swap_blocks(list(source_caches), list(destination_caches), block_mapping)


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
    """Dense keys and values of every sequence, for models that must see them, for saving and for tests.

    Args:
        key_cache: [num_blocks, block_size, num_kv_heads, head_size].
        value_cache: [num_blocks, block_size, num_kv_heads, head_size_v].
        block_table: int32 [num_seqs, max_blocks].
        seq_lens: int32 [num_seqs].
        max_len: columns of the result. A longer sequence gives its last `max_len` tokens.
        dtype: of the result; None: the cache's, or float32 for an 8-bit cache.
        key_scale: as for `reshape_and_cache`; applied.
        value_scale: likewise.

    Returns:
        key: [num_seqs, num_kv_heads, max_len, head_size], value: [..., head_size_v]. Right-aligned: the last token of a
        row is at column max_len - 1. The rest, unmapped blocks included, is 0.
    """
    if torch.is_grad_enabled():
        _refuse_grad(key_cache=key_cache, value_cache=value_cache)
    return _gather_blocks(  # type: ignore[no-any-return]
        key_cache, value_cache, block_table, seq_lens, max_len,
        dtype=dtype, key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def _attention_options(
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    mask: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    """The options that are not at their defaults: every keyword costs a call most of a microsecond, in every layer."""
    options: dict[str, Any] = {}
    if not causal:
        options["causal"] = causal
    if window_left != -1:
        options["window_left"] = window_left
    if window_right != -1:
        options["window_right"] = window_right
    if softcap != 0.0:
        options["softcap"] = softcap
    if alibi_slopes is not None:
        options["alibi_slopes"] = _float32(alibi_slopes)
    if sinks is not None:
        options["sinks"] = _float32(sinks)
    if key_scale is not None:
        options["key_scale"] = key_scale
    if value_scale is not None:
        options["value_scale"] = value_scale
    if mask is not None:
        options["mask"] = mask
    if deterministic:
        options["deterministic"] = deterministic
    return options


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
    """Attention of packed queries over each sequence's paged keys. Decode, chunked prefill and mixed batches alike.

    Query i of row s stands at position `p = seq_lens[s] - q_len + i` (causal is aligned bottom-right) and sees key j if
    `j <= p` (when causal) and `p - window_left <= j <= p + window_right` (each when >= 0) and its mask lets it. Order:
    scale, softcap, ALiBi, mask, then the sink once. Padding on the left needs nothing special: those queries stand at
    negative positions. A query that sees no key gives 0. Keys that no query of the row sees are never read.

    Args:
        query: [num_tokens, num_heads, head_size], float32, float16 or bfloat16; last dim contiguous. Or one token of
            each sequence as models have it, [num_seqs, num_heads, 1, head_size].
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], any strides, last dim contiguous; its dtype need
            not be the query's.
        value_cache: [num_blocks, block_size, num_kv_heads, head_size_v].
        block_table: int32 [num_seqs, max_blocks]; entries outside 0 .. num_blocks - 1 make their keys invisible,
            columns past ceil(seq_len / block_size) are never read.
        seq_lens: int32 [num_seqs], keys each sequence holds, this step's included.
        cu_seqlens_q: int32 [num_seqs + 1], prefix sum of this step's query lengths. Tokens outside every span give 0.
        max_seqlen_q: an upper bound of the query lengths; it shapes the schedule, not the result.
        scale: factor of q.k, usually head_size ** -0.5.
        causal: whether a query sees only keys up to its own position.
        window_left: keys before its own position that a query sees, -1 for all. A window of W keys is W - 1.
        window_right: keys after its own position, -1 for all.
        softcap: score = softcap * tanh(score / softcap); 0 is off.
        alibi_slopes: [num_heads]; adds slope * key position to the score.
        sinks: [num_heads], one logit more in each head's softmax, without a value.
        key_scale: as for `reshape_and_cache`.
        value_scale: likewise.
        mask: [num_tokens, num_heads or 1, width], bool (True is visible) or float32 (added to the score). Columns are
            aligned bottom-right: column c speaks of key seq_len - width + c; keys before the first are not masked.
        deterministic: make a row's bits independent of its neighbours in the batch.

    Returns:
        [num_tokens, num_heads, head_size_v], contiguous, of the query's dtype; [num_seqs, 1, num_heads, head_size_v]
        for a query of four dimensions.

    Source: paged keys after Kwon et al. (SOSP 2023); one pass with an online softmax after Milakov and Gimelshein
    (2018) and Dao et al., "FlashAttention" (2022); long rows split over the keys after "Flash-Decoding" (Dao et al.,
    2023).
    """
    if torch.is_grad_enabled():
        _refuse_grad(query=query, key_cache=key_cache, value_cache=value_cache, sinks=sinks, mask=mask)
    return _paged_attention(  # type: ignore[no-any-return]
        query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
        scale=scale,
        **_attention_options(
            causal, window_left, window_right, softcap, alibi_slopes, sinks, key_scale, value_scale, mask, deterministic
        ),
    )  # fmt: skip


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
    """`paged_attention` that also returns the log-sum-exp of the scores, for merging attention over parts of the keys.

    Returns:
        out: as `paged_attention`.
        lse: float32 [num_tokens, num_heads], natural log, over the keys alone (after scale, softcap, ALiBi and mask); a
        sink never enters it. -inf where no key is seen.
    """
    if torch.is_grad_enabled():
        _refuse_grad(query=query, key_cache=key_cache, value_cache=value_cache, sinks=sinks, mask=mask)
    return _paged_attention_with_lse(  # type: ignore[no-any-return]
        query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
        scale=scale,
        **_attention_options(
            causal, window_left, window_right, softcap, alibi_slopes, sinks, key_scale, value_scale, mask, deterministic
        ),
    )  # fmt: skip


def merge_attention_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each: of a shared prefix, say.

    Args:
        out_a: [num_tokens, num_heads, head_size_v], contiguous.
        lse_a: float32 [num_tokens, num_heads], natural log. -inf is the empty set, whose out is ignored.
        out_b: as `out_a`, of the same dtype.
        lse_b: as `lse_a`.
        sinks: [num_heads]; to be given in the last merge alone, with none in the parts.

    Returns:
        out: [num_tokens, num_heads, head_size_v]; 0 where both parts are empty.
        lse: float32 [num_tokens, num_heads] over the keys alone; -inf where both parts are empty.
    """
    if torch.is_grad_enabled():
        _refuse_grad(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, sinks=sinks)
    return _merge_attention_states(out_a, lse_a, out_b, lse_b, sinks=_float32(sinks))  # type: ignore[no-any-return]


def find_shared_prefixes(
    block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, block_size: int, min_saved: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find runs of neighbouring rows whose tables begin with the same blocks, so that these are read once a run.

    What rows may share are blocks wholly before the first query of each, so that every query of the run sees all of
    them. The rows are divided into runs so that most reads of keys are saved: a run of r rows that share n tokens saves
    (r - 1) * n. Where `min_saved` is not reached the rows are runs of their own, and share nothing. Which rows share is
    found where the tables are: nothing comes to the host, and a replayed CUDA graph follows other tables and lengths.

    The results are what two calls of `paged_attention_with_lse` take, to be merged by `merge_attention_states`: one
    over the prefixes (`block_table`, `prefix_lens`, `prefix_cu_seqlens_q`, causal=False) and one over the rest
    (`suffix_table`, `suffix_lens`, `cu_seqlens_q`, causal=True). `torch_paged_kv.shared_prefix` does that.

    Args:
        block_table: int32 [num_seqs, max_blocks], fewer than 2^31 entries. What lies past a row's last block is not
            looked at.
        seq_lens: int32 [num_seqs], keys each row holds, this step's included.
        cu_seqlens_q: int32 [num_seqs + 1], prefix sum of this step's query lengths.
        block_size: tokens a block holds.
        min_saved: fewest reads of a key that a run must save, at least 1.

    Returns:
        prefix_lens: int32 [num_seqs], tokens that the run beginning at a row shares; 0 for every other row.
        prefix_cu_seqlens_q: int32 [num_seqs + 1]: the first row of a run has the queries of all of it, the others none;
            no row before the first run that shares, or after the last, has any.
        suffix_table: int32 [num_seqs, max_blocks], each row's blocks without the shared ones; -1 past them.
        suffix_lens: int32 [num_seqs], keys of each row without the shared ones.

    Source: one read of a shared prefix, merged by log-sum-exp, after Juravsky et al., "Hydragen" (2024), and Ye et al.,
    "Cascade Inference" (2024).
    """
    return _find_shared_prefixes(  # type: ignore[no-any-return]
        block_table, seq_lens, cu_seqlens_q, block_size, min_saved
    )


# ---------------------------------------------------------------------------------------------------------------------
# Fakes: shapes, dtypes and devices of what an op returns. They see symbolic sizes.


def _allocate_fake(
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
    groups = block_table.shape[:-2]  # [num_groups] or []
    num_pairs = block_table.shape[-2] if block_table.dim() == 2 else block_table.shape[0] * block_table.shape[1]
    slot_mapping = block_table.new_empty((*groups, num_tokens), dtype=torch.int64)
    return slot_mapping, block_table.new_empty((num_pairs, 2), dtype=torch.int64)


def _gather_blocks_fake(
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
    if dtype is None:
        dtype = torch.float32 if key_cache.dtype.itemsize == 1 else key_cache.dtype
    shape = (block_table.shape[0], key_cache.shape[2], max_len)
    return (
        key_cache.new_empty((*shape, key_cache.shape[3]), dtype=dtype),
        value_cache.new_empty((*shape, value_cache.shape[3]), dtype=dtype),
    )


def _paged_attention_fake(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *_tables: object, **_options: object
) -> Tensor:
    one_token = (1,) if query.dim() == 4 else ()
    return query.new_empty((query.shape[0], *one_token, query.shape[1], value_cache.shape[3]))


def _paged_attention_with_lse_fake(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, *_tables: object, **_options: object
) -> tuple[Tensor, Tensor]:
    out = _paged_attention_fake(query, key_cache, value_cache)
    return out, query.new_empty((query.shape[0], query.shape[1]), dtype=torch.float32)


def _merge_attention_states_fake(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _find_shared_prefixes_fake(
    block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, block_size: int, min_saved: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_seqs, max_blocks = block_table.shape
    sizes = ((num_seqs,), (num_seqs + 1,), (num_seqs, max_blocks), (num_seqs,))
    lens, spans, table, rest = (block_table.new_empty(size) for size in sizes)
    return lens, spans, table, rest


def _nothing_fake(*_args: object, **_options: object) -> None:
    """Of the ops that only write into their arguments."""


_FAKES: dict[str, Callable[..., Any]] = {
    "allocate": _allocate_fake,
    "find_shared_prefixes": _find_shared_prefixes_fake,
    "gather_blocks": _gather_blocks_fake,
    "merge_attention_states": _merge_attention_states_fake,
    "paged_attention": _paged_attention_fake,
    "paged_attention_with_lse": _paged_attention_with_lse_fake,
}
for _name in __all__:
    torch.library.register_fake(f"paged_kv::{_name}", _FAKES.get(_name, _nothing_fake))


# ---------------------------------------------------------------------------------------------------------------------
# Devices without kernels: the dispatcher goes to the reference, eager and compiled alike, at no cost to the others.


def _reference_kernel(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(reference, name)
    warned: set[str] = set()

    def kernel(*args: Any, **options: Any) -> Any:
        device_type = next(arg for arg in args if isinstance(arg, Tensor)).device.type
        if device_type not in warned:
            warned.add(device_type)
            warnings.warn(
                f"torch_paged_kv has no {device_type} kernel for {name}: running the plain-PyTorch reference, "
                "which is right but slow",
                stacklevel=2,
            )
        return function(*args, **options)

    return kernel


_fallbacks = torch.library.Library("paged_kv", "IMPL")
for _name in __all__:
    _fallbacks.impl(_name, _reference_kernel(_name), "CompositeExplicitAutograd")
