"""8-bit caches at the ops: attention as near as after dequantising, scales that travel with blocks, scales in order."""

from __future__ import annotations

import math

import pytest
import torch
from op_cases import EIGHT_BIT_DTYPES, AttentionCase, attention_case, dtype_id, make_caches, make_scales
from torch import Tensor

from torch_paged_kv import ops, reference

SPANS = {"decode": ([1] * 16, [700, 33, 512, 1] * 4), "prefill": ([96, 64], [300, 64])}


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def dequantised(case: AttentionCase) -> list[Tensor]:
    """The caches [num_blocks, block_size, num_kv_heads, head_size] in the query's dtype, scales multiplied in."""
    caches = []
    for name in ("key", "value"):
        cache, scale = getattr(case, f"{name}_cache").float(), case.options[f"{name}_scale"]
        if scale is not None:
            cache = cache * (scale[..., None] if scale.dim() == 3 else scale.reshape(-1, 1))
        caches.append(cache.to(case.query.dtype))
    return caches


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("scale_kind", ["none", "tensor", "head", "slot"])
@pytest.mark.parametrize("cache_dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_as_near_as_dequantising_first(
    dtype: torch.dtype, cache_dtype: torch.dtype, scale_kind: str, spans: str, device: torch.device
) -> None:
    """Converting in registers loses nothing: the error is at most 1.1 times that of the op over dequantised caches.

    For float32 both errors are of a few last bits; the bound of every dtype, twice naive, is tested with the others.
    A row of one key shows how the CUDA kernel treats scales of slots: it rounds weight times scale to float16, and then
    the result, where dequantising first rounds only once: sqrt(2) times the error.
    """
    case = attention_case(
        *SPANS[spans],
        num_heads=8,
        num_kv_heads=2,
        head_size=128,
        dtype=dtype,
        cache_dtype=cache_dtype,
        scale_kind=scale_kind,
        device=device,
    )
    exact, _ = case.in_dtype(torch.float64)
    tensors = list(case.tensors())
    tensors[1:3] = dequantised(case)
    options = case.options | {"key_scale": None, "value_scale": None}
    first = ops.paged_attention(*tensors, **options)
    rounds_twice = device.type == "cuda" and dtype == torch.float16 and scale_kind == "slot" and spans == "decode"
    bound = 1.1 * math.sqrt(2) if rounds_twice else 1.1
    assert rms(case.run().double() - exact) <= bound * rms(first.double() - exact)


@pytest.mark.parametrize("cache_dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
def test_scales_travel_with_blocks(cache_dtype: torch.dtype, device: torch.device) -> None:
    """Copied inside a pool and swapped into another, a block with its scales reads as before."""
    num_blocks, block_size, heads = 6, 4, 2
    pools = []
    for _ in range(2):
        caches = make_caches(num_blocks, block_size, heads, 16, 16, dtype=cache_dtype, device=device)
        pools.append([*caches, *make_scales("slot", num_blocks, block_size, heads, cache_dtype, device)])
    key = torch.randn(8, heads, 16, device=device) * torch.logspace(-3, 3, 8, device=device)[:, None, None]
    slots = torch.arange(8, device=device)  # blocks 0 and 1
    ops.reshape_and_cache(key, -key, *pools[0][:2], slots, *pools[0][2:])

    def read(pool: list[Tensor], blocks: list[int]) -> tuple[Tensor, Tensor]:
        table = torch.tensor([blocks], dtype=torch.int32, device=device)
        lens = torch.tensor([8], dtype=torch.int32, device=device)
        return ops.gather_blocks(*pool[:2], table, lens, 8, key_scale=pool[2], value_scale=pool[3])

    expected = read(pools[0], [0, 1])
    ops.copy_blocks(pools[0][::2], pools[0][1::2], torch.tensor([[0, 4], [1, 2], [-1, -1]], device=device))
    ops.swap_blocks(pools[0], pools[1], torch.tensor([[4, 5], [2, 0]], device=device))
    for pool, blocks in ((pools[0], [0, 1]), (pools[0], [4, 2]), (pools[1], [5, 0])):
        for actual, right in zip(read(pool, blocks), expected):
            assert torch.equal(actual, right)
    assert (expected[0][0].transpose(0, 1) - key).abs().max() <= key.abs().max() / 7


@pytest.mark.parametrize("cache_dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
def test_a_row_of_nan_keeps_to_itself(cache_dtype: torch.dtype, device: torch.device) -> None:
    """A NaN or an infinity in a row does not make its scale NaN, and leaves other rows alone."""
    key = torch.randn(3, 1, 8, device=device)
    clean = key.clone()
    key[1, 0, 2], key[1, 0, 5] = math.nan, math.inf
    results = []
    for states in (key, clean):
        caches = make_caches(1, 4, 1, 8, 8, dtype=cache_dtype, device=device)
        scales = make_scales("slot", 1, 4, 1, cache_dtype, device)
        ops.reshape_and_cache(states, states, *caches, torch.arange(3, device=device), *scales)
        assert scales[0] is not None
        results.append((caches[0].float()[0, :3, 0], scales[0][0, :3, 0]))
    (rows, scales), (clean_rows, clean_scales) = results
    assert scales.isfinite().all()
    assert (scales > 0).all()
    assert torch.equal(rows[::2], clean_rows[::2])
    assert torch.equal(scales[::2], clean_scales[::2])
    assert rows[1, 5] == reference.MAX_OF_DTYPE[cache_dtype]
    assert rows[1, 2].isnan() == (cache_dtype != torch.int8)
