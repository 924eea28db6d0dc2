"""What a release consists of beside the package: the wheel check, the build on other systems, workflows, templates."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import ninja_build_ext
import platforms
import pytest
import toolchain
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.fixture(scope="module")
def check_wheel() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "tools" / "check_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------------------------
# The wheel check


def make_wheel(directory: Path, tag: str, *names: str) -> Path:
    path = directory / f"torch_paged_kv-1.0-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


LIBRARY = "torch_paged_kv/_C_cpu.abi3.so"
TAG = "cp310-abi3-manylinux_2_28_x86_64"


def test_wheel_check_passes_a_wheel_of_our_libraries(check_wheel: ModuleType, tmp_path: Path) -> None:
    check_wheel.check_contents(make_wheel(tmp_path, TAG, LIBRARY, "torch_paged_kv/_C_cuda.abi3.so"))
    check_wheel.check_contents(make_wheel(tmp_path, "cp310-abi3-win_amd64", "torch_paged_kv/_C_cpu.pyd"))


@pytest.mark.parametrize(
    ("tag", "names", "message"),
    [
        ("cp311-cp311-linux_x86_64", [LIBRARY], "must serve every Python"),
        (TAG, [LIBRARY, "torch_paged_kv.libs/libtorch_cpu-1234.so"], "libtorch_cpu"),
        (TAG, [LIBRARY, "torch_paged_kv.libs/libgomp-1234.so.1.0.0"], "libgomp"),
        (TAG, ["torch_paged_kv/__init__.py"], "must hold _C_cpu"),
    ],
)
def test_wheel_check_refuses(check_wheel: ModuleType, tmp_path: Path, tag: str, names: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        check_wheel.check_contents(make_wheel(tmp_path, tag, *names))


def test_wheel_is_tested_without_compiler_and_source_tree(
    check_wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    python = check_wheel.python_of(tmp_path)
    python.parent.mkdir()
    variables = check_wheel.bare_variables(tmp_path)
    assert variables["PATH"] == str(python.parent)
    assert {"PYTHONPATH", "CUDA_HOME", "CXX"} & variables.keys() == set()
    compiler = python.parent / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    with pytest.raises(SystemExit, match=r"must hold no compiler, got g\+\+"):
        check_wheel.bare_variables(tmp_path)


def test_wheel_is_tested_away_from_the_package(check_wheel: ModuleType, tmp_path: Path) -> None:
    tests = check_wheel.copy_tests(tmp_path / "outside")
    assert {path.name for path in tests.glob("*.py")} >= {"conftest.py", *check_wheel.QUICK_TESTS}
    assert not list((tmp_path / "outside").rglob("torch_paged_kv"))


# ---------------------------------------------------------------------------------------------------------------------
# Other systems


def link(monkeypatch: pytest.MonkeyPatch, system: str) -> str:
    monkeypatch.setattr(sys, "platform", system)
    return " ".join(platforms.link_flags("c++", Path("/torch/lib"), Path("/src/exports.map"), strip=True))


def test_linux_exports_by_a_version_script(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = link(monkeypatch, "linux")
    assert "--version-script=/src/exports.map" in flags
    assert "-Wl,--no-as-needed -ltorch -ltorch_cpu -Wl,--as-needed" in flags
    assert "-fPIC" in platforms.compile_flags()


def test_macos_linker_gets_none_of_gnu_ld(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = link(monkeypatch, "darwin")
    assert "-exported_symbols_list,/dev/null" in flags
    assert "@loader_path/../torch/lib" in flags
    assert not re.search(r"version-script|as-needed|gc-sections|-Wl,-s\b", flags)
    assert platforms.default_compiler() == "clang++"


def test_windows_objects_use_the_runtime_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_builtins", lambda compiler: ["C:/clang/builtins.lib"])
    assert "-Wl" not in link(monkeypatch, "win32")
    assert "-fPIC" not in platforms.compile_flags()
    assert "-fms-runtime-lib=dll" in platforms.compile_flags()


def test_only_linux_asks_for_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: subprocess.CompletedProcess(command, returncode=0))
    monkeypatch.setattr(sys, "platform", "win32")
    assert set(toolchain.instruction_sets("clang++")) == {"avx2", "avx512"}
    monkeypatch.setattr(sys, "platform", "linux")
    assert "amx" in toolchain.instruction_sets("g++")


def test_ninja_reads_paths_of_windows() -> None:
    torch = toolchain.find_torch()
    assert torch is not None
    file = ninja_build_ext.NinjaFile("g++", torch, None)
    file._edge("cxx", "a.o", ["C:/my tree/a.cpp"], [])
    assert "build a.o: cxx C$:/my$ tree/a.cpp" in file.lines


GNU_ONLY = re.compile(r"__attribute__|__builtin_|#pragma (GCC|clang)|\btypeof\b|__int128|unistd\.h|sys/\w+\.h|\?:")


@pytest.mark.parametrize("pattern", ["*.cpp", "*.h", "common/*.h"])
def test_host_sources_are_standard_cxx(pattern: str) -> None:
    """The kernels of csrc/cpu use GCC's vector extensions; what is around them need not."""
    sources = sorted((ROOT / "csrc").glob(pattern))
    assert sources
    lines = [
        (path.name, line)
        for path in sources
        for line in path.read_text().splitlines()
        if GNU_ONLY.search(line.partition("//")[0])
    ]
    assert lines == []


# ---------------------------------------------------------------------------------------------------------------------
# Workflows and templates


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_runs_what_there_is(workflow: Path) -> None:
    commands = "\n".join(step["run"] for step in steps(workflow) if "run" in step)
    files = re.findall(r"\b(?:tools|tests)/[\w./]+", commands)
    assert files
    assert [name for name in files if not (ROOT / name).is_file()] == []
    targets = re.findall(r"^make (\w+)", commands, re.MULTILINE)
    assert [name for name in targets if f"\n{name}:" not in (ROOT / "Makefile").read_text()] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_may_only_read_and_ends(workflow: Path) -> None:
    text = yaml.safe_load(workflow.read_text())
    assert text["permissions"] == {"contents": "read"}
    assert [name for name, job in text["jobs"].items() if "timeout-minutes" not in job] == []


def test_wheel_options_in_workflows_exist(check_wheel: ModuleType) -> None:
    script = (ROOT / "tools" / "check_wheel.py").read_text()
    options = re.findall(r"check_wheel\.py (--[\w-]+)", "".join(path.read_text() for path in WORKFLOWS))
    assert options
    assert [option for option in options if f'"{option}"' not in script] == []


@pytest.mark.parametrize("template", [path for path in TEMPLATES if path.name != "config.yml"], ids=lambda p: p.name)
def test_issue_template_asks_for_the_versions(template: Path) -> None:
    form = yaml.safe_load(template.read_text())
    assert {"name", "description", "body"} <= form.keys()
    assert "python -m torch_paged_kv info" in template.read_text()
    assert all(field["validations"]["required"] for field in form["body"])


def test_make_wheel_installs_what_the_extra_names() -> None:
    extra = re.search(r"^wheel = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    tools = re.search(r"^WHEEL_TOOLS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert extra is not None
    assert tools is not None
    assert tools[1].replace('"', "").split() == [name.partition(";")[0] for name in ast.literal_eval(extra[1])]
