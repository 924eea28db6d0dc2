"""Pool, prefix cache, forks and swaps under random operations, beside a plain Python model of them.

A key is its token, so what a cache gathers says which tokens it holds. After every operation the accounts must close
and what was touched must hold what the model says; the model also says whether blocks suffice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from torch_paged_kv import OutOfBlocksError, PrefixCache
from torch_paged_kv.cache import PagedKVCache
from torch_paged_kv.offload import HostTier, Swapped

BLOCK, NUM_BLOCKS, HOST_BLOCKS, MAX_LENGTH = 3, 24, 10, 26


class Machine:
    """What is under test, and beside it the model: the tokens of every cache and of everything swapped out."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.random = random.Random(seed)
        self.device = torch.device(device)
        first = self.new()
        self.write(first, [0])
        self.pool = first.pool
        first.reset()
        self.prefix = PrefixCache(tenant="a")
        self.views = {"a": self.prefix, "b": self.prefix.with_salt(tenant="b")}
        self.prefix.bind(first, self.pool)
        self.tier = HostTier(self.pool, HOST_BLOCKS)
        self.caches: list[tuple[PagedKVCache, list[int], str]] = []
        self.swapped: list[tuple[Swapped, list[int], str]] = []
        self.done: Counter[str] = Counter()
        self.texts = [[self.random.randrange(1, 100) for _ in range(MAX_LENGTH)] for _ in range(5)]

    def new(self) -> PagedKVCache:
        pool = getattr(self, "pool", None)
        if pool is not None:
            return PagedKVCache([None], pool=pool)
        return PagedKVCache([None], block_size=BLOCK, num_blocks=NUM_BLOCKS)

    def write(self, cache: PagedKVCache, tokens: list[int]) -> None:
        states = torch.tensor(tokens, dtype=torch.float32, device=self.device)[None, None, :, None]  # [1, 1, length, 1]
        cache.write(0, states, states)

    # ---- the model ----------------------------------------------------------------------------------------------

    def holders(self) -> Counter[int]:
        """How often each block is held, by tables and by the prefix cache."""
        counts: Counter[int] = Counter(self.prefix.blocks().tolist())
        for cache, _, _ in self.caches:
            counts.update(cache.table().flatten().tolist())
        return counts

    def suffices(self, cache: PagedKVCache, tokens: int, new: int) -> bool:
        """Whether a cache of so many tokens can take `new` more."""
        counts = self.holders()
        available = NUM_BLOCKS - len(counts) + sum(counts[block] == 1 for block in self.prefix.blocks().tolist())
        wanted = -(-(tokens + new) // BLOCK) - -(-tokens // BLOCK)
        if tokens % BLOCK and counts[int(cache.table()[0, 0, tokens // BLOCK])] > 1:
            wanted += 1  # a copy
        return wanted <= available

    def check(self, *touched: tuple[PagedKVCache, list[int], str]) -> None:
        self.tier.synchronize()  # on a GPU, blocks are held until they are copied out
        self.pool.check(
            self.prefix.holdings(), self.tier.holdings(), *(t for cache, _, _ in self.caches for t in cache.tables())
        )
        assert self.pool.num_free == NUM_BLOCKS - len(self.holders())
        host = sum(swapped.num_blocks for swapped, _, _ in self.swapped)
        assert self.tier.num_free == HOST_BLOCKS - host
        for cache, tokens, _ in touched:
            assert cache.seq_lens() == [len(tokens)]
            assert cache.gather(0)[0].flatten().tolist() == tokens
            assert cache.gather(0)[1].flatten().tolist() == tokens

    # ---- operations ---------------------------------------------------------------------------------------------

    def extend(self, entry: tuple[PagedKVCache, list[int], str], new: list[int]) -> bool:
        """Write tokens, or see them refused if and only if the model says so."""
        cache, tokens, _ = entry
        if self.suffices(cache, len(tokens), len(new)):
            self.write(cache, new)
            tokens += new
            return True
        with pytest.raises(OutOfBlocksError):
            self.write(cache, new)
        self.done["refused"] += 1
        return False

    def admit(self) -> None:
        tenant = self.random.choice(list(self.views))
        text, cut = self.random.choice(self.texts), self.random.randrange(1, MAX_LENGTH)
        prompt = text[:cut] + [self.random.randrange(1, 100) for _ in range(self.random.randrange(4))]
        prompt = prompt[:MAX_LENGTH]
        cache, prefix = self.new(), self.views[tenant]
        seen = prefix.attach(cache, torch.tensor([prompt]))
        assert seen < len(prompt)
        self.done["hits"] += seen > 0
        entry = (cache, prompt[:seen], tenant)
        self.caches.append(entry)
        if self.extend(entry, prompt[seen:]):
            prefix.register(cache, torch.tensor([prompt]))
            self.check(entry)
        else:
            cache.reset()
            self.caches.remove(entry)

    def some(self) -> tuple[PagedKVCache, list[int], str]:
        return self.random.choice(self.caches)

    def append(self) -> None:
        entry = self.some()
        room = MAX_LENGTH - len(entry[1])
        if room:
            self.extend(entry, [self.random.randrange(1, 100) for _ in range(self.random.randint(1, min(5, room)))])
            self.check(entry)

    def register(self) -> None:
        cache, tokens, tenant = self.some()
        self.views[tenant].register(cache, torch.tensor([tokens]))

    def fork(self) -> None:
        cache, tokens, tenant = self.some()
        self.caches.append((cache.fork(), list(tokens), tenant))
        self.check(self.caches[-1])

    def truncate(self) -> None:
        cache, tokens, _ = entry = self.some()
        if len(tokens) > 1:
            del tokens[self.random.randrange(1, len(tokens)) :]
            cache.truncate(len(tokens))
            self.check(entry)

    def drop(self) -> None:
        self.caches.remove(self.some())

    def reset(self) -> None:
        entry = self.some()
        entry[0].reset()
        self.caches.remove(entry)

    def swap_out(self) -> None:
        entry = self.some()
        cache, tokens, tenant = entry
        if -(-len(tokens) // BLOCK) > self.tier.num_free:
            with pytest.raises(OutOfBlocksError):
                self.tier.swap_out(cache)
            self.check(entry)
        else:
            self.swapped.append((self.tier.swap_out(cache), tokens, tenant))
            self.caches.remove(entry)

    def swap_in(self) -> None:
        swapped, tokens, tenant = chosen = self.random.choice(self.swapped)
        cache, counts = self.new(), self.holders()
        available = NUM_BLOCKS - len(counts) + sum(counts[block] == 1 for block in self.prefix.blocks().tolist())
        if swapped.num_blocks > available:
            with pytest.raises(OutOfBlocksError):
                self.tier.swap_in(cache, swapped)
            self.done["refused"] += 1
            return
        self.tier.swap_in(cache, swapped)
        self.swapped.remove(chosen)
        self.caches.append((cache, tokens, tenant))
        self.check(self.caches[-1])

    def forget(self) -> None:
        self.swapped.remove(self.random.choice(self.swapped))

    def evict(self) -> None:
        wanted = self.random.randint(1, 4)
        held = {block for cache, _, _ in self.caches for block in cache.table().flatten().tolist()}
        expected = len(set(self.prefix.blocks().tolist()) - held)
        assert self.prefix.evict(wanted) == min(wanted, expected)

    def clear(self) -> None:
        self.prefix.clear()

    def close(self) -> int:
        """Let go of everything; how many blocks do not come back."""
        self.caches.clear()
        self.swapped.clear()
        self.prefix.clear()
        self.tier.synchronize()
        self.pool.check()
        return NUM_BLOCKS - self.pool.num_free + HOST_BLOCKS - self.tier.num_free

    def step(self) -> None:
        choices: list[tuple[Callable[[], None], int]] = [(self.admit, 6), (self.evict, 1)]
        if self.random.random() < 0.1:
            choices.append((self.clear, 1))
        if self.caches:
            choices += [(self.append, 6), (self.register, 2), (self.truncate, 2), (self.drop, 3), (self.reset, 2)]
            choices += [(self.swap_out, 2)]
            if len(self.caches) < 6:
                choices.append((self.fork, 2))
        if self.swapped:
            choices += [(self.swap_in, 2), (self.forget, 1)]
        operations, weights = zip(*choices, strict=True)
        operation = self.random.choices(operations, weights)[0]
        operation()
        self.done[operation.__name__] += 1
