"""PagedKVCache(share_prefix_reads=True): the same tokens, found once a step, and only where it is exact and pays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_paged_kv import PrefixCache
from torch_paged_kv import cache as core

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]


@pytest.fixture(autouse=True)
def _share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these batches can share is far too little to pay."""
    monkeypatch.setattr(core, "MIN_SAVED", 1)


class CountOps(TorchDispatchMode):
    """Calls of each op of the library, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func).removesuffix(".default").partition(".")
        if namespace == "paged_kv":
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


# ---- the cache itself -----------------------------------------------------------------------------------------------


def two_rows_of_one_prompt(
    prompt: int = 9, *, windows: list[int | None] | None = None, **arguments: Any
) -> core.PagedKVCache:
    """Two layers whose rows share `prompt` tokens in blocks of 4."""
    torch.manual_seed(3)
    cache = core.PagedKVCache(windows or [None, None], block_size=4, **arguments)
    states = torch.randn(2, 1, 2, prompt, 16)
    for layer in range(2):
        cache.write(layer, states[layer], states[layer])
    cache.reorder(torch.zeros(2, dtype=torch.int64))
    return cache


def step(cache: core.PagedKVCache, length: int = 1, **options: Any) -> tuple[list[Tensor], Counter[str]]:
    """A step's results of both layers, and the ops that attention called."""
    torch.manual_seed(4)
    outs = []
    with CountOps() as count:
        for layer in range(2):
            query, key = torch.randn(2, 4, length, 16), torch.randn(2, 2, length, 16)
            begun = cache.write(layer, key, key)
            outs.append(cache.attend(begun, layer, query, scale=0.25, **options))
    names = ("paged_attention", "paged_attention_with_lse", "merge_attention_states", "find_shared_prefixes")
    return outs, Counter({name: count.calls[name] for name in names if count.calls[name]})


SHARED = {"find_shared_prefixes": 1, "paged_attention_with_lse": 4, "merge_attention_states": 2}


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": torch.tensor([0.0, 1.0, -1.0, 3.0])}], ids=str)
@pytest.mark.parametrize("length", [1, 3, 16])
def test_found_once_for_all_layers(length: int, options: dict[str, Any]) -> None:
    expected, plain = step(two_rows_of_one_prompt(), length, **options)
    outs, calls = step(two_rows_of_one_prompt(share_prefix_reads=True), length, **options)
    assert plain == {"paged_attention": 2}
    assert calls == SHARED
    torch.testing.assert_close(outs, expected)


@pytest.mark.parametrize(("dtype", "scales"), [(torch.int8, "per_slot"), (torch.float8_e4m3fn, None)])
def test_eight_bit(dtype: torch.dtype, scales: Any) -> None:
    expected, _ = step(two_rows_of_one_prompt(dtype=dtype, scales=scales))
    outs, calls = step(two_rows_of_one_prompt(dtype=dtype, scales=scales, share_prefix_reads=True))
    assert calls == SHARED
    torch.testing.assert_close(outs, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 6},
        {"causal": False},
        {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
        {"mask": torch.ones(1, 1, 1, 10, dtype=torch.bool)},
    ],
    ids=["window", "causal", "alibi_slopes", "mask"],
)
def test_positions_are_read_alone(options: dict[str, Any]) -> None:
    expected, _ = step(two_rows_of_one_prompt(), **options)
    outs, calls = step(two_rows_of_one_prompt(share_prefix_reads=True), **options)
    assert calls == {"paged_attention": 2}
    assert all(torch.equal(a, b) for a, b in zip(outs, expected))


def test_many_positions_are_read_alone() -> None:
    _, calls = step(two_rows_of_one_prompt(share_prefix_reads=True), 17)
    assert calls == {"paged_attention": 2}


def test_rows_that_hold_no_block_together() -> None:
    cache = core.PagedKVCache([None, None], block_size=4, share_prefix_reads=True)
    states = torch.randn(2, 2, 9, 16)
    for layer in range(2):
        cache.write(layer, states, states)
    assert step(cache)[1] == {"paged_attention": 2}


def test_nothing_worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU a look at what was found decides for all layers."""
    monkeypatch.setattr(core, "MIN_SAVED", 9)
    _, calls = step(two_rows_of_one_prompt(share_prefix_reads=True))
    assert calls == {"find_shared_prefixes": 1, "paged_attention": 2}


def test_forks_share_too() -> None:
    assert two_rows_of_one_prompt(share_prefix_reads=True).fork().share_prefix_reads
    assert not two_rows_of_one_prompt().fork().share_prefix_reads


def test_layers_of_two_kinds() -> None:
    """A layer with a window reads alone, its neighbour does not."""
    arguments: dict[str, Any] = {"windows": [None, 5]}

    def outs(cache: core.PagedKVCache) -> tuple[list[Tensor], Counter[str]]:
        torch.manual_seed(5)
        results = []
        with CountOps() as count:
            for layer, window in enumerate([None, 5]):
                query, key = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)
                results.append(cache.attend(cache.write(layer, key, key), layer, query, scale=0.25, window=window))
        return results, count.calls

    expected, _ = outs(two_rows_of_one_prompt(**arguments))
    results, calls = outs(two_rows_of_one_prompt(**arguments, share_prefix_reads=True))
    torch.testing.assert_close(results, expected)
    assert (calls["find_shared_prefixes"], calls["paged_attention"]) == (1, 1)


# ---- generate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scenario", ["beams", "beams_return_2", "num_return_sequences", "sampling", "left_padded", "prompt_lookup"]
)
@pytest.mark.parametrize("family", [*filter(models.goes_direct, ["llama", "gemma2", "gpt_oss"])])  # softcap, sinks
def test_ways_to_generate(family: str, scenario: str) -> None:
    model = models.tiny(family)
    run, reference = models.SCENARIOS[scenario]
    expected = reference(model, models.dynamic())
    prefix_cache = PrefixCache(max_tokens=400)
    made = models.paged(prefix_cache=prefix_cache, share_prefix_reads=True)
    for _ in range(2):
        with CountOps() as count:
            models.assert_same(run(model, made), expected)
    of_one_prompt = scenario in ("beams", "beams_return_2", "num_return_sequences")
    assert bool(count.calls["merge_attention_states"]) == of_one_prompt
    prefix_cache.check(*made.made)


def test_parallel_samples() -> None:
    model = models.tiny("llama")
    prompt, arguments = models.prompts([40]), {"num_return_sequences": 4, "num_beams": 4}
    expected = models.generate(model, prompt, models.dynamic().new(model), **arguments)
    prefix_cache = PrefixCache(max_tokens=400)
    cache = models.paged(prefix_cache=prefix_cache, share_prefix_reads=True).new(model)
    with CountOps() as count:
        models.assert_same(models.generate(model, prompt, cache, **arguments), expected)
    assert count.calls["find_shared_prefixes"] * 3 == count.calls["merge_attention_states"] > 0


@pytest.mark.skipif(models.RELEASE.major < 5, reason="generate compiles no cache of ours in this release")
def test_compiled_steps_find_it_in_the_graph() -> None:
    """One graph, whatever is shared; prompts of other lengths, and rows that share nothing, run through it."""
    graphs, config = models.counting_compiler()
    model = models.tiny("llama")
    cache = models.paged(num_blocks=80, prefix_cache=PrefixCache(), share_prefix_reads=True).new(model)
    begin = models.prompts([24])["input_ids"].repeat(3, 1)
    alike = models.extend(begin, torch.ones_like(begin), models.prompts([6] * 3, seed=7)["input_ids"])
    for prompt in (alike, models.prompts([17, 17, 17], seed=2), alike):
        expected = models.generate(model, prompt, models.dynamic().new(model))
        models.assert_same(models.generate(model, prompt, cache, compile_config=config), expected)
        cache.reset()
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("find_shared_prefixes" in target for target in targets) == 1
    assert sum("merge_attention_states" in target for target in targets) == model.config.num_hidden_layers
