"""PEP 517 backend: setuptools', plus torch as a build requirement only where the target environment has none.

A plain ``torch`` in ``build-system.requires`` would make every isolated build download one, however many gigabytes,
next to the torch that is installed already.
"""

from __future__ import annotations

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that stay as they are)
from toolchain import MIN_TORCH, find_torch

ConfigSettings = dict[str, str | list[str] | None]


def _with_torch(requires: list[str]) -> list[str]:
    return requires if find_torch() else [*requires, f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}"]


def get_requires_for_build_wheel(config_settings: ConfigSettings | None = None) -> list[str]:
    """Return what building a wheel needs beyond ``build-system.requires``."""
    return _with_torch(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: ConfigSettings | None = None) -> list[str]:
    """Return what an editable install needs beyond ``build-system.requires``."""
    return _with_torch(build_meta.get_requires_for_build_editable(config_settings))
