"""The op fuzz and the allocator steps where every access to memory is checked.

On the CPU: on a library built with AddressSanitizer and UndefinedBehaviorSanitizer, once for each instruction set of
the machine (`tests/run_sanitized.sh`, which builds it). On a GPU: under `compute-sanitizer --tool memcheck`, with every
tensor in an allocation of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile

from reliability.report import ROOT, Result, Settings, command

SCALES = {"cpu": 0.02, "cuda": 0.01}  # of the counts of the parts
DONE = re.compile(r"^(?:ops|allocator): (.*); (\d+) faults, (\d+) blocks lost", re.MULTILINE)


def run(settings: Settings) -> Result:
    """One run for each instruction set, or one on the GPU. A finding ends it."""
    result, again = Result("sanitizers"), command(settings, "sanitizers")
    if settings.device == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        result.fault("sanitizers", "g++ must be installed", again)
        return result
    if settings.device != "cpu" and shutil.which("compute-sanitizer") is None:
        result.fault("sanitizers", "compute-sanitizer must be on the PATH: see docs/reliability.md", again)
        return result
    with tempfile.TemporaryDirectory() as out:
        scale = SCALES[settings.device] * settings.scale
        parts = [
            "-m",
            "reliability",
            "--only",
            "ops",
            "allocator",
            "--scale",
            f"{scale:g}",
            "--seed",
            str(settings.seed),
        ]
        done = subprocess.run(
            checked(settings.device, [*parts, "--device", settings.device, "--out", out]),
            env=os.environ | {"PYTHON": sys.executable, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    for counts, faults, lost in DONE.findall(done.stdout):
        result.num_faults += int(faults)
        result.lost += int(lost)
        for number, name in re.findall(r"(\d+) ([a-z ]+)", counts):
            result.counts[name] += int(number)
    result.counts["instruction sets"] = len(re.findall(r"^== ", done.stdout, re.MULTILINE))
    if done.returncode != 0:
        result.fault("sanitizers", done.stdout[-2000:], again)
    return result


def checked(device: str, arguments: list[str]) -> list[str]:
    """The command that runs Python with these arguments under the device's checks."""
    if device == "cpu":
        return [str(ROOT / "tests" / "run_sanitized.sh"), *arguments]
    options = ["--tool", "memcheck", "--error-exitcode", "9"]
    return ["compute-sanitizer", *options, sys.executable, *arguments]
