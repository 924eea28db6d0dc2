"""Digests of the blocks of a prompt: SHA-256 over everything that decides a block's keys and values."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Label", "block_digests", "root_digest"]

Label = str | bytes | int | None


def root_digest(fields: Iterable[tuple[str, Label | Sequence[Label]]], before: bytes = b"") -> bytes:
    """SHA-256 of named values, each with its type and length, so that no two lists of fields are written alike.

    Args:
        fields: names and values.
        before: :func:`encoded_fields` of those that come first.

    Raises:
        TypeError: a value is none of str, bytes, int, None, or a sequence of them.
    """
    return hashlib.sha256(before + encoded_fields(fields)).digest()


def encoded_fields(fields: Iterable[tuple[str, Label | Sequence[Label]]]) -> bytes:
    """What :func:`root_digest` hashes, with the same errors; of two lists after one another it is that of both."""
    return b"".join(_encoded(name) + _encoded(value) for name, value in fields)


def _encoded(value: Label | Sequence[Label]) -> bytes:
    if value is None:
        kind, data = b"n", b""
    elif isinstance(value, str):
        kind, data = b"s", value.encode()
    elif isinstance(value, bytes):
        kind, data = b"b", value
    elif isinstance(value, int) and not isinstance(value, bool):
        kind, data = b"i", str(value).encode()
    elif isinstance(value, (list, tuple)):
        kind, data = b"l", b"".join(_encoded(item) for item in value)
    else:
        raise TypeError(f"a label must be str, bytes, int or None, got {type(value).__name__}")
    return kind + len(data).to_bytes(8, "little") + data


def block_digests(tokens: Tensor, block_size: int, root: bytes) -> list[bytes]:
    """Digest of each whole block of a sequence: SHA-256 of the digest before it and its tokens as 64-bit numbers.

    Args:
        tokens: integers ``[length]``.
        block_size: tokens in a block; a last block that is not full has no digest.
        root: what stands before the first block, 32 bytes.
    """
    return hash_blocks(tokens, block_size, root, ()).digests


class Hashed(NamedTuple):
    """A sequence and the digests of its whole blocks."""

    root: bytes
    data: bytes  # the tokens of those blocks, as they are hashed
    digests: list[bytes]

    def shared(self, root: bytes, data: bytes, size: int) -> list[bytes]:
        """Digests of the blocks, ``size`` bytes each, that another sequence begins with, too."""
        alike, end = 0, min(len(data), len(self.data)) // size if root == self.root else 0
        while alike < end:
            middle = (alike + end + 1) // 2
            if data.startswith(self.data[alike * size : middle * size], alike * size):
                alike = middle
            else:
                end = middle - 1
        return self.digests[:alike]


def hash_blocks(tokens: Tensor, block_size: int, root: bytes, others: Iterable[Hashed]) -> Hashed:
    """:func:`block_digests`; what one of the ``others`` begins with, too, is not hashed again."""
    tokens = tokens.to("cpu", torch.int64).contiguous()
    size = 8 * block_size
    data = ctypes.string_at(tokens.data_ptr(), tokens.numel() // block_size * size)
    digests = max((other.shared(root, data, size) for other in others), key=len, default=[])
    sha256, digest = hashlib.sha256, digests[-1] if digests else root
    for start in range(len(digests) * size, len(data), size):
        digest = sha256(digest + data[start : start + size]).digest()
        digests.append(digest)
    return Hashed(root, data, digests)
