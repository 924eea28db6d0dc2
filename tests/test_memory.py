"""How much memory a cache takes at its peak, counted in bytes of living tensors, and when its pool is made or grows."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import DynamicCache

import torch_paged_kv
from torch_paged_kv import PagedKVCache, sizing
from torch_paged_kv.storage import KVPool

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]

BLOCK = 4


class LivingBytes(TorchDispatchMode):
    """Bytes of the storages that ops make while the mode is on and that still live: now, and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def forget(_: Any) -> None:
            del self.known[key]
            self.now -= size

        self.known[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_of(work: Callable[[], Any]) -> int:
    with LivingBytes() as living:
        work()
    return living.peak


def test_living_bytes_are_counted() -> None:
    with LivingBytes() as living:
        first = torch.zeros(100)  # 400 bytes
        first = first.view(10, 10).add(1)  # 400 more, and the first ones go
        assert living.now == 400
        second = torch.cat([first, first])
        assert living.now == 1200
        del first, second
    assert (living.now, living.peak) == (0, 1200)


def generate_settings(count: int) -> dict[str, Any]:
    return {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "eos_token_id": None}


def kv_bytes(config: Any, tokens: int) -> int:
    """Of `tokens` tokens in every layer, in float32."""
    return tokens * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4


@pytest.mark.parametrize("how", ["given", "patched"])
@pytest.mark.parametrize("rows", [1, 6])
def test_generate_takes_what_its_tokens_need(how: str, rows: int) -> None:
    """Peak memory: 1.05 times the keys and values, beside what the model itself takes. The pool is made once."""
    model, batch, count = models.tiny("llama"), models.prompts([300] * rows), 20
    caches: list[Any] = []

    def run() -> None:
        if how == "given":
            caches.append(PagedKVCache(model.config))
            model.generate(**batch, **generate_settings(count), past_key_values=caches[0])
            return
        with torch_paged_kv.paged(model):
            output = model.generate(**batch, **generate_settings(count), return_dict_in_generate=True)
        caches.append(output.past_key_values)

    own = peak_of(lambda: model(**batch, use_cache=False, logits_to_keep=1))
    peak, wanted = peak_of(run), kv_bytes(model.config, rows * (300 + count - 1))
    assert caches[0].stats()["num_blocks"] == rows * math.ceil((300 + count - 1) / 16)
    assert peak <= own + 1.05 * wanted
    assert peak > wanted  # the counting sees the pool


def pool_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of blocks after each growth of any pool from now on."""
    sizes: list[int] = []
    grow = KVPool.grow

    def noted(self: KVPool, num_blocks: int) -> None:
        grow(self, num_blocks)
        sizes.append(num_blocks)

    monkeypatch.setattr(KVPool, "grow", noted)
    return sizes


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt_oss"])
@pytest.mark.parametrize("lengths", [[30], [40, 9, 1]], ids=["alone", "padded"])
def test_generate_grows_the_pool_once(family: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, windows and groups of layers are counted exactly enough."""
    if not models.goes_direct(family):
        pytest.skip("gathered layers keep what their windows leave behind")
    model, sizes = models.tiny(family), pool_sizes(monkeypatch)
    cache = PagedKVCache(model.config, block_size=BLOCK)
    model.generate(**models.prompts(lengths), **generate_settings(50), past_key_values=cache)
    assert len(sizes) == 1
    cache.check()


def test_a_second_turn_grows_the_pool_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes, batch = models.tiny("llama"), pool_sizes(monkeypatch), models.prompts([30, 22])
    cache = PagedKVCache(model.config, block_size=BLOCK)
    first = model.generate(**batch, **generate_settings(10), past_key_values=cache)
    longer = models.extend(first, batch["attention_mask"], models.prompts([9, 9], seed=5)["input_ids"])
    model.generate(**longer, **generate_settings(30), past_key_values=cache)
    ends = [length + 10 + 9 + 30 - 1 for length in (30, 22)]
    assert sizes[1:] == [sum(math.ceil(end / BLOCK) for end in ends)]


def test_beams_reserve_nothing_ahead() -> None:
    """Their prompts are apart until the first reorder only; what that frees is more than what is to come."""
    model, cache = models.tiny("llama"), PagedKVCache(models.tiny("llama").config, block_size=BLOCK)
    model.generate(**models.prompts([40]), **generate_settings(30), num_beams=8, past_key_values=cache)
    assert cache.stats()["num_blocks"] == 8 * (40 // BLOCK + 1)


def test_what_is_asked_for_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generate that may become longer than memory allows begins like one of unknown length."""
    model, batch = models.tiny("llama"), models.prompts([40])
    block_bytes = kv_bytes(model.config, BLOCK)
    monkeypatch.setattr(sizing, "free_memory", lambda device: 40 * block_bytes)
    cache = PagedKVCache(model.config, block_size=BLOCK)
    model.generate(**batch, **generate_settings(120), past_key_values=cache)
    assert cache.stats()["held_blocks"] == math.ceil((40 + 119) / BLOCK)
    cache = PagedKVCache(model.config, block_size=BLOCK)
    cache.expect(100_000)
    model(**batch, past_key_values=cache)
    assert cache.stats()["num_blocks"] == 1 + 20  # of 40 free, half


def test_what_is_asked_for_ahead_where_free_memory_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool grows by shares then, and no further than to what is to come."""

    def refuse(_: torch.device) -> int:
        raise ValueError

    monkeypatch.setattr(sizing, "free_memory", refuse)
    sizes = pool_sizes(monkeypatch)
    model = models.tiny("llama")
    cache = PagedKVCache(model.config, block_size=BLOCK)
    model.generate(**models.prompts([40]), **generate_settings(120), past_key_values=cache)
    assert len(sizes) < 8
    assert sizes[-1] == math.ceil((40 + 119) / BLOCK)


@pytest.mark.parametrize("told", [None, 5, 44], ids=["nothing", "too little", "the step itself"])
def test_a_wrong_expectation_is_only_a_hint(told: int | None) -> None:
    model, batch = models.tiny("llama"), models.prompts([40, 7])
    cache = PagedKVCache(model.config, block_size=BLOCK)
    cache.expect(told)
    expected = models.generate(model, batch, DynamicCache(config=model.config))
    models.assert_same(models.generate(model, batch, cache), expected)
    cache.expect(told)
    more = models.prompts([50, 50], seed=9)["input_ids"]
    model(input_ids=more, past_key_values=cache)
    cache.check()


def test_growth_holds_one_lane_twice() -> None:
    """The old memory of a layer goes before the next layer's new one comes, views of it included."""
    model, cache = models.tiny("llama"), PagedKVCache(models.tiny("llama").config, block_size=BLOCK)
    with LivingBytes() as living:
        model(**models.prompts([200]), past_key_values=cache)
        model(input_ids=torch.tensor([[5]]), past_key_values=cache)  # views of every layer are in use
        pool = cache.pool
        before = living.now
        lane_bytes = [lane.nbytes for lane in pool.lanes()]
        living.peak = living.now
        pool.grow(2 * pool.num_blocks)
        growth = living.now - before
        assert growth >= sum(lane_bytes)
        assert living.peak - before <= growth + lane_bytes[-1] + 4096  # the allocator's state is small
    model(input_ids=torch.tensor([[6]]), past_key_values=cache)
    cache.check()


def test_a_growth_that_finds_no_memory_leaves_the_pool_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.tiny("llama"), models.prompts([40])
    cache = PagedKVCache(model.config, block_size=BLOCK)
    expected = model(**models.extend(batch["input_ids"], batch["attention_mask"], torch.tensor([[5]]))).logits[:, -1]
    model(**batch, past_key_values=cache)
    pool, set_lane = cache.pool, KVPool._set_lane

    def fail(self: KVPool, index: int, lane: Tensor) -> None:
        if index == 1:
            raise MemoryError
        set_lane(self, index, lane)

    with monkeypatch.context() as patched:
        patched.setattr(KVPool, "_set_lane", fail)
        with pytest.raises(MemoryError):
            pool.grow(2 * pool.num_blocks)
    cache.check()
    logits = model(input_ids=torch.tensor([[5]]), past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    pool.grow(3 * pool.num_blocks)
    cache.check()


def test_a_pool_of_unknown_future_grows_by_a_share() -> None:
    sizes = [1]
    while sizes[-1] < 10_000:
        sizes.append(sizes[-1] + sizing.growth(sizes[-1]))
    assert sizes[:6] == [1, 2, 4, 8, 16, 32]
    assert len(sizes) < 40  # copies
    assert all(after <= 1.25 * before for before, after in itertools.pairwise(sizes) if before >= 64)  # unused memory
