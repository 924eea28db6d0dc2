"""What the block size does to speed on a CPU: ``python -m benchmarks.block_size [--picture FILE.svg]``.

Attention of one decode step, of a prompt's chunk, and the writing of new tokens, for each block size in one run, in
shuffled rounds over caches that do not fit into the processor's own. Counted is the CPU time of one thread, for a
machine that does other things too. A ratio is the time of a block size over that of 16, the median over the rounds.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torch_paged_kv import huge_pages, ops

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BASE = 16
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
BATCH, CONTEXT, CHUNK = 8, 2048, 256
DTYPE = torch.bfloat16
WORK = {
    "decode": f"one step of {BATCH} rows at {CONTEXT:,} tokens",
    "prompt": f"{CHUNK} tokens behind {CONTEXT - CHUNK:,}",
    "write": f"{BATCH * CHUNK:,} tokens",
}

Calls = dict[str, Callable[[], object]]


def caches(num_blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Key and value cache [num_blocks, block_size, KV_HEADS, HEAD_SIZE], laid out as a pool of the library."""
    storage = huge_pages.advise(torch.empty(num_blocks, KV_HEADS, 2, block_size, HEAD_SIZE, dtype=DTYPE))
    storage.normal_()
    key_cache, value_cache = storage.transpose(2, 3).transpose(1, 2).unbind(3)
    return key_cache, value_cache


def calls(block_size: int) -> Calls:
    """The three kinds of work over a shuffled block table."""
    num_blocks = BATCH * CONTEXT // block_size
    key_cache, value_cache = caches(num_blocks, block_size)
    block_table = torch.randperm(num_blocks).int().view(BATCH, -1)
    slots = (block_table[:, :, None].long() * block_size + torch.arange(block_size)).view(BATCH, -1)
    slots = slots[:, -CHUNK:].flatten()
    new = torch.randn(BATCH * CHUNK, KV_HEADS, HEAD_SIZE, dtype=DTYPE)

    def attention(rows: int, length: int) -> Callable[[], Tensor]:
        query = torch.randn(rows * length, HEADS, HEAD_SIZE, dtype=DTYPE)
        lens = torch.full((rows,), CONTEXT, dtype=torch.int32)
        spans = torch.arange(rows + 1, dtype=torch.int32) * length
        table, scale = block_table[:rows].contiguous(), HEAD_SIZE**-0.5
        return lambda: ops.paged_attention(query, key_cache, value_cache, table, lens, spans, length, scale=scale)

    return {
        "decode": attention(BATCH, 1),
        "prompt": attention(1, CHUNK),
        "write": lambda: ops.reshape_and_cache(new, new, key_cache, value_cache, slots),
    }


def measure(rounds: int) -> dict[str, dict[int, list[float]]]:
    """CPU seconds of each kind of work, block size and round."""
    work = {block_size: calls(block_size) for block_size in BLOCK_SIZES}
    seconds: dict[str, dict[int, list[float]]] = {kind: {size: [] for size in BLOCK_SIZES} for kind in WORK}
    for turn in range(rounds + 1):  # the first one warms up
        for kind in WORK:
            for block_size in random.sample(BLOCK_SIZES, len(BLOCK_SIZES)):
                begin = time.thread_time()
                work[block_size][kind]()
                if turn:
                    seconds[kind][block_size].append(time.thread_time() - begin)
    return seconds


def ratios(times: dict[int, list[float]]) -> dict[int, float]:
    """Time over that of the base: the median over the rounds."""
    return {
        size: statistics.median(a / b for a, b in zip(of_size, times[BASE], strict=True))
        for size, of_size in times.items()
    }


def processor() -> str:
    """Name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def draw(results: dict[str, dict[int, float]], path: Path) -> None:
    """The curve of waste against those of time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for (kind, of_sizes), colour in zip(results.items(), ("#0072b2", "#d55e00", "#009e73"), strict=True):
        axes.plot(list(of_sizes), list(of_sizes.values()), "o-", color=colour, label=f"{kind}: {WORK[kind]}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="block size", ylabel="time, times that of 16", xticks=BLOCK_SIZES, xticklabels=BLOCK_SIZES)
    axes.set_ylim(0, None)
    waste = axes.twinx()
    waste.plot(BLOCK_SIZES, [(size - 1) / 2 for size in BLOCK_SIZES], "--", color="#777777", label="waste")
    waste.set(ylabel="slots wasted by a sequence, on average")
    handles, labels = (a + b for a, b in zip(axes.get_legend_handles_labels(), waste.get_legend_handles_labels()))
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    results = {}
    print(f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, 1 thread, torch {torch.__version__}\n")
    print("| work | ms at 16 |", " | ".join(map(str, BLOCK_SIZES)), "|")
    print("| --- " * (len(BLOCK_SIZES) + 2) + "|")
    for kind, times in measure(arguments.rounds).items():
        results[kind] = ratios(times)
        cells = (f"{ratio:.2f}" for ratio in results[kind].values())
        print(f"| {kind}: {WORK[kind]} | {statistics.median(times[BASE]) * 1e3:.3g} |", " | ".join(cells), "|")
    if arguments.picture:
        draw(results, arguments.picture)


if __name__ == "__main__":
    main()
