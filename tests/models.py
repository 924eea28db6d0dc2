"""What the model tests share: tiny random models of many families, real small ones, and ways to generate with them.

A *scenario* is one way of using a cache (greedy, beams, chat turns, ...). It runs on any cache that its `Caches` hands
out, so the same code gives the reference (DynamicCache) and the result under test (PagedKVCache).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

import torch_paged_kv
from torch_paged_kv import _models
from torch_paged_kv.integrations import transformers as integration

VOCAB = 131
WINDOW = 8  # shorter than PROMPT, and no multiple of a block of 3
PROMPT = 13
NEW_TOKENS = 16
PAD, EOS = 0, VOCAB - 1

# --------------------------------------------------------------------------------------------------- tiny random models

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": EOS,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SEQ2SEQ: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def _sizes(*without: str, **changed: Any) -> dict[str, Any]:
    return {key: value for key, value in _SIZES.items() if key not in without} | changed


def _tokens() -> dict[str, Any]:
    names = ("vocab_size", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    return {name: _SIZES[name] for name in names}


# family -> (configuration class, its arguments); the class is looked up late, so that a release may lack some.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _sizes()),
    "qwen3": ("Qwen3Config", _sizes()),
    "gemma3": ("Gemma3TextConfig", _sizes(sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=16)),
    "gpt_oss": ("GptOssConfig", _sizes(sliding_window=WINDOW, layer_types=_MIXED, **_EXPERTS)),
    "phi3": ("Phi3Config", _sizes("head_dim", hidden_size=64)),
    "mistral": ("MistralConfig", _sizes(sliding_window=WINDOW)),
    "gpt2": ("GPT2Config", _tokens() | {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    # More ways through the attention interface: softcap, chunked masks, experts, a window the model does not pass on,
    # layers that share K and V.
    "gemma2": ("Gemma2Config", _sizes(sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=16)),
    "mixtral": ("MixtralConfig", _sizes(sliding_window=WINDOW, **_EXPERTS)),
    "phimoe": ("PhimoeConfig", _sizes("head_dim", hidden_size=64, sliding_window=WINDOW, **_EXPERTS)),
    "llama4": (
        "Llama4TextConfig",
        _sizes(intermediate_size_mlp=64, attention_chunk_size=WINDOW, interleave_moe_layer_step=2, **_EXPERTS),
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        _sizes(num_hidden_layers=6, intermediate_size=[64] * 6, sliding_window=WINDOW, layer_types=_MIXED * 2)
        | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
        | {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6},
    ),
    # Layers of other kinds between those with attention.
    "qwen3_next": (
        "Qwen3NextConfig",
        _sizes(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    # Families that touch K and V between the cache and the attention: the cache gathers for them.
    "falcon": (
        "FalconConfig",
        _tokens() | {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "multi_query": True},
    ),
    "bloom": ("BloomConfig", _tokens() | {"hidden_size": 48, "n_layer": 3, "n_head": 4}),
    "deepseek_v3": (
        "DeepseekV3Config",
        _sizes("head_dim", num_key_value_heads=4)
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
        | {"moe_intermediate_size": 32},
    ),
    "t5": (
        "T5Config",
        _tokens()
        | {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 2},
    ),
    "bart": ("BartConfig", _tokens() | _SEQ2SEQ | {"max_position_embeddings": 128}),
    "whisper": (
        "WhisperConfig",
        _tokens() | _SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64},
    ),
}

EAGER_ONLY = {"gpt_oss", "gemma2"}  # sinks and softcap: SDPA has neither
DIRECT = ("llama", "qwen3", "gemma3", "gpt_oss", "phi3", "mistral", "gpt2")
DIRECT_MORE: tuple[str, ...] = ("gemma2", "mixtral", "llama4", "gemma3n")
GATHERED = ("falcon", "bloom", "deepseek_v3")
ENCODER_DECODER = ("t5", "bart", "whisper")
SLIDING = ("gemma3", "gpt_oss", "mistral")
RELEASE = Version(transformers.__version__)
if RELEASE.major >= 5:  # before, DynamicCache itself differs from no cache on phimoe, and qwen3_next has its own cache
    DIRECT_MORE += ("phimoe", "qwen3_next")


def goes_direct(family: str) -> bool:
    """Whether this release's code of a family attends through a function it looks up; else the cache gathers."""
    if RELEASE.major < 5:  # eager attention is not looked up
        return family in DIRECT + DIRECT_MORE and family not in EAGER_ONLY
    return family in DIRECT + DIRECT_MORE


def tiny(family: str, seed: int = 0) -> Any:
    """A random model of `family`, the same on every call, whose greedy continuations are diverse."""
    class_name, arguments = _FAMILIES[family]
    config = getattr(transformers, class_name)(**arguments)
    auto: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if family == "whisper":
        auto = transformers.AutoModelForSpeechSeq2Seq
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = auto.from_config(config, attn_implementation="eager" if family in EAGER_ONLY else None)
    return randomise(model, seed)


def randomise(model: Any, seed: int = 0) -> Any:
    """Weights large enough for diverse tokens, the same in every release of Transformers."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed_positions" not in name:
                parameter.normal_(0, 0.15, generator=generator)
            elif "sinks" in name:
                parameter.normal_(0, 1, generator=generator)
            elif "bias" in name:
                parameter.normal_(0, 0.05, generator=generator)
    return model.float().eval()


def draft_of(model: Any) -> Any:
    """A draft model that agrees with `model` often, not always: some of its tokens are taken, some rolled back.

    It drafts several tokens a round, however sure it is of them, so that what is rolled back does not depend on how
    the machine rounds. Where sliding layers of a `DynamicCache` cannot be rolled back, it drafts over a paged cache.
    """
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        weight = draft.get_output_embeddings().weight
        weight.add_(torch.randn(weight.shape, generator=generator) * 0.03)
    draft.generation_config.assistant_confidence_threshold = 0.0
    draft.generation_config.num_assistant_tokens = 4
    if model.config.model_type in ("mistral", "gemma3_text", "gpt_oss") and not dynamic_windows_roll_back():
        torch_paged_kv.patch(draft, block_size=4)
    return draft


@functools.cache
def dynamic_windows_roll_back() -> bool:
    """Whether a `DynamicCache` with sliding layers can be an assistant's in this release of Transformers.

    In the older ones such a layer refuses to be cropped once its window is full. In some later ones it gives more keys
    than its mask has columns as soon as a round drafts two tokens.
    """
    cache: Any = DynamicCache(config=transformers.MistralConfig(**_sizes(sliding_window=WINDOW)))
    if not hasattr(cache, "activate_past_recording"):
        return False
    cache.activate_past_recording()
    for length in (WINDOW + 1, 1):
        masked = cache.get_mask_sizes(length, 0)[0]
        keys, _ = cache.update(torch.zeros(1, 2, length, 16), torch.zeros(1, 2, length, 16), 0)
    return bool(keys.shape[-2] == masked)


# ---------------------------------------------------------------------------------------------------- real small models


@functools.cache
def real(name: str, device: str = "cpu") -> tuple[Any, Any]:
    """(model, tokenizer, which pads at the left) of a packaged real model in float32."""
    return _models.load(name, torch.float32, device)


# -------------------------------------------------------------------------------------------------------------- compile


def counting_compiler() -> tuple[list[Any], Any]:
    """(graphs, compile_config for `generate`): each graph that is compiled is put into the list, and run as it is."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    no_mode: dict[str, Any] = {"mode": None}
    config: Any = transformers.CompileConfig(backend=backend, fullgraph=True, **no_mode)
    config._compile_all_devices = True  # by itself it compiles on accelerators only
    torch._dynamo.reset()
    return graphs, config


# --------------------------------------------------------------------------------------------------------------- caches


@dataclass
class Caches:
    """Makes caches of one kind and remembers them, so that a test can look at what a scenario left behind."""

    make: Callable[[Any], Any]  # model -> cache
    made: list[Any] = field(default_factory=list)

    def new(self, model: Any) -> Any:
        self.made.append(self.make(model))
        return self.made[-1]

    def fork(self, cache: Any) -> Any:
        self.made.append(copy.deepcopy(cache))
        return self.made[-1]


def dynamic() -> Caches:
    return Caches(lambda model: DynamicCache(config=model.config.get_text_config(decoder=True)))


def paged(**arguments: Any) -> Caches:
    """Small blocks by default, so that a short text crosses many of their edges."""
    arguments = {"block_size": 4} | arguments
    return Caches(lambda model: torch_paged_kv.PagedKVCache(model.config, **arguments))


def assert_all_free(caches: Caches) -> None:
    """After `reset()` of every cache no block is held, and the books of each pool agree."""
    for cache in caches.made:
        cache.reset()
    for cache in caches.made:
        cache.pool.check()
        assert cache.pool.num_free == cache.pool.num_blocks > 0


@dataclass
class Paths:
    direct: int
    gathered: int


class count_paths:
    """How many attention calls went over the pool, and how many cache updates gathered, inside the `with` block."""

    def __enter__(self) -> Paths:
        self._before = dict(integration.path_counts())
        self.paths = Paths(0, 0)
        return self.paths

    def __exit__(self, *exc: object) -> None:
        after = integration.path_counts()
        self.paths.direct = after["direct"] - self._before["direct"]
        self.paths.gathered = after["gathered"] - self._before["gathered"]


# ------------------------------------------------------------------------------------------------------------ scenarios


@dataclass
class Outcome:
    tokens: list[Tensor]  # one [rows, length] for each call of generate
    logits: list[Tensor] = field(default_factory=list)  # [rows, vocab] for each step


def prompts(lengths: list[int], seed: int = 3, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Random prompts as one left-padded batch: input_ids and attention_mask, [len(lengths), max(lengths)]."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, vocab - 1, (length,), generator=generator)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, batch: dict[str, Tensor], cache: Any, **settings: Any) -> Outcome:
    """One call of `model.generate`; greedy and NEW_TOKENS long unless `settings` say otherwise."""
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": PAD, "eos_token_id": EOS} | settings
    out = model.generate(**batch, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **settings)
    return Outcome([out.sequences], list(out.logits or ()))


def extend(sequences: Tensor, mask: Tensor, new: Tensor) -> dict[str, Tensor]:
    """The batch `sequences` (that began as `mask` says) with `new` tokens after it."""
    ids = torch.cat([sequences, new], dim=1)
    ones = mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])
    return {"input_ids": ids, "attention_mask": torch.cat([mask, ones], dim=1)}


def greedy(model: Any, caches: Caches) -> Outcome:
    return generate(model, prompts([PROMPT]), caches.new(model))


def left_padded(model: Any, caches: Caches) -> Outcome:
    return generate(model, prompts([PROMPT, 5, 1]), caches.new(model))


def beams(model: Any, caches: Caches) -> Outcome:
    return generate(model, prompts([PROMPT, 4]), caches.new(model), num_beams=3)


def beams_return_2(model: Any, caches: Caches) -> Outcome:
    return generate(model, prompts([PROMPT]), caches.new(model), num_beams=4, num_return_sequences=2)


def sampling(model: Any, caches: Caches) -> Outcome:
    torch.manual_seed(5)
    return generate(model, prompts([PROMPT, 6]), caches.new(model), do_sample=True, top_k=20, temperature=1.5)


def num_return_sequences(model: Any, caches: Caches) -> Outcome:
    torch.manual_seed(6)
    return generate(model, prompts([PROMPT]), caches.new(model), do_sample=True, top_k=0, num_return_sequences=3)


def chunked_prefill(model: Any, caches: Caches) -> Outcome:
    return generate(model, prompts([PROMPT + 4, 9]), caches.new(model), prefill_chunk_size=5)


def prompt_lookup(model: Any, caches: Caches) -> Outcome:
    batch = prompts([6])
    batch = {name: tensor.repeat(1, 3) for name, tensor in batch.items()}  # a prompt that repeats gives candidates
    return generate(model, batch, caches.new(model), prompt_lookup_num_tokens=3, max_matching_ngram_size=2)


def assisted(model: Any, caches: Caches) -> Outcome:
    return generate(model, prompts([PROMPT]), caches.new(model), assistant_model=draft_of(model))


def forked(model: Any, caches: Caches) -> Outcome:
    """One prompt is read once; two deep copies of its cache go on with suffixes of their own, then the original."""
    prompt, cache = prompts([PROMPT]), caches.new(model)
    with torch.no_grad():
        model(**prompt, past_key_values=cache)
    outcome = Outcome([])
    for seed, which in enumerate([caches.fork(cache), caches.fork(cache), cache]):
        suffix = prompts([3], seed=20 + seed)["input_ids"]
        part = generate(model, extend(prompt["input_ids"], prompt["attention_mask"], suffix), which)
        outcome.tokens += part.tokens
        outcome.logits += part.logits
    return outcome


def chat(model: Any, caches: Caches) -> Outcome:
    """Three turns of a left-padded batch on one cache that is kept."""
    batch, cache, outcome = prompts([PROMPT, 5]), caches.new(model), Outcome([])
    for turn in range(3):
        # No end of sequence: rows that stop early are padded by generate, and no chat goes on after such padding.
        part = generate(model, batch, cache, max_new_tokens=6, eos_token_id=None)
        outcome.tokens += part.tokens
        outcome.logits += part.logits
        user = prompts([4, 4], seed=30 + turn)["input_ids"]
        batch = extend(part.tokens[0], batch["attention_mask"], user)
    return outcome


Scenario = Callable[[Any, Caches], Outcome]
# scenario -> the scenario that DynamicCache runs as its reference. Assisted decoding promises the greedy tokens, and
# DynamicCache does not run it on sliding layers in every release.
_greedy_repeated: Scenario = lambda model, caches: generate(  # noqa: E731
    model, {name: tensor.repeat(1, 3) for name, tensor in prompts([6]).items()}, caches.new(model)
)
SCENARIOS: dict[str, tuple[Scenario, Scenario]] = {
    "greedy": (greedy, greedy),
    "left_padded": (left_padded, left_padded),
    "beams": (beams, beams),
    "beams_return_2": (beams_return_2, beams_return_2),
    "sampling": (sampling, sampling),
    "num_return_sequences": (num_return_sequences, num_return_sequences),
    "chunked_prefill": (chunked_prefill, chunked_prefill),
    "prompt_lookup": (prompt_lookup, _greedy_repeated),
    "assisted": (assisted, greedy),
    "forked": (forked, forked),
    "chat": (chat, chat),
}


def assert_same(result: Outcome, expected: Outcome, *, logits: bool = True, rtol: float = 1e-4) -> None:
    """Equal tokens; and logits whose difference is small beside the spread of the logits themselves."""
    assert len(result.tokens) == len(expected.tokens)
    for mine, theirs in zip(result.tokens, expected.tokens, strict=True):
        assert torch.equal(mine, theirs), f"tokens differ:\n{mine}\nexpected\n{theirs}"
    if not logits:
        return
    assert len(result.logits) == len(expected.logits)
    for step, (mine, theirs) in enumerate(zip(result.logits, expected.logits, strict=True)):
        error, spread = (mine - theirs).abs().max().item(), theirs.abs().max().item()
        assert error <= rtol * spread, f"step {step}: logits differ by {error}, spread {spread}"
