"""Times every op on the GPU at hand: `python -m benchmarks.gpu [--out DIR] [--peers] [--only decode ops ...]`.

GPU time inside captured graphs over rotating tables, ceilings measured in the same run. Writes gpu.json, gpu.md and,
if matplotlib is installed, gpu.png: what each decode shape reaches under the roof of the memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from benchmarks import cuda_decode, cuda_ops, cuda_prefill, peers, timing

MULTI_QUERY_SHAPES = [s for s in cuda_decode.SHAPES if s[0] == (32, 8, 128) and s[1:3] in ((1, 8192), (8, 8192))]
PEER_SHAPES = [s[:3] for s in cuda_decode.SHAPES if s[0] == (32, 8, 128) and s[2] < 32768]


def machine() -> dict[str, str]:
    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0],
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "commit": output("git", "rev-parse", "--short", "HEAD"),
    }


def markdown(results: dict[str, Any]) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in results["machine"].items()), ""]
    lines += [", ".join(f"{name} {value:.0f}" for name, value in results["ceilings"].items()), ""]
    for name, rows in results.items():
        if name in ("machine", "ceilings") or not rows:
            continue
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += [f"## {name}", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        lines += ["| " + " | ".join(text(row.get(column)) for column in columns) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if value >= 10 else f"{value:.3g}"
    return "" if value is None else str(value)


def draw(results: dict[str, Any], path: Path) -> None:
    """Decode shapes over the bytes they read: bandwidth reached, and the roof that a launch and the memory leave."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, axes = plt.subplots(figsize=(8, 5))
    for heads in dict.fromkeys(row["heads"] for row in results["decode"]):
        rows = [row for row in results["decode"] if row["heads"] == heads and row["head_size"] == 128]
        rows.sort(key=lambda row: row["us"] * row["GB/s"])
        axes.plot([row["us"] * row["GB/s"] * 1e-3 for row in rows], [row["GB/s"] for row in rows], "o-", label=heads)
    axes.axhline(results["ceilings"]["read GB/s"], color="black", linestyle="--", label="plain read")
    axes.set(xscale="log", xlabel="MB of K and V", ylabel="GB/s", title=f"Decode on {results['machine']['gpu']}")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--only", nargs="*", default=["decode", "multi_query", "eight_bit", "prefill", "ops"])
    parser.add_argument("--peers", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    read = timing.read_ceiling()
    results: dict[str, Any] = {
        "machine": machine(),
        "ceilings": {
            "read GB/s": read * 1e-9,
            "copy GB/s (counted once)": timing.copy_ceiling() * 1e-9,
            "bf16 TFLOP/s": timing.matmul_ceiling() * 1e-12,
        },
    }
    if "decode" in arguments.only:
        results["decode"] = cuda_decode.run(read)
    if "multi_query" in arguments.only:
        results["multi_query"] = cuda_decode.run(read, (2, 4, 16), MULTI_QUERY_SHAPES)
    if "eight_bit" in arguments.only:
        results["eight_bit"] = cuda_decode.run_eight_bit(read)
    if "prefill" in arguments.only:
        results["prefill"] = cuda_prefill.run(results["ceilings"]["bf16 TFLOP/s"] * 1e12)
    if "ops" in arguments.only:
        results["ops"] = cuda_ops.run()
    if arguments.peers:
        results["peers"] = peers.run(PEER_SHAPES, read)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    (arguments.out / "gpu.md").write_text(markdown(results))
    if "decode" in results:
        draw(results, arguments.out / "gpu.png")
    print(markdown(results))


if __name__ == "__main__":
    main()
