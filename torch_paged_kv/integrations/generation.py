"""What ``generate`` knows about lengths, told to paged caches, so that a pool without a size need not grow in it."""

from __future__ import annotations

import functools
from typing import Any

from transformers.generation.utils import GenerationMixin

from torch_paged_kv.cache import PagedKVCache

CACHE_NAMES = ("cache", "past_key_values")  # of a cache among generate's arguments, in newer and older releases
PREPARE = "_prepare_cache_for_generation"  # what generate calls on the model to make its cache


def tell_length(cache: Any, generation_config: Any, *arguments: Any, **named: Any) -> None:
    """Tell a paged cache how many positions it will hold at the end of ``generate``.

    Args:
        cache: any cache, or None; of an encoder-decoder's the self-attention part is meant.
        generation_config: generate's.
        *arguments: what ``_prepare_cache_for_generation`` is given after its model arguments: generation mode, batch
            size, maximum length of the cache.
        **named: likewise.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    if not isinstance(cache, PagedKVCache):
        return
    length = named.get("max_cache_length", arguments[2] if len(arguments) > 2 else None)
    if (generation_config.num_beams or 1) > 1:
        length = None  # beams hold their prompts apart only until the first reorder, which frees more than is to come
    cache.expect(length)


def tell_lengths() -> None:
    """Make ``generate`` tell every paged cache that it is given."""
    prepare = getattr(GenerationMixin, PREPARE)

    @functools.wraps(prepare)
    def prepare_and_tell(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        result = prepare(self, generation_config, model_kwargs, *args, **kwargs)
        for name in CACHE_NAMES:
            tell_length(model_kwargs.get(name), generation_config, *args, **kwargs)
        return result

    setattr(GenerationMixin, PREPARE, prepare_and_tell)
