"""How the package is built: what the build finds on a machine, what ends up in a wheel, and that every .cu compiles."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import ninja_build_ext
import paged_kv_backend
import pytest
import toolchain

ROOT = Path(__file__).resolve().parents[1]
HAS_NVCC = toolchain.find_cuda() is not None


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ---------------------------------------------------------------------------------------------------------------------
# torch


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty target environment, as an isolated build sees it: known to sysconfig, not on the import path."""
    monkeypatch.setattr(sysconfig, "get_path", lambda *args, **kwargs: str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return tmp_path


def install_torch(site: Path, major: int, minor: int) -> None:
    text = f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n"
    write(site / "torch/include/torch/headeronly/version.h", text)


def test_build_asks_for_torch_only_where_there_is_none(site: Path) -> None:
    assert "torch>=2.10" in paged_kv_backend.get_requires_for_build_wheel()
    assert "torch>=2.10" in paged_kv_backend.get_requires_for_build_editable()
    install_torch(site, 2, 10)
    assert not any("torch" in name for name in paged_kv_backend.get_requires_for_build_wheel())
    assert not any("torch" in name for name in paged_kv_backend.get_requires_for_build_editable())


def test_torch_without_the_stable_abi_is_not_enough(site: Path) -> None:
    install_torch(site, 2, 9)
    assert toolchain.find_torch() is None
    install_torch(site, 2, 13)
    assert toolchain.find_torch() == toolchain.Torch(site / "torch", (2, 13))


def test_sources_are_built_for_the_oldest_torch() -> None:
    assert ninja_build_ext.target_version() == "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"


# ---------------------------------------------------------------------------------------------------------------------
# CUDA


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine whose only CUDA root, whole or not, is the directory given."""
    for name in ("CUDA_PATH", "PAGED_KV_CUDA", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return tmp_path


def test_a_lone_nvcc_is_no_toolkit(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(machine / "bin/nvcc")
    assert toolchain.find_cuda() is None
    monkeypatch.setenv("PAGED_KV_CUDA", "1")
    with pytest.raises(FileNotFoundError, match=r"bin/nvcc and include/cuda_runtime_api\.h"):
        toolchain.find_cuda()


def install_cuda(machine: Path, number: int = 13000) -> None:
    write(machine / "bin/nvcc")
    write(machine / "include/cuda_runtime_api.h", f"#define CUDART_VERSION  {number}\n")


def test_a_toolkit_is_used_unless_refused(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_cuda(machine)
    assert toolchain.find_cuda() == toolchain.Cuda(machine, (13, 0), ("8.0", "9.0a", "10.0", "12.0+PTX"))
    monkeypatch.setenv("PAGED_KV_CUDA", "0")
    assert toolchain.find_cuda() is None
    monkeypatch.setenv("PAGED_KV_CUDA", "yes")
    with pytest.raises(ValueError, match="PAGED_KV_CUDA must be auto, 0 or 1, got yes"):
        toolchain.find_cuda()


@pytest.mark.parametrize(
    ("number", "version", "build_number", "archs"),
    [
        (12040, (12, 4), "12cu124", ("8.0+PTX", "9.0a")),
        (12080, (12, 8), "12cu128", ("8.0", "9.0a", "10.0", "12.0+PTX")),
        (13020, (13, 2), "13cu132", ("8.0", "9.0a", "10.0", "12.0+PTX")),
    ],
)
def test_headers_name_the_version(
    machine: Path, number: int, version: tuple[int, int], build_number: str, archs: tuple[str, ...]
) -> None:
    """An nvcc before 12.8 knows no Blackwell; wheels of one version differ in their build number."""
    install_cuda(machine, number)
    assert toolchain.find_cuda() == toolchain.Cuda(machine, version, archs)
    assert ninja_build_ext.build_number() == build_number


def test_a_wheel_without_cuda_has_no_build_number(machine: Path) -> None:
    assert ninja_build_ext.build_number() is None


def test_headers_of_a_distribution_stay_where_the_compiler_has_them() -> None:
    """`-isystem /usr/include` hides the C headers from those of C++."""
    assert toolchain.Cuda(Path("/usr"), (12, 4), ("9.0a",)).include_flags == []
    assert toolchain.Cuda(Path("/opt/cuda"), (12, 4), ("9.0a",)).include_flags == ["-isystem", "/opt/cuda/include"]


def test_architectures_are_those_asked_for(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_cuda(machine)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a+PTX")
    cuda = toolchain.find_cuda()
    assert cuda is not None
    assert cuda.arch_flags == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(ValueError, match="got Hopper"):
        toolchain.find_cuda()


# ---------------------------------------------------------------------------------------------------------------------
# Building


def build(directory: Path, **environment: str) -> str:
    """Build the libraries into a directory of their own."""
    return run(sys.executable, "setup.py", "build_ext", "--build-lib", directory, **environment)


def ninja_file(compiler: str = "g++") -> ninja_build_ext.NinjaFile:
    torch = toolchain.find_torch()
    assert torch is not None
    return ninja_build_ext.NinjaFile(compiler, torch, None)


def test_kernels_are_compiled_for_the_instruction_set_in_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("attend.cpp", "attend_avx2.cpp", "attend_avx512.cpp", "parallel.cpp"):
        write(tmp_path / "csrc/cpu" / name)
    monkeypatch.setattr(ninja_build_ext, "SOURCE_DIR", tmp_path)
    monkeypatch.setattr(ninja_build_ext, "instruction_sets", lambda compiler: {"avx2": ("-mavx2",)})
    file = ninja_file()
    file.add_cpu_library()
    edges = dict(zip(file.lines, file.lines[1:]))
    flags = {
        edge.split(":")[0].split("/")[-1]: text for edge, text in edges.items() if edge.startswith("build csrc/cpu")
    }
    assert set(flags) == {"attend.o", "attend_avx2.o", "parallel.o"}  # the compiler does not know AVX-512
    assert "-mavx2" in flags["attend_avx2.o"]
    assert "-mavx2" not in flags["attend.o"]
    assert "-DPAGED_KV_HAS_AVX2" in flags["attend.o"]
    assert "AVX512" not in flags["attend.o"]


def test_other_machines_have_no_x86_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert toolchain.instruction_sets("g++") == {}


def test_a_second_build_has_nothing_to_do(tmp_path: Path) -> None:
    build(tmp_path, PAGED_KV_CUDA="0")
    assert "no work to do" in build(tmp_path, PAGED_KV_CUDA="0")


def test_build_says_what_it_found(tmp_path: Path) -> None:
    log = build(tmp_path, PAGED_KV_CUDA="0")
    assert "torch_paged_kv build: no CUDA toolkit: CPU library alone" in log
    assert "torch_paged_kv build: torch 2." in log


# ---------------------------------------------------------------------------------------------------------------------
# Libraries: built in the tree's own build directory, where mostly nothing is left to do

ALLOWED = re.compile(
    r"(aoti_torch|torch)_\w+$|\w+@(GLIBC|GLIBCXX|CXXABI|GCC)_|_ITM_\w+$|__gmon_start__$|__cxa_finalize$"
)


@pytest.fixture(scope="module")
def cpu_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cpu")
    build(directory, PAGED_KV_CUDA="0")
    return directory / "torch_paged_kv" / "_C_cpu.abi3.so"


@pytest.fixture(scope="module")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not HAS_NVCC:
        pytest.skip("needs nvcc")
    directory = tmp_path_factory.mktemp("cuda")
    build(directory, PAGED_KV_CUDA="1", TORCH_CUDA_ARCH_LIST="8.0;9.0a")
    return directory / "torch_paged_kv" / "_C_cuda.abi3.so"


@pytest.fixture(params=["cpu", "cuda"])
def library(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_library")
    return path


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(type, name) of the symbols that nm lists."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    return re.findall(r"^(?:[0-9a-f]+)? *(\w) (.+)$", run("nm", *options, path), re.MULTILINE)


def test_every_cuda_source_compiles_for_sm_80_and_sm_90a(cuda_library: Path) -> None:
    assert cuda_library.stat().st_size > 0


def test_library_needs_only_stable_symbols(library: Path) -> None:
    """No Python, no unstable torch, no second OpenMP, and no kernel that was declared and never written."""
    foreign = [name for _, name in symbols(library, "-D", "--undefined-only") if not ALLOWED.match(name)]
    assert foreign == []


def test_library_exports_nothing(library: Path) -> None:
    assert symbols(library, "-D", "--defined-only") == []


def test_libraries_name_no_path_of_the_build(library: Path) -> None:
    assert str(ROOT).encode() not in library.read_bytes()


@pytest.mark.parametrize("name", toolchain.INSTRUCTION_SETS)
def test_instruction_set_files_share_no_inline_function(cpu_library: Path, name: str) -> None:
    """Of equal inline functions the linker keeps one, maybe the one compiled for a CPU that this is not."""
    for path in sorted((ninja_build_ext.BUILD_DIR / "csrc" / "cpu").glob(f"*_{name}.o")):
        weak = [text for kind, text in symbols(path, "-C", "--defined-only") if kind in "WVu" and name not in text]
        assert weak == [], path.name
        undefined = [text for _, text in symbols(path, "-C", "--undefined-only")]
        assert [text for text in undefined if re.match(r"(std|torch|operator)\b", text)] == [], path.name


# ---------------------------------------------------------------------------------------------------------------------
# Distributions


def hook(name: str, directory: Path, **environment: str) -> Path:
    """Call a hook of the build backend as pip does, in a process of its own."""
    script = f"import sys, paged_kv_backend; paged_kv_backend.{name}(sys.argv[1])"
    run(sys.executable, "-c", script, directory, PYTHONPATH=str(ROOT / "build_backend"), **environment)
    return next(directory.iterdir())


def test_wheel_holds_the_package_and_nothing_older(tmp_path: Path) -> None:
    stale = write(ROOT / "build" / "lib.old" / "torch_paged_kv" / "_C_cuda.abi3.so")
    wheel = hook("build_wheel", tmp_path, PAGED_KV_CUDA="0")
    assert not stale.exists()
    stale.parent.rmdir()
    stale.parents[1].rmdir()
    assert "-cp310-abi3-" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "torch_paged_kv"
    sources = {str(path.relative_to(ROOT)) for path in package.rglob("*.py")}
    files = {name for name in names if ".dist-info/" not in name}
    assert files == sources | {
        *("torch_paged_kv/py.typed", "torch_paged_kv/build.json", "torch_paged_kv/_C_cpu.abi3.so")
    }
    facts = json.loads(zipfile.ZipFile(wheel).read("torch_paged_kv/build.json"))
    assert (facts["cuda"], facts["archs"]) == (None, [])
    assert f"{facts['torch']}." in version("torch")
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sources_of_cuda_are_shipped_without_a_toolkit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a source distribution takes from the extensions, on a machine that makes the CPU library alone."""
    monkeypatch.setenv("PAGED_KV_CUDA", "0")
    (library,) = ninja_build_ext.extensions()
    shipped = {*library.sources, *library.depends}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()} <= shipped


def test_source_distribution_can_be_built_from(tmp_path: Path) -> None:
    with tarfile.open(hook("build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()] + list(
        (ROOT / "build_backend").glob("*.py")
    )
    needed += [ROOT / name for name in ("setup.py", "pyproject.toml", "LICENSE", "torch_paged_kv/py.typed")]
    assert {str(path.relative_to(ROOT)) for path in needed} <= names
