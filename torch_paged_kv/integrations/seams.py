"""The two seams between models and a paged cache: the attention and the mask functions that models look up.

Each is given out behind a function that looks whether a paged cache is at work: :func:`attend` by the handle that a key
carries, :func:`make_mask` by the key length that comes from a cache. All others get what they always got.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import masking_utils, modeling_utils

from torch_paged_kv.integrations.layers import Handle
from torch_paged_kv.step import Step

if TYPE_CHECKING:
    from torch_paged_kv.integrations.transformers import PagedKVCache

_collector: Any = None  # of what hooks collect in the running forward
if importlib.util.find_spec("transformers.utils.output_capturing"):  # since Transformers 5
    _collector = getattr(importlib.import_module("transformers.utils.output_capturing"), "_active_collector", None)

# Attention implementations whose meaning the ops reproduce. None: a config that no model has taken yet.
REPLACED_ATTENTION = frozenset(
    [None, "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"]
)

traced_owner: list[PagedKVCache | None] = [None]  # asked for mask sizes; only ever set within one trace

_mask_functions: dict[str, Any] = masking_utils.AttentionMaskInterface._global_mapping
sdpa_mask = _mask_functions["sdpa"]  # as Transformers has it


class KeyLength(int):
    """A number of key positions that remembers which cache it is of, on its way to the mask function."""

    def __new__(cls, length: int, owner: PagedKVCache) -> KeyLength:
        """An int with an owner."""
        number = super().__new__(cls, length)
        number.owner = owner
        return number

    owner: PagedKVCache


def needs_gather(attention: str | None) -> bool:
    """Whether an attention implementation must be given gathered keys and values."""
    if attention == "eager" and not hasattr(modeling_utils.AttentionInterface, "get_interface"):
        return True  # before Transformers 5 eager attention is not looked up
    return attention not in REPLACED_ATTENTION  # a function of the user's own, whose meaning we do not know


def make_mask(original: Callable[..., Any], **arguments: Any) -> Any:
    """What every mask function of Transformers is behind: ``original`` with its arguments, or the cache's answer."""
    if torch.compiler.is_compiling():
        owner, traced_owner[0] = traced_owner[0], None
    else:
        owner = getattr(arguments.get("kv_length"), "owner", None)
    if owner is None:
        return original(**arguments)
    return owner.make_mask(original, arguments)


def attend(
    original: Callable[..., Any],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """What every attention function that a model looks up is behind: ``original``, or attention over blocks."""
    handle: Handle | None = getattr(key, "_paged_kv", None)
    if handle is None:
        return original(module, query, key, value, attention_mask, **kwargs)
    step = handle.step
    if query.shape[2] != step.length:  # cross attention: what the encoder gave, written once, is all there is
        handle.cache.forgo(handle)
        return original(module, query, key, value, attention_mask, **kwargs)
    if _needs_dense(module, kwargs, step):
        dense = handle.cache.dense(handle, query, attention_mask, kwargs.get("sliding_window"))
        return original(module, query, *dense, **kwargs)
    return handle.cache.attention(handle, module, query, attention_mask, **kwargs)


def _needs_dense(module: torch.nn.Module, arguments: dict[str, Any], step: Step) -> bool:
    """Whether something is asked of a layer that only its own implementation has: attention weights, dropout."""
    config, asked = getattr(module, "config", None), step.asked
    if asked is None or asked[0] is not config:
        asked = (config, bool(getattr(config, "output_attentions", False)) or _collects_weights())
        if step.eager:  # once a step, which lies in one forward: a config's attributes are slow to read
            step.asked = asked
    if asked[1] or arguments.get("output_attentions"):
        return getattr(config, "_attn_implementation", None) == "eager"
    return bool(arguments.get("dropout")) and getattr(config, "_attn_implementation", None) in ("eager", "sdpa")


def _collects_weights() -> bool:
    """Whether the running forward collects weights by hooks: some models take the argument for themselves."""
    return _collector is not None and "attentions" in (_collector.get() or ())


class _WithoutBackward(torch.autograd.Function):
    """Identity whose backward refuses."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, source: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("a forward through a PagedKVCache has no backward: train with use_cache=False")


def without_backward(values: Tensor, source: Tensor) -> Tensor:
    """``values`` as made from ``source`` by an op for inference: usable in grad mode, but not to be trained through."""
    if torch.is_grad_enabled() and source.requires_grad:
        return _WithoutBackward.apply(values, source)  # type: ignore[no-any-return, no-untyped-call]
    return values


def is_plain(arguments: dict[str, Any], length: int) -> bool:
    """Whether a mask is causal, perhaps within a window, and nothing else."""
    if torch.compiler.is_compiling():  # closures cannot be looked into while tracing
        chunk = getattr(arguments.get("config"), "attention_chunk_size", None)
        chunked = chunk is not None and arguments.get("local_size") == chunk
        return not chunked and not arguments.get("use_vmap") and (arguments.get("allow_is_causal_skip") or length == 1)
    causal = masking_utils.causal_mask_function
    function = arguments.get("mask_function", causal)
    if function is causal:
        return True
    if not function.__qualname__.startswith("and_masks.<locals>"):
        return False
    parts = function.__closure__[0].cell_contents
    return all(part is causal or part.__qualname__.startswith("sliding_window_overlay.<locals>") for part in parts)


def _give_out_behind(interface: type, name: str) -> None:
    """Make a look-up method of the attention interface give its functions out behind :func:`attend`."""
    look_up = getattr(interface, name)

    @functools.wraps(look_up)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return functools.partial(attend, look_up(self, *args, **kwargs))

    setattr(interface, name, wrapped)


def install() -> None:
    """Put the seams in. Once: a second time would put one behind the other."""
    for name, function in _mask_functions.items():
        _mask_functions[name] = functools.partial(make_mask, function)
    has_look_up = hasattr(modeling_utils.AttentionInterface, "get_interface")
    _give_out_behind(modeling_utils.AttentionInterface, "get_interface" if has_look_up else "__getitem__")
