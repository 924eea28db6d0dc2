"""reshape_and_cache: every bit that is stored, and every slot that must not be touched."""

from __future__ import annotations

import pytest
import torch
from op_cases import (
    EIGHT_BIT_DTYPES,
    FLOAT_DTYPES,
    INT32_MAX,
    LAYOUTS,
    assert_same_bits,
    bits,
    dtype_id,
    make_caches,
    make_scales,
)
from torch import Tensor

from torch_paged_kv import ops, reference

NAN, INF = float("nan"), float("inf")


def write(
    key: Tensor,
    value: Tensor,
    slots: list[int],
    num_blocks: int,
    block_size: int,
    *,
    cache_dtype: torch.dtype,
    layout: str = "plain",
    scale_kind: str = "none",
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(key_cache, value_cache, key_scale, value_scale) as the op and as the reference leave them."""
    results = []
    scales = make_scales(scale_kind, num_blocks, block_size, key.shape[1], cache_dtype, key.device)
    for function in (ops.reshape_and_cache, reference.reshape_and_cache):
        caches = make_caches(
            num_blocks,
            block_size,
            key.shape[1],
            key.shape[2],
            value.shape[2],
            dtype=cache_dtype,
            layout=layout,
            poison=0.5,
            device=key.device,
        )
        own_scales = [None if scale is None else scale.clone() for scale in scales]
        function(key, value, *caches, torch.tensor(slots, device=key.device), *own_scales)
        results.append((*caches, *(scale for scale in own_scales if scale is not None)))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("cache_dtype", "scale_kind"),
    [(dtype, kind) for dtype in FLOAT_DTYPES + EIGHT_BIT_DTYPES for kind in ("none", "scalar", "tensor", "head")]
    + [(dtype, "slot") for dtype in EIGHT_BIT_DTYPES],
    ids=dtype_id,
)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_dtypes_and_scales(dtype: torch.dtype, cache_dtype: torch.dtype, scale_kind: str, device: torch.device) -> None:
    key, value = (torch.randn(6, 3, size).to(device, dtype) * 30 for size in (40, 24))
    actual, expected = write(key, value, [3, 0, 17, -1, 11, 19], 4, 5, cache_dtype=cache_dtype, scale_kind=scale_kind)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=dtype_id)
@pytest.mark.parametrize("sizes", [(1, 1), (8, 8), (63, 5), (64, 64), (128, 100), (576, 512)])
def test_layouts_and_sizes(layout: str, cache_dtype: torch.dtype, sizes: tuple[int, int], device: torch.device) -> None:
    key, value = (torch.randn(9, 2, size, device=device) for size in sizes)
    slots = [0, 1, 2, 14, 8, 20, 5, 19, 7]
    assert_same_bits(*write(key, value, slots, 3, 7, cache_dtype=cache_dtype, layout=layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_slots_are_written(layout: str, device: torch.device) -> None:
    caches = make_caches(5, 4, 2, 8, 6, layout=layout, device=device)
    key, value = torch.randn(3, 2, 8, device=device), torch.randn(3, 2, 6, device=device)
    ops.reshape_and_cache(key, value, *caches, torch.tensor([2, 13, 7], device=device))
    for cache, written in zip(caches, (key, value)):
        flat = cache.reshape(20, 2, -1)
        assert torch.equal(flat[[2, 13, 7]], written)
        rest = [slot for slot in range(20) if slot not in (2, 13, 7)]
        assert flat[rest].isnan().all()
    if layout == "slice":  # nor the bytes between the rows of the view
        storage = caches[0]._base
        assert storage is not None
        assert int((~storage.isnan()).sum()) == key.numel() + value.numel()


@pytest.mark.parametrize("slot", [-1, -2, 12, 13, INT32_MAX, 2**40, -(2**63), 2**63 - 1])
def test_slots_outside_are_skipped(slot: int, device: torch.device) -> None:
    caches = make_caches(3, 4, 2, 8, 8, device=device)
    key = torch.randn(3, 2, 8, device=device)
    ops.reshape_and_cache(key, key, *caches, torch.tensor([5, slot, 6], device=device))
    for cache in caches:
        flat = cache.reshape(12, 2, 8)
        assert torch.equal(flat[5:7], key[::2])
        assert flat[:5].isnan().all()
        assert flat[7:].isnan().all()


def test_skipped_slots_leave_scales_alone(device: torch.device) -> None:
    caches = make_caches(2, 4, 2, 8, 8, dtype=torch.int8, device=device)
    scales = [torch.full((2, 4, 2), NAN, device=device) for _ in range(2)]
    key = torch.randn(2, 2, 8, device=device)
    ops.reshape_and_cache(key, key, *caches, torch.tensor([-1, 6], device=device), *scales)
    for scale in scales:
        assert int((~scale.isnan()).sum()) == 2
        assert not scale[1, 2].isnan().any()


def test_no_tokens(device: torch.device) -> None:
    caches = make_caches(2, 4, 2, 8, 8, device=device)
    key = torch.randn(0, 2, 8, device=device)
    ops.reshape_and_cache(key, key, *caches, torch.empty(0, dtype=torch.int64, device=device))
    assert caches[0].isnan().all()
    assert caches[1].isnan().all()


def test_strided_sources(device: torch.device) -> None:
    """Slices of a fused QKV projection, heads first in memory."""
    fused = torch.randn(2, 5, 3 * 16, device=device)  # [num_kv_heads, num_tokens, ...]
    key, value = (fused[..., begin : begin + 16].transpose(0, 1) for begin in (16, 32))
    caches = make_caches(2, 4, 2, 16, 16, device=device)
    ops.reshape_and_cache(key, value, *caches, torch.arange(5, device=device))
    assert torch.equal(caches[0].reshape(8, 2, 16)[:5], key)
    assert torch.equal(caches[1].reshape(8, 2, 16)[:5], value)


def test_many_tokens(device: torch.device) -> None:
    """Enough for several threads."""
    key, value = (torch.randn(3000, 4, 64, device=device) for _ in range(2))
    slots = torch.randperm(200 * 16)[:3000].tolist()
    assert_same_bits(*write(key, value, slots, 200, 16, cache_dtype=torch.bfloat16))


# ---- numbers --------------------------------------------------------------------------------------------------------


def all_values(dtype: torch.dtype) -> Tensor:
    """Every bit pattern of a 16-bit dtype; for float32 every one of its upper 16 bits, and random ones."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if dtype == torch.float32:
        low = torch.randint(0, 2**16, patterns.shape, dtype=torch.int32)
        return torch.cat([patterns * 2**16, patterns * 2**16 + low]).view(torch.float32)
    return patterns.to(torch.int16).view(dtype)


@pytest.mark.parametrize("cache_dtype", FLOAT_DTYPES + EIGHT_BIT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_every_value(dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device) -> None:
    """Cast on store is torch's cast, saturated for 8-bit caches; NaN stays NaN in float8 and is 0 in int8."""
    x = all_values(dtype)
    x = x.reshape(-1, 1, 256).to(device)
    cache, _ = make_caches(len(x), 1, 1, 256, 256, dtype=cache_dtype, device=device)
    ops.reshape_and_cache(x, x, cache, torch.empty_like(cache), torch.arange(len(x), device=device))
    cache = cache.reshape(x.shape)
    nan = x.isnan()
    if cache_dtype == torch.int8:
        expected = x.float().nan_to_num(0.0).round().clamp(-128, 127).to(torch.int8)
        assert torch.equal(cache, expected)
        return
    limit = reference.MAX_OF_DTYPE.get(cache_dtype, INF)
    expected = (x.float().clamp(-limit, limit) if limit < INF else x).to(cache_dtype)
    assert torch.equal(bits(torch.where(nan, 0, cache.float())), bits(torch.where(nan, 0, expected.float())))
    assert cache.float()[nan].isnan().all()


@pytest.mark.parametrize("cache_dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
def test_no_scale_is_one(cache_dtype: torch.dtype, device: torch.device) -> None:
    key = torch.randn(4, 2, 16, device=device) * 100
    results = []
    for scale in (None, torch.ones((), device=device), torch.ones(1, device=device), torch.ones(2, device=device)):
        caches = make_caches(2, 4, 2, 16, 16, dtype=cache_dtype, poison=0, device=device)
        ops.reshape_and_cache(key, key, *caches, torch.arange(4, device=device), scale, scale)
        results.append(caches)
    for caches in results[1:]:
        assert_same_bits(caches, results[0])


def test_scale_divides(device: torch.device) -> None:
    """A true division, not a product with the reciprocal: 21 / 0.7 ties differ."""
    key = torch.arange(1.0, 129.0, device=device).reshape(1, 1, 128) * 0.35
    for scale in (0.7, 0.1, 3.0, 1e-3):
        cache, other = make_caches(1, 1, 1, 128, 128, dtype=torch.int8, device=device)
        number = torch.tensor(scale, device=device)
        ops.reshape_and_cache(key, key, cache, other, torch.zeros(1, dtype=torch.int64, device=device), number, number)
        assert torch.equal(cache.flatten(), (key / number).round().clamp(-128, 127).to(torch.int8).flatten())


@pytest.mark.parametrize("cache_dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
def test_slot_scales(cache_dtype: torch.dtype, device: torch.device) -> None:
    """scale = absmax / largest; a row of zeros has scale 1; the round trip is within half a step of each row."""
    largest = reference.MAX_OF_DTYPE[cache_dtype]
    key = torch.randn(5, 2, 64, device=device) * torch.tensor([1e-6, 1.0, 0.0, 1e4, 3.0], device=device)[:, None, None]
    caches = make_caches(2, 4, 2, 64, 64, dtype=cache_dtype, device=device)
    scales = [torch.full((2, 4, 2), NAN, device=device) for _ in range(2)]
    slots = torch.tensor([7, 0, 3, 2, 5], device=device)
    ops.reshape_and_cache(key, key, *caches, slots, *scales)
    for cache, scale in zip(caches, scales):
        made = scale.reshape(8, 2)[slots]
        absmax = key.abs().amax(-1)
        assert torch.equal(made, torch.where(absmax > 0, absmax / absmax.new_tensor(largest), 1.0))
        stored = cache.float().reshape(8, 2, 64)[slots]
        assert stored.abs().max() == largest
        step = {torch.int8: 0.5, torch.float8_e4m3fn: 16.0, torch.float8_e5m2: 4096.0}[cache_dtype]
        error = (stored * made[..., None] - key).abs() / made[..., None]
        assert error.max() <= step * (1 + 1e-5)


@pytest.mark.parametrize("cache_dtype", FLOAT_DTYPES, ids=dtype_id)
def test_slot_scales_need_an_eight_bit_cache(cache_dtype: torch.dtype, device: torch.device) -> None:
    caches = make_caches(2, 4, 2, 8, 8, dtype=cache_dtype, device=device)
    scale = torch.ones(2, 4, 2, device=device)
    key = torch.randn(1, 2, 8, device=device)
    for function in (ops.reshape_and_cache, reference.reshape_and_cache):
        with pytest.raises(ValueError, match=r"^key_scale must .*, got a scale per slot"):
            function(key, key, *caches, torch.zeros(1, dtype=torch.int64, device=device), scale, scale)


# ---- dtype mixes, grad, autocast ------------------------------------------------------------------------------------


def test_key_and_value_of_two_dtypes(device: torch.device) -> None:
    """Under autocast a rotated key is float32 while its value is bfloat16: both are stored as if cast directly."""
    key, value = torch.randn(3, 2, 8, device=device), torch.randn(3, 2, 8, device=device).bfloat16()
    caches = make_caches(1, 4, 2, 8, 8, dtype=torch.bfloat16, device=device)
    ops.reshape_and_cache(key, value, *caches, torch.arange(3, device=device))
    assert torch.equal(caches[0][0, :3], key.bfloat16())
    assert torch.equal(caches[1][0, :3], value)


def test_autocast_loses_no_write(device: torch.device) -> None:
    key = torch.randn(3, 2, 8, device=device)
    caches = make_caches(1, 4, 2, 8, 8, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ops.reshape_and_cache(key, key, *caches, torch.arange(3, device=device))
    assert torch.equal(caches[0][0, :3], key)
    assert torch.equal(caches[1][0, :3], key)


@pytest.mark.parametrize("name", ["key", "value", "key_cache", "value_cache"])
def test_grad_is_refused(name: str, device: torch.device) -> None:
    caches = make_caches(1, 4, 2, 8, 8, poison=0, device=device)
    arguments = {"key": torch.ones(1, 2, 8, device=device), "value": torch.ones(1, 2, 8, device=device)}
    arguments |= {"key_cache": caches[0], "value_cache": caches[1]}
    arguments[name] = arguments[name].clone().requires_grad_()
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=f"^{name} must not require grad: .*torch.no_grad"):
        ops.reshape_and_cache(**arguments, slot_mapping=slots)
    assert not caches[0].any()
    assert not caches[1].any()
    with torch.no_grad():
        ops.reshape_and_cache(**arguments, slot_mapping=slots)
    assert arguments["key_cache"].any()
    assert arguments["value_cache"].any()
