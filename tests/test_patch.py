"""patch, unpatch and paged: generate uses a paged cache by default, and nothing else of the model changes."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StaticCache

import torch_paged_kv
from torch_paged_kv import PagedKVCache
from torch_paged_kv.integrations import patching
from torch_paged_kv.integrations.transformers import path_counts

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]

SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}


def cache_of(model: Any, **settings: Any) -> Any:
    """The cache that a run of generate ended with, under whatever name."""
    output = model.generate(**models.prompts([9, 5]), **(SETTINGS | settings))
    return output.past_key_values


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_uses_a_paged_cache_and_makes_the_same_tokens(family: str) -> None:
    model, batch = models.tiny(family), models.prompts([9, 5])
    expected = model.generate(**batch, **SETTINGS).sequences
    torch_paged_kv.patch(model, block_size=4)
    output = model.generate(**batch, **SETTINGS)
    assert type(output.past_key_values) is PagedKVCache
    assert output.past_key_values.block_size == 4
    assert torch.equal(output.sequences, expected)
    torch_paged_kv.unpatch(model)
    assert type(cache_of(model)) is DynamicCache
    torch_paged_kv.unpatch(model)  # a model that is not patched is left as it is


def test_each_call_gets_a_cache_of_its_own() -> None:
    model = models.tiny("llama")
    with torch_paged_kv.paged(model):
        first, second = cache_of(model), cache_of(model)
    assert first is not second
    assert first.pool is not second.pool


def test_a_cache_that_is_given_or_asked_for_is_used() -> None:
    model = models.tiny("llama")
    with torch_paged_kv.paged(model):
        given = DynamicCache()
        assert cache_of(model, past_key_values=given) is given
        assert type(cache_of(model, cache_implementation="static")) is StaticCache
        assert cache_of(model, use_cache=False) is None


def test_beams_and_drafts_under_a_patch() -> None:
    model = models.tiny("llama")
    draft, batch = models.draft_of(model), models.prompts([9])
    beams = {"num_beams": 3, "num_return_sequences": 2}
    for settings in (beams, {"assistant_model": draft}, {"prompt_lookup_num_tokens": 2}):
        expected = model.generate(**batch, **SETTINGS, **settings).sequences
        with torch_paged_kv.paged(model), torch_paged_kv.paged(draft):
            assert torch.equal(model.generate(**batch, **SETTINGS, **settings).sequences, expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_drafts_over_a_paged_cache(family: str) -> None:
    """Several drafts a round, some of them rolled back, some the very token that pads: and greedy tokens."""
    model, ids = models.tiny(family), models.prompts([9])["input_ids"]
    draft = models.draft_of(model)
    settings: dict[str, Any] = SETTINGS | {"max_new_tokens": 16, "eos_token_id": models.EOS}
    expected = model.generate(ids, **settings, pad_token_id=models.PAD).sequences
    cropped: list[int] = []

    class Watched(PagedKVCache):
        def crop(self, tokens: Any) -> None:
            before = self.seen
            super().crop(tokens)
            cropped.append(before - self.seen)

    drafted = expected[0, 9:-1].tolist()
    for pad in sorted(set(drafted) - set(ids[0].tolist()))[:4]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patching, "PagedKVCache", Watched)
            with torch_paged_kv.paged(draft, block_size=4):
                cache = PagedKVCache(model.config, block_size=4)
                output = model.generate(ids, past_key_values=cache, **settings, pad_token_id=pad, assistant_model=draft)
        assert torch.equal(output.sequences, expected)
    assert min(cropped) <= 1 < max(cropped)  # rounds most of whose drafts were right, and others


def test_encoder_decoder_models_page_the_decoder_only() -> None:
    model, before = models.tiny("bart"), path_counts()["direct"]
    with torch_paged_kv.paged(model):
        cache = cache_of(model)
    assert type(cache.self_attention_cache) is PagedKVCache
    assert type(cache.cross_attention_cache) is DynamicCache
    assert path_counts()["direct"] > before


def test_config_and_ordinary_forwards_stay_as_they_were() -> None:
    model, batch = models.tiny("llama"), models.prompts([9, 5])
    config, logits = copy.deepcopy(model.config.to_dict()), model(**batch).logits
    attributes = set(vars(model))

    def unchanged() -> bool:
        return torch.equal(model(**batch).logits, logits) and model.config.to_dict() == config

    def fail_in_a_block() -> None:
        with torch_paged_kv.paged(model):
            assert unchanged()
            cache_of(model)
            assert unchanged()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_a_block()
    assert unchanged()
    assert set(vars(model)) == attributes


class Fail(LogitsProcessor):
    """Ends a generate after its third token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` [rows, length]."""
        if input_ids.shape[1] >= 9 + 3:
            raise ZeroDivisionError
        return scores


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "gpt2"])
def test_logits_are_bit_equal_whatever_happened_under_a_patch(family: str) -> None:
    """Before, patched, after a generate, after one that failed, unpatched: the same bits, and the same config."""
    model, batch = models.tiny(family), models.prompts([9, 5])
    config, logits = copy.deepcopy(model.config.to_dict()), model(**batch).logits
    attributes, cached = set(vars(model)), model(**batch, past_key_values=DynamicCache(config=model.config)).logits

    def check() -> None:
        assert torch.equal(model(**batch).logits, logits)
        assert torch.equal(model(**batch, past_key_values=DynamicCache(config=model.config)).logits, cached)
        assert model.config.to_dict() == config

    torch_paged_kv.patch(model, block_size=4)
    check()
    model.generate(**batch, **SETTINGS)
    check()
    with pytest.raises(ZeroDivisionError):
        model.generate(**batch, **SETTINGS, logits_processor=LogitsProcessorList([Fail()]))
    check()
    torch_paged_kv.unpatch(model)
    check()
    assert set(vars(model)) == attributes
    assert type(cache_of(model)) is DynamicCache


def test_blocks_of_with_statements_nest() -> None:
    model = models.tiny("llama")
    with torch_paged_kv.paged(model, block_size=4):
        with torch_paged_kv.paged(model, block_size=8):
            assert cache_of(model).block_size == 8
        assert cache_of(model).block_size == 4
    assert type(cache_of(model)) is DynamicCache


def test_a_model_that_cannot_generate_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be one that can generate, got Linear"):
        torch_paged_kv.patch(torch.nn.Linear(2, 2))
