"""paged_attention against the reference: every dtype, size, layout and option, each case over a poisoned pool."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import (
    EIGHT_BIT_DTYPES,
    FLOAT_DTYPES,
    INT32_MAX,
    LAYOUTS,
    AttentionCase,
    assert_at_most_twice_naive,
    attention_case,
    dtype_id,
    int32,
)

from torch_paged_kv import ops, reference

HEAD_SIZES = [8, 32, 40, 56, 64, 72, 80, 96, 100, 112, 120, 128, 144, 192, 224, 256, 512, 576]
GQA_RATIOS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 71]
BLOCK_SIZES = [1, 3, 8, 16, 19, 32, 48, 64, 128, 256, 768]

# name: (q_lens, seq_lens)
BATCHES = {
    "decode": ([1] * 8, [37, 1, 150, 64, 16, 15, 200, 90]),
    "prefill": ([33], [33]),
    "chunked": ([16, 5], [70, 21]),
    "mixed": ([1, 20, 1, 7, 3], [90, 20, 16, 40, 3]),
    "empty_rows": ([0, 1, 3, 0, 1], [0, 0, 5, 9, 17]),
    "more_queries_than_keys": ([6, 2, 40], [4, 2, 17]),
    "nothing": ([0, 0], [0, 5]),
}


def ragged(batch: str, **changes: Any) -> AttentionCase:
    return attention_case(*BATCHES[batch], **changes)


def test_check_compares_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nearly all tests here rest on fails on a wrong value, and is not switched off as under a sanitizer."""
    right = AttentionCase.in_dtype
    monkeypatch.setattr(AttentionCase, "in_dtype", lambda *a: (right(*a)[0] + 1e-3, right(*a)[1]))
    with pytest.raises(AssertionError, match="error"):
        ragged("mixed").check()


# ---- dtypes, sizes, layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_batches(batch: str, dtype: torch.dtype, device: torch.device) -> None:
    ragged(batch, dtype=dtype, device=device).check()


@pytest.mark.parametrize(
    ("cache_dtype", "scale_kind"),
    [(dtype, kind) for dtype in FLOAT_DTYPES + EIGHT_BIT_DTYPES for kind in ("none", "scalar", "tensor", "head")]
    + [(dtype, "slot") for dtype in EIGHT_BIT_DTYPES],
    ids=dtype_id,
)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_cache_dtypes_and_scales(
    dtype: torch.dtype, cache_dtype: torch.dtype, scale_kind: str, device: torch.device
) -> None:
    case = ragged("mixed", dtype=dtype, cache_dtype=cache_dtype, scale_kind=scale_kind, num_kv_heads=4, device=device)
    case.check()


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e4m3fn, torch.int8], ids=dtype_id)
def test_no_scale_is_one(cache_dtype: torch.dtype, device: torch.device) -> None:
    case = ragged("mixed", cache_dtype=cache_dtype, device=device)
    expected = case.run()
    for shape in ((), (1,), (2,)):
        one = torch.ones(shape, device=device)
        assert torch.equal(case.run(key_scale=one, value_scale=one), expected)


@pytest.mark.parametrize("head_size_v", ["same", 128, 512])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_head_sizes(head_size: int, head_size_v: int | str, device: torch.device) -> None:
    size_v = head_size if isinstance(head_size_v, str) else head_size_v
    dtype = FLOAT_DTYPES[(HEAD_SIZES.index(head_size) + size_v) % 3]
    attention_case(
        [1, 14], [50, 33], head_size=head_size, head_size_v=size_v, dtype=dtype, block_size=8, device=device
    ).check()


@pytest.mark.parametrize("head_size", [1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 63, 65, 511, 575])
def test_odd_head_sizes(head_size: int, device: torch.device) -> None:
    for index, cache_dtype in enumerate([*FLOAT_DTYPES, torch.float8_e4m3fn, torch.int8]):
        attention_case(
            [1, 20],
            [39, 32],
            head_size=head_size,
            head_size_v=head_size + 1,
            dtype=FLOAT_DTYPES[index % 3],
            cache_dtype=cache_dtype,
            device=device,
        ).check()


@pytest.mark.parametrize("ratio", GQA_RATIOS)
def test_gqa_ratios(ratio: int, device: torch.device) -> None:
    dtype = FLOAT_DTYPES[GQA_RATIOS.index(ratio) % 3]
    attention_case(
        [1, 14], [50, 23], num_heads=2 * ratio, num_kv_heads=2, head_size=32, dtype=dtype, device=device
    ).check()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_sizes(block_size: int, device: torch.device) -> None:
    lens = [block_size - 1, block_size, block_size + 1]
    dtype = FLOAT_DTYPES[BLOCK_SIZES.index(block_size) % 3]
    for q_lens in ([1, 1, 1], [min(n, 9) for n in lens]):
        attention_case(
            q_lens, lens, block_size=block_size, head_size=40, num_heads=8, dtype=dtype, device=device
        ).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=dtype_id)
def test_layouts(layout: str, cache_dtype: torch.dtype, device: torch.device) -> None:
    for block_size in (7, 16):
        for head_size, head_size_v in ((64, 64), (80, 48)):
            attention_case(
                [1, 30],
                [70, 45],
                layout=layout,
                cache_dtype=cache_dtype,
                block_size=block_size,
                head_size=head_size,
                head_size_v=head_size_v,
                device=device,
            ).check()


def test_layouts_agree(device: torch.device) -> None:
    """Strides say where a number lies, not what is computed from it."""
    cases = []
    for layout in LAYOUTS:
        torch.manual_seed(3)
        cases.append(ragged("mixed", layout=layout, device=device).run())
    for out in cases[1:]:
        assert torch.equal(out, cases[0])


def test_strided_query(device: torch.device) -> None:
    """A slice of a fused QKV projection, heads first in memory."""
    case = ragged("mixed", device=device)
    wide = torch.full((4, case.query.shape[0], 3 * 64), float("nan"), device=device)
    wide[..., 64:128] = case.query.transpose(0, 1)
    assert torch.equal(
        case.run(), ops.paged_attention(wide[..., 64:128].transpose(0, 1), *case.tensors()[1:], scale=0.125)
    )


def test_value_cache_inside_key_cache(device: torch.device) -> None:
    """MLA: one stored tensor of width 576, of which the values are the first 512 columns."""
    for block_size in (1, 16, 64):
        case = attention_case(
            [1, 4], [70, 33], num_heads=16, num_kv_heads=1, head_size=576, head_size_v=512, block_size=block_size,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip
        case.value_cache = case.key_cache[..., :512]
        case.check()


# ---- what a query sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window_left", [-1, 0, 3, 15, 40])
@pytest.mark.parametrize("window_right", [-1, 0, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(causal: bool, window_left: int, window_right: int, device: torch.device) -> None:
    options = {"causal": causal, "window_left": window_left, "window_right": window_right}
    for batch in ("decode", "mixed", "more_queries_than_keys"):
        ragged(batch, device=device, **options).check()


def mask_for(case: AttentionCase, kind: str, heads: int, width: int) -> torch.Tensor:
    visible = torch.rand(case.query.shape[0], heads, width) < 0.7
    if kind == "bool":
        return visible.to(case.query.device)
    bias = torch.randn(visible.shape).masked_fill(~visible, float("-inf"))
    return bias.to(case.query.device)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("width", [1, 5, 33, 200])
def test_masks(kind: str, heads: int, width: int, device: torch.device) -> None:
    for batch, causal in (("mixed", True), ("mixed", False), ("decode", True), ("more_queries_than_keys", False)):
        case = ragged(batch, causal=causal, device=device, dtype=torch.float16)
        case.options["mask"] = mask_for(case, kind, heads, width)
        case.check()


def test_mask_strides(device: torch.device) -> None:
    """A mask every head, or every token, shares costs no memory: strides of 0 are read as such."""
    case = ragged("mixed", device=device)
    mask = mask_for(case, "bool", 1, 20)
    whole = mask.expand(-1, 4, -1)
    assert torch.equal(case.run(mask=mask), case.run(mask=whole))
    assert torch.equal(case.run(mask=whole), case.run(mask=whole.contiguous()))
    shared = mask[:1].expand(case.query.shape[0], -1, -1)
    assert torch.equal(case.run(mask=shared), case.run(mask=shared.contiguous()))
    wide = torch.zeros(case.query.shape[0], 2, 64, dtype=torch.bool, device=device)
    wide[:, 1:, 11:31] = mask
    assert torch.equal(case.run(mask=wide[:, 1:, 11:31]), case.run(mask=mask))


def test_tree_mask(device: torch.device) -> None:
    """Drafts that branch: a query sees the context, its ancestors and itself."""
    context, parents = 21, [-1, 0, 0, 1, 1, 2, 5]
    tree = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            tree[node] |= tree[parent]
    for block_size in (1, 4, 16):
        case = attention_case(
            [7], [context + 7], block_size=block_size, causal=False, mask=tree[:, None].to(device), device=device
        )
        out, _ = case.check()
        for node in range(7):  # every branch alone, as an ordinary causal sequence
            path = [context + n for n in range(7) if tree[node, n]]
            keys, values = reference.gather_blocks(
                case.key_cache, case.value_cache, case.block_table, case.seq_lens, context + 7
            )
            seen = torch.tensor([*range(context), *path], device=device)
            keys, values = (x[0, :, seen].double().repeat_interleave(2, 0) for x in (keys, values))
            scores = torch.einsum("hd,hkd->hk", case.query[node].double(), keys) * case.options["scale"]
            expected = torch.einsum("hk,hkd->hd", scores.softmax(-1), values)
            torch.testing.assert_close(out[node].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("options", [
    {"softcap": 2.0},
    {"softcap": 30.0, "scale": 3.0},
    {"alibi_slopes": True},
    {"sinks": True},
    {"softcap": 5.0, "alibi_slopes": True, "sinks": True, "window_left": 20},
    {"alibi_slopes": True, "causal": False},
    {"sinks": True, "window_left": 0},
    {"scale": 0.0},
    {"scale": -0.5},
], ids=lambda options: "-".join(options))  # fmt: skip
def test_score_options(dtype: torch.dtype, options: dict[str, Any], device: torch.device) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.0, -0.125], device=device)
    sinks = torch.tensor([0.0, 3.0, -3.0, 8.0], device=device)
    options = dict(options)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = slopes
    if "sinks" in options:
        options["sinks"] = sinks
    for batch in ("decode", "mixed", "empty_rows"):
        ragged(batch, dtype=dtype, device=device, **options).check()


def test_per_head_vectors_of_any_dtype(device: torch.device) -> None:
    """Models keep sinks in their own dtype; the wrapper casts them."""
    case = ragged("mixed", device=device)
    sinks = torch.tensor([0.5, 1.0, -1.0, 2.0], device=device)
    for name in ("sinks", "alibi_slopes"):
        expected = case.run(**{name: sinks})
        assert torch.equal(case.run(**{name: sinks.bfloat16()}), expected)


def test_softcap_zero_is_off(device: torch.device) -> None:
    case = ragged("mixed", device=device)
    assert torch.equal(case.run(softcap=0.0), case.run())


def test_tokens_outside_spans(device: torch.device) -> None:
    """Padding before the first and after the last row: out 0, lse -inf, even over a NaN query."""
    case = attention_case([2, 3], [9, 20], device=device)
    expected = case.run()
    query = torch.full((10, 4, 64), float("nan"), device=device)
    query[3:8] = case.query
    case.query, case.cu_seqlens_q = query, int32([3, 5, 8], device)
    out, lse = case.run(ops.paged_attention_with_lse)
    assert torch.equal(out[3:8], expected)
    for outside in (slice(0, 3), slice(8, 10)):
        assert (out[outside] == 0).all()
        assert (lse[outside] == float("-inf")).all()


def test_left_padded_batch(device: torch.device) -> None:
    """A padded row's span holds more queries than keys: the pads stand at negative positions and see nothing."""
    case = attention_case([5, 5], [5, 2], device=device)
    out, lse = case.check()
    assert (out[5:8] == 0).all()
    assert (lse[5:8] == float("-inf")).all()
    alone = case.row(1)
    alone.query, alone.cu_seqlens_q, alone.max_seqlen_q = alone.query[3:], int32([0, 2], device), 2
    assert_at_most_twice_naive(out[8:], alone.naive()[0], alone.in_dtype(torch.float64)[0])


def test_max_seqlen_q_is_a_bound(device: torch.device) -> None:
    case = ragged("mixed", device=device)
    expected = case.run(ops.paged_attention)
    case.max_seqlen_q = 1000
    exact, naive = case.in_dtype(torch.float64)[0], case.in_dtype(torch.float32)[0]
    assert (case.run() - expected).abs().max() <= 4 * (naive - exact).abs().max()


# ---- what must never be read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, torch.float8_e4m3fn, torch.int8], ids=dtype_id)
@pytest.mark.parametrize("options", [
    {}, {"window_left": 6}, {"causal": False}, {"causal": False, "window_left": 2, "window_right": 2}
], ids=lambda options: "-".join(options) or "plain")  # fmt: skip
def test_poisoned_pool_equals_zeroed_pool(dtype: torch.dtype, options: dict[str, Any], device: torch.device) -> None:
    for batch in ("decode", "mixed", "more_queries_than_keys"):
        for block_size in (5, 16):
            outs = []
            for poison in (float("nan"), 0.0):
                torch.manual_seed(7)
                query_dtype = dtype if dtype.itemsize > 1 else torch.bfloat16
                case = ragged(
                    batch, dtype=query_dtype, cache_dtype=dtype, poison=poison, block_size=block_size, device=device
                )
                outs.append(case.run(ops.paged_attention_with_lse, **options))
            assert torch.equal(outs[0][0], outs[1][0])
            assert torch.equal(outs[0][1], outs[1][1])
            assert not outs[0][0].isnan().any()


def test_keys_no_query_sees_are_not_read(device: torch.device) -> None:
    """Written slots that a window or mask hides from every query of the row may hold NaN."""
    case = attention_case([1, 4], [50, 47], block_size=16, device=device)
    hidden = [range(40), range(34)]  # a window of 10 keys sees 40 .. 49, and 34 .. 46 at the earliest
    for row, positions in enumerate(hidden):
        for position in positions:
            block = case.block_table[row, position // 16]
            case.key_cache[block, position % 16] = float("nan")
            case.value_cache[block, position % 16] = float("inf")
    for options in (
        {"window_left": 9},
        {"mask": torch.cat([torch.zeros(5, 1, 40), torch.ones(5, 1, 10)], -1).bool().to(device)[:, :, :]},
    ):
        if "mask" in options:
            options["mask"][1:, :, 37:] = True  # row 1 has 47 keys: column c speaks of key c - 3
        out = case.run(**options)
        assert not out.isnan().any()
        seen = dataclasses.replace(case, options=case.options | options)
        assert_at_most_twice_naive(out, seen.naive()[0], seen.in_dtype(torch.float64)[0])


@pytest.mark.parametrize("tail", [-1, 10**6, INT32_MAX, -(2**31), 0])
def test_table_tail_is_not_read(tail: int, device: torch.device) -> None:
    outs = []
    for entry in (-1, tail):
        torch.manual_seed(5)
        outs.append(ragged("mixed", tail=entry, device=device).run())
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("entry", [-1, -7, 10**6, INT32_MAX, -(2**31)])
def test_unmapped_blocks_are_invisible(entry: int, device: torch.device) -> None:
    """A block the window left behind, or garbage, hides its keys; the others count as if it were not there."""
    case = ragged("mixed", block_size=8, device=device)
    case.block_table[0, 3] = entry
    case.block_table[3, 0] = entry
    case.block_table[2, :] = entry
    out, lse = case.check()
    assert (out[21] == 0).all()
    assert (lse[21] == float("-inf")).all()


@pytest.mark.parametrize("length", [-5, 10**6, INT32_MAX, -(2**31)])
def test_lengths_are_clamped(length: int, device: torch.device) -> None:
    case = attention_case([1, 2], [20, 64], block_size=16, device=device)  # 6 columns, of which row 0 maps 2
    case.seq_lens[0] = length
    exact = case.in_dtype(torch.float64)[0]
    torch.testing.assert_close(case.run()[1:].double(), exact[1:], rtol=1e-5, atol=1e-5)
    if length < 0:
        assert (case.run()[0] == 0).all()


@pytest.mark.parametrize("spans", [[0, 9999, 3], [-4, 1, 3], [2, 1, 3], [3, 3, INT32_MAX], [-(2**31), 0, -1]])
def test_spans_are_clamped(spans: list[int], device: torch.device) -> None:
    """Garbage spans give garbage numbers for their rows, and touch nothing else."""
    case = attention_case([1, 2], [20, 30], device=device)
    case.cu_seqlens_q = int32(spans, device)
    out = case.run()
    assert out.shape == (3, 4, 64)
    assert not out.isnan().any()


# ---- determinism ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("options", [{}, {"window_left": 100}, {"sinks": True}], ids=lambda o: "-".join(o) or "plain")
def test_deterministic_row_ignores_its_neighbours(
    dtype: torch.dtype, options: dict[str, Any], device: torch.device
) -> None:
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = torch.arange(4.0, device=device)
    case = attention_case(
        [1, 5, 1, 40, 1], [700, 64, 3, 300, 1500], dtype=dtype, device=device, deterministic=True, **options
    )
    out, lse = case.run(ops.paged_attention_with_lse)
    for row in range(5):
        begin, end = case.cu_seqlens_q[row : row + 2].tolist()
        alone, alone_lse = case.row(row).run(ops.paged_attention_with_lse)
        assert torch.equal(alone, out[begin:end])
        assert torch.equal(alone_lse, lse[begin:end])
    case.seq_lens[0], case.seq_lens[3] = 11, 40  # other neighbours' lengths
    assert torch.equal(case.run()[-1], out[-1])


def test_repeats_are_bit_equal(device: torch.device) -> None:
    case = attention_case([1, 30], [2000, 130], device=device)
    expected = case.run()
    assert all(torch.equal(case.run(), expected) for _ in range(5))


def test_threads_do_not_matter_when_deterministic() -> None:
    case = attention_case([1, 30, 1], [2000, 130, 7], dtype=torch.bfloat16, deterministic=True)
    case.assert_threads_do_not_matter((1, 2, 3))


# ---- long and odd ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_long_rows(dtype: torch.dtype, device: torch.device) -> None:
    """Long enough that any split over the keys is in use."""
    attention_case([1, 2], [9000, 4100], num_heads=3, num_kv_heads=1, dtype=dtype, device=device).check()


def test_large_scores_do_not_overflow(device: torch.device) -> None:
    case = attention_case([1, 8], [60, 30], scale=400.0, device=device)
    out, lse = case.run(ops.paged_attention_with_lse)
    exact_out, exact_lse = case.in_dtype(torch.float64)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=0)
    assert out.isfinite().all()
    assert (out.double() - exact_out).abs().max() < 1e-2


def test_growing_scores_rescale_the_state(device: torch.device) -> None:
    """Each key beats all before it, so the running maximum moves at every step."""
    case = attention_case([1], [300], num_heads=1, num_kv_heads=1, head_size=8, device=device)
    case.query.zero_()
    slopes = torch.tensor([0.7], device=device)
    _, lse = case.run(ops.paged_attention_with_lse, alibi_slopes=slopes)
    exact_lse = torch.logsumexp(0.7 * torch.arange(300, dtype=torch.float64), 0)
    torch.testing.assert_close(lse.flatten().cpu().double(), exact_lse[None], rtol=1e-6, atol=0)


def test_mean_over_exactly_the_length(device: torch.device) -> None:
    """q = 0, not causal, length not a multiple of any tile: the mean of V over exactly `len` keys."""
    for length in (1, 3, 17, 63, 65, 129, 1001):
        case = attention_case([1], [length], causal=False, device=device)
        case.query.zero_()
        _, values = reference.gather_blocks(case.key_cache, case.value_cache, case.block_table, case.seq_lens, length)
        expected = values[0].double().mean(1).repeat_interleave(2, 0)
        torch.testing.assert_close(case.run()[0].double(), expected, rtol=1e-5, atol=1e-6)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    num_seqs = draw(st.integers(0, 4))
    num_kv_heads = draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "q_lens": draw(st.lists(st.sampled_from([0, 1, 1, 2, 7, 20]), min_size=num_seqs, max_size=num_seqs)),
        "seq_lens": draw(st.lists(st.integers(0, 70), min_size=num_seqs, max_size=num_seqs)),
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * draw(st.integers(1, 9)),
        "head_size": draw(st.integers(1, 80)),
        "head_size_v": draw(st.integers(1, 80)),
        "block_size": draw(st.integers(1, 33)),
        "dtype": draw(st.sampled_from(FLOAT_DTYPES)),
        "cache_dtype": draw(st.sampled_from(FLOAT_DTYPES + EIGHT_BIT_DTYPES)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "scale_kind": draw(st.sampled_from(["none", "tensor", "head"])),
        "causal": draw(st.booleans()),
        "window_left": draw(st.integers(-1, 12)),
        "window_right": draw(st.integers(-1, 5)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 4.0])),
        "deterministic": draw(st.booleans()),
    }
    options |= {name: draw(st.booleans()) for name in ("with_sinks", "with_alibi")}
    options["mask_kind"] = draw(st.sampled_from([None, None, "bool", "additive"]))
    options["mask_width"] = draw(st.integers(1, 80))
    options["mask_per_head"] = draw(st.booleans())
    options["seed"] = draw(st.integers(0, 2**16))
    return options


@settings(max_examples=120, deadline=None, derandomize=True)
@given(drawn=batches())
def test_fuzz(drawn: dict[str, Any]) -> None:
    drawn = dict(drawn)
    extras = {name: drawn.pop(name) for name in list(drawn) if name.startswith(("with_", "mask_", "seed"))}
    torch.manual_seed(extras["seed"])
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        case = attention_case(**drawn, device=device)
        if extras["with_sinks"]:
            case.options["sinks"] = torch.randn(drawn["num_heads"], device=device)
        if extras["with_alibi"]:
            case.options["alibi_slopes"] = torch.rand(drawn["num_heads"], device=device)
        if extras["mask_kind"] is not None:
            heads = drawn["num_heads"] if extras["mask_per_head"] else 1
            case.options["mask"] = mask_for(case, extras["mask_kind"], heads, extras["mask_width"])
        case.check()


# ---- what the wrapper refuses, and autocast -------------------------------------------------------------------------


def test_grad_is_refused(device: torch.device) -> None:
    case = attention_case([1], [5], device=device)
    case.query.requires_grad_()
    with pytest.raises(ValueError, match="query must not require grad: torch_paged_kv ops are for inference; wrap"):
        case.run()
    with torch.no_grad():
        case.run()


def test_autocast_changes_nothing(device: torch.device) -> None:
    case = ragged("mixed", device=device)
    expected = case.run()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(case.run(), expected)


# ---- every instruction set ------------------------------------------------------------------------------------------

_CAPABILITIES = {"AVX512": ["generic", "avx2", "avx512"], "AVX2": ["generic", "avx2"]}
AVAILABLE = _CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ["generic"])
if torch.cpu._is_amx_tile_supported():
    AVAILABLE = [*AVAILABLE, "amx"]


IS_SUBPROCESS = "PAGED_KV_TESTS_AGAIN" in os.environ


def run_value_tests_again(*arguments: str, **environment: str) -> None:
    tests = Path(__file__).parent
    names = ("test_paged_attention.py", "test_reshape_and_cache.py", "test_merge.py", "test_block_ops.py")
    environment |= {
        "PAGED_KV_TESTS_AGAIN": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]),
    }
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments, *(tests / n for n in names)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        cwd=tests.parent,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.skipif(IS_SUBPROCESS, reason="no second level")
@pytest.mark.parametrize("capability", AVAILABLE[:-1])  # the last one is what this process runs
def test_cpu_capability(capability: str) -> None:
    """The CPU kernels are compiled once per instruction set; a process chooses once."""
    run_value_tests_again(PAGED_KV_CPU_CAPABILITY=capability)


@pytest.mark.skipif(IS_SUBPROCESS, reason="no second level")
def test_device_without_kernels() -> None:
    """Where no kernel is registered for a device type, the same calls run the reference."""
    run_value_tests_again("-p", "reference_only", "-W", "ignore:torch_paged_kv has no cpu kernel")


def test_scale_of_sinks_in_closed_form(device: torch.device) -> None:
    """exp(lse) over exp(lse) + exp(sink) of V = 1."""
    case = attention_case([1], [33], num_heads=2, num_kv_heads=1, device=device)
    case.value_cache.fill_(1.0)
    sinks = torch.tensor([0.3, -1.0], device=device)
    out, lse = case.run(ops.paged_attention_with_lse, sinks=sinks)
    expected = 1 / (1 + torch.exp(sinks - lse[0]))
    torch.testing.assert_close(out[0], expected[:, None].expand(-1, 64), rtol=1e-6, atol=1e-6)
    assert math.isclose(float(lse[0, 0]), float(case.run(ops.paged_attention_with_lse)[1][0, 0]), rel_tol=1e-7)
