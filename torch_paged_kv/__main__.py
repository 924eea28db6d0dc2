"""Command line: ``python -m torch_paged_kv demo|quality|info|estimate|bench|plot``."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys

import torch

import torch_paged_kv
from torch_paged_kv import _library, commands, demo, quality


def info(arguments: argparse.Namespace) -> int:
    """Print versions, and which backend serves which device and why."""
    lines = {
        "torch_paged_kv": torch_paged_kv.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "cpu": f"kernels, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "cuda": _cuda(_library.find_library("_C_cuda") is not None),
    }
    for name, value in lines.items():
        print(f"{name:<15} {value}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed: PagedKVCache works on its own, generate() does not"


def _cuda(built: bool) -> str:
    if not built:
        return "not built: no CUDA toolkit was found at build time"
    if torch.version.cuda is None:
        return "built, not loaded: this torch is a CPU build"
    if not torch.cuda.is_available():
        return f"built, not used: no device (torch for CUDA {torch.version.cuda})"
    major, minor = torch.cuda.get_device_capability()
    return f"kernels, {torch.cuda.get_device_name()}, sm_{major}{minor}"


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_paged_kv", description=torch_paged_kv.__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="demo|quality|info|estimate|bench|plot")
    demo_parser = subparsers.add_parser("demo", help="a small model answers a few prompts; both caches side by side")
    demo.add_arguments(demo_parser)
    demo_parser.set_defaults(run=demo.main)
    quality_parser = subparsers.add_parser("quality", help="what cache dtypes cost a model: tokens and perplexity")
    quality.add_arguments(quality_parser)
    quality_parser.set_defaults(run=quality.main)
    subparsers.add_parser("info", help="versions and backends").set_defaults(run=info)
    commands.add_parsers(subparsers)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
