"""Errors of this package that have no equal in Python."""

from __future__ import annotations

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
