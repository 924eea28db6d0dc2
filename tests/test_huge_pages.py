"""Pools ask for 2 MiB pages: the kernel's own account of a mapping says whether it was asked."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_paged_kv import huge_pages
from torch_paged_kv.storage import KVPool

MAPS = Path("/proc/self/smaps")
needs_linux = pytest.mark.skipif(
    not MAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux with huge pages"
)


def is_advised(tensor: Tensor) -> bool:
    """Whether the mapping around the middle of a tensor has the flag that madvise sets."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in MAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= middle < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no mapping holds the tensor")


@needs_linux
def test_lanes_ask_for_huge_pages() -> None:
    assert not is_advised(torch.empty(64 << 20, dtype=torch.uint8))
    pool = KVPool(1024, 16, torch.device("cpu"), growable=True)
    pool.ensure_lane(0, 64 << 10, torch.uint8, pool.device)  # 64 MiB
    assert is_advised(pool.lane(0))
    pool.lane(0).fill_(7)
    pool.grow(1500)
    assert is_advised(pool.lane(0))
    assert bool((pool.lane(0)[:1024] == 7).all())


@needs_linux
def test_small_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by the calls: small memory may come from a mapping that an earlier pool asked for."""
    calls: list[object] = []
    library = ctypes.CDLL(None)
    monkeypatch.setattr(ctypes, "CDLL", lambda *args: calls.append(args) or library)
    huge_pages.advise(torch.empty(huge_pages.HUGE_PAGE - 1, dtype=torch.uint8))
    assert calls == []
    huge_pages.advise(torch.empty(huge_pages.HUGE_PAGE, dtype=torch.uint8))
    assert len(calls) == 1


def test_memory_that_is_none() -> None:
    with FakeTensorMode():
        assert huge_pages.advise(torch.empty(64 << 20)).shape == (64 << 20,)
    assert huge_pages.advise(torch.empty(64 << 20, device="meta")).device.type == "meta"
