"""pytest plugin: Transformers' own tests, with a ``PagedKVCache`` wherever they, or it, make a ``DynamicCache``.

``DynamicCache`` is replaced by name, in every module that holds it, by a stand-in whose instances are paged caches.
The class itself stays what it was: ``PagedKVCache`` is a subclass of it and makes some for templates.

``--paged-off`` runs the same tests unsubstituted. ``--paged-report FILE`` writes a line of JSON per test: its outcome,
how many caches it made, and which path their attention took.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import cache_utils

from torch_paged_kv.integrations.transformers import PagedKVCache, path_counts

MARKERS = [
    "accelerate_tests",
    "all_flash_attn_test",
    "bitsandbytes",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "generate",
    "is_pipeline_test",
    "is_staging_test",
    "is_tensor_parallel_test",
    "is_training_test",
    "not_device_test",
    "tensor_parallel_ci",
    "torch_compile_test",
    "torch_export_test",
    "training_ci",
]

DynamicCache = cache_utils.DynamicCache
made = {"paged": 0, "dynamic": 0}  # caches that the running test asked for


class StandIn:
    """What the name ``DynamicCache`` means under this plugin: a class to all that use it as one."""

    def __call__(self, ddp_cache_data: Any = None, config: Any = None, **options: Any) -> Any:
        """A paged cache, unless it is to hold given tensors or to live in host memory."""
        if ddp_cache_data is not None or options.get("offloading"):
            made["dynamic"] += 1
            return DynamicCache(ddp_cache_data, config=config, **options)
        made["paged"] += 1
        return PagedKVCache(config)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, DynamicCache)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, DynamicCache)

    def __mro_entries__(self, bases: Any) -> tuple[type]:
        return (DynamicCache,)  # what a model's own cache derives from

    def __or__(self, other: Any) -> Any:
        return DynamicCache | other  # in annotations

    __ror__ = __or__

    def __getattr__(self, name: str) -> Any:
        return getattr(DynamicCache, name)


def substitute() -> None:
    """Put the stand-in wherever Transformers holds ``DynamicCache``; modules loaded later find it in cache_utils."""
    stand_in = StandIn()
    transformers.DynamicCache = stand_in
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "transformers" and vars(module).get("DynamicCache") is DynamicCache:
            module.DynamicCache = stand_in  # type: ignore[attr-defined]


class Report:
    """Writes what became of each test."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", buffering=1)
        self.before: dict[str, int] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Start counting."""
        self.before = path_counts()
        made.update(paged=0, dynamic=0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a line when the test has run, or was skipped or failed before."""
        if report.when != "call" and report.outcome == "passed":
            return
        message = ""
        if report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else str(report.longrepr)
        counts = path_counts()
        line = {
            "test": report.nodeid.split("::", 1)[1],
            "outcome": report.outcome,
            "message": message[-600:],
            "made": dict(made),
            "paths": {path: counts[path] - self.before.get(path, 0) for path in counts},
            "seconds": round(report.duration, 1),
        }
        self.file.write(json.dumps(line) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two options."""
    parser.addoption("--paged-off", action="store_true", help="do not substitute")
    parser.addoption("--paged-report", type=Path, help="file to write the outcomes to")


def pytest_configure(config: pytest.Config) -> None:
    """Substitute before any test module is imported."""
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: of Transformers")
    if config.getoption("--paged-report"):
        config.pluginmanager.register(Report(config.getoption("--paged-report")))
    if not config.getoption("--paged-off"):
        substitute()
