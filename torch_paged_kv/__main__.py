"""Command line: ``python -m torch_paged_kv demo|quality|info|estimate|bench|plot``."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

import torch_paged_kv
from torch_paged_kv import _library, commands, demo, quality


def info(arguments: argparse.Namespace) -> int:
    """Print versions, and which backend serves which device and why."""
    facts = _library.build_facts()
    lines = {
        "torch_paged_kv": _built(facts),
        "python": f"{platform.python_version()}, {platform.platform()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "transformers": _version("transformers"),
        "cpu": _cpu(facts),
        "cuda": _cuda(_library.find_library("_C_cuda") is not None),
        "cuda library": _cuda_library(facts),
        **_cuda_attention(facts),
        "variables": _variables(),
    }
    for name, value in lines.items():
        print(f"{name:<15} {value}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed: PagedKVCache works on its own, generate() does not"


def _built(facts: dict[str, Any]) -> str:
    """Version and origin: what a commit and the torch at build time can tell about a fault."""
    origin = [f"commit {facts['commit']}"] if facts.get("commit") else []
    origin += [f"built with torch {facts['torch']}"] if "torch" in facts else []
    return ", ".join([torch_paged_kv.__version__, *origin])


def _cpu(facts: dict[str, Any]) -> str:
    """What torch sees in the processor, and which instruction sets the kernels were built for."""
    sets = ", ".join(["generic", *facts.get("instruction_sets", [])])
    return f"kernels ({sets}), {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _cuda_library(facts: dict[str, Any]) -> str:
    if not facts.get("cuda"):
        return "none" if facts else "not known: the package was built before it wrote that down"
    return f"CUDA {facts['cuda']}, for {', '.join(facts['archs'])}"


def _cuda_attention(facts: dict[str, Any]) -> dict[str, str]:
    """Which kernel attends to what on the current GPU, and why; nothing where none is used."""
    if not facts.get("cuda") or torch.version.cuda is None or not torch.cuda.is_available():
        return {}
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        prompts = "mma.sync (wgmma is of sm_90)"
    elif not any(arch.startswith("9.0a") for arch in facts["archs"]):
        prompts = "mma.sync (built without 9.0a, which wgmma needs)"
    else:
        prompts = "wgmma; mma.sync for 8-bit caches and blocks of no multiple of 16 tokens"
    caches = "8-bit ones too" if capability >= (8, 9) else "float8_e5m2 and int8 too (e4m3 needs sm_89)"
    return {
        "decode": f"tensor cores, caches of 16 bits, {caches}; a general kernel for float32, masks and odd head sizes",
        "prompts": f"{prompts}; caches that tensor cores decode, without mask and ALiBi, the others as decode",
    }


def _variables() -> str:
    """Variables of the environment that change what the package does."""
    names = sorted(name for name in os.environ if name.startswith("PAGED_KV_"))
    return ", ".join(f"{name}={os.environ[name]}" for name in names) or "none"


def _cuda(built: bool) -> str:
    if not built:
        return "not built: no CUDA toolkit was found at build time"
    if torch.version.cuda is None:
        return "built, not loaded: this torch is a CPU build"
    problem = _library.cuda_problem()
    if problem is not None:
        return f"built, not loaded: {problem}"
    if not torch.cuda.is_available():
        return f"built, not used: no device (torch for CUDA {torch.version.cuda})"
    major, minor = torch.cuda.get_device_capability()
    driven = f"driver for CUDA {_library.written(_library.driver_version())}"
    return f"kernels, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}, sm_{major}{minor}, {driven}"


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
