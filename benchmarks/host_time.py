"""Host time of an eager decode step: what a cache costs Python and the dispatcher, per layer, with next to no data.

`python benchmarks/host_time.py [--device cpu] [--layers 32] [--rows 1]` prints microseconds per layer. The tensors are
so small that kernels take almost nothing (on a GPU the stream runs behind), so that what is measured is the host's
work: `update` and the attention function alone, then a whole model's step. Kinds of cache take turns within one run;
each number is the least of many rounds, as noise only adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torch_paged_kv import PagedKVCache

STEPS, ROUNDS = 40, 12


def llama(layers: int, device: str) -> Any:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).to(device).eval()


def kinds(model: Any) -> dict[str, Callable[[], Any]]:
    return {
        "dynamic": lambda: DynamicCache(config=model.config),
        "paged": lambda: PagedKVCache(model.config),
        "paged sized": lambda: PagedKVCache(model.config, num_tokens=4096),
    }


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(step: Callable[[int], Any], device: str) -> float:
    """CPU seconds of this thread, and wall seconds on an accelerator, for one of STEPS steps."""
    clock = time.thread_time if device == "cpu" else time.perf_counter
    start = clock()
    for index in range(STEPS):
        step(index)
    elapsed = (clock() - start) / STEPS  # before the device is waited for: the host's own time
    synchronise(device)
    return elapsed


def prefilled(model: Any, make: Callable[[], Any], rows: int, device: str) -> Any:
    cache = make()
    model(torch.ones(rows, 16, dtype=torch.int64, device=device), past_key_values=cache)
    return cache


def attention_step(model: Any, cache: Any, rows: int, device: str) -> Callable[[int], Any]:
    """`update` and the attention function of every layer, without the rest of the model."""
    config = model.config
    modules = [layer.self_attn for layer in model.model.layers]
    head_size = config.hidden_size // config.num_attention_heads
    query, key = (
        torch.randn(rows, 1, heads, head_size, device=device).transpose(1, 2)  # as a projection's view comes
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    value, scaling = key.clone(), head_size**-0.5

    def step(_: int) -> None:
        for index, module in enumerate(modules):
            keys, values = cache.update(key, value, index)
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, None)
            attend(module, query, keys, values, None, dropout=0.0, scaling=scaling)

    return step


def model_step(model: Any, cache: Any, rows: int, device: str) -> Callable[[int], Any]:
    token = torch.ones(rows, 1, dtype=torch.int64, device=device)
    return lambda _: model(token, past_key_values=cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = llama(arguments.layers, arguments.device)
    works = {"update + attention": attention_step, "whole model": model_step}
    best = {(work, kind): float("inf") for work in works for kind in kinds(model)}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for work, make_step in works.items():
                for kind, make in kinds(model).items():
                    cache = prefilled(model, make, arguments.rows, arguments.device)
                    step = make_step(model, cache, arguments.rows, arguments.device)
                    step(0)
                    best[work, kind] = min(best[work, kind], seconds(step, arguments.device))
    print(f"us of host time per layer, {arguments.layers} layers, {arguments.rows} rows, {arguments.device}")
    for work in works:
        numbers = {kind: best[work, kind] / arguments.layers * 1e6 for kind in kinds(model)}
        print(f"{work:20}", "  ".join(f"{kind} {number:6.1f}" for kind, number in numbers.items()))


if __name__ == "__main__":
    main()
