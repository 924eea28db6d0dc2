"""Paged KV cache for PyTorch: custom ops, a block pool, and a cache that goes wherever a ``DynamicCache`` goes."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from . import ops, reference
from .errors import OutOfBlocksError
from .pool import BlockPool
from .scales import StaticScales

if TYPE_CHECKING:
    from .integrations.calibration import calibrate
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
    "StaticScales",
    "__version__",
    "calibrate",
    "estimate",
    "ops",
    "paged",
    "patch",
    "reference",
    "unpatch",
]


_PLACES = {
    "PagedKVCache": ".integrations.transformers",
    "PrefixCache": ".prefix",
    "calibrate": ".integrations.calibration",
    "estimate": ".integrations.estimate",
    "paged": ".integrations.patching",
    "patch": ".integrations.patching",
    "unpatch": ".integrations.patching",
}


def __getattr__(name: str) -> Any:
    """On first use, so that importing this package imports no Transformers.

    ``PagedKVCache`` is the one that Transformers' models take where Transformers is installed.
    """
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    alone = name == "PagedKVCache" and importlib.util.find_spec("transformers") is None
    module = importlib.import_module(".cache" if alone else _PLACES[name], __name__)
    globals()[name] = getattr(module, name)
    return globals()[name]
