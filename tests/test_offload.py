"""HostTier: sequences swapped out to host memory and back, ordered with whatever else uses their blocks."""

from __future__ import annotations

import gc
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from torch_paged_kv import OutOfBlocksError, PagedKVCache, PrefixCache, ops
from torch_paged_kv.cache import PagedKVCache as CoreCache
from torch_paged_kv.offload import HostTier

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]

BLOCK = 4
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def write(cache: CoreCache, length: int, num_seqs: int = 1, device: torch.device | str | None = None) -> None:
    place = cache.pool.device if device is None else device
    for layer in range(2):
        states = torch.randn(num_seqs, 2, length, 8, device=place)
        cache.write(layer, states, states)


def new_cache(device: torch.device | str, length: int, num_seqs: int = 1, **arguments: Any) -> CoreCache:
    cache = CoreCache(arguments.pop("windows", [None, 8]), block_size=BLOCK, **arguments)
    write(cache, length, num_seqs, device)
    return cache


def held(cache: CoreCache) -> list[Tensor]:
    return [tensor.clone() for layer in range(2) for tensor in cache.gather(layer)]


def assert_equal(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def check(tier: HostTier, *caches: CoreCache) -> None:
    tier.pool.check(tier.holdings(), *(table for cache in caches for table in cache.tables()))


def test_a_copy_that_fails_changes_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache(device, 10, num_seqs=2, num_blocks=24)
    before = held(cache)
    tier = HostTier(cache.pool, 20)
    swapped = tier.swap_out(cache)
    tier.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(ops, "swap_blocks", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tier.swap_in(cache, swapped)
    assert (cache.seen, cache.pool.num_free, tier.num_free) == (0, 24, 8)
    check(tier, cache)
    tier.swap_in(cache, swapped)
    assert_equal(held(cache), before)


def test_out_and_back(device: torch.device) -> None:
    cache = new_cache(device, 10, num_seqs=2, num_blocks=24)
    before, lens = held(cache), cache.seq_lens()
    tier = HostTier(cache.pool, 20)
    swapped = tier.swap_out(cache)
    assert (swapped.seq_lens(), swapped.num_blocks, tier.num_free) == (lens, 12, 8)
    assert cache.seen == 0
    tier.synchronize()
    assert cache.pool.num_free == 24
    filler = CoreCache(cache.windows, pool=cache.pool)
    write(filler, 9)
    tier.swap_in(cache, swapped)
    assert_equal(held(cache), before)
    assert cache.seq_lens() == lens
    tier.synchronize()
    check(tier, cache, filler)
    assert tier.num_free == 20
    write(cache, 3, num_seqs=2)  # goes on
    check(tier, cache, filler)


def test_forks_keep_their_blocks(device: torch.device) -> None:
    cache = new_cache(device, 10, num_blocks=24)
    fork = cache.fork()
    write(fork, 1)
    kept, before = held(fork), held(cache)
    tier = HostTier(cache.pool, 8)
    swapped = tier.swap_out(cache)
    tier.synchronize()
    assert cache.pool.num_free == 24 - 6
    assert_equal(held(fork), kept)
    tier.swap_in(cache, swapped)
    assert_equal(held(cache), before)
    tier.synchronize()
    check(tier, cache, fork)


def test_rows_that_share_come_back_sharing(device: torch.device) -> None:
    cache = new_cache(device, 8, num_blocks=24, windows=[None, None])
    cache.reorder(torch.tensor([0, 0, 0], device=device))
    write(cache, 2, num_seqs=3)
    before = held(cache)
    tier = HostTier(cache.pool, 5)
    swapped = tier.swap_out(cache)
    tier.swap_in(cache, swapped)
    assert_equal(held(cache), before)
    tier.synchronize()
    assert cache.pool.num_free == 24 - 5
    check(tier, cache)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scales_come_back(dtype: torch.dtype, device: torch.device) -> None:
    cache = new_cache(device, 10, dtype=dtype)
    before = held(cache)
    tier = HostTier(cache.pool, 8)
    swapped = tier.swap_out(cache)
    write(cache, 12)
    cache.reset()
    tier.swap_in(cache, swapped)
    assert_equal(held(cache), before)


def test_padding_comes_back(device: torch.device) -> None:
    cache = CoreCache([None, 8], block_size=BLOCK)
    mask = torch.ones(2, 7, dtype=torch.bool, device=device)
    mask[1, :4] = False
    cache.pad(mask, 7)
    write(cache, 7, num_seqs=2, device=device)
    before, stored = held(cache), cache.stored()
    tier = HostTier(cache.pool, 8)
    swapped = tier.swap_out(cache)
    tier.swap_in(cache, swapped)
    assert torch.equal(cache.stored(), stored)
    assert cache.seq_lens() == [7, 3]
    assert_equal(held(cache), before)


def test_too_little_room_changes_nothing(device: torch.device) -> None:
    cache = new_cache(device, 10, num_blocks=8)
    before = held(cache)
    tier = HostTier(cache.pool, 5)
    with pytest.raises(OutOfBlocksError) as raised:
        tier.swap_out(cache)
    assert (raised.value.wanted, raised.value.free) == (6, 5)
    assert_equal(held(cache), before)
    tier = HostTier(cache.pool, 6)
    swapped = tier.swap_out(cache)
    filler = CoreCache(cache.windows, pool=cache.pool)
    write(filler, 10)
    with pytest.raises(OutOfBlocksError) as raised:
        tier.swap_in(cache, swapped)
    assert (raised.value.wanted, raised.value.free) == (6, 2)
    filler.reset()
    tier.swap_in(cache, swapped)
    assert_equal(held(cache), before)
    tier.synchronize()
    check(tier, cache)


def test_dropped_sequences_give_their_room_back(device: torch.device) -> None:
    cache = new_cache(device, 10, num_blocks=8)
    tier = HostTier(cache.pool, 6)
    swapped = tier.swap_out(cache)
    assert tier.num_free == 0
    del swapped
    assert tier.num_free == 6
    write(cache, 4)
    other = tier.swap_out(cache)
    other.drop()
    with pytest.raises(ValueError, match="swapped must not be used up"):
        tier.swap_in(cache, other)
    assert sorted(tier._free) == list(range(6))


def test_host_memory_begins_at_pages(device: torch.device) -> None:
    cache = new_cache(device, 3)
    tier = HostTier(cache.pool, 7)
    assert all(lane.data_ptr() % 4096 == 0 for lane in tier._lanes)
    assert [lane.shape for lane in tier._lanes] == [(7, lane.shape[1]) for lane in cache.pool.lanes()]


def test_a_dropped_tier_keeps_no_blocks(device: torch.device) -> None:
    cache = new_cache(device, 10, num_blocks=8)
    tier = HostTier(cache.pool, 6)
    swapped = tier.swap_out(cache)
    del swapped, tier
    gc.collect()
    assert cache.pool.num_free == 8
    cache.pool.check()


def test_what_is_refused(device: torch.device) -> None:
    cache = new_cache(device, 3)
    tier = HostTier(cache.pool, 6)
    with pytest.raises(ValueError, match="num_blocks must be >= 1, got 0"):
        HostTier(cache.pool, 0)
    with pytest.raises(ValueError, match="the cache must be of the pool of the tier"):
        tier.swap_out(new_cache(device, 3))
    with pytest.raises(ValueError, match="swapped must be of this tier"):
        tier.swap_in(cache, HostTier(cache.pool, 6).swap_out(cache))
    write(cache, 3)
    swapped = tier.swap_out(cache)
    write(cache, 3)
    with pytest.raises(ValueError, match="the cache must be empty, got 3 positions"):
        tier.swap_in(cache, swapped)
    states = torch.randn(1, 2, 1, 8, device=device)
    cache.write(0, states, states)
    with pytest.raises(ValueError, match="the cache must be between two steps"):
        tier.swap_out(cache)


def test_numbers(device: torch.device) -> None:
    cache = new_cache(device, 10, num_blocks=8)
    tier = HostTier(cache.pool, 7)
    tier.swap_in(cache, tier.swap_out(cache))
    tier.synchronize()
    stats = tier.stats()
    seconds = stats.pop("swap_seconds")
    assert stats == {
        "host_blocks": 7,
        "host_free_blocks": 7,
        "host_bytes": 7 * cache.pool.block_bytes,
        "leaving_blocks": 0,
        "swapped_out_bytes": 6 * cache.pool.block_bytes,
        "swapped_in_bytes": 6 * cache.pool.block_bytes,
    }
    assert (seconds > 0) == (device.type == "cuda")


class Unfinished:
    """An event of a copy that runs."""

    done = False

    def query(self) -> bool:
        return self.done


def test_blocks_of_a_running_copy_stay_held() -> None:
    cache = new_cache("cpu", 10, num_blocks=8)
    tier = HostTier(cache.pool, 7)
    tier.swap_out(cache)
    write(cache, 4)
    blocks, event = cache.table().flatten(), Unfinished()
    tier.pool.retain(blocks)
    tier._leaving.append(type("Leaving", (), {"blocks": blocks, "done": event})())
    cache.reset()
    tier.settle()
    assert tier.pool.num_free == 6
    assert tier.stats()["leaving_blocks"] == 2
    check(tier)
    event.done = True
    tier.settle()
    assert tier.pool.num_free == 8


def test_preemption(device: torch.device) -> None:
    """Two requests on a pool that holds one and a half: the recipe of the docs, with tokens as without preemption."""
    model = models.tiny("llama").to(device)
    prompts = [{name: t.to(device) for name, t in models.prompts([30], seed=seed).items()} for seed in (1, 2)]
    expected = [models.generate(model, prompt, models.dynamic().new(model), max_new_tokens=9) for prompt in prompts]
    prefix_cache = PrefixCache()
    first = PagedKVCache(model.config, block_size=BLOCK, num_blocks=15)
    half = models.generate(model, prompts[0], first, max_new_tokens=4)
    tier = HostTier(first.pool, 10)
    second = PagedKVCache(model.config, pool=first.pool, prefix_cache=prefix_cache)
    with pytest.raises(OutOfBlocksError):
        models.generate(model, prompts[1], second, max_new_tokens=9)
    second.reset()
    swapped = tier.swap_out(first)
    models.assert_same(models.generate(model, prompts[1], second, max_new_tokens=9), expected[1])
    second.reset()
    tier.swap_in(first, swapped)
    ids = half.tokens[0]
    rest = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=first,
        max_new_tokens=5,
        do_sample=False,
        pad_token_id=0,
    )
    assert torch.equal(rest, expected[0].tokens[0])
    tier.synchronize()
    first.pool.check(*first.tables(), prefix_cache.holdings(), tier.holdings())


# ---------------------------------------------------------------------------------------------------------------------
# CUDA: copies that are slow


def slow(tier: HostTier) -> None:
    """Keep the copy stream busy for about half a second."""
    with torch.cuda.stream(tier._stream):
        torch.cuda._sleep(1_000_000_000)


@NEEDS_CUDA
def test_blocks_are_not_reused_before_they_are_copied() -> None:
    cache = new_cache("cuda", 64, num_blocks=32, windows=[None, None])
    before = held(cache)
    tier = HostTier(cache.pool, 16)
    slow(tier)
    swapped = tier.swap_out(cache)
    assert tier.stats()["leaving_blocks"] == 16
    other = CoreCache(cache.windows, pool=cache.pool)
    write(other, 64)
    assert tier.stats()["leaving_blocks"] == 16  # there was room elsewhere
    write(other, 64)  # only here: the stream waits, the host does not
    kept = held(other)
    other.reset()
    tier.swap_in(cache, swapped)
    assert_equal(held(cache), before)
    assert kept[0].isfinite().all()
    tier.synchronize()
    check(tier, cache, other)


@NEEDS_CUDA
def test_nothing_is_read_before_it_is_back() -> None:
    cache = new_cache("cuda", 64, num_blocks=32)
    before = held(cache)
    tier = HostTier(cache.pool, 32)
    swapped = tier.swap_out(cache)
    tier.synchronize()
    for lane in cache.pool.lanes():
        lane.fill_(float("nan"))
    slow(tier)
    tier.swap_in(cache, swapped)
    assert_equal(held(cache), before)


@NEEDS_CUDA
def test_room_in_host_memory_is_not_reused_before_it_is_read() -> None:
    cache = new_cache("cuda", 64, num_blocks=64, windows=[None, None])
    before = held(cache)
    tier = HostTier(cache.pool, 16)
    swapped = tier.swap_out(cache)
    other = CoreCache(cache.windows, pool=cache.pool)
    write(other, 64)
    kept = held(other)
    slow(tier)
    tier.swap_in(cache, swapped)
    again = tier.swap_out(other)  # into the room that is still being read
    assert_equal(held(cache), before)
    tier.swap_in(other, again)
    assert_equal(held(other), kept)


@NEEDS_CUDA
def test_a_swap_does_not_wait() -> None:
    cache = new_cache("cuda", 64, num_blocks=32)
    tier = HostTier(cache.pool, 32)
    slow(tier)
    swapped = tier.swap_out(cache)
    assert not tier._leaving[0].done.query()  # the host came here while the copy stream sleeps
    assert swapped.num_blocks == 32


@NEEDS_CUDA
def test_host_memory_is_pinned_and_exact() -> None:
    cache = new_cache("cuda", 64, num_blocks=32)
    tier = HostTier(cache.pool, 37)
    assert tier.bytes == 37 * cache.pool.block_bytes
    assert all(lane.is_pinned() for lane in tier._lanes)
    lanes = list(tier._lanes)
    assert lanes[0].untyped_storage().nbytes() <= tier.bytes + 4096 * (len(lanes) + 1)
    del tier
    gc.collect()
    assert not any(lane.is_pinned() for lane in lanes)
