"""Every example runs: the files of examples/, and the Python blocks of README.md and docs/*.md.

The blocks of one page run one after another in one namespace. A block that is followed by a block of text must print
that text. The hub's name of a model stands for the packaged copy of it, so nothing is downloaded.
"""

from __future__ import annotations

import io
import re
import runpy
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from torch_paged_kv import _models

ROOT = Path(__file__).parents[1]
PICTURE = re.compile(r"!\[.*?\]\((.*?)\)")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HUB_NAMES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2", "google/gemma-3-270m": "gemma3"}
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n?^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # its name in every release but one


@pytest.fixture(autouse=True)
def _packaged_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_package(auto: Any) -> Callable[..., Any]:
        original = auto.from_pretrained

        def from_pretrained(name: str, *args: Any, **kwargs: Any) -> Any:
            packaged = HUB_NAMES.get(name)
            if packaged is not None and not _models.available(packaged):
                pytest.skip(f"the packages of {packaged} are not installed")
            return original(name if packaged is None else _models.resolve(packaged), *args, **kwargs)

        return from_pretrained

    for auto in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", from_package(auto))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for the files that examples write
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for code, expected in BLOCK.findall(page.read_text()):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        if expected:
            assert printed.getvalue().strip() == expected.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pictures_are_there(page: Path) -> None:
    for picture in PICTURE.findall(page.read_text()):
        assert (page.parent / picture).is_file()
