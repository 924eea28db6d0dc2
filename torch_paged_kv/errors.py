"""Errors of this package that have no equal in Python, and the types of what an op throws."""

from __future__ import annotations

import re

__all__ = ["OutOfBlocksError"]


class OutOfBlocksError(RuntimeError):
    """A pool had fewer free blocks than a call wanted. The pool, tables and lengths are exactly as before the call.

    Attributes:
        wanted: blocks the call needed.
        free: blocks it could have taken.
        evictable: blocks that a prefix cache could have given up in addition.
    """

    def __init__(self, wanted: int, free: int, evictable: int = 0) -> None:
        super().__init__(f"out of blocks: wanted {wanted}, free {free}, evictable {evictable}")
        self.wanted = wanted
        self.free = free
        self.evictable = evictable

    def __reduce__(self) -> tuple[type[OutOfBlocksError], tuple[int, int, int]]:
        return type(self), (self.wanted, self.free, self.evictable)


def typed(error: RuntimeError) -> Exception:
    """What an op's C++ threw, in its type: from torch 2.15 on a RuntimeError comes of it, whatever it was.

    By its text, which is ours: "out of blocks: wanted W, free F", or "<argument> must <rule>, got <value>". Any other
    error is returned as it is.
    """
    if type(error) is not RuntimeError:
        return error
    if numbers := re.search(r"out of blocks: wanted (\d+), free (\d+)", str(error)):
        return OutOfBlocksError(int(numbers[1]), int(numbers[2]))
    if re.match(r"\S+( and \S+)? must .*, got ", str(error), re.DOTALL):
        return ValueError(str(error))
    return error
