"""The commands ``estimate``, ``bench`` and ``plot`` of ``python -m torch_paged_kv``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _models, demo
from .stats import Monitor

__all__ = ["add_parsers"]

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
CACHE_DTYPES = DTYPES | {name: getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "int8")}


def add_parsers(commands: Any) -> None:
    """Add the commands to a parser's subparsers."""
    parser = commands.add_parser("estimate", help="bytes that the keys and values of a model take")
    parser.add_argument("model", help="smollm2, gemma3, a path or a hub id; its config alone is read")
    parser.add_argument("--tokens", type=int, metavar="N", help="of one sequence (default: what the model can take)")
    parser.add_argument("--gib", type=float, metavar="X", help="size of a pool instead: how many tokens fit")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=CACHE_DTYPES, help="(default: %(default)s)")
    parser.set_defaults(run=estimate)

    parser = commands.add_parser("bench", help="time to first token, cold and with a prefix cache; decode speed")
    _add_model(parser)
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--new-part", type=int, default=64, metavar="N", help="last prompt tokens that are new each time"
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="the fastest counts (default: %(default)s)")
    parser.set_defaults(run=bench)

    parser = commands.add_parser("plot", help="pictures of a pool in use: block map, usage over time")
    _add_model(parser)
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where they go (default: here)")
    parser.set_defaults(run=plot)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3, a path or a hub id (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="(default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def estimate(arguments: argparse.Namespace) -> int:
    """Print what a pool of some size takes or holds."""
    from transformers import AutoConfig

    from torch_paged_kv.integrations.estimate import estimate as of_config

    config: Any = AutoConfig.from_pretrained(_models.resolve(arguments.model))
    tokens = arguments.tokens
    if tokens is None and arguments.gib is None:
        tokens = config.get_text_config(decoder=True).max_position_embeddings
    size = None if arguments.gib is None else int(arguments.gib * 2**30)
    sizes: dict[str, Any] = {"block_size": arguments.block_size, "dtype": CACHE_DTYPES[arguments.dtype]}
    print(of_config(config, num_tokens=tokens, bytes=size, **sizes))
    return 0


def bench(arguments: argparse.Namespace) -> int:
    """Print times to the first token of prompts that share all but their last part, and the speed of decoding."""
    from torch_paged_kv import PagedKVCache, PrefixCache

    model, _ = _load(arguments)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size

    def tokens(count: int) -> Tensor:
        return torch.randint(3, vocabulary, (1, count), generator=generator).to(model.device)

    shared, prefix_cache = tokens(arguments.prompt_tokens), PrefixCache(max_tokens=4 * arguments.prompt_tokens + 4096)
    cold, warm, steps = [], [], []
    new_tokens = 16
    _first_token(model, shared, PagedKVCache(model.config, prefix_cache=prefix_cache), 1)
    for _ in demo.progress_over(range(arguments.runs), "bench", "run"):
        prompt = torch.cat([shared, tokens(arguments.new_part)], 1)
        cold.append(_first_token(model, prompt, PagedKVCache(model.config), 1))
        warm.append(_first_token(model, prompt, PagedKVCache(model.config, prefix_cache=prefix_cache), 1))
        known = PagedKVCache(model.config, prefix_cache=prefix_cache)
        steps.append((_first_token(model, prompt, known, new_tokens + 1) - warm[-1]) / new_tokens)
    print(f"{arguments.model}, {arguments.dtype}, {model.device}, {torch.get_num_threads()} threads")
    print(f"time to first token, {arguments.prompt_tokens} + {arguments.new_part} tokens")
    print(f"  cold              {min(cold) * 1e3:10.1f} ms")
    print(f"  beginning cached  {min(warm) * 1e3:10.1f} ms  (1/{min(cold) / min(warm):.1f})")
    print(f"decode step         {max(0.0, min(steps)) * 1e3:10.1f} ms")
    return 0


def plot(arguments: argparse.Namespace) -> int:
    """Let a few prompts share a pool, and draw it."""
    from torch_paged_kv import PagedKVCache, PrefixCache
    from torch_paged_kv.plots import block_map, usage

    model, tokenizer = _load(arguments)
    prefix_cache = PrefixCache()
    story = demo.PROMPTS[2].rpartition(". ")[0] + "."
    questions = ("Who rang the bell?", "When was the lamp lit?", "How many boats came in?", "Where were they at dawn?")
    caches: list[Any] = []
    monitor = Monitor(prefix_cache=prefix_cache)
    for question in demo.progress_over(questions, "generating", "prompt"):
        batch = demo.encode(tokenizer, [f"{story} {question}"]).to(model.device)
        cache = PagedKVCache(model.config, num_tokens=640, prefix_cache=prefix_cache)
        caches.append(cache)
        monitor.watch(cache)
        _generate(model, dict(batch), cache, 24, streamer=_Sampler(monitor))
    caches[1].reset()
    monitor.sample()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, figure in (("block_map.png", block_map(monitor)), ("usage.png", usage(monitor))):
        figure.savefig(arguments.out / name, dpi=150)
        print(arguments.out / name)
    return 0


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    demo.quiet()
    return _models.load(arguments.model, DTYPES[arguments.dtype], arguments.device)


def _first_token(model: Any, prompt: Tensor, cache: Any, new_tokens: int) -> float:
    """Seconds that ``new_tokens`` tokens take."""
    start = time.perf_counter()
    _generate(model, {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}, cache, new_tokens).tolist()
    return time.perf_counter() - start


class _Sampler:
    """A streamer that looks at the pool after every step."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor, self.started = monitor, False

    def put(self, value: Tensor) -> None:
        """Prompts, then tokens: a pool there is after the first of them."""
        if self.started:
            self.monitor.sample()
        self.started = True

    def end(self) -> None:
        """Generation is over: the blocks of the answer are known now."""


def _generate(model: Any, batch: dict[str, Tensor], cache: Any, new_tokens: int, **more: Any) -> Tensor:
    settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    tokens: Tensor = model.generate(**batch, **{demo.cache_argument(model): cache}, **settings, **more)
    return tokens
