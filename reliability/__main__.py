"""The command: `python -m reliability`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

import torch

from reliability import report
from reliability.report import Result, Settings

PARTS = ("allocator", "ops", "threads", "faults", "sanitizers")


def arguments(values: list[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(prog="python -m reliability", description=__doc__)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--minutes", type=float, help="go on for so long instead of by counts; hours are many minutes")
    amount.add_argument("--scale", type=float, default=1.0, help="so many times the default counts (default: 1)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where (default: cpu)")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run (default: all but sanitizers)")
    parser.add_argument("--seed", type=int, default=0, help="other seeds find other things (default: 0)")
    parser.add_argument("--case", type=int, help="with --only ops: this case alone, and its error with a traceback")
    parser.add_argument("--out", type=Path, default=report.ROOT / "build" / "reliability", help="where the report goes")
    return parser.parse_args(values)


def run(parts: list[str], settings: Settings, out: Path) -> list[Result]:
    """Run parts one after the other; the report is written after each, so that what was done is not lost."""
    facts = report.environment(settings.device)  # before a long run, in which the tree may change
    results: list[Result] = []
    for part in parts:
        begin = time.monotonic()
        with torch.no_grad():
            result: Result = importlib.import_module(f"reliability.{part}").run(settings)
        result.seconds = time.monotonic() - begin
        results.append(result)
        done = ", ".join(f"{number} {name}" for name, number in sorted(result.counts.items()) if "·" not in name)
        print(
            f"{part}: {done}; {result.num_faults} faults, {result.lost} blocks lost, {result.seconds:.0f} s", flush=True
        )
        report.write(out, facts, settings, results)
    return results


def main() -> int:
    """Run, write the report, and say by the exit status whether all was well."""
    given = arguments()
    if os.environ.get("PAGED_KV_DEBUG", "0") not in ("", "0"):
        sys.exit("PAGED_KV_DEBUG must be unset: much of what is given to the ops here is what debug mode refuses")
    settings = Settings(given.device, given.seed, given.scale, given.minutes, given.case)
    parts = given.only or [part for part in PARTS if part != "sanitizers"]
    results = run(parts, settings, given.out)
    print(f"the report is in {given.out}")
    return int(any(result.num_faults or result.lost for result in results))


if __name__ == "__main__":
    sys.exit(main())
