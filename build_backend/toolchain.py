"""What this machine offers for the build: torch's headers, a CUDA toolkit, instruction sets. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

MIN_TORCH = (2, 10)
DEFAULT_ARCHS = "8.0;9.0a;10.0;12.0+PTX"
BLACKWELL_CUDA = (12, 8)  # the first whose nvcc knows 10.0 and 12.0
OLDER_ARCHS = "8.0+PTX;9.0a"  # of an nvcc before that: newer GPUs compile the PTX

# A source <stem>_<name>.cpp is compiled with these flags, on x86-64 alone.
INSTRUCTION_SETS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
        *("-mavx2", "-mfma", "-mf16c"),
    ),
    "amx": (
        *("-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
        *("-mavx2", "-mfma", "-mf16c"),
    ),
}


@dataclass(frozen=True)
class Torch:
    """The torch whose headers and libraries are used."""

    root: Path
    version: tuple[int, int]

    @property
    def include(self) -> Path:
        """The directory of its headers."""
        return self.root / "include"

    @property
    def lib(self) -> Path:
        """The directory of its libraries."""
        return self.root / "lib"


def _site_directories() -> list[Path]:
    """Return where the target environment keeps packages; ``sysconfig`` names it even in an isolated build."""
    directories = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    config = Path(sys.prefix, "pyvenv.cfg")
    if config.is_file() and re.search(r"include-system-site-packages\s*=\s*true", config.read_text(), re.IGNORECASE):
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        directories += [sysconfig.get_path(name, vars=base) for name in ("purelib", "platlib")]
    spec = importlib.util.find_spec("torch")  # one that the hook asked for, or that PYTHONPATH leads to
    if spec and spec.origin:
        directories.append(str(Path(spec.origin).parents[1]))
    return [Path(directory) for directory in directories]


def find_torch() -> Torch | None:
    """Return the target environment's torch if it has headers of a version that can be built against."""
    for directory in _site_directories():
        root = directory / "torch"
        header = root / "include" / "torch" / "headeronly" / "version.h"
        if header.is_file():
            found = dict(re.findall(r"#define TORCH_VERSION_(MAJOR|MINOR) (\d+)", header.read_text()))
            version = (int(found["MAJOR"]), int(found["MINOR"]))
            if version >= MIN_TORCH:
                return Torch(root, version)
    return None


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit, its version and the architectures to compile for."""

    root: Path
    version: tuple[int, int]
    archs: tuple[str, ...]

    @property
    def nvcc(self) -> Path:
        """The compiler."""
        return self.root / "bin" / "nvcc"

    @property
    def lib(self) -> Path:
        """The directory of the static runtime."""
        return next(path for path in (self.root / "lib64", self.root / "lib") if path.is_dir())

    @property
    def include_flags(self) -> list[str]:
        """The options for host code; none where a distribution put the headers, which ``-isystem`` would reorder."""
        include = self.root / "include"
        return [] if include == Path("/usr/include") else ["-isystem", str(include)]

    @property
    def arch_flags(self) -> list[str]:
        """The ``-gencode`` options: machine code for every architecture, PTX where ``+PTX`` says so."""
        flags = []
        for arch in self.archs:
            number = arch.removesuffix("+PTX").replace(".", "")
            flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
            if arch.endswith("+PTX"):
                flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
        return flags


def _cuda_roots() -> list[Path]:
    named = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if named:
        return named
    on_path = [Path(part).parent for part in os.environ.get("PATH", "").split(os.pathsep) if Path(part).name == "bin"]
    usual = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    wheels = [root for site in _site_directories() for root in sorted(site.glob("nvidia/cu[0-9]*"), reverse=True)]
    return [*usual, *on_path, *wheels]


def _cuda_version(root: Path) -> tuple[int, int] | None:
    """Return the version that the headers of a toolkit name: 12040 is 12.4."""
    header = root / "include" / "cuda_runtime_api.h"
    found = (
        re.search(r"#define CUDART_VERSION +(\d+)", header.read_text(errors="replace")) if header.is_file() else None
    )
    return (int(found[1]) // 1000, int(found[1]) % 1000 // 10) if found else None


def _cuda_archs(version: tuple[int, int]) -> tuple[str, ...]:
    usual = DEFAULT_ARCHS if version >= BLACKWELL_CUDA else OLDER_ARCHS
    archs = tuple(re.split(r"[;\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or usual))
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise ValueError(f"TORCH_CUDA_ARCH_LIST must hold versions like 9.0a or 12.0+PTX, got {arch}")
    return archs


def find_cuda() -> Cuda | None:
    """Return a CUDA toolkit as ``PAGED_KV_CUDA`` (``auto``, ``0``, ``1``) asks; a root must have compiler and headers.

    The headers tell a toolkit from a directory that only holds a wrapper called ``nvcc``.
    """
    wish = os.environ.get("PAGED_KV_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        raise ValueError(f"PAGED_KV_CUDA must be auto, 0 or 1, got {wish}")
    if wish == "0":
        return None
    for root in _cuda_roots():
        version = _cuda_version(root)
        if version and (root / "bin" / "nvcc").is_file():
            return Cuda(root.resolve(), version, _cuda_archs(version))
    if wish == "1":
        raise FileNotFoundError("PAGED_KV_CUDA=1, but no directory has bin/nvcc and include/cuda_runtime_api.h")
    return None


def instruction_sets(compiler: str) -> dict[str, tuple[str, ...]]:
    """Return the instruction sets that the compiler knows, each with its flags; none unless this is x86-64."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {}
    known = {}
    for name, flags in INSTRUCTION_SETS.items():
        if name == "amx" and sys.platform != "linux":
            continue  # the permission to use it is asked for by a Linux system call
        command = [compiler, *flags, "-x", "c++", "-fsyntax-only", "-"]
        if subprocess.run(command, input=b"", capture_output=True, check=False).returncode == 0:
            known[name] = flags
    return known
