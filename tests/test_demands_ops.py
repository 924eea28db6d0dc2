"""Bug reports of paged attention elsewhere, as tests of the ops: B1 .. B23 and spares of the list of users' demands."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from op_cases import INT32_MAX, AttentionCase, all_slots, attention_case, int32, make_caches, make_table, prefix_sum
from torch import Tensor

from torch_paged_kv import ops, reference

NAN = float("nan")


@contextmanager
def uninitialised_memory_is_nan() -> Iterator[None]:
    """torch.empty, and so every op's output before it is written, is full of NaN."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def dense_reference(case: AttentionCase) -> Tensor:
    """Gathered K and V, and torch's own attention on exactly seq_lens keys: a witness that shares no code with ours."""
    out = torch.zeros(case.query.shape[0], case.query.shape[1], case.value_cache.shape[3], device=case.query.device)
    group = case.query.shape[1] // case.key_cache.shape[2]
    for row, length in enumerate(case.seq_lens.tolist()):
        begin, end = case.cu_seqlens_q[row : row + 2].tolist()
        block_size = case.key_cache.shape[1]
        slots = [int(case.block_table[row, p // block_size]) * block_size + p % block_size for p in range(length)]
        keys, values = (
            torch.stack([cache[slot // block_size, slot % block_size] for slot in slots]).float()
            for cache in (case.key_cache, case.value_cache)
        )
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        visible = torch.ones(end - begin, length, dtype=torch.bool, device=out.device).tril(length - (end - begin))
        query = case.query[begin:end].float().transpose(0, 1)
        attended = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
        out[begin:end] = attended.transpose(0, 1)
    return out


def weights_case(
    q_len: int, length: int, *, block_size: int = 16, device: torch.device, **options: Any
) -> AttentionCase:
    """q = 0 and V one-hot by position: row i of the output is the weights of query i."""
    case = attention_case(
        [q_len], [length], num_heads=1, num_kv_heads=1, head_size=8, head_size_v=length, block_size=block_size,
        device=device, **options,
    )  # fmt: skip
    case.query.zero_()
    slots = all_slots(case.block_table, [length], block_size).to(device)
    key, value = torch.randn(length, 1, 8, device=device), torch.eye(length, device=device)[:, None]
    ops.reshape_and_cache(key, value, case.key_cache, case.value_cache, slots)
    return case


# ---- B1 .. B6: what must not be read ---------------------------------------------------------------------------------


def test_b1_nan_past_the_length(device: torch.device) -> None:
    batches: list[tuple[list[int], list[int], dict[str, Any]]] = [
        ([3, 3], [1, 3], {"num_heads": 1, "num_kv_heads": 1}),
        ([1] * 4, [32, 64, 96, 48], {"num_heads": 8, "num_kv_heads": 8, "block_size": 128}),
        ([1] * 4, [32, 64, 96, 48], {"num_heads": 8, "num_kv_heads": 8, "block_size": 16}),
    ]
    for q_lens, seq_lens, sizes in batches:
        outs = []
        for poison in (NAN, 0.0):
            torch.manual_seed(1)
            case = attention_case(q_lens, seq_lens, poison=poison, device=device, **sizes)
            outs.append(case.run())
        assert not outs[0].isnan().any()
        assert torch.equal(outs[0], outs[1])
        torch.testing.assert_close(outs[0][-1], dense_reference(case)[-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tail", ["-1", "num_blocks", "int32 max", "live block"])
def test_b3_garbage_past_the_used_columns(tail: str, device: torch.device) -> None:
    case = attention_case([1, 1, 1], [5, 17, 33], block_size=16, spare_blocks=2, device=device)
    num_blocks = case.key_cache.shape[0]
    table = torch.full((3, 64), -1, dtype=torch.int32, device=device)
    table[:, : case.block_table.shape[1]] = case.block_table
    case.block_table = table
    expected = case.run()
    entry = {"-1": -1, "num_blocks": num_blocks, "int32 max": INT32_MAX, "live block": int(table[2, 0])}[tail]
    for row, used in enumerate((1, 2, 3)):
        table[row, used:] = entry
    assert torch.equal(case.run(), expected)

    # Positions to slots: the next 11 tokens of each row go to the blocks it holds, and nowhere else.
    lens, ring = case.seq_lens.clone(), torch.zeros(num_blocks, dtype=torch.int32, device=device)
    counts = torch.ones(num_blocks, dtype=torch.int32, device=device)
    counters = torch.zeros(4, dtype=torch.int64, device=device)
    slots, pairs = ops.allocate(table, lens, ring, counts, counters, prefix_sum([11] * 3, device), 33, 16)
    assert (pairs == -1).all()
    own = [{int(b) for b in table[row, :used]} for row, used in enumerate((1, 2, 3))]
    for token, slot in enumerate(slots.tolist()):
        assert slot // 16 in own[token // 11]
    before = case.key_cache.clone(), case.value_cache.clone()
    ops.reshape_and_cache(
        torch.ones(33, 2, 64, device=device),
        torch.ones(33, 2, 64, device=device),
        case.key_cache,
        case.value_cache,
        slots,
    )
    touched = torch.zeros(num_blocks * 16, dtype=torch.bool, device=device)
    touched[slots] = True
    for cache, old in zip((case.key_cache, case.value_cache), before):
        kept = cache.reshape(-1, 128)[~touched].nan_to_num(9e9)
        assert torch.equal(kept, old.reshape(-1, 128)[~touched].nan_to_num(9e9))


def test_b4_empty_rows(device: torch.device) -> None:
    with uninitialised_memory_is_nan():
        assert torch.empty(3).isnan().all()
        case = attention_case([1, 1, 1], [0, 7, 0], device=device)
        out, lse = case.run(ops.paged_attention_with_lse)
    for row in (0, 2):
        assert (out[row] == 0).all()
        assert (lse[row] == float("-inf")).all()
    torch.testing.assert_close(out[1:2], dense_reference(case.row(1)), rtol=1e-5, atol=1e-5)


def test_every_output_is_written(device: torch.device) -> None:
    with uninitialised_memory_is_nan():
        case = attention_case([0, 5, 1, 3], [3, 2, 9, 0], head_size=72, head_size_v=100, device=device)
        out, lse = case.run(ops.paged_attention_with_lse)
        dense = ops.gather_blocks(case.key_cache, case.value_cache, case.block_table, case.seq_lens, 12)
        merged = ops.merge_attention_states(out, lse, out, lse)
    for tensor in (out, lse, *dense, *merged):
        assert not tensor.isnan().any()


def test_b5_merge_of_two_empty_states(device: torch.device) -> None:
    out = torch.zeros(2, 3, 64, dtype=torch.float16, device=device)
    lse = torch.full((2, 3), float("-inf"), device=device)
    merged, merged_lse = ops.merge_attention_states(out, lse, out, lse)
    assert (merged == 0).all()
    assert (merged_lse == float("-inf")).all()


def test_b5_more_queries_than_keys(device: torch.device) -> None:
    case = attention_case([6], [4], device=device)
    out, lse = case.run(ops.paged_attention_with_lse)
    assert (out[:2] == 0).all()
    assert (lse[:2] == float("-inf")).all()
    torch.testing.assert_close(out[2:], dense_reference(case)[2:], rtol=1e-5, atol=1e-5)


def test_b6_length_past_the_table(device: torch.device) -> None:
    """Capacity 32, length 33: column 2 belongs to somebody else and is not read; the length counts as 32."""
    case = attention_case([1], [32], block_size=16, device=device)
    wide = torch.full((1, 5), INT32_MAX, dtype=torch.int32, device=device)
    wide[:, :2] = case.block_table[:, :2]
    case.block_table = wide[:, :2]
    expected = case.run()
    case.seq_lens.fill_(33)
    assert torch.equal(case.run(), expected)


def test_b6_append_past_the_table() -> None:
    table, lens = int32([0, 1]).reshape(1, 2), int32([32])
    state = (table, lens, int32([2, 3, 0, 0]), int32([1, 1, 0, 0]), torch.tensor([0, 2, 0, 0]))
    before = [tensor.clone() for tensor in state]
    for function in (ops.allocate, reference.allocate):
        with pytest.raises(ValueError, match=r"block_table must .*3.* row 0.*, got 2"):
            function(*state, prefix_sum([1]), 1, 16)
        assert all(torch.equal(a, b) for a, b in zip(state, before))


def test_b6_debug_mode_names_the_row() -> None:
    code = (
        "import torch; from torch_paged_kv import ops\n"
        "cache = torch.zeros(4, 16, 1, 8); t = lambda x: torch.tensor(x, dtype=torch.int32)\n"
        "query, table = torch.zeros(2, 1, 8), t([[0, 1], [2, 3]])\n"
        "ops.paged_attention(query, cache, cache, table, t([5, 33]), t([0, 1, 2]), 1, scale=1)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PAGED_KV_DEBUG": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "ValueError: seq_lens must" in run.stderr
    assert "33 at row 1" in run.stderr


# ---- B7, B8: offsets past 32 bits ------------------------------------------------------------------------------------


def lazily_committed(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Address space of which only touched pages cost memory (on the CPU)."""
    try:
        return torch.empty(*shape, dtype=dtype, device=device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        pytest.skip(f"no room for the pool: {str(error).splitlines()[0]}")


def test_b7_slots_past_2_to_the_31(device: torch.device) -> None:
    num_blocks, block_size, heads, size = 64000, 16, 32, 128  # 4.19e9 elements
    caches = [
        lazily_committed(num_blocks, block_size, heads, size, dtype=torch.float16, device=device) for _ in range(2)
    ]
    for cache in caches:
        cache[0] = 7.0
    key, value = (torch.randn(7, heads, size, device=device).half() for _ in range(2))
    slots = torch.arange(7, device=device) + (num_blocks - 1) * block_size
    ops.reshape_and_cache(key, value, caches[0], caches[1], slots)
    assert torch.equal(caches[0][-1, :7], key)
    assert torch.equal(caches[1][-1, :7], value)
    assert (caches[0][0] == 7).all()
    assert (caches[1][0] == 7).all()
    case = AttentionCase(
        query=torch.randn(1, heads, size, device=device).half(),
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=int32([num_blocks - 1], device).reshape(1, 1),
        seq_lens=int32([7], device),
        cu_seqlens_q=int32([0, 1], device),
        max_seqlen_q=1,
        options={"scale": size**-0.5},
    )
    torch.testing.assert_close(case.run().float(), dense_reference(case), rtol=0, atol=2e-3)
    ops.copy_blocks(caches, [], torch.tensor([[num_blocks - 1, 0]], device=device))
    assert torch.equal(caches[0][0, :7], key)
    assert torch.equal(caches[1][0, :7], value)
    gathered, _ = ops.gather_blocks(*caches, case.block_table, case.seq_lens, 7)
    assert torch.equal(gathered[0].transpose(0, 1), key)


@pytest.mark.parametrize(
    ("width", "block_size", "first_block"), [(576, 480, 7766), (512, 32, 262144), (512, 32, 262143)]
)
def test_b8_block_ids_past_2_to_the_31(width: int, block_size: int, first_block: int, device: torch.device) -> None:
    """The same bits as the same data in blocks 0 .. 2."""
    length = 2 * block_size + 9
    latent = torch.randn(length, 1, width, device=device).half()
    query = torch.randn(1, 16, width, device=device).half()
    outs = []
    for first in (0, first_block):
        cache = lazily_committed(first + 3, block_size, 1, width, dtype=torch.float16, device=device)
        for i in range(3):
            part = latent[i * block_size : (i + 1) * block_size]
            cache[first + i, : len(part)] = part
        table = int32([first, first + 1, first + 2], device).reshape(1, 3)
        outs.append(
            ops.paged_attention(
                query, cache, cache[..., :512], table, int32([length], device), int32([0, 1], device), 1, scale=0.05,
                deterministic=True,
            )
        )  # fmt: skip
    assert torch.equal(outs[0], outs[1])
    assert outs[0].abs().sum() > 0


# ---- B10 .. B14: sizes, windows, alignment ---------------------------------------------------------------------------


@pytest.mark.parametrize("head_size", [40, 72, 80, 96, 100, 112, 224])
def test_b10_head_sizes(head_size: int, device: torch.device) -> None:
    for q_len in (128, 1):
        case = attention_case(
            [q_len], [256], num_heads=8, num_kv_heads=8, head_size=head_size, dtype=torch.float16, device=device
        )
        out, _ = case.check()
        torch.testing.assert_close(out.float(), dense_reference(case), rtol=0, atol=2e-3)


@pytest.mark.parametrize("block_size", [1, 3, 19, 48, 768])
def test_b12_block_sizes(block_size: int, device: torch.device) -> None:
    lens = [max(block_size - 1, 1), block_size, 2 * block_size + 1]
    for q_lens in ([1, 1, 1], [1, min(block_size, 5), 3]):
        case = attention_case(q_lens, lens, block_size=block_size, device=device)
        out, _ = case.check()
        torch.testing.assert_close(out, dense_reference(case), rtol=1e-5, atol=1e-5)


def test_b13_window_is_exact(device: torch.device) -> None:
    """W = 4: query i sees keys max(0, i - 3) .. i, min(i + 1, 4) of them."""
    weights = weights_case(16, 16, device=device).run(window_left=3)[:, 0]
    for i in range(16):
        expected = torch.zeros(16)
        expected[max(0, i - 3) : i + 1] = 1 / min(i + 1, 4)
        torch.testing.assert_close(weights[i].cpu(), expected)
        assert int((weights[i] != 0).sum()) == min(i + 1, 4)


@pytest.mark.parametrize("length", [513, 700])
def test_b13_decode_sees_the_last_512_keys(length: int, device: torch.device) -> None:
    case = attention_case([1], [length], window_left=511, device=device)
    expected = case.run()
    block_size = 16

    def change(position: int) -> None:
        block = case.block_table[0, position // block_size]
        case.key_cache[block, position % block_size] += 1
        case.value_cache[block, position % block_size] += 1

    for outside in {0, length - 513}:
        change(outside)
        assert torch.equal(case.run(), expected)
    change(length - 512)
    assert not torch.equal(case.run(), expected)


def test_b13_chunk_longer_than_the_window(device: torch.device) -> None:
    case = attention_case([20, 37], [50, 37], window_left=3, device=device)
    whole, _ = case.check()
    for i in range(20):  # each query of the chunk alone, as a decode step of its time
        step = case.row(0)
        step.query, step.cu_seqlens_q, step.max_seqlen_q = case.query[i : i + 1], int32([0, 1], device), 1
        step.seq_lens = int32([31 + i], device)
        torch.testing.assert_close(step.run(), whole[i : i + 1], rtol=1e-5, atol=1e-6)


def test_b14_causal_is_aligned_bottom_right(device: torch.device) -> None:
    """8 keys cached, 4 queries more: rows are uniform over 9, 10, 11, 12 keys."""
    weights = weights_case(4, 12, device=device).run()[:, 0].cpu()
    for i in range(4):
        expected = torch.zeros(12)
        expected[: 9 + i] = 1 / (9 + i)
        torch.testing.assert_close(weights[i], expected)


# ---- B15 .. B17: softcap, sinks, ALiBi -------------------------------------------------------------------------------


def test_b15_softcap(device: torch.device) -> None:
    """Scaled scores 100 and 0, cap 50: weights softmax([50 tanh(2), 0])."""
    case = weights_case(1, 2, device=device, scale=1.0, causal=False)
    case.query[..., 0] = 10.0
    block = case.block_table[0, 0]
    case.key_cache[block, :2] = 0.0
    case.key_cache[block, 0, 0, 0] = 10.0
    lse_cap = case.run(ops.paged_attention_with_lse, softcap=50.0)[1]
    assert math.isclose(50 * math.tanh(2), 48.2014, abs_tol=1e-4)
    assert math.isclose(float(lse_cap), 50 * math.tanh(2), rel_tol=1e-6)
    assert math.isclose(float(case.run(ops.paged_attention_with_lse)[1]), 100.0, rel_tol=1e-6)
    case.key_cache[block, 0, 0, 0] = 0.1  # scores 1 and 0, where weights tell the two apart
    expected = torch.tensor([0.5 * math.tanh(2), 0.0]).softmax(0)
    torch.testing.assert_close(case.run(softcap=0.5).flatten().cpu(), expected)
    assert not torch.allclose(case.run().flatten().cpu(), expected, atol=0.05)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("length", "sink", "window_left", "expected"),
    [(3, 0.0, -1, 0.75), (4096, math.log(4096), -1, 0.5), (1000, 0.0, 127, 128 / 129)],
)
def test_b16_sinks(
    length: int, sink: float, window_left: int, expected: float, deterministic: bool, device: torch.device
) -> None:
    """q = 0 and V = 1: the weight that the sink leaves. One pass, any split, and an explicit split with merge."""
    case = attention_case(
        [1], [length], num_heads=8, device=device, deterministic=deterministic, window_left=window_left
    )
    case.query.zero_()
    case.value_cache.fill_(1.0)
    sinks = torch.full((8,), sink, device=device)
    whole = torch.full((1, 8, 64), expected)
    torch.testing.assert_close(case.run(sinks=sinks).cpu(), whole, rtol=1e-6, atol=0)
    if window_left < 0:
        first = case.row(0)
        first.seq_lens = case.seq_lens // 32 * 16  # a block boundary near the middle
        second = case.row(0)
        second.block_table = case.block_table[:, int(first.seq_lens) // 16 :]
        second.seq_lens = case.seq_lens - first.seq_lens
        states = [part.run(ops.paged_attention_with_lse) for part in (first, second)]
        merged, _ = ops.merge_attention_states(*states[0], *states[1], sinks=sinks)
        torch.testing.assert_close(merged.cpu(), whole, rtol=1e-6, atol=0)


def test_b17_alibi(device: torch.device) -> None:
    """q = k = 0, slope 0.5: weights softmax(0.5 * [0, 1, 2, 3]), whether decoded step by step or prefilled."""
    slopes = torch.tensor([0.5], device=device)
    case = weights_case(4, 4, device=device, alibi_slopes=slopes)
    prefill = case.run()[:, 0].cpu()
    for i in range(4):
        expected = torch.zeros(4)
        expected[: i + 1] = (0.5 * torch.arange(i + 1.0)).softmax(0)
        torch.testing.assert_close(prefill[i], expected)
        step = case.row(0)
        step.query, step.cu_seqlens_q, step.max_seqlen_q = case.query[:1], int32([0, 1], device), 1
        step.seq_lens = int32([i + 1], device)
        torch.testing.assert_close(step.run()[0, 0].cpu(), expected)


# ---- B20, B23: stores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_b20_float8_saturates(source: torch.dtype, device: torch.device) -> None:
    x = torch.tensor([448, 464, 465, 1000, -1000, 6e4, 1e-3], device=device).to(source).reshape(1, 1, 7)
    expected = torch.tensor([448, 448, 448, 448, -448, 448, 2**-9])
    stored = []
    for scale in (None, torch.ones((), device=device)):
        caches = make_caches(1, 1, 1, 7, 7, dtype=torch.float8_e4m3fn, device=device)
        ops.reshape_and_cache(x, x, *caches, torch.zeros(1, dtype=torch.int64, device=device), scale, scale)
        stored += [cache.flatten() for cache in caches]
    for cache in stored:
        assert torch.equal(cache.float().cpu(), expected)
        assert torch.equal(cache.view(torch.uint8), stored[0].view(torch.uint8))


def test_b23_two_layers_of_one_stacked_pool(device: torch.device) -> None:
    """The compiled step writes into pool[layer] in place, and equals eager."""
    from torch._inductor.utils import run_and_get_code

    def step(pool: Tensor, x: Tensor, slots: Tensor, table: Tensor, lens: Tensor, spans: Tensor) -> Tensor:
        for layer in range(2):
            key_cache, value_cache = pool[layer]
            ops.reshape_and_cache(x.sin(), x.cos(), key_cache, value_cache, slots)
            x = x + ops.paged_attention(x, key_cache, value_cache, table, lens, spans, 1, scale=0.3)
        return x

    torch.compiler.reset()
    pools = [
        torch.zeros(2, 2, 41, 4, 2, 8, device=device) for _ in range(2)
    ]  # [layer, K or V, block, slot, head, size]
    rest = (
        torch.randn(2, 2, 8, device=device), torch.tensor([163, 9], device=device),
        int32([0, 40, 2, 1], device).reshape(2, 2), int32([8, 2], device), int32([0, 1, 2], device),
    )  # fmt: skip
    with torch.no_grad():
        expected = step(pools[0], *rest)
        actual, codes = run_and_get_code(torch.compile(step, fullgraph=True), pools[1], *rest)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(pools[1], pools[0])
    code = "\n".join(codes)
    assert "clone" not in code
    assert "41, 4, 2, 8), (" not in "".join(line for line in code.splitlines() if "empty_strided" in line)


# ---- spares ---------------------------------------------------------------------------------------------------------


def new_pool(num_rows: int, max_blocks: int, num_blocks: int) -> tuple[Tensor, ...]:
    return (
        torch.full((num_rows, max_blocks), -1, dtype=torch.int32),
        torch.zeros(num_rows, dtype=torch.int32),
        torch.arange(num_blocks, dtype=torch.int32),
        torch.zeros(num_blocks, dtype=torch.int32),
        torch.tensor([0, num_blocks, 0, 0]),
    )


def num_free(state: tuple[Tensor, ...]) -> int:
    return int(state[4][1] - state[4][0])


def test_reorder_moves_keys_and_values(device: torch.device) -> None:
    """Beam reorder: a fork, then the copy of a begun block when it is written. Both caches must have followed."""
    state = tuple(tensor.to(device) for tensor in new_pool(2, 4, 8))
    caches = make_caches(8, 4, 1, 8, 8, device=device)
    stored = torch.randn(2, 12, 1, 8, device=device)

    def append(q_lens: list[int], keys: Tensor, values: Tensor) -> None:
        slots, pairs = ops.allocate(*state, prefix_sum(q_lens, device), sum(q_lens), 4)
        ops.copy_blocks([caches[0]], [caches[1]], pairs)
        ops.reshape_and_cache(keys, values, *caches, slots)

    append([6, 6], stored[0], stored[1])
    ops.fork(*state, torch.tensor([1], device=device), torch.tensor([0], device=device), 4)
    new = torch.randn(2, 2, 1, 8, device=device)
    append([1, 1], new[0], new[1])
    for dense, old, fresh in zip(ops.gather_blocks(*caches, state[0], state[1], 7), stored, new):
        for row in range(2):
            assert torch.equal(dense[row, 0], torch.cat([old[6:, 0], fresh[row]]))


def test_scales_inside_the_block(device: torch.device) -> None:
    """int8 rows and their float32 scales in one block of 33 792 bytes, which divides no page."""
    heads, size, block_size, num_blocks = 8, 128, 16, 5
    rows_bytes = block_size * heads * size
    block_bytes = 2 * rows_bytes + 2 * block_size * heads * 4
    assert block_bytes == 33792
    storage = torch.zeros(num_blocks, block_bytes, dtype=torch.int8, device=device)
    key_cache, value_cache = (
        storage[:, i * rows_bytes : (i + 1) * rows_bytes].unflatten(1, (block_size, heads, size)) for i in range(2)
    )
    numbers = storage.view(torch.float32)[:, 2 * rows_bytes // 4 :]
    scales = [numbers[:, i * 128 : (i + 1) * 128].unflatten(1, (block_size, heads)) for i in range(2)]
    key, value = (torch.randn(20, heads, size, device=device) for _ in range(2))
    table = int32([4, 1], device).reshape(1, 2)
    slots = all_slots(table, [20], block_size)
    ops.reshape_and_cache(key, value, key_cache, value_cache, slots, *scales)
    ops.copy_blocks([storage], [], torch.tensor([[4, 0], [1, 2]], device=device))
    case = AttentionCase(
        query=torch.randn(1, heads, size, device=device),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=int32([0, 2], device).reshape(1, 2),
        seq_lens=int32([20], device),
        cu_seqlens_q=int32([0, 1], device),
        max_seqlen_q=1,
        options={"scale": size**-0.5, "key_scale": scales[0], "value_scale": scales[1]},
    )
    case.check()
    dense, _ = ops.gather_blocks(
        key_cache, value_cache, case.block_table, case.seq_lens, 20, key_scale=scales[0], value_scale=scales[1]
    )
    step = key.abs().amax(-1, keepdim=True) / 127  # [20, heads, 1]
    assert ((dense[0].transpose(0, 1) - key).abs() <= step / 2 * (1 + 1e-4)).all()


def test_wide_heads_do_not_cost_quadratic_memory() -> None:
    """D = 512 with GQA and no mask: a path that holds all scores would take 8 * 1024 * 1024 * 4 = 32 MiB more."""
    code = (
        "import resource, torch; from torch_paged_kv import ops\n"
        "cache = torch.randn(64, 16, 1, 512); query = torch.randn(1024, 8, 512)\n"
        "i = lambda *x: torch.tensor(x, dtype=torch.int32)\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "run = lambda q: ops.paged_attention(q, cache, cache, torch.randperm(64, dtype=torch.int32)[None], i(1024),\n"
        "    i(0, len(q)), len(q), scale=0.05)\n"
        "run(query[:8]); before = peak(); out = run(query); print(peak() - before - out.numel() * 4 // 1024)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 8 * 1024, f"{run.stdout.strip()} KiB of scratch"


def test_left_padded_rows_continue_like_full_runs(device: torch.device) -> None:
    """Rows of 3 and 12 tokens, left-padded to 12, then one token each: both equal their runs alone."""
    lens, width = [3, 12], 12
    key, value = (torch.randn(2, width + 1, 2, 16, device=device) for _ in range(2))
    query = torch.randn(2, width + 1, 4, 16, device=device)
    state = tuple(tensor.to(device) for tensor in new_pool(2, 4, 10))
    caches = make_caches(10, 4, 2, 16, 16, device=device)

    def step(begin: int, end: int, num_new: list[int]) -> Tensor:
        spans = prefix_sum([end - begin] * 2, device)
        flat = [x[:, begin:end].flatten(0, 1) for x in (query, key, value)]
        slots, pairs = ops.allocate(*state, spans, len(flat[0]), 4, num_new=int32(num_new, device))
        ops.copy_blocks([caches[0]], [caches[1]], pairs)
        ops.reshape_and_cache(flat[1], flat[2], *caches, slots)
        out = ops.paged_attention(flat[0], *caches, state[0], state[1], spans, end - begin, scale=0.25)
        return out.unflatten(0, (2, end - begin))

    prefill = step(0, width, lens)
    assert int(state[1].sum()) == 15
    assert num_free(state) == 10 - 1 - 3
    assert not prefill.isnan().any()
    assert (prefill[0, :9] == 0).all()
    decode = step(width, width + 1, [1, 1])
    for row, length in enumerate(lens):
        q, k, v = (x[row, width - length :].transpose(0, 1) for x in (query, key, value))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True, scale=0.25
        ).transpose(0, 1)
        actual = torch.cat([prefill[row, width - length :], decode[row]])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_table_of_a_trimmed_row_hides_its_tail(device: torch.device) -> None:
    """After a crop, attention and gather see the shorter row alone, whatever the storage still holds."""
    case = attention_case([1], [40], device=device)
    state = (case.block_table, case.seq_lens, torch.zeros(6, dtype=torch.int32, device=device))
    counts = torch.ones(6, dtype=torch.int32, device=device)
    ops.free(*state, counts, torch.zeros(4, dtype=torch.int64, device=device), int32([20], device), 16)
    for position in range(20, 32):
        case.key_cache[case.block_table[0, 1], position % 16] = NAN
    out = case.run()
    torch.testing.assert_close(out, dense_reference(case), rtol=1e-5, atol=1e-5)
    keys, _ = ops.gather_blocks(case.key_cache, case.value_cache, case.block_table, case.seq_lens, 40)
    assert (keys[:, :, :20] == 0).all()
    assert not keys.isnan().any()


def test_make_table_gives_no_block_twice() -> None:
    table = make_table([33, 16, 0, 1], 16, 9)
    used = table[table >= 0].tolist()
    assert len(set(used)) == len(used) == 5
