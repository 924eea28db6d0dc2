"""Tokens of a step as models have them, ``[num_seqs, num_heads, length, size]``, and as ops do, each row at right."""

from __future__ import annotations

import torch
from torch import Tensor

from .lengths import Lengths, right_align
from .step import Step


def packed(states: Tensor, step: Step) -> Tensor:
    """``[num_seqs, num_heads, length, head_size]`` -> ``[num_tokens, num_heads, head_size]``, rows' tokens at right."""
    if step.length == 1:
        return states.squeeze(2)
    if step.order is not None:
        states = states.gather(2, step.order[:, None, :, None].expand(states.shape))
    return states.transpose(1, 2).flatten(0, 1)


def unpacked(out: Tensor, step: Step, masked: bool) -> Tensor:
    """What attention gave for packed queries, or one of each row -> ``[num_seqs, length, num_heads, head_size_v]``.

    Queries of padding give 0, unless a mask said what they see.
    """
    if step.length == 1 and step.num_new is None:
        return out
    out = out.view(step.num_seqs, step.length, *out.shape[-2:])
    if step.num_new is not None and not masked:  # padding is on earlier positions now, would see keys before them
        position = torch.arange(step.length, device=out.device)
        out.masked_fill_((position < step.length - step.num_new[:, None])[:, :, None, None], 0)
    if step.order is None:
        return out
    return out.gather(1, torch.argsort(step.order, dim=1)[:, :, None, None].expand(out.shape))


def packed_mask(mask: Tensor, step: Step, lengths: Lengths | None) -> Tensor:
    """``[num_seqs or 1, num_heads or 1, length, seen]`` to ``[num_tokens, num_heads or 1, seen]``.

    Columns become those of stored tokens, at right, by ``lengths`` (None: there is no padding, as in a compiled graph).
    """
    mask = mask.expand(step.num_seqs, -1, step.length, -1)
    if step.order is not None:
        mask = mask.gather(2, step.order[:, None, :, None].expand(mask.shape))
    if lengths is not None:
        mask = _aligned_columns(mask, lengths)
    if mask.dtype != torch.bool:
        mask = mask.float()
    return mask.transpose(1, 2).flatten(0, 1)


def _aligned_columns(mask: Tensor, lengths: Lengths) -> Tensor:
    if mask.shape[3] != lengths.seen:
        raise ValueError(f"mask must have a column for each of the {lengths.seen} positions, got {mask.shape[3]}")
    if lengths.gapless:
        return mask
    columns = right_align(lengths.stored()).to(mask.device)
    return mask.gather(3, columns[:, None, None, :].expand(mask.shape))
