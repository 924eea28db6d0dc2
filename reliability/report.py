"""What a run was asked for, and what it found: settings, faults, results, and the report of all of them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 20  # faults of a part that are kept with their text; all are counted


@dataclass(frozen=True)
class Settings:
    """What to run. `minutes`, if given, replaces the counts of the parts that go on at random."""

    device: str = "cpu"
    seed: int = 0
    scale: float = 1.0
    minutes: float | None = None
    case: int | None = None  # of the op fuzz: this one alone

    def count(self, count: int) -> int:
        """A fixed amount of work, scaled."""
        return max(1, round(count * self.scale))

    def numbers(self, count: int, share: float) -> Iterator[int]:
        """0, 1, 2, ...: `count` of them, scaled; or as many as there is time for in a share of the minutes."""
        if self.minutes is None:
            yield from range(self.count(count))
            return
        end, number = time.monotonic() + 60 * self.minutes * share, 0
        while time.monotonic() < end:
            yield number
            number += 1


@dataclass
class Fault:
    """Something that went otherwise than promised."""

    where: str
    what: str
    again: str  # a command that shows it again


def described(error: BaseException) -> str:
    """An exception with the line that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno}, {place.line})"


@dataclass
class Result:
    """Of one part: how much was done, what went wrong, and how many blocks were lost."""

    part: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    num_faults: int = 0
    lost: int = 0
    seconds: float = 0.0

    def fault(self, where: str, error: BaseException | str, again: str) -> None:
        """Note a fault, and print it as it comes."""
        what = error if isinstance(error, str) else described(error)
        self.num_faults += 1
        if len(self.faults) < SHOWN:
            self.faults.append(Fault(where, what[:2000], again))
            print(f"FAULT {self.part}, {where}: {what}\n  again: {again}", file=sys.stderr, flush=True)

    def guard(self, where: str, again: str, function: Callable[[], int | None]) -> bool:
        """Run something that returns how many blocks it lost; whatever it raises is a fault. Whether it went well."""
        try:
            lost = function() or 0
        except Exception as error:
            self.fault(where, error, again)
            return False
        if lost:
            self.lost += lost
            self.fault(where, f"{lost} blocks were lost", again)
        return not lost


def command(settings: Settings, part: str, *more: str) -> str:
    """What runs a part again as it was run now."""
    words = ["python -m reliability", f"--only {part}", f"--seed {settings.seed}"]
    words += [f"--device {settings.device}"] if settings.device != "cpu" else []
    words += [f"--scale {settings.scale:g}"] if settings.scale != 1 and not more else []
    return " ".join([*words, *more])


def environment(device: str) -> dict[str, str]:
    """What a report is of."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    facts = {
        "cpu": _cpu_name(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": (git.stdout.strip() or "unknown") + (" with changes" if dirty.stdout.strip() else ""),
    }
    if torch.device(device).type == "cuda":
        facts = {"gpu": torch.cuda.get_device_name(device)} | facts
    return facts


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return f"{name}, {os.environ.get('PAGED_KV_CPU_CAPABILITY') or torch.backends.cpu.get_cpu_capability()}"


def markdown(settings: Settings, facts: dict[str, str], results: list[Result]) -> str:
    """The report as a page."""
    lines = ["# Reliability run", "", ", ".join(f"{name} {fact}" for name, fact in facts.items())]
    lines += [f"seed {settings.seed}, device {settings.device}", ""]
    lines += ["| part | done | faults | blocks lost | seconds |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        done = "; ".join(f"{number:,} {name}" for name, number in sorted(result.counts.items()) if "·" not in name)
        lines.append(f"| {result.part} | {done} | {result.num_faults} | {result.lost} | {result.seconds:.0f} |")
    details = {result.part: {n: c for n, c in result.counts.items() if "·" in n} for result in results}
    for part, counts in details.items():
        if counts:
            lines += ["", f"## {part}", "", "| of these | |", "| --- | --- |"]
            shown = sorted((name.replace("·", ", ").removeprefix(", "), count) for name, count in counts.items())
            lines += [f"| {name} | {count:,} |" for name, count in shown]
    for fault in [fault for result in results for fault in result.faults]:
        lines += ["", f"**{fault.where}**: `{fault.again}`", "", "```text", fault.what, "```"]
    return "\n".join(lines) + "\n"


def write(directory: Path, facts: dict[str, str], settings: Settings, results: list[Result]) -> None:
    """Write `reliability.md` and `reliability.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "reliability.md").write_text(markdown(settings, facts, results))
    report: dict[str, Any] = {
        "environment": facts,
        "settings": asdict(settings),
        "results": [vars(result) | {"faults": [vars(fault) for fault in result.faults]} for result in results],
    }
    (directory / "reliability.json").write_text(json.dumps(report, indent=1) + "\n")
