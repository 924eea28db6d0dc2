"""A decode step under torch.compile: one graph for every length, no graph break, nothing of a cache's size copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from torch_paged_kv import OutOfBlocksError, PagedKVCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # its name in every release but one

FAMILIES = ("llama", "gemma3", "gpt_oss", "gpt2")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def decode_step(step: Callable[..., Any], cache: Any, token: Tensor, position: Tensor, seen: int) -> Tensor:
    """Logits [rows, vocab] after one more token [rows, 1]."""
    inputs = {"input_ids": token, "position_ids": position}
    if models.RELEASE.major < 5:  # older models would compute it from a length as a number
        inputs["cache_position"] = torch.tensor([seen])
    logits: Tensor = step(**inputs, past_key_values=cache).logits[:, -1]
    return logits


def decode(model: Any, step: Callable[..., Any], cache: Any, batch: dict[str, Tensor], steps: int) -> Tensor:
    """Greedy tokens [rows, steps]: an eager prefill, then `step`. `step` is given nothing but tensors and the cache."""
    mask = batch["attention_mask"]
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(**batch, position_ids=position_ids, past_key_values=cache).logits[:, -1]
    position, tokens = position_ids[:, -1:], [logits.argmax(-1, keepdim=True)]
    for _ in range(steps - 1):
        position = position + 1
        logits = decode_step(step, cache, tokens[-1], position, mask.shape[1] + len(tokens) - 1)
        tokens.append(logits.argmax(-1, keepdim=True))
    return torch.cat(tokens, dim=1)


@pytest.mark.parametrize("lengths", [[3], [models.PROMPT, 5]], ids=["alone", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_graph_for_growing_lengths(family: str, lengths: list[int]) -> None:
    """Over many block edges, and past the window of sliding layers."""
    if not models.goes_direct(family):
        pytest.skip("gathering has a shape that depends on data; this release's code of the family needs it")
    model, batch, graphs = models.tiny(family), models.prompts(lengths), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    step: Any = torch.compile(model.forward, fullgraph=True, backend=backend)
    cache = PagedKVCache(model.config, block_size=4, num_blocks=120)
    tokens = decode(model, step, cache, batch, 24)
    assert len(graphs) == 1
    assert not counters["graph_break"]
    expected = models.generate(model, batch, models.dynamic().new(model), max_new_tokens=24, eos_token_id=None).tokens[
        0
    ][:, max(lengths) :]
    assert torch.equal(tokens, expected)
    assert cache.get_seq_length() == max(lengths) + 23
    assert cache.stats()["tokens"] == sum(lengths) + 23 * len(lengths)
    cache.reset()
    assert cache.pool.num_free == cache.pool.num_blocks == 120


def test_nothing_of_a_caches_size_is_copied() -> None:
    """Inductor re-uses pool and tables in place: a compiled step allocates less than a byte for each block."""
    model, batch = models.tiny("llama"), models.prompts([models.PROMPT])
    step: Any = torch.compile(model.forward, fullgraph=True)
    cache = PagedKVCache(model.config, block_size=16, num_blocks=10_000)
    tokens = decode(model, step, cache, batch, 6)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        decode_step(step, cache, tokens[:, -1:], torch.tensor([[models.PROMPT + 5]]), models.PROMPT + 5)
    events: Any = profiled.events()
    largest = max(abs(event.self_cpu_memory_usage) for event in events)
    assert 0 < largest < cache.pool.num_blocks  # bytes: not even the tables are copied, which follow the capacity
    expected = models.generate(model, batch, models.dynamic().new(model), max_new_tokens=6).tokens[0]
    assert torch.equal(tokens, expected[:, models.PROMPT :])


def test_eager_and_compiled_steps_take_turns() -> None:
    """The lengths are the cache's own, so neither kind of step misleads the other; nor do forks and crops between."""
    model, batch = models.tiny("llama"), models.prompts([models.PROMPT])
    compiled: Any = torch.compile(model.forward, fullgraph=True, backend="eager")
    cache = PagedKVCache(model.config, block_size=4, num_blocks=60)
    turns = 0

    def step(**inputs: Any) -> Any:
        nonlocal turns
        turns += 1
        if turns % 4 == 0:  # an excursion that is rolled back
            compiled(**inputs)
            cache.crop(-1)
        if turns % 5 == 0:  # a fork that writes a token of its own, then is dropped
            model(**inputs | {"past_key_values": cache.fork()})
        return (model if turns % 3 == 0 else compiled)(**inputs)

    tokens = decode(model, step, cache, batch, 20)
    expected = models.generate(model, batch, models.dynamic().new(model), max_new_tokens=20, eos_token_id=None).tokens[
        0
    ][:, models.PROMPT :]
    assert torch.equal(tokens, expected)


def test_steps_that_guard_tensors_alone() -> None:
    """docs/transformers.md: a decode loop needs no other guards; crops, reorders, resets and other caches are seen."""
    model, batch, graphs = models.tiny("llama"), models.prompts([models.PROMPT, 5]), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    options: Any = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
    compiled: Any = torch.compile(model.forward, fullgraph=True, backend=backend, options=options)
    swap = torch.tensor([1, 0])

    def step(past_key_values: PagedKVCache, input_ids: Tensor, position_ids: Tensor, **inputs: Any) -> Any:
        past_key_values.reorder_cache(swap)
        swapped = {"input_ids": input_ids[swap], "position_ids": position_ids[swap]}
        logits = compiled(**swapped, past_key_values=past_key_values, **inputs).logits
        past_key_values.crop(-1)
        past_key_values.reorder_cache(swap)
        out = compiled(input_ids=input_ids, position_ids=position_ids, past_key_values=past_key_values, **inputs)
        torch.testing.assert_close(out.logits, logits[swap])
        return out

    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**batch, **settings)[:, models.PROMPT :]
    cache = PagedKVCache(model.config, block_size=4, num_blocks=120)
    for _ in range(2):
        assert torch.equal(decode(model, step, cache, batch, 24), expected)
        cache.reset()
    assert len(graphs) == 1
    another = PagedKVCache(model.config, block_size=8, num_blocks=60)
    assert torch.equal(decode(model, step, another, batch, 24), expected)
    assert len(graphs) == 2
    another.check()


def test_a_compiled_step_that_runs_out_of_blocks_raises() -> None:
    model = models.tiny("llama")
    step: Any = torch.compile(model.forward, fullgraph=True, backend="eager")
    cache = PagedKVCache(model.config, block_size=4, num_blocks=5)
    with pytest.raises((RuntimeError, ValueError), match=r"out of blocks|block_table"):
        decode(model, step, cache, models.prompts([models.PROMPT]), 20)  # 13 + 19 tokens, room for 20
    cache.reset()
    assert cache.pool.num_free == cache.pool.num_blocks == 5


@pytest.mark.skipif(models.RELEASE.major < 5, reason="sized caches are offered for compilation from Transformers 5 on")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_compiles_its_decode_steps_once(family: str) -> None:
    """As Transformers does it by itself for a cache that says it can be compiled; padded, over many block edges."""
    model, batch = models.tiny(family), models.prompts([models.PROMPT, 5])
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    graphs, compiled = models.counting_compiler()
    expected = model.generate(**batch, **settings)
    cache = PagedKVCache(model.config, block_size=3, num_tokens=400)
    assert torch.equal(model.generate(**batch, **settings, past_key_values=cache, compile_config=compiled), expected)
    assert len(graphs) == 1
    cache.check()
    cache.reset()
    assert cache.pool.num_free == cache.pool.num_blocks


@pytest.mark.skipif(models.RELEASE.major < 5, reason="sized caches are offered for compilation from Transformers 5 on")
def test_the_host_raises_before_a_compiled_step_runs_out() -> None:
    model, batch = models.tiny("llama"), models.prompts([9])
    cache = PagedKVCache(model.config, block_size=4, num_blocks=5)
    _, compiled = models.counting_compiler()
    with pytest.raises(OutOfBlocksError, match="wanted 1, free 0"):
        model.generate(**batch, max_new_tokens=30, eos_token_id=None, past_key_values=cache, compile_config=compiled)
    assert cache.seq_lens() == [20]
    cache.check()
    cache.reset()
    assert cache.pool.num_free == 5


def test_layers_compute_nothing_of_the_step_again() -> None:
    """What the layers share comes from the first of them, or from buffers: a layer's share of the graph makes no index.

    Inductor computes an arange anew for each op that reads it, on a GPU in a kernel of its own.
    """
    model, batch, graphs = models.tiny("llama"), models.prompts([models.PROMPT, 5]), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    step: Any = torch.compile(model.forward, fullgraph=True, backend=backend)
    cache = PagedKVCache(model.config, block_size=4, num_blocks=120)
    decode(model, step, cache, batch, 3)
    attentions = [node for node in graphs[0].graph.nodes if "paged_attention" in str(node.target)]
    assert len(attentions) == model.config.num_hidden_layers
    assert {node.args[5].op for node in attentions} == {"placeholder"}  # cu_seqlens_q
    assert len({node.args[3:6] for node in attentions}) == 1  # table, lengths and spans of all layers


def test_one_graph_for_lengths_1_to_2048_and_after_reorders() -> None:
    """Three rows, fed token by token; beams change places on the way, also twice from one row, and between blocks."""
    model, length = models.tiny("llama"), 2048
    history = torch.randint(3, models.VOCAB - 1, (3, length), generator=torch.Generator().manual_seed(1))
    reorders = {2: [1, 2, 0], 15: [0, 0, 2], 16: [2, 1, 1], 700: [1, 0, 2], 1025: [2, 0, 1]}
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    step: Any = torch.compile(model.forward, fullgraph=True, backend=backend)
    cache = PagedKVCache(model.config, num_tokens=3 * (length + 16))
    model(history[:, :1], past_key_values=cache)
    for seen in range(1, length):
        if seen in reorders:
            order = torch.tensor(reorders[seen])
            cache.reorder_cache(order)
            history[:, :seen] = history[order, :seen]
        position = torch.full((3, 1), seen)
        logits = decode_step(step, cache, history[:, seen : seen + 1], position, seen)
        if seen in {1, 2, 3, 15, 16, 17, 31, 32, 255, 256, 701, 1024, 1026, length - 1}:
            expected = model(history[:, : seen + 1]).logits[:, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    assert not counters["graph_break"]
    assert cache.seq_lens() == [length] * 3
    cache.check()
