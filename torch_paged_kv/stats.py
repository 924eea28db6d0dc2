"""Monitor: exact numbers of a pool and of all that hold its blocks, over time and for Prometheus."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .cache import PagedKVCache
from .offload import HostTier
from .prefix import PrefixCache
from .storage import KVPool

__all__ = ["BlockState", "Monitor", "Sample"]

# Numbers that only grow, for Prometheus.
COUNTERS = frozenset(
    f"prefix_{name}" for name in ("queries", "query_tokens", "hits", "hit_tokens", "evictions", "registered")
) | {"swapped_out_bytes", "swapped_in_bytes", "swap_seconds"}

HELP = {
    "blocks_total": "Blocks of the pool",
    "blocks_free": "Blocks that nobody holds",
    "blocks_live": "Blocks that a sequence holds",
    "blocks_shared": "Blocks that are held more than once",
    "blocks_cached": "Blocks that the prefix cache holds, alone or with sequences",
    "blocks_evictable": "Blocks that only the prefix cache holds",
    "blocks_leaving": "Blocks whose copy to the host may still run",
    "bytes_total": "Bytes of the pool",
    "bytes_held": "Bytes of the blocks that somebody holds",
    "tokens": "Tokens of all sequences, each counted where it is held",
    "sequences": "Sequences that hold a block",
    "slots_wasted": "Slots of live blocks that hold no token",
    "utilisation": "Share of the slots of live blocks that hold a token",
}


@dataclass(frozen=True)
class BlockState:
    """One block of the pool, and who holds it."""

    references: int
    owners: tuple[str, ...]  # sequences, as "<cache>.<row>"
    cached: bool  # by the prefix cache
    filled: int  # slots that hold a token; those of a block that is only cached are full

    @property
    def kind(self) -> str:
        """By which sequences it is held: "free", "one sequence", "shared", "cached", "other".

        "cached" is held by the prefix cache alone, "other" by what the monitor does not know.
        """
        if self.references == 0:
            return "free"
        if not self.owners:
            return "cached" if self.cached else "other"
        return "shared" if len(self.owners) > 1 else "one sequence"


@dataclass(frozen=True)
class Sample:
    """Numbers at one time."""

    seconds: float  # since the monitor began
    numbers: dict[str, int | float]


class Monitor:
    """Looks at a pool and at what holds its blocks. Reading synchronises on CUDA; nothing happens in between.

    Args:
        *caches: to look at; at least one has a pool. More come with :meth:`watch`. They are not kept alive.
        prefix_cache: that holds blocks of the pool.
        tier: that sequences of the pool are swapped to.
    """

    def __init__(
        self, *caches: PagedKVCache, prefix_cache: PrefixCache | None = None, tier: HostTier | None = None
    ) -> None:
        self._caches: list[weakref.ref[PagedKVCache]] = []
        self.prefix_cache = prefix_cache
        self.tier = tier
        self.history: list[Sample] = []
        self._start = time.perf_counter()
        self.watch(*caches)

    def watch(self, *caches: PagedKVCache) -> None:
        """Look at more caches of the pool."""
        self._caches += [weakref.ref(cache) for cache in caches]

    @property
    def caches(self) -> list[PagedKVCache]:
        """The caches that live, in the order in which they were given."""
        living = [cache for cache in (reference() for reference in self._caches) if cache is not None]
        self._caches = [weakref.ref(cache) for cache in living]
        return living

    @property
    def pool(self) -> KVPool:
        """The pool of the caches."""
        if self.prefix_cache is not None and self.prefix_cache.pool is not None:
            return self.prefix_cache.pool
        for cache in self.caches:
            if cache.has_pool:
                return cache.pool
        raise ValueError("a monitor must be given a cache or prefix cache that has a pool")

    # ---- numbers ------------------------------------------------------------------------------------------------

    def read(self) -> dict[str, int | float]:
        """The numbers now; :data:`HELP` tells their meaning, ``prefix_*`` are of :meth:`PrefixCache.stats`."""
        pool, states = self.pool, self.blocks()
        kinds = [state.kind for state in states]
        live = [state for state in states if state.owners]
        slots = len(live) * pool.block_size
        filled = sum(state.filled for state in live)
        free = kinds.count("free")
        numbers: dict[str, int | float] = {
            "blocks_total": len(states),
            "blocks_free": free,
            "blocks_live": len(live),
            "blocks_shared": sum(state.references > 1 for state in states),
            "blocks_cached": sum(state.cached for state in states),
            "blocks_evictable": sum(state.cached and state.references == 1 for state in states),
            "blocks_leaving": 0 if self.tier is None else int(self.tier.stats()["leaving_blocks"]),
            "bytes_total": len(states) * pool.block_bytes,
            "bytes_held": (len(states) - free) * pool.block_bytes,
            "tokens": sum(sum(cache.seq_lens()) for cache in self.caches),
            "sequences": len({owner for state in live for owner in state.owners}),
            "slots_wasted": slots - filled,
            "utilisation": filled / slots if slots else 0.0,
        }
        if self.prefix_cache is not None:
            prefix = self.prefix_cache.stats()
            numbers |= {f"prefix_{name}": value for name, value in prefix.items() if f"prefix_{name}" in COUNTERS} | {
                "prefix_smallest": prefix["smallest_prefix"],
                "prefix_tokens": prefix["cached_tokens"],
            }
        if self.tier is not None:
            numbers |= {name: value for name, value in self.tier.stats().items() if name != "leaving_blocks"}
        return numbers

    def blocks(self) -> list[BlockState]:
        """The state of every block of the pool, by number."""
        pool = self.pool
        pool.collect()
        owners: dict[int, list[str]] = {}
        filled: dict[int, int] = {}
        for index, cache in enumerate(self.caches):
            if cache.has_pool and cache.pool is not pool:
                raise ValueError("the caches of a monitor must be of one pool")
            lens = cache.seq_lens()
            for group in cache.table().tolist():
                for row, (entries, length) in enumerate(zip(group, lens, strict=True)):
                    for column, block in enumerate(entries):
                        if block >= 0 and column * pool.block_size < length:
                            owners.setdefault(block, []).append(f"{index}.{row}")
                            used = min(pool.block_size, length - column * pool.block_size)
                            filled[block] = max(filled.get(block, 0), used)
        cached = set() if self.prefix_cache is None else set(self.prefix_cache.blocks().tolist())
        references: list[int] = pool.ref_counts.tolist()
        return [
            BlockState(
                count,
                tuple(owners.get(block, ())),
                block in cached,
                filled.get(block, pool.block_size if block in cached else 0),
            )
            for block, count in enumerate(references)
        ]

    def check(self) -> None:
        """Raise unless free + live + evictable (+ leaving) == total, and every reference is accounted for.

        Raises:
            RuntimeError: names the first block that is wrong; a cache that is not watched counts as wrong.
        """
        tables = [table for cache in self.caches for table in cache.tables()]
        if self.prefix_cache is not None:
            tables.append(self.prefix_cache.holdings())
        if self.tier is not None:
            tables.append(self.tier.holdings())
        no_table = (torch.empty(1, 1, 0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
        self.pool.check(no_table, *tables)

    def sample(self) -> Sample:
        """Read the numbers and keep them in ``history``, for :func:`torch_paged_kv.plots.usage`."""
        self.history.append(Sample(time.perf_counter() - self._start, self.read()))
        return self.history[-1]

    # ---- Prometheus ---------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Any]:
        """What a ``prometheus_client`` registry asks for: ``registry.register(monitor)``."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in self.read().items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            yield family(f"paged_kv_{name}", HELP.get(name, name.replace("_", " ")), value=value)
        if self.prefix_cache is not None:
            misses = CounterMetricFamily("paged_kv_prefix_misses", "Prompts that found nothing", labels=["reason"])
            for reason, count in self.prefix_cache.misses().items():
                misses.add_metric([reason], count)
            yield misses

    def prometheus(self) -> str:
        """The numbers in Prometheus' text format. Needs ``prometheus_client``."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(self)
        text: str = generate_latest(registry).decode()
        return text
