"""merge_attention_states: attention over two parts of the keys equals attention over all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from op_cases import FLOAT_DTYPES, AttentionCase, assert_at_most_twice_naive, attention_case, dtype_id
from torch import Tensor

from torch_paged_kv import ops, reference

NO_KEYS = float("-inf")


def random_state(tokens: int, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, heads, size).to(device, dtype), torch.randn(tokens, heads).to(device) * 3


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_against_float64(dtype: torch.dtype, with_sinks: bool, device: torch.device) -> None:
    for shape in ((70, 3, 64), (33, 8, 100), (200, 1, 1), (2, 71, 128), (4, 16, 576)):
        a, b = random_state(*shape, dtype, device), random_state(*shape, dtype, device)
        sinks = torch.randn(shape[1], device=device) if with_sinks else None
        out, lse = ops.merge_attention_states(*a, *b, sinks=sinks)
        assert out.dtype == dtype
        assert lse.dtype == torch.float32
        exact = reference.merge_in(torch.float64, *a, *b, sinks=sinks)
        naive = reference.merge_in(dtype, *a, *b, sinks=sinks)
        for actual, rough, right in zip((out, lse), naive, exact):
            assert_at_most_twice_naive(actual, [rough], right)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_every_size(dtype: torch.dtype, device: torch.device) -> None:
    """A part of the batch gives that part of the result, bit for bit: no tail of a vector is treated otherwise.

    So the kernels promise. The reference does as torch's `logaddexp`, which rounds the tail of a vector otherwise.
    """
    kernels = torch._C._dispatch_has_kernel_for_dispatch_key("paged_kv::merge_attention_states", device.type.upper())
    tolerance = 0.0 if kernels else torch.finfo(torch.float32).eps
    a, b = (random_state(9, 5, 70, dtype, device) for _ in range(2))
    out, lse = ops.merge_attention_states(*a, *b)
    for tokens, heads, size in ((0, 5, 70), (1, 1, 1), (9, 5, 3), (2, 3, 8), (9, 1, 33), (7, 5, 64)):
        parts = [(o[:tokens, :heads, :size].contiguous(), lse_[:tokens, :heads].contiguous()) for o, lse_ in (a, b)]
        part_out, part_lse = ops.merge_attention_states(*parts[0], *parts[1])
        assert torch.equal(part_out, out[:tokens, :heads, :size])
        torch.testing.assert_close(part_lse, lse[:tokens, :heads], rtol=tolerance, atol=tolerance)


def in_two_parts(case: AttentionCase, keys_before: int, part: int) -> AttentionCase:
    """The first `keys_before` keys of every row, all of them visible, or the rest."""
    blocks = keys_before // case.key_cache.shape[1]
    if part == 0:
        return dataclasses.replace(
            case,
            seq_lens=torch.full_like(case.seq_lens, keys_before),
            options=case.options | {"causal": False},
        )
    return dataclasses.replace(case, block_table=case.block_table[:, blocks:], seq_lens=case.seq_lens - keys_before)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_split_keys_merge_to_the_whole(dtype: torch.dtype, with_sinks: bool, device: torch.device) -> None:
    """A shared prefix: attend to it once, to each suffix, and merge; sinks enter with the merge."""
    case = attention_case([1, 7, 1], [70, 39, 400], dtype=dtype, num_heads=6, device=device)
    parts = [in_two_parts(case, 32, part) for part in range(2)]
    sinks = torch.linspace(-2, 4, 6, device=device) if with_sinks else None
    states = [part.run(ops.paged_attention_with_lse) for part in parts]
    out, lse = ops.merge_attention_states(*states[0], *states[1], sinks=sinks)

    (outs_a, lses_a), (outs_b, lses_b) = (part.naive() for part in parts)
    naive_states = zip(outs_a, lses_a, outs_b, lses_b)
    naive = zip(*(reference.merge_in(dtype, *states, sinks=sinks) for states in naive_states))
    whole = dataclasses.replace(case, options=case.options | {"sinks": sinks})
    for actual, rough, right in zip((out, lse), naive, whole.in_dtype(torch.float64)):
        assert_at_most_twice_naive(actual, rough, right)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_empty_part_is_neutral(dtype: torch.dtype, device: torch.device) -> None:
    """The empty set's out is ignored, NaN included; bits of the other part are kept."""
    out, lse = random_state(5, 3, 64, dtype, device)
    nothing = torch.full_like(lse, NO_KEYS)
    for garbage in (0.0, float("nan"), float("inf")):
        empty = torch.full_like(out, garbage)
        for merged in (
            ops.merge_attention_states(out, lse, empty, nothing),
            ops.merge_attention_states(empty, nothing, out, lse),
        ):
            assert torch.equal(merged[0], out)
            assert torch.equal(merged[1], lse)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_two_empty_parts(with_sinks: bool, device: torch.device) -> None:
    empty = torch.full((4, 2, 8), float("nan"), device=device), torch.full((4, 2), NO_KEYS, device=device)
    sinks = torch.zeros(2, device=device) if with_sinks else None
    out, lse = ops.merge_attention_states(*empty, *empty, sinks=sinks)
    assert (out == 0).all()
    assert (lse == NO_KEYS).all()


def test_sinks_of_any_dtype(device: torch.device) -> None:
    a, b = (random_state(4, 2, 8, torch.float32, device) for _ in range(2))
    sinks = torch.tensor([0.5, -1.0], device=device)
    expected = ops.merge_attention_states(*a, *b, sinks=sinks)
    actual = ops.merge_attention_states(*a, *b, sinks=sinks.bfloat16())
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


def test_order_does_not_matter(device: torch.device) -> None:
    a, b = (random_state(40, 4, 64, torch.bfloat16, device) for _ in range(2))
    one, other = ops.merge_attention_states(*a, *b), ops.merge_attention_states(*b, *a)
    assert torch.equal(one[1], other[1])
    torch.testing.assert_close(one[0], other[0])


def test_extreme_lse(device: torch.device) -> None:
    """Sums that would overflow exp, and one part that drowns the other."""
    out_a, out_b = torch.ones(1, 3, 4, device=device), torch.full((1, 3, 4), 3.0, device=device)
    lse_a = torch.tensor([[1000.0, -1000.0, 500.0]], device=device)
    lse_b = torch.tensor([[1000.0, -1000.0, -500.0]], device=device)
    out, lse = ops.merge_attention_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out[0, :, 0].cpu(), torch.tensor([2.0, 2.0, 1.0]))
    torch.testing.assert_close(lse[0].cpu(), torch.tensor([1000.6931, -999.3069, 500.0]))


@pytest.mark.parametrize("kwargs", [{}, {"sinks": None}])
def test_grad_is_refused(kwargs: dict[str, Any], device: torch.device) -> None:
    a, b = (random_state(1, 1, 4, torch.float32, device) for _ in range(2))
    a[0].requires_grad_()
    with pytest.raises(ValueError, match=r"^out_a must not require grad"):
        ops.merge_attention_states(*a, *b, **kwargs)
