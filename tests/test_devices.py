"""A model over several devices: keys and values are where their layer is, and one table is copied to each device.

Values need a GPU (the CPU is the other device) or two; what is made where, and what is copied, shows with `meta` too.
"""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import DynamicCache

from torch_paged_kv import PagedKVCache
from torch_paged_kv.step import Step

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
# The first pair has one device only: it shows that what moves things about here is right.
PAIRS = [
    pytest.param("cpu", "cpu"),
    pytest.param("cpu", "cuda:0", marks=pytest.mark.skipif(GPUS < 1, reason="needs a GPU")),
    pytest.param("cuda:0", "cpu", marks=pytest.mark.skipif(GPUS < 1, reason="needs a GPU")),
    pytest.param("cuda:0", "cuda:1", marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")),
]


def follow(module: torch.nn.Module, device: str) -> None:
    """Move a module to a device, and whatever its forward is given with it."""
    module.to(device)

    def move(_: Any, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))

    module.register_forward_pre_hook(move, with_kwargs=True)


def spread(family: str, first: str, second: str, by_accelerate: bool = False) -> Any:
    """A tiny model whose first layer, embeddings and head are on one device, and whose other layers are on another."""
    model = models.tiny(family)
    names = {f"model.layers.{layer}": second for layer in range(1, model.config.num_hidden_layers)}
    names |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0", "lm_head"), first)
    names |= {"model.rotary_emb_local": first} if hasattr(model.model, "rotary_emb_local") else {}
    names |= {"model.norm": second}
    if by_accelerate:
        accelerate = pytest.importorskip("accelerate")
        skip_keys = model._skip_keys_device_placement  # as from_pretrained(device_map=...) has it: a cache is not moved
        return accelerate.dispatch_model(
            model, device_map=names, main_device=first, skip_keys=skip_keys, force_hooks=True
        )
    for name, device in names.items():
        follow(model.get_submodule(name), device)
    return model


def batch_on(device: str, lengths: list[int]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in models.prompts(lengths).items()}


def generate(model: Any, device: str, cache: Any, **settings: Any) -> Tensor:
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "disable_compile": True} | settings
    tokens: Tensor = model.generate(**batch_on(device, [models.PROMPT, 5]), past_key_values=cache, **settings)
    return tokens.cpu()


@pytest.mark.parametrize("by_accelerate", [False, True], ids=["by_hand", "accelerate"])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_generate_equals_dynamic_cache(
    first: str, second: str, family: str, settings: dict[str, Any], by_accelerate: bool
) -> None:
    if by_accelerate and first != second and "cpu" in (first, second):
        pytest.skip("to accelerate the CPU is where weights are kept, not where layers run")
    model = spread(family, first, second, by_accelerate)
    expected = generate(model, first, DynamicCache(config=model.config), **settings)
    for arguments in ({}, {"num_tokens": 400}, {"mode": "gather"}):
        cache = PagedKVCache(model.config, block_size=4, **arguments)
        with models.count_paths() as counted:
            assert torch.equal(generate(model, first, cache, **settings), expected)
        assert (counted.direct > 0) == ("mode" not in arguments)
        assert {lane.device for lane in cache.pool.lanes()} == {torch.device(first), torch.device(second)}
        assert cache.pool.device == torch.device(first)
        cache.check()
        cache.reset()
        assert cache.pool.num_free == cache.pool.num_blocks


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_forks_and_crops(first: str, second: str) -> None:
    """Copy-on-write copies blocks on every device."""
    model = spread("llama", first, second)
    results = []
    for cache in (DynamicCache(config=model.config), PagedKVCache(model.config, block_size=4)):
        model(**batch_on(first, [14]), past_key_values=cache)
        fork = copy.deepcopy(cache)
        for seed, which in enumerate((fork, cache, fork)):
            new = models.prompts([3], seed=seed)["input_ids"].to(first)
            results.append(model(input_ids=new, past_key_values=which).logits.cpu())
        cache.crop(-2)
        results.append(model(input_ids=torch.tensor([[7]], device=first), past_key_values=cache).logits.cpu())
    for mine, theirs in zip(results[4:], results[:4], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("first", "second"), [PAIRS[0], PAIRS[-1]])
def test_8_bit_blocks(first: str, second: str) -> None:
    """Scales are where their blocks are."""
    whole = models.tiny("llama").to(first)
    expected = generate(whole, first, PagedKVCache(whole.config, dtype=torch.int8), num_beams=3)
    cache = PagedKVCache(whole.config, dtype=torch.int8)
    assert torch.equal(generate(spread("llama", first, second), first, cache, num_beams=3), expected)
    assert {lane.device for lane in cache.pool.lanes()} == {torch.device(first), torch.device(second)}


def test_layers_that_share_keys_must_be_on_one_device() -> None:
    cache, key = PagedKVCache(models.tiny("gemma3n").config), torch.randn(1, 2, 5, 16)
    cache.update(key, key, 0)
    cache._progress.pending = None  # as if the layer had attended
    with pytest.raises(ValueError, match=r'layers share keys and values, got meta: .*mode="gather"'):
        cache.update(key.to("meta"), key.to("meta"), 1)


class Copies(TorchDispatchMode):
    """Elements of each tensor that is copied from the CPU to `meta`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.device.type == "meta" and args[0].device.type == "cpu":
            self.sizes.append(args[0].numel())
        return result


@pytest.mark.parametrize("lengths", [[6], [6, 3]], ids=["alone", "padded"])
def test_nothing_is_copied_but_the_step(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step, for all layers of a device; and of keys and values nothing."""
    model, rows = spread("llama", "cpu", "meta"), len(lengths)
    model.lm_head.to("meta")
    model.lm_head._forward_pre_hooks.clear()
    cache, made = PagedKVCache(model.config, block_size=4), []
    copied_to = Step._copied_to

    def counted(self: Step, device: torch.device) -> Step:
        with Copies() as copies:
            step = copied_to(self, device)
        made.append(sorted(copies.sizes))
        return step

    monkeypatch.setattr(Step, "_copied_to", counted)
    batch = models.prompts(lengths)
    for length in (6, 1, 1):
        width = cache.get_seq_length() + length
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, width - 6), value=1)
        logits = model(input_ids=batch["input_ids"][:, :length], attention_mask=mask, past_key_values=cache).logits
        assert logits.device.type == "meta"
        columns = cache._rows.block_table.shape[2]
        wanted = [rows * length, rows * columns, rows, rows + 1]  # slots, table, lengths, spans
        wanted += [rows] if length == 6 and rows > 1 else []  # new tokens of padded rows
        assert made.pop() == sorted(wanted)
        assert not made
    assert [lane.device.type for lane in cache.pool.lanes()] == ["cpu", "meta", "meta"]
    assert cache.pool.device.type == "cpu"
    assert cache.stats()["tokens"] == sum(lengths) + 2 * rows
    cache.check()


def test_layers_of_a_lane_on_two_devices() -> None:
    """Groups share lanes; a lane whose layers are on two devices has memory on both."""
    cache = PagedKVCache(models.tiny("gemma3").config, block_size=4)  # sliding, full, sliding: three groups of a lane
    key = torch.randn(1, 2, 5, 16)
    for layer, device in enumerate(["cpu", "meta", "cpu"]):
        cache.update(key.to(device), key.to(device), layer)
        cache._progress.pending = None
    assert [lane.device.type for lane in cache.pool.lanes()] == ["cpu", "meta"]
    torch.testing.assert_close(cache.layers[0].keys, key)
    torch.testing.assert_close(cache.layers[2].values, key)


def test_layers_can_be_offloaded(device: torch.device) -> None:
    """Between steps, with some of them fetched ahead; blocks that are copied on write in host memory too."""
    model = models.tiny("llama").to(device)
    expected = generate(model, str(device), DynamicCache(config=model.config), num_beams=3)
    cache, steps = PagedKVCache(model.config, block_size=4), 0

    def offload(*_: Any) -> None:
        nonlocal steps
        steps += 1
        for layer in cache.layers:
            layer.offload()  # before the first step there is nothing to move
        if steps == 1:
            return
        assert {lane.device.type for lane in cache.pool.lanes()} <= {"cpu"}
        cache.layers[0].prefetch()
        assert {lane.device.type for lane in cache.pool.lanes()[:1]} <= {device.type}

    handle = model.register_forward_pre_hook(offload)
    assert torch.equal(generate(model, str(device), cache, num_beams=3), expected)
    handle.remove()
    assert steps == 20
    assert {lane.device for lane in cache.pool.lanes()} == {cache.pool.device}
    assert cache.layers[2].keys.device.type == device.type


def test_offloading_moves_a_lane_and_its_next_use_moves_it_back() -> None:
    """`meta` stands for the accelerator here: what is moved there has no values, but a place."""
    cache, key = PagedKVCache(models.tiny("llama").config, block_size=4), torch.randn(1, 2, 5, 16)

    def step() -> list[str]:
        for layer, device in enumerate(["cpu", "meta", "meta"]):
            cache.update(key.to(device), key.to(device), layer)
            cache._progress.pending = None
        return [lane.device.type for lane in cache.pool.lanes()]

    def take_values(self: Tensor, device: torch.device, **_: Any) -> Tensor:
        return torch.zeros(self.shape, device=device)

    assert step() == ["cpu", "meta", "meta"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "to", take_values)  # meta has no values to copy out
        cache.layers[1].offload()
    assert [lane.device.type for lane in cache.pool.lanes()] == ["cpu", "cpu", "meta"]
    assert step() == ["cpu", "meta", "meta"]
