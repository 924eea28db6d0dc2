"""Packaged models: whichever release of Transformers converts or loads them, the tokenizer is the model's and pads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as algorithms
from transformers import PreTrainedTokenizerFast

from torch_paged_kv import _models

WORDS = ["<pad>", "<unk>", "<bos>", "one", "two", "three"]
TEXTS = ["one two three", "two"]


def tokenizer_from_gguf() -> Any:
    """As several releases read it from a GGUF file: no token pads, another one ends, and both numbers are saved."""
    vocabulary = {word: number for number, word in enumerate(WORDS)} | {"<eos>": models.EOS}
    tokenizer = Tokenizer(algorithms.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    made: Any = PreTrainedTokenizerFast
    made = made(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<bos>", unk_token="<unk>")
    made.init_kwargs |= {"eos_token_id": 2, "pad_token_id": None}
    return made


def model_that_pads_with(pad: int | None) -> Any:
    model = models.tiny("llama")
    model.config.pad_token_id = model.generation_config.pad_token_id = pad
    return model


def assert_pads(tokenizer: Any, pad: int) -> None:
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert batch["input_ids"].tolist() == [[3, 4, 5], [pad, pad, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize(("config_pads", "pads"), [(models.PAD, models.PAD), (None, models.EOS)])
def test_a_conversion_has_the_special_tokens_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_pads: int | None, pads: int
) -> None:
    model, folder = model_that_pads_with(config_pads), tmp_path / "converted"
    (tmp_path / "part").write_bytes(b"GGUF")
    with monkeypatch.context() as patch:
        patch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer_from_gguf())
        patch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
        _models._convert([tmp_path / "part"], folder, bos=False)
    read: Any = transformers.AutoTokenizer
    tokenizer = read.from_pretrained(folder, padding_side="left")  # as the examples read it
    assert_pads(tokenizer, pads)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, models.EOS)
    assert not [key for key in json.loads((folder / "tokenizer_config.json").read_text()) if key.endswith("_id")]
    loaded, tokenizer = _models.load(str(folder), torch.float32, "cpu")
    assert_pads(tokenizer, pads)
    batch = tokenizer(TEXTS[:1], return_tensors="pt", return_token_type_ids=False)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_pieces_are_merged_by_their_rank_after_the_token_that_begins(tmp_path: Path) -> None:
    """The best merge goes first, and a piece that no merges lead to is never used, though a unigram model has it."""
    ranks = ["ab", "bc", "abc"]
    pieces = [("<bos>", 0.0), ("<unk>", 0.0), *((letter, -9.0) for letter in "abc")]
    pieces += [(piece, -float(rank)) for rank, piece in enumerate(ranks)]
    unigram = Tokenizer(algorithms.Unigram([*pieces, ("a" * 8, 9.0)], unk_id=1, byte_fallback=False))
    unigram.save(str(tmp_path / "tokenizer.json"))
    _models._correct_tokenizer(tmp_path / "tokenizer.json", "<bos>", 0)
    corrected = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text, expected in [("abc", ["abc"]), ("bcab", ["bc", "ab"]), ("aab", ["a", "ab"]), ("a" * 8, ["a"] * 8)]:
        assert corrected.encode(text).tokens == ["<bos>", *expected]
    assert unigram.encode("a" * 8).tokens == ["a" * 8]


@pytest.mark.parametrize(("config_pads", "pads"), [(models.PAD, models.PAD), (None, 2)])
def test_a_tokenizer_that_cannot_pad_does_when_loaded(tmp_path: Path, config_pads: int | None, pads: int) -> None:
    """From the hub, or from a folder that was converted before."""
    model_that_pads_with(config_pads).save_pretrained(tmp_path)
    tokenizer_from_gguf().save_pretrained(tmp_path)
    assert_pads(_models.load(str(tmp_path), torch.float32, "cpu")[1], pads)


def test_a_tokenizer_that_pads_is_left_alone(tmp_path: Path) -> None:
    model_that_pads_with(models.PAD).save_pretrained(tmp_path)
    tokenizer = tokenizer_from_gguf()
    tokenizer.pad_token = "<unk>"
    tokenizer.save_pretrained(tmp_path)
    assert_pads(_models.load(str(tmp_path), torch.float32, "cpu")[1], 1)
