"""A forward that fails within a step: the cache is cut to the positions before it, and goes on as if nothing was."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import torch

from torch_paged_kv import PagedKVCache, ops
from torch_paged_kv.cache import PagedKVCache as CoreCache
from torch_paged_kv.files import load, save

pytestmark = pytest.mark.usefixtures("no_grad")


def test_a_step_that_is_cut_away_is_over(tmp_path: Path) -> None:
    cache = CoreCache([None, None], block_size=4)
    states = torch.randn(1, 1, 6, 8)
    for layer in range(2):
        cache.write(layer, states, states)
    before = [cache.gather(layer)[0] for layer in range(2)]
    cache.write(0, states[:, :, :2], states[:, :, :2])  # and layer 1 fails
    assert cache.within_step
    cache.truncate(7)
    assert cache.within_step  # one position of it is left, which layer 1 has not written
    with pytest.raises(ValueError, match="the cache must be between two steps"):
        save(cache, tmp_path / "kv.safetensors")
    cache.truncate(6)
    assert not cache.within_step
    save(cache, tmp_path / "kv.safetensors")
    other = CoreCache([None, None], block_size=4)
    load(other, tmp_path / "kv.safetensors")
    for layer in range(2):
        assert torch.equal(other.gather(layer)[0], before[layer])


class Failure(Exception):
    """Of a layer's attention."""


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize(("of", "name"), [(ops, "paged_attention"), (PagedKVCache, "attention")], ids=["op", "cache"])
def test_goes_on_after_attention_has_failed(of: Any, name: str, layer: int) -> None:
    """Layer 2, the last one, had written all there was to write, and not attended to it."""
    model, batch = models.tiny("llama"), models.prompts([9])
    tokens = model.generate(**batch, max_new_tokens=2, do_sample=False, eos_token_id=None)
    cache = PagedKVCache(model.config, block_size=4, num_blocks=20)
    model(**batch, past_key_values=cache)
    real, calls = getattr(of, name), iter(range(100))

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) == layer:
            raise Failure
        return real(*arguments, **options)

    with mock.patch.object(of, name, fail), pytest.raises(Failure):
        model(input_ids=tokens[:, 9:10], past_key_values=cache)
    cache.truncate(9)
    assert cache.seq_lens() == [9]
    logits = model(input_ids=tokens[:, 9:10], past_key_values=cache).logits
    assert torch.allclose(logits, model(tokens[:, :10]).logits[:, -1:], atol=1e-5)
    assert torch.equal(logits[:, -1].argmax(-1), tokens[:, 10])
    cache.check()
