"""Paged KV cache for PyTorch: custom ops, a block pool, and a cache that goes wherever a ``DynamicCache`` goes."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from . import ops, reference
from .errors import OutOfBlocksError
from .pool import BlockPool

if TYPE_CHECKING:
    from .integrations.estimate import estimate
    from .integrations.patching import paged, patch, unpatch
    from .integrations.transformers import PagedKVCache
    from .prefix import PrefixCache

__version__ = "0.1.0.dev0"
__all__ = [
    "BlockPool",
    "OutOfBlocksError",
    "PagedKVCache",
    "PrefixCache",
    "__version__",
    "estimate",
    "ops",
    "paged",
    "patch",
    "reference",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    """On first use, so that importing this package imports no Transformers.

    ``PagedKVCache`` is the one that Transformers' models take where Transformers is installed.
    """
    places = {"PrefixCache": ".prefix", "estimate": ".integrations.estimate"}
    if name not in (*places, "PagedKVCache", "paged", "patch", "unpatch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = places.get(name, ".integrations.patching")
    if name == "PagedKVCache":
        place = ".cache" if importlib.util.find_spec("transformers") is None else ".integrations.transformers"
    module = importlib.import_module(place, __name__)
    globals()[name] = getattr(module, name)
    return globals()[name]
