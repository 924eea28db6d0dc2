"""Finds and loads the compiled libraries that register ``torch.ops.paged_kv``."""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

_DIRECTORY = Path(__file__).parent


def find_library(name: str) -> Path | None:
    """Path of a built library by its name without suffix, or None."""
    return next(iter(sorted(path for suffix in ("so", "pyd") for path in _DIRECTORY.glob(f"{name}*.{suffix}"))), None)


def build_facts() -> dict[str, Any]:
    """What the build wrote down: commit, torch, CUDA and its architectures, instruction sets. Empty if it did not."""
    path = _DIRECTORY / "build.json"
    facts: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return facts


def driver_too_old(library: str | None, torch_cuda: str, driver: int) -> str | None:
    """What to say where the driver serves torch's CUDA, but not the CUDA that the library was built with.

    A driver runs everything of its own major version and of older ones. A library for CUDA 12 beside a torch for
    CUDA 13 is fine.

    Args:
        library: CUDA that the library was built with, like "13.0"; None if it is not known.
        torch_cuda: CUDA of torch.
        driver: CUDA of the driver, as CUDA numbers it: 12080 is 12.8; 0 where there is no driver.
    """
    if library is None or driver == 0 or int(library.partition(".")[0]) <= driver // 1000:
        return None
    return (
        f"torch_paged_kv was built with CUDA {library}, torch with {torch_cuda}, and this driver runs "
        f"{written(driver)}: the CUDA kernels are not used; install a wheel for CUDA "
        f"{driver // 1000}, or a newer driver"
    )


def written(version: int) -> str:
    """A version as CUDA numbers it, as people write it: 12080 is 12.8."""
    return f"{version // 1000}.{version % 1000 // 10}"


def driver_version() -> int:
    """CUDA of the driver, like 12080; 0 where there is none. Initialises nothing."""
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
    except OSError:
        return 0


def cuda_problem() -> str | None:
    """Why the CUDA library cannot run beside this torch and driver; None if nothing is known against it."""
    library, torch_cuda = build_facts().get("cuda"), torch.version.cuda
    if library is None or torch_cuda is None or int(library.partition(".")[0]) <= int(torch_cuda.partition(".")[0]):
        return None  # torch itself needs such a driver
    return driver_too_old(library, torch_cuda, driver_version())


def load_libraries() -> None:
    """Load the CPU library, which brings the schemas, then the CUDA one if this torch and the driver can use it.

    Raises:
        ImportError: The package was not built.
    """
    cpu_library, cuda_library = find_library("_C_cpu"), find_library("_C_cuda")
    if cpu_library is None:
        raise ImportError(f"{_DIRECTORY} must hold _C_cpu*.so, got none: build it with `pip install .`")
    torch.ops.load_library(cpu_library)
    if cuda_library is not None and torch.version.cuda is not None:
        problem = cuda_problem()
        if problem is None:
            torch.ops.load_library(cuda_library)
        else:
            warnings.warn(problem, stacklevel=2)
