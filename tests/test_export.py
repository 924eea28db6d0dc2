"""torch.export and AOTInductor: a module that holds its cache, as a program and as a compiled package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

from torch_paged_kv import PagedKVCache

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]


class Decoder(nn.Module):
    """A model and its cache: a token a row in, logits out."""

    def __init__(self, model: Any, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """token, position: int64 [rows, 1] -> [rows, vocab]"""
        inputs: dict[str, Any] = {"input_ids": token, "position_ids": position}
        if models.RELEASE.major < 5:
            inputs["cache_position"] = position[0]
        logits: Tensor = self.model(**inputs, past_key_values=self.cache).logits
        return logits[:, -1]


def prefilled(family: str, rows: int) -> tuple[Decoder, Tensor]:
    """A decoder whose cache holds prompts of equal length, and the next token of each row."""
    model, batch = models.tiny(family), models.prompts([models.PROMPT] * rows)
    cache = PagedKVCache(model.config, block_size=4, num_blocks=120)
    logits = model(**batch, past_key_values=cache).logits[:, -1]
    return Decoder(model, cache), logits.argmax(-1, keepdim=True)


def decode(step: Any, token: Tensor, count: int) -> Tensor:
    """Greedy tokens: int64 [rows, count]."""
    tokens = [token]
    for index in range(count - 1):
        logits = step(tokens[-1], torch.full_like(token, models.PROMPT + index))
        tokens.append(logits.argmax(-1, keepdim=True))
    return torch.cat(tokens, dim=1)


def expected(family: str, rows: int, count: int) -> Tensor:
    model, batch = models.tiny(family), models.prompts([models.PROMPT] * rows)
    outcome = models.generate(model, batch, models.dynamic().new(model), max_new_tokens=count, eos_token_id=None)
    return outcome.tokens[0][:, models.PROMPT :]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_exported_program_decodes(family: str) -> None:
    """One program for every length; it owns the pool and the tables, and changes them in place."""
    decoder, token = prefilled(family, rows=2)
    program = torch.export.export(decoder, (token, torch.full_like(token, models.PROMPT)))
    module = program.module()
    assert torch.equal(decode(module, token, 24), expected(family, 2, 24))
    lengths = [buffer for name, buffer in module.named_buffers() if name.endswith("seq_lens")]
    assert [length.tolist() for length in lengths] == [[models.PROMPT + 23] * 2]


def test_a_compiled_package_decodes(tmp_path: Path) -> None:
    """AOTInductor: compiled ahead of time, loaded from a file, equal to eager step for step."""
    decoder, token = prefilled("llama", rows=2)
    program = torch.export.export(decoder, (token, torch.full_like(token, models.PROMPT)))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "decoder.pt2"))
    step = torch._inductor.aoti_load_package(package)
    assert torch.equal(decode(step, token, 24), expected("llama", 2, 24))
