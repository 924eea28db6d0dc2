"""torch.compile of a step that allocates, copies, writes and attends: one graph, and no copy of a cache."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import pytest
import torch
from op_cases import fused_views, int32
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from torch_paged_kv import ops

BLOCK_SIZE, NUM_BLOCKS, NUM_SEQS, MAX_BLOCKS = 4, 37, 3, 9
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, HEAD_SIZE_V = 4, 2, 8, 16
STORAGE_SHAPE = (NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE * (HEAD_SIZE + HEAD_SIZE_V))


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


class Step(nn.Module):
    """Two layers over one pool. Storages and allocator state are buffers; caches are views made where they are used."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for layer in range(2):
            self.register_buffer(f"storage{layer}", torch.full(STORAGE_SHAPE, float("nan"), dtype=dtype))
        self.register_buffer("block_table", torch.full((NUM_SEQS, MAX_BLOCKS), -1, dtype=torch.int32))
        self.register_buffer("seq_lens", torch.zeros(NUM_SEQS, dtype=torch.int32))
        self.register_buffer("free_ring", torch.arange(NUM_BLOCKS, dtype=torch.int32))
        self.register_buffer("ref_counts", torch.zeros(NUM_BLOCKS, dtype=torch.int32))
        self.register_buffer("counters", torch.tensor([0, NUM_BLOCKS, 0, 0]))
        self.to(device)

    def state(self) -> tuple[Tensor, ...]:
        return self.block_table, self.seq_lens, self.free_ring, self.ref_counts, self.counters

    def storages(self) -> list[Tensor]:
        return [self.storage0, self.storage1]

    def forward(self, x: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> Tensor:
        """x: [num_tokens, NUM_HEADS, HEAD_SIZE] -> [num_tokens, NUM_HEADS, HEAD_SIZE]"""
        slots, pairs = ops.allocate(*self.state(), cu_seqlens_q, x.shape[0], BLOCK_SIZE)
        ops.copy_blocks(self.storages(), [], pairs)
        for storage in self.storages():
            key_cache, value_cache = fused_views(storage, BLOCK_SIZE, HEAD_SIZE)
            key = torch.sin(x[:, ::2])
            value = torch.cat([key, key.cos()], -1)
            ops.reshape_and_cache(key, value, key_cache, value_cache, slots)
            out = ops.paged_attention(
                x, key_cache, value_cache, self.block_table, self.seq_lens, cu_seqlens_q, max_seqlen_q, scale=0.3
            )
            x = x + out[..., :HEAD_SIZE] * out[..., HEAD_SIZE:]
        return x


def step_inputs(q_lens: list[int], device: torch.device) -> tuple[Tensor, Tensor, int]:
    edges = int32([sum(q_lens[:i]) for i in range(NUM_SEQS + 1)], device)
    return torch.randn(sum(q_lens), NUM_HEADS, HEAD_SIZE, device=device), edges, max(q_lens)


def assert_same_state(a: Step, b: Step) -> None:
    for (name, x), (_, y) in zip(a.named_buffers(), b.named_buffers()):
        assert torch.equal(x.nan_to_num(9e9), y.nan_to_num(9e9)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_decode_steps_compile_once(dtype: torch.dtype, device: torch.device) -> None:
    """Growing lengths, other tables, forks in between: one graph without a break, equal to eager."""
    eager = Step(device, dtype)
    eager(*step_inputs([5, 3, 8], device))
    compiled_step = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(compiled_step, fullgraph=True, backend=counter)
    for i in range(12):
        inputs = step_inputs([1, 1, 1], device)
        expected = eager(*inputs)
        torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-5, atol=1e-5)
        if i % 4 == 3:  # the next step must copy a shared block before it writes
            rows = torch.tensor([0]), torch.tensor([1 + i % 2])
            for step in (eager, compiled_step):
                ops.fork(*step.state(), *(row.to(device) for row in rows), BLOCK_SIZE)
    assert torch.equal(eager.block_table, compiled_step.block_table)
    assert torch.equal(eager.seq_lens, compiled_step.seq_lens)
    assert torch.equal(eager.counters, compiled_step.counters)
    assert counter.frame_count == 1


def test_dynamic_number_of_tokens(device: torch.device) -> None:
    """Prefill, chunks and mixed batches: one static graph, then one dynamic one, whatever the lengths."""
    eager = Step(device)
    compiled_step = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(compiled_step, fullgraph=True, backend=counter)
    for q_lens in ([5, 3, 8], [1, 4, 0], [2, 2, 2], [0, 1, 5], [3, 3, 1]):
        inputs = step_inputs(q_lens, device)
        torch.testing.assert_close(compiled(*inputs), eager(*inputs), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


def cache_sized_buffers(code: str) -> list[str]:
    """Lines that make a tensor as large as a storage, whatever its shape."""
    lines = []
    for line in code.splitlines():
        shape = re.search(r"empty_strided\w*\(\(([\d, ]+)\)", line)
        numel = 1
        for size in re.findall(r"\d+", shape[1]) if shape else []:
            numel *= int(size)
        if shape and numel >= NUM_BLOCKS * NUM_KV_HEADS * BLOCK_SIZE * HEAD_SIZE:
            lines.append(line)
    return lines


def test_no_cache_sized_clone(device: torch.device) -> None:
    step = Step(device)
    inputs = step_inputs([1, 1, 1], device)
    _, codes = run_and_get_code(torch.compile(step, fullgraph=True), *inputs)
    code = "\n".join(codes)
    for name in ("allocate", "copy_blocks", "reshape_and_cache", "paged_attention"):
        assert f"torch.ops.paged_kv.{name}" in code
    assert cache_sized_buffers(code) == []
    assert "clone" not in code


def test_the_clone_detector_detects() -> None:
    """Reading a cache before its first write in one graph does clone it, and that is seen."""
    storage = torch.zeros(STORAGE_SHAPE)

    def step(storage: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> Tensor:
        before = storage.sum(0)
        ops.reshape_and_cache(key, value, *fused_views(storage, BLOCK_SIZE, HEAD_SIZE), slots)
        return before + storage.clone().sum(0)

    key, value = torch.ones(1, NUM_KV_HEADS, HEAD_SIZE), torch.ones(1, NUM_KV_HEADS, HEAD_SIZE_V)
    _, codes = run_and_get_code(torch.compile(step, fullgraph=True), storage, key, value, torch.tensor([3]))
    assert int(storage.sum()) == NUM_KV_HEADS * (HEAD_SIZE + HEAD_SIZE_V)
    assert cache_sized_buffers("\n".join(codes)) or "clone" in "\n".join(codes)


def test_caches_as_inputs(device: torch.device) -> None:
    """Caches given as arguments, plain and per layer, are written in place as well."""

    def step(caches: list[tuple[Tensor, Tensor]], x: Tensor, slots: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        spans = torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device)
        for key_cache, value_cache in caches:
            ops.reshape_and_cache(x[:, :2], x[:, 2:], key_cache, value_cache, slots)
            x = ops.paged_attention(x, key_cache, value_cache, table, lens, spans, 1, scale=1.0)
        return x

    def inputs() -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor, Tensor, Tensor]:
        torch.manual_seed(1)
        caches = [tuple(torch.zeros(33, 4, 2, 8, device=device) for _ in range(2)) for _ in range(2)]
        x = torch.randn(2, 4, 8, device=device)
        table = int32([3, 7, 30, 2], device).reshape(2, 2)
        return caches, x, torch.tensor([13, 123], device=device), table, int32([2, 4], device)  # type: ignore[return-value]

    expected_caches, actual_caches = inputs(), inputs()
    expected = step(*expected_caches)
    actual, codes = run_and_get_code(torch.compile(step, fullgraph=True), *actual_caches)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(actual_caches[0], expected_caches[0]):
        torch.testing.assert_close(a[0], b[0])
        torch.testing.assert_close(a[1], b[1])
    assert re.search(r"empty_strided\w*\(\(33,", "\n".join(codes)) is None


def test_source_may_be_a_clone(device: torch.device) -> None:
    """A graph that stores a copy of the cache's own rows must not alias it with the cache (B23)."""

    def step(cache: Tensor, slots: Tensor) -> Tensor:
        snapshot = cache.clone()
        ops.reshape_and_cache(snapshot[0] * 2, snapshot[1], cache, cache.new_zeros(cache.shape), slots)
        return snapshot

    cache = torch.arange(48.0, device=device).reshape(3, 4, 2, 2)
    expected_cache, before = cache.clone(), cache.clone()
    slots = torch.tensor([8, 9, 10, 11], device=device)
    step(expected_cache, slots)
    assert torch.equal(torch.compile(step, fullgraph=True)(cache, slots), before)
    assert torch.equal(cache, expected_cache)
    assert torch.equal(cache[2], before[0] * 2)


def test_functional_ops(device: torch.device) -> None:
    """gather_blocks, LSE and merging in one graph, with symbolic sizes."""

    def step(query: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> tuple[Tensor, ...]:
        spans = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
        state = ops.paged_attention_with_lse(query, cache, cache, table, lens, spans, 1, scale=0.5)
        merged = ops.merge_attention_states(*state, *state, sinks=query.new_zeros(query.shape[1]))
        return *merged, *ops.gather_blocks(cache, cache, table, lens, 2 * query.shape[0], dtype=torch.float16)

    cache = torch.randn(5, 4, 2, 8, device=device)
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for tokens in (2, 3, 4):
        query = torch.randn(tokens, 4, 8, device=device)
        table = torch.randint(0, 5, (tokens, 2), dtype=torch.int32).to(device)
        inputs = (query, cache, table, int32(list(range(3, 3 + tokens)), device))
        for actual, expected in zip(compiled(*inputs), step(*inputs)):
            torch.testing.assert_close(actual, expected)


def test_free_and_fork_in_a_graph(device: torch.device) -> None:
    eager = Step(device)
    eager(*step_inputs([5, 3, 8], device))
    compiled_step = copy.deepcopy(eager)

    def reorder(step: Step, source: Tensor, destination: Tensor, new_lens: Tensor) -> Tensor:
        ops.fork(*step.state(), source, destination, BLOCK_SIZE)
        ops.free(*step.state(), new_lens, BLOCK_SIZE)
        return step.counters[1] - step.counters[0]

    arguments = torch.tensor([2, 0], device=device), torch.tensor([0, 1], device=device), int32([6, 2, 0], device)
    assert torch.compile(reorder, fullgraph=True)(compiled_step, *arguments) == reorder(eager, *arguments)
    assert_same_state(eager, compiled_step)


def test_grad_mode_is_traced(device: torch.device) -> None:
    """With grad mode on and nothing that requires grad, the wrapper's check is no graph break."""
    step = Step(device)
    with torch.enable_grad():
        torch.compile(step, fullgraph=True, backend="eager")(*step_inputs([1, 1, 1], device))
    assert step.seq_lens.tolist() == [1, 1, 1]


def test_out_of_blocks_in_a_graph() -> None:
    """On CPU the op raises from within the graph, and state is as before."""
    step = Step(torch.device("cpu"))
    compiled = torch.compile(step, fullgraph=True)
    compiled(*step_inputs([20, 20, 20], torch.device("cpu")))
    before = copy.deepcopy(step)
    with pytest.raises((RuntimeError, ValueError), match=r"out of blocks|max_blocks"):
        compiled(*step_inputs([30, 30, 30], torch.device("cpu")))
    assert_same_state(before, step)


def test_export(device: torch.device) -> None:
    """torch.export of a module that owns its cache."""
    step = Step(device)
    inputs = step_inputs([1, 1, 1], device)
    program = torch.export.export(copy.deepcopy(step), inputs)
    torch.testing.assert_close(program.module()(*inputs), step(*inputs))
