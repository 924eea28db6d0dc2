"""Long spans of queries on the GPU: on Hopper they have a kernel of their own, which every case here reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import attention_case, int32, prefix_sum

from torch_paged_kv import ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


RAGGED = ([300, 77, 512, 1, 90], [300, 1000, 513, 700, 90])  # spans, lengths: with and without a prior, a decode, tails


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_sizes", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("layout", ["plain", "fused"])
def test_head_sizes(dtype: torch.dtype, head_sizes: tuple[int, int], layout: str) -> None:
    size, size_v = head_sizes
    options: dict[str, Any] = {"head_size": size, "head_size_v": size_v, "layout": layout, "dtype": dtype}
    attention_case(*RAGGED, num_heads=8, num_kv_heads=2, device="cuda", **options).check()


@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 20])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (14, 2), (8, 1), (6, 2)])
def test_blocks_and_groups(block_size: int, heads: tuple[int, int]) -> None:
    options: dict[str, Any] = {"num_heads": heads[0], "num_kv_heads": heads[1], "block_size": block_size}
    attention_case(*RAGGED, head_size=128, dtype=torch.bfloat16, device="cuda", layout="fused", **options).check()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"window_left": 100},
        {"window_left": 0},
        {"window_left": 37, "window_right": 5, "causal": False},
        {"window_right": 3, "causal": False},
        {"softcap": 3.0},
        {"softcap": 20.0, "window_left": 200},
        {"sinks": True},
        {"deterministic": True},
        {"alibi_slopes": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_options(options: dict[str, Any], head_size: int) -> None:
    made = {
        name: torch.rand(8, device="cuda") if name in ("sinks", "alibi_slopes") else x for name, x in options.items()
    }
    attention_case(*RAGGED, num_heads=8, head_size=head_size, dtype=torch.bfloat16, device="cuda", **made).check()


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_long(head_size: int) -> None:
    q_lens, lens = [2000, 64, 33, 700], [2000, 3000, 33, 4100]
    attention_case(
        q_lens, lens, num_heads=8, head_size=head_size, dtype=torch.bfloat16, device="cuda", layout="fused"
    ).check()


@pytest.mark.parametrize("decodes", [8, 64, 300])
def test_beside_many_decodes(decodes: int) -> None:
    """Some thread blocks make room for the decodes, the fewer are left the more keys those read; all work gets done."""
    attention_case(
        [1000, *[1] * decodes, 90], [1000, *[1500] * decodes, 900], num_heads=8, dtype=torch.bfloat16, device="cuda"
    ).check()


@pytest.mark.parametrize("lens", [[150, 131], [0, 131], [200, 0]])
def test_spans_longer_than_the_sequence(lens: list[int]) -> None:
    """Left-padded rows: queries before position 0 see nothing."""
    case = attention_case([200, 131], lens, num_heads=16, head_size=128, dtype=torch.bfloat16, device="cuda")
    out, lse = case.check()
    pads = 200 - lens[0]
    assert not out[:pads].any()
    assert (lse[:pads] == float("-inf")).all()


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("window", [-1, 70])
def test_what_nobody_sees_does_not_matter(head_size: int, window: int) -> None:
    """Bit for bit: NaN or zeros past the end, before the window and in blocks that are not mapped."""
    outs = []
    for poison in (float("nan"), 0.0):
        torch.manual_seed(3)
        case = attention_case(
            [250, 90],
            [333, 1001],
            num_heads=16,
            head_size=head_size,
            dtype=torch.bfloat16,
            device="cuda",
            poison=poison,
        )
        case.options["window_left"] = window
        if window >= 0:  # as a sliding layer's pool gives them back
            case.block_table[1, : (1001 - 90 - window) // 16] = -1
        hidden = case.block_table[0, 3].item()
        case.block_table[0, 3] = 10**6
        for cache in (case.key_cache, case.value_cache):
            cache[hidden] = poison
        outs.append(case.run(ops.paged_attention_with_lse))
        assert not outs[-1][0].isnan().any()
        case.check()
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize("num_seqs", [1, 2])
def test_tokens_outside_every_span(num_seqs: int) -> None:
    case = attention_case([200] * num_seqs, [300] * num_seqs, num_heads=32, dtype=torch.bfloat16, device="cuda")
    inside = case.run()
    pad = torch.randn(7, *case.query.shape[1:], device="cuda", dtype=torch.bfloat16)
    case.query = torch.cat([pad, case.query, pad])
    case.cu_seqlens_q = case.cu_seqlens_q + 7
    out, lse = case.run(ops.paged_attention_with_lse)
    assert torch.equal(out[7:-7], inside)
    for part in (slice(None, 7), slice(-7, None)):
        assert not out[part].any()
        assert (lse[part] == float("-inf")).all()


def test_strided_queries() -> None:
    case = attention_case(*RAGGED, num_heads=8, head_size=128, dtype=torch.bfloat16, device="cuda")
    expected = case.run()
    fused = torch.full((case.query.shape[0], 12, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    fused[:, :8] = case.query
    case.query = fused[:, :8]
    assert torch.equal(case.run(), expected)


def test_rows_do_not_depend_on_neighbours() -> None:
    case = attention_case(*RAGGED, num_heads=8, head_size=128, dtype=torch.bfloat16, device="cuda", deterministic=True)
    out = case.run()
    for row in (0, 1, 2, 4):
        begin, end = case.cu_seqlens_q[row : row + 2].tolist()
        assert torch.equal(case.row(row).run(), out[begin:end]), f"row {row}"


@pytest.mark.parametrize("head_size", [64, 128])
def test_replay_with_other_lengths(head_size: int) -> None:
    """A chunked step captured once: other spans, lengths and tables, prefills and decodes in any mix."""
    num_tokens, capacity = 700, 1600
    case = attention_case(
        [num_tokens // 4] * 4, [capacity] * 4, num_heads=8, head_size=head_size, dtype=torch.bfloat16, device="cuda"
    )
    case.max_seqlen_q = num_tokens
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    for q_lens, lens in [
        ([700, 0, 0, 0], [1500, 5, 0, 7]),
        ([1, 1, 600, 1], [1600, 33, 777, 16]),
        ([1, 4, 1, 1], [9, 900, 1600, 1]),
        ([0, 17, 16, 650], [0, 17, 300, 1300]),
    ]:
        case.cu_seqlens_q.copy_(prefix_sum(q_lens))
        case.seq_lens.copy_(int32(lens))
        case.block_table.copy_(case.block_table[torch.randperm(4)])
        graph.replay()
        exact, _ = case.in_dtype(torch.float64)
        worst = float((out.double() - exact).abs().max())
        assert worst < 0.03, f"{q_lens} {lens}: {worst}"


def test_calls_one_after_the_other() -> None:
    """Launches overlap with their neighbours: many calls in a row, of other batches, must not disturb each other."""
    cases = [
        attention_case(q_lens, lens, num_heads=32, head_size=128, dtype=torch.bfloat16, device="cuda")
        for q_lens, lens in [([400], [400]), ([1, 200, 1], [900, 200, 50]), ([17, 30], [800, 30]), ([1, 1], [700, 20])]
    ]
    expected = [case.run() for case in cases]
    torch.cuda.synchronize()
    results = [(i % 4, cases[i % 4].run()) for i in range(60)]
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[i]) for i, out in results)
