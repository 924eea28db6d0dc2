"""The demo: a small model answers a few prompts through a paged cache, then the same through a DynamicCache.

Prints the answers while they are generated, then a table of both caches side by side. The tokens must be the same.
"""

from __future__ import annotations

import argparse
import inspect
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

import torch
from torch import Tensor

from . import _models

PROMPTS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Here is a note from a lighthouse keeper: the lamp was lit at dusk, the wind turned to the north before midnight, "
    "and two fishing boats came in behind the breakwater. At four in the morning the fog bell was rung for an hour, "
    "since the light could not be seen from the harbour. At dawn the glass was rising and both boats went out again. "
    "Tell this story in your own words.",
    "Write a haiku about the sea.",
)
Item = TypeVar("Item")
RUNS = 3  # of each cache, in turn; the fastest one counts


@dataclass
class Run:
    """What one generation gave and what it held at its end."""

    tokens: Tensor  # [rows, length], prompts included
    seconds: float
    first_token: float  # seconds until the first new token
    new_tokens: int
    bytes_held: int
    utilisation: float  # filled share of the held slots

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all rows over the time of the whole call."""
        return self.new_tokens / self.seconds


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 if both caches gave the same tokens."""
    from torch_paged_kv import PagedKVCache

    quiet()
    model, tokenizer = _models.load(arguments.model, getattr(torch, arguments.dtype), arguments.device)
    prompts = arguments.prompt or list(PROMPTS)
    batch = encode(tokenizer, prompts).to(model.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{arguments.model}: {type(model).__name__}, {parameters / 1e6:.0f} M parameters, {arguments.dtype}, "
        f"{model.device}, {torch.get_num_threads()} threads\n"
        f"{len(prompts)} prompts of {batch['attention_mask'].sum(1).tolist()} tokens as one left-padded batch\n"
    )
    settings = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}

    def run(cache: Any, streamer: Any) -> Run:
        return measure(model, batch, cache, streamer, settings)

    answers = Answers(tokenizer, len(prompts), arguments.max_new_tokens)
    run(PagedKVCache(model.config), answers)
    answers.close(prompts)
    runs = compare(run, model, PagedKVCache)
    print(table(runs))
    dynamic, paged = runs
    if not torch.equal(dynamic.tokens, paged.tokens):
        print("the tokens differ", file=sys.stderr)
        return 1
    return 0


def quiet() -> None:
    """Keep advice about arguments and loading out of the answers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)


def encode(tokenizer: Any, prompts: list[str]) -> Any:
    """The prompts as one left-padded batch, each as a chat's first turn where the model has a chat template."""
    texts = list(prompts)
    if tokenizer.chat_template:
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
    return tokenizer(
        texts,
        return_tensors="pt",
        padding=True,
        add_special_tokens=not tokenizer.chat_template,  # a template writes them itself
        return_token_type_ids=False,
    )


def measure(model: Any, batch: Any, cache: Any, streamer: Any, settings: dict[str, Any]) -> Run:
    """One `generate` over `cache`."""
    start = time.perf_counter()
    clock = Clock(streamer)
    tokens = model.generate(**batch, **{cache_argument(model): cache}, streamer=clock, **settings)
    seconds = time.perf_counter() - start
    mask, eos = batch["attention_mask"], model.generation_config.eos_token_id
    new = tokens[:, mask.shape[1] :]
    ended = torch.isin(new, torch.as_tensor([] if eos is None else eos, device=new.device)).cumsum(1)
    bytes_held, utilisation = held(cache, mask)
    return Run(
        tokens=tokens.cpu(),
        seconds=seconds,
        first_token=clock.first - start,
        new_tokens=int((ended == 0).sum() + (ended[:, -1] > 0).sum()),
        bytes_held=bytes_held,
        utilisation=utilisation,
    )


def cache_argument(model: Any) -> str:
    """The name under which a model takes a cache: one in most releases, another in the newest."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def held(cache: Any, mask: Tensor) -> tuple[int, float]:
    """Bytes of keys and values in a cache, and the share of its slots that hold a token and not padding."""
    if hasattr(cache, "stats"):
        stats = cache.stats()
        return int(stats["bytes_held"]), float(stats["utilisation"])
    states = [(layer.keys, layer.values) for layer in cache.layers]
    padding = int((mask == 0).sum())
    # A sliding layer keeps the last tokens: of a row's padding only what they still cover.
    slots = [keys.shape[0] * keys.shape[2] for keys, _ in states]
    seen = cache.get_seq_length()
    waste = [padding if keys.shape[2] == seen else 0 for keys, _ in states]
    return sum(keys.nbytes + values.nbytes for keys, values in states), 1 - sum(waste) / sum(slots)


def compare(run: Callable[[Any, Any], Run], model: Any, paged_cache: Any) -> tuple[Run, Run]:
    """The fastest of a few runs over each kind of cache; they take turns, so that both see the same machine."""
    from transformers import DynamicCache

    dynamic_config = model.config.get_text_config(decoder=True)
    kinds: list[Callable[[], Any]] = [lambda: DynamicCache(config=dynamic_config), lambda: paged_cache(model.config)]
    runs: list[list[Run]] = [[], []]
    with progress(total=RUNS * 2, desc="side by side", unit="run") as bar:
        for _ in range(RUNS):
            for kind, done in zip(kinds, runs, strict=True):
                done.append(run(kind(), None))
                bar.update()
    dynamic, paged = (min(done, key=lambda one: one.seconds) for done in runs)
    return dynamic, paged


def progress(**settings: Any) -> Any:
    """A progress bar that goes away when it is closed."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(leave=False, **settings)


def progress_over(items: Sequence[Item], description: str, unit: str) -> Iterator[Item]:
    """The items, with a progress bar while they are worked on."""
    with progress(total=len(items), desc=description, unit=unit) as bar:
        for item in items:
            yield item
            bar.update()


def table(runs: tuple[Run, Run]) -> str:
    """Both runs side by side."""
    dynamic, paged = runs
    same = "yes" if torch.equal(dynamic.tokens, paged.tokens) else "NO"
    rows = [
        ("", "DynamicCache", "PagedKVCache"),
        ("same tokens", "", same),
        ("time to first token", f"{dynamic.first_token:.2f} s", f"{paged.first_token:.2f} s"),
        ("tokens/s", f"{dynamic.tokens_per_second:.1f}", f"{paged.tokens_per_second:.1f}"),
        ("KV bytes held", size(dynamic.bytes_held), size(paged.bytes_held)),
        ("utilisation", f"{dynamic.utilisation:.0%}", f"{paged.utilisation:.0%}"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}".rstrip() for row in rows]
    return "\n".join([lines[0], "-" * (sum(widths) + 4), *lines[1:]])


def size(count: int) -> str:
    """Bytes for a reader."""
    return f"{count / 2**20:.1f} MiB"


class Clock:
    """Notes when the first new token came, and passes all on to another streamer."""

    def __init__(self, streamer: Any = None) -> None:
        self.streamer = streamer
        self.first = 0.0
        self._puts = 0

    def put(self, value: Tensor) -> None:
        """Take the prompts, then one token a row on each call."""
        self._puts += 1
        if self._puts == 2:
            self.first = time.perf_counter()
        if self.streamer is not None and self._puts > 1:
            self.streamer.put(value)

    def end(self) -> None:
        """Generation is over."""


class Answers:
    """Streams the answers of a batch: on a terminal a line for each grows in place, above a progress bar."""

    def __init__(self, tokenizer: Any, rows: int, max_new_tokens: int, out: TextIO = sys.stdout) -> None:
        self.tokenizer, self.out = tokenizer, out
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.live = out.isatty()
        rows = rows if self.live else 0
        self.bar = progress(total=max_new_tokens, unit="step", desc="generating", position=rows)
        self.lines = [progress(total=0, bar_format="{desc}", position=row) for row in range(rows)]

    def put(self, value: Tensor) -> None:
        """Take one token of each row: [rows]."""
        for tokens, token in zip(self.tokens, value.tolist(), strict=True):
            tokens.append(token)
        width = shutil.get_terminal_size().columns - 8
        for number, (line, text) in enumerate(zip(self.lines, self.texts(), strict=False), 1):
            line.set_description_str(f"[{number}] {' '.join(text.split())[-width:]}")
        self.bar.update()

    def texts(self) -> list[str]:
        """The answers so far."""
        return [self.tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in self.tokens]

    def close(self, prompts: list[str]) -> None:
        """Take the live lines away and print prompts and answers."""
        for bar in [*self.lines, self.bar]:
            bar.close()
        self.out.write("\r" if self.live else "")
        for prompt, text in zip(prompts, self.texts(), strict=True):
            print(f"> {prompt}\n{text}\n", file=self.out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the demo can be told."""
    parser.add_argument("--model", default="smollm2", help="smollm2, gemma3, a path or a hub id (default: %(default)s)")
    parser.add_argument("--prompt", action="append", help="a prompt of your own; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
