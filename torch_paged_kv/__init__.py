"""Paged KV cache for PyTorch: custom ops, a block pool, and a cache that goes wherever a ``DynamicCache`` goes."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from . import ops, reference
from .errors import OutOfBlocksError
from .pool import BlockPool

if TYPE_CHECKING:
    from .integrations.transformers import PagedKVCache

__version__ = "0.1.0.dev0"
__all__ = ["BlockPool", "OutOfBlocksError", "PagedKVCache", "__version__", "ops", "reference"]


def __getattr__(name: str) -> Any:
    """``PagedKVCache`` on first use: where Transformers is installed, the one that its models take."""
    if name != "PagedKVCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("transformers") is None:
        from .cache import PagedKVCache
    else:
        from .integrations.transformers import PagedKVCache  # type: ignore[assignment]
    globals()[name] = PagedKVCache
    return PagedKVCache
