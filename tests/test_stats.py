"""Monitor, Prometheus' text, pictures, estimate, and the commands that print them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import models
import prometheus_client
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from torch_paged_kv import PagedKVCache, PrefixCache, __main__, _models, commands, estimate
from torch_paged_kv.cache import PagedKVCache as CoreCache
from torch_paged_kv.offload import HostTier
from torch_paged_kv.plots import block_map, usage
from torch_paged_kv.stats import Monitor

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]

BLOCK = 4


def write(cache: CoreCache, length: int, num_seqs: int = 1) -> None:
    states = torch.randn(num_seqs, 1, length, 8)
    cache.write(0, states, states)


class Scene:
    """Two sequences that share two blocks, one of which was forked; a block that is only cached; one swapped out."""

    def __init__(self) -> None:
        self.prefix_cache = PrefixCache()
        self.first = CoreCache([None], block_size=BLOCK, num_blocks=12)
        write(self.first, 10)  # blocks 0, 1, 2
        self.prefix_cache.register(self.first, torch.arange(10)[None])
        self.second = CoreCache([None], pool=self.first.pool)
        self.prefix_cache.attach(self.second, torch.arange(9)[None])
        write(self.second, 1)  # block 3
        gone = CoreCache([None], pool=self.first.pool)
        write(gone, 7)  # blocks 4, 5
        self.prefix_cache.register(gone, torch.arange(50, 57)[None])
        self.tier = HostTier(self.first.pool, 8)
        self.swapped = self.tier.swap_out(gone)
        self.monitor = Monitor(self.first, self.second, prefix_cache=self.prefix_cache, tier=self.tier)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_exact_numbers(scene: Scene) -> None:
    block_bytes = scene.first.pool.block_bytes
    assert scene.monitor.read() == {
        "blocks_total": 12,
        "blocks_free": 7,
        "blocks_live": 4,
        "blocks_shared": 2,
        "blocks_cached": 3,
        "blocks_evictable": 1,
        "blocks_leaving": 0,
        "bytes_total": 12 * block_bytes,
        "bytes_held": 5 * block_bytes,
        "tokens": 19,
        "sequences": 2,
        "slots_wasted": 2 + 3,
        "utilisation": 11 / 16,
        "prefix_queries": 1,
        "prefix_query_tokens": 9,
        "prefix_hits": 1,
        "prefix_hit_tokens": 8,
        "prefix_evictions": 0,
        "prefix_registered": 3,
        "prefix_smallest": 4,
        "prefix_tokens": 12,
        "host_blocks": 8,
        "host_free_blocks": 6,
        "host_bytes": 8 * block_bytes,
        "swapped_out_bytes": 2 * block_bytes,
        "swapped_in_bytes": 0,
        "swap_seconds": 0.0,
    }


def test_who_holds_which_block(scene: Scene) -> None:
    states = scene.monitor.blocks()
    assert [state.kind for state in states[:6]] == [
        "shared",
        "shared",
        "one sequence",
        "one sequence",
        "cached",
        "free",
    ]
    assert [state.owners for state in states[:4]] == [("0.0", "1.0"), ("0.0", "1.0"), ("0.0",), ("1.0",)]
    assert [state.filled for state in states[:6]] == [4, 4, 2, 1, 4, 0]
    assert [state.cached for state in states[:6]] == [True, True, False, False, True, False]


def test_check_finds_what_is_not_accounted_for(scene: Scene) -> None:
    scene.monitor.check()
    with pytest.raises(RuntimeError, match="block 0 is held by 1 table entries, but its reference count is 3"):
        Monitor(prefix_cache=scene.prefix_cache).check()
    assert Monitor(prefix_cache=scene.prefix_cache).blocks()[3].kind == "other"
    del scene.second  # gone: not watched, and its blocks go back
    gc.collect()
    scene.monitor.check()
    assert scene.monitor.read()["sequences"] == 1


def test_numbers_of_windows_and_rows() -> None:
    cache = CoreCache([None, 4], block_size=BLOCK)
    for layer in range(2):
        cache.write(layer, torch.randn(2, 1, 13, 8), torch.randn(2, 1, 13, 8))
    for layer in range(2):
        cache.write(layer, torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 8))
    monitor = Monitor(cache)
    numbers = monitor.read()
    assert numbers["blocks_live"] == int((cache.table() >= 0).sum()) == 2 * (4 + 2)
    assert (numbers["tokens"], numbers["sequences"], numbers["slots_wasted"]) == (28, 2, 4 * 2)
    monitor.check()


def test_a_monitor_needs_a_pool() -> None:
    with pytest.raises(ValueError, match="a monitor must be given a cache or prefix cache that has a pool"):
        Monitor(CoreCache([None])).read()
    strangers = [CoreCache([None]) for _ in range(2)]
    for cache in strangers:
        write(cache, 1)
    with pytest.raises(ValueError, match="the caches of a monitor must be of one pool"):
        Monitor(*strangers).read()


def test_prometheus(scene: Scene) -> None:
    write(scene.first, 1)
    scene.prefix_cache.attach(CoreCache([None], pool=scene.first.pool), torch.arange(70, 79)[None])
    families = {family.name: family for family in text_string_to_metric_families(scene.monitor.prometheus())}
    assert families["paged_kv_blocks_free"].type == "gauge"
    assert families["paged_kv_blocks_free"].samples[0].value == 7
    assert families["paged_kv_prefix_hit_tokens"].type == "counter"
    assert families["paged_kv_prefix_hit_tokens"].samples[0].value == 8
    misses = families["paged_kv_prefix_misses"].samples
    assert [(sample.labels["reason"], sample.value) for sample in misses] == [("its first block is not known", 1)]
    registry = prometheus_client.CollectorRegistry()
    registry.register(scene.monitor)
    assert registry.get_sample_value("paged_kv_tokens") == 20


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def test_block_map(scene: Scene, tmp_path: Path) -> None:
    figure = block_map(scene.monitor)
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.texts] == ["0.0 +1", "0.0 +1", "0.0", "1.0"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend[:4] == ["7 free", "2 one sequence", "2 several sequences", "1 prefix cache alone"]
    assert len(axes.patches) == 12 + 3 + 2  # squares, corners, empty parts
    figure.savefig(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_usage_over_time(scene: Scene, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="history must hold a sample"):
        usage(scene.monitor)
    for _ in range(3):
        scene.monitor.sample()
        write(scene.first, 4)
    figure = usage(scene.monitor)
    left, right = figure.axes
    assert list(left.lines[0].get_ydata()) == [12, 12, 12]
    assert list(right.lines[0].get_ydata()) == [8, 8, 8]
    assert [sample.numbers["blocks_live"] for sample in scene.monitor.history] == [4, 5, 6]
    figure.savefig(tmp_path / "usage.png")
    assert (tmp_path / "usage.png").stat().st_size > 1000


# ---------------------------------------------------------------------------------------------------------------------
# Estimates and commands


@pytest.mark.parametrize("size", [{"num_tokens": 100}, {"bytes": 200_000}])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(name, torch.float32) for name in ("llama", "gemma3", "gpt2", "mistral", "gpt_oss", "phi3", "falcon")]
    + [("llama", torch.int8), ("gemma3", torch.bfloat16)],
)
def test_an_estimate_is_what_is_taken(family: str, size: dict[str, int], dtype: torch.dtype) -> None:
    model = models.tiny(family)
    guess = estimate(model.config, **size, block_size=BLOCK, dtype=dtype)
    cache = PagedKVCache(model.config, **size, block_size=BLOCK, dtype=dtype)
    model(**models.prompts([5]), past_key_values=cache)
    stats = cache.stats()
    assert (guess.num_blocks, guess.bytes) == (stats["num_blocks"], stats["bytes_total"])
    assert guess.bytes_per_token * BLOCK == guess.block_bytes * guess.num_groups


def test_what_cannot_be_estimated() -> None:
    config = models.tiny("llama").config
    for sizes in ({}, {"num_tokens": 1, "bytes": 1}):
        with pytest.raises(ValueError, match="one of num_tokens and bytes must be given"):
            estimate(config, **sizes)
    with pytest.raises(ValueError, match="bytes must make at least one block"):
        estimate(config, bytes=10)
    with pytest.raises(ValueError, match="got deepseek_v3 with latent ones"):
        estimate(models.tiny("deepseek_v3").config, num_tokens=1)


needs_smollm2 = pytest.mark.skipif(not _models.available("smollm2"), reason="the packages of smollm2 are not installed")


@needs_smollm2
def test_the_estimate_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["estimate", "smollm2", "--tokens", "1000", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == "1000 tokens: 63 blocks of 737280 bytes, 44.3 MiB, 46080 bytes a token\n"
    assert __main__.main(["estimate", "smollm2", "--gib", "1"]) == 0
    assert "1023.8 MiB" in capsys.readouterr().out


@needs_smollm2
def test_the_plot_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["plot", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"block_map.png", "usage.png"}
    assert "block_map.png" in capsys.readouterr().out


@needs_smollm2
def test_the_bench_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    computed: list[int] = []
    original = commands._generate

    def generate(model: Any, batch: dict[str, Any], cache: Any, new_tokens: int, **more: Any) -> Any:
        before = 0 if cache.prefix_cache is None else cache.prefix_cache.stats()["hit_tokens"]
        tokens = original(model, batch, cache, new_tokens, **more)
        after = 0 if cache.prefix_cache is None else cache.prefix_cache.stats()["hit_tokens"]
        computed.append(batch["input_ids"].shape[1] - (after - before))
        return tokens

    monkeypatch.setattr(commands, "_generate", generate)
    assert __main__.main(["bench", "--prompt-tokens", "64", "--new-part", "8", "--runs", "2"]) == 0
    assert "beginning cached" in capsys.readouterr().out
    assert computed == [64, *[72, 8, 8] * 2]
