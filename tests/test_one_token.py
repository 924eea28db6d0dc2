"""One token of each sequence, in the shape that models give it: [num_seqs, heads, 1, head_size]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import AttentionCase, attention_case, make_caches
from torch import Tensor

from torch_paged_kv import ops, reference

KINDS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.bfloat16, "layout": "fused", "head_size": 72, "window_left": 9},
    {"dtype": torch.float16, "head_size": 40, "head_size_v": 24, "softcap": 3.0},
    {"cache_dtype": torch.int8, "scale_kind": "slot"},
]


def as_models_have_it(states: Tensor) -> Tensor:
    """[num_seqs, heads, size] as a projection's [num_seqs, 1, heads * size] is turned: [num_seqs, heads, 1, size]."""
    return states[:, None].clone().transpose(1, 2)


def decode_case(device: torch.device, **options: Any) -> AttentionCase:
    return attention_case([1, 1, 1], [5, 70, 1], device=device, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module", [ops, reference], ids=["op", "reference"])
def test_attention(module: Any, kind: dict[str, Any], device: torch.device) -> None:
    case = decode_case(device, **kind)
    query, *rest = case.tensors()
    for function in (module.paged_attention_with_lse, module.paged_attention):
        expected, one_token = (
            function(query, *rest, **case.options),
            function(as_models_have_it(query), *rest, **case.options),
        )
        if isinstance(expected, tuple):
            assert torch.equal(one_token[1], expected[1])
            expected, one_token = expected[0], one_token[0]
        assert one_token.shape == (3, 1, *expected.shape[1:])
        assert one_token.is_contiguous()
        assert torch.equal(one_token[:, 0], expected)


@pytest.mark.parametrize("per_slot", [False, True])
@pytest.mark.parametrize("module", [ops, reference], ids=["op", "reference"])
def test_store(module: Any, per_slot: bool, device: torch.device) -> None:
    dtype = torch.int8 if per_slot else torch.float32
    key, value = torch.randn(3, 2, 8, device=device), torch.randn(3, 2, 6, device=device)
    slots = torch.tensor([7, -1, 2], device=device)
    stored = []
    for turn in (lambda states: states, as_models_have_it):
        caches = make_caches(3, 4, 2, 8, 6, dtype=dtype, poison=0, device=device)
        scales = [torch.zeros(3, 4, 2, device=device) for _ in range(2 if per_slot else 0)]
        module.reshape_and_cache(turn(key), turn(value), *caches, slots, *scales)
        stored.append([*caches, *scales])
    for one, other in zip(*stored, strict=True):
        assert torch.equal(one, other)


def test_compiled(device: torch.device) -> None:
    """One graph for any number of rows, and what comes out of it has the shape that the fake told."""
    case = decode_case(device)
    query, *rest = case.tensors()

    def attend(query: Tensor, *tensors: Any) -> Tensor:
        return ops.paged_attention(query.sin(), *tensors, **case.options) + 1

    compiled = torch.compile(attend, fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            turned = as_models_have_it(query)
            torch.testing.assert_close(compiled(turned, *rest), attend(turned, *rest))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "query",
            (3, 4, 2, 64),
            r"query must have shape \[num_seqs, num_heads, 1, head_size=64\], got \[3, 4, 2, 64\]",
        ),
        ("query", (3, 1, 4, 64), r"query must have shape \[num_seqs, num_heads, 1, head_size=64\]"),
        ("query", (3, 4, 1, 32), r"query must have shape \[num_seqs, num_heads, 1, head_size=64\]"),
    ],
)
def test_other_shapes_of_a_query_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    case = decode_case(torch.device("cpu"))
    _, *rest = case.tensors()
    with pytest.raises(ValueError, match=message):
        ops.paged_attention(torch.zeros(shape), *rest, **case.options)


def test_other_shapes_of_keys_are_refused() -> None:
    key_cache, value_cache = make_caches(3, 4, 2, 8, 6, poison=0)
    slots = torch.tensor([0, 1, 2])
    good = {"key": torch.zeros(3, 2, 1, 8), "value": torch.zeros(3, 2, 1, 6)}
    for name, shape, message in (
        ("key", (3, 2, 2, 8), r"key must have shape \[num_seqs, num_kv_heads=2, 1, head_size=8\], got \[3, 2, 2, 8\]"),
        ("value", (2, 2, 1, 6), r"value must have shape \[num_seqs=3, num_kv_heads=2, 1, head_size_v=6\]"),
    ):
        arguments = good | {name: torch.zeros(shape)}
        with pytest.raises(ValueError, match=message):
            ops.reshape_and_cache(arguments["key"], arguments["value"], key_cache, value_cache, slots)
