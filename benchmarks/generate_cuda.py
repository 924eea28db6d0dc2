"""A model of Llama-3-8B's shape with random weights: generate and compiled decode steps with each kind of cache.

`python benchmarks/generate_cuda.py [--layers 32] [--out DIR] [--only NAME ...]` prints a row per measurement
and writes generate.json. Times are medians; a step is one token of every row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from torch_paged_kv import PagedKVCache

PROMPT, NEW = 2048, 128


def llama(layers: int, device: str = "cuda", vocab_size: int = 128256) -> Any:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=65536,
        rope_theta=500000.0,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def caches(model: Any, rows: int, capacity: int) -> dict[str, Callable[[], Any]]:
    """Each kind of cache for `rows` rows of `capacity` tokens."""
    blocks = rows * (-(-capacity // 16) + 1)
    return {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=capacity),
        "paged": lambda: PagedKVCache(model.config),
        "paged sized": lambda: PagedKVCache(model.config, num_blocks=blocks),
    }


def prompt(rows: int, length: int) -> torch.Tensor:
    return torch.randint(5, 128000, (rows, length), device="cuda")


def prefill(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """The next token of each row [rows, 1]; in chunks of rows' tokens that fit the activations."""
    for part in ids.split(max(1, 65536 // ids.shape[0]), dim=1):
        logits = model(part, past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1:].argmax(-1)


def steps_ms(step: Callable[..., Any], token: torch.Tensor, cache: Any, seen: int, count: int) -> float:
    """Median milliseconds of `count` decode steps after a warm-up of as many as a compiled graph wants."""
    times = []
    for index in range(count + 8):
        position = torch.full_like(token, seen + index)
        torch.cuda.synchronize()
        start = time.perf_counter()
        logits = step(token, past_key_values=cache, position_ids=position).logits
        token = logits[:, -1:].argmax(-1).clone()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[8:])


GRAPHS: dict[str, Any] = {"mode": "reduce-overhead"}
# The same, and of Dynamo's checks before each step only those of tensors (docs/transformers.md).
FEW_GUARDS: dict[str, Any] = {
    "options": {"triton.cudagraphs": True, "guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
}


def compiled(
    model: Any, kind: str, rows: int, context: int, capacity: int, how: dict[str, Any] = GRAPHS
) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = caches(model, rows, capacity)[kind]()
    token = prefill(model, prompt(rows, context), cache)
    step = torch.compile(model.forward, fullgraph=True, **how)
    ms = steps_ms(step, token, cache, context, 40)
    counters = torch._dynamo.utils.counters
    return {"ms": ms, "graphs": counters["stats"]["unique_graphs"], "skips": counters["inductor"]["cudagraph_skips"]}


def eager(model: Any, kind: str, rows: int, context: int) -> dict[str, Any]:
    cache = caches(model, rows, context + 64)[kind]()
    token = prefill(model, prompt(rows, context), cache)
    return {"ms": steps_ms(model, token, cache, context, 30)}


def generate(model: Any, kind: str, rows: int, length: int = PROMPT, new: int = NEW, **settings: Any) -> dict[str, Any]:
    """Decode tokens a second of model.generate: the time of `new` tokens less that of the first one."""
    ids = prompt(rows, length)
    seconds = {}
    for count in (new, 1, new):  # the first one warms up and compiles
        cache = caches(model, rows * settings.get("num_beams", 1), length + new + 16)[kind]()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
        torch.cuda.synchronize()
        seconds[count] = time.perf_counter() - start
    tokens = rows * (new - 1) / (seconds[new] - seconds[1])
    peak = torch.cuda.max_memory_allocated() / 1e9
    held = bytes_held(cache) / 1e9
    return {"tok/s": tokens, "ms/step": rows * 1e3 / tokens, "prefill s": seconds[1], "peak GB": peak, "KV GB": held}


def activations(model: Any, rows: int) -> dict[str, Any]:
    """Peak memory of the weights alone, and of a forward of the prompt that keeps no keys and values."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_allocated() / 1e9
    model(prompt(rows, PROMPT), use_cache=False, logits_to_keep=1)
    return {"weights GB": weights, "peak GB": torch.cuda.max_memory_allocated() / 1e9}


def bytes_held(cache: Any) -> int:
    """Bytes of keys and values that a cache keeps for its tokens."""
    if isinstance(cache, PagedKVCache):
        return int(cache.stats()["bytes_held"])
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def measurements(model: Any) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for rows in (1, 32):
        for kind in ("static", "paged sized"):
            yield f"compiled {kind} batch {rows} context 2048", lambda k=kind, r=rows: compiled(model, k, r, 2048, 2304)
    for kind in ("static", "paged sized"):
        yield (
            f"compiled {kind} batch 1 context 2048, few guards",
            lambda k=kind: compiled(model, k, 1, 2048, 2304, FEW_GUARDS),
        )
    for capacity in (4096, 32768):
        yield (
            f"compiled paged sized batch 1 capacity {capacity}",
            lambda c=capacity: compiled(model, "paged sized", 1, 2048, c),
        )
    yield "forward without a cache, batch 32", lambda: activations(model, 32)
    for rows in (1, 32):
        for kind in ("dynamic", "paged", "paged sized"):  # a sized cache makes generate compile its steps
            yield f"generate {kind} batch {rows}", lambda k=kind, r=rows: generate(model, k, r)
    for kind in ("dynamic", "paged", "paged sized"):
        yield (
            f"generate {kind} 8 beams of 8192",
            lambda k=kind: generate(model, k, 1, length=8192, new=33, num_beams=8),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = llama(arguments.layers)
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "layers": arguments.layers,
    }
    with torch.no_grad():
        for name, measure in measurements(model):
            if arguments.only and not any(part in name for part in arguments.only):
                continue
            start = time.perf_counter()
            try:
                results[name] = measure()
            except Exception as error:  # one failure must not cost the other measurements their device time
                results[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
                traceback.print_exc(limit=-3)
            numbers = {k: round(v, 2) if isinstance(v, float) else v for k, v in results[name].items()}
            print(f"{name:45} {numbers}  ({time.perf_counter() - start:.0f} s)", flush=True)
            (arguments.out / "generate.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
