"""Prints build settings that suit this machine alone, as the Makefile uses them: ``NAME=value`` words for ``env``.

A wheel is built for every architecture. A tree that is used where it is built needs its own GPUs' alone, and no CUDA
library at all where torch could not load it.
"""

from __future__ import annotations

import os

import torch


def settings() -> dict[str, str]:
    """Return the settings; what the environment says already stays as it is."""
    if torch.version.cuda is None:
        found = {"PAGED_KV_CUDA": "0"}
    elif torch.cuda.is_available():
        capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
        # The instructions that Hopper has beyond its number are behind "a".
        archs = [f"{major}.{minor}{'a' if (major, minor) == (9, 0) else ''}" for major, minor in sorted(capabilities)]
        found = {"TORCH_CUDA_ARCH_LIST": ";".join(archs)}
    else:
        found = {}
    return {name: value for name, value in found.items() if name not in os.environ}


if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in settings().items()))
