"""patch, unpatch and paged: generate makes a paged cache by itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from torch_paged_kv.integrations.generation import CACHE_NAMES, PREPARE, tell_length
from torch_paged_kv.integrations.transformers import PagedKVCache


def patch(model: Any, **arguments: Any) -> None:
    """Make ``model.generate(...)`` use a paged cache where it would make a ``DynamicCache``.

    Nothing else of the model changes: not its config, its attention or its forward. A cache given to ``generate``,
    and other kinds asked for by ``cache_implementation``, are used as before.

    Args:
        model: a Transformers model that can generate.
        **arguments: of :class:`PagedKVCache`, such as ``block_size`` or ``dtype``.

    Raises:
        TypeError: the model cannot generate.
    """
    prepare = getattr(type(model), PREPARE, None)
    if prepare is None:
        raise TypeError(f"model must be one that can generate, got {type(model).__name__}")

    @functools.wraps(prepare)
    def prepare_paged(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        given = {name for name in CACHE_NAMES if model_kwargs.get(name) is not None}
        if _is_assistant(generation_config) and not model.config.is_encoder_decoder:
            for name in given:
                _keep_drafts(model_kwargs, model_kwargs[name])
        prepare(model, generation_config, model_kwargs, *args, **kwargs)
        for name in set(CACHE_NAMES) - given:
            made = model_kwargs.get(name)
            if made is None or not _replaces(generation_config):
                continue
            paged = PagedKVCache(model.config.get_text_config(decoder=True), **arguments)
            if type(made) is DynamicCache:
                model_kwargs[name] = paged
            elif type(getattr(made, "self_attention_cache", None)) is DynamicCache:
                made.self_attention_cache = paged
            tell_length(paged, generation_config, *args, **kwargs)
            if _is_assistant(generation_config):
                paged.activate_past_recording()

    setattr(model, PREPARE, prepare_paged)


def unpatch(model: Any) -> None:
    """Undo :func:`patch`; nothing to do for a model that is not patched."""
    vars(model).pop(PREPARE, None)


@contextlib.contextmanager
def paged(model: Any, **arguments: Any) -> Iterator[Any]:
    """:func:`patch` for the length of a ``with`` block, also if it ends with an exception."""
    before = vars(model).get(PREPARE)
    patch(model, **arguments)
    try:
        yield model
    finally:
        unpatch(model)
        if before is not None:
            setattr(model, PREPARE, before)


def _keep_drafts(model_kwargs: dict[str, Any], cache: Any) -> None:
    """Make the mask of an assistant's next drafts keep what its cache holds, all of whose later tokens are real.

    Without a mask, `generate` guesses one from the token that pads, at each call anew: a drafted token that happens to
    be that one would be taken back, after it was stored.
    """
    mask = model_kwargs.get("attention_mask")
    if isinstance(cache, PagedKVCache) and isinstance(mask, Tensor) and mask.dim() == 2 and cache.seen:
        stored = cache.stored().to(mask)  # [num_seqs, seen]
        model_kwargs["attention_mask"] = torch.cat([stored, torch.ones_like(mask[:, cache.seen :])], dim=1)


def _replaces(generation_config: Any) -> bool:
    # Some releases want an assistant's cache without windows, as theirs cannot be rolled back; a paged one can.
    kinds = (None, "dynamic", "dynamic_full") if _is_assistant(generation_config) else (None, "dynamic")
    return generation_config.cache_implementation in kinds


def _is_assistant(generation_config: Any) -> bool:
    return bool(getattr(generation_config, "is_assistant", False))
