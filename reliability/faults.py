"""Faults put in on purpose: no blocks at each step, an exception in each layer of each step, a kill at any moment.

After each of them nothing may be lost or half done, and work must go on to the result of a run without the fault.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from reliability.report import ROOT, Result, Settings, command
from torch_paged_kv import OutOfBlocksError, PrefixCache, ops
from torch_paged_kv.cache import PagedKVCache
from torch_paged_kv.files import load, save
from torch_paged_kv.offload import HostTier
from torch_paged_kv.storage import KVPool

BLOCK, NUM_BLOCKS, WINDOW = 3, 64, 5
PROMPT, DECODE_STEPS, NEW_TOKENS = 10, 12, 8
KILLS = 60


def run(settings: Settings) -> Result:
    """All three kinds."""
    result = Result("faults")
    out_of_blocks(settings, result)
    pools_too_small(settings, result)
    exceptions_in_generate(settings, result)
    kills_during_save(settings, result)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# No blocks at a step


@dataclass
class Steps:
    """A way to use a cache: `todo` are steps in turn, each a call that is repeated if it found no blocks."""

    pool: KVPool
    caches: list[PagedKVCache]  # that the steps use; some are filled by them
    todo: Iterator[tuple[str, Callable[[], object]]]
    holders: Callable[[], list[tuple[Tensor, Tensor]]] = list  # of blocks, beside the caches


def states(num_seqs: int, length: int, first: int, device: str) -> Tensor:
    """float32 [num_seqs, 1, length, 1]: every key is a number of its own."""
    rows = torch.arange(num_seqs, dtype=torch.float32, device=device)[:, None] * 1000
    return (rows + torch.arange(first, first + length, device=device))[:, None, :, None]


def write(cache: PagedKVCache, keys: Tensor) -> None:
    for layer in range(2):
        cache.write(layer, keys, keys)


def new_cache(pool: KVPool | None = None, **arguments: Any) -> PagedKVCache:
    """Two layers, the second with a window."""
    size = {"block_size": BLOCK, "num_blocks": NUM_BLOCKS} if pool is None else {"pool": pool}
    return PagedKVCache([None, WINDOW], **size, **arguments)


def new_pool(device: str, **arguments: Any) -> KVPool:
    cache = new_cache(**arguments)
    write(cache, states(1, 1, 0, device))
    cache.reset()
    return cache.pool


def decode(cache: PagedKVCache, num_seqs: int, first: int, device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    for step in range(DECODE_STEPS):
        yield "decode", lambda step=step: write(cache, states(num_seqs, 1, first + step, device))  # type: ignore[misc]


def prompt_and_tokens(pool: KVPool, first: int, device: str) -> Steps:
    """Two rows: a prompt of keys from ``first`` on, and a token at a time."""
    cache = new_cache(pool)

    def todo() -> Iterator[tuple[str, Callable[[], object]]]:
        yield "prompt", lambda: write(cache, states(2, PROMPT, first, device))
        yield from decode(cache, 2, PROMPT, device)

    return Steps(pool, [cache], todo())


def plain(device: str) -> Steps:
    """A prompt and a token at a time, two rows."""
    return prompt_and_tokens(new_pool(device), 0, device)


def eight_bit(device: str) -> Steps:
    """The same in a cache of 8 bits with scales per slot."""
    return prompt_and_tokens(new_pool(device, dtype=torch.int8), 1, device)


def padded(device: str) -> Steps:
    """Left-padded rows: the mask is said again with each attempt."""
    pool = new_pool(device)
    cache = new_cache(pool)
    mask = torch.ones(3, PROMPT, dtype=torch.bool, device=device)
    mask[1, :4] = mask[2, :9] = False

    def prompt() -> None:
        cache.pad(mask, PROMPT)
        write(cache, states(3, PROMPT, 0, device))

    def todo() -> Iterator[tuple[str, Callable[[], object]]]:
        yield "prompt", prompt
        yield from decode(cache, 3, PROMPT, device)

    return Steps(pool, [cache], todo())


def forked(device: str) -> Steps:
    """One prompt, and a fork that goes on with tokens of its own: its first step must copy."""
    pool = new_pool(device)
    cache = new_cache(pool)
    caches = [cache]

    def todo() -> Iterator[tuple[str, Callable[[], object]]]:
        yield "prompt", lambda: write(cache, states(1, PROMPT, 0, device))
        caches.append(cache.fork())
        yield from decode(caches[1], 1, 500, device)
        yield from decode(cache, 1, PROMPT, device)

    return Steps(pool, caches, todo())


def beams(device: str) -> Steps:
    """Rows that are reordered before every step."""
    pool = new_pool(device)
    cache = new_cache(pool)
    dice = random.Random(3)

    def todo() -> Iterator[tuple[str, Callable[[], object]]]:
        yield "prompt", lambda: write(cache, states(1, PROMPT, 0, device))
        cache.reorder(torch.zeros(3, dtype=torch.int64, device=device))
        for step in decode(cache, 3, PROMPT, device):
            cache.reorder(torch.tensor([dice.randrange(3) for _ in range(3)], device=device))
            yield step

    return Steps(pool, [cache], todo())


def prefix(device: str) -> Steps:
    """A prompt whose beginning another one left in a prefix cache."""
    pool = new_pool(device)
    first, cache, known = new_cache(pool), new_cache(pool), PrefixCache()
    prompt = torch.arange(PROMPT)[None]

    def todo() -> Iterator[tuple[str, Callable[[], object]]]:
        yield "first prompt", lambda: write(first, states(1, PROMPT, 0, device))
        known.register(first, prompt)
        longer = torch.cat([prompt, prompt + 100], 1)
        seen = known.attach(cache, longer)
        assert seen >= PROMPT // BLOCK * BLOCK
        yield "prompt", lambda: write(cache, states(1, 2 * PROMPT - seen, seen, device))
        known.register(cache, longer)
        yield from decode(cache, 1, 2 * PROMPT, device)

    return Steps(pool, [first, cache], todo(), lambda: [known.holdings()])


def swapped(device: str) -> Steps:
    """A sequence that is swapped out, and brought back when there are blocks."""
    pool = new_pool(device)
    cache, other, back = new_cache(pool), new_cache(pool), new_cache(pool)
    tier = HostTier(pool, 20)

    def todo() -> Iterator[tuple[str, Callable[[], object]]]:
        yield "prompt", lambda: write(cache, states(1, PROMPT, 0, device))
        waiting = tier.swap_out(cache)
        tier.synchronize()
        yield "other prompt", lambda: write(other, states(1, PROMPT, 300, device))
        yield "swap in", lambda: tier.swap_in(back, waiting)
        yield from decode(back, 1, PROMPT, device)

    return Steps(pool, [cache, other, back], todo(), lambda: [tier.holdings()])


def loaded(device: str) -> Steps:
    """A sequence that comes from a file."""
    pool = new_pool(device)
    source, cache = new_cache(pool), new_cache(pool)
    directory = tempfile.TemporaryDirectory()
    path = Path(directory.name) / "kv.safetensors"

    def todo() -> Iterator[tuple[str, Callable[[], object]]]:
        yield "prompt", lambda: write(source, states(2, PROMPT, 0, device))
        save(source, path)
        source.reset()
        yield "load", lambda: load(cache, path)
        directory.cleanup()
        yield from decode(cache, 2, PROMPT, device)

    return Steps(pool, [source, cache], todo())


USES: dict[str, Callable[[str], Steps]] = {
    use.__name__: use for use in (plain, eight_bit, padded, forked, beams, prefix, swapped, loaded)
}


def memory_of(pool: KVPool) -> list[Tensor]:
    """A copy of all that a pool holds, as bytes: what nobody has written yet may be NaN."""
    return [buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).clone() for buffer in pool.buffers()]


def everything(steps: Steps) -> list[Any]:
    """All bytes of the pool, and what the caches say they hold. Memory that was never written may be NaN."""
    memory = [part.tolist() for part in memory_of(steps.pool)]
    return [memory, [(cache.table().tolist(), cache.seq_lens(), cache.seen) for cache in steps.caches if cache.seen]]


def contents(steps: Steps) -> list[Tensor]:
    return [held for cache in steps.caches if cache.seen for layer in range(2) for held in cache.gather(layer)]


def takes_blocks(steps: Steps, step: Callable[[], object], result: Result, again: str, where: str) -> bool:
    """Make a step while somebody holds every free block. Whether it was refused; then nothing may have changed."""
    held = steps.pool.acquire(steps.pool.num_free)
    before = everything(steps)
    try:
        step()
    except OutOfBlocksError as error:
        if error.wanted <= error.free:  # free: what the step itself would have released from windows
            result.fault(where, f"the error must tell of fewer blocks than are wanted, got {error}", again)
        if everything(steps) != before:
            result.fault(where, "a step without blocks changed something", again)
        steps.pool.release(held)
        return True
    steps.pool.release(held)
    return False


def check_accounts(steps: Steps) -> None:
    tables = [table for cache in steps.caches for table in cache.tables()]
    steps.pool.check(*tables, *steps.holders())


def out_of_blocks(settings: Settings, result: Result) -> None:
    """Every step of every use finds no free block first; afterwards it is made with blocks."""
    again = command(settings, "faults")
    for name, use in USES.items():
        expected = use(settings.device)
        for _, step in expected.todo:
            step()

        def interrupted(name: str = name, use: Any = use, expected: Steps = expected) -> int:
            steps = use(settings.device)
            for number, (what, step) in enumerate(steps.todo):
                where = f"out of blocks, {name}, step {number} ({what})"
                result.counts["steps without blocks"] += 1
                if takes_blocks(steps, step, result, again, where):
                    result.counts[f"steps without blocks·refused, {name}"] += 1
                    check_accounts(steps)
                    step()
                check_accounts(steps)
            if not all(torch.equal(a, b) for a, b in zip(contents(steps), contents(expected), strict=True)):
                result.fault(f"out of blocks, {name}", "the end is not that of a run without faults", again)
            return lost_blocks(steps)

        result.guard(f"out of blocks, {name}", again, interrupted)


def lost_blocks(steps: Steps) -> int:
    """Blocks that are not free although every cache gave up what it held; known ones of a prefix cache aside."""
    for cache in steps.caches:
        cache.reset()
    held = sum(int((table >= 0).sum()) for table, _ in steps.holders())
    return steps.pool.num_blocks - steps.pool.num_free - held


# ---------------------------------------------------------------------------------------------------------------------
# Generate


def tiny_model(family: str, device: str) -> Any:
    import models

    return models.tiny(family).to(device)


def prompts(device: str) -> dict[str, Tensor]:
    import models

    return {name: tensor.to(device) for name, tensor in models.prompts([9, 5]).items()}


def generated(model: Any, batch: dict[str, Tensor], **settings: Any) -> Tensor:
    """Greedy tokens, none of which ends a row."""
    # On a GPU generate would compile the steps of a cache of given size, past hooks and mocks.
    fixed = {"do_sample": False, "eos_token_id": None, "disable_compile": True}
    settings = {"max_new_tokens": NEW_TOKENS} | fixed | settings
    tokens: Tensor = model.generate(**batch, **settings)
    return tokens


def pools_too_small(settings: Settings, result: Result) -> None:
    """`generate` finds every number of free blocks that is too small; then it goes on where it stopped, with more."""
    again = command(settings, "faults")
    for family in ("llama", "gemma3"):
        scene = Scene.of(family, settings.device)
        for num_free in range(1, 100):
            finished: list[bool] = []

            def too_few(scene: Scene = scene, num_free: int = num_free, finished: list[bool] = finished) -> int:
                stopped, lost = stop_and_go_on(scene, num_free)
                finished.append(not stopped)
                result.counts["generates without blocks"] += stopped
                return lost

            if not result.guard(f"generate with {num_free} free blocks, {family}", again, too_few) or finished[0]:
                break


def stop_and_go_on(scene: Scene, num_free: int) -> tuple[bool, int]:
    """A `generate` with so many free blocks. Whether it ran out of them, and how many were lost."""
    cache = scene.cache(num_blocks=60)
    scene.model(**scene.batch, past_key_values=cache)  # makes the pool
    cache.reset()
    pool = cache.pool
    held = pool.acquire(60 - num_free)
    row = (held[None, None], torch.tensor([len(held) * pool.block_size]))
    stopped = False
    try:
        scene.succeeds(past_key_values=cache)
    except OutOfBlocksError:
        stopped = True
        pool.check(row, *cache.tables())
        pool.release(held)
        length = scene.batch["input_ids"].shape[1]
        generated_before = cache.seen + 1 - length if cache.seen else 0  # the last one is not in the cache
        scene.goes_on(cache, generated_before)
    else:
        pool.release(held)
    cache.reset()
    return stopped, pool.num_blocks - pool.num_free


class Injected(Exception):
    """Raised by a layer."""


@contextmanager
def raising(model: Any, place: str, layer: int, step: int) -> Iterator[None]:
    """In a step, counted from 0, a layer raises when it is done, or instead of attending to what it has written."""
    layers = model.get_decoder().layers
    calls = [0]

    def count(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == (step + 1 if place == "end" else step * len(layers) + layer + 1):
            raise Injected
        return attention(*arguments, **named) if place == "attention" else None

    attention = ops.paged_attention
    if place == "attention":
        with mock.patch.object(ops, "paged_attention", count):
            yield
        return
    handle = layers[layer].register_forward_hook(count)
    try:
        yield
    finally:
        handle.remove()


@dataclass
class Scene:
    """A model, a batch of prompts, and what comes of them without a fault."""

    model: Any
    batch: dict[str, Tensor]
    expected: Tensor
    logits: Tensor
    config: dict[str, Any]
    attributes: set[str]

    @classmethod
    def of(cls, family: str, device: str) -> Scene:
        model, batch = tiny_model(family, device), prompts(device)
        expected, logits = generated(model, batch), model(**batch).logits
        return cls(model, batch, expected, logits, copy.deepcopy(model.config.to_dict()), set(vars(model)))

    def cache(self, **arguments: Any) -> Any:
        from torch_paged_kv import PagedKVCache as ModelCache

        return ModelCache(self.model.config, block_size=4, **arguments)

    def check(self) -> None:
        """The model is what it was."""
        assert torch.equal(self.model(**self.batch).logits, self.logits), "an ordinary forward is not what it was"
        assert self.model.config.to_dict() == self.config, "the config is not what it was"
        assert set(vars(self.model)) == self.attributes, "the model has other attributes"

    def fails(self, where: tuple[str, int, int], **arguments: Any) -> None:
        """A `generate` that ends with the injected exception."""
        try:
            with raising(self.model, *where):
                generated(self.model, self.batch, **arguments)
        except Injected:
            return
        raise AssertionError("the exception did not come out of generate")

    def goes_on(self, cache: Any, begun: int) -> None:
        """A `generate` from the prompts and so many tokens, on a cache that holds all of them but the last."""
        ids = self.expected[:, : self.batch["input_ids"].shape[1] + begun]
        mask = torch.nn.functional.pad(self.batch["attention_mask"], (0, begun), value=1)
        rest = {"input_ids": ids, "attention_mask": mask}
        tokens = generated(self.model, rest, past_key_values=cache, max_new_tokens=NEW_TOKENS - begun)
        assert torch.equal(tokens, self.expected), "other tokens from there on"

    def succeeds(self, **arguments: Any) -> None:
        assert torch.equal(generated(self.model, self.batch, **arguments), self.expected), "other tokens afterwards"


def exceptions_in_generate(settings: Settings, result: Result) -> None:
    """Layer after layer and step after step raises in `generate`."""
    again = command(settings, "faults")
    attempts = {"patched": under_a_patch, "cut": cut_and_go_on, "reset": reset_and_begin, "prefix": with_a_prefix}
    places: list[Any] = list(itertools.product(attempts, ("attention", "end"), range(3), range(NEW_TOKENS)))
    for family in ("llama", "gemma3"):
        scene = Scene.of(family, settings.device)
        chosen = random.Random(settings.seed).sample(places, min(len(places), settings.count(len(places))))
        for name, place, layer, step in chosen if settings.scale < 1 else places:

            def fail(scene: Scene = scene, name: str = name, where: Any = (place, layer, step)) -> int:
                lost: int = attempts[name](scene, where)
                scene.check()
                return lost

            result.counts["exceptions in generate"] += 1
            result.counts[f"exceptions in generate·{name}, {family}"] += 1
            result.guard(f"{family}, {name}, step {step} raises at the {place} of layer {layer}", again, fail)


def under_a_patch(scene: Scene, where: tuple[str, int, int]) -> int:
    """The cache is generate's own; the patch goes on working, and can be taken off."""
    import torch_paged_kv

    cache = scene.cache(num_blocks=60)
    scene.model(**scene.batch, past_key_values=cache)  # makes the pool
    cache.reset()
    with torch_paged_kv.paged(scene.model, pool=cache.pool):
        scene.fails(where)
        gc.collect()  # the exception's traceback held the cache
        lost: int = cache.pool.num_blocks - cache.pool.num_free
        scene.succeeds()
    return lost


def cut_and_go_on(scene: Scene, where: tuple[str, int, int]) -> int:
    """The cache is cut to what all layers had written, and generate goes on from there."""
    step, cache = where[2], scene.cache(num_blocks=60)
    cache.keep_past()  # else a window may have let go of what the shorter rows need
    scene.fails(where, past_key_values=cache)
    cache.check()
    length = scene.batch["input_ids"].shape[1]
    cache.truncate(0 if step == 0 else length + step - 1)
    cache.check()
    assert not cache.within_step, "a cache cut to whole steps must be between two steps"
    scene.goes_on(cache, step)
    cache.reset()
    lost: int = cache.pool.num_blocks - cache.pool.num_free
    return lost


def reset_and_begin(scene: Scene, where: tuple[str, int, int]) -> int:
    """The same cache begins again."""
    cache = scene.cache(num_blocks=60)
    scene.fails(where, past_key_values=cache)
    cache.reset()
    lost: int = cache.pool.num_blocks - cache.pool.num_free
    scene.succeeds(past_key_values=cache)
    return lost


def with_a_prefix(scene: Scene, where: tuple[str, int, int]) -> int:
    """Blocks that some layer had not written must not be found by the next prompt."""
    known = PrefixCache()
    cache = scene.cache(num_blocks=60, prefix_cache=known)
    scene.fails(where, past_key_values=cache)
    cache.reset()
    for _ in range(2):
        fresh = scene.cache(prefix_cache=known)
        scene.succeeds(past_key_values=fresh)
        fresh.reset()
    known.check(cache, fresh)
    known.clear()
    lost: int = cache.pool.num_blocks - cache.pool.num_free
    return lost


# ---------------------------------------------------------------------------------------------------------------------
# Kills

SAVER = """
import os, sys, time
import torch
torch.set_num_threads(1)
import reliability
from reliability.faults import large_cache
from torch_paged_kv.files import save
caches = [large_cache(number) for number in (1, 2)]
for line in sys.stdin:  # fork a process for each line, which saves until it is killed
    path = line.strip()
    child = os.fork()
    if child == 0:
        while True:
            for cache in caches:
                save(cache, path)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


def large_cache(number: int) -> PagedKVCache:
    """16 MB of keys and values, all of them `number`."""
    cache = PagedKVCache([None], block_size=16)
    keys = torch.full((1, 4, 8192, 64), float(number))
    cache.write(0, keys, keys)
    return cache


def kills_during_save(settings: Settings, result: Result) -> None:
    """A process that saves over and over is killed at a random moment: the file is a whole one, old or new."""
    if not hasattr(os, "fork") or settings.device != "cpu":  # a file is made in host memory
        return
    again, dice = command(settings, "faults"), random.Random(settings.seed)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)])}
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
    )
    target = large_cache(1)
    try:
        with tempfile.TemporaryDirectory() as directory:
            for number in range(settings.count(KILLS)):
                path = Path(directory) / f"{number // 4}.safetensors"  # some exist already, some do not
                where = f"kill {number} during save"
                result.guard(where, again, lambda: kill_one(saver, path, dice, target, result))  # noqa: B023
    finally:
        saver.stdin.close()  # type: ignore[union-attr]
        saver.wait()


def kill_one(
    saver: subprocess.Popen[str], path: Path, dice: random.Random, target: PagedKVCache, result: Result
) -> int:
    """Kill one process, and look at every file it left. Returns blocks that were lost in loading them."""
    assert saver.stdin is not None
    assert saver.stdout is not None
    existed = path.exists()
    print(path, file=saver.stdin, flush=True)
    child = int(saver.stdout.readline())
    if dice.random() < 0.7:  # most of a save is its digest: wait until it writes
        end = time.monotonic() + 5
        while not any(path.parent.glob(f".{path.name}-*")) and time.monotonic() < end:
            time.sleep(2e-4)
        time.sleep(dice.uniform(0, 0.005))
    else:
        time.sleep(dice.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    assert saver.stdout.readline() == "gone\n"
    result.counts["kills during save"] += 1
    assert path.exists() or not existed, "the old file is gone"
    left = [*path.parent.glob(f".{path.name}-*")]  # what the killed process was writing
    result.counts["kills during save·while a file was written"] += bool(left)
    result.counts["kills during save·before the first file was whole"] += not path.exists()
    lost = 0
    for file in [*([path] if path.exists() else []), *left]:
        target.reset()
        before = memory_of(target.pool)
        try:
            load(target, file)
        except ValueError:
            assert file != path, "the file is neither the old nor the new one"
            assert all(torch.equal(old, now) for old, now in zip(before, memory_of(target.pool), strict=True))
            result.counts["kills during save·unfinished files refused"] += 1
            continue
        held = target.gather(0)
        assert all(bool((part == part.flatten()[0]).all()) for part in held), "a mixture of two files"
        target.reset()
        lost += target.pool.num_blocks - target.pool.num_free
        if file != path:
            file.unlink()
    for file in left:
        file.unlink(missing_ok=True)
    return lost
