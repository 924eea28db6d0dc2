"""torch.library.opcheck of every op: schema and mutation marks, autograd registration, fakes, AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import attention_case, fused_views, int32, make_caches, prefix_sum
from torch import Tensor

from torch_paged_kv import ops

OPCHECK_UTILS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def int64(values: list[Any], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def allocator_state(device: torch.device, num_groups: int | None = None) -> tuple[Tensor, ...]:
    """Three rows of 5, 0 and 4 tokens in blocks of 4, the first block shared by rows 0 and 2; 12 blocks."""
    table = torch.full((3, 4), -1, dtype=torch.int32)
    table[0, :2], table[2, 0] = torch.tensor([0, 1]), 0
    ref_counts = [2, 1] + [0] * 10
    if num_groups is not None:
        table = torch.stack([table] * num_groups)
        for group in range(1, num_groups):
            table[group, 0, :2], table[group, 2, 0] = torch.tensor([2 * group, 2 * group + 1]), 2 * group
            ref_counts[2 * group : 2 * group + 2] = [2, 1]
    free = [block for block, count in enumerate(ref_counts) if count == 0]
    ring = free + [0] * (12 - len(free))
    return (
        table.to(device),
        int32([5, 0, 4], device),
        int32(ring, device),
        int32(ref_counts, device),
        int64([0, len(free), 0, 0], device),
    )


def allocate(device: torch.device) -> list[Inputs]:
    spans = int32([0, 1, 3, 6], device)
    return [
        ((*allocator_state(device), spans, 6, 4), {}),
        ((*allocator_state(device), spans, 8, 4), {"num_new": int32([1, 0, 2], device)}),
        ((*allocator_state(device, 1), spans, 6, 4), {"retain": int32([-1], device)}),
        ((*allocator_state(device, 2), spans, 6, 4), {"retain": int32([-1, 1], device)}),
    ]


def free(device: torch.device) -> list[Inputs]:
    return [((*allocator_state(device), int32(lens, device), 4), {}) for lens in ([0, 0, 0], [5, 0, 4], [3, 9, 1])] + [
        ((*allocator_state(device, 2), int32([4, 0, 0], device), 4), {})
    ]


def fork(device: torch.device) -> list[Inputs]:
    return [
        ((*allocator_state(device), int64(sources, device), int64(destinations, device), 4), {})
        for sources, destinations in (([0], [1]), ([0, 2], [2, 0]), ([], []), ([0, 0, 0], [0, 1, 2]))
    ] + [((*allocator_state(device, 2), int64([0], device), int64([1], device), 4), {})]


def reshape_and_cache(device: torch.device) -> list[Inputs]:
    key, value = torch.randn(3, 2, 8, device=device), torch.randn(3, 2, 6, device=device)
    slots = int64([4, -1, 9], device)
    inputs: list[Inputs] = []
    for dtype, layout in ((torch.float32, "plain"), (torch.bfloat16, "heads_first"), (torch.int8, "interleaved")):
        caches = make_caches(3, 4, 2, 8, 6, dtype=dtype, layout=layout, poison=0, device=device)
        inputs.append(((key, value, *caches, slots), {}))
    caches = make_caches(3, 4, 2, 8, 6, dtype=torch.int8, poison=0, device=device)
    scales = [torch.ones(3, 4, 2, device=device) for _ in range(2)]
    inputs.append(((key, value, *caches, slots, *scales), {}))
    inputs.append(((key, value, *caches, slots), {"value_scale": torch.ones(2, device=device)}))
    inputs.append(((key[:, :, None], value[:, :, None], *caches, slots, *scales), {}))
    return inputs


def paged_attention(device: torch.device) -> list[Inputs]:
    slopes = torch.rand(4, device=device)
    cases = [
        attention_case([1, 1], [5, 18], device=device),
        attention_case([3, 0, 7], [5, 2, 7], device=device, dtype=torch.bfloat16, layout="fused", window_left=3),
        attention_case([0], [4], device=device),
        attention_case(
            [2, 1], [9, 1], head_size=8, head_size_v=24, cache_dtype=torch.float8_e4m3fn, scale_kind="slot",
            softcap=3.0, sinks=slopes, alibi_slopes=slopes, deterministic=True, device=device,
            mask=torch.ones(3, 1, 4, dtype=torch.bool, device=device),
        ),
    ]  # fmt: skip
    inputs: list[Inputs] = [(case.tensors(), case.options) for case in cases]
    query, *rest = cases[0].tensors()
    return [*inputs, ((query[:, :, None], *rest), cases[0].options)]


def merge_attention_states(device: torch.device) -> list[Inputs]:
    inputs: list[Inputs] = []
    for dtype, tokens in ((torch.float32, 3), (torch.float16, 1), (torch.bfloat16, 0)):
        out, lse = torch.randn(tokens, 4, 8, device=device).to(dtype), torch.randn(tokens, 4, device=device)
        inputs.append(((out, lse, out.clone(), lse.clone()), {}))
        inputs.append(((out, lse, out.clone(), lse.clone()), {"sinks": torch.zeros(4, device=device)}))
    return inputs


def find_shared_prefixes(device: torch.device) -> list[Inputs]:
    shared = torch.arange(24, dtype=torch.int32, device=device).reshape(3, 8)
    shared[1:, :3] = shared[0, :3]
    spans, nothing = int32([0, 1, 2, 3], device), int32([], device)
    return [
        ((shared, int32([30, 20, 13], device), spans, 4, 1), {}),
        ((shared[:, :4], int32([16, 20, 3], device), spans, 4, 1000), {}),
        ((shared[:0], nothing, int32([0], device), 16, 1), {}),
        ((shared[:, :0], int32([0, 0, 0], device), spans, 16, 1), {}),
    ]


def copy_blocks(device: torch.device) -> list[Inputs]:
    key_cache, value_cache = make_caches(4, 4, 2, 8, 6, poison=1, layout="heads_first", device=device)
    storage = torch.randn(4, 2, 4 * 14, device=device)
    return [
        (([key_cache], [value_cache], int64([[0, 1], [-1, -1]], device)), {}),
        (([key_cache, storage], [], int64([[0, 1], [1, 2]], device)), {}),
        (([key_cache], [value_cache], torch.empty(0, 2, dtype=torch.int64, device=device)), {}),
    ]


def swap_blocks(device: torch.device) -> list[Inputs]:
    source, destination = torch.randn(5, 4, 2, device=device), torch.zeros(3, 4, 2, device=device)
    return [
        (([source], [destination], int64([[4, 0], [1, 2]], device)), {}),
        (([source, source.half()], [destination, destination.half()], int64([[9, 0]], device)), {}),
    ]


def gather_blocks(device: torch.device) -> list[Inputs]:
    case = attention_case([1, 1], [5, 18], head_size_v=24, device=device)
    quantised = attention_case([1], [9], cache_dtype=torch.int8, scale_kind="head", device=device)
    scales = {name: quantised.options[name] for name in ("key_scale", "value_scale")}
    return [
        ((*case.tensors()[1:5], 18), {}),
        ((*case.tensors()[1:5], 3), {"dtype": torch.float16}),
        ((*quantised.tensors()[1:5], 9), scales),
        ((*quantised.tensors()[1:5], 0), scales | {"dtype": torch.bfloat16}),
    ]


INPUTS = {
    "allocate": allocate,
    "free": free,
    "fork": fork,
    "reshape_and_cache": reshape_and_cache,
    "paged_attention": paged_attention,
    "paged_attention_with_lse": paged_attention,
    "merge_attention_states": merge_attention_states,
    "find_shared_prefixes": find_shared_prefixes,
    "copy_blocks": copy_blocks,
    "swap_blocks": swap_blocks,
    "gather_blocks": gather_blocks,
}


def test_every_op_is_here() -> None:
    assert sorted(INPUTS) == sorted(ops.__all__)


@pytest.mark.parametrize("name", INPUTS)
def test_opcheck(name: str, device: torch.device) -> None:
    overload = getattr(torch.ops.paged_kv, name).default
    for args, kwargs in INPUTS[name](device):
        has_float8 = any(isinstance(x, Tensor) and x.dtype == torch.float8_e4m3fn for x in args)
        # test_schema compares arguments with allclose, which torch does not have for float8.
        utils = [util for util in OPCHECK_UTILS if not (has_float8 and util == "test_schema")]
        torch.library.opcheck(overload, args, kwargs, test_utils=utils)


@pytest.mark.parametrize("name", INPUTS)
def test_meta_tensors(name: str, device: torch.device) -> None:
    """Shapes and dtypes without data, strides included: what the real call returns."""
    overload = getattr(torch.ops.paged_kv, name).default

    def to_meta(value: Any) -> Any:
        if isinstance(value, list):
            return [to_meta(item) for item in value]
        return value.to("meta") if isinstance(value, Tensor) else value

    for args, kwargs in INPUTS[name](device):
        fake = overload(*map(to_meta, args), **{key: to_meta(value) for key, value in kwargs.items()})
        real = overload(*args, **kwargs)
        if real is None:
            assert fake is None
            continue
        for a, b in zip(*((x,) if isinstance(x, Tensor) else x for x in (fake, real))):
            assert a.is_meta
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()


def test_fused_views_alias_their_storage() -> None:
    """What the mutation marks speak of: a write through a view is a write to the storage."""
    storage = torch.zeros(2, 1, 4 * (8 + 8))
    keys, values = fused_views(storage, 4, 8)
    key = torch.ones(1, 1, 8)
    ops.reshape_and_cache(key, key * 2, keys, values, torch.tensor([5]))
    assert int(storage.sum()) == 24
    assert prefix_sum([1, 2]).tolist() == [0, 1, 3]
