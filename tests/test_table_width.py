"""What an op does follows from the lengths: a table of ten times the columns changes no bit of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import models
import pytest
import torch
from op_cases import AttentionCase, attention_case, int32, prefix_sum
from torch import Tensor

from torch_paged_kv import PagedKVCache, ops

FOREIGN = 2**30  # in columns that nobody may read


def widened(table: Tensor, columns: int, entry: int = FOREIGN) -> Tensor:
    """The same table [..., num_seqs, max_blocks] with `columns` more."""
    return torch.nn.functional.pad(table, (0, columns), value=entry)


def with_table(case: AttentionCase, table: Tensor) -> AttentionCase:
    return dataclasses.replace(case, block_table=table)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize(
    ("q_lens", "seq_lens"),
    [([1], [200]), ([1] * 40, [*range(3, 40), 0, 300, 17]), ([1, 7, 40, 0], [90, 7, 130, 5])],
    ids=["alone", "many rows", "mixed"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(
    dtype: torch.dtype, q_lens: list[int], seq_lens: list[int], window: int, deterministic: bool, device: torch.device
) -> None:
    case = attention_case(
        q_lens, seq_lens, dtype=dtype, layout="fused", window_left=window, deterministic=deterministic, device=device
    )
    columns = case.block_table.shape[1]
    out, lse = case.run(ops.paged_attention_with_lse)
    # On CUDA 10,000 columns are more lines of the cache than are brought near beforehand for a row of many.
    for added in (9 * columns, 10_000):
        wide = with_table(case, widened(case.block_table, added))
        wide_out, wide_lse = wide.run(ops.paged_attention_with_lse)
        assert torch.equal(wide_out, out)
        assert torch.equal(wide_lse, lse)
        view = with_table(case, wide.block_table[:, :columns])  # rows far apart, few columns
        assert torch.equal(view.run(), out)


def test_gather(device: torch.device) -> None:
    case = attention_case([1, 1], [37, 90], device=device)
    tensors = case.tensors()[1:5]
    wide = (*tensors[:2], widened(case.block_table, 500), tensors[3])
    for narrow_rows, wide_rows in zip(ops.gather_blocks(*tensors, 90), ops.gather_blocks(*wide, 90), strict=True):
        assert torch.equal(narrow_rows, wide_rows)


def test_allocator(device: torch.device) -> None:
    """Steps, a window that slides, a fork and a cut: the same entries, lengths, slots, queue and counts."""
    block_size, num_blocks, columns = 4, 60, 12

    def run(width: int) -> list[Tensor]:
        table = torch.full((2, 3, width), -1, dtype=torch.int32, device=device)
        state = [
            table,
            int32([0, 0, 0], device),
            torch.arange(num_blocks, dtype=torch.int32, device=device),
            torch.zeros(num_blocks, dtype=torch.int32, device=device),
            torch.tensor([0, num_blocks, 0, 0], device=device),
        ]
        results: list[Tensor] = []
        for lens in ([9, 4, 1], [1, 1, 1], [3, 0, 2], [1, 1, 1]):
            spans = prefix_sum(lens, device)
            results += ops.allocate(*state, spans, sum(lens), block_size, retain=int32([-1, 5], device))
        rows = torch.tensor([0, 2], device=device)
        ops.fork(*state, rows, rows.flip(0), block_size)
        ops.free(*state, int32([7, 2, 30], device), block_size)
        assert bool((table[:, :, columns:] == -1).all())
        return [*results, table[:, :, :columns].clone(), *state[1:]]

    for narrow, wide in zip(run(columns), run(10 * columns), strict=True):
        assert torch.equal(narrow, wide)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_cache_of_ten_times_the_capacity(device: torch.device) -> None:
    """Logits of a prompt and of the steps after it, bit for bit; and what a step asks of the allocator."""
    model: Any = models.tiny("llama").to(device)
    batch = {name: tensor.to(device) for name, tensor in models.prompts([models.PROMPT, 5]).items()}
    results = []
    for num_blocks in (40, 400):
        cache = PagedKVCache(model.config, block_size=4, num_blocks=num_blocks)
        with torch.no_grad():
            logits = [model(**batch, past_key_values=cache).logits]
            for _ in range(9):
                token = logits[-1][:, -1:].argmax(-1)
                logits.append(model(token, past_key_values=cache).logits)
        results.append((torch.cat(logits, dim=1), cache.table(), cache.stats()["held_blocks"]))
    (logits, table, held), (other_logits, other_table, other_held) = results
    assert torch.equal(logits, other_logits)
    assert torch.equal(table, other_table)
    assert held == other_held


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_fork_has_the_tables_width_and_takes_the_used_columns(device: torch.device) -> None:
    """A compiled graph of the cache serves its fork; both go on as one of them alone would."""
    model: Any = models.tiny("llama").to(device)
    batch = {name: tensor.to(device) for name, tensor in models.prompts([models.PROMPT, 5]).items()}
    with torch.no_grad():
        cache = PagedKVCache(model.config, block_size=4, num_blocks=90)
        model(**batch, past_key_values=cache)
        fork, repeated = cache.fork(), cache.fork()
        repeated.batch_repeat_interleave(3)
        widths = {one._rows.block_table.shape[2] for one in (cache, fork, repeated) if one._rows is not None}
        assert widths == {90}
        token = batch["input_ids"][:, -1:]
        for _ in range(9):
            cache_logits, fork_logits = (model(token, past_key_values=one).logits for one in (cache, fork))
            repeated_logits = model(token.repeat_interleave(3, dim=0), past_key_values=repeated).logits
            assert torch.equal(cache_logits, fork_logits)
            torch.testing.assert_close(repeated_logits, cache_logits.repeat_interleave(3, dim=0))
            token = cache_logits[:, -1:].argmax(-1)
    cache.pool.check(*(state for one in (cache, fork, repeated) for state in one.tables()))
    assert cache.stats()["tokens"] == 2 * 9 + models.PROMPT + 5
