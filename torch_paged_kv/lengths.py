"""The host's mirror of a cache's lengths, so that eager code never asks the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Segment:
    """A padded step: its first position, and which of its positions hold a token: bool ``[num_seqs, length]``."""

    start: int
    real: Tensor

    def tokens_before(self, position: int) -> Tensor:
        """Tokens of each row before ``position``: int64 ``[num_seqs]``."""
        return self.real[:, : max(0, position - self.start)].sum(1)


@dataclass
class Lengths:
    """How many tokens each row holds, and at which positions of the padded batch.

    ``seen`` counts positions, padding included; ``lens`` counts tokens. Steps without padding need no record; padded
    ones are kept as segments.
    """

    lens: list[int]
    seen: int = 0
    floor: list[int] = field(default_factory=list)  # rows cannot get shorter than this: windows released their blocks
    segments: list[Segment] = field(default_factory=list)

    @classmethod
    def of(cls, num_seqs: int) -> Lengths:
        """Empty rows."""
        return cls([0] * num_seqs, floor=[0] * num_seqs)

    def copy(self) -> Lengths:
        """A copy that shares nothing mutable."""
        return Lengths(list(self.lens), self.seen, list(self.floor), list(self.segments))

    def advance(self, length: int, real: Tensor | None) -> None:
        """A step of ``length`` positions. ``real``: bool ``[num_seqs, length]`` on the CPU, None = all of them."""
        counts = [length] * len(self.lens)
        if real is not None:
            self.segments.append(Segment(self.seen, real))
            counts = real.sum(1).tolist()
        self.lens = [old + count for old, count in zip(self.lens, counts, strict=True)]
        self.seen += length

    def blocks(self, counts: Sequence[int], block_size: int, shared: bool) -> tuple[int, int]:
        """New blocks a step of ``counts`` tokens a row takes at most, and columns of the longest row."""
        wanted = widest = 0
        for old, count in zip(self.lens, counts, strict=True):
            columns = -(-(old + count) // block_size)
            copied = shared and count > 0 and old % block_size > 0
            wanted += columns - -(-old // block_size) + copied
            widest = max(widest, columns)
        return wanted, widest

    def crop(self, length: int) -> None:
        """Forget the positions from ``length`` on.

        Raises:
            ValueError: a sliding window has released blocks that the shorter rows would need.
        """
        padding = [0] * len(self.lens)
        for part in self.segments:
            positions = min(part.real.shape[1], max(0, length - part.start))
            tokens = part.tokens_before(length).tolist()
            padding = [old + positions - count for old, count in zip(padding, tokens, strict=True)]
        lens = [length - count for count in padding]
        for row, (kept, floor) in enumerate(zip(lens, self.floor, strict=True)):
            if 0 < kept < floor:
                raise ValueError(
                    f"length must leave row {row} at least {floor} tokens, whose window is still held, got {kept}"
                )
        self.lens, self.seen = lens, length
        self.floor = [min(floor, kept) for floor, kept in zip(self.floor, lens, strict=True)]
        kept_parts = [part for part in self.segments if part.start < length]
        self.segments = [Segment(part.start, part.real[:, : length - part.start]) for part in kept_parts]

    def check_mask(self, mask: Tensor, length: int) -> None:
        """Check bool ``[num_seqs, seen + length]``: where earlier positions and ``length`` new ones hold a token.

        Raises:
            ValueError: it speaks of another number of positions, or contradicts what earlier steps stored.
        """
        if mask.shape[1] != self.seen + length:
            raise ValueError(f"mask must have {self.seen} + {length} positions, got {mask.shape[1]}")
        if self.seen and mask[:, :-length].sum(1).tolist() != self.lens:
            raise ValueError(
                "mask must keep the padding of earlier steps: the rows hold "
                f"{self.lens} tokens, got {mask[:, :-length].sum(1).tolist()}"
            )

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes row ``rows[i]``."""
        self.lens = [self.lens[row] for row in rows]
        self.floor = [self.floor[row] for row in rows]
        self.segments = [Segment(part.start, part.real[list(rows)]) for part in self.segments]

    @property
    def alike(self) -> bool:
        """Whether all rows are of one length, so that any selection of as many rows is the same."""
        return not self.segments and len(set(self.lens)) <= 1

    @property
    def gapless(self) -> bool:
        """Whether padding lies before each row's first token only."""
        return all(part.start == 0 and is_right_aligned(part.real) for part in self.segments)

    def stored(self) -> Tensor:
        """Which positions hold a token: bool ``[num_seqs, seen]`` on the CPU."""
        stored = torch.ones(len(self.lens), self.seen, dtype=torch.bool)
        for part in self.segments:
            stored[:, part.start : part.start + part.real.shape[1]] = part.real
        return stored


def is_right_aligned(real: Tensor) -> bool:
    """Whether each row's true entries are its last ones: ``real`` is bool ``[num_seqs, length]``."""
    return bool((real[:, 1:] >= real[:, :-1]).all())


def right_align(stored: Tensor) -> Tensor:
    """Order of columns that moves the true ones of each row to its right end and keeps their order.

    Args:
        stored: bool ``[num_seqs, length]``.

    Returns:
        int64 ``[num_seqs, length]``, an index for :func:`torch.gather`.
    """
    return torch.argsort(stored.to(torch.uint8), dim=1, stable=True)
