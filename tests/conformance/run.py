"""Runs Transformers' own cache and generation tests on PagedKVCache, offline, from a checkout of theirs.

    python tests/conformance/run.py --tests CHECKOUT [--models llama,gemma3] [--jobs 2]

CHECKOUT is a copy of the Transformers repository at the installed release; it is only read. A test that fails is run
again without substitution: if it fails there too, it says nothing about the cache (most such tests want the hub).
Prints a Markdown table and exits with 1 if a test fails for a reason that :data:`DEVIATIONS` does not give, or if a
family's attention did not take the path it should. docs/conformance.md explains the columns.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from torch_paged_kv.integrations.transformers import GATHERED_MODELS

HERE = Path(__file__).resolve().parent
MODELS = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "phi3",
    "gpt2",
    "mixtral",
    "gemma3",
    "gemma3n",
    "bart",
    "whisper",
    "t5",
    "deepseek_v3",
    "gpt_oss",
    "falcon",
    "bloom",
    "qwen3_next",
    "jamba",
]
FILES = {"cache_utils": "tests/utils/test_cache_utils.py", "generation_utils": "tests/generation/test_utils.py"}
ABOUT_CACHES = "generat or beam or assisted or cache or contrastive or dola or prompt_lookup or past or left_padding"

# (family, test, reason), the first two regular expressions: tests that fail because the cache differs by design.
DEVIATIONS: list[tuple[str, str, str]] = [
    (
        "gpt_neox",
        "test_cached_forward_with_and_without_attention_mask",
        "assigns cache.layers[i].keys, which are copies here; copy.deepcopy(cache) is how a cache is copied",
    ),
]


@dataclass
class Family:
    """What became of the tests of one family."""

    name: str
    passed: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    deviating: list[dict[str, Any]] = field(default_factory=list)
    failing_without: list[dict[str, Any]] = field(default_factory=list)  # also where nothing is substituted
    direct: int = 0
    gathered: int = 0

    @property
    def wrong_path(self) -> str:
        """What is wrong about the path that attention took; empty if nothing is."""
        if self.name in FILES:
            return ""
        taken, expected = (self.direct, "direct") if self.name not in GATHERED_MODELS else (self.gathered, "gathered")
        return "" if taken else f"attention never took the {expected} path"

    @property
    def is_good(self) -> bool:
        """Whether nothing failed that should not."""
        return bool(self.passed) and not self.failed and not self.wrong_path


class Runner:
    """Runs pytest on files of a checkout."""

    def __init__(self, checkout: Path, timeout: int, folder: Path) -> None:
        self.checkout, self.timeout, self.folder = checkout, timeout, folder
        self.ini = folder / "pytest.ini"
        self.ini.write_text("[pytest]\n")  # not the checkout's: it asks for plugins that the tests do not need

    def run(self, name: str, tests: Iterable[str], *options: str) -> list[dict[str, Any]]:
        """The report of the plugin, a dict per test."""
        report, log = self.folder / f"{name}.jsonl", self.folder / f"{name}.log"
        arguments = ["-c", self.ini, "--rootdir", self.checkout, "--confcutdir", self.checkout / "tests"]
        arguments += ["-p", "plugin", "-p", "no:cacheprovider", "-q"]
        if importlib.util.find_spec("pytest_timeout"):
            arguments.append(f"--timeout={self.timeout}")
        command = [sys.executable, "-m", "pytest", *arguments, "--paged-report", report, *options, *tests]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        }
        with log.open("w") as output:
            code = subprocess.run(command, cwd=self.checkout, env=environment, stdout=output, stderr=output).returncode
        if code not in (0, 1):  # all passed, some failed; anything else means that it did not run to its end
            raise SystemExit(f"pytest ended with {code} on {name}:\n{log.read_text()[-4000:]}")
        return [json.loads(line) for line in report.read_text().splitlines()]

    def family(self, name: str) -> Family:
        """Run the tests of a family, and those that fail once more without substitution."""
        file = FILES.get(name, f"tests/models/{name}/test_modeling_{name}.py")
        family = Family(name)
        failures = []
        for line in self.run(name, [file], "-k", ABOUT_CACHES):
            family.direct += line["paths"]["direct"]
            family.gathered += line["paths"]["gathered"]
            {"passed": family.passed, "skipped": family.skipped, "failed": failures}[line["outcome"]].append(line)
        without: dict[str, str] = {}
        if failures:
            again = self.run(f"{name}-without", [f"{file}::{line['test']}" for line in failures], "--paged-off")
            without = {line["test"]: line["outcome"] for line in again}
        for line in failures:
            reason = deviation(name, line["test"])
            if without.get(line["test"]) == "failed":
                family.failing_without.append(line)
            elif reason:
                family.deviating.append(line | {"message": reason})
            else:
                family.failed.append(line)
        print(f"{name}: {len(family.passed)} passed, {len(family.failed)} failed", file=sys.stderr, flush=True)
        return family


def deviation(family: str, test: str) -> str | None:
    """Reason why a test is expected to fail, or None."""
    matching = (
        reason for name, pattern, reason in DEVIATIONS if re.fullmatch(name, family) and re.search(pattern, test)
    )
    return next(matching, None)


def release_of(checkout: Path) -> str:
    """Version of Transformers that a checkout is of."""
    found = re.search(r'__version__ = "(.*)"', (checkout / "src/transformers/__init__.py").read_text())
    return found[1] if found else "unknown"


def table(families: list[Family]) -> str:
    """One row per family, in Markdown."""
    rows = [
        "| family | passed | failed | deviating | skipped | failing without | direct | gathered |",
        "|---|---|---|---|---|---|---|---|",
    ]
    counts = [
        [
            *(
                len(of)
                for of in (family.passed, family.failed, family.deviating, family.skipped, family.failing_without)
            ),
            family.direct,
            family.gathered,
        ]
        for family in families
    ]
    named = [*zip((family.name for family in families), counts)]
    named.append(("**all**", [sum(column) for column in zip(*counts)]))
    rows += [f"| {name} | {' | '.join(f'{count:,}' for count in row)} |" for name, row in named]
    return "\n".join(rows)


def remarks(families: list[Family]) -> Iterable[str]:
    """A line for each failure and deviation, for each reason why tests fail without us, and for each path not taken."""
    for family in families:
        for kind in ("failed", "deviating"):
            for line in getattr(family, kind):
                yield f"{kind}: {family.name} {line['test']}: {last_line(line['message'])}"
        for reason, count in Counter(last_line(line["message"]) for line in family.failing_without).items():
            yield f"failing without: {family.name}, {count}: {reason}"
        if family.wrong_path:
            yield f"failed: {family.name}: {family.wrong_path}"


def last_line(message: str) -> str:
    """What an error message ends with, where most say what is wrong."""
    return message.strip().rpartition("\n")[2][:200]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, metavar="CHECKOUT", help="copy of the repository")
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=[*MODELS, "cache_utils"], metavar="NAME,...",
        help=f"families, also {', '.join(FILES)}; all of {', '.join(MODELS)} and cache_utils unless given",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    parser.add_argument("--logs", type=Path, help="folder to keep pytest's output and the reports in")
    options = parser.parse_args()
    checkout = options.tests.resolve()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, tests of {release_of(checkout)}\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.logs or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        runner = Runner(checkout, options.timeout, folder)
        with ThreadPoolExecutor(options.jobs) as threads:
            families = list(threads.map(runner.family, options.models))
    print(table(families), *remarks(families), sep="\n")
    return 0 if all(family.is_good for family in families) else 1


if __name__ == "__main__":
    sys.exit(main())
