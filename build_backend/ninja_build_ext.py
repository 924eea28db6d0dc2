"""A ``build_ext`` that hands the whole compilation to one ninja run: incremental, parallel, flags per source.

Sources are found by where they lie and what they are called:

* ``csrc/*.cpp`` host code. It goes into both libraries; ``ops.cpp`` is compiled once for each.
* ``csrc/cpu/<stem>.cpp`` CPU kernels; ``<stem>_avx2.cpp``, ``<stem>_avx512.cpp``, ... with that instruction set.
* ``csrc/cuda/<stem>.cu`` CUDA kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import platforms
from setuptools import Extension
from setuptools.command.build_ext import build_ext
from toolchain import INSTRUCTION_SETS, MIN_TORCH, Cuda, Torch, find_cuda, find_torch, instruction_sets

SOURCE_DIR = Path(__file__).resolve().parents[1]
SANITIZE = os.environ.get("PAGED_KV_SANITIZE", "")  # address,undefined: a library for tests/run_sanitized.sh
BUILD_DIR = SOURCE_DIR / "build" / ("ninja-sanitized" if SANITIZE else "ninja")  # fixed: a second build is incremental
CPU_LIBRARY = "torch_paged_kv._C_cpu"
CUDA_LIBRARY = "torch_paged_kv._C_cuda"
BUILD_FACTS = "build.json"  # beside the libraries

WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter")
CXX_FLAGS = (
    *("-std=c++17", *platforms.compile_flags()),
    *(f"-ffile-prefix-map={SOURCE_DIR.as_posix()}/=", *WARNINGS),
)
# -O1 comes last and wins: checks would make the kernels take minutes to compile.
SANITIZE_FLAGS = (f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-g1", "-O1") if SANITIZE else ()
# NaN and infinity keep their meaning: no -ffast-math, whose start-up code would also flush denormals process-wide.
KERNEL_FLAGS = ("-O3", "-fno-math-errno", "-ffp-contract=fast")
HOST_FLAGS = ("-O2",)
EXPORTS = SOURCE_DIR / "csrc" / "exports.map"


def target_version() -> str:
    """Return the define that pins the stable ABI to the oldest torch that the libraries may meet."""
    major, minor = MIN_TORCH
    return f"-DTORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000ULL"


def sources(pattern: str) -> list[Path]:
    """Return the sources that match, relative to the source tree."""
    return sorted(path.relative_to(SOURCE_DIR) for path in (SOURCE_DIR / "csrc").glob(pattern))


def extensions() -> list[Extension]:
    """Return the libraries to build: the CPU one always, the CUDA one iff a toolkit is found."""
    # A source distribution made without a CUDA toolkit must have the CUDA sources all the same.
    shipped = [str(path) for pattern in ("*.h", "*/*.h", "*/*.cuh", "*/*.cu", "*.map") for path in sources(pattern)]
    backend = [str(path.relative_to(SOURCE_DIR)) for path in sorted(Path(__file__).parent.glob("*.py"))]

    def library(name: str, patterns: tuple[str, ...]) -> Extension:
        files = [str(path) for pattern in patterns for path in sources(pattern)]
        return Extension(name, files, depends=[*shipped, *backend], py_limited_api=True)

    libraries = [library(CPU_LIBRARY, ("*.cpp", "cpu/*.cpp"))]
    if find_cuda():
        libraries.append(library(CUDA_LIBRARY, ("*.cpp", "cuda/*.cu")))
    return libraries


class NinjaFile:
    """The text of a ``build.ninja``: rules, then one edge per object and library."""

    def __init__(self, compiler: str, torch: Torch, cuda: Cuda | None) -> None:
        cache = shutil.which("ccache")
        launcher = f"{cache} " if cache else ""
        self.compiler, self.torch, self.cuda = compiler, torch, cuda
        self.isa = instruction_sets(compiler)
        self.lines = ["ninja_required_version = 1.8"]
        self._rule("cxx", f"{launcher}{compiler} -MD -MF $out.d $flags -c $in -o $out", deps=True)
        self._rule("link", f"{compiler} @$out.rsp -o $out", response="$in $flags")
        if cuda:
            self._rule("nvcc", f"{launcher}{cuda.nvcc} -MD -MF $out.d $flags -c $in -o $out", deps=True)

    def _rule(self, name: str, command: str, *, deps: bool = False, response: str = "") -> None:
        self.lines += [f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
        if deps:
            self.lines += ["  depfile = $out.d", "  deps = gcc"]
        if response:
            self.lines += ["  rspfile = $out.rsp", f"  rspfile_content = {response}"]

    def _edge(self, rule: str, output: str, inputs: list[str], flags: list[str], depends: str = "") -> str:
        needed = " ".join(map(platforms.escaped, inputs)) + (f" | {platforms.escaped(depends)}" if depends else "")
        self.lines.append(f"build {output}: {rule} {needed}")
        self.lines.append(f"  flags = {' '.join(flags)}")
        return output

    def _object(self, source: Path, flags: list[str], tag: str = "") -> str:
        rule = "nvcc" if source.suffix == ".cu" else "cxx"
        output = f"{source.with_suffix('').as_posix()}{tag}.o"
        return self._edge(rule, output, [(SOURCE_DIR / source).as_posix()], flags)

    def _host_flags(self) -> list[str]:
        return [*CXX_FLAGS, *HOST_FLAGS, target_version(), "-isystem", self.torch.include.as_posix(), *SANITIZE_FLAGS]

    def _cpu_kernel(self, source: Path, built_sets: set[str]) -> str | None:
        """Add a CPU kernel's object with its instruction set; None if this compiler does not know the set."""
        suffix = source.stem.rpartition("_")[2]
        if suffix in self.isa:
            return self._object(source, [*CXX_FLAGS, *KERNEL_FLAGS, *self.isa[suffix], *SANITIZE_FLAGS])
        if suffix in INSTRUCTION_SETS:
            return None
        defines = [f"-DPAGED_KV_HAS_{name.upper()}" for name in sorted(built_sets)]
        return self._object(source, [*self._host_flags(), *KERNEL_FLAGS, *defines])

    def add_cpu_library(self) -> None:
        """Add the library of the schemas, the CPU host code and the CPU kernels."""
        kernels = sources("cpu/*.cpp")
        built_sets = {name for name in self.isa if any(path.stem.endswith(f"_{name}") for path in kernels)}
        objects = [self._object(source, self._host_flags()) for source in sources("*.cpp")]
        objects += filter(None, (self._cpu_kernel(source, built_sets) for source in kernels))
        self._library(CPU_LIBRARY, objects, [])

    def add_cuda_library(self) -> None:
        """Add the library of the CUDA host code and kernels, which sees no torch header in a ``.cu``."""
        assert self.cuda is not None
        host = [*self._host_flags(), "-DUSE_CUDA", "-DPAGED_KV_CUDA", *self.cuda.include_flags]
        device = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
        device += [f"-Xcompiler=-ffile-prefix-map={SOURCE_DIR}/=", *self.cuda.arch_flags]
        objects = [self._object(source, host, "_cuda{}{}".format(*self.cuda.version)) for source in sources("*.cpp")]
        # Objects of other toolkits and architectures stay valid beside these.
        tag = "_".join(("", "cu{}{}".format(*self.cuda.version), *self.cuda.archs))
        objects += [self._object(source, device, tag) for source in sources("cuda/*.cu")]
        runtime = [f"-L{self.cuda.lib}", "-lcudart_static", "-lrt", "-ldl", "-lpthread"]
        self._library(CUDA_LIBRARY, objects, runtime)

    def _library(self, name: str, objects: list[str], flags: list[str]) -> None:
        output = f"{name.rpartition('.')[2]}.so"
        link = platforms.link_flags(self.compiler, self.torch.lib, EXPORTS, strip=not SANITIZE)
        edge = self._edge("link", output, objects, [*link, *SANITIZE_FLAGS, *flags], EXPORTS.as_posix())
        self.lines.append(f"default {edge}")

    def write(self, path: Path) -> None:
        """Write the file unless it says the same already, so that ninja sees no change."""
        text = "\n".join(self.lines) + "\n"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def commit() -> str | None:
    """Return the commit of the source tree, "+" after it if files differ; None where there is no repository."""
    git = ["git", "-C", str(SOURCE_DIR)]
    if not (SOURCE_DIR / ".git").exists() or shutil.which("git") is None:
        return None
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if changes.stdout else "") or None


def build_facts(ninja_file: NinjaFile) -> dict[str, object]:
    """Return what the package tells of its build: ``python -m torch_paged_kv info`` reads it."""
    cuda = ninja_file.cuda
    return {
        "commit": commit(),
        "torch": "{}.{}".format(*ninja_file.torch.version),
        "cuda": "{}.{}".format(*cuda.version) if cuda else None,
        "archs": list(cuda.archs) if cuda else [],
        "instruction_sets": list(ninja_file.isa),
    }


def build_number() -> str | None:
    """Return the wheel's build number, which tells wheels of one version apart: 13cu130, 12cu124; None without CUDA.

    Of several pip takes the highest. A local version (+cu130) would say the same, but an index takes none.
    """
    cuda = find_cuda()
    return "{0}cu{0}{1}".format(*cuda.version) if cuda else None


class NinjaBuildExt(build_ext):
    """Builds both libraries with ninja and puts them where setuptools expects them."""

    def build_extensions(self) -> None:
        """Generate ``build.ninja``, run it, copy the libraries; say what was found."""
        torch, cuda = find_torch(), find_cuda()
        if torch is None:
            raise RuntimeError(f"building torch_paged_kv needs torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]} in {sys.prefix}")
        ninja_file = NinjaFile(os.environ.get("CXX") or platforms.default_compiler(), torch, cuda)
        ninja_file.add_cpu_library()
        if cuda:
            ninja_file.add_cuda_library()
        for line in self._findings(ninja_file):
            print(f"torch_paged_kv build: {line}", flush=True)
        BUILD_DIR.mkdir(parents=True, exist_ok=True)
        with platforms.locked(BUILD_DIR / "lock"):
            ninja_file.write(BUILD_DIR / "build.ninja")
            self._run_ninja()
            self._remove_old_libraries()
            for extension in self.extensions:
                built = BUILD_DIR / f"{extension.name.rpartition('.')[2]}.so"
                self.copy_file(str(built), self.get_ext_fullpath(extension.name))
        self._facts.write_text(json.dumps(build_facts(ninja_file), indent=1) + "\n")

    def copy_extensions_to_source(self) -> None:
        """Copy the libraries of an in-place build, and what is said of them."""
        super().copy_extensions_to_source()
        package = self.get_finalized_command("build_py").get_package_dir("torch_paged_kv")
        self.copy_file(str(self._facts), str(Path(package) / BUILD_FACTS))

    @property
    def _facts(self) -> Path:
        return Path(self.build_lib) / "torch_paged_kv" / BUILD_FACTS

    @staticmethod
    def _findings(ninja_file: NinjaFile) -> list[str]:
        torch, cuda = ninja_file.torch, ninja_file.cuda
        return [
            f"torch {torch.version[0]}.{torch.version[1]} in {torch.root}",
            f"CUDA {cuda.version[0]}.{cuda.version[1]} from {cuda.root} for {', '.join(cuda.archs)}"
            if cuda
            else "no CUDA toolkit: CPU library alone",
            f"instruction sets known to {ninja_file.compiler}: {', '.join(ninja_file.isa) or 'none'}",
        ]

    @staticmethod
    def _run_ninja() -> None:
        ninja = shutil.which("ninja")
        command = [ninja] if ninja else [sys.executable, "-m", "ninja"]
        jobs = os.environ.get("MAX_JOBS")
        subprocess.run([*command, "-C", str(BUILD_DIR), *(["-j", jobs] if jobs else [])], check=True)

    def _remove_old_libraries(self) -> None:
        """Remove what an earlier build left: setuptools ships whatever lies in its build directory."""
        for extension in (CPU_LIBRARY, CUDA_LIBRARY):
            target = Path(self.get_ext_fullpath(extension))
            target.parent.mkdir(parents=True, exist_ok=True)
            for directory in (target.parent, *(SOURCE_DIR / "build").glob("lib*/torch_paged_kv")):
                for old in directory.glob(f"{extension.rpartition('.')[2]}*{target.suffix}"):
                    old.unlink()
