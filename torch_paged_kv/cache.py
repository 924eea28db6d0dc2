"""PagedKVCache: the keys and values of a batch of sequences, in blocks of one pool. Imports torch alone.

The way of a step: the first layer's ``write`` allocates the slots of the new tokens for every layer at once, each layer
writes its keys and values into them, ``attend`` reads through the block table. What changes from step to step lives in
tensors (:class:`Rows`, :class:`KVPool`) and is changed by ops alone, so the same code runs eager and inside a compiled
graph. Beside the tensors the host keeps a mirror of the lengths for eager code; a compiled graph cannot advance it, so
it marks the mirror stale and the next eager call reads the tensors once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .arguments import check_arguments, kind_of
from .errors import OutOfBlocksError
from .layout import LayerKind, LayerPlace, LayerShape, LayerTensors, cache_views, place_layers
from .lengths import Lengths, is_right_aligned, right_align
from .packing import packed, packed_mask, unpacked
from .pool import blocks_for
from .scales import EIGHT_BIT_DTYPES, LayerScales, Scales, layer_block_bytes, scale_views
from .shared_prefix import MAX_QUERIES, MIN_SAVED, SharedPrefixes, shared_prefix_attention
from .sizing import affordable_blocks, blocks_to_come, growth
from .step import Padding, Progress, Step
from .storage import KVPool, Rows


class PagedKVCache(nn.Module):
    """Keys and values of a batch of sequences in fixed-size blocks of one pool.

    Args:
        windows: per layer, its sliding window in tokens (the query's own included) or None for full attention. None:
            every layer attends to everything, and layers appear as they are written.
        block_size: tokens in a block, >= 1.
        num_blocks: size of the pool in blocks. At most one size may be given; none: the pool grows on demand. A given
            size never grows, and running out raises :class:`OutOfBlocksError`.
        num_tokens: size of the pool in tokens of one sequence.
        bytes: size of the pool in bytes.
        fraction: size of the pool as a share of the memory that is free at the first write.
        dtype: of the stored keys and values (float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8). None: that
            of the first key, or of ``pool``.
        scales: of an 8-bit cache. "per_slot": made for every slot and head as it is stored; :class:`StaticScales`:
            fixed ones; None: stored as it is, saturated (float8 alone). "auto" is "per_slot" for 8-bit dtypes.
        pool: the pool of another cache of the same model, to share its blocks.
        share_prefix_reads: read blocks that rows next to each other begin with once for all of them, in steps of a few
            positions. Results differ by rounding. It pays where long beginnings are shared (beams, samples of one
            prompt, prompts of a prefix cache); where nothing is, a step in a compiled graph is a little slower.

    Keys and values come as ``[num_seqs, num_kv_heads, length, head_size]``, queries as ``[num_seqs, num_heads, length,
    head_size]``. The ops are for inference: tensors that require grad are refused.
    """

    _pool: KVPool | None
    _rows: Rows | None

    def __init__(
        self,
        windows: Sequence[int | None] | None = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        num_tokens: int | None = None,
        bytes: int | None = None,
        fraction: float | None = None,
        dtype: torch.dtype | None = None,
        scales: Scales = "auto",
        pool: KVPool | None = None,
        share_prefix_reads: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"num_blocks": num_blocks, "num_tokens": num_tokens, "bytes": bytes, "fraction": fraction}
        self._size: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
        check_arguments(self._size, block_size, dtype, scales, windows, pool)
        self.block_size = block_size if pool is None else pool.block_size
        self.dtype, self.scales = kind_of(dtype, scales, pool)
        self.share_prefix_reads = share_prefix_reads
        self._layer_scales = None if self.scales is None else LayerScales(self.scales)
        self._gathered_dtype: torch.dtype | None = None  # of an 8-bit cache: that of the first key
        self._pool = pool
        self._rows = None
        self._finalizer: weakref.finalize[Any, PagedKVCache] | None = None
        self._shapes: dict[int, LayerShape] = {}
        self._lanes: dict[int, int] = {}  # of the pool, per layer
        self._scale_lanes: dict[int, int] = {}  # ... of the scales of its slots, if each has its own
        self._keys: dict[int, tuple[Any, ...]] = {}  # of its tensors in `_views`
        self._spread = False  # over several devices
        self._views: dict[Any, LayerTensors] = {} if pool is None else pool.views
        self._lengths = Lengths.of(0)
        self._progress = Progress()
        self._set_windows(windows)

    # ---- what it holds ------------------------------------------------------------------------------------------

    @property
    def pool(self) -> KVPool:
        """The pool of blocks. It comes to be with the first write, which tells its device."""
        pool = self._pool
        if pool is None:
            raise RuntimeError("the cache has no pool before its first write; share one with pool= to have it earlier")
        return pool

    @property
    def has_pool(self) -> bool:
        """Whether the pool exists."""
        return self._pool is not None

    @property
    def num_seqs(self) -> int:
        """Rows of the batch; 0 before the first write."""
        return 0 if self._rows is None else self._rows.num_seqs

    @property
    def seen(self) -> int:
        """Positions of the padded batch so far, padding included."""
        return self._mirror().seen

    def seq_lens(self) -> list[int]:
        """Tokens each sequence holds; padding takes no slot and is not counted."""
        return list(self._mirror().lens)

    @property
    def is_sized(self) -> bool:
        """Whether the pool has a given size, so that steps may run inside a compiled graph."""
        pool = self._pool
        return bool(self._size) if pool is None else not pool.growable

    def stats(self) -> dict[str, int | float]:
        """Exact numbers of what is held.

        ``num_blocks``, ``free_blocks``, ``held_blocks``, ``bytes_held`` and ``bytes_total`` speak of the pool;
        ``tokens`` and ``utilisation`` (filled share of the slots in the blocks of this cache's tables) of this cache.
        """
        pool = self._pool
        total, free, block_bytes = (0, 0, 0) if pool is None else (pool.num_blocks, pool.num_free, pool.block_bytes)
        mapped, filled = self._slots()
        return {
            "num_blocks": total,
            "free_blocks": free,
            "held_blocks": total - free,
            "bytes_held": (total - free) * block_bytes,
            "bytes_total": total * block_bytes,
            "tokens": sum(self.seq_lens()),
            "utilisation": filled / mapped if mapped else 0.0,
        }

    def check(self) -> None:
        """Raise if the accounts of the pool do not close; the pool must be this cache's alone."""
        if self._rows is not None:
            self.pool.check(*self.tables())

    def tables(self) -> list[tuple[Tensor, Tensor]]:
        """Block table and lengths, as :meth:`BlockPool.check` takes them; none before the first write."""
        return [] if self._rows is None else [(self._rows.block_table, self._rows.seq_lens)]

    def _slots(self) -> tuple[int, int]:
        """Slots of the mapped blocks of this cache's tables, and how many of them hold a token."""
        if self._rows is None:
            return 0, 0
        columns = self._columns(self._mirror())
        mapped = (self._rows.block_table[:, :, :columns] >= 0).sum(2)  # [num_groups, num_seqs]
        released = (-(-self._rows.seq_lens // self.block_size) - mapped) * self.block_size
        return int(mapped.sum()) * self.block_size, int((self._rows.seq_lens - released).sum())

    # ---- a step -------------------------------------------------------------------------------------------------

    def pad(self, mask: Tensor | None, length: int) -> None:
        """Say which positions of the coming step hold a token. The others take no slot and are not seen.

        Nor do they see anything, unless :meth:`attend` is given a mask that lets them.

        Args:
            mask: bool ``[num_seqs, seen + length]`` over all positions so far and the new ones; None = all hold one.
            length: new positions.

        Raises:
            ValueError: the mask speaks of another number of positions, or contradicts what earlier steps stored.
        """
        progress = self._progress
        progress.padding = None
        if mask is None:
            return
        real = mask[:, -length:]
        if torch.compiler.is_compiling():
            # One generated token a row is never padding; more tokens find their order inside the graph.
            if length > 1:
                progress.padding = Padding(real.sum(1, dtype=torch.int32), None, right_align(real))
            return
        if length == 1 and mask.device.type != "cpu":
            return  # likewise, and looking would cost a sync per step
        self._mirror().check_mask(mask, length)
        if not real.all():
            order = None if is_right_aligned(real) else right_align(real)
            progress.padding = Padding(real.sum(1, dtype=torch.int32), real.cpu(), order)

    def expect(self, positions: int | None) -> None:
        """Say how many positions there will be in the end, so that a pool without a size grows to that at once.

        Only a hint: fewer leave blocks unused, more make the pool grow further. What it asks for ahead of need is not
        more than half of the memory that is free.

        Args:
            positions: of the padded batch, all so far included; None: nobody knows.
        """
        self._progress.expected = positions

    def announce(self, length: int) -> None:
        """The host's hook before a step that may run inside a compiled graph, where no Python runs.

        It lets the mirror of the lengths advance without asking the device, and raises where the pool cannot do.

        Args:
            length: new positions.

        Raises:
            OutOfBlocksError: the step would not find its blocks; nothing has changed.
        """
        lengths = self._mirror(exact=length > 1)
        progress, pool = self._progress, self._pool
        progress.announced = None
        if pool is None or self._rows is None or pool.growable or length > 1:
            return
        wanted, _ = lengths.blocks([length] * len(lengths.lens), self.block_size, pool.shared)
        wanted *= len(self._group_windows)
        # What is wanted is exact unless blocks are shared, or leave a window in the same step.
        if not pool.has_room(wanted) and not pool.shared and not self._sliding:
            raise OutOfBlocksError(wanted, pool.free_bound)
        progress.announced = (length, wanted)

    def write(self, layer: int, key: Tensor, value: Tensor) -> Step:
        """Store the new keys and values of one layer; the first layer's write begins the step for all of them.

        Args:
            layer: index of the layer.
            key: ``[num_seqs, num_kv_heads, length, head_size]``; cast to the cache's dtype.
            value: ``[num_seqs, num_kv_heads, length, head_size_v]``.

        Returns:
            The step, for :meth:`attend`.

        Raises:
            OutOfBlocksError: the pool has a given size and not enough free blocks; nothing has changed.
            ValueError: shapes, devices or dtypes do not fit; nothing has changed.
        """
        if layer not in self._shapes:
            self._add_layer(layer, key, value)
        if layer == 0:
            self._begin_step(key)
        progress = self._progress
        step, (num_seqs, _, length, _) = progress.step, key.shape
        if step is None or step.num_seqs != num_seqs or step.length != length:
            raise ValueError(
                f"key must belong to the step that layer 0 began, got [num_seqs={num_seqs}, length={length}] of layer "
                f"{layer}"
            )
        # Looked up here first: it saves a call in every layer of every step.
        tensors = self._views.get(self._keys[layer]) if step.eager else None
        key_cache, value_cache, key_scale, value_scale = tensors = tensors or self.caches(layer)
        begun = step
        if self._spread:
            step = begun.on(key.device)
        if length > 1:  # the ops take one token of each row as it is
            key, value = packed(key, step), packed(value, step)
        slots = step.slot_mapping[self._places[layer].group]
        ops.reshape_and_cache(key, value, key_cache, value_cache, slots, key_scale, value_scale)
        begun.written = step.written = layer
        step.tensors = tensors
        if layer == len(self._places) - 1 and self._windows is not None:
            progress.step = None  # every layer is written; a compiled graph would hand the tensors out
        return step

    def attend(
        self,
        step: Step,
        layer: int,
        query: Tensor,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's queries over everything the layer holds.

        Args:
            step: what :meth:`write` returned.
            layer: index of a layer written in the step.
            query: ``[num_seqs, num_heads, length, head_size]``.
            scale: factor of query-key products.
            causal: whether a position sees itself and earlier ones only.
            window: sliding window in tokens, the query's own included; None: no window.
            softcap: bound of scores, 0 = none.
            sinks: ``[num_heads]``, a logit more per head.
            alibi_slopes: ``[num_heads]``.
            mask: ``[num_seqs or 1, num_heads or 1, length, seen]`` over the padded positions, bool (True = visible) or
                additive; it is complete: causality and window are in it.

        Returns:
            ``[num_seqs, length, num_heads, head_size_v]`` in the query's dtype; a query that sees no key gives 0.
        """
        if self.share_prefix_reads and causal and window is None and mask is None and alibi_slopes is None:
            shared = self._shared_prefixes(step, self._places[layer].group)
            if shared is not None:
                return self._attend_together(step, layer, query, shared, scale, softcap, sinks)
        tensors = step.tensors if layer == step.written else None
        key_cache, value_cache, key_scale, value_scale = tensors or self.caches(layer)
        compiling = mask is not None and torch.compiler.is_compiling()
        out = ops.paged_attention(
            query if step.length == 1 else packed(query, step),
            key_cache,
            value_cache,
            step.block_table[self._places[layer].group],
            step.seq_lens,
            step.cu_seqlens_q,
            step.length,
            scale=scale,
            causal=causal and mask is None,
            window_left=-1 if window is None or mask is not None else window - 1,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            key_scale=key_scale,
            value_scale=value_scale,
            mask=None if mask is None else packed_mask(mask, step, None if compiling else self._mirror()),
        )
        return unpacked(out, step, masked=mask is not None)

    def _shared_prefixes(self, step: Step, group: int) -> SharedPrefixes | None:
        """Which rows read blocks together in a step, found once for all layers of a group. None: each reads its own."""
        if step.num_seqs == 1 or step.length > MAX_QUERIES or step.num_new is not None:
            return None
        if step.eager and not self.pool.shared:  # no block has two holders; a compiled graph cannot know that
            return None
        if group not in step.shared_prefixes:
            table = step.block_table[group]
            found = SharedPrefixes.find(table, step.seq_lens, step.cu_seqlens_q, self.block_size, MIN_SAVED)
            # A look is free where the tables are on the CPU, and spares all layers a second call over nothing.
            known_empty = step.eager and table.device.type == "cpu" and not found.any()
            step.shared_prefixes[group] = None if known_empty else found
        return step.shared_prefixes[group]

    def _attend_together(
        self,
        step: Step,
        layer: int,
        query: Tensor,
        shared: SharedPrefixes,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """`attend` of a step without padding, whose rows read some of their blocks together."""
        key_cache, value_cache, key_scale, value_scale = self.caches(layer)
        out = shared_prefix_attention(
            packed(query, step),
            key_cache,
            value_cache,
            shared,
            step.length,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        return out.view(step.num_seqs, step.length, *out.shape[1:])

    def caches(self, layer: int) -> LayerTensors:
        """A layer's key and value cache, and their scales, None where there are none, as the ops take them.

        Returns:
            ``[num_blocks, block_size, num_kv_heads, head_size]`` and ``[..., head_size_v]``, views of the pool; scales
            float32 ``[num_blocks, block_size, num_kv_heads]``, views of it too, or fixed ``[num_kv_heads]`` or ``[]``.
        """
        if torch.compiler.is_compiling():
            return self._layer_views(layer)
        key = self._keys[layer]
        tensors = self._views.get(key)
        if tensors is None:
            self.move_in(layer)  # the layer may have been moved out
            tensors = self._views[key] = self._layer_views(layer)
        return tensors

    def _layer_views(self, layer: int) -> LayerTensors:
        pool, shape, scales = self.pool, self._shapes[layer], self._layer_scales
        key_cache, value_cache = cache_views(pool.lane(self._lanes[layer]), shape, self.block_size)
        if scales is None:
            return key_cache, value_cache, None, None
        if scales.static is not None:
            return key_cache, value_cache, *scales.of(layer)
        lane = pool.lane(self._scale_lanes[layer])
        return key_cache, value_cache, *scale_views(lane, shape.num_kv_heads, self.block_size)

    def gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values as dense tensors over the padded positions.

        Returns:
            ``[num_seqs, num_kv_heads, seen, head_size]`` and ``[..., head_size_v]``: copies, of an 8-bit cache in the
            dtype of the first key. Padding, and what a sliding window has released, is 0.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("gather has a data-dependent shape: call it outside of the compiled graph")
        rows, lengths = self._rows, self._mirror()
        if rows is None or layer not in self._shapes:
            raise RuntimeError(f"layer {layer} must be written before it is gathered")
        key_cache, value_cache, key_scale, value_scale = self.caches(layer)
        table = rows.block_table[self._places[layer].group].to(key_cache.device)
        key, value = ops.gather_blocks(
            key_cache,
            value_cache,
            table,
            rows.seq_lens.to(key_cache.device),
            lengths.seen,
            dtype=self._gathered_dtype,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        if lengths.gapless:
            return key, value
        back = torch.argsort(right_align(lengths.stored()), dim=1).to(key.device)[:, None, :, None]
        return key.gather(2, back.expand(key.shape)), value.gather(2, back.expand(value.shape))

    # ---- rows -----------------------------------------------------------------------------------------------------

    def share(self, pool: KVPool) -> None:
        """Take another cache's pool, unless this one has a pool already."""
        if self._pool is None:
            self._pool, self._views = pool, pool.views
            if self.dtype is None:
                self.dtype, self.scales = kind_of(None, "auto", pool)
                self._layer_scales = None if self.scales is None else LayerScales(self.scales)

    def prepare(self, layers: dict[int, LayerKind]) -> None:
        """Make ready what the first write makes otherwise: the pool, and the memory of each layer.

        Args:
            layers: what the keys and values to come are like.

        Raises:
            ValueError: a layer was written with another shape, or the pool is of another dtype or device.
        """
        for layer, (shape, dtype, device) in sorted(layers.items()):
            if layer in self._shapes:
                if self._shapes[layer] != shape:
                    raise ValueError(f"layer {layer} must have {self._shapes[layer]}, got {shape}")
                continue
            key, value = (  # sizes alone matter
                torch.empty((), dtype=dtype, device=device).expand(1, shape.num_kv_heads, 1, size)
                for size in (shape.head_size, shape.head_size_v)
            )
            self._add_layer(layer, key, value)

    @property
    def within_step(self) -> bool:
        """Whether a step has begun that some layer has not written."""
        step = self._progress.step
        return step is not None and step.written < len(self._places) - 1

    def adopt(self, blocks: Tensor, seen: int, real: Tensor | None = None) -> None:
        """Begin with sequences whose keys and values lie in blocks that somebody holds; the cache shares them.

        Args:
            blocks: int32 ``[num_groups, num_seqs, columns]``, their block table; -1 = none, as behind a window.
            seen: positions of the padded batch.
            real: bool ``[num_seqs, seen]`` on the CPU, which of them hold a token; None = all.

        Raises:
            ValueError: the cache is not empty, or its layers fall into another number of groups.
        """
        num_groups, num_seqs, columns = blocks.shape
        if self.seen:
            raise ValueError(f"the cache must be empty to adopt sequences, got {self.seen} positions")
        if num_groups != len(self._group_windows):
            raise ValueError(f"blocks must have num_groups = {len(self._group_windows)}, got {num_groups}")
        if self.num_seqs != num_seqs:
            self._new_rows(num_seqs)
        rows, pool = self._rows, self.pool
        assert rows is not None
        self.prepare(pool.layers)
        if columns > rows.block_table.shape[2]:
            rows.widen(columns)
        self._lengths = Lengths.of(num_seqs)
        self._advance(seen, real, released=False)
        if self._sliding:
            self._lengths.floor = list(self._lengths.lens)
        table = blocks.to(pool.device)
        rows.block_table[:, :, :columns] = table
        lens = torch.tensor(self._lengths.lens, dtype=torch.int32)
        rows.seq_lens.copy_(lens, non_blocking=True)  # from memory that is not pinned: read before the call returns
        rows.seen.fill_(seen)
        pool.retain(table)
        pool.shared = True

    def table(self) -> Tensor:
        """The used columns of the block table on the CPU: int32 ``[num_groups, num_seqs, columns]``.

        Synchronises on CUDA.
        """
        if self._rows is None:
            return torch.empty(len(self._group_windows), 0, 0, dtype=torch.int32)
        columns = self._columns(self._mirror())
        return self._rows.block_table[:, :, :columns].to("cpu", copy=True)

    def stored(self) -> Tensor:
        """Which positions of the padded batch hold a token: bool ``[num_seqs, seen]`` on the CPU."""
        return self._mirror().stored()

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer that is known, None = full attention."""
        return [place.window for place in self._places]

    @property
    def num_lanes(self) -> int:
        """Lanes of storage that the layers take, as far as they are known."""
        return max((place.lane for place in self._places), default=-1) + 1

    def group(self, layer: int) -> int:
        """Which of the block tables a layer reads."""
        return self._places[layer].group

    @property
    def group_windows(self) -> list[int | None]:
        """Sliding window of each group of layers, None = full attention."""
        return list(self._group_windows)

    def reorder(self, source_rows: Tensor) -> None:
        """Row i becomes row ``source_rows[i]``: tables and reference counts move, no keys or values.

        Args:
            source_rows: integers ``[n]``; n may differ from the number of rows (repeat, select).
        """
        if self._rows is None:
            return
        rows, lengths, pool = self._rows, self._mirror(), self.pool
        source = source_rows.to(device=rows.seq_lens.device, dtype=torch.int64)
        pool.shared = True
        if source.shape[0] == rows.num_seqs:
            pool.fork(rows.block_table, rows.seq_lens, source, torch.arange(rows.num_seqs, device=source.device))
        else:
            self._hold(rows.forked(source, pool, self._columns(lengths)))
            pool.free_rows(rows)
        if not lengths.alike or source.shape[0] != len(lengths.lens):
            lengths.select(source.tolist())

    def fork(self) -> PagedKVCache:
        """A cache with the same sequences that shares every block; what either writes later is its own."""
        fork = self._blank()
        fork._shapes, fork._lanes, fork._spread = dict(self._shapes), dict(self._lanes), self._spread
        fork._scale_lanes, fork._keys = dict(self._scale_lanes), dict(self._keys)
        fork._layer_scales, fork._gathered_dtype = self._layer_scales, self._gathered_dtype
        fork._places = list(self._places)
        fork._lengths = self._mirror().copy()
        if self._rows is not None:
            self.pool.shared = True
            every_row = torch.arange(self.num_seqs, device=self._rows.seq_lens.device)
            fork._hold(self._rows.forked(every_row, self.pool, self._columns(fork._lengths)))
        return fork

    def truncate(self, length: int) -> None:
        """Forget the positions from ``length`` on; blocks wholly past them go back to the pool.

        After a forward that failed within a step, cut the cache to the positions before it and go on from there.

        Raises:
            ValueError: a sliding window has released blocks that the shorter rows would need.
        """
        progress = self._progress
        progress.cropped = True
        lengths, rows = self._mirror(), self._rows
        if rows is None or length >= lengths.seen:
            return
        lengths.crop(max(0, length))
        if length <= progress.start:
            progress.step = progress.pending = None  # nothing is left of the last step, whole or not
        new_lens = torch.tensor(lengths.lens, dtype=torch.int32, device=rows.seq_lens.device)
        self.pool.free(rows.block_table, rows.seq_lens, new_lens)
        rows.seen.fill_(lengths.seen)

    def reset(self) -> None:
        """Give every block back. The pool keeps its memory; :meth:`release` drops that too."""
        if self._rows is not None:
            self.pool.free_rows(self._rows)
            self._rows.seen.zero_()
        self._lengths = Lengths.of(self.num_seqs)
        self._progress = Progress()

    def release(self) -> None:
        """Give every block back and let go of the pool: its memory is freed unless another cache shares it."""
        self.reset()
        self._hold(None)
        self._pool = None
        self._lengths = Lengths.of(0)
        self._shapes.clear()
        self._lanes.clear()
        self._scale_lanes.clear()
        self._spread = False
        self._views = {}

    def move_out(self, layer: int) -> None:
        """Move a layer's keys and values to host memory; its next use moves them back, unless :meth:`move_in` has.

        Its lane of the pool moves, free blocks included, and with it what other groups of layers keep there.
        """
        for lanes in (self._lanes, self._scale_lanes):
            if layer in lanes:
                self.pool.move_out(lanes[layer])

    def move_in(self, layer: int) -> None:
        """Move a layer's keys and values back to its device."""
        for lanes in (self._lanes, self._scale_lanes):
            if layer in lanes:
                self.pool.move_in(lanes[layer])

    def is_written(self, layer: int) -> bool:
        """Whether a layer was ever written."""
        return layer in self._shapes

    @property
    def keeps_past(self) -> bool:
        """Whether sliding windows hold on to what leaves them."""
        return self._progress.keeping_past

    def keep_past(self, keep: bool = True) -> None:
        """Whether sliding windows hold on to what leaves them until the next `truncate` (speculative decoding)."""
        self._progress.keeping_past = keep

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        fork = self.fork()
        memo[id(self)] = fork
        return fork

    # ---- within ---------------------------------------------------------------------------------------------------

    def _blank(self) -> PagedKVCache:
        """An empty cache like this one, on the same pool."""
        pool = self._pool
        return PagedKVCache(
            self._windows,
            block_size=self.block_size,
            dtype=self.dtype,
            scales=self.scales,
            pool=pool,
            share_prefix_reads=self.share_prefix_reads,
            **({} if pool else self._size),
        )

    def _set_windows(self, windows: Sequence[int | None] | None) -> None:
        self._windows = windows
        self._places: list[LayerPlace]
        self._places, self._group_windows = place_layers(windows) if windows else ([], [None])
        self._sliding = any(window is not None for window in self._group_windows)

    def _hold(self, rows: Rows | None) -> None:
        """Take rows, and see to it that their blocks go back when this cache is dropped."""
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        self._rows = rows
        if rows is not None:
            self._finalizer = weakref.finalize(self, self.pool.abandon, rows)
            self._finalizer.atexit = False

    def _mirror(self, exact: bool = True) -> Lengths:
        """The lengths as the host knows them.

        Steps that ran inside a compiled graph are read from the tensors, or, unless ``exact``, taken as announced.
        """
        progress = self._progress
        if progress.mirror_stale and progress.announced is not None and not exact:
            length, wanted = progress.announced
            self._advance(length, None, self._sliding)
            self.pool.take(wanted)
            progress.trusted = True
        elif progress.mirror_stale or (progress.trusted and exact):
            self._read_lengths()
            progress.trusted = False
        else:
            return self._lengths
        progress.mirror_stale, progress.announced = False, None
        return self._lengths

    def _columns(self, lengths: Lengths) -> int:
        """Columns of the block table that rows of these lengths use."""
        return -(-max(lengths.lens, default=0) // self.block_size)

    def _read_lengths(self) -> None:
        """Read the mirror from the tensors, and whether a step ran out of blocks. Synchronises on CUDA."""
        rows = self._rows
        assert rows is not None
        lens = rows.seq_lens.tolist()
        floor = list(lens) if self._sliding else self._lengths.floor
        self._lengths = Lengths(lens, int(rows.seen), floor, self._lengths.segments)
        self.pool.raise_if_exhausted()

    def _advance(self, length: int, real: Tensor | None, released: bool) -> None:
        """Let the mirror follow a step."""
        if released:
            self._lengths.floor = list(self._lengths.lens)
        self._lengths.advance(length, real)

    def _add_layer(self, layer: int, key: Tensor, value: Tensor) -> None:
        """First write of a layer: its place, its shape, its memory."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"layer {layer} must be written once outside of a compiled graph (an eager prefill) first"
            )
        if self._windows is None:
            self._places += [LayerPlace(0, lane, None) for lane in range(len(self._places), layer + 1)]
        place, shape = self._places[layer], LayerShape(key.shape[1], key.shape[3], value.shape[3])
        if self._pool is None:
            self._pool = self._new_pool(key, shape)
            self._views = self._pool.views
        self._pool.adopt(self.scales)
        dtype, scales = self.dtype or key.dtype, self._layer_scales
        ensure_lane = self._pool.ensure_lane
        self._lanes[layer] = ensure_lane(place.lane, shape.elements(self.block_size), dtype, key.device)
        if scales is not None:
            scales.add_layer(layer, shape, key.device)
            if scales.static is None:
                elements = scales.elements(shape, self.block_size)
                self._scale_lanes[layer] = ensure_lane(~place.lane, elements, torch.float32, key.device)
        self._gathered_dtype = key.dtype if dtype in EIGHT_BIT_DTYPES else None
        # Layers of like shape that share a lane share its views, but not the scales that are fixed for each.
        fixed = scales is not None and scales.static is not None
        self._keys[layer] = (self._lanes[layer], shape, layer if fixed else None)
        self._shapes[layer] = shape
        self._spread |= self._pool.device != key.device
        self._pool.layers[layer] = LayerKind(shape, key.dtype, key.device)

    def _new_pool(self, key: Tensor, shape: LayerShape) -> KVPool:
        num_groups = len(self._group_windows)
        if not self._size:  # as small as can be: the step that begins now makes room for itself
            return KVPool(1, self.block_size, key.device, growable=True)
        layer_bytes = layer_block_bytes(shape, self.block_size, self.dtype or key.dtype, self.scales)
        num_blocks = blocks_for(
            **self._size, block_size=self.block_size, block_bytes=layer_bytes * self.num_lanes, device=key.device
        )
        if "num_tokens" in self._size:
            num_blocks *= num_groups  # a sequence takes blocks in every group
        return KVPool(num_blocks, self.block_size, key.device, growable=False)

    def _begin_step(self, key: Tensor) -> None:
        num_seqs, _, length, _ = key.shape
        progress, pool = self._progress, self.pool
        padding, progress.padding, progress.step = progress.padding, None, None
        compiling = torch.compiler.is_compiling()
        if compiling:
            if pool.growable:
                raise RuntimeError("a cache in a compiled graph must have a given size: PagedKVCache(num_tokens=...)")
            progress.mirror_stale = pool.bound_stale = True
            enough = True
        else:
            enough = self._make_room(pool, num_seqs, length, padding)
        rows = self._rows
        assert rows is not None
        block_table, seq_lens = rows.block_table, rows.seq_lens  # once: a module's buffers are slow to read
        releasing = not progress.keeping_past or progress.cropped
        cu_seqlens_q = rows.spans(length)
        slot_mapping, block_mapping = pool.allocate(
            block_table,
            seq_lens,
            cu_seqlens_q,
            num_seqs * length,
            num_new=None if padding is None else padding.num_new,
            retain=rows.retain if releasing and self._sliding else None,
        )
        if not enough:
            pool.raise_if_exhausted()
        if compiling or pool.shared:
            pool.copy_blocks(block_mapping)
        rows.seen.add_(length)
        if not compiling:
            progress.cropped, progress.start = False, self._lengths.seen
            self._advance(length, None if padding is None else padding.real, releasing and self._sliding)
        progress.step = Step(
            num_seqs,
            length,
            slot_mapping.unbind(0),
            block_table.unbind(0),
            seq_lens,
            cu_seqlens_q,
            None if padding is None else padding.num_new,
            None if padding is None else padding.order,
            not compiling,
        )

    def _make_room(self, pool: KVPool, num_seqs: int, length: int, padding: Padding | None) -> bool:
        """Rows, table width and free blocks for an eager step; False if blocks may be lacking."""
        self._progress.announced = None
        rows = self._rows
        if rows is None or rows.num_seqs != num_seqs:
            if self.seen:
                raise ValueError(f"key must have num_seqs = {self.num_seqs} as the cache holds, got {num_seqs}")
            rows = self._new_rows(num_seqs)
        counts = [length] * num_seqs if padding is None or padding.real is None else padding.real.sum(1).tolist()
        wanted, widest = self._mirror().blocks(counts, self.block_size, pool.shared)
        width = rows.block_table.shape[2]
        if widest > width:
            rows.widen(max(widest, 2 * width))
        wanted *= len(self._group_windows)
        enough = pool.has_room(wanted)
        if not enough and pool.growable:
            pool.grow(pool.num_blocks + self._blocks_to_add(wanted, counts, length))
            enough = True
        pool.take(wanted)
        return enough

    def _blocks_to_add(self, wanted: int, counts: Sequence[int], length: int) -> int:
        """Blocks by which the pool grows for a step that finds fewer free than it may want.

        Args:
            wanted: blocks of the step.
            counts: tokens of the step, per row.
            length: positions of the step.
        """
        pool, lengths, expected = self.pool, self._mirror(), self._progress.expected
        lacking = wanted - pool.free_bound
        later = -1 if expected is None else expected - lengths.seen - length
        if later < 0:
            if pool.num_blocks == 1:  # it is new: the coming block of each row, too
                lacking += len(counts) * len(self._group_windows)
            return max(lacking, growth(pool.num_blocks))
        windows, size = self._group_windows, self.block_size
        ahead = blocks_to_come(lengths.lens, counts, later, windows, size) - pool.free_bound
        block_bytes = pool.block_bytes * self.num_lanes // (len(set(self._lanes.values())) or 1)
        return max(lacking, min(ahead, max(affordable_blocks(pool.device, block_bytes), growth(pool.num_blocks))))

    def _new_rows(self, num_seqs: int) -> Rows:
        # A pool of given size is never outgrown by the widest table it can fill. No op's time follows the width.
        width = 1 if self.pool.growable else self.pool.num_blocks // len(self._group_windows)
        rows = Rows(num_seqs, max(1, width), self._group_windows, self.pool.device)
        self._hold(rows)
        self._lengths = Lengths.of(num_seqs)
        return rows
