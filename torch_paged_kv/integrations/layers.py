"""What Transformers sees of a layer of a paged cache, and what its keys carry to attention."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from torch_paged_kv.step import Step

if TYPE_CHECKING:
    from torch_paged_kv.integrations.transformers import PagedKVCache


@dataclass(slots=True)
class Handle:
    """What the key tensor returned by ``update`` carries."""

    cache: PagedKVCache
    layer: PagedLayer
    step: Step


class PagedLayer(CacheLayerMixin):
    """One layer of a :class:`PagedKVCache` as Transformers sees it; the cache does the work for all of them."""

    is_croppable = True
    supports_early_init = False

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """As the cache."""
        return self.owner.is_compileable

    def __init__(self, owner: PagedKVCache, index: int, window: int | None) -> None:
        self._owner = weakref.ref(owner)  # a strong one would keep a dropped cache, and its blocks, until the next gc
        self.index = index  # among the paged layers
        self.window = window
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window
            self._sliding_window_tensor = torch.tensor(window, dtype=torch.long)

    @property
    def owner(self) -> PagedKVCache:
        """The cache that the layer is of."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the layer must be used while its PagedKVCache lives")
        return owner

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the layer was written."""
        return self.owner.is_written(self.index)

    @property
    def record_past(self) -> bool:
        """Whether blocks behind the window are kept until the next crop."""
        return self.owner.keeps_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.owner.keep_past(value)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Gathered keys ``[num_seqs, num_kv_heads, seen, head_size]``, a copy; None before the first update."""
        return self.owner.gather(self.index)[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Gathered values ``[num_seqs, num_kv_heads, seen, head_size_v]``, a copy; None before the first update."""
        return self.owner.gather(self.index)[1] if self.is_initialized else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing: the first update does it."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return what the model's attention shall be given."""
        owner = self.owner
        return owner.update(key_states, value_states, owner.layers.index(self))

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Number of key positions with the coming ones, and the first of them."""
        return self.owner.mask_sizes(query_length)

    def get_seq_length(self, cache_position: Tensor | None = None) -> int:
        """Positions seen so far, padding included; inside a compiled graph a 0-dim tensor."""
        return self.owner.seen_by(self.index)

    def get_max_length(self) -> int:
        """-1: a layer has no maximum of its own, the pool has."""
        return -1

    get_max_cache_shape = get_max_length

    def offload(self) -> None:
        """Move the keys and values to host memory. Attention moves them back if :meth:`prefetch` has not."""
        self.owner.move_out(self.index)

    def prefetch(self) -> None:
        """Move the keys and values back to the layer's device."""
        self.owner.move_in(self.index)
