"""A model of Llama-3-8B's shape: time to first token with a known beginning, and swaps against the link's speed.

`python -m benchmarks.prefix_cuda [--layers 32] [--out DIR]` prints a table and writes prefix.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate_cuda import llama, prompt
from torch_paged_kv import PagedKVCache, PrefixCache
from torch_paged_kv.offload import HostTier

SHARED, NEW = 4096, 64


def fastest(call: Callable[[], Any], runs: int = 5) -> float:
    """Milliseconds of the fastest run."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


BLOCKS = 12 * (SHARED + NEW) // 16


def answer(model: Any, shared: torch.Tensor, rows: int, cache: PagedKVCache) -> None:
    """The first token of prompts that begin with `shared` [1, SHARED]."""
    ids = torch.cat([shared.expand(rows, -1), prompt(rows, NEW)], 1)
    settings: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0}
    model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings)


def first_token(model: Any) -> dict[str, float]:
    """A prompt of SHARED tokens that are known and NEW that are not, and rows that share it within one batch."""
    prefix_cache, shared = PrefixCache(), prompt(1, SHARED)

    def run(rows: int, known: PrefixCache | None) -> None:
        answer(model, shared, rows, PagedKVCache(model.config, num_blocks=BLOCKS, prefix_cache=known))

    run(1, prefix_cache)
    times = {
        "cold ms": fastest(lambda: run(1, None)),
        "known ms": fastest(lambda: run(1, prefix_cache)),
        "8 rows cold ms": fastest(lambda: run(8, None), 3),
        "8 rows known ms": fastest(lambda: run(8, prefix_cache), 3),
        "8 rows, shared within the batch ms": fastest(lambda: run(8, PrefixCache()), 3),
    }
    return times | {"known / cold": times["known ms"] / times["cold ms"]}


def first_token_compiled(model: Any) -> dict[str, float]:
    """The same with a compiled forward, one cache for all prompts: its memory stays, so that graphs replay."""
    shared, eager, times = prompt(1, SHARED), model.forward, {}
    for name, known in (("cold ms", None), ("known ms", PrefixCache())):
        cache = PagedKVCache(model.config, num_blocks=BLOCKS, prefix_cache=known)
        answer(model, shared, 1, cache)  # makes the memory, and the beginning known
        torch._dynamo.reset()
        model.forward = torch.compile(eager, fullgraph=True, dynamic=False, mode="reduce-overhead")

        def run(cache: PagedKVCache = cache) -> None:
            cache.reset()
            answer(model, shared, 1, cache)

        for _ in range(4):  # compiles, captures
            run()
        times[name] = fastest(run)
        model.forward = eager
    return times | {"known / cold": times["known ms"] / times["cold ms"]}


def swaps(model: Any, tokens: int = 16384) -> dict[str, float]:
    """GB/s of a sequence's blocks out and back, and of one plain copy of as many bytes each way."""
    cache = PagedKVCache(model.config, num_blocks=tokens // 16 + 64)
    with torch.no_grad():
        for part in prompt(1, tokens).split(4096, dim=1):
            model(part, past_key_values=cache, logits_to_keep=1)
    tier = HostTier(cache.pool, tokens // 16)
    size = tokens // 16 * cache.pool.block_bytes
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    host = torch.empty(size, dtype=torch.uint8).pin_memory()
    held: list[Any] = [None]

    def out() -> None:
        held[0] = tier.swap_out(cache)
        tier.synchronize()

    def back() -> None:
        tier.swap_in(cache, held[0])
        tier.synchronize()

    rates = {"link out GB/s": fastest(lambda: host.copy_(device)), "link in GB/s": fastest(lambda: device.copy_(host))}
    runs = [(fastest(out, 1), fastest(back, 1)) for _ in range(5)]
    rates |= {"swap out GB/s": min(run[0] for run in runs), "swap in GB/s": min(run[1] for run in runs)}
    rates = {name: size / ms * 1e-6 for name, ms in rates.items()}
    return rates | {
        "out / link": rates["swap out GB/s"] / rates["link out GB/s"],
        "in / link": rates["swap in GB/s"] / rates["link in GB/s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = llama(arguments.layers)
    results = {"first token": first_token(model), "swaps": swaps(model)}
    results["first token, compiled"] = first_token_compiled(model)
    for name, rows in results.items():
        print(name)
        for label, value in rows.items():
            print(f"  {label:<36}{value:10.2f}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "prefix.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
