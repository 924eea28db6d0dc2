"""Scales of an 8-bit cache: a key or value is divided by its scale, rounded, saturated and stored.

They are made for every slot and head as rows are stored, and then lie in a lane of the pool, beside the lane of the
rows, so that whatever moves blocks moves their scales; or they are fixed per layer (:class:`StaticScales`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .layout import LayerShape
from .reference import MAX_OF_DTYPE

__all__ = ["EIGHT_BIT_DTYPES", "LayerScales", "Scales", "StaticScales", "choose_scales", "scale_views"]

EIGHT_BIT_DTYPES = tuple(MAX_OF_DTYPE)
PER_SLOT = "per_slot"


@dataclass(frozen=True, eq=False, repr=False)
class StaticScales:
    """Scales that are fixed before anything is stored: real value = stored value * scale.

    Args:
        dtype: the cache dtype they were made for: float8_e4m3fn, float8_e5m2 or int8.
        key: per layer that the cache pages, float32 ``[]`` or ``[1]`` (per tensor) or ``[num_kv_heads]`` (per head).
        value: likewise.

    Raises:
        ValueError: a scale is NaN, infinite, zero or negative, or of a wrong shape or dtype.
    """

    dtype: torch.dtype
    key: Sequence[Tensor]
    value: Sequence[Tensor]

    def __post_init__(self) -> None:
        if self.dtype not in EIGHT_BIT_DTYPES:
            raise ValueError(f"dtype must be one of {EIGHT_BIT_DTYPES}, got {self.dtype}")
        if len(self.key) != len(self.value):
            raise ValueError(f"value must have a scale for each of {len(self.key)} layers, got {len(self.value)}")
        for name, scales in (("key", self.key), ("value", self.value)):
            for layer, scale in enumerate(scales):
                _check_scale(f"{name}[{layer}]", scale)

    def __repr__(self) -> str:
        return f"StaticScales({self.dtype}, {self.num_layers} layers)"

    @property
    def num_layers(self) -> int:
        """Layers that have scales."""
        return len(self.key)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file: ``key.<layer>`` and ``value.<layer>``, the cache dtype in its metadata."""
        from safetensors.torch import save_file

        tensors = {f"key.{layer}": scale for layer, scale in enumerate(self.key)}
        tensors |= {f"value.{layer}": scale for layer, scale in enumerate(self.value)}
        metadata = {"format": "pt", "dtype": str(self.dtype).removeprefix("torch.")}
        save_file({name: scale.detach().cpu().clone() for name, scale in tensors.items()}, str(path), metadata)

    @classmethod
    def load(cls, path: str | Path) -> StaticScales:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
            name = (file.metadata() or {}).get("dtype", "")
        dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in EIGHT_BIT_DTYPES}
        num_layers = len(tensors) // 2
        names = [[f"{kind}.{layer}" for layer in range(num_layers)] for kind in ("key", "value")]
        if name not in dtypes or set(tensors) != {*names[0], *names[1]}:
            raise ValueError(f"path must be a file that StaticScales.save wrote, got {path}")
        key, value = ([tensors[name] for name in kind] for kind in names)
        return cls(dtypes[name], key, value)


def _check_scale(name: str, scale: Tensor) -> None:
    if scale.dtype != torch.float32 or scale.dim() > 1 or scale.numel() == 0:
        raise ValueError(f"{name} must be float32 [], [1] or [num_kv_heads], got {scale.dtype} {list(scale.shape)}")
    for head, number in enumerate(scale.flatten().tolist()):
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} must be finite and above 0, got {number} of head {head}")


# How a cache is scaled: per slot and head, by fixed scales, or not at all.
Scales = StaticScales | str | None


def choose_scales(dtype: torch.dtype | None, scales: Scales) -> Scales:
    """What ``scales`` of a cache means for its dtype: "per_slot", fixed scales, or None for stored as it is.

    Args:
        dtype: of the cache; None is one of its keys' 16- or 32-bit dtypes.
        scales: "auto" is "per_slot" for an 8-bit dtype and None for others.

    Raises:
        ValueError: the dtype needs scales and gets none, or gets scales that do not belong to it.
    """
    eight_bit = dtype in EIGHT_BIT_DTYPES
    if isinstance(scales, StaticScales):
        if scales.dtype != dtype:
            raise ValueError(f"scales must be made for the cache's dtype {dtype}, got scales for {scales.dtype}")
        return scales
    if scales == "auto":
        return PER_SLOT if eight_bit else None
    if scales == PER_SLOT and not eight_bit:
        raise ValueError(f"scales must be None for a cache of dtype {dtype}, got {scales!r}")
    if scales in ("per_head", "per_tensor"):
        raise ValueError(
            f"scales must be numbers where they are {scales}: give what torch_paged_kv.calibrate(model, prompts, "
            f'dtype={dtype}, scales="{scales}") returns'
        )
    if scales not in (PER_SLOT, None):
        raise ValueError(f'scales must be "auto", "per_slot", None or StaticScales, got {scales!r}')
    if scales is None and dtype == torch.int8:
        raise ValueError('scales must be given for an int8 cache, "per_slot" or StaticScales: a key is no integer')
    return scales


class LayerScales(nn.Module):
    """The scales of a cache's layers, on the device of the caches.

    Buffers, with fixed scales: ``key_scale_<layer>`` and ``value_scale_<layer>``, as in :class:`StaticScales`.
    """

    def __init__(self, scales: StaticScales | str) -> None:
        super().__init__()
        self.static = scales if isinstance(scales, StaticScales) else None

    @property
    def lanes(self) -> int:
        """Lanes of the pool that a layer takes: that of its rows, and that of the scales of its slots."""
        return 2 if self.static is None else 1

    def elements(self, shape: LayerShape, block_size: int) -> int:
        """float32 elements that a block of a layer takes in the lane of its scales."""
        return 2 * block_size * shape.num_kv_heads if self.static is None else 0

    def add_layer(self, layer: int, shape: LayerShape, device: torch.device) -> None:
        """Bring the fixed scales of a layer to its device.

        Raises:
            ValueError: there are none for the layer, or not one for each of its heads.
        """
        if self.static is None:
            return
        if layer >= self.static.num_layers:
            raise ValueError(f"scales must have a scale for layer {layer}, got {self.static.num_layers} layers")
        for name, scale in (("key", self.static.key[layer]), ("value", self.static.value[layer])):
            if scale.numel() not in (1, shape.num_kv_heads):
                raise ValueError(
                    f"scales.{name}[{layer}] must have 1 or num_kv_heads={shape.num_kv_heads} scales, "
                    f"got {scale.numel()}"
                )
            with torch.inference_mode(False):
                self.register_buffer(f"{name}_scale_{layer}", scale.detach().to(device, copy=True), persistent=False)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """The fixed key and value scale of a layer."""
        key: Tensor = getattr(self, f"key_scale_{layer}")
        value: Tensor = getattr(self, f"value_scale_{layer}")
        return key, value


def scale_views(lane: Tensor, num_kv_heads: int, block_size: int) -> tuple[Tensor, Tensor]:
    """The scales of a layer's slots as views of their lane.

    Args:
        lane: float32 ``[num_blocks, elements]``. Of each (block, head) the key scales lie first, then the value scales.
        num_kv_heads: of the layer.
        block_size: tokens in a block.

    Returns:
        key_scale, value_scale: ``[num_blocks, block_size, num_kv_heads]``.
    """
    heads = lane[:, : 2 * block_size * num_kv_heads].unflatten(1, (num_kv_heads, 2, block_size))
    return heads[:, :, 0].transpose(1, 2), heads[:, :, 1].transpose(1, 2)
