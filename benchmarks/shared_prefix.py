"""Shared prefixes read once against each row on its own: `python -m benchmarks.shared_prefix [--out DIR]`.

Results are checked first. CUDA: GPU time in captured graphs over rotating tables, as in `benchmarks.gpu`. CPU: medians
over rounds in which all variants take turns; of one thread (`OMP_NUM_THREADS=1`) the CPU time is counted, so that a
machine may do other things too. Prints tables and, with `--out`, writes shared_prefix.json and shared_prefix.md there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.pools import BLOCK_SIZE, Pool
from benchmarks.timing import Call, gpu_time
from torch_paged_kv import ops, reference
from torch_paged_kv.shared_prefix import MIN_SAVED, SharedPrefixes, shared_prefix_attention

LAYERS = 32  # of a step, which looks for shared prefixes once
NEVER = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """`runs` runs of rows that share `shared` tokens each; every row has `own` more."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    rows: int
    shared: int
    own: int
    runs: int = 1

    def __str__(self) -> str:
        runs = f", {self.runs} runs" if self.runs > 1 else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} x {self.head_size} {str(self.dtype).removeprefix('torch.')}"
        return f"{self.rows} x ({self.shared} + {self.own}){runs}, {heads}"

    @property
    def pool_key(self) -> tuple[int, int, torch.dtype]:
        return self.num_kv_heads, self.head_size, self.dtype


def bf16(num_heads: int, rows: int, shared: int, own: int, runs: int = 1) -> Shape:
    return Shape(num_heads, 8, 128, torch.bfloat16, rows, shared, own, runs)


CUDA_SHAPES = [
    bf16(32, 64, 8192, 256),  # the target: 4 times as fast
    bf16(32, 8, 2048, 64),
    bf16(32, 64, 4096, 256, 16),
    bf16(32, 64, 0, 8448),  # nothing is shared: what it costs
    bf16(32, 64, 0, 512),
    bf16(32, 8, 0, 1024),
    *(bf16(32, 64, shared, 256, 32) for shared in (64, 256, 1024)),  # pairs of rows: from where on it pays
    bf16(64, 64, 8192, 256),
    bf16(64, 64, 0, 8448),
]
CPU_SHAPES = [
    bf16(32, 16, 4096, 64),
    bf16(32, 4, 4096, 64),
    bf16(32, 16, 256, 64),
    bf16(32, 16, 64, 64),
    bf16(32, 16, 0, 1024),
    Shape(32, 8, 128, torch.float32, 16, 4096, 64),
    Shape(9, 3, 64, torch.float32, 16, 4096, 64),
    Shape(9, 3, 64, torch.float32, 16, 0, 512),
]


class Case:
    """A shape over a pool. Tables come from one random order of the blocks, the next where the last ended."""

    def __init__(self, shape: Shape, pool: Pool) -> None:
        self.shape, self.pool, self.device = shape, pool, pool.storage.device
        self.query = torch.randn(shape.rows, shape.num_heads, shape.head_size, device=self.device).to(shape.dtype)
        total = shape.shared + shape.own
        self.lens = torch.full((shape.rows,), total, dtype=torch.int32, device=self.device)
        self.spans = torch.arange(shape.rows + 1, dtype=torch.int32, device=self.device)
        self.scale = shape.head_size**-0.5
        self._order = torch.randperm(pool.num_blocks)
        self._next = 0

    def table(self, *, apart: bool = False) -> Tensor:
        """int32 [rows, blocks]; `apart`: of rows that hold no block together."""
        s = self.shape
        shared, own = s.shared // BLOCK_SIZE, -(-(s.shared + s.own) // BLOCK_SIZE) - s.shared // BLOCK_SIZE
        first = self._take(s.rows if apart else s.runs, shared)
        first = first if apart else first.repeat_interleave(s.rows // s.runs, 0)
        return torch.cat([first, self._take(s.rows, own)], 1).to(self.device, torch.int32)

    def _take(self, rows: int, blocks: int) -> Tensor:
        if self._next + rows * blocks > len(self._order):
            self._next = 0
        begin, self._next = self._next, self._next + rows * blocks
        return self._order[begin : self._next].view(rows, blocks)

    def find(self, table: Tensor, min_saved: int = MIN_SAVED) -> SharedPrefixes:
        return SharedPrefixes.find(table, self.lens, self.spans, BLOCK_SIZE, min_saved)

    def plain(self, table: Tensor) -> Tensor:
        caches = self.pool.key_cache, self.pool.value_cache
        return ops.paged_attention(self.query, *caches, table, self.lens, self.spans, 1, scale=self.scale)

    def two_parts(self, shared: SharedPrefixes) -> Tensor:
        caches = self.pool.key_cache, self.pool.value_cache
        return shared_prefix_attention(self.query, *caches, shared, 1, scale=self.scale)

    def part(self, shared: SharedPrefixes, prefix: bool) -> tuple[Tensor, Tensor]:
        tensors = (
            (shared.block_table, shared.prefix_lens, shared.prefix_cu_seqlens_q, self.shape.rows)
            if prefix
            else (shared.suffix_table, shared.suffix_lens, shared.cu_seqlens_q, 1)
        )
        caches = self.pool.key_cache, self.pool.value_cache
        return ops.paged_attention_with_lse(self.query, *caches, *tensors, scale=self.scale, causal=not prefix)

    def check(self) -> float:
        """Largest relative error of the first, a middle and the last row against float64; the plain op's bounds it."""
        table = self.table()
        shared = self.find(table, 1)
        assert bool(shared.prefix_lens.any()) == (self.shape.shared > 0 and self.shape.rows > self.shape.runs)
        out, plain = self.two_parts(shared), self.plain(table)
        errors, allowed = [], []
        for row in {0, self.shape.rows // 2, self.shape.rows - 1}:
            exact, _ = reference.attention_in(
                torch.float64, self.query[row : row + 1], self.pool.key_cache, self.pool.value_cache,
                table[row : row + 1], self.lens[row : row + 1], self.spans[:2], 1, scale=self.scale,
            )  # fmt: skip
            errors.append(float((out[row].double() - exact[0]).norm() / exact.norm()))
            allowed.append(3 * float((plain[row].double() - exact[0]).norm() / exact.norm()) + 1e-6)
        assert all(error <= most for error, most in zip(errors, allowed)), f"{self.shape}: {errors}, allowed {allowed}"
        whole = float((out.double() - plain.double()).norm() / plain.double().norm())
        assert whole < (2e-2 if self.shape.dtype == torch.bfloat16 else 1e-4), (
            f"{self.shape}: {whole} from the plain op"
        )
        return max(errors)


def variants_of(case: Case, tables: int) -> dict[str, list[Call]]:
    """What is timed, as calls over so many tables."""
    apart = [case.table(apart=True) for _ in range(tables)]
    alike = [case.table() for _ in range(tables)]
    found = [case.find(table, 1) for table in alike]
    nothing = [case.find(table, NEVER) for table in alike]
    states = [(case.part(shared, True), case.part(shared, False)) for shared in found]
    return {
        "plain, no block shared": [lambda t=table: case.plain(t) for table in apart],
        "plain": [lambda t=table: case.plain(t) for table in alike],
        "two parts": [lambda s=shared: case.two_parts(s) for shared in found],
        "two parts, prefixes empty": [lambda s=shared: case.two_parts(s) for shared in nothing],
        "prefix": [lambda s=shared: case.part(s, True) for shared in found],
        "suffix": [lambda s=shared: case.part(s, False) for shared in found],
        "merge": [lambda p=prefix, s=suffix: ops.merge_attention_states(*p, *s) for prefix, suffix in states],
        "find": [lambda t=table: case.find(t) for table in alike],
    }


def cpu_times(variants: dict[str, list[Call]], rounds: int = 15) -> dict[str, float]:
    """Median seconds of each variant; all take turns in every round."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for place, (name, calls) in enumerate(variants.items()):  # none finds in the cache what another just read
            begin = clock()
            calls[(number + place) % len(calls)]()
            if number > 0:
                times[name].append(clock() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def row_of(case: Case, tables: int) -> dict[str, Any]:
    error = case.check()
    variants = variants_of(case, tables)
    on_cpu = case.device.type == "cpu"
    seconds = cpu_times(variants) if on_cpu else {name: gpu_time(calls) for name, calls in variants.items()}
    row: dict[str, Any] = {"shape": str(case.shape)} | {f"{name}, us": value * 1e6 for name, value in seconds.items()}
    step = seconds["find"] + LAYERS * seconds["two parts"]
    row[f"plain / shared, step of {LAYERS} layers"] = LAYERS * seconds["plain"] / step
    row["... of plain, no block shared"] = LAYERS * seconds["plain, no block shared"] / step
    row["relative error"] = error
    return row


def run(device: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    pool, key = None, None
    for shape in CUDA_SHAPES if device == "cuda" else CPU_SHAPES:
        if key != shape.pool_key:
            pool = None  # before the next is made
            key, num_bytes = shape.pool_key, (10 << 30) if device == "cuda" else (600 << 20)
            pool = Pool.random(num_bytes, shape.num_kv_heads, shape.head_size, BLOCK_SIZE, shape.dtype, device)
        assert pool is not None
        rows.append(row_of(Case(shape, pool), 10 if device == "cuda" else 5))
        print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    def text(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    return "\n".join(lines + ["| " + " | ".join(map(text, row.values())) + " |" for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = run(arguments.device)
    print("\n" + markdown(rows))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
        results = {"device": name, "torch": torch.__version__, "rows": rows}
        (arguments.out / "shared_prefix.json").write_text(json.dumps(results, indent=1) + "\n")
        (arguments.out / "shared_prefix.md").write_text(f"{name}, torch {torch.__version__}\n\n{markdown(rows)}\n")


if __name__ == "__main__":
    main()
