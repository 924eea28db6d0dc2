"""Sums over many keys: as exact as a matrix product, the same bits for any number of threads, in little memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from op_cases import assert_at_most_twice_naive, attention_case

from torch_paged_kv import ops


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("q_len", "keys"), [(1, 10_000), (2, 10_000), (4, 3226), (16, 10_000), (40, 3226), (40, 10_000)]
)
def test_long_float32_sums_follow_the_rule(q_len: int, keys: int, deterministic: bool, device: torch.device) -> None:
    """From 2 queries on the naive products are matrix products, which sum in blocks and not key by key."""
    case = attention_case([q_len], [keys], num_heads=8, head_size=32, device=device, deterministic=deterministic)
    out, lse = case.run(ops.paged_attention_with_lse)
    for actual, naive, exact in zip(
        (out, lse), case.in_dtype(torch.float32), case.in_dtype(torch.float64), strict=True
    ):
        assert_at_most_twice_naive(actual, [naive], exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_len", [1, 4, 40])
def test_deterministic_does_not_depend_on_the_threads(q_len: int, dtype: torch.dtype) -> None:
    """One thread sums part after part, several sum the same parts beside each other."""
    case = attention_case([q_len], [5000], num_heads=4, head_size=64, dtype=dtype, deterministic=True)
    case.assert_threads_do_not_matter((1, 2, 5))


MEMORY = """
import resource, sys, torch
from torch_paged_kv import ops

torch.set_num_threads(1)
def prefill(fixed):
    ops.paged_attention(query, cache, cache, table, lens, spans, 1024, scale=0.1, deterministic=fixed)

query = torch.randn(1024, 8, 64).bfloat16()
cache = torch.randn(1024, 16, 2, 64).bfloat16()
table, lens = torch.arange(1024, dtype=torch.int32)[None], torch.tensor([16384], dtype=torch.int32)
spans = torch.tensor([0, 1024], dtype=torch.int32)
prefill(False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prefill(True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no resource module")
def test_deterministic_prefill_takes_little_memory() -> None:
    """A partial state for every 1,024 keys of every row would be 40 MiB here, and gigabytes for long prompts."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 << 20
