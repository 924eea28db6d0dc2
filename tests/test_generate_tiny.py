"""Every way of generating, with tiny random models: tokens and logits equal DynamicCache's, and nothing is gathered."""

from __future__ import annotations

import functools
from typing import Any

import models
import pytest
import torch
import transformers
from models import SCENARIOS, Outcome
from transformers import DynamicCache, EncoderDecoderCache

from torch_paged_kv import PagedKVCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # its name in every release but one


@pytest.fixture(scope="module")
def tiny() -> Any:
    """The model of a family, and what a scenario gives on it with DynamicCache; one family is kept at a time."""
    return functools.lru_cache(maxsize=1)(models.tiny)


@functools.cache
def expected(family: str, scenario: str) -> Outcome:
    return SCENARIOS[scenario][1](models.tiny(family), models.dynamic())


def check(family: str, scenario: str, model: Any) -> None:
    caches = models.paged()
    with models.count_paths() as paths:
        result = SCENARIOS[scenario][0](model, caches)
    # Assisted decoding gives logits of several queries at once, in chunks that differ from the reference's.
    models.assert_same(result, expected(family, scenario), logits=SCENARIOS[scenario][0] is SCENARIOS[scenario][1])
    direct = models.goes_direct(family)
    assert (paths.direct > 0, paths.gathered > 0) == (direct, not direct), paths
    models.assert_all_free(caches)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", models.DIRECT)
def test_direct(family: str, scenario: str, tiny: Any) -> None:
    check(family, scenario, tiny(family))


@pytest.mark.parametrize("scenario", ["greedy", "left_padded", "beams", "chunked_prefill", "prompt_lookup", "chat"])
@pytest.mark.parametrize("family", models.DIRECT_MORE)
def test_direct_more_families(family: str, scenario: str, tiny: Any) -> None:
    if family == "qwen3_next" and scenario in ("chunked_prefill", "prompt_lookup"):
        pytest.skip("its linear layers do not support it in every release")
    check(family, scenario, tiny(family))


@pytest.mark.parametrize("scenario", ["greedy", "left_padded", "beams", "prompt_lookup", "forked"])
@pytest.mark.parametrize("family", models.GATHERED)
def test_gathered(family: str, scenario: str, tiny: Any) -> None:
    check(family, scenario, tiny(family))


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("family", models.ENCODER_DECODER)
def test_encoder_decoder(family: str, num_beams: int, tiny: Any) -> None:
    """The decoder's own K and V are paged; cross-attention keeps its dense cache, which the models read directly."""
    model = tiny(family)
    if family == "whisper":
        generator = torch.Generator().manual_seed(2)
        batch = {"input_features": torch.randn(2, 8, 2 * model.config.max_source_positions, generator=generator)}
    else:
        batch = models.prompts([models.PROMPT, 5])
    settings: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": 12, "do_sample": False}

    def run(decoder_cache: Any) -> torch.Tensor:
        cache = EncoderDecoderCache(decoder_cache, DynamicCache())
        generated: torch.Tensor = model.generate(**batch, past_key_values=cache, **settings)
        return generated

    caches = models.paged()
    with models.count_paths() as paths:
        result = run(caches.new(model))
    reference = run(DynamicCache())
    assert len(reference.unique()) > 4
    assert torch.equal(result, reference)
    assert (paths.gathered > 0) == (family == "t5"), paths  # its position bias reads K's shape
    models.assert_all_free(caches)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_images(num_beams: int) -> None:
    """Image tokens see each other both ways: a dense mask over sliding and full layers, in a nested configuration."""
    text = transformers.Gemma3TextConfig(**models._FAMILIES["gemma3"][1])
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    tokens: dict[str, Any] = {
        "mm_tokens_per_image": 4,
        "image_token_index": 100,
        "boi_token_index": 101,
        "eoi_token_index": 102,
    }
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision.to_dict(), **tokens)
    model = models.randomise(transformers.Gemma3ForConditionalGeneration(config))
    batch = models.prompts([17, 9])
    batch["input_ids"][0, 3:7] = batch["input_ids"][1, 10:14] = 100
    batch["token_type_ids"] = (batch["input_ids"] == 100).long()
    batch["pixel_values"] = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    caches = models.paged()
    with models.count_paths() as paths:
        result = models.generate(model, batch, caches.new(model), num_beams=num_beams)
    models.assert_same(result, models.generate(model, batch, models.dynamic().new(model), num_beams=num_beams))
    assert (paths.direct > 0, paths.gathered) == (True, 0)
    models.assert_all_free(caches)


@pytest.mark.parametrize("family", models.DIRECT)
def test_without_a_configuration(family: str, tiny: Any) -> None:
    """`PagedKVCache()` is `DynamicCache()`: it finds out all that it needs from the first keys it is given."""
    model = tiny(family)
    result = models.generate(model, models.prompts([models.PROMPT, 5]), cache := PagedKVCache())
    reference = models.generate(model, models.prompts([models.PROMPT, 5]), DynamicCache())
    models.assert_same(result, reference)
    cache.reset()
    assert cache.pool.num_free == cache.pool.num_blocks


@pytest.mark.parametrize("block_size", [1, 16, 19, 64])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_block_sizes(family: str, block_size: int, tiny: Any) -> None:
    caches = models.paged(block_size=block_size)
    models.assert_same(models.beams(tiny(family), caches), expected(family, "beams"))
    models.assert_all_free(caches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_model(dtype: torch.dtype) -> None:
    """Half precision rounds in another order, so tokens may part; the prompt's logits stay as near as SDPA's own."""
    model = models.tiny("llama")
    batch = models.prompts([models.PROMPT, 5])
    with torch.no_grad():
        truth = model(**batch).logits[:, -1]
        model.to(dtype)
        dense = model(**batch, past_key_values=DynamicCache(config=model.config)).logits[:, -1].float()
        paged = model(**batch, past_key_values=PagedKVCache(model.config)).logits[:, -1].float()
    assert (paged - truth).abs().max() <= 2 * (dense - truth).abs().max()


# ----------------------------------------------------------------------------------- what makes equality mean something


@pytest.mark.parametrize("family", models.DIRECT + models.DIRECT_MORE + models.GATHERED)
def test_references_are_diverse(family: str) -> None:
    generated = expected(family, "left_padded").tokens[0][:, models.PROMPT :]
    assert len(generated.unique()) >= 10


@pytest.mark.parametrize("family", models.DIRECT)
def test_a_wrong_cache_is_noticed(family: str, tiny: Any) -> None:
    """One key that is off by one position changes the tokens: the comparison of the other tests can fail."""

    class Wrong(DynamicCache):
        def update(self, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            key, value = super().update(key_states, *args, **kwargs)
            if key_states.shape[-2] == 1:  # a decode step
                key = key.roll(1, dims=-2)
            return key, value

    result = models.generate(tiny(family), models.prompts([models.PROMPT, 5, 1]), Wrong(config=tiny(family).config))
    with pytest.raises(AssertionError):
        models.assert_same(result, expected(family, "left_padded"))
