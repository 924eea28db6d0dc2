"""Sequences saved to safetensors files, and loaded into whatever blocks are free."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from torch_paged_kv import OutOfBlocksError, PagedKVCache, StaticScales, files
from torch_paged_kv.cache import PagedKVCache as CoreCache
from torch_paged_kv.files import load, save
from torch_paged_kv.storage import KVPool

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated"),  # its name in every release but one
]

BLOCK = 4


def core_cache(device: torch.device | str = "cpu", length: int = 33, num_seqs: int = 1, **arguments: Any) -> CoreCache:
    """Two layers, the second of other sizes and with a window; `length` tokens written."""
    cache = CoreCache(arguments.pop("windows", [None, 8]), block_size=BLOCK, **arguments)
    write(cache, length, num_seqs, device)
    return cache


def write(cache: CoreCache, length: int, num_seqs: int = 1, device: torch.device | str = "cpu") -> None:
    for layer, (heads, size) in enumerate([(2, 8), (1, 16)]):
        states = torch.randn(num_seqs, heads, length, size, device=device)
        cache.write(layer, states, states[..., : size // 2])


def held(cache: CoreCache) -> list[Tensor]:
    return [tensor for layer in range(2) for tensor in cache.gather(layer)]


def state(pool: KVPool) -> dict[str, bytes]:
    """Every byte of a pool; memory that was never written may be NaN."""
    return {name: buffer.contiguous().cpu().numpy().tobytes() for name, buffer in pool.named_buffers()}


def assert_equal(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_nine_blocks_into_every_other_one(tmp_path: Path, device: torch.device) -> None:
    cache = core_cache(device, windows=[None, None])
    before = held(cache)
    save(cache, tmp_path / "kv.safetensors")
    gone = core_cache(device, BLOCK, windows=[None, None], num_blocks=18)
    stays = CoreCache([None, None], pool=gone.pool)
    write(stays, BLOCK, device=device)
    for _ in range(8):
        write(gone, BLOCK, device=device)
        write(stays, BLOCK, device=device)
    kept = held(stays)
    gone.reset()  # now every other block is free
    other = CoreCache([None, None], pool=stays.pool)
    load(other, tmp_path / "kv.safetensors")
    assert sorted(other.table().flatten().tolist()) == list(range(0, 18, 2))
    assert_equal(held(other), before)
    assert_equal(held(stays), kept)
    other.pool.check(*other.tables(), *stays.tables())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", None), ("gemma3", None), ("gpt_oss", None)]
    + [("llama", dtype) for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)],
)
def test_what_goes_on_is_what_went_on(family: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """A left-padded batch: saved after its prompt, loaded in a fresh cache, continued."""
    model, batch = models.tiny(family), models.prompts([13, 5])
    cache = PagedKVCache(model.config, block_size=BLOCK, dtype=dtype)
    position_ids = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    model(**batch, position_ids=position_ids, past_key_values=cache)
    save(cache, tmp_path / "kv.safetensors", input_ids=batch["input_ids"])
    fresh = PagedKVCache(model.config, block_size=BLOCK, dtype=dtype)
    load(fresh, tmp_path / "kv.safetensors", input_ids=batch["input_ids"])
    longer = models.extend(batch["input_ids"], batch["attention_mask"], models.prompts([3, 3], seed=8)["input_ids"])
    models.assert_same(models.generate(model, longer, fresh), models.generate(model, longer, cache), rtol=0)
    fresh.check()
    if dtype is not None and dtype.itemsize == 1:
        names = load_file(tmp_path / "kv.safetensors").keys()
        assert {"layers.0.key_scale", "layers.2.value_scale"} <= names
        with pytest.raises(ValueError, match="the cache must be made with dtype=torch"):
            load(PagedKVCache(model.config, block_size=BLOCK), tmp_path / "kv.safetensors")


def test_fixed_scales_must_be_those_of_the_cache(tmp_path: Path) -> None:
    def fixed(scale: float) -> CoreCache:
        scales = StaticScales(torch.int8, [torch.tensor(scale)] * 2, [torch.tensor(scale)] * 2)
        return CoreCache([None, 8], block_size=BLOCK, dtype=torch.int8, scales=scales)

    cache = fixed(0.05)
    write(cache, 9)
    save(cache, tmp_path / "kv.safetensors")
    other = fixed(0.05)
    load(other, tmp_path / "kv.safetensors")
    assert_equal(held(other), held(cache))
    with pytest.raises(ValueError, match=r"layers\.0\.key_scale must be the scales of the cache, got others"):
        load(fixed(0.06), tmp_path / "kv.safetensors")


def test_the_file_can_be_read_by_others(tmp_path: Path) -> None:
    cache = core_cache()
    size = save(cache, tmp_path / "kv.safetensors", input_ids=torch.arange(33)[None])
    with safe_open(tmp_path / "kv.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert size == (tmp_path / "kv.safetensors").stat().st_size
    assert json.loads(metadata["shapes"]) == [[0, 2, 8, 4], [1, 1, 16, 8]]
    assert json.loads(metadata["windows"]) == [None, 8]
    assert (metadata["block_size"], metadata["dtype"]) == ("4", "float32")
    tensors = load_file(tmp_path / "kv.safetensors")
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "block_table": [2, 1, 9],
        "real": [1, 33],
        "layers.0.key": [9, 4, 2, 8],
        "layers.0.value": [9, 4, 2, 4],
        "layers.1.key": [9, 4, 1, 16],
        "layers.1.value": [9, 4, 1, 8],
    }
    assert list(tmp_path.iterdir()) == [tmp_path / "kv.safetensors"]


def test_nothing_of_others_is_written_down(tmp_path: Path) -> None:
    """The rest of a last block may hold what another sequence left there."""
    cache = core_cache(length=6, num_blocks=8)
    for layer in range(2):
        for tensor in cache.caches(layer)[:2]:
            tensor[cache.table()[layer, 0, 1].long(), 2:] = 4711.0
    save(cache, tmp_path / "kv.safetensors")
    tensors = load_file(tmp_path / "kv.safetensors")
    assert not any((tensor == 4711.0).any() for tensor in tensors.values())
    assert (tensors["layers.0.key"][1, 2:] == 0).all()


def test_rows_share_blocks_in_the_file_too(tmp_path: Path) -> None:
    cache = core_cache(length=10, windows=[None, None])
    cache.reorder(torch.tensor([0, 0, 0]))
    write(cache, 1, num_seqs=3)
    save(cache, tmp_path / "kv.safetensors")
    other = CoreCache([None, None], block_size=BLOCK)
    load(other, tmp_path / "kv.safetensors")
    assert_equal(held(other), held(cache))
    assert len(set(other.table()[0].flatten().tolist())) == 2 + 3
    other.check()
    write(other, 1, num_seqs=3)  # into blocks of their own
    other.check()


def test_single_rows(tmp_path: Path) -> None:
    cache = core_cache(length=9, num_seqs=3)
    save(cache, tmp_path / "kv.safetensors", rows=[2, 0])
    other = CoreCache([None, 8], block_size=BLOCK)
    load(other, tmp_path / "kv.safetensors")
    assert_equal(held(other), [tensor[[2, 0]] for tensor in held(cache)])


def test_a_row_that_is_shorter_than_those_left_out(tmp_path: Path) -> None:
    """Its table in the file has the columns that it needs, which load insists on."""
    cache = core_cache(length=2 * BLOCK, num_seqs=2)
    cache.pad(torch.tensor([[True] * 13, [True] * 8 + [False] * 5]), 5)
    write(cache, 5, num_seqs=2)
    before = held(cache)
    save(cache, tmp_path / "kv.safetensors", rows=[1])
    assert load_file(tmp_path / "kv.safetensors")["block_table"].shape == (2, 1, 2)
    other = CoreCache([None, 8], block_size=BLOCK)
    load(other, tmp_path / "kv.safetensors")
    assert other.seq_lens() == [8]
    assert_equal(held(other), [tensor[[1]] for tensor in before])
    other.check()


def test_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows must name at least one row, got \[\]"):
        save(core_cache(num_seqs=2), tmp_path / "kv.safetensors", rows=[])
    assert list(tmp_path.iterdir()) == []


def test_blocks_behind_a_window_are_not_saved(tmp_path: Path) -> None:
    cache = core_cache(length=30)
    write(cache, 1)
    save(cache, tmp_path / "kv.safetensors")
    assert load_file(tmp_path / "kv.safetensors")["layers.1.key"].shape[0] == 3
    other = CoreCache([None, 8], block_size=BLOCK, num_blocks=8 + 3)
    load(other, tmp_path / "kv.safetensors")
    assert_equal(held(other), held(cache))


def test_an_empty_cache(tmp_path: Path) -> None:
    cache = core_cache()
    cache.reset()
    save(cache, tmp_path / "kv.safetensors")
    other = core_cache()
    other.reset()
    load(other, tmp_path / "kv.safetensors")
    assert (other.seen, other.seq_lens()) == (0, [0])


def changed(path: Path, metadata: dict[str, str] | None = None, **tensors: Tensor) -> None:
    """Rewrite a file with something changed, and a digest that fits."""
    with safe_open(path, framework="pt") as file:
        old = file.metadata()
    new = load_file(path) | tensors
    save_file(new, path, old | {"digest": files._digest(new)} | (metadata or {}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


BAD = {
    "truncated": (truncate, "path must be a whole safetensors file"),
    "empty": (lambda path: path.write_bytes(b""), "path must be a whole safetensors file"),
    "text": (lambda path: path.write_text("what else " * 9), "path must be a whole safetensors file"),
    "one bit": (flip, "path must be an undamaged file"),
    "another program's": (lambda path: save_file({"x": torch.zeros(1)}, path), "path must be a file that save wrote"),
    "block size": (lambda path: changed(path, {"block_size": "8"}), "block_size of the file must be .* 4, got 8"),
    "windows": (lambda path: changed(path, {"windows": "[null, null]"}), "windows of the file must be"),
    "dtype": (lambda path: changed(path, {"dtype": "float16"}), "dtype of the file must be that of the cache"),
    "D": (lambda path: changed(path, {"shapes": "[[0, 2, 16, 4], [1, 1, 16, 8]]"}), "layer 0 of the file must be"),
    "heads": (lambda path: changed(path, {"shapes": "[[0, 4, 4, 4], [1, 1, 16, 8]]"}), "layer 0 of the file must be"),
    "block table": (
        lambda path: changed(path, block_table=torch.full((2, 1, 9), 10**6, dtype=torch.int32)),
        "block_table of the file must number",
    ),
    "negative block": (
        lambda path: changed(path, block_table=torch.full((2, 1, 9), -2, dtype=torch.int32)),
        "block_table of the file must number",
    ),
    "groups": (
        lambda path: changed(path, block_table=torch.zeros(1, 1, 9, dtype=torch.int32)),
        "block_table of the file must be",
    ),
    "stored dtype": (
        lambda path: changed(path, **{"layers.1.key": torch.zeros(9, 4, 1, 16, dtype=torch.float16)}),
        "dtype of layers.1.key of the file must be",
    ),
    "stored shape": (
        lambda path: changed(path, **{"layers.1.key": torch.zeros(8, 4, 1, 16)}),
        "shape of layers.1.key of the file must be",
    ),
    "more": (lambda path: changed(path, more=torch.zeros(1)), "tensors of the file must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_changes_nothing(name: str, tmp_path: Path) -> None:
    spoil, message = BAD[name]
    path = tmp_path / "kv.safetensors"
    cache = core_cache(num_blocks=40)
    save(cache, path)
    spoil(path)
    other = CoreCache(cache.windows, pool=cache.pool)
    before = state(cache.pool)
    for target in (other, cache.fork()):
        if target is not other:
            target.reset()
        with pytest.raises(ValueError, match=message):
            load(target, path)
    assert state(cache.pool) == before
    assert other.seen == 0
    fresh = CoreCache([None, 8], block_size=BLOCK, dtype=torch.float32)
    with pytest.raises(ValueError):  # noqa: PT011  (each has its own message)
        load(fresh, path)
    assert not fresh.has_pool


def test_too_few_blocks_change_nothing(tmp_path: Path) -> None:
    cache = core_cache(num_blocks=20)
    save(cache, tmp_path / "kv.safetensors")
    before = state(cache.pool)
    other = CoreCache(cache.windows, pool=cache.pool)
    with pytest.raises(OutOfBlocksError) as raised:
        load(other, tmp_path / "kv.safetensors")
    assert (raised.value.wanted, raised.value.free) == (18, 2)
    assert state(cache.pool) == before
    cache.reset()
    load(other, tmp_path / "kv.safetensors")


def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    cache, path = core_cache(), tmp_path / "kv.safetensors"
    save(cache, path, input_ids=torch.arange(33)[None])
    with pytest.raises(ValueError, match="the cache must be empty, got 33 positions"):
        load(cache, path)
    other = CoreCache([None, 8], block_size=BLOCK)
    with pytest.raises(ValueError, match="input_ids must be the tokens that the file was made from"):
        load(other, path, input_ids=torch.arange(1, 34)[None])
    with pytest.raises(ValueError, match=r"input_ids must have the shape \[1, 33\], got \[1, 32\]"):
        load(other, path, input_ids=torch.arange(32)[None])
    with pytest.raises(ValueError, match=r"input_ids must have the shape \[1, 33\], got \[1, 32\]"):
        save(cache, path, input_ids=torch.arange(32)[None])
    states = torch.randn(1, 2, 1, 8)
    cache.write(0, states, states[..., :4])
    with pytest.raises(ValueError, match="the cache must be between two steps: every layer written"):
        save(cache, path)
    with pytest.raises(FileNotFoundError):
        load(other, tmp_path / "none")


def test_a_failing_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, path = core_cache(), tmp_path / "kv.safetensors"
    save(cache, path)
    before = path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        save(copy.deepcopy(cache), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_long_work_shows_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    cache = core_cache()
    monkeypatch.setattr(files, "SHOWN_FROM", 0)
    save(cache, tmp_path / "kv.safetensors")
    load(CoreCache([None, 8], block_size=BLOCK), tmp_path / "kv.safetensors")
    shown = capsys.readouterr().err
    assert "saving: 100%" in shown
    assert "loading: 100%" in shown
