"""What the layers of one step share, and where a cache stands between steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .layout import LayerTensors
from .shared_prefix import SharedPrefixes


@dataclass
class Step:
    """What the layers of one step share. Its tokens are the flattened ``[num_seqs, length]`` batch.

    Its tensors are on the pool's device; layers elsewhere use a copy of them, made once a step for each device.
    """

    num_seqs: int
    length: int
    slot_mapping: tuple[Tensor, ...]  # per group: int64 [num_tokens]
    block_table: tuple[Tensor, ...]  # per group: int32 [num_seqs, max_blocks]
    seq_lens: Tensor  # int32 [num_seqs], this step's tokens included
    cu_seqlens_q: Tensor  # int32 [num_seqs + 1]
    num_new: Tensor | None  # int32 [num_seqs] tokens; None = no padding
    order: Tensor | None  # int64 [num_seqs, length]: moves tokens to the right of their row; None = they are there
    eager: bool  # not inside a compiled graph
    written: int = -1  # last layer that wrote
    tensors: LayerTensors | None = None  # its caches and scales
    asked: tuple[Any, bool] | None = None  # a model's config, and whether it asks for weights; for integrations
    shared_prefixes: dict[int, SharedPrefixes | None] = field(default_factory=dict)  # per group, once asked for
    copies: dict[torch.device, Step] = field(default_factory=dict)

    def on(self, device: torch.device) -> Step:
        """The step for layers on ``device``."""
        if device == self.seq_lens.device:
            return self
        if device not in self.copies:
            self.copies[device] = self._copied_to(device)
        return self.copies[device]

    def _copied_to(self, device: torch.device) -> Step:
        def copied(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=device.type == "cuda")

        return replace(
            self,
            slot_mapping=tuple(copied(slots) for slots in self.slot_mapping),
            block_table=tuple(copied(table) for table in self.block_table),
            seq_lens=copied(self.seq_lens),
            cu_seqlens_q=copied(self.cu_seqlens_q),
            num_new=None if self.num_new is None else copied(self.num_new),
            order=None if self.order is None else copied(self.order),
            shared_prefixes={},
        )


@dataclass
class Padding:
    """Which positions of the coming step hold a token."""

    num_new: Tensor  # int32 [num_seqs]
    real: Tensor | None  # bool [num_seqs, length] on the CPU; None inside a compiled graph
    order: Tensor | None  # as in Step


@dataclass
class Progress:
    """Where the cache stands between steps and within one: plain state, as a module's attributes are slow to set."""

    step: Step | None = None  # begun and not yet written by every layer
    start: int = 0  # positions before the last step that began outside of a compiled graph
    padding: Padding | None = None  # of the coming step
    mirror_stale: bool = False  # steps ran inside a compiled graph since the host last looked
    announced: tuple[int, int] | None = None  # the coming step as the host expects it: positions, blocks
    trusted: bool = False  # the mirror holds announced steps that it has not compared with the tensors
    keeping_past: bool = False  # sliding windows hold on to what leaves them ...
    cropped: bool = False  # ... until a crop
    expected: int | None = None  # positions there will be in the end, if somebody said so
    pending: Any = None  # the layer that wrote and has not attended; for integrations
