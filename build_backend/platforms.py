"""What differs between operating systems: the compiler, its flags, how a library is linked. Linux, macOS, Windows.

Every compiler is one that takes GCC's options: the kernels are written with GCC's vector extensions, which Clang has on
every system and MSVC has not. On Windows it is ``clang++`` with Microsoft's headers and libraries.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def default_compiler() -> str:
    """Return the compiler where ``CXX`` names none."""
    return "g++" if sys.platform == "linux" else "clang++"


def compile_flags() -> tuple[str, ...]:
    """Return the flags of every host object: position-independent where that is a choice, nothing exported."""
    if sys.platform == "win32":  # there only what is marked is exported; the runtime is the DLL that torch uses
        return ("-fms-runtime-lib=dll", "-DNOMINMAX", "-D_CRT_SECURE_NO_WARNINGS")
    return ("-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffunction-sections", "-fdata-sections")


def link_flags(compiler: str, torch_lib: Path, exports: Path, *, strip: bool) -> list[str]:
    """Return the flags that link a library which exports nothing and finds torch's libraries loaded already."""
    torch = ["-shared", f"-L{torch_lib.as_posix()}"]
    if sys.platform == "darwin":
        beside = "-Wl,-rpath,@loader_path/../torch/lib"
        exported = ["-Wl,-exported_symbols_list,/dev/null", "-Wl,-dead_strip", *(["-Wl,-S"] if strip else [])]
        return [*torch, beside, *exported, "-ltorch", "-ltorch_cpu"]
    if sys.platform == "win32":
        return [*torch, "-fuse-ld=lld", "-fms-runtime-lib=dll", "-ltorch", "-ltorch_cpu", *_builtins(compiler)]
    exported = ["-Wl,--gc-sections", f"-Wl,--version-script={exports}", *(["-Wl,-s"] if strip else [])]
    # libtorch.so is needed though nothing names its symbols: it pulls the CUDA shims into scope on CUDA builds.
    # libstdc++ comes first, as torch for CUDA exports a few of its functions too, without their versions.
    return [*torch, *exported, "-lstdc++", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"]


def _builtins(compiler: str) -> list[str]:
    """Return Clang's own run-time library, which holds ``__builtin_cpu_supports`` and is not linked by itself here."""
    command = [compiler, "--rtlib=compiler-rt", "-print-libgcc-file-name"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    path = Path(result.stdout.strip())
    return [path.as_posix()] if result.returncode == 0 and path.is_file() else []


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, so that two builds of one tree take turns."""
    with path.open("w") as lock:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(lock.fileno(), msvcrt.LK_LOCK, 1)  # gives up after ten seconds
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def escaped(path: str) -> str:
    """Return a path as the inputs and outputs of ``build.ninja`` write it."""
    return path.replace("$", "$$").replace(":", "$:").replace(" ", "$ ")
