"""The reliability run in small: every part does what it says, and finds what is put in for it to find."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # last: the package under test may lie elsewhere

from reliability import __main__ as command
from reliability import allocator, batches, faults, report, sanitizers, threads
from reliability import ops as fuzz
from reliability.report import Result, Settings
from torch_paged_kv import PagedKVCache, files, ops, reference
from torch_paged_kv.cache import PagedKVCache as CoreCache

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]


def settings_for(device: torch.device, scale: float) -> Settings:
    return Settings(device=device.type, scale=scale, seed=1)


def assert_clean(result: Result) -> None:
    assert result.faults == []
    assert (result.num_faults, result.lost) == (0, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Every part, for some seconds


def test_ops(device: torch.device) -> None:
    result = fuzz.run(settings_for(device, 0.01))
    assert_clean(result)
    assert result.counts["cases"] == fuzz.CASES[device.type] // 100
    for function in fuzz.OPS:
        assert result.counts[f"·{function.__name__}"] > 0


def test_allocator(device: torch.device) -> None:
    result = allocator.run(settings_for(device, 0.01))
    assert_clean(result)
    assert result.counts["op steps"] == allocator.OP_STEPS[device.type] // 100
    assert result.counts["cache steps"] == result.counts["batch steps"] == allocator.ROUND
    assert result.counts["state machine steps"] > 100
    for what in ("append", "reorder", "crop", "fork", "begin", "refused"):
        assert result.counts[f"batch steps·{what}"] > 0


def test_threads(device: torch.device) -> None:
    result = threads.run(settings_for(device, 0.1))
    assert_clean(result)
    assert result.counts["op calls in threads"] == 200
    assert result.counts["cache steps in threads"] == 600
    assert result.counts["generates in threads"] == 8


def test_faults(device: torch.device) -> None:
    result = faults.run(settings_for(device, 0.1))
    assert_clean(result)
    for use in faults.USES:
        assert result.counts[f"steps without blocks·refused, {use}"] >= 5
    assert result.counts["generates without blocks"] > 10
    assert result.counts["exceptions in generate"] == 2 * 19
    assert result.counts["kills during save"] == (6 if device.type == "cpu" else 0)


def test_sanitizers_run_the_fuzz() -> None:
    on_cpu, on_gpu = (sanitizers.checked(name, ["-m", "reliability"]) for name in ("cpu", "cuda"))
    assert Path(on_cpu[0]).is_file()
    assert on_cpu[1:] == ["-m", "reliability"]
    assert on_gpu == ["compute-sanitizer", *on_gpu[1:5], sys.executable, "-m", "reliability"]


# ---------------------------------------------------------------------------------------------------------------------
# What is put in is found


def one_key_more(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.paged_attention_with_lse

    def wrong(*arguments: Any, window_left: int = -1, **options: Any) -> Any:
        return real(*arguments, window_left=window_left + (window_left >= 0), **options)

    monkeypatch.setattr(ops, "paged_attention_with_lse", wrong)


def one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ops.reshape_and_cache

    def wrong(key: Any, value: Any, key_cache: Any, *arguments: Any) -> None:
        real(key, value, key_cache, *arguments)
        fuzz.all_bytes(key_cache)[-1] ^= 1

    monkeypatch.setattr(ops, "reshape_and_cache", wrong)


def no_copies_of_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(keys: Any, values: Any, pairs: Any) -> None:
        for pair in pairs.split(1):
            reference.copy_blocks(keys, values, pair)

    monkeypatch.setattr(ops, "copy_blocks", wrong)


@pytest.mark.parametrize(
    ("spoil", "where"),
    [(one_key_more, "paged_attention"), (one_bit, "reshape_and_cache"), (no_copies_of_chains, "copy_blocks")],
)
def test_wrong_ops_are_found_and_found_again(
    spoil: Callable[[pytest.MonkeyPatch], None],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fuzz, "MOST_FAULTS", 2)
    spoil(monkeypatch)
    result = fuzz.run(Settings(scale=0.01))
    assert {fault.where for fault in result.faults} == {where}
    again = result.faults[0].again
    assert again in capsys.readouterr().err
    assert again.startswith("python -m reliability --only ops --seed 0 --case ")
    case = int(again.split()[-1])
    with pytest.raises(AssertionError):
        fuzz.run(Settings(case=case))
    monkeypatch.undo()
    assert_clean(fuzz.run(Settings(case=case)))


def test_results_are_not_right_because_they_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rounding to a narrower dtype is found, on however many draws the case is judged."""
    real = ops.paged_attention_with_lse

    def rough(query: Any, *arguments: Any, **options: Any) -> Any:
        out, lse = real(query, *arguments, **options)
        return out.bfloat16().to(query.dtype), lse

    monkeypatch.setattr(fuzz, "MOST_FAULTS", 1)
    monkeypatch.setattr(fuzz, "DRAWS", (1, 16, 32))
    monkeypatch.setattr(ops, "paged_attention_with_lse", rough)
    monkeypatch.setattr(ops, "paged_attention", lambda *arguments, **options: rough(*arguments, **options)[0])
    result = fuzz.run(Settings(scale=0.01))
    assert result.num_faults == 1
    assert "allowed" in result.faults[0].what


def test_a_lost_block_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = batches.PagedKVCache.reset

    def leaky(cache: CoreCache) -> None:
        if cache.seen > 12:
            cache.pool.retain(cache.table()[0, 0, :1])
        real(cache)

    monkeypatch.setattr(batches.PagedKVCache, "reset", leaky)
    result = Result("allocator")
    allocator.machine_steps(Settings(), result, batches.Batches, "batch steps", {"cpu": allocator.ROUND}, 0.1)
    assert result.num_faults == 1
    assert "table entries, but its reference count is" in result.faults[0].what


def test_a_step_that_leaves_something_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CoreCache.write

    def early(cache: CoreCache, layer: int, key: Any, value: Any) -> Any:
        if layer == 0 and cache.has_pool and cache.seen:
            cache.pool.ref_counts[0] += 1  # before it is known whether there are blocks
            step = real(cache, layer, key, value)
            cache.pool.ref_counts[0] -= 1
            return step
        return real(cache, layer, key, value)

    monkeypatch.setattr(CoreCache, "write", early)
    result = Result("faults")
    faults.out_of_blocks(Settings(), result)
    assert result.num_faults >= len(faults.USES)


def test_blocks_that_an_exception_keeps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    real = PagedKVCache.attention

    def keep(cache: PagedKVCache, *arguments: Any, **options: Any) -> Any:
        kept.append(cache)
        return real(cache, *arguments, **options)

    monkeypatch.setattr(PagedKVCache, "attention", keep)
    result = Result("faults")
    faults.exceptions_in_generate(Settings(scale=0.05), result)
    assert result.lost > 0
    assert all("patched" in fault.where for fault in result.faults)


def test_half_a_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The look at what a killed process left, on a file that is not whole."""

    class Saver:
        """Claims to have saved, and does not."""

        stdin = sys.stderr

        class stdout:
            """Says that a process began and is gone."""

            lines = iter(["1\n", "gone\n"])

            @classmethod
            def readline(cls) -> str:
                return next(cls.lines)

    cache, path = faults.large_cache(1), tmp_path / "kv.safetensors"
    files.save(cache, path)
    path.write_bytes(path.read_bytes()[:-1000])
    monkeypatch.setattr(faults.os, "kill", lambda *_: None)
    with pytest.raises(AssertionError, match="neither the old nor the new one"):
        faults.kill_one(Saver(), path, faults.random.Random(2), cache, Result("faults"))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------------
# The command and its report


def test_the_command_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["reliability", "--only", "ops", "--scale", "0.001", "--out", str(tmp_path)])
    assert command.main() == 0
    written = json.loads((tmp_path / "reliability.json").read_text())
    assert written["results"][0]["counts"]["cases"] == 100
    assert written["settings"]["scale"] == 0.001
    assert {"cpu", "torch", "commit"} <= written["environment"].keys()
    text = (tmp_path / "reliability.md").read_text()
    assert "| ops | 100 cases | 0 | 0 |" in text
    one_bit(monkeypatch)
    assert command.main() == 1
    assert "--case" in (tmp_path / "reliability.md").read_text()


def test_minutes_replace_counts() -> None:
    numbers = Settings(minutes=0.001).numbers(10**9, share=0.5)
    assert 0 < sum(1 for _ in numbers) < 10**9
    assert list(Settings(scale=0.5).numbers(10, share=0.5)) == [0, 1, 2, 3, 4]


def test_numbers_with_commas_and_details() -> None:
    result = Result("ops")
    result.counts["cases"], result.counts["·free"] = 12_000, 3
    text = report.markdown(Settings(), {"cpu": "x"}, [result])
    assert "| ops | 12,000 cases | 0 | 0 | 0 |" in text
    assert "free | 3 |" in text
