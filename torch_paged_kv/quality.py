"""What a cache dtype costs a model: tokens that change and perplexity, against the cache in the model's own dtype."""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _models
from ._texts import CALIBRATION, MEASURED, PROMPTS
from .demo import progress, quiet

DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
SCALES = ("per_slot", "per_head", "per_tensor", "none")
CHUNK = 128  # tokens of the text a forward takes: logits of a large vocabulary are many bytes
ROWS = 4  # prompts a forward takes, likewise


@dataclass(frozen=True)
class Kind:
    """A cache dtype and how it is scaled."""

    dtype: str
    scales: str = "none"  # "none", "per_slot", "per_head", "per_tensor"

    @property
    def is_eight_bit(self) -> bool:
        """Whether it has scales to choose from."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize == 1

    def arguments(self, model: Any, samples: list[Any]) -> dict[str, Any]:
        """Of a :class:`PagedKVCache`; fixed scales are made from ``samples``, batches of a tokenizer."""
        from torch_paged_kv import calibrate

        dtype = getattr(torch, self.dtype)
        if not self.is_eight_bit:
            return {"dtype": dtype}
        if self.scales in ("per_head", "per_tensor"):
            return {"dtype": dtype, "scales": calibrate(model, samples, dtype=dtype, scales=self.scales)}
        return {"dtype": dtype, "scales": None if self.scales == "none" else self.scales}


@dataclass
class Quality:
    """What one kind of cache gave."""

    kind: Kind
    bytes: int  # a token takes over all layers
    tokens: Tensor  # [num_prompts, new], generated greedily
    next_tokens: Tensor  # [num_prompts, new], the likeliest ones after the reference's
    perplexity: float


def kinds(dtypes: list[str], scales: list[str]) -> list[Kind]:
    """The kinds of cache to measure: 8-bit dtypes with each of ``scales`` that they may have."""
    found = []
    for dtype in dtypes:
        if not Kind(dtype).is_eight_bit:
            found.append(Kind(dtype))
            continue
        found += [Kind(dtype, one) for one in scales if (dtype, one) != ("int8", "none")]
    return found


class Meter:
    """Measures kinds of cache on one model."""

    def __init__(self, model: Any, tokenizer: Any, prompts: list[str], text: str, new: int) -> None:
        from torch_paged_kv.integrations.calibration import cache_argument

        self.model, self.new = model, new
        self.argument = cache_argument(model)
        ends = model.generation_config.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
        self.ends = torch.tensor(ends, dtype=torch.int64, device=model.device)  # tokens that end a sequence
        # Models that can are spared the logits of the prompts.
        keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.last_logits = {"logits_to_keep": new} if keep else {}
        self.batch = self._encode(tokenizer, prompts)
        self.text = self._encode(tokenizer, [text])["input_ids"]  # [1, length]
        self.samples = [self._encode(tokenizer, [sample]) for sample in CALIBRATION]
        self.reference: Tensor | None = None  # tokens [num_prompts, new] of the first kind measured

    def _encode(self, tokenizer: Any, texts: list[str]) -> Any:
        encoded = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        return encoded.to(self.model.device)

    @torch.no_grad()
    def measure(self, kind: Kind) -> Quality:
        """Generate, read on after the reference's tokens, and read the text, over caches of one kind."""
        from torch_paged_kv import PagedKVCache

        arguments = kind.arguments(self.model, self.samples)

        def new_cache() -> Any:
            return PagedKVCache(self.model.config, **arguments)

        cache = new_cache()
        tokens = self._generate(cache)
        if self.reference is None:
            self.reference = tokens
        return Quality(kind, token_bytes(cache), tokens, self._next_tokens(new_cache), self._perplexity(new_cache()))

    def _generate(self, cache: Any) -> Tensor:
        """Greedy tokens [num_prompts, new]; none ends its sequence early, so that all can be compared."""
        settings = {"max_new_tokens": self.new, "min_new_tokens": self.new, "do_sample": False}
        sequences: Tensor = self.model.generate(**self.batch, **settings, **{self.argument: cache})
        return sequences[:, -self.new :]

    def _next_tokens(self, new_cache: Any) -> Tensor:
        """The likeliest token after the reference's tokens up to each place: [num_prompts, new]."""
        assert self.reference is not None
        found = []
        for begin in range(0, len(self.reference), ROWS):
            rows = slice(begin, begin + ROWS)
            mask = self.batch["attention_mask"][rows]
            reference = self.reference[rows]
            mask = torch.cat([mask, torch.ones_like(reference[:, :-1])], 1)
            ids = torch.cat([self.batch["input_ids"][rows], reference[:, :-1]], 1)
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids} | self.last_logits
            logits = self.model(**inputs, **{self.argument: new_cache()}).logits
            logits = logits[:, -self.new :].index_fill(2, self.ends, -torch.inf)  # nor may generate end early
            found.append(logits.argmax(-1))
        return torch.cat(found)

    def _perplexity(self, cache: Any) -> float:
        """Of the text, read in chunks: a chunk attends to those before it through the cache."""
        length = self.text.shape[1]
        total = 0.0
        for begin in range(0, length - 1, CHUNK):
            ids = self.text[:, begin : min(begin + CHUNK, length - 1)]
            logits = self.model(input_ids=ids, **{self.argument: cache}).logits
            target = self.text[0, begin + 1 : begin + 1 + ids.shape[1]]
            total += float(torch.nn.functional.cross_entropy(logits[0].float(), target, reduction="sum"))
        return math.exp(total / (length - 1))


def token_bytes(cache: Any) -> int:
    """Bytes that a token takes in a written cache, over all layers, its scales included."""
    total, layer = 0, 0
    while cache.is_written(layer):
        key_cache, value_cache, *scales = cache.caches(layer)
        slots = [part for part in (key_cache, value_cache, *scales) if part is not None and part.dim() > 1]
        total += sum(part[0, 0].numel() * part.element_size() for part in slots)  # fixed scales belong to no token
        layer += 1
    return total


def table(results: list[Quality]) -> str:
    """A Markdown table of the results, whose first is the reference."""
    reference = results[0]
    lines = [
        "| cache | scales | bytes a token | tokens equal | texts equal | next token equal | perplexity |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        same = result.tokens == reference.tokens  # [num_prompts, new]
        following = result.next_tokens == reference.tokens
        change = "" if result is reference else f" ({result.perplexity / reference.perplexity - 1:+.2%})"
        lines.append(
            f"| {result.kind.dtype} | {result.kind.scales} | {result.bytes:,} | {same.float().mean():.1%} | "
            f"{int(same.all(1).sum())} of {len(same)} | {following.float().mean():.1%} | "
            f"{result.perplexity:.3f}{change} |"
        )
    return "\n".join(lines)


def main(arguments: argparse.Namespace) -> int:
    """Print the table of one model."""
    quiet()
    model, tokenizer = _models.load(arguments.model, getattr(torch, arguments.model_dtype), arguments.device)
    text = MEASURED if arguments.text is None else Path(arguments.text).read_text()
    meter = Meter(model, tokenizer, list(PROMPTS[: arguments.prompts]), text, arguments.tokens)
    wanted = [Kind(arguments.model_dtype)]
    wanted += [kind for kind in kinds(arguments.dtype, arguments.scales) if kind not in wanted]
    results: list[Quality] = []
    with progress(total=len(wanted), desc="measuring", unit="cache") as bar:
        for kind in wanted:
            bar.set_postfix_str(f"{kind.dtype} {kind.scales}")
            try:
                results.append(meter.measure(kind))
            except ValueError as error:  # fixed scales that do not fit the model
                print(f"{kind.dtype}, {kind.scales}: {error}", file=sys.stderr)
            bar.update()
    print(
        f"{arguments.model}: {type(model).__name__}, {arguments.model_dtype}, {model.device}; "
        f"{len(meter.batch['input_ids'])} prompts x {arguments.tokens} tokens, text of {meter.text.shape[1]} tokens\n"
    )
    print(table(results))
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command can be told."""
    names = "smollm2, gemma3, a path or a hub id (default: %(default)s)"
    parser.add_argument("model", nargs="?", default="smollm2", help=names)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES, help="cache dtypes (default: all)")
    parser.add_argument("--scales", nargs="+", default=["per_slot"], choices=SCALES, help="(default: per_slot)")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), metavar="N", help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="new ones a prompt (default: %(default)s)")
    parser.add_argument("--text", metavar="FILE", help="whose perplexity is taken (default: one that is shipped)")
    parser.add_argument("--model-dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
