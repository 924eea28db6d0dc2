"""The package as a whole: what importing costs, who imports whom, style."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_schemas import schema_texts

import torch_paged_kv

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch_paged_kv"


def output(*command: str | Path, cwd: Path = ROOT) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}"
    return result.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Importing

IMPORT = """
import json, sys, time
start = time.perf_counter()
import torch
torch_seconds, before = time.perf_counter() - start, set(sys.modules)
start = time.perf_counter()
import torch_paged_kv
added = time.perf_counter() - start
print(json.dumps([torch_seconds, added, sorted({name.split(".")[0] for name in set(sys.modules) - before})]))
"""


def test_importing_adds_little_to_torch() -> None:
    """Measured 0.015 of `import torch`; a quarter of it is 0.2 s where torch takes 0.8 s."""
    runs = [json.loads(output(sys.executable, "-c", IMPORT)) for _ in range(5)]
    ratio = statistics.median(added / torch_seconds for torch_seconds, added, _ in runs)
    assert ratio < 0.25, runs


def test_importing_needs_torch_alone() -> None:
    _, _, imported = json.loads(output(sys.executable, "-c", IMPORT))
    assert set(imported) - set(sys.stdlib_module_names) - {"torch", "torch_paged_kv"} == set()


def test_package_is_typed() -> None:
    assert (Path(torch_paged_kv.__file__).parent / "py.typed").is_file()


# ---------------------------------------------------------------------------------------------------------------------
# Ops


@pytest.mark.parametrize("name", [text.partition("(")[0] for text in schema_texts()])
def test_op_has_a_cpu_kernel(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"paged_kv::{name}", "CPU")


# ---------------------------------------------------------------------------------------------------------------------
# Layers: a module imports from its own layer and those before it

LAYERS = [
    ["_library", "digests", "errors", "huge_pages"],
    ["reference"],
    ["ops"],
    ["shared_prefix"],
    ["pool", "layout", "lengths", "scales", "step"],
    ["packing", "storage", "sizing"],
    ["arguments"],
    ["cache"],
    ["prefix", "sequences"],
    ["files", "offload"],
    ["stats"],
    ["plots"],
    ["integrations"],
    ["_models", "_texts", "demo", "quality"],
    ["commands"],
    ["__main__"],
]
LAYER = {name: index for index, names in enumerate(LAYERS) for name in names}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(tree: ast.AST, package: str) -> set[str]:
    """Absolute names of everything that is imported anywhere in a file of `package`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_nothing_to_its_right(path: Path) -> None:
    assert place(path) in LAYER, f"give {place(path)} a place in LAYERS"
    package = ".".join(path.relative_to(ROOT).parts[:-1])
    imported = {
        name.split(".")[1]
        for name in imported_modules(ast.parse(path.read_text()), package)
        if name.startswith("torch_paged_kv.")
    }
    assert {name for name in imported if LAYER.get(name, 0) > LAYER[place(path)]} == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_integration_imports_transformers(path: Path) -> None:
    if path.parent == PACKAGE / "integrations":
        return
    top_level = ast.Module(
        [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))], []
    )
    assert not any(name.split(".")[0] == "transformers" for name in imported_modules(top_level, "torch_paged_kv"))


# ---------------------------------------------------------------------------------------------------------------------
# Style


def test_python_is_linted() -> None:
    output(sys.executable, "-m", "ruff", "check", ".")


def test_python_is_formatted() -> None:
    output(sys.executable, "-m", "ruff", "format", "--diff", ".")


def test_package_passes_mypy() -> None:
    output(sys.executable, "-m", "mypy", "torch_paged_kv")


def test_cpp_is_formatted() -> None:
    sources = [path for path in sorted((ROOT / "csrc").rglob("*")) if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    output(Path(sys.executable).parent / "clang-format", "--dry-run", "-Werror", *sources)
