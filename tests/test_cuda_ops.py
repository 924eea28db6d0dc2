"""What only a GPU can show: captured graphs, device against host, pools past 2^32 elements, a second device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from op_cases import assert_same_bits, attention_case, captured, fused_views, int32, prefix_sum, slots_of
from torch import Tensor

from torch_paged_kv import ops, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BLOCK_SIZE = 16


class Rows:
    """Allocator state, its tensors views of one buffer so that one comparison tells of all."""

    def __init__(self, num_groups: int, num_seqs: int, max_blocks: int, num_blocks: int, device: str) -> None:
        shapes = [(num_groups, num_seqs, max_blocks), (num_seqs,), (num_blocks,), (num_blocks,)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.counters = torch.tensor([0, num_blocks, 0, 0], dtype=torch.int64, device=device)
        self.buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = [part.view(shape) for part, shape in zip(self.buffer.split(sizes), shapes, strict=True)]
        self.block_table, self.seq_lens, self.free_ring, self.ref_counts = parts
        self.block_table.fill_(-1)
        self.free_ring.copy_(torch.arange(num_blocks))

    def state(self) -> tuple[Tensor, ...]:
        return self.block_table, self.seq_lens, self.free_ring, self.ref_counts, self.counters


# ---------------------------------------------------------------------------------------------------------------------
# Graphs


@pytest.mark.parametrize("head_size", [64, 72, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_replay_with_other_lengths_rows_and_tables(head_size: int, dtype: torch.dtype) -> None:
    """A whole step, captured at 8 rows of equal length, replayed with 3 live ones that grow across every border."""
    num_seqs, heads, kv_heads, max_blocks = 8, 8, 2, 80
    num_blocks = num_seqs * max_blocks
    rows = Rows(1, num_seqs, max_blocks, num_blocks, "cuda")
    storage = torch.full((num_blocks, kv_heads, BLOCK_SIZE * 2 * head_size), float("nan"), device="cuda").to(dtype)
    key_cache, value_cache = fused_views(storage, BLOCK_SIZE, head_size)
    cu = prefix_sum([1] * num_seqs, "cuda")
    num_new = torch.ones(num_seqs, dtype=torch.int32, device="cuda")
    query = torch.zeros(num_seqs, heads, head_size, dtype=dtype, device="cuda")
    key, value = (torch.zeros(num_seqs, kv_heads, head_size, dtype=dtype, device="cuda") for _ in range(2))
    scale = head_size**-0.5

    def attend() -> Tensor:
        return ops.paged_attention(
            query, key_cache, value_cache, rows.block_table[0], rows.seq_lens, cu, 1, scale=scale
        )

    def step() -> Tensor:
        slots, pairs = ops.allocate(*rows.state(), cu, num_seqs, BLOCK_SIZE, num_new=num_new)
        ops.copy_blocks([storage], [], pairs)
        ops.reshape_and_cache(key, value, key_cache, value_cache, slots[0])
        return attend()

    def fill() -> None:
        for tensor in (query, key, value):
            tensor.copy_(torch.randn(tensor.shape))

    fill()
    step()
    graph, out = captured(step)
    ops.free(*rows.state(), torch.zeros(num_seqs, dtype=torch.int32, device="cuda"), BLOCK_SIZE)

    live = [1, 4, 6]
    prompt = 600
    spans = prefix_sum([prompt if row in live else 0 for row in range(num_seqs)], "cuda")
    tokens = prompt * len(live)
    slots, _ = ops.allocate(*rows.state(), spans, tokens, BLOCK_SIZE)
    prompt_kv = [torch.randn(tokens, kv_heads, head_size, device="cuda").to(dtype) for _ in range(2)]
    ops.reshape_and_cache(*prompt_kv, key_cache, value_cache, slots[0])
    cut = [3, 500, 600]
    new_lens = int32([dict(zip(live, cut, strict=True)).get(row, 0) for row in range(num_seqs)], "cuda")
    ops.free(*rows.state(), new_lens, BLOCK_SIZE)

    num_new.copy_(int32([int(row in live) for row in range(num_seqs)]))
    for number in range(70):
        if number == 30:  # other rows and tables
            ops.fork(*rows.state(), torch.tensor([6], device="cuda"), torch.tensor([0], device="cuda"), BLOCK_SIZE)
            num_new[0] = 1
        fill()
        graph.replay()
        assert torch.equal(out, attend())
        exact, _ = reference.attention_in(
            torch.float64, query, key_cache, value_cache, rows.block_table[0], rows.seq_lens, cu, 1, scale=scale
        )
        error = (out.double() - exact).norm() / exact.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5), f"step {number}: {error}"
        assert not out[[2, 3, 5, 7]].any()
    assert rows.seq_lens.tolist() == [670, 73, 0, 0, 570, 0, 670, 0]
    assert rows.counters[2] == 0


def test_replay_after_running_out() -> None:
    """In a graph the status sticks, nothing changes, and the tokens of the failed step get no slot."""
    rows = Rows(1, 2, 4, 4, "cuda")
    cu = prefix_sum([BLOCK_SIZE, BLOCK_SIZE], "cuda")
    graph, slots = captured(lambda: ops.allocate(*rows.state(), cu, 2 * BLOCK_SIZE, BLOCK_SIZE)[0])
    for _ in range(2):
        graph.replay()
        assert (slots >= 0).all()
    before = rows.buffer.clone()
    for number in (1, 2):
        graph.replay()
        assert (slots == -1).all()
        assert torch.equal(rows.buffer, before)
        assert rows.counters.tolist() == [4, 4, number, 2]


# ---------------------------------------------------------------------------------------------------------------------
# Launches that overlap


LATE_COPY = """
extern "C" __global__ void late_copy(int* target, const int* source, int count, int clocks) {
  asm volatile("griddepcontrol.launch_dependents;");
  const long long begin = clock64();
  while (clock64() - begin < clocks) {}
  for (int i = threadIdx.x; i < count; i += blockDim.x) target[i] = source[i];
}
"""


@functools.cache
def late_copy_kernel() -> Callable[..., None]:
    return torch.cuda._compile_kernel(LATE_COPY, "late_copy")


def side_by_side(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """An int32 buffer that holds all tensors, and views of it that equal them, 64 bytes aligned."""
    sizes = [-(-tensor.nbytes // 64) * 16 for tensor in tensors]
    buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=tensors[0].device)
    views = []
    for tensor, part in zip(tensors, buffer.split(sizes), strict=True):
        view = part.view(torch.uint8)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        views.append(view.copy_(tensor))
    return buffer, views


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="launches do not overlap"
)
@pytest.mark.parametrize("ops_in_step", ["attend", "write", "write and attend"])
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [1, 5, 40, 300], [300]])
@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"cache_dtype": torch.int8, "scale_kind": "slot"}, {"head_size": 36}]
)
def test_inputs_written_late_by_a_predecessor(ops_in_step: str, q_lens: list[int], options: dict[str, object]) -> None:
    """The launch before lets others start at once and writes the inputs a millisecond later: none may read earlier."""
    lens = [3000, 1700, 900, 1200][: len(q_lens)]
    case = attention_case(q_lens, lens, dtype=torch.bfloat16, num_heads=8, device="cuda", **options)  # type: ignore[arg-type]
    last = torch.cat([slots_of(case.block_table, row, n - 1, n, BLOCK_SIZE) for row, n in enumerate(lens)]).cuda()
    key, value = (torch.randn(len(lens), 2, case.query.shape[-1], device="cuda").bfloat16() for _ in range(2))
    inputs = [case.query, case.block_table, case.seq_lens, case.cu_seqlens_q, last, key, value]
    buffer, (query, table, seq_lens, cu_seqlens_q, slots, key, value) = side_by_side(inputs)
    case = dataclasses.replace(case, query=query, block_table=table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    scales = [case.options["key_scale"], case.options["value_scale"]]
    written = [case.key_cache, case.value_cache, *(scale for scale in scales if scale is not None)]

    def step() -> list[Tensor]:
        if "write" in ops_in_step:
            ops.reshape_and_cache(key, value, case.key_cache, case.value_cache, slots, *scales)
        return [ops.paged_attention(*case.tensors(), **case.options)] if "attend" in ops_in_step else []

    begin, source = [tensor.clone() for tensor in written], buffer.clone()
    expected, expected_written = step(), [tensor.clone() for tensor in written]
    for tensor, before in zip(written, begin, strict=True):
        tensor.copy_(before)
    buffer.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late_copy_kernel()(grid=(1, 1, 1), block=(128, 1, 1), args=[buffer, source, buffer.numel(), 2_000_000])
        out = step()
    torch.cuda.synchronize()
    assert_same_bits([*written, *out], [*expected_written, *expected])


# ---------------------------------------------------------------------------------------------------------------------
# Device against host


@pytest.mark.parametrize(("num_groups", "steps"), [(1, 100_000), (2, 20_000)])
def test_allocator_on_the_device_equals_the_host(num_groups: int, steps: int) -> None:
    """Random allocate, free and fork: state and results equal after each step."""
    num_seqs, max_blocks, num_blocks, block_size = 6, 12, 48, 4
    host, device = (Rows(num_groups, num_seqs, max_blocks, num_blocks, name) for name in ("cpu", "cuda"))
    draw = torch.Generator().manual_seed(5)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=draw, dtype=torch.int32)

    spans = torch.nn.functional.pad(integers(7, steps, num_seqs).cumsum(1, dtype=torch.int32), (1, 0))
    shares = integers(7, steps, num_seqs).minimum(spans.diff(dim=1))
    lens = integers(max_blocks * block_size, steps, num_seqs)
    lens[torch.rand(steps, num_seqs, generator=draw) < 0.6] = 2**31 - 1
    order = torch.rand(steps, num_seqs, generator=draw).argsort(1)
    source = integers(num_seqs, steps, 2).long()
    kinds, retains = integers(10, steps).tolist(), integers(3, steps).tolist()
    on_device = [x.cuda() for x in (spans, shares, lens, order, source)]
    retain = [torch.tensor(x, dtype=torch.int32) for x in ([-1, 9], [6, -1], [-1, -1])]
    retain_on_device = [x[:num_groups].cuda() for x in retain]
    num_tokens = spans[:, -1].tolist()
    failures = 0

    for step in range(steps):
        results = []
        for rows, tensors, kept in (
            (host, (spans, shares, lens, order, source), retain[retains[step]][:num_groups]),
            (device, on_device, retain_on_device[retains[step]]),
        ):
            span, share, length, permutation, sources = (x[step] for x in tensors)
            if kinds[step] < 6:
                try:
                    result = ops.allocate(*rows.state(), span, num_tokens[step], block_size, num_new=share, retain=kept)
                except (RuntimeError, ValueError):
                    failures += 1
                    result = None
                results.append(result)
            elif kinds[step] < 8:
                ops.free(*rows.state(), length, block_size)
            else:
                ops.fork(*rows.state(), sources, permutation[:2], block_size)
        assert torch.equal(host.buffer, device.buffer.cpu()), f"step {step}"
        assert device.counters[:3].tolist() == [*host.counters[:2].tolist(), failures], f"step {step}"
        if results and results[0] is not None:
            assert all(torch.equal(a, b.cpu()) for a, b in zip(*results, strict=True)), f"step {step}"
    assert 0 < failures < steps // 2


# ---------------------------------------------------------------------------------------------------------------------
# Large pools


@pytest.mark.parametrize("elements", [2**31, 2**32])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pools_past_32_bits(elements: int, cache_dtype: torch.dtype) -> None:
    kv_heads, head_size = 8, 128
    row = kv_heads * BLOCK_SIZE * 2 * head_size
    num_blocks = elements // row + 40
    if torch.cuda.mem_get_info()[0] < 1.3 * num_blocks * row * cache_dtype.itemsize:
        pytest.skip("needs more memory")
    storage = torch.empty(num_blocks, kv_heads, BLOCK_SIZE * 2 * head_size, dtype=cache_dtype, device="cuda")
    key_cache, value_cache = fused_views(storage, BLOCK_SIZE, head_size)
    lens = [300, 77]
    table = torch.full((2, 19), -1, dtype=torch.int32)
    table[0], table[1, :5] = torch.arange(num_blocks - 19, num_blocks), torch.arange(num_blocks - 30, num_blocks - 25)
    table = table.cuda()
    positions = [torch.arange(n, device="cuda") for n in lens]
    slots = torch.cat([table[i].long()[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in enumerate(positions)])
    key, value = (torch.randn(sum(lens), kv_heads, head_size, device="cuda").bfloat16() for _ in range(2))
    storage.view(torch.uint8)[0] = 0
    ops.reshape_and_cache(key, value, key_cache, value_cache, slots)
    assert not storage.view(torch.uint8)[0].any()
    gathered = ops.gather_blocks(key_cache, value_cache, table, int32(lens, "cuda"), 300, dtype=torch.bfloat16)
    for dense, new in zip(gathered, (key, value), strict=True):
        stored = new.to(cache_dtype).to(torch.bfloat16)
        assert torch.equal(dense[0].transpose(0, 1), stored[:300])
        assert torch.equal(dense[1, :, -77:].transpose(0, 1), stored[300:])

    small = table.clone()
    small[table >= 0] -= num_blocks - 30
    query = torch.randn(2, 32, head_size, device="cuda").bfloat16()
    near = fused_views(storage[num_blocks - 30 :].clone(), BLOCK_SIZE, head_size)
    rest = (int32(lens, "cuda"), prefix_sum([1, 1], "cuda"), 1)
    far_out = ops.paged_attention(query, key_cache, value_cache, table, *rest, scale=0.1)
    near_out = ops.paged_attention(query, *near, small, *rest, scale=0.1)
    assert torch.equal(far_out, near_out)

    ops.copy_blocks([storage], [], torch.tensor([[num_blocks - 1, num_blocks - 40]], device="cuda"))
    assert torch.equal(storage.view(torch.uint8)[-1], storage.view(torch.uint8)[-40])


@pytest.mark.parametrize("chain", ["forward", "backward", "tree", "cycle", "many", "mixed"])
def test_copies_that_chain(chain: str) -> None:
    """Every read before any write, however long the chains and wherever they close."""
    many = torch.randperm(3000).tolist()
    pairs = {
        "forward": [(i, i + 1) for i in range(40)],
        "backward": [(i + 1, i) for i in range(40)],
        "tree": [(0, 1), (1, 2), (1, 3), (3, 4), (3, 5), (5, 6), (0, 7)],
        "cycle": [(0, 1), (1, 2), (2, 0), (5, 6), (6, 5), (2, 9)],
        "many": list(zip(many[:1400], many[1400:2800], strict=True)),
        "mixed": [(3, 3), (-1, 4), (7, -1), (10, 11), (11, 12), (20, 21), (9999, 2)],
    }[chain]
    caches = [torch.randn(3000, 24, device="cuda"), torch.randn(3000, 5, 3, device="cuda").half()]
    expected = [cache.clone() for cache in caches]
    for cache, copy in zip(caches, expected, strict=True):
        for source, destination in pairs:
            if 0 <= source < 3000 and 0 <= destination < 3000:
                copy[destination] = cache[source]
    ops.copy_blocks(caches[:1], caches[1:], torch.tensor(pairs, device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Devices


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ops_on_a_device_that_is_not_current() -> None:
    assert torch.cuda.current_device() == 0
    case = attention_case([1, 5], [70, 9], dtype=torch.bfloat16, device="cuda:1")
    out, _ = case.check()
    assert out.device == torch.device("cuda:1")
    rows = Rows(1, 2, 4, 8, "cuda:1")
    slots, _ = ops.allocate(*rows.state(), prefix_sum([3, 2], "cuda:1"), 5, BLOCK_SIZE)
    assert slots.tolist() == [[0, 1, 2, 16, 17]]
    assert torch.cuda.current_device() == 0


def test_side_streams() -> None:
    """Work goes to the current stream: what it writes is there for work queued behind it, and for none before."""
    case = attention_case([1] * 4, [4000] * 4, dtype=torch.bfloat16, device="cuda")
    expected = case.run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        case.query.mul_(2)
        doubled = case.run()
    torch.cuda.current_stream().wait_stream(stream)
    case.query.div_(2)
    assert torch.equal(case.run(), expected)
    assert not torch.equal(doubled, expected)


@pytest.mark.parametrize("q_len", [1, 4, 40])
def test_deterministic_does_not_depend_on_neighbours(q_len: int) -> None:
    case = attention_case(
        [q_len, 1, 33, 2], [3000, 17, 200, 900], dtype=torch.bfloat16, num_heads=8, device="cuda", deterministic=True
    )
    out = case.run()
    for row in range(4):
        begin, end = case.cu_seqlens_q[row : row + 2].tolist()
        assert torch.equal(case.row(row).run(), out[begin:end]), f"row {row}"


# ---------------------------------------------------------------------------------------------------------------------
# 8-bit caches on the tensor cores


def eight_bit_pool(dtype: torch.dtype, num_blocks: int, kv_heads: int, head_size: int) -> Tensor:
    values = torch.randn(num_blocks, kv_heads, BLOCK_SIZE * 2 * head_size, device="cuda")
    return (values * 40).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else values.to(dtype)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_kind", ["none", "tensor", "head", "slot", "tiny slot", "huge slot"])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_eight_bit_caches(cache_dtype: torch.dtype, query_dtype: torch.dtype, scale_kind: str, head_size: int) -> None:
    """Ragged rows, one token and several; what a slot does not hold, or nobody sees, is NaN where the dtype has one."""
    heads, kv_heads, lens, q_lens, max_blocks = 8, 2, [700, 17, 1, 333], [1, 3, 1, 2], 48
    num_blocks = len(lens) * max_blocks
    storage = eight_bit_pool(cache_dtype, num_blocks, kv_heads, head_size)
    table = torch.randperm(num_blocks).view(len(lens), max_blocks).to("cuda", torch.int32)
    if cache_dtype != torch.int8:
        used = torch.zeros(num_blocks, BLOCK_SIZE, dtype=torch.bool, device="cuda")
        for row, length in zip(table.tolist(), lens, strict=True):
            for position in range(length):
                used[row[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
        slots = storage.view(torch.uint8).view(num_blocks, kv_heads, 2, BLOCK_SIZE, head_size)
        slots.masked_fill_(~used[:, None, None, :, None], 0x7F)
    key_cache, value_cache = fused_views(storage, BLOCK_SIZE, head_size)
    unit = 1 / 40 if cache_dtype == torch.int8 else 1.0
    shape = {"none": None, "tensor": (1,), "head": (kv_heads,)}.get(scale_kind, (num_blocks, BLOCK_SIZE, kv_heads))
    # What float16 can hold as a result is less: there the tiny ones are only far below the largest.
    tiny = 1e-7 if query_dtype == torch.bfloat16 else 0.05
    size = {"tiny slot": tiny, "huge slot": 1e4 if query_dtype == torch.bfloat16 else 100.0}.get(scale_kind, 1.0)
    key_scale = None if shape is None else (torch.rand(shape, device="cuda") + 0.1) * unit
    value_scale = None if shape is None else (torch.rand(shape, device="cuda") + 0.1) * unit * size
    query = (torch.randn(sum(q_lens), heads, head_size, device="cuda") * (0.05 if shape is None else 1)).to(query_dtype)
    arguments = (query, key_cache, value_cache, table, int32(lens, "cuda"), prefix_sum(q_lens, "cuda"), max(q_lens))
    options = {"scale": head_size**-0.5, "key_scale": key_scale, "value_scale": value_scale}
    out, lse = ops.paged_attention_with_lse(*arguments, **options)
    exact, exact_lse = reference.attention_in(torch.float64, *arguments, **options)
    # One rounding of the result, and half of it for the float16 the weights are held in.
    allowed = 1.5 * torch.finfo(query_dtype).eps / 2
    assert (out.double() - exact).norm() <= allowed * exact.norm()
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-5, rtol=1e-5)
