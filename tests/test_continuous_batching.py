"""Transformers' continuous batching with the attention of this library: the tokens that `generate` gives one by one."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from models import VOCAB, tiny

from torch_paged_kv import ops
from torch_paged_kv.integrations import continuous_batching

IS_TESTED = continuous_batching.VERSION in continuous_batching.RELEASES
needs_tested_release = pytest.mark.skipif(not IS_TESTED, reason="of Transformers 5.17 and 5.24")

FAMILIES = ["llama", "gemma3", "gpt_oss"]  # full attention; sliding layers too; and sinks
LENGTHS = [1, 3, 9, 17, 30, 33, 64]
NEW_TOKENS = 12
PAGE = 16


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB - 1, (length,), generator=random).tolist() for length in LENGTHS]


def options(**changed: Any) -> Any:
    """A small cache, with whatever name the release has for the size of a page."""
    config = transformers.ContinuousBatchingConfig
    page = "page_size" if "page_size" in {field.name for field in dataclasses.fields(config)} else "block_size"
    return config(**({page: PAGE, "num_blocks": 80, "max_batch_tokens": 64, "use_cuda_graph": False} | changed))


def settings() -> Any:
    return transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=VOCAB + 1, pad_token_id=0
    )


def one_by_one(model: Any) -> list[list[int]]:
    outputs = (model.generate(torch.tensor([prompt]), generation_config=settings()) for prompt in prompts())
    return [output[0, len(prompt) :].tolist() for prompt, output in zip(prompts(), outputs)]


def batched(model: Any, **changed: Any) -> list[list[int]]:
    outputs = model.generate_batch(
        inputs=prompts(), generation_config=settings(), continuous_batching_config=options(**changed)
    )
    tokens = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    return [tokens[tuple(prompt)] for prompt in prompts()]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The attention calls of a test: their longest query, and the block size of the cache they read."""
    calls = []
    attend = ops.paged_attention

    def recorded(
        query: Any, key_cache: Any, value_cache: Any, table: Any, lens: Any, cu: Any, longest: int, **more: Any
    ):
        calls.append({"longest": int(cu.diff().max()), "block_size": key_cache.shape[1]})
        return attend(query, key_cache, value_cache, table, lens, cu, longest, **more)

    monkeypatch.setattr(ops, "paged_attention", recorded)
    return calls


@needs_tested_release
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_batch_tokens", [64, 256])  # prompts in pieces beside running requests; all at once
def test_tokens_are_those_of_generate(family: str, max_batch_tokens: int, steps: list[dict[str, int]]) -> None:
    model = tiny(family)
    expected = one_by_one(model)
    model.set_attn_implementation(continuous_batching.register_continuous_batching())
    assert not steps
    assert batched(model, max_batch_tokens=max_batch_tokens) == expected
    assert len(steps) % model.config.num_hidden_layers == 0
    assert len(steps) >= NEW_TOKENS * model.config.num_hidden_layers


@needs_tested_release
def test_steps_that_only_decode_read_the_cache_in_place(steps: list[dict[str, int]]) -> None:
    model = tiny("llama")
    model.set_attn_implementation(continuous_batching.register_continuous_batching())
    batched(model, max_batch_tokens=256)
    decoding = [step for step in steps if step["longest"] == 1]
    assert len(decoding) >= (NEW_TOKENS - 1) * model.config.num_hidden_layers
    assert {step["block_size"] for step in decoding} == {PAGE}


@needs_tested_release
def test_requests_longer_than_the_block_table(steps: list[dict[str, int]]) -> None:
    """Those decode without one."""
    model = tiny("llama")
    expected = one_by_one(model)
    model.set_attn_implementation(continuous_batching.register_continuous_batching())
    assert batched(model, max_blocks_per_request=2) == expected


@needs_tested_release
def test_a_shared_prefix_and_several_sequences_per_prompt() -> None:
    model = tiny("llama")
    prompt = prompts()[-1]
    expected = model.generate(torch.tensor([prompt]), generation_config=settings())[0, len(prompt) :].tolist()
    model.set_attn_implementation(continuous_batching.register_continuous_batching())
    config = settings()
    config.num_return_sequences = 3
    outputs = model.generate_batch(
        inputs=[prompt, prompt], generation_config=config, continuous_batching_config=options()
    )
    assert len(outputs) >= 2
    assert all(output.generated_tokens == expected for output in outputs.values())


@needs_tested_release
def test_windows_have_no_block_tables_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There Transformers would look for a package of flash attention that has the name of our implementation."""
    model, asked = tiny("gemma3"), options(max_blocks_per_request=8)
    model.set_attn_implementation(continuous_batching.register_continuous_batching())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    continuous_batching._module("initialization").ensure_decode_fast_path_is_available(model.config, asked, False)
    assert asked.max_blocks_per_request == 0


@needs_tested_release
def test_ordinary_forwards_of_other_models_are_bit_equal() -> None:
    model = tiny("gemma3")
    tokens = torch.tensor([prompts()[-1]])
    before = model(tokens).logits
    other = copy.deepcopy(model)
    other.set_attn_implementation(continuous_batching.register_continuous_batching())
    batched(other)
    assert torch.equal(model(tokens).logits, before)
    if not continuous_batching.CACHE_IS_AN_ARGUMENT:
        assert torch.equal(other(tokens).logits, before)  # outside of continuous batching the name means sdpa


@needs_tested_release
def test_sdpa_is_batched_as_before() -> None:
    continuous_batching.register_continuous_batching()
    model = tiny("llama")
    expected = one_by_one(model)
    model.set_attn_implementation("paged|sdpa" if continuous_batching.CACHE_IS_AN_ARGUMENT else "sdpa")
    assert batched(model) == expected


@needs_tested_release
def test_registering_twice_changes_nothing() -> None:
    first = continuous_batching.register_continuous_batching()
    asked = continuous_batching._module("cache").is_flash_attention_requested
    assert continuous_batching.register_continuous_batching() == first
    assert continuous_batching._module("cache").is_flash_attention_requested is asked


@needs_tested_release
@pytest.mark.skipif(not continuous_batching.CACHE_IS_AN_ARGUMENT, reason="of Transformers 5.17")
def test_an_ordinary_forward_under_the_name_is_refused() -> None:
    model = tiny("llama")
    model.set_attn_implementation(continuous_batching.register_continuous_batching())
    with pytest.raises(ValueError, match="must run in generate_batch"):
        model(torch.tensor([[3, 4, 5]]))


def test_other_releases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_TESTED:
        monkeypatch.setattr(continuous_batching, "RELEASES", ((5, 1),))
    with pytest.raises(RuntimeError, match=r"transformers must be .* for continuous batching, got"):
        continuous_batching.register_continuous_batching()
