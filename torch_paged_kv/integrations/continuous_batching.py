"""Paged attention for Transformers' own continuous batching (``model.generate_batch`` and its manager). Experimental.

Transformers schedules, allocates and writes block tables itself; what it lacks without a flash-attention package is a
kernel that walks them. :func:`register_continuous_batching` gives it ours, under a name for ``attn_implementation``.
Steps that only decode then read the cache in place, where ``sdpa`` copies it and masks every pair of requests.

Continuous batching asks one question about an implementation, whether it is a flash one: those need no mask, may be
captured, and have decode steps with a block table. For our name the answer is made to be yes. Releases differ in what
they ask and pass, so others than those tested are refused.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from torch_paged_kv import ops

RELEASES = ((5, 17), (5, 24))
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
CACHE_IS_AN_ARGUMENT = VERSION < (5, 24)  # of the attention function; later releases call `cache.update` before it
NAME = "paged|paged_kv" if CACHE_IS_AN_ARGUMENT else "paged_kv"


def register_continuous_batching() -> str:
    """Make the paged attention of this library an implementation that ``generate_batch`` takes.

    Returns:
        The name to load a model with, or to give to ``model.set_attn_implementation``.

    Raises:
        RuntimeError: Transformers is of a release whose continuous batching this was not tested with.
    """
    if VERSION not in RELEASES:
        tested = " or ".join(".".join(map(str, release)) for release in RELEASES)
        raise RuntimeError(f"transformers must be {tested} for continuous batching, got {transformers.__version__}")
    if CACHE_IS_AN_ARGUMENT:
        AttentionInterface.register(NAME, _attend_and_update)
    else:
        AttentionInterface.register(NAME, _attend_updated)
        AttentionMaskInterface.register(NAME, sdpa_mask)  # of ordinary forwards: continuous batching asks for none
    for name in ("cache", "continuous_api", "initialization"):
        _wrap(_module(name), "is_flash_attention_requested", _counts_as_flash)
    _wrap(_module("initialization"), "ensure_decode_fast_path_is_available", _has_block_tables)
    return NAME


# ---- attention functions ------------------------------------------------------------------------------------------


def _attend_and_update(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: Any = None,
    block_table: Tensor | None = None,
    read_index: Any = None,
    write_index: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers 5.17: the attention function writes the cache itself.

    Args:
        module: the attention layer.
        query: ``[1, num_heads, num_tokens, head_size]``, requests one after the other.
        key: ``[1, num_kv_heads, num_tokens, head_size]``, new ones.
        value: ``[1, num_kv_heads, num_tokens, head_size]``, new ones.
        attention_mask: None.
        cache: the ``PagedAttentionCache``.
        cu_seq_lens_q: int32 ``[num_seqs + 1]``.
        cu_seq_lens_k: int32 ``[num_seqs + 1]``, of the keys with the new ones; per kind of layer if there are several.
        max_seqlen_q: longest of the requests' new tokens.
        max_seqlen_k: likewise of their keys; per kind of layer if there are several.
        block_table: int32 ``[num_groups, num_seqs, max_blocks]``, of a step that only decodes; else None.
        read_index: per group int64 ``[num_keys]``, slots of the keys, or empty where no request has earlier ones.
        write_index: per group int64 ``[num_tokens]``, slots of the new keys.
        **kwargs: what the model gives every attention function.

    Returns:
        ``[1, num_tokens, num_heads, head_size]``, and None for the weights.
    """
    if cache is None or cu_seq_lens_q is None:
        raise ValueError(f'attention of "{NAME}" must run in generate_batch: use "sdpa" for an ordinary forward')
    group, lane = cache.layer_index_to_group_indices[module.layer_idx]
    sliding = cache.sliding_windows[module.layer_idx] > 1
    if isinstance(cu_seq_lens_k, dict):
        kind = "sliding_attention" if sliding else "full_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[kind], max_seqlen_k[kind]
    spans = (cu_seq_lens_q, max_seqlen_q)
    if sliding:  # a ring that new tokens may overwrite before earlier ones of their chunk have read it
        keys, values = cache.update(key, value, module.layer_idx, read_index, write_index)
        return _attend_packed(module, query, keys, values, *spans, cu_seq_lens_k, max_seqlen_k, **kwargs)
    blocks = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    caches = (cache.key_cache[lane].view(blocks), cache.value_cache[lane].view(blocks))
    seq_lens = _lengths(cu_seq_lens_k)
    if block_table is None:
        slots = write_index[group]
        # Slots of all positions of all requests, in order; without earlier keys the new ones are all.
        index = read_index[group] if read_index[group].numel() else slots
        table = _block_table(index, cu_seq_lens_k, max_seqlen_k, cache.block_size)
    else:
        table = block_table[group]
        slots = _last_slots(table, seq_lens, cache.block_size)
    ops.reshape_and_cache(_packed(key), _packed(value), *caches, slots)
    return _attend(module, query, *caches, table, seq_lens, *spans, **kwargs)


def _attend_updated(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    block_table: Tensor | None = None,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    read_index: Any = None,
    write_index: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers 5.24: the cache has added what this needs.

    Args:
        module: the attention layer.
        query: ``[1, num_heads, num_tokens, head_size]``, requests one after the other.
        key: ``[1, num_kv_heads, num_keys, head_size]``: of a step that only decodes the new ones, else all of them.
        value: ``[1, num_kv_heads, num_keys, head_size]``, likewise.
        attention_mask: None.
        cu_seq_lens_q: int32 ``[num_seqs + 1]``.
        cu_seq_lens_k: int32 ``[num_seqs + 1]``, of the keys with the new ones.
        max_length_q: longest of the requests' new tokens.
        max_length_k: longest of their keys.
        block_table: int32 ``[num_seqs, max_blocks]``, of a step that only decodes; else None.
        k_cache: with a block table ``[num_blocks, block_size, num_kv_heads, head_size]``.
        v_cache: likewise; in the same memory, a block further.
        read_index: what tells continuous batching from an ordinary forward, which gets none.
        write_index: not needed.
        **kwargs: what the model gives every attention function.

    Returns:
        ``[1, num_tokens, num_heads, head_size]``, and None for the weights.
    """
    if read_index is None or cu_seq_lens_q is None or cu_seq_lens_k is None:
        out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return out
    spans = (cu_seq_lens_q, max_length_q)
    if block_table is None or k_cache is None or v_cache is None:
        keys, values = _packed(key), _packed(value)
        return _attend_packed(module, query, keys, values, *spans, cu_seq_lens_k, max_length_k, **kwargs)
    seq_lens = _lengths(cu_seq_lens_k)
    slots = _last_slots(block_table, seq_lens, k_cache.shape[1])
    ops.reshape_and_cache(_packed(key), _packed(value), k_cache, v_cache, slots)
    return _attend(module, query, k_cache, v_cache, block_table, seq_lens, *spans, **kwargs)


def _attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: Tensor,
    max_seqlen_k: int,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over keys and values ``[num_keys, num_kv_heads, head_size]`` of one request after the other."""
    position = torch.arange(max_seqlen_k, dtype=torch.int32, device=key.device)
    table = cu_seqlens_k[:-1, None].int() + position  # blocks of one slot; columns past a request's end are not read
    caches = (key.unsqueeze(1), value.unsqueeze(1))
    return _attend(module, query, *caches, table, _lengths(cu_seqlens_k), cu_seqlens_q, max_seqlen_q, **kwargs)


def _attend(
    module: nn.Module,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if dropout:
        raise ValueError(f"dropout must be 0 in continuous batching, got {dropout}: call model.eval()")
    window = getattr(module, "sliding_window", None) if sliding_window is None else sliding_window
    out = ops.paged_attention(
        _packed(query),
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q.int(),
        max_seqlen_q,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window_left=-1 if window is None else window - 1,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def _packed(states: Tensor) -> Tensor:
    """``[1, num_heads, num_tokens, head_size]`` -> ``[num_tokens, num_heads, head_size]``."""
    return states.squeeze(0).transpose(0, 1)


def _lengths(cu_seqlens: Tensor) -> Tensor:
    """``[num_seqs + 1]`` -> int32 ``[num_seqs]``."""
    return cu_seqlens.diff().int()


def _last_slots(block_table: Tensor, seq_lens: Tensor, block_size: int) -> Tensor:
    """Slot of each row's last position, or -1 where the row is empty or has no block there: int64 ``[num_seqs]``."""
    last = (seq_lens.long() - 1).clamp(min=0)
    block = block_table.gather(1, (last // block_size)[:, None]).squeeze(1).long()
    return torch.where((block < 0) | (seq_lens == 0), -1, block * block_size + last % block_size)


def _block_table(index: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int, block_size: int) -> Tensor:
    """Block table of rows whose slots ``index`` lists: int32 ``[num_seqs, max_blocks]``."""
    starts = torch.arange(0, max_seqlen_k, block_size, device=index.device)
    first = (cu_seqlens_k[:-1, None].long() + starts).clamp(max=index.shape[0] - 1)  # past a row's end: not read
    return (index[first] // block_size).int()


# ---- what is made to be known -------------------------------------------------------------------------------------


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.generation.continuous_batching.{name}")


def _wrap(module: ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
    """Put ``wrapper``, which gets the function it stands for as its first argument, in a module; only once."""
    original = getattr(module, name)
    if getattr(original, "func", None) is not wrapper:
        setattr(module, name, functools.wraps(original)(functools.partial(wrapper, original)))


def _counts_as_flash(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    config = args[0] if args else kwargs.get("config")
    implementation = kwargs.get("requested_attention_implementation") or getattr(config, "_attn_implementation", None)
    return implementation == NAME or original(*args, **kwargs)


def _has_block_tables(original: Callable[..., None], config: Any, options: Any, *args: Any) -> None:
    """Keep the block tables of our implementation, on any device, where Transformers has them: not with windows."""
    if config._attn_implementation != NAME:
        original(config, options, *args)
    elif _has_sliding_layers(config):
        options.max_blocks_per_request = 0  # asked, Transformers would look for a flash-attention package of our name


def _has_sliding_layers(config: Any) -> bool:
    grouped = _module("cache").group_layers_by_attn_type(config)
    kinds = grouped if isinstance(grouped, dict) else grouped[1]
    return "sliding_attention" in kinds
