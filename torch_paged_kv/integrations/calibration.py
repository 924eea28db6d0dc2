"""Fixed scales of an 8-bit cache from sample prompts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged_kv.integrations.layers import PagedLayer
from torch_paged_kv.integrations.transformers import PagedKVCache
from torch_paged_kv.reference import MAX_OF_DTYPE
from torch_paged_kv.scales import EIGHT_BIT_DTYPES, StaticScales
from torch_paged_kv.step import Step

# An int8 head is refused if half of its channels stay within this many steps of zero: a larger channel takes the range.
FEWEST_STEPS = 2


class _Observer(PagedKVCache):
    """A cache that notes the absolute maximum of every channel of what it is given."""

    peaks: list[dict[int, Tensor]]  # of keys, of values: per layer float32 [num_kv_heads, head_size]

    def write(self, layer: int, key: Tensor, value: Tensor) -> Step:
        """Store, and look at what was stored: padding was not."""
        step = super().write(layer, key, value)
        for peaks, states in zip(self.peaks, self.gather(layer), strict=True):
            peak = states.float().abs().amax((0, 2))
            peaks[layer] = torch.maximum(peaks[layer], peak) if layer in peaks else peak
        return step


@torch.no_grad()
def calibrate(
    model: Any,
    prompts: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    *,
    dtype: torch.dtype,
    scales: str = "per_head",
    margin: float = 1.0,
) -> StaticScales:
    """Fixed scales for ``PagedKVCache(dtype=dtype, scales=...)``: the largest key or value of sample prompts just fits.

    What is larger later is saturated. The prompts should look like those to come, in length too; a few thousand tokens
    do.

    Args:
        model: a decoder of Transformers that works with a :class:`PagedKVCache`.
        prompts: what a tokenizer returns for a batch, ``input_ids`` int64 ``[num_seqs, length]`` and, if padded,
            ``attention_mask``; or several batches.
        dtype: of the cache: float8_e4m3fn, float8_e5m2 or int8.
        scales: "per_head" or "per_tensor" (one for the keys and one for the values of a layer).
        margin: factor on the scales: 1.1 leaves room for numbers 10 % larger than any of the prompts'.

    Raises:
        ValueError: keys or values are not finite; or an int8 head has channels so much larger than the others that
            half of its channels would be stored as 0, 1 or 2 steps: no scale of the whole head fits them.
    """
    batches = [prompts] if isinstance(prompts, Mapping) else list(prompts)
    if dtype not in EIGHT_BIT_DTYPES:
        raise ValueError(f"dtype must be one of {EIGHT_BIT_DTYPES}, got {dtype}")
    if scales not in ("per_head", "per_tensor"):
        raise ValueError(f'scales must be "per_head" or "per_tensor", got {scales!r}')
    if not margin > 0:
        raise ValueError(f"margin must be above 0, got {margin}")
    if not batches:
        raise ValueError("prompts must hold at least one batch, got none")
    if model.config.is_encoder_decoder:
        raise ValueError(f"model must be a decoder, got {type(model).__name__}")
    peaks: list[dict[int, Tensor]] = [{}, {}]
    num_layers = 0  # that the cache pages
    for batch in batches:
        observer = _Observer(model.config.get_text_config(decoder=True))
        observer.peaks = peaks
        model(**_inputs(model, batch), **{cache_argument(model): observer}, use_cache=True)
        num_layers = sum(isinstance(layer, PagedLayer) for layer in observer.layers)
    key, value = (
        [_scale(f"{name} of layer {layer}", found.get(layer), dtype, scales, margin) for layer in range(num_layers)]
        for name, found in zip(("key", "value"), peaks, strict=True)
    )
    return StaticScales(dtype, key, value)


def cache_argument(model: Any) -> str:
    """Name of the argument that a model's forward takes a cache by: it is another one in the newest releases."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _inputs(model: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch on the model's device, its positions counted from each row's first token as ``generate`` counts them."""
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items()}
    mask = inputs.get("attention_mask")
    if mask is not None and "position_ids" in inspect.signature(model.forward).parameters:
        inputs.setdefault("position_ids", (mask.cumsum(1) - 1).clamp(min=0))
    return inputs


def _scale(name: str, peaks: Tensor | None, dtype: torch.dtype, scales: str, margin: float) -> Tensor:
    """Scale of one layer's keys or values: float32 ``[num_kv_heads]`` or ``[]`` on the CPU.

    Args:
        name: for errors.
        peaks: float32 ``[num_kv_heads, head_size]``, absolute maximum of each channel; None: the layer writes nothing.
        dtype: of the cache.
        scales: "per_head" or "per_tensor".
        margin: factor on the scale.
    """
    if peaks is None:
        return torch.ones(())
    peaks = peaks.cpu()
    if not peaks.isfinite().all():
        raise ValueError(f"prompts must give finite keys and values, got {peaks.max()} as the largest {name}")
    largest = peaks.amax(1) if scales == "per_head" else peaks.amax()
    scale = largest * (margin / MAX_OF_DTYPE[dtype])
    scale = torch.where(scale > 0, scale, 1.0)  # nothing but zeros
    if dtype == torch.int8:
        steps = peaks.median(1).values / scale  # [num_kv_heads]
        for head in ((steps < FEWEST_STEPS) & (largest > 0)).nonzero().flatten().tolist():
            raise ValueError(
                f'scales must be "per_slot" or dtype float8_e4m3fn: the {name}, head {head}, has channels up to '
                f"{peaks[head].max():.3g}, and half of them up to {peaks[head].median():.3g} only"
            )
    return scale
