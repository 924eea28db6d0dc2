"""How layers share one pool: groups of like visibility, lanes of storage. Pure functions of plain numbers.

Layers that see the same keys (full attention, or one sliding window) hold the same logical blocks, so they share a
block table: a *group*. A block of a group needs memory for each of its layers: its *lanes*. Groups draw on one pool,
so a lane is shared by one layer of each group, and groups are cut to one number of layers where that costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_GROUPS = 16


# A layer's key cache, value cache, and their scales, as the ops take them.
LayerTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer's keys and values live: the block table of its group, the storage of its lane."""

    group: int
    lane: int
    window: int | None  # keys a query sees, itself included; None = all


class LayerShape(NamedTuple):
    """Sizes of one layer's key and value rows."""

    num_kv_heads: int
    head_size: int
    head_size_v: int

    def elements(self, block_size: int) -> int:
        """Elements of one block of this layer."""
        return block_size * self.num_kv_heads * (self.head_size + self.head_size_v)


class LayerKind(NamedTuple):
    """What the first write of a layer tells: sizes, dtype and device of its keys and values as they come."""

    shape: LayerShape
    dtype: torch.dtype
    device: torch.device


def layers_per_group(counts: Sequence[int]) -> int:
    """Layers in a group, given how many layers there are of each kind of visibility.

    The size that leaves the fewest lanes of a group unused, among those that make at most ``MAX_GROUPS`` groups; the
    larger one of equals (fewer tables). ``[15, 3]`` -> 3, ``[12, 12]`` -> 12, ``[52, 10]`` -> 5.
    """

    def groups(size: int) -> int:
        return sum(-(-count // size) for count in counts)

    sizes = range(max(counts), 0, -1)
    return min((size for size in sizes if groups(size) <= max(MAX_GROUPS, len(counts))), key=lambda s: groups(s) * s)


def place_layers(windows: Sequence[int | None]) -> tuple[list[LayerPlace], list[int | None]]:
    """Group and lane of each layer, and the window of each group.

    Args:
        windows: per layer, the sliding window in tokens (itself included) or None for full attention.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = layers_per_group([len(layers) for layers in kinds.values()])
    places: dict[int, LayerPlace] = {}
    group_windows: list[int | None] = []
    for window, layers in kinds.items():
        for start in range(0, len(layers), size):
            for lane, layer in enumerate(layers[start : start + size]):
                places[layer] = LayerPlace(len(group_windows), lane, window)
            group_windows.append(window)
    return [places[layer] for layer in range(len(windows))], group_windows


def cache_views(lane: Tensor, shape: LayerShape, block_size: int) -> tuple[Tensor, Tensor]:
    """A layer's key and value cache as views of its lane.

    Args:
        lane: ``[num_blocks, elements]``. Of each (block, head) the key rows lie first, then the value rows, row-major.
        shape: sizes of the layer's rows.
        block_size: tokens in a block.

    Returns:
        ``[num_blocks, block_size, num_kv_heads, head_size]`` and ``[..., head_size_v]``.
    """
    key_elements = block_size * shape.head_size
    head_elements = key_elements + block_size * shape.head_size_v
    heads = lane[:, : shape.num_kv_heads * head_elements].unflatten(1, (shape.num_kv_heads, head_elements))
    key = heads[:, :, :key_elements].unflatten(2, (block_size, shape.head_size)).transpose(1, 2)
    value = heads[:, :, key_elements:].unflatten(2, (block_size, shape.head_size_v)).transpose(1, 2)
    return key, value
