"""The two compiled libraries; everything else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))

from ninja_build_ext import NinjaBuildExt, extensions

setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": NinjaBuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},  # no Python symbols: one wheel serves every Python
)
