"""PrefixCache: prompts that begin alike are computed once, in whole blocks.

A block of a prompt is known by a SHA-256 digest of everything that decides its keys and values: what the cache is of
(model, tenant, adapter, media, layout), all blocks before it (the digest of the one before is in it), and its tokens.
The cache holds one reference on each block it knows, through the pool's own counts, so ops need not know of it: a row
that writes into such a block gets a copy, and a block that is given up is free when the last row lets go of it.
Everything happens on the host when a prompt comes and when it is written; a step does nothing.
"""

from __future__ import annotations

import hashlib
import weakref
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cache import PagedKVCache
from .digests import Hashed, Label, block_digests, encoded_fields, hash_blocks, root_digest
from .scales import Scales, StaticScales
from .storage import KVPool

__all__ = ["Label", "PrefixCache", "block_digests", "root_digest"]

FORMAT = 1  # of what is hashed
EVICTED_AT_LEAST = 64  # 1/64 of a pool's blocks is given up at a time, so that a full pool is not searched every step


# ---- prompts --------------------------------------------------------------------------------------------------------


@dataclass
class Prompt:
    """One row of a padded batch."""

    tokens: Tensor  # int64 [num_tokens] on the CPU, padding left out
    positions: Sequence[int]  # where they stand in the batch; a range if nothing lies between them
    digests: list[bytes]  # of its whole blocks
    attached: int = 0  # whole blocks that its cache began with

    def tokens_before(self, position: int) -> int:
        """Tokens that stand before a position of the batch."""
        return bisect_left(self.positions, position)

    def position_after(self, known: int, length: int) -> int:
        """The first position that must be computed if the first ``known`` tokens need not be."""
        last = len(self.tokens) - 1
        return length - 1 if last < 0 else self.positions[min(known, last)]

    def held_in(self, stored: Sequence[int]) -> int:
        """How many of the tokens are the first ones of a row of a cache that holds those at positions ``stored``."""
        length = min(len(stored), len(self.positions))
        if stored[:length] == self.positions[:length]:
            return length
        pairs = enumerate(zip(stored, self.positions, strict=False))
        return next((index for index, (its, mine) in pairs if its != mine), length)


def _as_sequence(positions: Tensor) -> Sequence[int]:
    """Rising positions, int64 ``[num_tokens]`` on the CPU: a range if nothing lies between them."""
    if not len(positions):
        return range(0)
    between = range(int(positions[0]), int(positions[-1]) + 1)
    if len(between) == len(positions):
        return between
    numbers: list[int] = positions.tolist()
    return numbers


@dataclass
class Batch:
    """The rows of a padded batch, ``length`` positions each."""

    rows: list[Prompt]
    length: int
    real: Tensor | None  # bool [num_seqs, length] on the CPU, which positions hold a token; None = all

    @property
    def digests(self) -> list[list[bytes]]:
        """Of each row's whole blocks."""
        return [row.digests for row in self.rows]


# ---- the cache ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Store:
    """What views of one prefix cache share: the known blocks of one pool, least recently used first."""

    max_tokens: int | None
    pool: KVPool | None = None
    layout: str = ""  # block size and windows of the caches
    dtype: str = ""  # and scales, as the first cache was asked for; those of the pool are one
    entries: OrderedDict[bytes, list[int]] = field(
        default_factory=OrderedDict
    )  # digest -> a block per group, -1 = none
    held: set[int] = field(default_factory=set)  # every block in entries
    recent: list[Hashed] = field(default_factory=list)  # the rows of the last batch
    counts: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)

    def touch(self, digests: Sequence[bytes]) -> None:
        """Make a chain the most recently used; a block after all that follow it, so that those are given up first."""
        for digest in reversed(digests):
            self.entries.move_to_end(digest)

    def unreferenced(self) -> Iterator[tuple[bytes, list[int]]]:
        """Entries whose blocks nobody else holds, least recently used first. Synchronises on CUDA."""
        if self.pool is None or not self.entries:
            return
        self.pool.collect()
        counts: list[int] = self.pool.ref_counts.tolist()
        for digest, entry in list(self.entries.items()):
            blocks = [block for block in entry if block >= 0]
            if all(counts[block] == 1 for block in blocks):
                yield digest, blocks

    def drop(self, dropped: Sequence[tuple[bytes, list[int]]]) -> int:
        """Forget entries; the number of blocks given up."""
        blocks = [block for _, entry in dropped for block in entry]
        for digest, _ in dropped:
            del self.entries[digest]
        self.held.difference_update(blocks)
        if blocks and self.pool is not None:
            self.pool.release(torch.tensor(blocks, dtype=torch.int32))
        return len(blocks)

    def reclaim(self, wanted: int) -> int:
        """What the pool calls when it is short of blocks. One that grows does so instead; ``max_tokens`` bounds it."""
        assert self.pool is not None
        return 0 if self.pool.growable else self.evict(wanted)

    def evict(self, wanted: int) -> int:
        """Give up ``wanted`` blocks or somewhat more, as far as there are any; how many."""
        assert self.pool is not None
        wanted = max(wanted, self.pool.num_blocks // EVICTED_AT_LEAST)
        dropped: list[tuple[bytes, list[int]]] = []
        found = 0
        for entry in self.unreferenced():
            if found >= wanted:
                break
            dropped.append(entry)
            found += len(entry[1])
        self.counts["evictions"] += len(dropped)
        return self.drop(dropped)


def _name_of_scales(scales: Scales) -> str:
    if not isinstance(scales, StaticScales):
        return str(scales)
    numbers = [tensor.flatten().tolist() for tensor in (*scales.key, *scales.value)]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()


class PrefixCache:
    """Whole blocks of prompts that were computed, to be shared by prompts that begin alike.

    It serves the caches of one pool: that of the first cache it is given to, which the others then share. Least
    recently used blocks are given up when the pool needs them, never those that a sequence holds.

    Args:
        max_tokens: most tokens it keeps; None: as many as the pool has room for. A pool that grows needs a number.
        model: name of the model; part of every digest, as all of the following.
        tenant: whose prompts these are. Others neither see nor hit them.
        adapter: which adapter is applied to the model.
        media: digests of images and other media of the prompt, in order.

    :meth:`with_salt` gives a view for another tenant, adapter or media on the same blocks.
    """

    def __init__(
        self,
        *,
        max_tokens: int | None = None,
        model: Label = None,
        tenant: Label = None,
        adapter: Label = None,
        media: Sequence[Label] = (),
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be positive or None, got {max_tokens}")
        self._store = _Store(max_tokens)
        self._salt: dict[str, Label | Sequence[Label]] = {
            "model": model,
            "tenant": tenant,
            "adapter": adapter,
            "media": tuple(media),
        }
        self._encoded = encoded_fields([("format", FORMAT), *self._salt.items()])  # refuses wrong types

    def with_salt(self, **fields: Label | Sequence[Label]) -> PrefixCache:
        """A view on the same blocks with some of ``model``, ``tenant``, ``adapter``, ``media`` changed."""
        if unknown := fields.keys() - self._salt.keys():
            raise TypeError(f"fields must be among {', '.join(self._salt)}, got {', '.join(sorted(unknown))}")
        view = PrefixCache(**(self._salt | fields))  # type: ignore[arg-type]
        view._store = self._store
        return view

    @property
    def salt(self) -> dict[str, Label | Sequence[Label]]:
        """What goes into every digest beside tokens and layout."""
        return dict(self._salt)

    @property
    def pool(self) -> KVPool | None:
        """The pool whose blocks are cached; None before the first cache has one."""
        return self._store.pool

    # ---- use ----------------------------------------------------------------------------------------------------

    def bind(self, cache: PagedKVCache, pool: KVPool) -> None:
        """Serve the caches of ``pool``, laid out as ``cache`` is.

        Raises:
            ValueError: it serves another pool or caches of another layout, or the pool grows and there is no maximum.
        """
        store = self._store
        self._take_layout(cache)
        if store.pool is None:
            if pool.growable and store.max_tokens is None:
                raise ValueError(
                    "max_tokens must be given to a PrefixCache on a pool that grows; or give the pool a size"
                )
            store.pool = pool
            pool.add_reclaimer(store.reclaim)
            weakref.finalize(store, pool.abandon_blocks, store.held).atexit = False
        elif store.pool is not pool:
            raise ValueError("prefix_cache must serve caches of one pool: share it with pool=prefix_cache.pool")

    def _take_layout(self, cache: PagedKVCache) -> str:
        """What is written into digests of how blocks are laid out; the first cache tells, others must be alike."""
        store = self._store
        windows = ", ".join(str(window) for window in cache.group_windows)
        layout = f"block size {cache.block_size}, windows {windows}"
        if not store.layout:
            store.layout, store.dtype = layout, f"{cache.dtype}, scales {_name_of_scales(cache.scales)}"
        elif store.layout != layout:
            raise ValueError(f"prefix_cache must serve caches of one layout ({store.layout}), got {layout}")
        return f"{store.layout}, dtype {store.dtype}"

    def digests(self, tokens: Tensor, block_size: int, layout: str = "") -> list[bytes]:
        """Digests of the whole blocks of ``tokens`` ``[length]``, the same in every process.

        ``layout`` says how the blocks are laid out; caches write their dtype and windows there.
        """
        return block_digests(tokens, block_size, self._root(block_size, layout))

    def _root(self, block_size: int, layout: str) -> bytes:
        """What stands before the first block: :func:`root_digest` of everything but tokens."""
        return root_digest((("block_size", block_size), ("layout", layout)), self._encoded)

    def batch(self, cache: PagedKVCache, input_ids: Tensor, attention_mask: Tensor | None = None) -> Batch:
        """The prompts of a padded batch, with their digests.

        Args:
            cache: that they are meant for.
            input_ids: integers ``[num_seqs, length]``.
            attention_mask: ``[num_seqs, length]``, 0 at padding; None = no padding.
        """
        layout = self._take_layout(cache)
        input_ids, real = input_ids.cpu(), None if attention_mask is None else attention_mask.cpu().bool()
        length = input_ids.shape[1]
        if real is not None and real.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids {list(input_ids.shape)}, got {list(real.shape)}"
            )
        if real is not None and bool(real.all()):
            real = None
        root, recent = self._root(cache.block_size, layout), self._store.recent
        rows: list[Prompt] = []
        hashed: list[Hashed] = []
        for row, ids in enumerate(input_ids):
            tokens = ids
            positions: Sequence[int] = range(length)
            if real is not None:
                where = real[row].nonzero().flatten()
                # index_select, as indexing wakes all threads of a host for a few thousand numbers, busy or not
                tokens, positions = ids.index_select(0, where), _as_sequence(where)
            # Prompts often begin like the row above, and as those before them did; a row goes on with its answer.
            others = [*hashed[-1:], *recent[row : row + 1]]
            hashed.append(hash_blocks(tokens, cache.block_size, root, others))
            rows.append(Prompt(tokens, positions, hashed[-1].digests))
        self._store.recent = hashed
        return Batch(rows, length, real)

    def attach(
        self,
        cache: PagedKVCache,
        prompts: Tensor | Batch,
        attention_mask: Tensor | None = None,
        *,
        count: bool = True,
    ) -> int:
        """Begin an empty cache with the blocks of prompts that are known.

        Rows of one batch begin at one position, so the row that has least decides. At least the last token of each row
        is left to compute.

        Args:
            cache: empty, of the pool that is served (it takes that pool if it has none yet).
            prompts: token ids ``[num_seqs, length]``, or what :meth:`batch` made of them.
            attention_mask: ``[num_seqs, length]``, 0 at padding; None = no padding.
            count: whether :meth:`stats` shall count it.

        Returns:
            How many positions of the padded batch the cache holds now: give the model the others.
        """
        batch = prompts if isinstance(prompts, Batch) else self.batch(cache, prompts, attention_mask)
        store = self._store
        if store.pool is not None:
            cache.share(store.pool)
            self.bind(cache, cache.pool)
        found = [self._find(row) for row in batch.rows]
        position = self._common(cache, batch, found)
        if count:
            self._account(cache, batch, found, position)
        for row in batch.rows:
            row.attached = row.tokens_before(position) // cache.block_size
        if position > 0:
            real = None if batch.real is None else batch.real[:, :position]
            table = self._table(cache, batch, found, position)
            cache.adopt(table.to(cache.pool.device, non_blocking=True), position, real)
        return position

    def shared_within(self, cache: PagedKVCache, batch: Batch) -> Iterator[Tensor]:
        """Beginnings that rows of a batch share, that are not known, and that would let all its rows begin later.

        Each is to be computed and registered before the next is asked for: longer ones come first and may be enough.

        Yields:
            Tokens, int64 ``[length]``, whole blocks.
        """
        size, rows = cache.block_size, batch.rows
        if len(rows) < 2:
            return
        found = [len(self._find(row)) for row in rows]
        new = [row.digests[blocks:] for row, blocks in zip(rows, found, strict=True)]
        times = Counter(digest for digests in new for digest in digests)
        shared = [sum(times[digest] > 1 for digest in digests) for digests in new]  # chains: the first ones
        begin, later = (
            min(row.position_after(blocks * size, batch.length) for row, blocks in zip(rows, known, strict=True))
            for known in (found, [sum(pair) for pair in zip(found, shared, strict=True)])
        )
        if later <= begin:
            return
        wanted = [-(-row.tokens_before(later) // size) for row in rows]
        for blocks, row in sorted(zip(wanted, rows, strict=True), key=lambda pair: -pair[0]):
            if len(self._find(row)) < blocks:
                yield row.tokens[: blocks * size]

    def register(self, cache: PagedKVCache, input_ids: Tensor) -> int:
        """Remember the whole blocks that a cache holds and has written.

        Args:
            cache: between two steps.
            input_ids: integers ``[num_seqs, length]``, the ids at all positions the cache has seen, padding included;
                more are ignored.

        Returns:
            How many blocks were not known before.

        Raises:
            ValueError: fewer ids than positions, or the cache is within a step.
        """
        stored = cache.stored()
        if input_ids.shape[0] != stored.shape[0] or input_ids.shape[1] < stored.shape[1]:
            raise ValueError(
                f"input_ids must have the {list(stored.shape)} positions of the cache, got {list(input_ids.shape)}"
            )
        return self.register_batch(cache, self.batch(cache, input_ids[:, : stored.shape[1]], stored))

    def register_batch(self, cache: PagedKVCache, batch: Batch) -> int:
        """:meth:`register` for prompts whose digests are known; the cache may hold more than them.

        Where keys are gathered a model's padding is stored like tokens: a padded row's blocks hold other tokens then
        than its prompt's, and are not remembered.
        """
        if cache.within_step:
            raise ValueError("the cache must be between two steps: every layer written")
        self.bind(cache, cache.pool)
        store, known = self._store, len(self._store.entries)
        self._make_room(batch)
        table: list[list[list[int]]] = cache.table().tolist()  # [num_groups][num_seqs][columns]
        stored = cache.stored()  # [num_seqs, seen]
        padded = not bool(stored.all())
        added: list[int] = []
        for index, row in enumerate(batch.rows):
            held = _as_sequence(stored[index].nonzero().flatten()) if padded else range(stored.shape[1])
            whole = row.held_in(held) // cache.block_size
            begin = min(row.attached, whole)  # what the row took from here is here, unless somebody called clear()
            if not all(map(store.entries.__contains__, row.digests[:begin])):
                begin = 0
            columns = zip(*(group[index][begin:whole] for group in table), strict=True)
            self._insert(cache, row.digests, begin, columns, added)
        if added:
            cache.pool.retain(torch.tensor(added, dtype=torch.int32).to(cache.pool.device, non_blocking=True))
            cache.pool.shared = True
        return max(0, len(store.entries) - known)

    def evict(self, num_blocks: int) -> int:
        """Give up least recently used blocks that no sequence holds, until the pool has ``num_blocks`` more free ones.

        Returns:
            How many were given up: less if there are no more, somewhat more in a large pool. Synchronises on CUDA.
        """
        return 0 if self._store.pool is None else self._store.evict(num_blocks)

    def clear(self) -> None:
        """Forget every block; those that no sequence holds are free."""
        store = self._store
        store.recent = []
        store.drop([(digest, [b for b in entry if b >= 0]) for digest, entry in store.entries.items()])

    # ---- numbers ------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Exact numbers, over all views. Synchronises on CUDA.

        ``cached_blocks`` of the pool, ``evictable_blocks`` among them that no sequence holds, ``cached_tokens``;
        ``queries`` (rows) and ``query_tokens`` asked for, ``hits`` and ``hit_tokens`` found and used; ``evictions`` and
        ``registered`` in blocks of a sequence; ``smallest_prefix`` that can be found, in tokens.
        """
        store = self._store
        block_size = 0 if store.pool is None else store.pool.block_size
        return {
            "cached_blocks": len(store.held),
            "evictable_blocks": sum(len(blocks) for _, blocks in store.unreferenced()),
            "cached_tokens": len(store.entries) * block_size,
            **{
                name: store.counts[name]
                for name in ("queries", "query_tokens", "hits", "hit_tokens", "evictions", "registered")
            },
            "smallest_prefix": block_size,
        }

    def misses(self) -> dict[str, int]:
        """Why rows found nothing: reason to number of rows."""
        return dict(self._store.misses)

    def miss(self, reason: str, rows: int) -> None:
        """Note that rows found nothing."""
        self._store.misses[reason] += rows

    def blocks(self) -> Tensor:
        """Numbers of the cached blocks: int32 ``[cached_blocks]``, sorted."""
        return torch.tensor(sorted(self._store.held), dtype=torch.int32)

    def holdings(self) -> tuple[Tensor, Tensor]:
        """The cached blocks as a table and its lengths, for :meth:`BlockPool.check`."""
        blocks = self.blocks()
        block_size = 1 if self._store.pool is None else self._store.pool.block_size
        return blocks[None, None], torch.tensor([len(blocks) * block_size])

    def check(self, *caches: PagedKVCache) -> None:
        """Raise unless the accounts close: free + held by ``caches`` or cached == all blocks of the pool.

        Args:
            *caches: all that hold blocks of the pool.

        Raises:
            RuntimeError: names the first block that is wrong.
        """
        store = self._store
        listed = sorted(block for entry in store.entries.values() for block in entry if block >= 0)
        if listed != sorted(store.held):
            raise RuntimeError(
                f"cached blocks must be listed once each, got {len(listed)} for {len(store.held)} blocks"
            )
        if store.pool is not None:
            store.pool.check(self.holdings(), *(table for cache in caches for table in cache.tables()))

    # ---- within -------------------------------------------------------------------------------------------------

    def _find(self, row: Prompt) -> list[list[int]]:
        """The known blocks of a prompt, from its beginning on."""
        get, found = self._store.entries.get, []
        for digest in row.digests:
            entry = get(digest)
            if entry is None:
                break
            found.append(entry)
        return found

    def _longest(self, cache: PagedKVCache, entries: list[list[int]], limit: int) -> int:
        """The most tokens, up to ``limit``, whose visible blocks are all there."""
        size = cache.block_size
        tokens = max(0, min(limit, len(entries) * size))
        windows = [(group, window) for group, window in enumerate(cache.group_windows) if window is not None]
        while tokens > 0 and not all(
            all(entry[group] >= 0 for entry in entries[max(0, tokens - window + 1) // size : -(-tokens // size)])
            for group, window in windows
        ):
            tokens = (tokens - 1) // size * size
        return tokens

    def _common(self, cache: PagedKVCache, batch: Batch, found: list[list[list[int]]]) -> int:
        """The position of the batch before which every row's tokens are known; at least one token a row is not."""
        position = batch.length - 1
        while True:
            nearest = position
            for row, entries in zip(batch.rows, found, strict=True):
                before = row.tokens_before(position)
                held = self._longest(cache, entries, min(before, len(row.tokens) - 1))
                if held < before:
                    nearest = min(nearest, row.positions[held])
            if nearest == position:
                return position
            position = nearest

    def _table(self, cache: PagedKVCache, batch: Batch, found: list[list[list[int]]], position: int) -> Tensor:
        """The rows' block table up to a position: int32 ``[num_groups, num_seqs, columns]``."""
        rows = []
        for row, entries in zip(batch.rows, found, strict=True):
            used = -(-row.tokens_before(position) // cache.block_size)
            self._store.touch(row.digests[:used])
            rows.append(entries[:used])
        shape = (len(cache.group_windows), len(rows), max(len(entries) for entries in rows))
        numbers = array("i")  # torch.tensor takes several times as long for a list
        for group in range(shape[0]):
            for entries in rows:
                numbers.fromlist([entry[group] for entry in entries] + [-1] * (shape[2] - len(entries)))
        table = torch.frombuffer(numbers, dtype=torch.int32) if numbers else torch.empty(0, dtype=torch.int32)
        return table.view(shape)

    def _account(self, cache: PagedKVCache, batch: Batch, found: list[list[list[int]]], position: int) -> None:
        for row, entries in zip(batch.rows, found, strict=True):
            tokens = row.tokens_before(position)
            self._store.counts.update(queries=1, query_tokens=len(row.tokens))
            if tokens:
                self._store.counts.update(hits=1, hit_tokens=tokens)
            elif len(row.tokens) <= cache.block_size:
                self.miss(f"a prompt must be longer than a block of {cache.block_size} tokens", 1)
            elif entries:
                self.miss("another row of the batch has less that is known", 1)
            else:
                self.miss("its first block is not known", 1)

    def _make_room(self, batch: Batch) -> None:
        """Keep to ``max_tokens``: forget as many old blocks as new ones will come."""
        store = self._store
        if store.max_tokens is None or store.pool is None:
            return
        for chain in batch.digests:
            store.touch([digest for digest in chain if digest in store.entries])
        new = len({digest for chain in batch.digests for digest in chain if digest not in store.entries})
        surplus = len(store.entries) + new - store.max_tokens // store.pool.block_size
        if surplus > 0:
            dropped = [entry for _, entry in zip(range(surplus), store.unreferenced(), strict=False)]
            store.counts["evictions"] += len(dropped)
            store.drop(dropped)

    def _insert(
        self,
        cache: PagedKVCache,
        chain: list[bytes],
        begin: int,
        columns: Iterable[Sequence[int]],
        added: list[int],
    ) -> None:
        """Remember the blocks of a row, as far as there is room; what the cache holds now goes to ``added``.

        Args:
            cache: that the row is of.
            chain: digests of the row.
            begin: how many of them are known.
            columns: the blocks from there on, of every group.
            added: takes blocks.
        """
        store = self._store
        full = [group for group, window in enumerate(cache.group_windows) if window is None]
        most = None if store.max_tokens is None else store.max_tokens // cache.block_size
        length = begin
        for digest, blocks in zip(chain[begin:], columns, strict=False):
            entry = store.entries.get(digest)
            if entry is None:
                crowded = most is not None and len(store.entries) >= most
                if crowded or any(blocks[group] < 0 for group in full) or not store.held.isdisjoint(blocks):
                    break
                entry = store.entries[digest] = [-1] * len(blocks)
                store.counts["registered"] += 1
            for group, block in enumerate(blocks):
                if entry[group] < 0 <= block and block not in store.held:
                    entry[group] = block
                    store.held.add(block)
                    added.append(block)
            length += 1
        store.touch(chain[:length])
