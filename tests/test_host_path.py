"""What an eager decode step asks of the dispatcher: each call costs the host about a microsecond in every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import models
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torch_paged_kv import PagedKVCache, ops

pytestmark = [
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),
    pytest.mark.skipif(not models.goes_direct("llama"), reason="this release's models gather"),
]


class Recorder(TorchDispatchMode):
    """Names of the ops that reach a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def layer_step(model: Any, cache: PagedKVCache, layer: int) -> Callable[[], Tensor]:
    """`update` and the attention function of a layer, with states as a projection's view has them."""
    config = model.config
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    query, key, value = (torch.randn(2, 1, n, size).transpose(1, 2) for n in (heads, kv_heads, kv_heads))
    module = model.model.layers[layer].self_attn

    name, functions = config._attn_implementation, ALL_ATTENTION_FUNCTIONS

    def step() -> Tensor:
        keys, values = cache.update(key, value, layer)
        attend = functions[name] if models.RELEASE.major < 5 else functions.get_interface(name, None)
        out: Tensor = attend(module, query, keys, values, None, dropout=0.0, scaling=size**-0.5)[0]
        return out

    return step


@torch.no_grad()
def test_a_layer_stores_and_attends_and_nothing_else() -> None:
    model = models.tiny("llama")
    cache = PagedKVCache(model.config)
    model(**models.prompts([models.PROMPT] * 2), past_key_values=cache)
    layer_step(model, cache, 0)()  # begins the step
    layer_step(model, cache, 1)()
    with Recorder() as recorder:
        layer_step(model, cache, 2)()
    *states, alias, store, attend = [name for name in recorder.names if "randn" not in name]
    assert {"aten.transpose.int"} == set(states)  # those of layer_step itself
    assert alias == "aten.detach.default"  # carries the handle to the attention function
    assert store == "paged_kv.reshape_and_cache.default"
    assert attend == "paged_kv.paged_attention.default"


@torch.no_grad()
@pytest.mark.parametrize(("family", "releases"), [("llama", False), ("gemma3", True)])
def test_only_windows_ask_the_allocator_to_release(family: str, releases: bool) -> None:
    model = models.tiny(family)
    cache = PagedKVCache(model.config)
    with mock.patch.object(ops, "allocate", wraps=ops.allocate) as allocate:
        model(**models.prompts([models.PROMPT]), past_key_values=cache)
    (call,) = allocate.call_args_list
    assert (call.kwargs["retain"] is not None) == releases


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_results_have_the_shapes_of_prompt_and_step(family: str) -> None:
    """[num_seqs, length, num_heads, head_size_v], contiguous, whatever the length."""
    model = models.tiny(family)
    cache = PagedKVCache(model.config)
    shapes = []
    attend = PagedKVCache.attend

    def recorded(*args: Any, **options: Any) -> Tensor:
        out = attend(*args, **options)
        shapes.append((tuple(out.shape), out.is_contiguous()))
        return out

    with mock.patch.object(PagedKVCache, "attend", recorded):
        for length in (models.PROMPT, 1, 2):
            model(torch.ones(2, length, dtype=torch.int64), past_key_values=cache)
    layers, heads, size = len(cache.layers), model.config.num_attention_heads, model.config.head_dim
    assert shapes == [((2, n, heads, size), True) for n in (models.PROMPT, 1, 2) for _ in range(layers)]
