"""patch, unpatch and paged: generate makes a paged cache by itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

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
            if getattr(generation_config, "is_assistant", False):
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


def _replaces(generation_config: Any) -> bool:
    return generation_config.cache_implementation in (None, "dynamic")
