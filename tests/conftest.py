"""Fixtures of all tests: the devices there are, and a fixed seed."""

import os
from collections.abc import Iterator

# On a busy machine idle OpenMP threads that spin slow small ops down by 10 times. Read once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)
