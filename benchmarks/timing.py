"""How the GPU benchmarks time: captured graphs that walk over fresh data, and ceilings measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
WARM_UP = 0.02  # seconds


def graph_of(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Capture the calls, one after the other, after running each once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def gpu_time(calls: Sequence[Call], replays: int = 7) -> float:
    """Median seconds of GPU time per call, in a graph that makes all `calls`: they should touch more than the L2.

    It is run for WARM_UP seconds before: the first milliseconds after an idle moment are up to a tenth slower.
    """
    graph = graph_of(calls)
    begun, runs = time.perf_counter(), 0
    while runs < 2 or time.perf_counter() - begun < WARM_UP:
        graph.replay()
        torch.cuda.synchronize()
        runs += 1
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / len(calls))
    return statistics.median(times)


def host_time(call: Call, count: int = 400, rounds: int = 5) -> float:
    """Median seconds of host time per eager call; the GPU must be faster than that, or its queue fills up."""
    for _ in range(20):
        call()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - begin) / count)
        torch.cuda.synchronize()
    return statistics.median(times)


def read_ceiling(bytes_read: int = 8 << 30) -> float:
    """Bytes per second of a plain reduction over device memory: the fastest that PyTorch has."""
    data = torch.ones(bytes_read // 8, dtype=torch.int64, device="cuda")
    return bytes_read / gpu_time([lambda: torch.sum(data)] * 3)


def copy_ceiling(bytes_read: int = 4 << 30) -> float:
    """Bytes per second that an elementwise kernel reads while it writes as many."""
    source = torch.ones(bytes_read // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return bytes_read / gpu_time([lambda: torch.neg(source, out=target)] * 3)


def matmul_ceiling(size: int = 8192) -> float:
    """Operations per second of a bfloat16 matrix product of random data."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * size**3 / gpu_time([lambda: torch.mm(a, b)] * 3)
