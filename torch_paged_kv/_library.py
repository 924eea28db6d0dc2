"""Finds and loads the compiled libraries that register ``torch.ops.paged_kv``."""

from __future__ import annotations

from pathlib import Path

import torch

_DIRECTORY = Path(__file__).parent


def find_library(name: str) -> Path | None:
    """Path of a built library by its name without suffix, or None."""
    return next(iter(sorted(path for suffix in ("so", "pyd") for path in _DIRECTORY.glob(f"{name}*.{suffix}"))), None)


def load_libraries() -> None:
    """Load the CPU library, which brings the schemas, then the CUDA one if this torch can use it.

    Raises:
        ImportError: The package was not built.
    """
    cpu_library, cuda_library = find_library("_C_cpu"), find_library("_C_cuda")
    if cpu_library is None:
        raise ImportError(f"{_DIRECTORY} must hold _C_cpu*.so, got none: build it with `pip install .`")
    torch.ops.load_library(cpu_library)
    if cuda_library is not None and torch.version.cuda is not None:
        torch.ops.load_library(cuda_library)
