"""Every op on random cases against the reference in float64, or bit for bit where an op only moves.

A case is one random call, or a short sequence of calls for the allocator, built on the CPU from one number and copied
to the device with its strides. Whatever an op must not read is NaN, infinite or a number far out of range; whatever it
must not write is compared byte for byte. Tolerances are those of the tests (`op_cases.assert_at_most_twice_naive`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import op_cases
import torch
from op_cases import EIGHT_BIT_DTYPES, FLOAT_DTYPES, LAYOUTS, AttentionCase, assert_at_most_twice_naive
from torch import Tensor

from reliability.report import Result, Settings, command
from torch_paged_kv import OutOfBlocksError, ops, reference

CASES = {"cpu": 100_000, "cuda": 25_000}
SHARE = 0.6  # of the minutes
NAN, INF = float("nan"), float("inf")
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)
GARBAGE = [-1, -2, 2**20, INT32_MAX, INT32_MIN]  # block numbers that no pool has
GARBAGE_64 = [*GARBAGE, 2**40, 2**63 - 1, -(2**63)]
HEAD_SIZES = [1, 3, 8, 16, 24, 32, 40, 64, 64, 64, 72, 80, 96, 100, 128, 128, 192, 256]
MOST = 1_500_000  # multiplications of a usual case; one in fifty may have LARGE
LARGE = 30_000_000
DRAWS = (1, 16, 256)  # of an attention case that breaks the rule on fewer
MOST_FAULTS = 50  # so many end the part
Dice = random.Random


# ---------------------------------------------------------------------------------------------------------------------
# Memory


class Copies:
    """Copies of tensors on a device: whole storages, so that strides and what lies between are the same."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        # By address of the original: it, so that no other takes its place, and all bytes of the copy, uint8 [n].
        self.storages: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.storages:
            self.storages[storage.data_ptr()] = tensor, all_bytes(tensor).to(self.device, copy=True)
        copy = self.storages[storage.data_ptr()][1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype, device=self.device)
        return view.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

    def maybe(self, value: Any) -> Any:
        return self.of(value) if isinstance(value, Tensor) else value


def all_bytes(tensor: Tensor) -> Tensor:
    """Everything of a tensor's storage, between its strides too: uint8 [n]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """The same bits in the whole storages; one NaN counts as any other."""
    mine, right = all_bytes(actual).cpu(), all_bytes(expected)
    if torch.equal(mine, right):
        return
    dtype = expected.dtype
    mine, right = (values[: values.numel() // dtype.itemsize * dtype.itemsize].view(dtype) for values in (mine, right))
    wrong = (mine.double() != right.double()) & ~(mine.double().isnan() & right.double().isnan())
    first = int(wrong.nonzero()[0]) if wrong.any() else -1
    assert first < 0, f"{what}: {int(wrong.sum())} differ, at {first} {mine[first]} is not {right[first]}"


def strided(dice: Dice, tensor: Tensor, spare: float = NAN) -> Tensor:
    """The same values [n, heads, size], sometimes as a part of a larger tensor whose rest is garbage."""
    if tensor.numel() == 0 or dice.random() < 0.5:
        return tensor
    tokens, heads, size = tensor.shape
    before, after = dice.choice([(0, 2 * heads), (heads, 1), (1, 0)])
    larger = torch.full((tokens, before + heads + after, size + dice.choice([0, 0, 8, 1])), spare, dtype=tensor.dtype)
    view = larger[:, before : before + heads, :size]
    view.copy_(tensor)
    return view


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def draw_length(dice: Dice, block_size: int, longest: int = 300) -> int:
    kind = dice.random()
    if kind < 0.08:
        return 0
    if kind < 0.3:
        return max(0, block_size * dice.randint(1, 3) + dice.choice([-1, 0, 0, 1]))
    return dice.randint(1, 40 if kind < 0.9 else longest)


def draw_batch(dice: Dice, block_size: int, longest: int) -> tuple[list[int], list[int]]:
    """(q_lens, seq_lens): decode, several tokens, whole prompts, left-padded and empty rows, mixed."""
    count = 0 if dice.random() < 0.01 else dice.choice([1, 1, 2, 2, 3, 4, 6])
    seq_lens = [draw_length(dice, block_size, longest) for _ in range(count)]
    kinds = ["one"] * len(seq_lens) if dice.random() < 0.4 else []
    q_lens = []
    for length in seq_lens:
        kind = kinds.pop() if kinds else dice.choice(["one", "few", "whole", "chunk", "padded", "none"])
        few, chunk = min(length, dice.randint(2, 6)), dice.randint(1, max(1, length))
        choices = {"one": 1, "few": few, "whole": length, "chunk": chunk, "padded": length + dice.randint(1, 5)}
        q_lens.append(choices.get(kind, 0))
    return q_lens, seq_lens


def draw_mask(dice: Dice, query: Tensor, longest: int) -> Tensor:
    """[tokens, heads or 1, width], bool or additive, wider or narrower than the rows, some axes without a stride."""
    tokens, heads = query.shape[:2]
    width = max(0, longest + dice.choice([0, 0, 3, -2, -longest]))
    # The lowest number but in float16, where the sum with a score would overflow in a naive computation.
    lowest = -30000.0 if query.dtype == torch.float16 else torch.finfo(query.dtype).min
    rows, columns = (1 if dice.random() < 0.2 else tokens), dice.choice([1, 1, heads])
    if dice.random() < 0.5:
        mask = torch.rand(rows, columns, width) < dice.choice([0.5, 0.9, 0.05])
    else:
        mask = torch.randn(rows, columns, width) * 2
        mask[torch.rand(mask.shape) < 0.3] = dice.choice([-INF, -1e4, -30.0, lowest])
    if dice.random() < 0.3 and rows:  # rows of a larger mask
        larger = torch.zeros(rows, columns, width + 5, dtype=mask.dtype)
        larger[..., 2 : 2 + width] = mask
        mask = larger[..., 2 : 2 + width]
    return mask.expand(tokens, columns, width)


def draw_options(dice: Dice, heads: int) -> dict[str, Any]:
    options: dict[str, Any] = {"scale": dice.choice([0.05, 0.125, 0.125, 0.3, 1.0])}
    if dice.random() < 0.25:
        options["causal"] = False
    if dice.random() < 0.1:
        options["window_right"] = dice.randint(0, 20)
    if dice.random() < 0.3:
        options["window_left"] = dice.choice([0, 1, dice.randint(0, 40), 10**6])
    if dice.random() < 0.15:
        options["softcap"] = dice.choice([0.5, 5.0, 30.0])
    if dice.random() < 0.15:
        options["alibi_slopes"] = -torch.rand(heads)
    if dice.random() < 0.2:
        options["sinks"] = torch.randn(heads) * dice.choice([1.0, 1.0, 10.0])
    if dice.random() < 0.3:
        options["deterministic"] = True
    return options


def draw_shape(dice: Dice) -> dict[str, Any]:
    cache_dtype, dtype = dice.choice(FLOAT_DTYPES + EIGHT_BIT_DTYPES), dice.choice(FLOAT_DTYPES)
    if cache_dtype not in EIGHT_BIT_DTYPES and dice.random() < 0.6:
        cache_dtype = dtype
    kinds = ["none", "tensor", "scalar", "head"] + ["slot"] * 3 * (cache_dtype in EIGHT_BIT_DTYPES)
    kv_heads, head_size = dice.choice([1, 1, 2, 2, 3, 4, 8]), dice.choice(HEAD_SIZES)
    if dice.random() < 0.02:
        head_size = 576
    return {
        "num_heads": kv_heads * dice.choice([1, 1, 2, 3, 4, 4, 7, 8]),
        "num_kv_heads": kv_heads,
        "head_size": head_size,
        "head_size_v": head_size if dice.random() < 0.8 else dice.choice([*HEAD_SIZES, 512]),
        "block_size": dice.choice([1, 2, 3, 5, 8, 16, 16, 16, 32, 64]),
        "dtype": dtype,
        "cache_dtype": cache_dtype,
        "scale_kind": dice.choice(kinds) if dice.random() < 0.5 or cache_dtype in EIGHT_BIT_DTYPES else "none",
        "layout": dice.choice(["fused", *LAYOUTS]),
        "poison": dice.choice([NAN, NAN, INF, -INF, 0.0]),
        "tail": dice.choice([*GARBAGE, 0]),
    }


def draw_attention_case(dice: Dice) -> AttentionCase:
    limit, longest = (LARGE, 4000) if dice.random() < 0.02 else (MOST, 300)
    while True:
        shape = draw_shape(dice)
        q_lens, seq_lens = draw_batch(dice, shape["block_size"], longest)
        pairs = sum(max(1, q_len) * length for q_len, length in zip(q_lens, seq_lens, strict=True))
        if pairs * shape["num_heads"] * (shape["head_size"] + shape["head_size_v"]) <= limit:
            break
    case = op_cases.attention_case(q_lens, seq_lens, **shape, **draw_options(dice, shape["num_heads"]))
    return vary(dice, case, seq_lens)


def vary(dice: Dice, case: AttentionCase, seq_lens: list[int]) -> AttentionCase:
    """Tokens outside of the spans, shared blocks, strides, masks; entries and lengths out of range."""
    query, spans, table, lens = case.query, case.cu_seqlens_q, case.block_table, case.seq_lens
    if dice.random() < 0.25:
        before, after = dice.randint(0, 3), dice.randint(0, 3)
        query = torch.nn.functional.pad(query, (0, 0, 0, 0, before, after), value=NAN)
        spans = spans + before
    if len(seq_lens) > 1 and dice.random() < 0.15:  # a prefix of whole blocks, once for two rows
        one, other = dice.sample(range(len(seq_lens)), 2)
        shared = min(seq_lens[one], seq_lens[other]) // case.key_cache.shape[1]
        table[other, :shared] = table[one, :shared]
    if dice.random() < 0.2:
        holes = torch.rand(table.shape) < 0.3
        table = torch.where(holes, dice.choice(GARBAGE), table)
    if seq_lens and dice.random() < 0.05:
        row = dice.randrange(len(lens))
        lens[row] = dice.choice([-1, INT32_MIN])
        if readable(case):  # as far as the table goes, whatever its entries are
            lens[row] = dice.choice([INT32_MAX, table.shape[1] * case.key_cache.shape[1] + 1])
    if dice.random() < 0.3:  # rows of a wider table
        wider = torch.full((table.shape[0], table.shape[1] + 3), dice.choice(GARBAGE), dtype=torch.int32)
        wider[:, : table.shape[1]] = table
        table = wider[:, : table.shape[1]]
    options = dict(case.options)
    if dice.random() < 0.25:
        options["mask"] = draw_mask(dice, query, max(seq_lens, default=0))
    return dataclasses.replace(
        case,
        query=strided(dice, query),
        block_table=table,
        seq_lens=lens,
        cu_seqlens_q=spans,
        max_seqlen_q=case.max_seqlen_q + dice.choice([0, 0, 0, 1, 100]),
        options=options,
    )


def readable(case: AttentionCase) -> bool:
    """Whether slots without a token hold numbers too, so that a row may be longer than what was written."""
    tensors = (case.key_cache, case.value_cache, case.options["key_scale"], case.options["value_scale"])
    return all(bool(tensor.double().isfinite().all()) for tensor in tensors if tensor is not None)


def copied(case: AttentionCase, device: torch.device) -> AttentionCase:
    copies = Copies(device)
    fields = {field.name: copies.maybe(getattr(case, field.name)) for field in dataclasses.fields(case)}
    fields["options"] = {name: copies.maybe(value) for name, value in case.options.items()}
    return AttentionCase(**fields)


OutLse = tuple[Tensor, Tensor]
Drawn = TypeVar("Drawn")


def judged(dice: Dice, draw: Callable[[], Drawn], judge: Callable[[list[Drawn]], None]) -> int:
    """Judge one draw by the rule for tolerances; returns on how many draws it was judged in the end.

    A case of a few numbers may break the rule by luck, where every naive order happens to be exact. So a case that
    breaks it is judged again together with more draws of its numbers (shape, options and strides the same): the
    largest error of all, the first one's included, may be twice the largest naive one of all.
    """
    state, sample = dice.getstate(), [draw()]
    for draws in DRAWS:
        while len(sample) < draws:
            dice.setstate(state)
            torch.manual_seed(len(sample))
            sample.append(draw())
        try:
            judge(sample)
            break
        except AssertionError:
            if draws == DRAWS[-1]:
                raise
    return len(sample)


def paged_attention(dice: Dice, device: torch.device) -> int:
    """Both ops against float64; where it is promised, a row alone gives the same bits."""

    def draw() -> tuple[AttentionCase, Tensor, Tensor]:
        case = draw_attention_case(dice)
        out, lse = attend(case, device)
        if len(case.seq_lens) and case.options.get("deterministic") and dice.random() < 0.5:
            check_row_alone(dice, case, out, device)
        return case, out, lse

    return judged(dice, draw, lambda sample: follow_rule(sample, device))


def attend(case: AttentionCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """(out, lse) of a device on the CPU; without lse the op gives the same bits."""
    there = copied(case, device)
    out, lse = (tensor.cpu() for tensor in there.run(ops.paged_attention_with_lse))
    assert out.dtype == case.query.dtype
    assert lse.dtype == torch.float32
    assert torch.equal(there.run(ops.paged_attention).cpu(), out), "paged_attention and paged_attention_with_lse differ"
    if case.cu_seqlens_q.tolist() == list(range(out.shape[0] + 1)):  # one token of each row, as models have it
        one_token = dataclasses.replace(there, query=there.query[:, :, None]).run(ops.paged_attention)
        assert torch.equal(one_token[:, 0].cpu(), out), "one token of each row gives other bits"
    return out, lse


def check_row_alone(dice: Dice, case: AttentionCase, out: Tensor, device: torch.device) -> None:
    row = dice.randrange(len(case.seq_lens))
    begin, end = case.cu_seqlens_q[row : row + 2].tolist()
    alone = copied(case, device).row(row).run().cpu()
    assert torch.equal(alone, out[begin:end]), f"row {row} alone gives other bits"


def follow_rule(sample: list[tuple[AttentionCase, Tensor, Tensor]], device: torch.device) -> None:
    """`AttentionCase.check`, with no more naive computations than it takes: each can only raise what is allowed."""
    cases = [case for case, _, _ in sample]
    actual = together([(out, lse) for _, out, lse in sample])
    exact = together([case.in_dtype(torch.float64) for case in cases])
    stages: list[Callable[[], list[OutLse]]] = [
        lambda: [exact],
        lambda: [together([case.in_dtype(case.query.dtype) for case in cases])],
        lambda: every_order(cases, device),
    ]
    for number, naive in enumerate(stages):
        try:
            assert_follows(actual, naive(), exact)
            return
        except AssertionError:
            if number == len(stages) - 1:
                raise


def every_order(cases: list[AttentionCase], device: torch.device) -> list[OutLse]:
    """All naive computations of the rule, on the device."""
    naive = [zip(*copied(case, device).naive(), strict=True) for case in cases]
    return [together([(out.cpu(), lse.cpu()) for out, lse in one]) for one in zip(*naive, strict=True)]


def assert_follows(actual: OutLse, naive: Sequence[OutLse], exact: OutLse) -> None:
    for part in range(2):
        assert_at_most_twice_naive(actual[part], [one[part] for one in naive], exact[part])


def together(results: Sequence[OutLse]) -> OutLse:
    """The outs and the lses of several cases as one tensor each."""
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(lses)


def merge_attention_states(dice: Dice, device: torch.device) -> int:
    """Parts without keys hold garbage."""

    def judge(sample: list[tuple[OutLse, OutLse, OutLse]]) -> None:
        actual, naive, exact = (together(results) for results in zip(*sample, strict=True))
        assert_follows(actual, [naive], exact)

    return judged(dice, lambda: draw_merge(dice, device), judge)


def draw_merge(dice: Dice, device: torch.device) -> tuple[OutLse, OutLse, OutLse]:
    """What the op gives, what a naive computation gives, and what is right."""
    tokens, heads, size = dice.randint(0, 40), dice.choice([1, 2, 5, 8, 71]), dice.choice(HEAD_SIZES)
    dtype, spread = dice.choice(FLOAT_DTYPES), dice.choice([1.0, 3.0, 40.0])
    states = []
    for _ in range(2):
        out, lse = torch.randn(tokens, heads, size).to(dtype), torch.randn(tokens, heads) * spread
        if dice.random() < 0.5:
            empty = torch.rand(tokens, heads) < 0.3
            out[empty], lse[empty] = dice.choice([NAN, INF, 0.0]), -INF
        states += [out, lse]
    sinks = torch.randn(heads) * spread if dice.random() < 0.5 else None
    copies = Copies(device)
    there = [copies.of(state) for state in states]
    out, lse = ops.merge_attention_states(there[0], there[1], there[2], there[3], sinks=copies.maybe(sinks))
    naive, exact = (
        reference.merge_in(compute, states[0], states[1], states[2], states[3], sinks=sinks)
        for compute in (dtype, torch.float64)
    )
    return (out.cpu(), lse.cpu()), naive, exact


def find_shared_prefixes(dice: Dice, device: torch.device) -> None:
    """Rows that begin alike, by chance of few block numbers and by copies; the same numbers as the reference."""
    rows, columns, block_size = dice.randint(0, 12), dice.randint(1, 8), dice.choice([1, 3, 16])
    table = torch.randint(dice.choice([2, 40]), (rows, columns), dtype=torch.int32)
    for row in range(1, rows):
        if dice.random() < 0.7:
            begin = dice.randint(0, columns)
            table[row, :begin] = table[row - 1, :begin]
    if dice.random() < 0.3:
        table = torch.where(torch.rand(table.shape) < 0.2, dice.choice(GARBAGE), table)
    lens = torch.randint(columns * block_size + 1, (rows,), dtype=torch.int32)
    if rows and dice.random() < 0.1:
        lens[dice.randrange(rows)] = dice.choice([-1, INT32_MIN, INT32_MAX])
    q_lens = torch.randint(1 + dice.choice([1, 6]), (rows,))
    spans = torch.nn.functional.pad(q_lens.cumsum(0), (1, 0)).to(torch.int32) + dice.randint(0, 2)
    least, copies = dice.choice([1, block_size, 30]), Copies(device)
    right = reference.find_shared_prefixes(table, lens, spans, block_size, least)
    found = ops.find_shared_prefixes(copies.of(table), copies.of(lens), copies.of(spans), block_size, least)
    names = ("prefix_lens", "prefix_cu_seqlens_q", "suffix_table", "suffix_lens")
    for name, mine, theirs in zip(names, found, right, strict=True):
        assert torch.equal(mine.cpu(), theirs), f"{name} is {mine.tolist()}, expected {theirs.tolist()}"


# ---------------------------------------------------------------------------------------------------------------------
# Data movement


def reshape_and_cache(dice: Dice, device: torch.device) -> None:
    """Bits of the caches and scales, everything else in their storages included."""
    shape = draw_shape(dice)
    num_blocks, block_size, heads = dice.randint(1, 12), shape["block_size"], shape["num_kv_heads"]
    sizes = (shape["head_size"], shape["head_size_v"])
    caches = op_cases.make_caches(
        num_blocks,
        block_size,
        heads,
        *sizes,
        dtype=shape["cache_dtype"],
        layout=shape["layout"],
        poison=shape["poison"],
    )
    kind = shape["scale_kind"]
    scales = op_cases.make_scales(kind, num_blocks, block_size, heads, shape["cache_dtype"], "cpu")
    tokens = dice.randint(0, min(40, num_blocks * block_size))
    slots = torch.randperm(num_blocks * block_size)[:tokens]
    slots = torch.where(torch.rand(tokens) < 0.2, dice.choice([*GARBAGE_64, num_blocks * block_size]), slots)
    states = []
    for size, dtype in zip(sizes, [shape["dtype"], dice.choice([shape["dtype"], torch.float32])], strict=True):
        values = torch.randn(tokens, heads, size) * dice.choice([1.0, 1.0, 1e-3, 100.0, 1e4])
        if dice.random() < 0.15:
            values[torch.rand(values.shape) < 0.1] = dice.choice([NAN, INF, -INF, 0.0])
        if dice.random() < 0.1:
            values[torch.rand(tokens) < 0.5] = 0
        states.append(strided(dice, values.to(dtype)))
    right, there = Copies("cpu"), Copies(device)
    arguments = (*states, *caches, slots, *scales)
    expected, actual = ([copies.maybe(value) for value in arguments] for copies in (right, there))
    wide = torch.promote_types(states[0].dtype, states[1].dtype)
    reference.reshape_and_cache(expected[0].to(wide), expected[1].to(wide), *expected[2:])
    if dice.random() < 0.3:  # one token of each row, as models have it
        ops.reshape_and_cache(actual[0][:, :, None], actual[1][:, :, None], *actual[2:])
    else:
        ops.reshape_and_cache(*actual)
    names = ("key", "value", "key_cache", "value_cache", "slot_mapping", "key_scale", "value_scale")
    for name, mine, theirs in zip(names, actual, expected, strict=True):
        if theirs is not None:
            assert_same(mine, theirs, name)


def gather_blocks(dice: Dice, device: torch.device) -> None:
    shape = draw_shape(dice)
    lens = [draw_length(dice, shape["block_size"]) for _ in range(dice.randint(1, 4))]
    case = vary(dice, op_cases.attention_case([0] * len(lens), lens, **shape), lens)
    max_len = max(0, max(lens) + dice.choice([0, 0, 3, -2, -max(lens)]))
    options = {name: case.options[name] for name in ("key_scale", "value_scale")}
    options["dtype"] = dice.choice([None, *FLOAT_DTYPES])
    there = copied(case, device)
    right = reference.gather_blocks(
        case.key_cache, case.value_cache, case.block_table, case.seq_lens, max_len, **options
    )
    options |= {name: there.options[name] for name in ("key_scale", "value_scale")}
    dense = ops.gather_blocks(there.key_cache, there.value_cache, there.block_table, there.seq_lens, max_len, **options)
    for name, mine, theirs in zip(("key", "value"), dense, right, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert_same(mine.contiguous(), theirs, name)


def draw_pairs(dice: Dice, sources: int, destinations: int) -> Tensor:
    """int64 [n, 2], no destination twice, some pairs out of range."""
    chosen = torch.randperm(destinations)[: dice.randint(0, destinations)]
    pairs = torch.stack([torch.randint(sources, chosen.shape), chosen], 1)
    wrong = torch.rand(pairs.shape) < 0.15
    return torch.where(wrong, dice.choice([*GARBAGE_64, 10**4]), pairs)


def draw_lanes(dice: Dice, blocks: Sequence[int]) -> list[list[Tensor]]:
    """A list of like tensors for each number of blocks, several lanes of other shapes and dtypes in each."""
    lists: list[list[Tensor]] = [[] for _ in blocks]
    for _ in range(dice.randint(1, 3)):
        dtype = dice.choice(FLOAT_DTYPES + EIGHT_BIT_DTYPES)
        shape = dice.choice([(), (dice.randint(1, 70),), (dice.randint(1, 5), dice.randint(1, 4), dice.randint(1, 40))])
        fewer = dice.choice([0, 0, 0, 1, 5])  # blocks: what is out of range for one lane is not for another
        for lanes, count in zip(lists, blocks, strict=True):
            content = torch.randint(256, (max(1, count - fewer), *shape, dtype.itemsize), dtype=torch.uint8).view(
                dtype
            )[..., 0]
            if len(shape) == 3 and dice.random() < 0.5:  # other strides, as the views of a pool have
                content = content.transpose(1, 2).contiguous().transpose(1, 2)
            lanes.append(content)
    return lists


def copy_blocks(dice: Dice, device: torch.device) -> None:
    count = dice.randint(1, 30)
    (lanes,) = draw_lanes(dice, [count])
    pairs, cut = draw_pairs(dice, count, count), dice.randint(0, len(lanes))
    expected, actual = ([copies.of(lane) for lane in lanes] for copies in (Copies("cpu"), Copies(device)))
    reference.copy_blocks(expected[:cut], expected[cut:], pairs)
    ops.copy_blocks(actual[:cut], actual[cut:], pairs.to(device))
    for mine, theirs in zip(actual, expected, strict=True):
        assert_same(mine.view(torch.uint8) if mine.dim() else mine, theirs.view(torch.uint8), "cache")


def swap_blocks(dice: Dice, device: torch.device) -> None:
    counts = (dice.randint(1, 20), dice.randint(1, 20))
    lists = draw_lanes(dice, counts)
    pairs = draw_pairs(dice, *counts)
    places: list[torch.device] = [device, device]
    if device.type == "cuda" and dice.random() < 0.7:
        places[dice.randrange(2)] = torch.device("cpu")
    expected = [[Copies("cpu").of(lane) for lane in lanes] for lanes in lists]
    actual = [[Copies(place).of(lane) for lane in lanes] for place, lanes in zip(places, lists, strict=True)]
    if places[0] != places[1]:  # host memory must be pinned for a copy beside the host
        actual = [[lane if lane.is_cuda else lane.pin_memory() for lane in lanes] for lanes in actual]
    reference.swap_blocks(expected[0], expected[1], pairs)
    ops.swap_blocks(actual[0], actual[1], pairs if places[0] != places[1] else pairs.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for mine, theirs in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
        assert torch.equal(mine.cpu().view(torch.uint8), theirs.view(torch.uint8)), "blocks differ"


# ---------------------------------------------------------------------------------------------------------------------
# Allocator


def allocator(dice: Dice, device: torch.device) -> None:
    """A short random sequence of allocate, free and fork beside the reference: state and results after each call."""
    groups, rows, columns = dice.randint(1, 3), dice.randint(1, 6), dice.randint(1, 9)
    num_blocks, block_size = dice.randint(1, 40), dice.choice([1, 2, 3, 4, 16])
    shape = (rows, columns) if groups == 1 and dice.random() < 0.5 else (groups, rows, columns)
    # Columns that no row uses yet hold garbage: nothing may read them, and fork must not count them.
    table = torch.full(shape, dice.choice([-1, *GARBAGE, 0]), dtype=torch.int32)
    state = [
        table,
        torch.zeros(rows, dtype=torch.int32),
        torch.randperm(num_blocks, dtype=torch.int32),
        torch.zeros(num_blocks, dtype=torch.int32),
        torch.tensor([0, num_blocks, 0, 0]),
    ]
    copies = Copies(device)
    there = [copies.of(tensor) for tensor in state]
    for _ in range(8):
        draw = dice.choice([draw_allocate] * 3 + [draw_free, draw_fork])
        name, arguments, options = draw(dice, state, groups, block_size, columns)
        moved = [copies.maybe(value) for value in arguments]
        moved_options = {key: copies.maybe(value) for key, value in options.items()}
        before = [tensor.clone() for tensor in state]
        expected = attempted(getattr(reference, name), *state, *arguments, **options)
        actual = attempted(getattr(ops, name), *there, *moved, **moved_options)
        if not isinstance(expected, Exception):
            assert not isinstance(actual, Exception), f"{name}: {actual!r}"
            for mine, theirs in zip(actual or (), expected or (), strict=True):
                assert torch.equal(mine.cpu(), theirs), f"{name} gives {mine.tolist()}, expected {theirs.tolist()}"
        elif device.type == "cpu":
            assert type(actual) is type(expected), f"{name}: {actual!r}, expected {expected!r}"
            assert vars(actual) == vars(expected), f"{name}: {vars(actual)}, expected {vars(expected)}"
            assert all(torch.equal(old, now) for old, now in zip(before, state, strict=True))
        else:  # no exception there: no slots, and a count
            assert int(there[4][2]) == 1, f"{name} must count {expected!r}"
            assert all(bool((part == -1).all()) for part in actual)
            there[4][2:] = 0
        for place, mine, theirs in zip(("table", "lens", "ring", "counts", "counters"), there, state, strict=True):
            assert torch.equal(mine.cpu(), theirs), f"{name}, {place}: {mine.tolist()}, expected {theirs.tolist()}"


def attempted(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a function returns, or the error of the library that it raises."""
    try:
        return function(*arguments, **options)
    except (OutOfBlocksError, ValueError) as error:
        return error


Call = tuple[str, list[Any], dict[str, Any]]


def draw_allocate(dice: Dice, state: list[Tensor], groups: int, block_size: int, columns: int) -> Call:
    lens, position = state[1].tolist(), dice.randint(0, 2)
    spans = [position]
    for length in lens:
        room = columns * block_size - length
        position += min(dice.choice([0, 1, 1, 2, block_size, 2 * block_size + 1]), room + (dice.random() < 0.02))
        spans.append(position)
    options: dict[str, Any] = {}
    if dice.random() < 0.4:
        shares = [dice.randint(0, end - begin) for begin, end in itertools.pairwise(spans)]
        options["num_new"] = torch.tensor(shares, dtype=torch.int32)
    if dice.random() < 0.4:
        options["retain"] = torch.tensor([dice.choice([-1, 0, 3, 9]) for _ in range(groups)], dtype=torch.int32)
    num_tokens = position + dice.randint(0, 2)
    return "allocate", [torch.tensor(spans, dtype=torch.int32), num_tokens, block_size], options


def draw_free(dice: Dice, state: list[Tensor], groups: int, block_size: int, columns: int) -> Call:
    cuts = [dice.choice([0, dice.randint(0, length), length, INT32_MAX]) for length in state[1].tolist()]
    return "free", [torch.tensor(cuts, dtype=torch.int32), block_size], {}


def draw_fork(dice: Dice, state: list[Tensor], groups: int, block_size: int, columns: int) -> Call:
    rows = len(state[1])
    destinations = dice.sample(range(rows), dice.randint(0, rows))
    sources = [dice.randrange(rows) for _ in destinations]
    return "fork", [*(torch.tensor(values, dtype=torch.int64) for values in (sources, destinations)), block_size], {}


# ---------------------------------------------------------------------------------------------------------------------
# Nothing but garbage


def wild(dice: Dice, device: torch.device) -> None:
    """Index tensors of any content: no crash, and not a byte changes that the op does not write."""
    case = draw_attention_case(dice)

    def integers(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        bits = dice.choice([3, 8, 31 if dtype == torch.int32 else 62])
        return torch.randint(-(2**bits), 2**bits, shape, dtype=dtype)

    wrong = dataclasses.replace(
        case,
        block_table=integers(case.block_table.shape, torch.int32),
        seq_lens=integers(case.seq_lens.shape, torch.int32),
        cu_seqlens_q=integers(case.cu_seqlens_q.shape, torch.int32),
        max_seqlen_q=dice.choice([0, 1, case.max_seqlen_q, INT32_MAX]),
    )
    there = copied(wrong, device)
    there.run()
    scales = {name: there.options[name] for name in ("key_scale", "value_scale")}
    ops.gather_blocks(
        there.key_cache, there.value_cache, there.block_table, there.seq_lens, dice.randint(0, 9), **scales
    )
    assert_same(there.key_cache, case.key_cache, "key_cache")
    assert_same(there.value_cache, case.value_cache, "value_cache")
    rows, blocks = case.block_table.shape[0], dice.randint(1, 20)
    block_table = integers((rows, dice.randint(1, 9)), torch.int32).to(device)
    seq_lens = (integers((rows,), torch.int32) % 5).to(device)
    free_ring, ref_counts = (integers((blocks,), torch.int32).to(device) for _ in range(2))
    state = (block_table, seq_lens, free_ring, ref_counts, torch.randint(-(2**40), 2**40, (4,)).to(device))
    spans, cuts = (integers((count,), torch.int32).to(device) for count in (rows + 1, rows))
    source, destination = (integers((1,), torch.int64).to(device) for _ in range(2))
    calls: list[Callable[[], object]] = [
        lambda: ops.allocate(*state, spans, dice.randint(0, 20), 4),
        lambda: ops.free(*state, cuts, 4),
        lambda: ops.fork(*state, source, destination, 4),
    ]
    for call in calls:
        with contextlib.suppress(RuntimeError, ValueError):
            call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


OPS: dict[Callable[[Dice, torch.device], int | None], int] = {
    paged_attention: 46,
    find_shared_prefixes: 5,
    reshape_and_cache: 13,
    gather_blocks: 7,
    merge_attention_states: 7,
    allocator: 7,
    copy_blocks: 6,
    swap_blocks: 5,
    wild: 4,
}


def case_of(seed: int, number: int) -> tuple[Callable[[Dice, torch.device], int | None], Dice]:
    """What a case does, and its dice; torch's generator is set for it."""
    dice = Dice(f"{seed} {number}")
    torch.manual_seed(dice.getrandbits(63))
    (function,) = dice.choices(list(OPS), list(OPS.values()))
    return function, dice


def run(settings: Settings) -> Result:
    """Cases until their number, or time, is up."""
    result, device = Result("ops"), torch.device(settings.device)
    if settings.case is not None:
        function, dice = case_of(settings.seed, settings.case)
        print(f"case {settings.case} of seed {settings.seed}: {function.__name__}", flush=True)
        function(dice, device)
        result.counts["cases"] += 1
        return result
    for number in settings.numbers(CASES[device.type], SHARE):
        function, dice = case_of(settings.seed, number)
        result.counts["cases"] += 1
        result.counts[f"·{function.__name__}"] += 1
        try:
            draws = function(dice, device) or 1
        except Exception as error:
            result.fault(function.__name__, error, command(settings, "ops", f"--case {number}"))
            if result.num_faults >= MOST_FAULTS or "CUDA error" in str(error):  # which nothing runs after
                break
            continue
        if draws > 1:
            result.counts[f"·{function.__name__}, judged on {draws} draws"] += 1
    return result
