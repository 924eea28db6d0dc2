"""The command that runs Transformers' own tests, here on a checkout of four tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 50, "num_hidden_layers": 2}


class LlamaTest:
    def generated(self):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
        settings = {"max_new_tokens": 3, "min_new_tokens": 3, "return_dict_in_generate": True}
        return model.generate(torch.tensor([[5, 6]]), **settings).past_key_values


class TestLlama(LlamaTest):
    def test_generate_makes_a_paged_cache(self):
        cache = self.generated()
        assert isinstance(cache, DynamicCache)
        assert type(cache).__name__ == "PagedKVCache"
        assert isinstance(DynamicCache(), type(cache))

    def test_cache_that_fails_with_ours(self):
        assert not hasattr(self.generated(), "block_size")

    def test_cache_that_fails_with_any(self):
        raise OSError("no hub")

    def test_of_something_else(self):
        raise AssertionError("not selected")
"""


def run(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tests" / "conformance" / "run.py", "--tests", checkout, *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def checkout(folder: Path, tests: str) -> Path:
    model = folder / "tests" / "models" / "llama"
    model.mkdir(parents=True)
    (model / "test_modeling_llama.py").write_text(tests)
    (folder / "src" / "transformers").mkdir(parents=True)
    (folder / "src" / "transformers" / "__init__.py").write_text('__version__ = "5.6.7"\n')
    return folder


def test_table_tells_what_failed_and_why(tmp_path: Path) -> None:
    result = run(checkout(tmp_path, TESTS), "--models", "llama")
    lines = result.stdout.splitlines()
    assert result.returncode == 1, result.stderr
    assert "tests of 5.6.7" in lines[0]
    # Two tests generate three tokens each with a paged cache, on two layers.
    assert "| llama | 1 | 1 | 0 | 0 | 1 | 12 | 0 |" in lines
    assert "| **all** | 1 | 1 | 0 | 0 | 1 | 12 | 0 |" in lines
    assert "failing without: llama, 1: OSError: no hub" in lines
    assert any(line.startswith("failed: llama TestLlama::test_cache_that_fails_with_ours:") for line in lines)


def test_a_path_not_taken_is_a_failure(tmp_path: Path) -> None:
    result = run(checkout(tmp_path, "def test_cache():\n    class_free = True\n"), "--models", "llama")
    assert result.returncode == 1
    assert "failed: llama: attention never took the direct path" in result.stdout


def test_a_run_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    result = run(checkout(tmp_path, "import os\n\n\ndef test_cache():\n    os._exit(7)\n"), "--models", "llama")
    assert result.returncode == 1
    assert "pytest ended with 7 on llama" in result.stderr
