"""8-bit caches hold exactly what a float32 cache holds that is given rounded rows, and attend as it does.

A shadow runs beside the cache under test: a float32 cache of the same library (which other tests compare with
DynamicCache) that is given every row as the 8-bit cache must store it. Comparing within one run, step by step, keeps
a rounding that flips from growing into other tokens.
"""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import SCENARIOS, Caches
from op_cases import EIGHT_BIT_DTYPES, dtype_id
from test_compile_generate import decode
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

from torch_paged_kv import PagedKVCache, paged, reference
from torch_paged_kv import cache as core
from torch_paged_kv.scales import StaticScales

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
BLOCK = 4
ROOT = Path(__file__).parents[1]


def static_scales(model: Any, dtype: torch.dtype, per: str = "per_head", num_layers: int | None = None) -> StaticScales:
    """Scales of unequal heads and layers, around what keys and values of the tiny models need."""
    config = model.config
    num_layers = config.num_hidden_layers if num_layers is None else num_layers
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    shape = {"per_head": (heads,), "per_tensor": (1,), "scalar": ()}[per]
    generator = torch.Generator().manual_seed(3)
    unit = 4.0 / reference.MAX_OF_DTYPE[dtype]
    layers = [[unit * (0.5 + torch.rand(shape, generator=generator)) for _ in range(num_layers)] for _ in range(2)]
    return StaticScales(dtype, *layers)


def rounded(states: Tensor, dtype: torch.dtype, scale: Tensor | None, per_slot: bool) -> Tensor:
    """``[num_seqs, num_kv_heads, length, head_size]`` as it comes back from an 8-bit cache, by the reference."""
    num_seqs, heads, length, head_size = states.shape
    rows = states.transpose(1, 2).flatten(0, 1)  # [num_tokens, num_kv_heads, head_size]
    num_tokens = len(rows)
    if per_slot:
        scale = torch.full((1, num_tokens, heads), math.nan, device=rows.device)
    cache = torch.zeros(1, num_tokens, heads, head_size, dtype=dtype, device=rows.device)
    slots = torch.arange(num_tokens, device=rows.device)
    scale = None if scale is None else scale.to(rows.device)
    other = (cache.clone(), None if scale is None else scale.clone())
    reference.reshape_and_cache(rows, rows, cache, other[0], slots, scale, other[1])
    real = cache.float() if scale is None else cache.float() * (scale[..., None] if per_slot else scale.reshape(-1, 1))
    return real.view(num_seqs, length, heads, head_size).transpose(1, 2)


class Shadowed(PagedKVCache):
    """A cache that compares itself with its shadow whenever it is written, read or moved."""

    def __init__(self, config: Any = None, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        alike = {"block_size": self.block_size, **self._size}
        self.shadow = [core.PagedKVCache(self._windows, **alike)]  # in a list, as a module would be a part of this one
        self.compared = 0

    def _round(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        static = self.scales if isinstance(self.scales, StaticScales) else None
        scales = (None, None) if static is None else (static.key[layer], static.value[layer])
        assert self.dtype is not None
        pairs = zip((key, value), scales, strict=True)
        key, value = (rounded(states, self.dtype, scale, self.scales == "per_slot") for states, scale in pairs)
        return key, value

    def _compare(self, layer: int) -> None:
        if torch.compiler.is_compiling() or self.num_seqs == 0 or not self.is_written(layer):
            return
        for mine, right in zip(self.gather(layer), self.shadow[0].gather(layer), strict=True):
            assert torch.equal(mine, right), f"layer {layer} does not hold what was stored"
        self.compared += 1

    def pad(self, mask: Tensor | None, length: int) -> None:
        super().pad(mask, length)
        self.shadow[0].pad(mask, length)

    def write(self, layer: int, key: Tensor, value: Tensor) -> Any:
        step = super().write(layer, key, value)
        shadow_step = self.shadow[0].write(layer, *self._round(layer, key, value))
        self._compare(layer)
        step.shadow = shadow_step  # type: ignore[attr-defined]
        return step

    def attend(self, step: Any, layer: int, query: Tensor, **options: Any) -> Tensor:
        out = super().attend(step, layer, query, **options)
        right = self.shadow[0].attend(step.shadow, layer, query, **options)
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))
        return out

    def reorder(self, source_rows: Tensor) -> None:
        super().reorder(source_rows)
        self.shadow[0].reorder(source_rows)
        self._compare(0)

    def fork(self) -> Any:
        fork = super().fork()
        fork.__class__ = Shadowed
        fork.shadow, fork.compared = [self.shadow[0].fork()], 0  # type: ignore[attr-defined]
        fork._compare(0)  # type: ignore[attr-defined]
        return fork

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.shadow[0].truncate(length)
        self._compare(0)

    def keep_past(self, keep: bool = True) -> None:
        super().keep_past(keep)
        self.shadow[0].keep_past(keep)

    def reset(self) -> None:
        super().reset()
        self.shadow[0].reset()


def shadowed(**arguments: Any) -> Caches:
    return Caches(lambda model: Shadowed(model.config, **{"block_size": BLOCK} | arguments))


def run(model: Any, scenario: str, **arguments: Any) -> None:
    caches = shadowed(**arguments)
    with models.count_paths() as paths:
        SCENARIOS[scenario][0](model, caches)
    direct = models.goes_direct(model.config.model_type.removesuffix("_text"))
    assert (paths.direct > 0, paths.gathered > 0) == (direct, not direct), paths
    assert all(cache.compared > 0 for cache in caches.made)
    models.assert_all_free(caches)


# --------------------------------------------------------------------------------------------- everything generate does


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
def test_scenarios(dtype: torch.dtype, scenario: str) -> None:
    run(models.tiny("llama"), scenario, dtype=dtype)


@pytest.mark.parametrize(
    ("family", "scenario"),
    [
        (family, name)
        for family in ("gemma3", "gpt_oss", "mistral", "gpt2")
        for name in ("left_padded", "assisted", "chat")
    ]
    + [(family, name) for family in ("gemma3", "mistral", "falcon", "deepseek_v3") for name in ("beams", "forked")],
)
def test_scenarios_of_more_families(family: str, scenario: str) -> None:
    """Sliding groups, sinks, heads that are not shared, one head, gathered models, values of another size."""
    run(models.tiny(family), scenario, dtype=torch.int8 if family in ("gemma3", "falcon") else torch.float8_e4m3fn)


@pytest.mark.parametrize("scenario", ["left_padded", "beams", "forked"])
@pytest.mark.parametrize(
    ("dtype", "per"),
    [(dtype, per) for dtype in EIGHT_BIT_DTYPES for per in ("per_head", "per_tensor", "scalar")]
    + [(dtype, "none") for dtype in FLOAT8],
    ids=str,
)
def test_other_scales(dtype: torch.dtype, per: str, scenario: str) -> None:
    model = models.tiny("llama")
    run(model, scenario, dtype=dtype, scales=None if per == "none" else static_scales(model, dtype, per))


@pytest.mark.parametrize("size", [{"num_tokens": 200}, {"num_blocks": 80}, {"bytes": 1 << 20}], ids=str)
def test_pools_of_given_size(size: dict[str, int]) -> None:
    run(models.tiny("gemma3"), "beams", dtype=torch.int8, **size)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_sizes(block_size: int) -> None:
    run(models.tiny("llama"), "beams", dtype=torch.int8, block_size=block_size)


@pytest.mark.parametrize("per", ["per_slot", "per_head"])
@pytest.mark.parametrize("dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
def test_on_every_device(dtype: torch.dtype, per: str, device: torch.device) -> None:
    """Padded beams: fork, copy-on-write and growth; fixed scales are brought to the device of the keys."""
    model = models.tiny("gemma3").to(device)
    scales = "per_slot" if per == "per_slot" else static_scales(model, dtype)
    caches = shadowed(dtype=dtype, scales=scales)
    batch = {name: tensor.to(device) for name, tensor in models.prompts([models.PROMPT, 5]).items()}
    models.generate(model, batch, caches.new(model), num_beams=3)
    assert caches.made[0].compared > models.NEW_TOKENS
    models.assert_all_free(caches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_gathered_keys_have_the_models_dtype(dtype: torch.dtype) -> None:
    for family in ("llama", "falcon"):
        model = models.tiny(family).to(dtype)
        cache: Any = PagedKVCache(model.config, dtype=torch.int8)
        model(**models.prompts([6, 4]), past_key_values=cache)
        fork = copy.deepcopy(cache)
        assert cache.layers[0].keys.dtype == cache.layers[1].values.dtype == fork.layers[0].keys.dtype == dtype


def test_attention_weights_of_eager_attention() -> None:
    """The model's own attention is given dequantised keys: those of a DynamicCache that is given rounded rows."""

    class Rounded(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            states = (rounded(part, torch.int8, None, per_slot=True) for part in (key_states, value_states))
            return super().update(*states, *args, **kwargs)

    model, batch = models.tiny("llama"), models.prompts([9])
    model.set_attn_implementation("eager")
    weights = [
        model(**batch, past_key_values=cache, output_attentions=True).attentions
        for cache in (PagedKVCache(model.config, dtype=torch.int8), Rounded(config=model.config), None)
    ]
    # Later layers may round otherwise.
    torch.testing.assert_close(weights[0][0], weights[1][0])
    assert (weights[0][0] - weights[2][0]).abs().max() > 1e-5


def test_the_shadow_notices() -> None:
    """A scale that stays behind when its block is copied is noticed: the comparison of the other tests can fail."""
    model = models.tiny("llama")

    class Forgets(Shadowed):
        def write(self, layer: int, key: Tensor, value: Tensor) -> Any:
            if layer == 0 and self.seen > models.PROMPT + 2:
                self.pool.lane(1).mul_(1.01)
            return super().write(layer, key, value)

    with pytest.raises(AssertionError, match="does not hold"):
        models.beams(model, Caches(lambda model: Forgets(model.config, block_size=BLOCK, dtype=torch.int8)))


def test_scales_move_with_their_blocks() -> None:
    """Copy-on-write: rows of one prompt diverge inside a shared block; each keeps the scales of the prompt's slots."""
    cache = core.PagedKVCache(block_size=4, dtype=torch.int8)
    prompt = torch.randn(1, 2, 6, 8) * torch.tensor([1e-3, 1.0, 50.0, 3.0, 1e3, 0.1])[:, None]
    cache.write(0, prompt, prompt)
    cache.reorder(torch.tensor([0, 0, 0]))
    before = cache.gather(0)[0][0]
    for scale in (1.0, 100.0, 1e-2):
        cache.write(0, torch.randn(3, 2, 1, 8) * scale, torch.randn(3, 2, 1, 8) * scale)
    keys, _ = cache.gather(0)
    assert torch.equal(keys[:, :, :6], before.expand(3, -1, -1, -1))
    assert (keys[0, :, 6:] != keys[1, :, 6:]).any()
    assert cache.stats()["held_blocks"] == 1 + 3 * 2  # the full block is shared, the half one was copied


def test_layers_of_unequal_shape_share_lanes() -> None:
    """A sliding layer with more and larger heads draws on the lanes of a full one: they widen, and keep their rows."""
    shapes = [(2, 8), (4, 24)]  # heads, head size
    caches = [core.PagedKVCache([None, 8], block_size=BLOCK, dtype=dtype) for dtype in (torch.int8, torch.float32)]
    for step, length in enumerate((6, 1, 1, 3, 9)):
        for layer, (heads, head_size) in enumerate(shapes):
            states = torch.randn(2, heads, length, head_size) * 10.0**step
            caches[0].write(layer, states, -states)
            states = rounded(states, torch.int8, None, per_slot=True)
            caches[1].write(layer, states, -states)
        for layer in range(2):
            for mine, right in zip(caches[0].gather(layer), caches[1].gather(layer), strict=True):
                assert torch.equal(mine, right)
    assert len(caches[0].pool.lanes()) == 2
    elements = BLOCK * 4 * 2 * 24
    assert caches[0].pool.block_bytes == elements + 2 * BLOCK * 4 * 4


# -------------------------------------------------------------------------------------------- B20, memory, what is read


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_b20_saturating_store(source: torch.dtype, dtype: torch.dtype, largest: float) -> None:
    """No NaN, no infinity: what is too large is the largest number; no scale equals scale 1."""
    row = torch.tensor([448, 464, 465, 1000, -1000, 6e4, 1e-3, 0], dtype=source)
    key = row.view(1, 1, 1, 8)
    one = StaticScales(dtype, [torch.ones(1)], [torch.ones(1)])
    keys = []
    for scales in (None, one):
        cache = core.PagedKVCache(dtype=dtype, scales=scales)
        cache.write(0, key, -key)
        keys.append([states.float() for states in cache.gather(0)])
    expected = row.float().clamp(-largest, largest).to(dtype).to(source).float().view(1, 1, 1, 8)
    assert torch.equal(keys[0][0], expected)
    assert torch.equal(keys[0][1], -expected)
    assert torch.equal(keys[1][0], expected)
    assert torch.equal(keys[1][1], -expected)


def test_b20_int8_made_on_the_fly_never_clips() -> None:
    key = torch.tensor([448, 464, 465, 1000, -1000, 6e4, 1e-3, 0]).view(1, 1, 1, 8)
    cache = core.PagedKVCache(dtype=torch.int8)
    cache.write(0, key, key)
    assert (cache.gather(0)[0] - key).abs().max() <= 6e4 / 127 / 2 * (1 + 1e-6)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("scales", ["per_slot", None])
def test_bytes(scales: str | None, block_size: int) -> None:
    """A byte an element, and with scales per slot two float32 for each slot and head; sizes are exact."""
    model = models.tiny("llama")
    config = model.config
    rows = block_size * config.num_key_value_heads * 2 * config.head_dim
    block_bytes = config.num_hidden_layers * (rows + (2 * block_size * config.num_key_value_heads * 4 if scales else 0))
    cache = PagedKVCache(config, block_size=block_size, dtype=torch.float8_e4m3fn, scales=scales, bytes=1 << 20)
    model(**models.prompts([6]), past_key_values=cache)
    assert cache.pool.block_bytes == block_bytes
    assert cache.pool.num_blocks == (1 << 20) // block_bytes
    assert cache.stats()["bytes_total"] == cache.pool.num_blocks * block_bytes


@pytest.mark.parametrize("dtype", EIGHT_BIT_DTYPES, ids=dtype_id)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_lies_in_free_slots_is_never_read(family: str, dtype: torch.dtype) -> None:
    """Rows and scales of slots without a token may be anything, NaN included."""
    model, outcomes = models.tiny(family), []
    for filling in (0.0, math.nan):
        cache = PagedKVCache(model.config, block_size=BLOCK, num_blocks=120, dtype=dtype)
        model(**models.prompts([2]), past_key_values=cache)
        cache.reset()
        for lane in cache.pool.lanes():
            lane.fill_(77 if lane.dtype == torch.int8 and filling else filling)
        outcomes.append(models.generate(model, models.prompts([models.PROMPT, 5, 1]), cache, num_beams=2))
    for zeros, nans in zip(outcomes[0].logits, outcomes[1].logits, strict=True):
        assert torch.equal(zeros, nans)


def test_reset_release_and_use_again() -> None:
    model, cache = models.tiny("llama"), None
    cache = PagedKVCache(model.config, block_size=BLOCK, dtype=torch.int8)
    first = models.generate(model, models.prompts([models.PROMPT, 5]), cache)
    for give_back in (cache.reset, cache.release):
        give_back()
        models.assert_same(models.generate(model, models.prompts([models.PROMPT, 5]), cache), first)


# ------------------------------------------------------------------------------------------------------------- compiled


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "int8 per_slot": lambda model: {"dtype": torch.int8},
    "e4m3 per_slot": lambda model: {"dtype": torch.float8_e4m3fn},
    "e4m3 none": lambda model: {"dtype": torch.float8_e4m3fn, "scales": None},
    "int8 per_head": lambda model: {"dtype": torch.int8, "scales": static_scales(model, torch.int8)},
}


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_graph_for_growing_lengths(family: str, kind: str) -> None:
    """A compiled decode gives the tokens of an eager one, over many block edges and past the window."""
    model, batch, graphs = models.tiny(family), models.prompts([models.PROMPT, 5]), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    def tokens(step: Any) -> Tensor:
        cache = PagedKVCache(model.config, block_size=4, num_blocks=120, **KINDS[kind](model))
        return decode(model, step, cache, batch, 24)

    eager = tokens(model)
    assert torch.equal(tokens(torch.compile(model.forward, fullgraph=True, backend=backend)), eager)
    assert len(graphs) == 1
    assert not counters["graph_break"]


@pytest.mark.usefixtures("_fresh")
def test_inductor_copies_on_write_and_scales_with_it() -> None:
    """Through Inductor's functionalisation: rows that share a block diverge inside the compiled step."""
    model, prompt = models.tiny("llama"), models.prompts([6])
    step: Any = torch.compile(model.forward, fullgraph=True)
    outcomes = []
    for forward in (model, step):
        cache = PagedKVCache(model.config, block_size=BLOCK, num_blocks=40, dtype=torch.int8)
        model(**prompt, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        tokens = torch.tensor([[5], [6], [7]])
        logits = []
        for _ in range(4):
            inputs = {"input_ids": tokens, "position_ids": torch.full((3, 1), 6 + len(logits))}
            if models.RELEASE.major < 5:
                inputs["cache_position"] = torch.tensor([6 + len(logits)])
            logits.append(forward(**inputs, past_key_values=cache).logits[:, -1])
            tokens = logits[-1].argmax(-1, keepdim=True)
        outcomes.append((torch.stack(logits), cache.gather(1)))
    torch.testing.assert_close(outcomes[1][0], outcomes[0][0], rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("kind", ["key", "value"])
def test_scales_that_are_no_scales_raise(kind: str, bad: float) -> None:
    scales: dict[str, list[Tensor]] = {"key": [torch.ones(2), torch.ones(2)], "value": [torch.ones(()), torch.ones(2)]}
    scales[kind][1] = torch.tensor([1.0, bad])
    with pytest.raises(ValueError, match=re.escape(f"{kind}[1] must be finite and above 0, got {bad} of head 1")):
        StaticScales(torch.int8, **scales)


def test_scales_of_wrong_form_raise() -> None:
    one = [torch.ones(1)]
    for wrong in (torch.ones(1).double(), torch.ones(2, 2), torch.ones(0)):
        with pytest.raises(ValueError, match=r"key\[0\] must be float32"):
            StaticScales(torch.int8, [wrong], one)
    with pytest.raises(ValueError, match="value must have a scale for each of 2 layers, got 1"):
        StaticScales(torch.int8, one * 2, one)
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got torch.bfloat16"):
        StaticScales(torch.bfloat16, one, one)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.int8, "scales": None}, "scales must be given for an int8 cache"),
        ({"dtype": torch.int8, "scales": "per_head"}, r"scales must be numbers .*calibrate\("),
        ({"dtype": torch.float8_e5m2, "scales": "per_tensor"}, r"scales must be numbers .*calibrate\("),
        ({"dtype": torch.int8, "scales": "per_row"}, "scales must be .*got 'per_row'"),
        ({"dtype": torch.bfloat16, "scales": "per_slot"}, "scales must be None for a cache of dtype torch.bfloat16"),
        ({"scales": "per_slot"}, "scales must be None for a cache of dtype None"),
        ({"dtype": torch.int16}, "dtype must be one of"),
        ({"dtype": torch.uint8}, "dtype must be one of"),
    ],
)
def test_kinds_that_make_no_sense_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagedKVCache(models.tiny("llama").config, **arguments)


def test_scales_that_do_not_fit_the_model_raise() -> None:
    model = models.tiny("llama")
    for_fewer = static_scales(model, torch.int8, num_layers=1)
    with pytest.raises(ValueError, match="scales must have a scale for each of 3 layers, got 1"):
        PagedKVCache(model.config, dtype=torch.int8, scales=for_fewer)
    with pytest.raises(ValueError, match=r"scales must be made for the cache's dtype .*e4m3fn, got scales for .*int8"):
        PagedKVCache(model.config, dtype=torch.float8_e4m3fn, scales=static_scales(model, torch.int8))
    cache = PagedKVCache(dtype=torch.int8, scales=for_fewer)  # without a config layers come one by one
    with pytest.raises(ValueError, match="scales must have a scale for layer 1, got 1 layers"):
        model(**models.prompts([4]), past_key_values=cache)
    heads = StaticScales(torch.int8, [torch.ones(5)] * 3, [torch.ones(1)] * 3)
    with pytest.raises(ValueError, match=r"scales.key\[0\] must have 1 or num_kv_heads=2 scales, got 5"):
        model(**models.prompts([4]), past_key_values=PagedKVCache(model.config, dtype=torch.int8, scales=heads))


def test_caches_of_a_pool_are_of_one_kind() -> None:
    model, scales = models.tiny("llama"), None
    scales = static_scales(model, torch.int8)
    for kind in ({"dtype": torch.int8}, {"dtype": torch.int8, "scales": scales}, {"dtype": FLOAT8[0], "scales": None}):
        first = PagedKVCache(model.config, block_size=BLOCK, **kind)
        expected = models.generate(model, models.prompts([7]), first)
        second = PagedKVCache(model.config, pool=first.pool)  # of the pool's kind
        models.assert_same(models.generate(model, models.prompts([7]), second), expected)
        others: list[dict[str, Any]] = [{"dtype": torch.int8}, {"dtype": torch.int8, "scales": scales}]
        others += [{"dtype": dtype, "scales": None} for dtype in FLOAT8] + [{"dtype": torch.float32}]
        for other in others:
            if other | {"scales": other.get("scales", "auto")} == kind | {"scales": kind.get("scales", "auto")}:
                continue
            with pytest.raises(ValueError, match=r"(scales|key) must be .* like"):
                model(**models.prompts([4]), past_key_values=PagedKVCache(model.config, pool=first.pool, **other))
        second.reset()
        first.reset()
        assert first.pool.num_free == first.pool.num_blocks


def test_static_scales_come_back_from_a_file(tmp_path: Path) -> None:
    model = models.tiny("llama")
    for dtype in EIGHT_BIT_DTYPES:
        scales = static_scales(model, dtype)
        scales.save(tmp_path / "scales.safetensors")
        loaded = StaticScales.load(tmp_path / "scales.safetensors")
        assert repr(loaded) == f"StaticScales({dtype}, 3 layers)"
        assert loaded.dtype == dtype
        for mine, right in zip([*loaded.key, *loaded.value], [*scales.key, *scales.value], strict=True):
            assert torch.equal(mine, right)
    from safetensors.torch import save_file

    save_file({"key.0": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"path must be a file that StaticScales\.save wrote"):
        StaticScales.load(tmp_path / "other.safetensors")


def test_a_patched_model_uses_them_by_default() -> None:
    model, batch = models.tiny("llama"), models.prompts([models.PROMPT])
    scales = static_scales(model, torch.int8)
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with paged(model, dtype=torch.int8, scales=scales, block_size=BLOCK):
        output = model.generate(**batch, **settings, return_dict_in_generate=True)
    cache = output.past_key_values
    assert (cache.pool.lane(0).dtype, cache.scales) == (torch.int8, scales)
    expected = models.generate(model, batch, PagedKVCache(model.config, dtype=torch.int8, scales=scales), **settings)
    assert torch.equal(output.sequences, expected.tokens[0])


def test_a_wide_cache_is_as_before() -> None:
    """No scale lanes, no scales, the tokens of DynamicCache."""
    model, batch = models.tiny("llama"), models.prompts([models.PROMPT])
    cache = PagedKVCache(model.config, block_size=BLOCK)
    models.assert_same(models.generate(model, batch, cache), models.generate(model, batch, DynamicCache()))
    assert cache.scales is None
    assert len(cache.pool.lanes()) == model.config.num_hidden_layers


def test_debug_mode_checks_scales() -> None:
    """Every slot with a token has a scale, whatever moved its block; one that is spoilt is named (PAGED_KV_DEBUG=1)."""
    code = """
        import math, sys
        sys.path.insert(0, "tests")
        import models, torch, torch_paged_kv
        for family in ("llama", "gemma3", "falcon"):
            model = models.tiny(family)
            for scenario in (models.beams, models.left_padded, models.forked, models.assisted):
                if scenario is not models.assisted or family == "llama":
                    scenario(model, caches := models.paged(dtype=torch.int8))
                    models.assert_all_free(caches)
        model, cache = models.tiny("llama"), torch_paged_kv.PagedKVCache(block_size=4, dtype=torch.int8)
        with torch.no_grad():
            model(**models.prompts([6]), past_key_values=cache)
            _, _, key_scale, value_scale = cache.caches(1)
            value_scale[1, 1, 0] = math.nan
            try:
                model(input_ids=torch.tensor([[5]]), past_key_values=cache)
            except ValueError as error:
                print(error)
    """
    environment = {**os.environ, "PAGED_KV_DEBUG": "1"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    message = "value_scale must be finite and above 0 where a token is, got nan at row 0, position 5, head 0"
    assert result.stdout.strip() == message
