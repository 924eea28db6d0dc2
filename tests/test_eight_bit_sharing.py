"""8-bit caches with prefixes, host memory and files: scales go where their blocks go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from test_eight_bit_cache import static_scales
from torch import Tensor

from torch_paged_kv import PagedKVCache, PrefixCache, estimate
from torch_paged_kv.files import load, save
from torch_paged_kv.offload import HostTier

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]

BLOCK = 4
KINDS = {
    "int8 per_slot": (torch.int8, "per_slot"),
    "e4m3 per_slot": (torch.float8_e4m3fn, "per_slot"),
    "e5m2 none": (torch.float8_e5m2, None),
    "int8 per_head": (torch.int8, "per_head"),
}


def kind_of(name: str, model: Any) -> dict[str, Any]:
    dtype, scales = KINDS[name]
    return {"dtype": dtype, "scales": static_scales(model, dtype) if scales == "per_head" else scales}


def held(cache: Any) -> list[Tensor]:
    """Dequantised keys and values of all layers."""
    return [part.clone() for layer in range(len(cache.layers)) for part in cache.gather(layer)]


def assert_equal(mine: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_saved_and_loaded(family: str, kind: str, tmp_path: Path) -> None:
    model, batch = models.tiny(family), models.prompts([13, 5])
    arguments = kind_of(kind, model)
    cache = PagedKVCache(model.config, block_size=BLOCK, **arguments)
    model(**batch, past_key_values=cache)
    save(cache, tmp_path / "kv.safetensors")
    fresh = PagedKVCache(model.config, block_size=BLOCK, **arguments)
    load(fresh, tmp_path / "kv.safetensors")
    assert_equal(held(fresh), held(cache))
    longer = models.extend(batch["input_ids"], batch["attention_mask"], models.prompts([3, 3], seed=8)["input_ids"])
    models.assert_same(models.generate(model, longer, fresh), models.generate(model, longer, cache), rtol=0)
    for other in KINDS:
        if other != kind:
            another = PagedKVCache(model.config, block_size=BLOCK, **kind_of(other, model))
            with pytest.raises(ValueError, match="must be"):
                load(another, tmp_path / "kv.safetensors")
            assert another.seen == 0


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_out_and_back(kind: str) -> None:
    model = models.tiny("gemma3")
    cache = PagedKVCache(model.config, block_size=BLOCK, num_blocks=80, **kind_of(kind, model))
    model(**models.prompts([13, 5]), past_key_values=cache)
    before = held(cache)
    tier = HostTier(cache.pool, 40)
    swapped = tier.swap_out(cache)
    tier.synchronize()
    filler = PagedKVCache(model.config, pool=cache.pool)  # of the pool's kind
    model(**models.prompts([30], seed=9), past_key_values=filler)
    tier.swap_in(cache, swapped)
    assert_equal(held(cache), before)


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes(kind: str) -> None:
    """A prompt whose beginning is known goes on from the blocks of the first one; tokens are those of a cold run."""
    model = models.tiny("llama")
    arguments = kind_of(kind, model)
    prefixes = PrefixCache()
    head = models.prompts([20])["input_ids"]
    for seed in (5, 6):
        ids = torch.cat([head, models.prompts([5], seed=seed)["input_ids"]], 1)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        warm = PagedKVCache(model.config, block_size=BLOCK, num_blocks=99, prefix_cache=prefixes, **arguments)
        result = models.generate(model, batch, warm)
        cold = PagedKVCache(model.config, block_size=BLOCK, **arguments)
        assert torch.equal(result.tokens[0], models.generate(model, batch, cold).tokens[0])
        if seed == 6:
            assert prefixes.stats()["hit_tokens"] >= 20
    # A cache that is told no kind takes that of the prefixes' pool.
    assert PagedKVCache(model.config, block_size=BLOCK, prefix_cache=prefixes).scales == arguments["scales"]


@pytest.mark.parametrize("scales", ["per_slot", None])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_estimate_counts_scales(family: str, scales: str | None) -> None:
    model = models.tiny(family)
    kind: dict[str, Any] = {"block_size": BLOCK, "dtype": torch.float8_e4m3fn, "scales": scales}
    guess = estimate(model.config, num_tokens=100, **kind)
    cache = PagedKVCache(model.config, num_tokens=100, **kind)
    model(**models.prompts([5]), past_key_values=cache)
    assert guess.bytes == cache.stats()["bytes_total"]
