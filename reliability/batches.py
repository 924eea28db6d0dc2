"""Batches of several rows under random operations, beside the tokens and padding of each row as Python lists.

Two layers, the second with a sliding window, so that there are two block tables. A key is its token. What needs more
blocks than there are is refused, and then nothing may have changed. Batches go to host memory, rows go to files, and
come back; prompts that begin alike find each other's blocks in a prefix cache.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torch_paged_kv import OutOfBlocksError, PrefixCache
from torch_paged_kv.cache import PagedKVCache
from torch_paged_kv.files import load, save
from torch_paged_kv.offload import HostTier, Swapped

BLOCK, NUM_BLOCKS, HOST_BLOCKS, KNOWN_TOKENS = 3, 60, 30, 60
WINDOW, MOST_POSITIONS, MOST_CACHES = 5, 24, 5


@dataclass(eq=False)
class Batch:
    """A cache, and for each row the token at every position; None is padding."""

    cache: PagedKVCache
    rows: list[list[int | None]]

    @property
    def seen(self) -> int:
        return len(self.rows[0])

    def ids(self) -> Tensor:
        """int64 [num_seqs, seen], 0 at padding."""
        return torch.tensor([[token or 0 for token in row] for row in self.rows]).reshape(len(self.rows), self.seen)

    def mask(self) -> Tensor:
        """bool [num_seqs, seen]."""
        real = [[token is not None for token in row] for row in self.rows]
        return torch.tensor(real, dtype=torch.bool).reshape(len(self.rows), self.seen)


class Batches:
    """What is under test, and its model. With an odd seed the pool grows as it is needed, else it is small."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.random = random.Random(seed)
        self.device = torch.device(device)
        num_blocks = NUM_BLOCKS if seed % 2 == 0 else None
        first = PagedKVCache([None, WINDOW], block_size=BLOCK, num_blocks=num_blocks)
        self.store(first, torch.zeros(1, 1))
        first.reset()
        self.pool = first.pool
        self.tier = HostTier(self.pool, HOST_BLOCKS)
        self.known = PrefixCache(max_tokens=KNOWN_TOKENS)
        self.known.bind(first, self.pool)
        self.texts = [[self.random.randrange(1, 1000) for _ in range(MOST_POSITIONS)] for _ in range(3)]
        self.batches: list[Batch] = []
        self.swapped: list[tuple[Swapped, Batch]] = []
        self.directory = tempfile.TemporaryDirectory()
        self.done: Counter[str] = Counter()

    def store(self, cache: PagedKVCache, tokens: Tensor) -> None:
        """Write tokens [num_seqs, length] into both layers."""
        states = tokens.to(self.device, torch.float32)[:, None, :, None]
        for layer in range(2):
            cache.write(layer, states, states)

    # ---- state --------------------------------------------------------------------------------------------------

    def state(self) -> list[object]:
        """All there is to know of the caches that hold something, but for what is in their blocks."""
        return [(b.cache.table().tolist(), b.cache.seq_lens(), b.cache.seen) for b in self.batches if b.cache.seen]

    def pool_state(self) -> list[object]:
        """Of the pool, what is free in its order and how often each block is held."""
        return [tensor.tolist() for tensor in (self.pool.free_ring, self.pool.ref_counts, self.pool.counters)]

    def check(self, *touched: Batch) -> None:
        """The accounts close, and caches hold what the model says."""
        self.tier.synchronize()  # on a GPU, blocks are held until they are copied out
        tables = [table for batch in self.batches for table in batch.cache.tables()]
        self.pool.check(self.tier.holdings(), self.known.holdings(), *tables)
        assert self.tier.num_free == HOST_BLOCKS - sum(swapped.num_blocks for swapped, _ in self.swapped)
        for batch in touched:
            self.check_batch(batch)

    def check_batch(self, batch: Batch) -> None:
        """Every token of the first layer; of the second those in the window of the coming token, others or 0 before."""
        real, cache = batch.mask(), batch.cache
        expected = torch.tensor([[token or 0 for token in row] for row in batch.rows], dtype=torch.float32)
        assert cache.seen == batch.seen
        assert cache.seq_lens() == real.sum(1).tolist()
        if batch.seen == 0:
            return
        for held in cache.gather(0):
            assert torch.equal(held[:, 0, :, 0].cpu(), expected)
        after = real.flip(1).cumsum(1).flip(1)  # tokens from a position on, [num_seqs, seen]
        needed = real & (after < WINDOW)
        for held in cache.gather(1):
            tokens = held[:, 0, :, 0].cpu()
            assert torch.equal(tokens[needed], expected[needed])
            assert bool(((tokens == expected) | (tokens == 0)).all())

    # ---- operations ---------------------------------------------------------------------------------------------

    def tokens(self, num_seqs: int, length: int) -> list[list[int | None]]:
        """New tokens of every row, sometimes with padding anywhere, but for one token in each row."""
        padded = length > 1 and self.random.random() < 0.4
        rows: list[list[int | None]] = []
        for _ in range(num_seqs):
            row: list[int | None] = [self.random.randrange(1, 1000) for _ in range(length)]
            if padded:
                kept = self.random.randrange(length)
                left = self.random.random() < 0.5
                gone = range(kept) if left else [i for i in range(length) if i != kept and self.random.random() < 0.4]
                for position in gone:
                    row[position] = None
            rows.append(row)
        return rows

    def write(self, batch: Batch, length: int) -> bool:
        """Whether there were blocks for it."""
        new = self.tokens(len(batch.rows), length)
        longer = Batch(batch.cache, [old + more for old, more in zip(batch.rows, new, strict=True)])
        padded = any(token is None for row in longer.rows for token in row)

        def write() -> None:
            batch.cache.pad(longer.mask().to(self.device) if padded else None, length)
            self.store(batch.cache, longer.ids()[:, batch.seen :])

        if not self.attempt(write):
            return False
        batch.rows = longer.rows
        return True

    def begin(self) -> None:
        batch = Batch(PagedKVCache([None, WINDOW], pool=self.pool), [[] for _ in range(self.random.randint(1, 4))])
        self.batches.append(batch)
        if self.write(batch, self.random.randint(1, 10)):
            self.check(batch)
        else:
            self.batches.remove(batch)

    def begin_known(self) -> None:
        """A left-padded batch of prompts that may begin as others did; what is known is not written again."""
        prompts = [
            self.random.choice(self.texts)[: self.random.randint(1, 14)]
            + [self.random.randrange(1, 1000) for _ in range(self.random.randrange(3))]
            for _ in range(self.random.randint(1, 3))
        ]
        length = max(len(prompt) for prompt in prompts)
        rows: list[list[int | None]] = [[None] * (length - len(prompt)) + prompt for prompt in prompts]
        whole = Batch(PagedKVCache([None, WINDOW], pool=self.pool), rows)
        seen = self.known.attach(whole.cache, whole.ids(), whole.mask())
        assert 0 <= seen < length
        self.done["hits"] += seen > 0
        batch = Batch(whole.cache, [row[:seen] for row in rows])
        self.batches.append(batch)
        if seen:
            self.check(batch)

        def rest() -> None:
            batch.cache.pad(whole.mask().to(self.device), length - seen)
            self.store(batch.cache, whole.ids()[:, seen:])

        if self.attempt(rest):
            batch.rows = rows
            self.known.register(batch.cache, whole.ids())
            self.check(batch)
        else:
            self.batches.remove(batch)

    def register(self) -> None:
        batch = self.some()
        if batch.seen:
            self.known.register(batch.cache, batch.ids())

    def evict(self) -> None:
        self.known.evict(self.random.randint(1, 5))
        if self.random.random() < 0.2:
            self.known.clear()

    def some(self) -> Batch:
        return self.random.choice(self.batches)

    def append(self) -> None:
        batch = self.some()
        room = MOST_POSITIONS - batch.seen
        if room > 0:
            self.write(batch, min(room, self.random.choice([1, 1, 1, 2, 4])))
            self.check(batch)

    def reorder(self) -> None:
        """A permutation, beams that repeat, fewer rows, more rows."""
        batch, count = self.some(), self.random.randint(1, 5)
        if self.random.random() < 0.6:
            count = len(batch.rows)
        source = [self.random.randrange(len(batch.rows)) for _ in range(count)]
        batch.cache.reorder(torch.tensor(source, device=self.device))
        batch.rows = [list(batch.rows[row]) for row in source]
        self.check(batch)

    def fork(self) -> None:
        batch = self.some()
        self.batches.append(Batch(batch.cache.fork(), [list(row) for row in batch.rows]))
        self.check(self.batches[-1])

    def crop(self) -> None:
        batch = self.some()
        length, before = self.random.randint(0, batch.seen), self.state()
        try:
            batch.cache.truncate(length)
        except ValueError as error:
            assert "window" in str(error)  # noqa: PT017  (refused is right; anything else is a fault)
            assert self.state() == before
            self.done["refused crop"] += 1
            return
        batch.rows = [row[:length] for row in batch.rows]
        self.check(batch)

    def attempt(self, action: Callable[[], object]) -> bool:
        """Whether there was room for something; if not, nothing may have changed."""
        before, pool_before = self.state(), self.pool_state()
        gives_up = self.known.stats()["evictable_blocks"] > 0  # what a prefix cache alone holds, enough or not
        try:
            action()
        except OutOfBlocksError as error:
            assert error.wanted > error.free  # noqa: PT017  (refused is right if so; anything else is a fault)
            assert self.state() == before
            assert gives_up or self.pool_state() == pool_before
            self.done["refused"] += 1
            return False
        return True

    def swap_out(self) -> None:
        batch = self.some()
        if self.attempt(lambda: self.swapped.append((self.tier.swap_out(batch.cache), batch))):
            self.batches.remove(batch)

    def swap_in(self) -> None:
        if self.swapped:
            chosen = self.random.choice(self.swapped)
            batch = Batch(PagedKVCache([None, WINDOW], pool=self.pool), chosen[1].rows)
            if self.attempt(lambda: self.tier.swap_in(batch.cache, chosen[0])):
                self.swapped.remove(chosen)
                self.batches.append(batch)
                self.check(batch)

    def forget(self) -> None:
        if self.swapped:
            self.swapped.remove(self.random.choice(self.swapped))

    def file(self) -> None:
        """Some rows to a file and back into another cache."""
        batch, path = self.some(), Path(self.directory.name) / "kv.safetensors"
        rows = self.random.sample(range(len(batch.rows)), self.random.randint(1, len(batch.rows)))
        save(batch.cache, path, rows=rows)
        copy = Batch(PagedKVCache([None, WINDOW], pool=self.pool), [list(batch.rows[row]) for row in rows])
        if self.attempt(lambda: load(copy.cache, path)):
            self.batches.append(copy)
            self.check(copy)

    def reset(self) -> None:
        batch = self.some()
        batch.cache.reset()
        self.batches.remove(batch)

    def drop(self) -> None:
        self.batches.remove(self.some())

    def step(self) -> None:
        """One random operation."""
        operations = [self.begin]
        if self.batches:
            operations = [self.append] * 12 + [self.reorder] * 6 + [self.crop, self.drop, self.reset] * 2
            operations += [self.swap_out, self.swap_in, self.forget, self.register, self.evict]
            if len(self.batches) < MOST_CACHES:
                operations += [self.begin, self.begin_known, self.fork] * 2 + [self.swap_in] * 2 + [self.file]
        operation = self.random.choice(operations)
        operation()
        self.done[operation.__name__] += 1

    def close(self) -> int:
        """Let go of everything; how many blocks do not come back."""
        self.batches.clear()
        self.swapped.clear()
        self.known.clear()
        self.tier.synchronize()
        self.pool.check()
        self.directory.cleanup()
        return self.pool.num_blocks - self.pool.num_free + HOST_BLOCKS - self.tier.num_free
