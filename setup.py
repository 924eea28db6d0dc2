"""The two compiled libraries; everything else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))

from ninja_build_ext import NinjaBuildExt, build_number, extensions

setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": NinjaBuildExt},
    # No Python symbols: one wheel serves every Python.
    options={"bdist_wheel": {"py_limited_api": "cp310", "build_number": build_number()}},
)
