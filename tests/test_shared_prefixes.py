"""Shared prefixes: which rows read which blocks together, and that their attention is that of the plain op."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import (
    EIGHT_BIT_DTYPES,
    FLOAT_DTYPES,
    INT32_MAX,
    AttentionCase,
    assert_at_most_twice_naive,
    attention_case,
    captured,
    dtype_id,
    int32,
    prefix_sum,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torch_paged_kv import ops, reference
from torch_paged_kv.shared_prefix import SharedPrefixes, shared_prefix_attention

# ---- who shares what ------------------------------------------------------------------------------------------------


def find(
    rows: Sequence[Sequence[int]], lens: Sequence[int], q_lens: Sequence[int], min_saved: int, device: torch.device
) -> list[list[Any]]:
    """The op's results for blocks of 4 tokens, as lists; it agrees with the reference."""
    arguments = (int32(rows, device), int32(lens, device), prefix_sum(q_lens, device), 4, min_saved)  # type: ignore[arg-type]
    found, expected = ops.find_shared_prefixes(*arguments), reference.find_shared_prefixes(*arguments)
    for actual, right in zip(found, expected):
        assert actual.dtype == torch.int32
        assert actual.device.type == device.type
        assert torch.equal(actual, right)
    return [result.tolist() for result in found]


def test_all_rows_share(device: torch.device) -> None:
    rows = [[7, 8, 1, -1], [7, 8, 2, 3], [7, 8, 4, -1]]
    assert find(rows, [9, 13, 10], [1, 1, 1], 1, device) == [
        [8, 0, 0],
        [0, 3, 3, 3],
        [[1, -1, -1, -1], [2, 3, -1, -1], [4, -1, -1, -1]],
        [1, 5, 2],
    ]


def test_several_runs_and_a_row_of_its_own(device: torch.device) -> None:
    rows = [[7, 1, 9], [7, 2, 9], [6, 3, 9], [5, 0, 4], [5, 0, 8]]
    assert find(rows, [5, 6, 7, 9, 9], [1, 2, 3, 1, 1], 1, device) == [
        [4, 0, 0, 8, 0],
        [0, 3, 3, 6, 8, 8],
        [[1, -1, -1], [2, -1, -1], [6, 3, -1], [4, -1, -1], [8, -1, -1]],
        [1, 2, 7, 1, 1],
    ]


def test_nothing_is_shared(device: torch.device) -> None:
    """No query is in a span, and every row keeps what it has."""
    rows = [[0, 1], [2, 1], [3, 1]]
    assert find(rows, [8, 5, 2], [1, 1, 1], 1, device) == [[0] * 3, [3] * 4, [[0, 1], [2, 1], [3, -1]], [8, 5, 2]]


def test_rows_around_the_runs_have_no_span(device: torch.device) -> None:
    rows = [[1, 9], [7, 1], [7, 2], [3, 3], [8, 1], [8, 2], [4, 4], [5, 5]]
    found = find(rows, [8] * 8, [2, 1, 1, 1, 3, 1, 1, 1], 1, device)
    assert found[:2] == [[0, 4, 0, 0, 4, 0, 0, 0], [2, 2, 4, 4, 5, 9, 9, 9, 9]]


def test_runs_save_most(device: torch.device) -> None:
    """All four share a block, each pair shares three: 3 x 1 against 2 x 3. Of six rows, 5 x 4 against 3 x 6."""
    rows = [[7, 1, 1, 5], [7, 1, 1, 6], [7, 2, 2, 8], [7, 2, 2, 9]]
    assert find(rows, [13] * 4, [1] * 4, 1, device)[0] == [12, 0, 12, 0]
    rows = [[1, 2, 3, 4, 8, 8, *[row]] for row in (1, 2, 3)] + [[1, 2, 3, 4, 9, 9, *[row]] for row in (4, 5, 6)]
    assert find(rows, [25] * 6, [1] * 6, 1, device)[0] == [24, 0, 0, 24, 0, 0]  # 2 x 2 x 6 = 24 > 20
    assert find(rows[2:], [25] * 4, [1] * 4, 1, device)[0] == [0, 24, 0, 0]  # 2 x 6 = 12, and so is 3 x 4


def test_equal_savings_give_the_shorter_last_run(device: torch.device) -> None:
    rows = [[1, 2, 5], [1, 2, 6], [1, 3, 7]]  # 1 x 2 blocks, or 2 x 1
    assert find(rows, [9] * 3, [1] * 3, 1, device)[0] == [8, 0, 0]


def test_too_little_is_not_shared(device: torch.device) -> None:
    rows = [[1, 2, 5], [1, 2, 6], [1, 2, 7]]
    assert find(rows, [9] * 3, [1] * 3, 16, device)[0] == [8, 0, 0]
    assert find(rows, [9] * 3, [1] * 3, 17, device)[0] == [0, 0, 0]


def test_only_blocks_before_every_query(device: torch.device) -> None:
    """The block that a query stands in, or a later query of the row, is not shared though all rows hold it."""
    rows = [[1, 2, 3], [1, 2, 3]]
    assert find(rows, [9, 9], [1, 1], 1, device)[0] == [8, 0]
    assert find(rows, [8, 9], [1, 1], 1, device)[0] == [4, 0]
    assert find(rows, [12, 12], [5, 1], 1, device)[0] == [4, 0]
    assert find(rows, [12, 12], [9, 1], 1, device)[0] == [0, 0]
    assert find(rows, [12, 12], [20, 1], 1, device)[0] == [0, 0]  # padding on the left: queries before key 0
    assert find(rows, [12, 12], [0, 1], 1, device)[0] == [8, 0]  # a row without a query


def test_lengths_and_columns_out_of_range(device: torch.device) -> None:
    rows = [[1, 2], [1, 2], [1, INT32_MAX], [1, INT32_MAX]]
    assert find(rows, [INT32_MAX, 99, -3, 4], [1, 1, 1, 1], 1, device)[3] == [4, 4, 0, 4]
    assert find([[]] * 2, [0, 0], [1, 1], 1, device) == [[0, 0], [2, 2, 2], [[], []], [0, 0]]


def test_spans_that_do_not_begin_at_zero(device: torch.device) -> None:
    table, lens = int32([[1, 2], [1, 3]], device), int32([5, 6], device)  # type: ignore[list-item]
    found = ops.find_shared_prefixes(table, lens, int32([2, 3, 5], device), 4, 1)
    assert [result.tolist() for result in found[:2]] == [[4, 0], [2, 5, 5]]


def keys_saved(rows: Sequence[Sequence[int]], cuts: Sequence[int], blocks: Sequence[int], min_saved: int) -> int:
    """Of the division whose runs begin at `cuts`."""
    total = 0
    for start, end in itertools.pairwise([*cuts, len(rows)]):
        limit = min(blocks[start:end])
        same = [len({rows[row][column] for row in range(start, end)}) == 1 for column in range(limit)]
        saved = (end - start - 1) * ([*same, False].index(False)) * 4
        total += saved if saved >= min_saved else 0
    return total


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=4, max_size=4), st.integers(0, 16)), min_size=1, max_size=6
    ),
    st.sampled_from([1, 8, 13]),
)
def test_no_division_saves_more(rows_and_lens: list[tuple[list[int], int]], min_saved: int) -> None:
    rows, lens = [list(x) for x in zip(*rows_and_lens)]
    prefix_lens, spans, _, suffix_lens = find(rows, lens, [1] * len(rows), min_saved, torch.device("cpu"))
    saved = sum(shared * (spans[row + 1] - spans[row] - 1) for row, shared in enumerate(prefix_lens) if shared)
    blocks = [max(0, length - 1) // 4 for length in lens]
    divisions = itertools.chain.from_iterable(
        itertools.combinations(range(1, len(rows)), count) for count in range(len(rows))
    )
    assert saved == max(keys_saved(rows, [0, *cuts], blocks, min_saved) for cuts in divisions)
    shared_of_rows = [length - rest for length, rest in zip(lens, suffix_lens)]
    assert sum(shared_of_rows) == sum(shared * (spans[row + 1] - spans[row]) for row, shared in enumerate(prefix_lens))
    assert spans == sorted(spans)


@pytest.mark.parametrize("num_seqs", [1, 31, 32, 33, 200, 2500])
def test_many_rows(num_seqs: int, device: torch.device) -> None:
    """More rows than a warp has lanes, than shared memory holds, and tables of more columns than are read at once."""
    torch.manual_seed(num_seqs)
    columns = 700 if num_seqs <= 200 else 3
    table = torch.zeros(num_seqs, columns, dtype=torch.int32)
    for row in range(1, num_seqs):
        table[row] = table[row - 1]
        if torch.rand(()) < 0.4:
            table[row, int(torch.randint(columns, ())) :] = row
    arguments = (table, torch.full((num_seqs,), 4 * columns, dtype=torch.int32), prefix_sum([1] * num_seqs), 4, 40)
    if num_seqs <= 200:
        for actual, right in zip(
            ops.find_shared_prefixes(*(x.to(device) if isinstance(x, Tensor) else x for x in arguments)),
            reference.find_shared_prefixes(*arguments),
        ):
            assert torch.equal(actual.cpu(), right)
    else:  # the two kernels are each other's witness
        on_cpu = ops.find_shared_prefixes(*arguments)
        there = ops.find_shared_prefixes(*(x.to(device) if isinstance(x, Tensor) else x for x in arguments))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu, there))
        assert on_cpu[0].count_nonzero() > 100


# ---- attention ------------------------------------------------------------------------------------------------------

# name: (rows and blocks that each of them shares with the row before it, lengths, of blocks of 16)
SHARING: dict[str, tuple[dict[int, int], list[int]]] = {
    "all": ({1: 6, 2: 6, 3: 6}, [103, 110, 100, 131]),
    "two_runs": ({1: 3, 3: 5, 4: 5}, [55, 60, 90, 99, 130]),
    "nested": ({1: 6, 2: 2, 3: 6, 4: 2, 5: 6}, [100, 120, 101, 104, 180, 100]),
    "none": ({}, [40, 1, 77]),
    "with_short_and_empty_rows": ({1: 4, 2: 9, 3: 9, 4: 9}, [70, 80, 0, 3, 80]),
    "nothing_of_its_own": ({1: 4, 2: 4}, [65, 66, 65]),
}


def sharing_case(sharing: str, q_lens: Sequence[int] | int = 1, **changes: Any) -> AttentionCase:
    """A case whose rows hold each other's first blocks; blocks that nobody holds are poisoned."""
    shared_with_previous, lens = SHARING[sharing]
    if isinstance(q_lens, int):
        q_lens = [q_lens] * len(lens)
    block_size = changes.get("block_size", 16)
    lens = [length // 16 * block_size + min(length % 16, block_size) for length in lens]
    case = attention_case(q_lens, lens, **({"tail": INT32_MAX} | changes))
    table = case.block_table
    for row, blocks in shared_with_previous.items():
        blocks = min(blocks, lens[row - 1] // block_size, -(-lens[row] // block_size))
        table[row, :blocks] = table[row - 1, :blocks]
    poison(case, lens)
    return case


def poison(case: AttentionCase, lens: Sequence[int]) -> None:
    """NaN into blocks that no row holds, and into slots past every row's last token that others do not fill."""
    if case.key_cache.dtype not in FLOAT_DTYPES:
        return
    block_size = case.key_cache.shape[1]
    held = torch.zeros(case.key_cache.shape[0], dtype=torch.bool)
    for row, length in enumerate(lens):
        held[case.block_table[row, : -(-length // block_size)].cpu().long()] = True
    for cache in (case.key_cache, case.value_cache):
        cache[~held.to(cache.device)] = float("nan")


def attend(case: AttentionCase, min_saved: int = 1) -> Tensor:
    shared = SharedPrefixes.find(case.block_table, case.seq_lens, case.cu_seqlens_q, case.key_cache.shape[1], min_saved)
    return shared_prefix_attention(
        case.query, case.key_cache, case.value_cache, shared, case.max_seqlen_q, **case.options
    )


def check(case: AttentionCase) -> None:
    out = attend(case)
    assert out.dtype == case.query.dtype
    exact = case.in_dtype(torch.float64)[0]
    assert_at_most_twice_naive(out, naive_in_two_parts(case), exact)
    plain = case.run()
    nothing = SharedPrefixes.find(
        case.block_table, case.seq_lens, case.cu_seqlens_q, case.key_cache.shape[1], INT32_MAX
    )
    assert nothing.prefix_lens.count_nonzero() == 0
    without = shared_prefix_attention(
        case.query, case.key_cache, case.value_cache, nothing, case.max_seqlen_q, **case.options
    )
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if case.query.dtype == torch.float32 else {}
    torch.testing.assert_close(without, plain, **tolerance)  # an empty prefix is neutral


def naive_in_two_parts(case: AttentionCase) -> list[Tensor]:
    """Both parts and their merge by the reference, every step in the query's dtype."""
    found = reference.find_shared_prefixes(
        case.block_table, case.seq_lens, case.cu_seqlens_q, case.key_cache.shape[1], 1
    )
    options = {name: value for name, value in case.options.items() if name != "sinks"}
    parts = [
        dataclasses.replace(case, seq_lens=found[0], cu_seqlens_q=found[1], options=options | {"causal": False}),
        dataclasses.replace(case, block_table=found[2], seq_lens=found[3], options=options),
    ]
    (outs_a, lses_a), (outs_b, lses_b) = (part.naive() for part in parts)
    return [
        reference.merge_in(case.query.dtype, *states, sinks=case.options.get("sinks"))[0]
        for states in zip(outs_a, lses_a, outs_b, lses_b)
    ]


@pytest.mark.parametrize("q_len", [1, 2, 3, 4])
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=dtype_id)
def test_sharing(sharing: str, q_len: int, dtype: torch.dtype, device: torch.device) -> None:
    case = sharing_case(sharing, q_len, dtype=dtype, device=device)
    check(case)
    shared = SharedPrefixes.find(case.block_table, case.seq_lens, case.cu_seqlens_q, 16, 1)
    assert bool(shared.prefix_lens.count_nonzero()) == (sharing != "none")


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32, 64])
@pytest.mark.parametrize("num_heads", [2, 6, 8, 16])
def test_block_sizes_and_groups(block_size: int, num_heads: int, device: torch.device) -> None:
    for sharing in ("all", "two_runs"):
        dtype = FLOAT_DTYPES[(block_size + num_heads) % 3]
        check(sharing_case(sharing, block_size=block_size, num_heads=num_heads, dtype=dtype, device=device))


def test_more_rows_than_a_tile(device: torch.device) -> None:
    """40 rows of a group of 4 heads: the run's 160 packed rows are several tiles of every kernel."""
    case = attention_case(
        [1] * 40, [64 + row for row in range(40)], num_heads=8, head_size=128, dtype=torch.bfloat16, device=device
    )
    case.block_table[:, :4] = case.block_table[0, :4]
    check(case)


def test_query_lengths_differ(device: torch.device) -> None:
    check(sharing_case("all", [3, 1, 0, 20], dtype=torch.bfloat16, device=device))
    check(sharing_case("nested", [1, 30, 1, 2, 0, 1], device=device))


def test_left_padded_rows(device: torch.device) -> None:
    """Spans longer than what a row holds: their first queries see nothing."""
    case = sharing_case("with_short_and_empty_rows", [1, 1, 4, 9, 1], device=device)
    check(case)
    assert (attend(case)[2:6] == 0).all()  # row 2 holds nothing


def test_tokens_outside_every_span(device: torch.device) -> None:
    case = sharing_case("all", [3, 1, 2, 2], device=device)
    spans = case.cu_seqlens_q.clone()
    spans[0] += 2
    spans[-1] -= 1
    case = dataclasses.replace(case, cu_seqlens_q=spans)
    check(case)
    out = attend(case)
    assert (out[:2] == 0).all()
    assert (out[-1] == 0).all()


@pytest.mark.parametrize("options", [{"softcap": 5.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("sharing", SHARING)
def test_softcap_and_sinks(sharing: str, options: dict[str, Any], device: torch.device) -> None:
    sinks = {"sinks": torch.linspace(-2, 4, 4, device=device)} if "sinks" in options else {}
    for dtype in FLOAT_DTYPES:
        check(sharing_case(sharing, 2, dtype=dtype, device=device, **(options | sinks)))


@pytest.mark.parametrize("cache_dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("scale_kind", ["tensor", "head", "slot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_eight_bit_caches(cache_dtype: torch.dtype, scale_kind: str, dtype: torch.dtype, device: torch.device) -> None:
    for sharing in ("all", "nested"):
        check(sharing_case(sharing, cache_dtype=cache_dtype, scale_kind=scale_kind, dtype=dtype, device=device))


def test_unmapped_blocks(device: torch.device) -> None:
    """Entries that name no block hide their keys, in a shared prefix too."""
    case = sharing_case("all", device=device)
    case.block_table[:, 1] = -1
    case.block_table[:, 2] = INT32_MAX
    check(case)


# ---- as part of a step ----------------------------------------------------------------------------------------------


def test_compiles_once_for_all_lengths_and_tables() -> None:
    torch.compiler.reset()
    case = sharing_case("all")
    cases = [case, sharing_case("all")]
    cases[1].block_table[:] = torch.arange(cases[1].block_table.numel()).reshape_as(cases[1].block_table) % 7
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(backend=counter, fullgraph=True)
    def step(
        query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lens: Tensor, spans: Tensor
    ) -> Tensor:
        shared = SharedPrefixes.find(table, lens, spans, 16, 1)
        return shared_prefix_attention(query, key_cache, value_cache, shared, 1, scale=0.125)

    with torch.no_grad():
        for other in cases:
            for lens in (other.seq_lens, other.seq_lens - 30, other.seq_lens * 0):
                tensors = (*other.tensors()[:4], lens, other.cu_seqlens_q)
                expected = attend(dataclasses.replace(other, seq_lens=lens))
                torch.testing.assert_close(step(*tensors), expected)
    assert counter.frame_count == 1
    torch.compiler.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph_follows_tables_and_lengths() -> None:
    """The graph is captured where nothing is shared; replays share what their tables share."""
    cases = [sharing_case(sharing, device="cuda", num_heads=8) for sharing in ("none", "all", "two_runs", "nested")]
    rows, columns = 6, max(case.block_table.shape[1] for case in cases)
    blocks = max(case.key_cache.shape[0] for case in cases)
    query = torch.zeros(rows, 8, 64, device="cuda")
    caches = [torch.zeros(blocks, 16, 2, 64, device="cuda") for _ in range(2)]
    table = torch.zeros(rows, columns, dtype=torch.int32, device="cuda")
    lens, spans = torch.zeros(rows, dtype=torch.int32, device="cuda"), torch.arange(7, dtype=torch.int32, device="cuda")

    def step() -> Tensor:
        shared = SharedPrefixes.find(table, lens, spans, 16, 1)
        return shared_prefix_attention(query, *caches, shared, 1, scale=0.125)

    step()
    torch.cuda.synchronize()
    graph, out = captured(step)
    for case in cases:
        count = len(case.seq_lens)
        query[:count].copy_(case.query)
        for own, cache in zip(caches, (case.key_cache, case.value_cache)):
            own[: len(cache)].copy_(cache)
        table.fill_(INT32_MAX)
        table[:count, : case.block_table.shape[1]].copy_(case.block_table)
        lens.zero_()
        lens[:count].copy_(case.seq_lens)
        graph.replay()
        torch.testing.assert_close(out[:count], case.run(), atol=1e-5, rtol=1e-5)
        assert (out[count:] == 0).all()
