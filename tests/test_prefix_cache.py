"""PrefixCache: what is known by which digest, what is found, given up and left alone; and generate on top of it."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import time
import warnings
from collections import Counter, OrderedDict
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from models import Caches
from packaging.version import Version
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_paged_kv
from torch_paged_kv import OutOfBlocksError, PagedKVCache, PrefixCache, StaticScales
from torch_paged_kv.cache import PagedKVCache as CoreCache
from torch_paged_kv.integrations import prefix as prefix_hooks
from torch_paged_kv.prefix import block_digests, root_digest

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]

BLOCK = 4
FAMILIES = ("llama", "gemma3", "mistral", "gpt_oss", "falcon")


@pytest.fixture(scope="module")
def llama() -> Any:
    return models.tiny("llama")


class CountTokens:
    """How many positions a model computed, over all its forwards."""

    def __init__(self, model: Any) -> None:
        self.positions = 0
        self._hook = model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        self.positions += inputs[0].numel()

    def __enter__(self) -> CountTokens:
        return self

    def __exit__(self, *exc: object) -> None:
        self._hook.remove()


def caches(prefix_cache: PrefixCache, **arguments: Any) -> Caches:
    return models.paged(prefix_cache=prefix_cache, **arguments)


def core_cache(prefix_cache: PrefixCache, **size: int) -> CoreCache:
    """A cache of one layer, without Transformers."""
    pool = prefix_cache.pool
    return CoreCache([None], block_size=BLOCK, pool=pool) if pool else CoreCache([None], block_size=BLOCK, **size)


def write(cache: CoreCache, num_tokens: int, num_seqs: int = 1) -> None:
    states = torch.randn(num_seqs, 1, num_tokens, 8)
    cache.write(0, states, states)


def ids(*tokens: int) -> Tensor:
    return torch.tensor([tokens])


def cached(prefix_cache: PrefixCache, tokens: Tensor, **size: int) -> CoreCache:
    """A sequence of `tokens` [1, length] that was written and registered."""
    cache = core_cache(prefix_cache, **size)
    seen = prefix_cache.attach(cache, tokens)
    write(cache, tokens.shape[1] - seen)
    prefix_cache.register(cache, tokens)
    return cache


# ---------------------------------------------------------------------------------------------------------------------
# Digests


def test_a_digest_is_a_chain_over_tokens_as_64_bit_numbers() -> None:
    first = hashlib.sha256(b"root" + b"".join(t.to_bytes(8, "little") for t in (1, 2))).digest()
    second = hashlib.sha256(first + b"".join(t.to_bytes(8, "little") for t in (3, 400000))).digest()
    assert block_digests(torch.tensor([1, 2, 3, 400000, 5]), 2, b"root") == [first, second]
    assert block_digests(torch.tensor([1, 2, 3, 400000], dtype=torch.int32), 2, b"root") == [first, second]
    strided = torch.tensor([[1, 9], [2, 9], [3, 9], [400000, 9]])[:, 0]
    assert block_digests(strided, 2, b"root") == [first, second]


def last_digest(tokens: list[int] | None = None, **salt: Any) -> bytes:
    return PrefixCache(**salt).digests(torch.tensor(tokens or range(8)), BLOCK)[-1]


def test_salts_do_not_collide() -> None:
    """Every field is written with its name, its type and its length."""
    salts: list[dict[str, Any]] = [
        {},
        {"adapter": "X"},
        {"tenant": "X"},
        {"model": "X"},
        {"media": ["X"]},
        {"adapter": b"X"},
        {"adapter": "X", "tenant": "Y"},
        {"adapter": "XY"},
        {"adapter": "Y", "tenant": "X"},
        {"adapter": 1},
        {"adapter": "1"},
        {"adapter": 0},
        {"adapter": ""},
        {"tenant": ""},
        {"media": [b"one picture"]},
        {"media": [b"another one"]},
        {"media": [b"one pict", b"ure"]},
        {"media": [b"one picture", b"another one"]},
        {"media": [b"another one", b"one picture"]},
    ]
    digests = [last_digest(**salt) for salt in salts]
    assert len(set(digests)) == len(salts)


def test_tokens_do_not_run_together() -> None:
    variants = [[1, 23, 5, 6], [12, 3, 5, 6], [1, 2, 3, 5], [1, 23, 5, 60], [256, 0, 0, 0], [0, 1, 0, 0]]
    assert len({last_digest(tokens) for tokens in variants}) == len(variants)
    edge = [[7, 7, 7, 1, 23, 7, 7, 7], [7, 7, 7, 12, 3, 7, 7, 7]]  # across the edge of a block
    assert len({last_digest(tokens) for tokens in edge}) == 2


def test_block_size_and_layout_are_part_of_a_digest() -> None:
    prefix_cache, tokens = PrefixCache(), torch.arange(8)
    digests = [prefix_cache.digests(tokens, size, layout)[-1] for size in (4, 8) for layout in ("float16", "int8")]
    assert len(set(digests)) == 4


@pytest.mark.parametrize("value", [1.5, True, ..., [1.5], {"a": 1}], ids=repr)
def test_labels_of_other_types_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="a label must be str, bytes, int or None, got"):
        PrefixCache(tenant=value)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="fields must be among model, tenant, adapter, media, got user"):
        PrefixCache().with_salt(user="a")


def test_digests_are_the_same_in_every_process() -> None:
    code = (
        "import torch; from torch_paged_kv import PrefixCache; "
        "p = PrefixCache(model='m', tenant='t', adapter=3, media=[b'p']); "
        "print(p.digests(torch.arange(64), 16, 'x')[-1].hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "4711")
    }
    mine = PrefixCache(model="m", tenant="t", adapter=3, media=[b"p"]).digests(torch.arange(64), 16, "x")[-1].hex()
    assert printed == {mine}
    # Other versions of this library must find what this one wrote down, or count FORMAT up.
    assert (
        root_digest([("a", "b"), ("c", None)])
        == hashlib.sha256(b"s\1\0\0\0\0\0\0\0as\1\0\0\0\0\0\0\0bs\1\0\0\0\0\0\0\0cn\0\0\0\0\0\0\0\0").digest()
    )


def test_digest_and_match_of_100k_tokens_take_15_ms() -> None:
    """CPU time of this thread, as the machine may be busy; measured 4 ms."""
    prefix_cache, cache = PrefixCache(), CoreCache([None])
    tokens = torch.randint(0, 50_000, (1, 100_000))
    digests = prefix_cache.batch(cache, tokens).rows[0].digests
    prefix_cache._store.entries = OrderedDict((digest, [block]) for block, digest in enumerate(digests))
    seconds = []
    for _ in range(10):
        prefix_cache._store.recent = []  # else it would not be hashed again
        start = time.thread_time()
        batch = prefix_cache.batch(cache, tokens)
        found = [prefix_cache._find(batch.rows[0])]
        position = prefix_cache._common(cache, batch, found)
        table = prefix_cache._table(cache, batch, found, position)
        seconds.append(time.thread_time() - start)
    assert (position, table.shape) == (99_999, (1, 1, 6250))
    assert min(seconds) <= 0.015, seconds


def test_what_prompts_begin_with_alike_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from one batch to the next, whoever's prompts; under another salt everything has another digest."""
    hashed: list[bytes] = []

    def sha256(data: bytes) -> Any:
        hashed.append(data)
        return hashlib.sha256(data)

    cache, prefix_cache = CoreCache([None], block_size=BLOCK), PrefixCache(tenant="a")
    pair = torch.stack([torch.arange(18), torch.arange(18)])
    pair[1, 9] = 50  # in the third block of four
    longer = torch.arange(23)[None]
    views = (prefix_cache, prefix_cache, prefix_cache.with_salt(tenant="b"), prefix_cache.with_salt(tenant="a"))
    for view, tokens, blocks in zip(views, (pair, longer, longer, pair), (4 + 2, 1, 5, 4 + 2), strict=True):
        expected = [view.digests(row, BLOCK, "block size 4, windows None, dtype None, scales None") for row in tokens]
        with monkeypatch.context() as patch:
            patch.setattr("torch_paged_kv.digests.hashlib", SimpleNamespace(sha256=sha256))
            assert view.batch(cache, tokens).digests == expected
        assert len(hashed) == 1 + blocks  # and what stands before the first block
        hashed.clear()


@pytest.mark.parametrize("seed", range(5))
def test_where_tokens_of_a_padded_row_stand(seed: int) -> None:
    """Padding before, after and between tokens, or nothing else."""
    torch.manual_seed(seed)
    real = torch.ones(6, 12, dtype=torch.int64)
    real[0, :5] = real[1, 9:] = real[2, 4:6] = real[3, 1] = real[4] = 0
    real[5] = torch.randint(2, (12,))
    input_ids = torch.randint(100, (6, 12))
    batch = PrefixCache().batch(CoreCache([None], block_size=BLOCK), input_ids, real)
    for row, ids_of_row, mask in zip(batch.rows, input_ids, real.bool(), strict=True):
        positions: list[int] = mask.nonzero().flatten().tolist()
        assert list(row.positions) == positions
        assert torch.equal(row.tokens, ids_of_row[mask])
        assert [row.tokens_before(position) for position in range(13)] == [int(mask[:p].sum()) for p in range(13)]
        for other in batch.rows:
            for seen in range(13):
                stored = [position for position in other.positions if position < seen]
                alike = [mine == its for mine, its in zip(positions, stored, strict=False)]
                assert (
                    row.held_in(stored) == row.held_in(other.positions[: len(stored)]) == [*alike, False].index(False)
                )


# ---------------------------------------------------------------------------------------------------------------------
# Found, registered, given up


def test_full_written_blocks_only() -> None:
    prefix_cache = PrefixCache()
    cache = core_cache(prefix_cache, num_blocks=8)
    write(cache, 10)
    assert prefix_cache.register(cache, torch.arange(12)[None]) == 2  # ids past what is written are ignored
    assert prefix_cache.register(cache, torch.arange(12)[None]) == 0
    other = core_cache(prefix_cache)
    assert prefix_cache.attach(other, torch.arange(12)[None]) == 8
    assert other.table().tolist() == [[[0, 1]]]
    prefix_cache.check(cache, other)


def test_a_step_that_is_not_written_is_not_registered() -> None:
    prefix_cache = PrefixCache()
    cache = CoreCache([None, None], block_size=BLOCK, num_blocks=4)
    states = torch.randn(1, 1, 8, 8)
    cache.write(0, states, states)  # layer 1 failed
    with pytest.raises(ValueError, match="the cache must be between two steps: every layer written"):
        prefix_cache.register(cache, torch.arange(8)[None])
    cache.write(1, states, states)
    assert prefix_cache.register(cache, torch.arange(8)[None]) == 2


def test_register_refuses_too_few_ids() -> None:
    cache = core_cache(PrefixCache(), num_blocks=4)
    write(cache, 6)
    with pytest.raises(ValueError, match=r"input_ids must have the \[1, 6\] positions of the cache, got \[1, 5\]"):
        PrefixCache().register(cache, torch.arange(5)[None])


def test_what_a_row_took_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entries(OrderedDict[bytes, list[int]]):
        looked_up = 0

        def get(self, *arguments: Any) -> Any:
            Entries.looked_up += 1
            return super().get(*arguments)

    prefix_cache = PrefixCache()
    first = cached(prefix_cache, torch.arange(20)[None], num_blocks=8)
    monkeypatch.setattr(prefix_cache._store, "entries", Entries(prefix_cache._store.entries))
    tokens = torch.cat([torch.arange(20), torch.arange(50, 55)])[None]
    cache = core_cache(prefix_cache)
    batch = prefix_cache.batch(cache, tokens)
    assert prefix_cache.attach(cache, batch) == 20
    write(cache, 5)
    assert prefix_cache.register_batch(cache, batch) == 1
    assert Entries.looked_up == 6 + 1  # to take them, and the new one to remember it
    prefix_cache.check(first, cache)


def test_what_a_row_took_may_be_forgotten_before_the_row_is_registered() -> None:
    prefix_cache = PrefixCache()
    first = cached(prefix_cache, torch.arange(8)[None], num_blocks=8)
    cache, tokens = core_cache(prefix_cache), torch.arange(13)[None]
    batch = prefix_cache.batch(cache, tokens)
    assert prefix_cache.attach(cache, batch) == 8
    write(cache, 5)
    prefix_cache.clear()
    assert prefix_cache.register_batch(cache, batch) == 3
    assert prefix_cache.attach(core_cache(prefix_cache), tokens) == 12
    prefix_cache.check(first, cache)


def test_a_full_hit_leaves_the_last_token() -> None:
    prefix_cache = PrefixCache()
    tokens = torch.arange(8)[None]
    first = cached(prefix_cache, tokens, num_blocks=8)
    again = core_cache(prefix_cache)
    assert prefix_cache.attach(again, tokens) == 7
    assert again.seq_lens() == [7]
    before = first.gather(0)[0].clone()
    write(again, 1)  # goes to a copy of the block that it lies in
    assert again.table()[0, 0].tolist() == [0, 2]
    assert torch.equal(first.gather(0)[0], before)
    prefix_cache.check(first, again)


def test_a_known_block_is_copied_before_it_is_written() -> None:
    """A row cut back into a cached block and continued with another token must not change what others will find."""
    prefix_cache = PrefixCache()
    cache = cached(prefix_cache, torch.arange(8)[None], num_blocks=8)
    before = cache.gather(0)[0].clone()
    cache.truncate(6)
    write(cache, 2)
    other = core_cache(prefix_cache)
    assert prefix_cache.attach(other, torch.arange(9)[None]) == 8
    write(other, 1)
    assert torch.equal(other.gather(0)[0][:, :, :8], before)
    assert not torch.equal(cache.gather(0)[0], before)
    prefix_cache.check(cache, other)


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    prefix_cache = PrefixCache()
    chains = [torch.arange(start, start + 8)[None] for start in (0, 100, 200)]
    for chain in chains:
        cached(prefix_cache, chain, num_blocks=6).reset()
    probe = core_cache(prefix_cache)
    prefix_cache.attach(probe, chains[0])  # used now
    probe.reset()

    def known() -> list[int]:
        return [len(prefix_cache._find(prefix_cache.batch(probe, chain).rows[0])) for chain in chains]

    seen = [known()]
    while prefix_cache.evict(1):
        seen.append(known())
    assert seen == [[2, 2, 2], [2, 1, 2], [2, 0, 2], [2, 0, 1], [2, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert prefix_cache.pool is not None
    assert prefix_cache.pool.num_free == 6
    prefix_cache.check()


def test_a_held_block_is_never_given_up() -> None:
    prefix_cache = PrefixCache()
    cache = cached(prefix_cache, torch.arange(8)[None], num_blocks=3)
    assert prefix_cache.evict(3) == 0
    write(cache, 1)
    with pytest.raises(OutOfBlocksError):
        write(core_cache(prefix_cache), 1)
    cache.reset()
    assert prefix_cache.evict(1) == 1


def test_blocks_are_given_up_when_the_pool_needs_them() -> None:
    prefix_cache = PrefixCache()
    for start in range(0, 400, 20):
        cache = cached(prefix_cache, torch.arange(start, start + 20)[None], num_blocks=12)
        prefix_cache.check(cache)
        cache.reset()
    stats = prefix_cache.stats()
    assert (stats["registered"], stats["evictions"], stats["cached_blocks"]) == (100, 88, 12)
    whole = core_cache(prefix_cache)
    write(whole, 12 * BLOCK)  # the whole pool
    assert prefix_cache.stats()["cached_blocks"] == 0
    with pytest.raises(OutOfBlocksError) as raised:
        write(core_cache(prefix_cache), 1)
    assert (raised.value.wanted, raised.value.free) == (1, 0)


def test_max_tokens() -> None:
    prefix_cache = PrefixCache(max_tokens=3 * BLOCK + 1)
    for start in (0, 100):
        cached(prefix_cache, torch.arange(start, start + 20)[None]).reset()
        assert prefix_cache.stats()["cached_tokens"] == 3 * BLOCK
    probe = core_cache(prefix_cache)
    assert prefix_cache.attach(probe, torch.arange(100, 120)[None]) == 12  # the beginning is what is kept
    with pytest.raises(ValueError, match="max_tokens must be positive or None, got 0"):
        PrefixCache(max_tokens=0)


def test_a_pool_that_grows_needs_a_maximum() -> None:
    cache = core_cache(PrefixCache())
    write(cache, 4)
    with pytest.raises(ValueError, match="max_tokens must be given to a PrefixCache on a pool that grows"):
        PrefixCache().register(cache, torch.arange(4)[None])


def test_one_pool_and_one_layout() -> None:
    prefix_cache = PrefixCache()
    cached(prefix_cache, torch.arange(8)[None], num_blocks=4)
    stranger = CoreCache([None], block_size=BLOCK, num_blocks=4)
    write(stranger, 4)
    with pytest.raises(ValueError, match="prefix_cache must serve caches of one pool"):
        prefix_cache.attach(stranger, torch.arange(8)[None])
    with pytest.raises(ValueError, match="prefix_cache must serve caches of one layout"):
        prefix_cache.attach(CoreCache([None, 8], pool=prefix_cache.pool), torch.arange(8)[None])


def test_tenants_do_not_see_each_other() -> None:
    prefix_cache = PrefixCache(tenant="a")
    tokens = torch.arange(8)[None]
    first = cached(prefix_cache, tokens, num_blocks=8)
    other = prefix_cache.with_salt(tenant="b")
    cache = core_cache(other)
    assert other.attach(cache, tokens) == 0
    write(cache, 8)
    assert other.register(cache, tokens) == 2
    assert not set(first.table().flatten().tolist()) & set(cache.table().flatten().tolist())
    assert prefix_cache.attach(core_cache(prefix_cache), tokens) == 7
    # A block that is known under one salt is not taken under another.
    assert other.with_salt(tenant="c").register(cache, tokens) == 0
    prefix_cache.check(first, cache)


def test_clear_and_drop_give_blocks_back() -> None:
    prefix_cache = PrefixCache()
    cached(prefix_cache, torch.arange(8)[None], num_blocks=4).reset()
    pool = prefix_cache.pool
    assert pool is not None
    assert pool.num_free == 2
    prefix_cache.clear()
    assert pool.num_free == 4
    cached(prefix_cache, torch.arange(8)[None]).reset()
    assert pool.num_free == 2
    del prefix_cache
    gc.collect()
    assert pool.num_free == 4
    pool.check()


def test_caches_in_a_circle_give_their_blocks_back_when_those_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code and tracebacks keep dead caches alive until the garbage collector comes. A pool that is short asks
    for it, and the less often the longer it is of no use."""
    prefix_cache, searches = PrefixCache(), []
    search = gc.collect
    monkeypatch.setattr("torch_paged_kv.storage.gc.collect", lambda: searches.append(search()))
    first = cached(prefix_cache, torch.arange(16)[None], num_blocks=4)
    first.__dict__["circle"] = [first]
    gc.disable()
    try:
        del first
        second = cached(prefix_cache, torch.arange(100, 116)[None])
    finally:
        gc.enable()
    assert len(searches) == 1
    prefix_cache.check(second)
    third = core_cache(prefix_cache)
    for _ in range(100):
        with pytest.raises(OutOfBlocksError):
            write(third, 16)
    assert len(searches) == 1 + 6  # at the first, third, seventh ... time
    second.reset()
    write(third, 16)
    assert len(searches) == 1 + 6


def test_check_finds_a_leak() -> None:
    prefix_cache = PrefixCache()
    cache = cached(prefix_cache, torch.arange(8)[None], num_blocks=4)
    prefix_cache.check(cache)
    cache.pool.ref_counts[0] += 1
    with pytest.raises(RuntimeError, match="block 0 is held by 2 table entries, but its reference count is 3"):
        prefix_cache.check(cache)
    cache.pool.ref_counts[0] -= 1
    prefix_cache._store.held.discard(1)
    with pytest.raises(RuntimeError, match="cached blocks must be listed once each, got 2 for 1 blocks"):
        prefix_cache.check(cache)


def test_numbers_and_reasons() -> None:
    prefix_cache = PrefixCache()
    cache = core_cache(prefix_cache, num_blocks=16)
    assert prefix_cache.attach(cache, ids(1, 2, 3)) == 0
    assert prefix_cache.misses() == {"a prompt must be longer than a block of 4 tokens": 1}
    write(cache, 3)
    prefix_cache.register(cache, ids(1, 2, 3))
    first = cached(prefix_cache, torch.arange(10)[None])
    second = cached(prefix_cache, torch.arange(9)[None])
    assert prefix_cache.stats() == {
        "cached_blocks": 2,
        "evictable_blocks": 0,
        "cached_tokens": 8,
        "queries": 3,
        "query_tokens": 22,
        "hits": 1,
        "hit_tokens": 8,
        "evictions": 0,
        "registered": 2,
        "smallest_prefix": 4,
    }
    pair = torch.stack([torch.arange(9), torch.arange(50, 59)])
    assert prefix_cache.attach(core_cache(prefix_cache), pair) == 0
    assert prefix_cache.misses() == {
        "a prompt must be longer than a block of 4 tokens": 1,
        "its first block is not known": 2,
        "another row of the batch has less that is known": 1,
    }
    prefix_cache.check(cache, first, second)


def test_rows_of_different_lengths_begin_together() -> None:
    """With padding a row begins in the middle of a known block: it shares the block until it writes."""
    prefix_cache = PrefixCache()
    long = cached(prefix_cache, torch.arange(16)[None], num_blocks=16)
    short = cached(prefix_cache, torch.arange(50, 62)[None])
    batch, mask = torch.zeros(2, 17, dtype=torch.int64), torch.ones(2, 17, dtype=torch.int64)
    batch[0], batch[1, 3:], mask[1, :3] = torch.arange(17), torch.arange(50, 64), 0
    cache = core_cache(prefix_cache)
    assert prefix_cache.attach(cache, batch, mask) == 15  # three of padding and the twelve known tokens
    assert cache.seq_lens() == [15, 12]
    assert cache.stored().sum(1).tolist() == [15, 12]
    write(cache, 1, num_seqs=2)
    key = cache.gather(0)[0]
    assert torch.equal(key[0, :, :15], long.gather(0)[0][0, :, :15])
    assert torch.equal(key[1, :, 3:15], short.gather(0)[0][0])
    prefix_cache.check(long, short, cache)


# ---------------------------------------------------------------------------------------------------------------------
# generate


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_equals_cold(family: str) -> None:
    """Cold, three times warm, and after evictions: tokens are equal, logits as near as chunked prefill's."""
    model = models.tiny(family)
    prefix_cache = PrefixCache(max_tokens=200)
    prompt = models.prompts([41])
    expected = models.generate(model, prompt, models.dynamic().new(model))
    computed = []
    for attempt in range(5):
        if attempt == 4:
            prefix_cache.evict(prefix_cache.stats()["cached_blocks"] // 2)
        cache = caches(prefix_cache).new(model)
        with CountTokens(model) as count:
            models.assert_same(models.generate(model, prompt, cache), expected)
        computed.append(count.positions - (models.NEW_TOKENS - 1))
        cache.check()
        del cache
    assert computed[:4] == [41, 1, 1, 1]
    assert 1 < computed[4] < 41
    assert prefix_cache.stats()["evictions"] > 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_eight_bit(family: str, dtype: torch.dtype, device: torch.device) -> None:
    """Scales lie in the pool beside the rows, so they are found with them."""
    model, prefix_cache = models.tiny(family).to(device), PrefixCache(max_tokens=400)
    prompt = {name: tensor.to(device) for name, tensor in models.prompts([33, 20]).items()}
    expected = models.generate(model, prompt, PagedKVCache(model.config, block_size=BLOCK, dtype=dtype))
    for _ in range(2):
        cache = caches(prefix_cache, dtype=dtype).new(model)
        models.assert_same(models.generate(model, prompt, cache), expected)
        cache.check()
    assert prefix_cache.stats()["hit_tokens"] > 50


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_on_every_device(family: str, device: torch.device) -> None:
    """A pool of given size: found, computed within a batch, and given up."""
    model, prefix_cache = models.tiny(family).to(device), PrefixCache()
    for seed in (1, 1, 2, 3, 1, 1):
        prompt = {name: tensor.repeat(2, 1).to(device) for name, tensor in models.prompts([40], seed=seed).items()}
        cache = caches(prefix_cache, num_tokens=80).new(model)
        expected = models.generate(model, prompt, models.dynamic().new(model))
        models.assert_same(models.generate(model, prompt, cache), expected)
        cache.check()
        del cache
    stats = prefix_cache.stats()
    assert stats["hits"] == 12  # the second row of a batch finds what was computed for the first
    assert stats["evictions"] > 0
    prefix_cache.check()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_another_ending(family: str) -> None:
    model = models.tiny(family)
    prefix_cache = PrefixCache(max_tokens=400)
    begin = models.prompts([30])
    models.generate(model, begin, caches(prefix_cache).new(model))
    for seed in (50, 51):
        prompt = models.extend(begin["input_ids"], begin["attention_mask"], models.prompts([7], seed)["input_ids"])
        with CountTokens(model) as count:
            result = models.generate(model, prompt, caches(prefix_cache).new(model))
        assert count.positions - (models.NEW_TOKENS - 1) == 37 - 28
        models.assert_same(result, models.generate(model, prompt, models.dynamic().new(model)))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_rows_of_a_batch_share_what_is_computed_once(family: str) -> None:
    model = models.tiny(family)
    begin = models.prompts([24])["input_ids"].repeat(4, 1)
    prompt = models.extend(begin, torch.ones_like(begin), models.prompts([6] * 4, seed=7)["input_ids"])
    expected = models.generate(model, prompt, models.dynamic().new(model))
    prefix_cache = PrefixCache(max_tokens=400)
    for computed in (24 + 4 * 6, 4 * 2):  # then whole blocks of each row are known too
        cache = caches(prefix_cache).new(model)
        with CountTokens(model) as count:
            models.assert_same(models.generate(model, prompt, cache), expected)
        assert count.positions - 4 * (models.NEW_TOKENS - 1) == computed
        assert len(set(cache.table()[:, :, 0].flatten().tolist()) - {-1}) <= len(cache.group_windows)
        cache.check()


def test_a_left_padded_batch(llama: Any) -> None:
    """Rows of different lengths share different beginnings, and one shares nothing but is short."""
    parts = {seed: models.prompts([20], seed)["input_ids"][0] for seed in (1, 2, 3)}
    texts = [
        torch.cat([parts[1], parts[3][:9]]),
        torch.cat([parts[1], parts[3][9:13]]),
        torch.cat([parts[2], parts[3][:7]]),
        torch.cat([parts[2], parts[3][5:10]]),
        parts[3][:5],
    ]
    width = max(len(text) for text in texts)
    batch = {"input_ids": torch.zeros(5, width, dtype=torch.int64), "attention_mask": torch.zeros(5, width).long()}
    for row, text in enumerate(texts):
        batch["input_ids"][row, width - len(text) :] = text
        batch["attention_mask"][row, width - len(text) :] = 1
    expected = models.generate(llama, batch, models.dynamic().new(llama))
    prefix_cache = PrefixCache(max_tokens=400)
    for attempt in range(2):
        cache = caches(prefix_cache).new(llama)
        with CountTokens(llama) as count:
            models.assert_same(models.generate(llama, batch, cache), expected)
        cache.check()
        assert count.positions < 5 * width + 5 * (models.NEW_TOKENS - 1) - 50 * attempt
    assert prefix_cache.stats()["hits"] == 9  # the short row has no whole block the first time round


@pytest.mark.parametrize(
    "scenario", ["beams", "beams_return_2", "num_return_sequences", "sampling", "chunked_prefill", "left_padded"]
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ways_to_generate(family: str, scenario: str) -> None:
    model = models.tiny(family)
    run, reference = models.SCENARIOS[scenario]
    expected = reference(model, models.dynamic())
    prefix_cache = PrefixCache(max_tokens=400)
    for _ in range(2):
        made = caches(prefix_cache)
        models.assert_same(run(model, made), expected)
        prefix_cache.check(*made.made)
    chunks_begin_anew = scenario == "chunked_prefill" and Version("5.24") > models.RELEASE
    assert (prefix_cache.stats()["hits"] == 0) == chunks_begin_anew


@pytest.mark.parametrize("family", ["falcon", "bloom", "deepseek_v3", "gpt_oss", "gemma2"])
def test_padding_that_gathered_models_store_is_not_remembered_as_tokens(family: str) -> None:
    """What a padded batch leaves behind changes neither the same batch nor its prompts one by one, later."""
    model = models.tiny(family)
    prefix_cache = PrefixCache(max_tokens=400)
    lengths, new = [models.PROMPT, 9, 6], {"max_new_tokens": 5}
    batch = models.prompts(lengths)
    expected = models.generate(model, batch, models.dynamic().new(model), **new)
    for _ in range(2):
        cache = caches(prefix_cache).new(model)
        models.assert_same(models.generate(model, batch, cache, **new), expected)
        prefix_cache.check(cache)
    for row, length in enumerate(lengths):
        alone = {name: tensor[row : row + 1, models.PROMPT - length :] for name, tensor in batch.items()}
        whole = models.generate(model, alone, models.dynamic().new(model), **new)
        for _ in range(2):
            models.assert_same(models.generate(model, alone, caches(prefix_cache).new(model), **new), whole)
    assert prefix_cache.stats()["hits"] >= 3


def test_parallel_samples_hold_the_prompt_once(llama: Any) -> None:
    prefix_cache = PrefixCache(max_tokens=400)
    cache = caches(prefix_cache).new(llama)
    prompt = models.prompts([33])
    with CountTokens(llama) as count:
        models.generate(llama, prompt, cache, do_sample=True, num_return_sequences=6, max_new_tokens=2)
    assert count.positions == 32 + 6 * 1 + 6 * 1
    assert cache.stats()["held_blocks"] == 8 + 6
    cache.check()


def test_a_chat_on_new_caches(llama: Any) -> None:
    """Each turn brings a cache of its own; what the turns before computed, answers included, is found."""
    prefix_cache = PrefixCache(max_tokens=400)
    batch, computed = models.prompts([13]), []
    for turn in range(3):
        cache = caches(prefix_cache).new(llama)
        with CountTokens(llama) as count:
            result = models.generate(llama, batch, cache, max_new_tokens=6, eos_token_id=None)
        expected = models.generate(llama, batch, models.dynamic().new(llama), max_new_tokens=6, eos_token_id=None)
        models.assert_same(result, expected)
        computed.append(count.positions - 5)
        batch = models.extend(
            result.tokens[0], batch["attention_mask"], models.prompts([4], seed=30 + turn)["input_ids"]
        )
    assert computed == [13, 23 - 16, 33 - 28]


def test_a_chat_that_keeps_its_cache_is_remembered(llama: Any) -> None:
    prefix_cache = PrefixCache(max_tokens=400)
    made = caches(prefix_cache)
    models.assert_same(models.chat(llama, made), models.chat(llama, models.dynamic()))
    prefix_cache.check(*made.made)
    tokens = made.made[0].stats()["tokens"]
    assert prefix_cache.stats()["cached_tokens"] >= tokens - 2 * (2 * BLOCK - 1)


def test_what_a_finished_row_is_padded_with_is_not_remembered(llama: Any) -> None:
    batch = models.prompts([20, 20], seed=5)
    free = models.generate(llama, batch, models.dynamic().new(llama), eos_token_id=None).tokens[0]
    end = int(free[0, 22])  # the third token of the first row's answer
    assert end not in free[1, 20:]
    prefix_cache = PrefixCache(max_tokens=400)
    result = models.generate(llama, batch, caches(prefix_cache).new(llama), eos_token_id=end, max_new_tokens=40)
    length = result.tokens[0].shape[1] - 1
    assert length > 50
    known = [
        len(prefix_cache._find(row))
        for row in prefix_cache.batch(PagedKVCache(llama.config, block_size=4), result.tokens[0]).rows
    ]
    assert known == [23 // BLOCK, length // BLOCK]


def test_a_pool_of_given_size(llama: Any) -> None:
    """Prompts that fit only one at a time: the older ones are given up."""
    prefix_cache = PrefixCache()
    for seed in range(6):
        prompt = models.prompts([40], seed=seed)
        cache = caches(prefix_cache, num_tokens=64).new(llama)
        models.assert_same(
            models.generate(llama, prompt, cache), models.generate(llama, prompt, models.dynamic().new(llama))
        )
        cache.check()
        del cache
    assert prefix_cache.pool is not None
    assert prefix_cache.pool.num_blocks == 16
    assert prefix_cache.stats()["evictions"] > 0


def test_patched_models_share_what_they_computed(llama: Any) -> None:
    prefix_cache, prompt = PrefixCache(max_tokens=400), models.prompts([24])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    expected = llama.generate(**prompt, **settings)
    with torch_paged_kv.paged(llama, prefix_cache=prefix_cache, block_size=BLOCK):
        for computed in (24 + 3, 1 + 3):
            with CountTokens(llama) as count:
                assert torch.equal(llama.generate(**prompt, **settings), expected)
            assert count.positions == computed


@pytest.mark.skipif(models.RELEASE.major < 5, reason="generate compiles no cache of ours in this release")
def test_compiled_decode_steps(llama: Any) -> None:
    """One graph serves prompts that were computed and prompts that were found; evictions happen between its steps."""
    graphs, config = models.counting_compiler()
    prefix_cache = PrefixCache()
    cache = caches(prefix_cache, num_blocks=16).new(llama)
    for seed in (1, 2, 1, 3, 1):
        prompt = models.prompts([30], seed=seed)
        expected = models.generate(llama, prompt, models.dynamic().new(llama))
        models.assert_same(models.generate(llama, prompt, cache, compile_config=config), expected)
        cache.check()
        cache.reset()
    assert len(graphs) == 1
    stats = prefix_cache.stats()
    assert stats["hits"] > 0
    assert stats["evictions"] > 0


class CountAll(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_step_does_nothing_for_it(llama: Any) -> None:
    """Decode steps run the same ops with it and without, but for the check of shared blocks."""

    def ops_of_steps(cache: Any) -> Counter[str]:
        totals = []
        for new in (10, 10, 14):  # the first makes what lasts; no edge of a block between the others
            with CountAll() as count:
                models.generate(llama, models.prompts([40]), cache, max_new_tokens=new)
            totals.append(count.ops)
            cache.reset()
        totals[2].subtract(totals[1])
        return +totals[2]

    prefix_cache = PrefixCache()
    plain, known = (
        ops_of_steps(models.paged(block_size=16, num_blocks=20, **arguments).new(llama))
        for arguments in ({}, {"prefix_cache": prefix_cache})
    )
    extra = known - plain
    assert extra == {"paged_kv.copy_blocks.default": 4}
    assert not plain - known


def test_dropped_caches_leave_only_what_is_known(llama: Any) -> None:
    prefix_cache = PrefixCache(max_tokens=400)
    cache = caches(prefix_cache).new(llama)
    models.generate(llama, models.prompts([20]), cache)
    pool, known = cache.pool, prefix_cache.stats()["cached_blocks"]
    del cache
    assert pool.num_blocks - pool.num_free == known == prefix_cache.stats()["evictable_blocks"] > 0
    prefix_cache.check()


# ---------------------------------------------------------------------------------------------------------------------
# Left alone or refused


def run_with(model: Any, prefix_cache: PrefixCache, **arguments: Any) -> Any:
    return model.generate(
        past_key_values=caches(prefix_cache).new(model), do_sample=False, max_new_tokens=3, pad_token_id=0, **arguments
    )


def test_other_inputs_are_not_mixed_up(llama: Any) -> None:
    """Positions of the user's own give other keys for the same tokens."""
    prefix_cache, prompt = PrefixCache(max_tokens=400), models.prompts([12])
    run_with(llama, prefix_cache, **prompt)
    shifted = torch.arange(3, 15)[None]
    expected = llama.generate(**prompt, position_ids=shifted, do_sample=False, max_new_tokens=3, pad_token_id=0)
    with pytest.warns(UserWarning, match="prefix_cache is not used: position_ids must count"):
        assert torch.equal(run_with(llama, prefix_cache, **prompt, position_ids=shifted), expected)
    embeds = llama.get_input_embeddings()(prompt["input_ids"])
    with pytest.warns(
        UserWarning, match="prefix_cache is not used: the model is given more than tokens: inputs_embeds"
    ):
        run_with(llama, prefix_cache, inputs_embeds=embeds, attention_mask=prompt["attention_mask"])
    assert prefix_cache.stats()["queries"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run_with(llama, prefix_cache, **prompt, position_ids=torch.arange(12)[None])
    assert prefix_cache.stats()["hits"] == 1


def test_types_of_tokens_count_only_where_there_are_others_than_text() -> None:
    says_more = prefix_hooks._says_more
    assert not says_more("token_type_ids", torch.zeros(1, 3))
    assert says_more("mm_token_type_ids", torch.tensor([[0, 1, 0]]))
    assert says_more("pixel_values", torch.zeros(1, 3, 2, 2))
    assert not says_more("pixel_values", None)


def test_scales_are_part_of_a_digest() -> None:
    tokens, digests = torch.arange(8)[None], set()
    for scales in ("per_slot", *(StaticScales(torch.int8, [torch.tensor(s)], [torch.tensor(s)]) for s in (0.1, 0.2))):
        cache = CoreCache([None], block_size=BLOCK, dtype=torch.int8, scales=scales)
        digests.add(PrefixCache().batch(cache, tokens).digests[0][-1])
    assert len(digests) == 3


def test_an_adapter_must_be_named(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix_cache, prompt = PrefixCache(max_tokens=400), models.prompts([12])
    monkeypatch.setattr(llama, "_hf_peft_config_loaded", True)
    with pytest.warns(UserWarning, match="the model has an adapter: name it"):
        run_with(llama, prefix_cache, **prompt)
    assert prefix_cache.pool is None or prefix_cache.stats()["cached_blocks"] == 0
    run_with(llama, prefix_cache.with_salt(adapter="a"), **prompt)
    assert prefix_cache.stats()["cached_blocks"] == 3


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bart", {}, "prefix_cache must be for a decoder-only model, got bart"),
        ("qwen3_next", {}, "prefix_cache must be for a model of attention layers alone, got qwen3_next"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "got dynamic RoPE"),
    ],
)
def test_models_whose_keys_depend_on_more_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    if family == "qwen3_next" and models.RELEASE.major < 5:
        pytest.skip("this release's qwen3_next takes no cache but its own")
    config = models.tiny(family).config
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        PagedKVCache(config, prefix_cache=PrefixCache(max_tokens=64))


def test_a_config_is_needed() -> None:
    with pytest.raises(ValueError, match="prefix_cache must come with the model's config"):
        PagedKVCache(prefix_cache=PrefixCache(max_tokens=64))


def test_running_out_leaves_the_accounts_closed(llama: Any) -> None:
    prefix_cache = PrefixCache()
    cache = caches(prefix_cache, num_blocks=8).new(llama)
    with pytest.raises(OutOfBlocksError):
        models.generate(llama, {k: v.repeat(2, 1) for k, v in models.prompts([30]).items()}, cache)
    cache.reset()
    prefix_cache.check(cache)
    result = models.generate(llama, models.prompts([20]), cache, max_new_tokens=4)
    models.assert_same(
        result, models.generate(llama, models.prompts([20]), models.dynamic().new(llama), max_new_tokens=4)
    )
