"""generate with a prefix cache: known blocks of the prompts are taken, the others computed and remembered.

``generate`` asks a cache how many positions it holds and computes the rest, so all there is to do is to fill the cache
before its decoding loop, and to look at the tokens after it. The loops are wrapped when the first cache with a prefix
cache is made; they do nothing for other caches.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationMixin

from torch_paged_kv.prefix import PrefixCache

if TYPE_CHECKING:
    from torch_paged_kv.integrations.transformers import PagedKVCache

# Earlier releases compute a prompt in chunks as if the cache were empty.
_CHUNKS_FROM_THE_BEGINNING = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 24)
LOOPS = ("_sample", "_beam_search")
# What a loop is given beside the prompt that leaves the keys and values of its tokens as they are.
_HARMLESS = {"attention_mask", "cache", "cache_position", "generation_config", "logits_processor", "logits_to_keep"}
_HARMLESS |= {"output_attentions", "output_hidden_states", "past_key_values", "position_ids", "return_dict"}
_HARMLESS |= {"stopping_criteria", "streamer", "synced_gpus", "use_cache"}
_DEPENDS_ON_LENGTH = frozenset(["dynamic", "longrope"])  # RoPE that turns the same key otherwise in a longer prompt


def check_config(config: Any, only_attention: bool) -> None:
    """Whether keys and values of a model's tokens depend on the tokens before them alone.

    Raises:
        ValueError: they do not, or there is no config to tell.
    """
    if config is None:
        raise ValueError("prefix_cache must come with the model's config")
    if config.is_encoder_decoder:
        raise ValueError(f"prefix_cache must be for a decoder-only model, got {config.model_type}")
    if not only_attention:
        raise ValueError(f"prefix_cache must be for a model of attention layers alone, got {config.model_type}")
    text_config = config.get_text_config(decoder=True)
    for name in ("rope_parameters", "rope_scaling"):
        if kinds := _rope_types(getattr(text_config, name, None)) & _DEPENDS_ON_LENGTH:
            raise ValueError(
                f"prefix_cache must be for keys that do not change with the length, got {kinds.pop()} RoPE"
            )


def _rope_types(parameters: Any) -> set[Any]:
    if not isinstance(parameters, dict):
        return set()
    kinds = {parameters.get("rope_type", parameters.get("type"))}
    for part in parameters.values():  # a set of parameters for each kind of layer
        kinds |= _rope_types(part)
    return kinds


def install() -> None:
    """Wrap the decoding loops of ``generate``, once."""
    for name in LOOPS:
        loop = getattr(GenerationMixin, name)
        if not hasattr(loop, "_without_prefix_cache"):
            setattr(GenerationMixin, name, _with_prefix_cache(loop))


def _with_prefix_cache(loop: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loop)
    def wrapped(model: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache") if kwargs.get("cache") is not None else kwargs.get("past_key_values")
        prefix_cache = getattr(cache, "prefix_cache", None)
        if cache is None or prefix_cache is None or not _admit(model, cache, prefix_cache, input_ids, kwargs):
            return loop(model, input_ids, *args, **kwargs)
        output = loop(model, input_ids, *args, **kwargs)
        if cache.register_prompts() and cache.seen <= input_ids.shape[1]:  # else the first decode step did
            return output  # a first token is not stored yet: the prompts are all there is
        sequences = output if isinstance(output, Tensor) else output.sequences
        if loop.__name__ == "_sample" and sequences.shape[1] >= cache.seen:  # beams are handed out in another order
            ends = getattr(kwargs.get("generation_config"), "eos_token_id", None)
            real = _until_the_end(cache.stored(), sequences.cpu(), input_ids.shape[1], ends)
            prefix_cache.register_batch(cache, prefix_cache.batch(cache, sequences[:, : real.shape[1]], real))
        return output

    wrapped._without_prefix_cache = loop  # type: ignore[attr-defined]
    return wrapped


def _until_the_end(stored: Tensor, sequences: Tensor, begin: int, ends: int | list[int] | None) -> Tensor:
    """Which stored positions are of a row's prompt or answer: what ``generate`` pads a finished row with is not.

    Args:
        stored: bool ``[num_seqs, seen]``.
        sequences: int64 ``[num_seqs, length]``, at least as long.
        begin: of the answers.
        ends: tokens that end a row.
    """
    if ends is None:
        return stored
    end = torch.isin(sequences[:, begin : stored.shape[1]], torch.tensor(ends))
    after = end.cumsum(1) - end.long() > 0
    return torch.cat([stored[:, :begin], stored[:, begin:] & ~after], 1)


def _admit(
    model: Any, cache: PagedKVCache, prefix_cache: PrefixCache, input_ids: Tensor, arguments: dict[str, Any]
) -> bool:
    """Fill the cache with what is known of the prompts; whether what it will hold may be remembered."""
    if reason := _obstacle(model, cache, prefix_cache, input_ids, arguments):
        prefix_cache.miss(reason, input_ids.shape[0])
        warnings.warn(f"prefix_cache is not used: {reason}", stacklevel=2)
        return False
    if cache.seen:
        return True  # a chat goes on: nothing to look for, but what is new will be remembered
    batch = prefix_cache.batch(cache, input_ids, arguments.get("attention_mask"))
    if _CHUNKS_FROM_THE_BEGINNING and _chunk_size(arguments):
        cache.expect_prompts(batch)
        return True
    for tokens in prefix_cache.shared_within(cache, batch):
        _compute(model, cache, prefix_cache, tokens, arguments)
    prefix_cache.attach(cache, batch)
    cache.expect_prompts(batch)
    return True


def _obstacle(
    model: Any, cache: PagedKVCache, prefix_cache: PrefixCache, input_ids: Tensor, arguments: dict[str, Any]
) -> str | None:
    """Why keys and values may depend on more than the tokens."""
    others = sorted(name for name, value in arguments.items() if _says_more(name, value))
    if others:
        return f"the model is given more than tokens: {', '.join(others)}"
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    if mask is not None and mask.shape != input_ids.shape:
        return "input_ids must hold all tokens, not only new ones"
    if positions is not None and not _counts_tokens(positions, mask, input_ids):
        return "position_ids must count the tokens of a row from 0"
    if cache.seen > input_ids.shape[1]:
        return "input_ids must hold all tokens, not only new ones"
    adapted = getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")
    if adapted and prefix_cache.salt["adapter"] is None:
        return "the model has an adapter: name it, prefix_cache.with_salt(adapter=...)"
    return None


def _says_more(name: str, value: Any) -> bool:
    """Whether an argument may change keys and values."""
    if value is None or name in _HARMLESS:
        return False
    return not (name.endswith("token_type_ids") and not bool(value.any()))  # all zero: text alone


def _counts_tokens(positions: Tensor, mask: Tensor | None, input_ids: Tensor) -> bool:
    if mask is None:
        expected = torch.arange(input_ids.shape[1], device=positions.device)[None]
        return positions.shape[-1] == expected.shape[1] and bool((positions == expected).all())
    expected = (mask.long().cumsum(-1) - 1).to(positions.device)
    return positions.shape == expected.shape and bool(
        ((positions == expected) | (mask == 0).to(positions.device)).all()
    )


def _compute(
    model: Any, cache: PagedKVCache, prefix_cache: PrefixCache, tokens: Tensor, arguments: dict[str, Any]
) -> None:
    """Compute a beginning that rows of a batch share, once, and remember it. The cache is empty before and after."""
    batch = prefix_cache.batch(cache, tokens[None])
    settings = {"use_cache": True, _name_of(cache, arguments): cache}
    if "logits_to_keep" in arguments:
        settings["logits_to_keep"] = 1
    chunk = _chunk_size(arguments) or len(tokens)
    device = model.get_input_embeddings().weight.device
    try:
        prefix_cache.attach(cache, batch, count=False)
        for part in tokens[None, cache.seen :].to(device).split(chunk, dim=1):
            model(input_ids=part, **settings)
        prefix_cache.register_batch(cache, batch)
    finally:
        cache.reset()


def _chunk_size(arguments: dict[str, Any]) -> int | None:
    size: int | None = getattr(arguments.get("generation_config"), "prefill_chunk_size", None)
    return size


def _name_of(cache: PagedKVCache, arguments: dict[str, Any]) -> str:
    return next(name for name in ("cache", "past_key_values") if arguments.get(name) is cache)
