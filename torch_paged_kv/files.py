"""Sequences in safetensors files: saved from any blocks, loaded into any that are free.

A file holds, for each layer, the blocks of its keys and values ``[num_blocks, block_size, num_kv_heads, head_size]`` in
the cache's dtype, with their scales where it has some; the block table and the padding; and in its metadata what it was
made from, with a digest of everything. Slots that hold no token of these sequences are written as 0.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .cache import PagedKVCache
from .layout import LayerKind, LayerShape
from .sequences import Sequences, restore

__all__ = ["load", "save"]

FORMAT = "torch_paged_kv sequences 1"
PARTS = ("key", "value", "key_scale", "value_scale")  # of a layer, as PagedKVCache.caches gives them
SHOWN_FROM = 1 << 28  # bytes from which on a progress bar is shown
Item = TypeVar("Item")


def save(
    cache: PagedKVCache,
    path: str | os.PathLike[str],
    *,
    input_ids: Tensor | None = None,
    rows: Sequence[int] | None = None,
) -> int:
    """Write sequences to a safetensors file, which appears whole or not at all.

    Args:
        cache: between two steps; it keeps what it holds.
        path: of the file.
        input_ids: integers ``[num_seqs, seen]``, the ids at the positions of the saved rows. Their digest is kept, for
            :func:`load` to compare.
        rows: which sequences; None = all.

    Returns:
        Bytes of the file.

    Raises:
        ValueError: the cache is within a step, ``rows`` names none, or ``input_ids`` has another shape.
    """
    from safetensors.torch import save_file

    sequences, blocks = Sequences.of(cache, rows)
    if input_ids is not None and input_ids.shape != sequences.real.shape:
        raise ValueError(f"input_ids must have the shape {list(sequences.real.shape)}, got {list(input_ids.shape)}")
    tensors = {"block_table": sequences.table, "real": sequences.real.to(torch.uint8)}
    layers = sorted(cache.pool.layers.items())
    for layer, _ in _shown(layers, "saving", cache.pool.block_bytes * len(blocks)):
        tensors |= _layer_tensors(cache, layer, sequences, blocks)
    metadata = {
        "format": FORMAT,
        "block_size": str(cache.block_size),
        "windows": json.dumps(cache.windows),
        "shapes": json.dumps([[layer, *_sizes(kind.shape)] for layer, kind in layers]),
        "dtype": str(cache.caches(0)[0].dtype).removeprefix("torch."),
        "key_dtype": str(layers[0][1].dtype).removeprefix("torch."),
        "tokens": "" if input_ids is None else _digest_of_tokens(input_ids, sequences),
        "digest": _digest(tensors),
    }
    target = Path(path)
    handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    os.close(handle)
    try:
        save_file(tensors, scratch, metadata)
        os.replace(scratch, target)
    except BaseException:
        os.unlink(scratch)
        raise
    return target.stat().st_size


def load(
    cache: PagedKVCache,
    path: str | os.PathLike[str],
    *,
    input_ids: Tensor | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Begin an empty cache with the sequences of a file, in whatever blocks are free.

    The file is read and checked whole before a block is taken; whatever is raised, nothing has been written.

    Args:
        cache: of the layout that was saved: block size, windows, dtype, scales.
        path: of a file that :func:`save` wrote.
        input_ids: integers ``[num_seqs, seen]``; must be what the file was made from.
        device: where the pool shall be, if the cache has none yet; None: the CPU.

    Raises:
        ValueError: the file is damaged, or is of another layout or other tokens; or the cache is not empty.
        OutOfBlocksError: too few blocks are free.
    """
    tensors, metadata = _read(Path(path))
    sequences = Sequences(tensors.pop("block_table"), tensors.pop("real").bool())
    shapes = {int(layer): LayerShape(*sizes) for layer, *sizes in json.loads(metadata["shapes"])}
    if cache.seen:
        raise ValueError(f"the cache must be empty, got {cache.seen} positions")
    _require("block_size", cache.block_size, int(metadata["block_size"]))
    if cache.windows or len(cache.group_windows) > 1:
        _require("windows", cache.windows, json.loads(metadata["windows"]))
    _require_dtype(cache, metadata["dtype"])
    if input_ids is not None and metadata["tokens"] != _digest_of_tokens(input_ids, sequences):
        raise ValueError("input_ids must be the tokens that the file was made from")
    known = cache.pool.layers if cache.has_pool else {}
    for layer, shape in shapes.items():
        if layer in known:
            _require(f"layer {layer}", _sizes(known[layer].shape), _sizes(shape))
    _check_table(cache, sequences)
    had_pool = cache.has_pool
    place = cache.pool.device if had_pool else torch.device(device or "cpu")
    key_dtype: torch.dtype = getattr(torch, metadata["key_dtype"])
    try:
        cache.prepare({layer: known.get(layer, LayerKind(shape, key_dtype, place)) for layer, shape in shapes.items()})
        _check_tensors(cache, sequences, {layer: _parts(cache, layer) for layer in shapes}, tensors)
    except BaseException:
        if not had_pool:
            cache.release()
        raise

    def fill(blocks: list[int]) -> None:
        numbers = torch.tensor(blocks, dtype=torch.int64)
        for layer in _shown(sorted(shapes), "loading", cache.pool.block_bytes * len(blocks)):
            used = numbers[_blocks_of(cache, layer, sequences)]
            for part, target in _parts(cache, layer).items():  # the pool may have grown
                if target.dim() >= 3:
                    saved = tensors[f"layers.{layer}.{part}"].to(target.device)
                    _plain(target)[used.to(target.device)] = _plain(saved)

    restore(cache, sequences, fill)


# ---- parts of a file ------------------------------------------------------------------------------------------------


def _sizes(shape: LayerShape) -> list[int]:
    return [shape.num_kv_heads, shape.head_size, shape.head_size_v]


def _parts(cache: PagedKVCache, layer: int) -> dict[str, Tensor]:
    """A layer's tensors: those with blocks in front, and scales that are the same for all of them."""
    return {part: tensor for part, tensor in zip(PARTS, cache.caches(layer), strict=False) if tensor is not None}


def _blocks_of(cache: PagedKVCache, layer: int, sequences: Sequences) -> Tensor:
    """Which of the sequences' blocks hold something of a layer: int64 ``[n]``, ascending."""
    table = sequences.table[cache.group(layer)]
    blocks: Tensor = table[table >= 0].unique()
    return blocks.long()


def _layer_tensors(cache: PagedKVCache, layer: int, sequences: Sequences, blocks: list[int]) -> dict[str, Tensor]:
    mine = _blocks_of(cache, layer, sequences)
    numbers = torch.tensor(blocks, dtype=torch.int64)[mine]
    empty = torch.arange(cache.block_size) >= sequences.filled(cache.block_size)[mine][:, None]  # [n, block_size]
    tensors = {}
    for part, tensor in _parts(cache, layer).items():
        if tensor.dim() >= 3:
            taken = _plain(tensor)[numbers.to(tensor.device)].cpu().contiguous()
            taken[empty] = 0  # whatever was there is not ours to write down
            tensor = taken.view(tensor.dtype)
        tensors[f"layers.{layer}.{part}"] = tensor.cpu().contiguous()
    return tensors


def _plain(tensor: Tensor) -> Tensor:
    """Numbers of one byte as bytes: not every device indexes 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"path must be a file that save wrote, got {path}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    except SafetensorError as error:
        raise ValueError(f"path must be a whole safetensors file, got {path}: {error}") from error
    if metadata.get("digest") != _digest(tensors):
        raise ValueError(f"path must be an undamaged file, got {path}, whose digest is another")
    return tensors, metadata


def _check_table(cache: PagedKVCache, sequences: Sequences) -> None:
    """Whether a block table numbers its blocks from 0 on, and has as many columns as its sequences need."""
    table, size = sequences.table, cache.block_size
    columns = -(-max(sequences.seq_lens(), default=0) // size)
    _require("block_table", [len(cache.group_windows), sequences.num_seqs, columns], list(table.shape))
    numbers = table[table >= 0].unique().tolist()
    if table.dtype != torch.int32 or numbers != list(range(len(numbers))) or bool((table < -1).any()):
        raise ValueError("block_table of the file must number its blocks from 0 on")


def _check_tensors(
    cache: PagedKVCache, sequences: Sequences, targets: dict[int, dict[str, Tensor]], tensors: dict[str, Tensor]
) -> None:
    """Whether a file holds what the cache takes, no more and no less."""
    expected = {f"layers.{layer}.{part}": target for layer, parts in targets.items() for part, target in parts.items()}
    _require("tensors", sorted(expected), sorted(tensors))
    for layer, parts in targets.items():
        num_blocks = len(_blocks_of(cache, layer, sequences))
        for part, target in parts.items():
            name, tensor = f"layers.{layer}.{part}", tensors[f"layers.{layer}.{part}"]
            _require(f"dtype of {name}", target.dtype, tensor.dtype)
            if target.dim() >= 3:
                _require(f"shape of {name}", [num_blocks, *target.shape[1:]], list(tensor.shape))
            elif not torch.equal(target.cpu(), tensor):
                raise ValueError(f"{name} must be the scales of the cache, got others")


def _require(name: str, expected: Any, value: Any) -> None:
    if expected != value:
        raise ValueError(f"{name} of the file must be that of the cache, {expected}, got {value}")


def _require_dtype(cache: PagedKVCache, name: str) -> None:
    known = cache.dtype
    if known is None and cache.has_pool and cache.pool.num_lanes:
        known = cache.pool.lane(0).dtype
    if known is None and getattr(torch, name).itemsize == 1:
        raise ValueError(f"the cache must be made with dtype=torch.{name} to load a file of that dtype")
    if known is not None:
        _require("dtype", str(known), f"torch.{name}")


# ---- digests --------------------------------------------------------------------------------------------------------


def _digest(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(_bytes(tensor))
    return total.hexdigest()


def _digest_of_tokens(input_ids: Tensor, sequences: Sequences) -> str:
    """SHA-256 over the tokens of each row, padding left out."""
    if input_ids.shape != sequences.real.shape:
        raise ValueError(f"input_ids must have the shape {list(sequences.real.shape)}, got {list(input_ids.shape)}")
    rows = [ids[real] for ids, real in zip(input_ids.cpu().to(torch.int64), sequences.real, strict=True)]
    return _digest({f"{index:08}": row for index, row in enumerate(rows)})


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else memoryview(b"")


def _shown(items: Iterable[Item], what: str, size: int) -> Iterable[Item]:
    """With a progress bar if there is much to do and tqdm is installed."""
    if size < SHOWN_FROM:
        return items
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return items
    return tqdm(items, desc=what, unit="layer")  # type: ignore[no-any-return]
