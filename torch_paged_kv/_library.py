"""Finds and loads the compiled libraries that register ``torch.ops.paged_kv``."""

from __future__ import annotations

from pathlib import Path

import torch

_DIRECTORY = Path(__file__).parent


def _find(name: str) -> Path | None:
    return next(iter(sorted(_DIRECTORY.glob(f"{name}*.so"))), None)


def load_libraries() -> None:
    """Load the CPU library, which brings the schemas, then the CUDA one if this torch can use it.

    Raises:
        ImportError: The package was not built.
    """
    cpu_library, cuda_library = _find("_C_cpu"), _find("_C_cuda")
    if cpu_library is None:
        raise ImportError(f"{_DIRECTORY} must hold _C_cpu*.so, got none: build it with `pip install .`")
    torch.ops.load_library(cpu_library)
    if cuda_library is not None and torch.version.cuda is not None:
        torch.ops.load_library(cuda_library)
