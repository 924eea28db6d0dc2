"""What a cache's capacity costs a decode step that uses little of it: it should cost nothing.

`python -m benchmarks.capacity [--device cuda] [--used 2048] [--capacities 4096 32768] [--layers 8]` first checks that
attention gives the same bits whatever the table's width is, then times, in turns within one run:

* attention alone in a graph, with the width of the table and the size of the pool apart, so that it shows which counts;
* `allocate` in a graph; host time of one eager call of each op;
* a step of a model of Llama-3-8B's shape (fewer layers), captured in a CUDA graph and eager, and which kernels of it
  take longer with the largest capacity.

A capacity is that of the whole pool. Ratios are to the first capacity. On a CPU nothing is captured.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.generate_cuda import llama
from benchmarks.timing import Call, gpu_time, graph_of, host_time
from torch_paged_kv import PagedKVCache, ops
from torch_paged_kv.layout import LayerShape, cache_views

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_SIZE = 16, 32, 8, 128
SHAPE = LayerShape(KV_HEADS, HEAD_SIZE, HEAD_SIZE)
ROUNDS = 5


def table_of(used: int, width: int, device: str) -> Tensor:
    """int32 [1, width]: the first blocks of a pool, as a fresh one gives them."""
    table = torch.full((1, width), -1, dtype=torch.int32, device=device)
    blocks = -(-used // BLOCK_SIZE)
    table[0, :blocks] = torch.arange(blocks)
    return table


def attention_calls(used: int, width: int, capacity: int, layers: int, device: str) -> list[Callable[[], Tensor]]:
    """A call for each layer: its own pool of `capacity` tokens, all with one table of `width` columns."""
    table = table_of(used, width, device)
    lens, spans = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([used], [0, 1]))
    query = torch.randn(1, HEADS, 1, HEAD_SIZE, device=device).to(torch.bfloat16)
    calls = []
    for _ in range(layers):
        lane = torch.empty(capacity // BLOCK_SIZE, SHAPE.elements(BLOCK_SIZE), dtype=torch.bfloat16, device=device)
        lane[: -(-used // BLOCK_SIZE)].normal_()
        views = cache_views(lane, SHAPE, BLOCK_SIZE)
        calls.append(lambda v=views: ops.paged_attention(query, *v, table, lens, spans, 1, scale=HEAD_SIZE**-0.5))
    return calls


def seconds_of(calls: Sequence[Call], device: str) -> float:
    if device != "cpu":
        return gpu_time(calls)
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)


def in_turns(measures: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median of each, measured one after the other in every round: what drifts, drifts for all."""
    results: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            results[name].append(measure())
    return {name: statistics.median(values) for name, values in results.items()}


def report(title: str, results: dict[str, float], unit: str = "us") -> None:
    first = next(iter(results.values()))
    scale = {"us": 1e6, "ms": 1e3}[unit]
    print(title)
    for name, value in results.items():
        print(f"    {name:40} {value * scale:9.2f} {unit}   x {value / first:.3f}", flush=True)


def check(used: int, capacities: Sequence[int], device: str) -> None:
    """The bits of attention do not depend on the width of the table nor on the shape of the query."""
    torch.manual_seed(1)
    lane = torch.randn(-(-used // BLOCK_SIZE), SHAPE.elements(BLOCK_SIZE), device=device).to(torch.bfloat16)
    views = cache_views(lane, SHAPE, BLOCK_SIZE)
    for rows in (1, 3, 40):
        query = torch.randn(rows, HEADS, 1, HEAD_SIZE, device=device).to(torch.bfloat16)
        lens = torch.randint(1, used + 1, (rows,), dtype=torch.int32, device=device)
        spans = torch.arange(rows + 1, dtype=torch.int32, device=device)
        widths = [capacity // BLOCK_SIZE for capacity in capacities] + [100_000]
        outs = []
        for width in widths:
            table = table_of(used, width, device).repeat(rows, 1)
            for shaped in (query, query.squeeze(2)):
                out = ops.paged_attention(shaped, *views, table, lens, spans, 1, scale=HEAD_SIZE**-0.5)
                outs.append(out.view(rows, HEADS, HEAD_SIZE))
        assert all(torch.equal(out, outs[0]) for out in outs), f"{rows} rows"
    print("check: bits of 1, 3 and 40 rows are those of the narrowest table")


def time_attention(used: int, capacities: Sequence[int], layers: int, device: str) -> None:
    kinds = {
        f"table of {width}, pool of {capacity}": attention_calls(used, width // BLOCK_SIZE, capacity, layers, device)
        for capacity in capacities
        for width in capacities
    }
    report(
        f"attention, {layers} layers in turn, {used} keys, GPU time of a call",
        in_turns({name: lambda c=calls: seconds_of(c, device) for name, calls in kinds.items()}, 3),
    )


class Allocator:
    """A row of `used` tokens and its pool. Nothing here grows: each call gives back what it took."""

    def __init__(self, used: int, capacity: int, device: str) -> None:
        num_blocks = capacity // BLOCK_SIZE
        ints = {"dtype": torch.int32, "device": device}
        held = -(-used // BLOCK_SIZE)
        table = torch.full((1, 1, num_blocks), -1, **ints)  # type: ignore[call-overload]
        table[0, 0, :held] = torch.arange(held)
        self.state = (
            table,
            torch.tensor([used], **ints),  # type: ignore[call-overload]
            torch.arange(num_blocks, **ints).roll(-held),  # type: ignore[call-overload]
            (torch.arange(num_blocks, device=device) < held).to(torch.int32),
            torch.tensor([0, num_blocks - held, 0, 0], device=device),
        )
        self.spans, self.retain = torch.tensor([0, 1], **ints), torch.tensor([-1], **ints)  # type: ignore[call-overload]
        self.used = torch.tensor([used], **ints)  # type: ignore[call-overload]

    def allocate(self) -> None:
        ops.allocate(*self.state, self.spans, 1, BLOCK_SIZE, retain=self.retain)

    def step(self) -> None:
        self.allocate()
        ops.free(*self.state, self.used, BLOCK_SIZE)


def time_allocate(used: int, capacities: Sequence[int], device: str) -> None:
    allocators = {f"capacity {capacity}": Allocator(used, capacity, device) for capacity in capacities}
    report(
        "allocate and free of a token, GPU time",
        in_turns({name: lambda a=a: seconds_of([a.step] * 20, device) for name, a in allocators.items()}),
    )


def time_host(used: int, capacity: int, device: str) -> None:
    """Host time of one eager call: the stream runs behind."""
    (attend,) = attention_calls(used, capacity // BLOCK_SIZE, capacity, 1, device)
    lane = torch.zeros(capacity // BLOCK_SIZE, SHAPE.elements(BLOCK_SIZE), dtype=torch.bfloat16, device=device)
    caches = cache_views(lane, SHAPE, BLOCK_SIZE)
    key = torch.randn(1, KV_HEADS, 1, HEAD_SIZE, device=device).to(torch.bfloat16)
    slots, allocator = torch.tensor([used], device=device), Allocator(used, capacity, device)
    calls: dict[str, Call] = {
        "torch.add": lambda: key + key,
        "paged_attention": attend,
        "reshape_and_cache": lambda: ops.reshape_and_cache(key, key, *caches, slots),
        "allocate and free": allocator.step,
    }
    report("host time of an eager call", {name: host_time(call, 200) for name, call in calls.items()})


# ---- A model's step ----


def step_of(model: Any, used: int, capacity: int, device: str) -> Callable[[], Tensor]:
    """A decode step behind a prompt of `used` tokens."""
    cache = PagedKVCache(model.config, num_tokens=capacity)
    ids = torch.randint(5, 31000, (1, used), device=device)
    for part in ids.split(1024, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    token, position = ids[:, -1:], torch.full((1, 1), used, device=device)
    return lambda: model(token, past_key_values=cache, position_ids=position, logits_to_keep=1).logits


def wall_time(step: Callable[[], Any], device: str, count: int = 10) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def kernel_times(step: Callable[[], Any], count: int = 10) -> dict[str, float]:
    """Microseconds of a step by kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    averages: Any = profiled.key_averages()
    return {event.key: event.self_device_time_total / count for event in averages}


def report_kernels(few: dict[str, float], many: dict[str, float]) -> None:
    print("kernels that differ most between the first and the last capacity, us of a captured step")
    names = sorted(few.keys() | many.keys(), key=lambda name: -abs(many.get(name, 0) - few.get(name, 0)))
    for name in names[:6]:
        print(f"    {name[:70]:70} {few.get(name, 0):9.1f} {many.get(name, 0):9.1f}")
    print(f"    {'sum of all kernels':70} {sum(few.values()):9.1f} {sum(many.values()):9.1f}", flush=True)


def time_model(used: int, capacities: Sequence[int], layers: int, device: str) -> None:
    model = llama(layers, device, vocab_size=32000)
    steps = {f"capacity {capacity}": step_of(model, used, capacity, device) for capacity in capacities}
    report(
        f"eager step of {layers} layers, wall time",
        in_turns({name: lambda s=step: wall_time(s, device) for name, step in steps.items()}),
        "ms",
    )
    if device == "cpu":
        return
    graphs = {name: graph_of([step]) for name, step in steps.items()}
    report(
        f"captured step of {layers} layers, wall time",
        in_turns({name: lambda g=graph: wall_time(g.replay, device, 20) for name, graph in graphs.items()}),
        "ms",
    )
    kernels = [kernel_times(graph.replay) for graph in graphs.values()]
    report_kernels(kernels[0], kernels[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--used", type=int, default=2048)
    parser.add_argument("--capacities", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--layers", type=int, default=8)
    a = parser.parse_args()
    if a.device != "cpu":
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    parts: list[Callable[[], None]] = [
        lambda: time_attention(a.used, a.capacities, 4 * a.layers, a.device),
        lambda: time_allocate(a.used, a.capacities, a.device),
        lambda: time_model(a.used, a.capacities, a.layers, a.device),
    ]
    if a.device != "cpu":
        parts.insert(2, lambda: time_host(min(a.used, 256), a.capacities[0], a.device))
    with torch.no_grad():
        check(a.used, a.capacities, a.device)  # wrong results are not timed
        for part in parts:
            try:
                part()
            except Exception:  # one failure must not cost the other measurements their device time
                traceback.print_exc(limit=-3)


if __name__ == "__main__":
    main()
