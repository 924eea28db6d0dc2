"""What the package tells of its build and of this machine, and a library whose CUDA the driver does not run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_paged_kv
from torch_paged_kv import __main__, _library

TOO_OLD = (
    "torch_paged_kv was built with CUDA 13.0, torch with 12.8, and this driver runs 12.8: "
    "the CUDA kernels are not used; install a wheel for CUDA 12, or a newer driver"
)


@pytest.mark.parametrize(
    ("library", "torch_cuda", "driver", "loaded"),
    [
        ("13.0", "12.8", 12080, False),
        ("13.0", "12.8", 13000, True),  # the driver is what counts
        ("12.4", "13.0", 13000, True),  # a newer driver runs what is older
        ("12.8", "12.4", 12040, True),  # within a major version the driver need not be as new
        ("13.0", "12.8", 0, True),  # no driver: no device either
        ("13.0", None, 12080, False),  # a torch without CUDA never loads it, and there is nothing to say
        (None, "12.8", 12080, True),  # not known
    ],
)
def test_library_for_another_cuda_is_loaded_where_the_driver_runs_it(
    library: str | None, torch_cuda: str | None, driver: int, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    monkeypatch.setattr(_library, "build_facts", lambda: {"cuda": library})
    monkeypatch.setattr(_library, "driver_version", lambda: driver)
    monkeypatch.setattr(_library, "find_library", Path)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(torch.ops, "load_library", opened.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _library.load_libraries()
    assert opened == [Path("_C_cpu"), *([Path("_C_cuda")] if loaded else [])]
    expected = [TOO_OLD] if torch_cuda and not loaded else []
    assert [str(warning.message) for warning in caught] == expected


def test_build_facts_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "_DIRECTORY", tmp_path)
    assert _library.build_facts() == {}
    (tmp_path / "build.json").write_text(json.dumps({"cuda": "12.4"}))
    assert _library.build_facts() == {"cuda": "12.4"}


def information(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **facts: Any) -> dict[str, str]:
    """The lines of `info` for a package of this build."""
    monkeypatch.setattr(_library, "build_facts", lambda: facts)
    assert __main__.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:15].strip(): line[16:] for line in lines}


def test_info_says_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PAGED_KV_ANYTHING", "1")
    facts = {"commit": "abc1234", "torch": "2.13", "cuda": "12.4", "archs": ["8.0+PTX", "9.0a"]}
    lines = information(monkeypatch, capsys, **facts, instruction_sets=["avx2"])
    assert lines["torch_paged_kv"] == f"{torch_paged_kv.__version__}, commit abc1234, built with torch 2.13"
    assert lines["torch"] == f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    assert lines["cuda library"] == "CUDA 12.4, for 8.0+PTX, 9.0a"
    assert lines["cpu"].startswith("kernels (generic, avx2), ")
    assert "PAGED_KV_ANYTHING=1" in lines["variables"]
    assert {"python", "transformers", "cuda"} <= lines.keys()


@pytest.mark.parametrize(
    ("capability", "archs", "prompts"),
    [
        ((9, 0), ["8.0", "9.0a"], "wgmma; mma.sync for 8-bit caches and blocks of no multiple of 16 tokens;"),
        ((9, 0), ["8.0+PTX"], "mma.sync (built without 9.0a, which wgmma needs);"),
        ((8, 0), ["8.0", "9.0a"], "mma.sync (wgmma is of sm_90);"),
    ],
)
def test_info_says_which_kernel_attends_to_what(
    capability: tuple[int, int],
    archs: list[str],
    prompts: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(__main__, "_cuda", lambda built: "kernels")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    lines = information(monkeypatch, capsys, cuda="13.0", archs=archs)
    assert lines["prompts"].startswith(prompts)
    assert lines["prompts"].endswith("; caches that tensor cores decode, without mask and ALiBi, the others as decode")
    assert ("e4m3 needs sm_89" in lines["decode"]) == (capability == (8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "prompts" not in information(monkeypatch, capsys, cuda="13.0", archs=archs)


def test_info_names_a_driver_that_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_library, "find_library", Path)
    monkeypatch.setattr(_library, "driver_version", lambda: 12080)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert information(monkeypatch, capsys, cuda="13.0", archs=["9.0a"])["cuda"] == f"built, not loaded: {TOO_OLD}"
