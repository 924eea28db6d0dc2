"""Two threads at once, each with a pool of its own, and nothing shared but the library and, where said, the weights.

A pool and everything that holds its blocks are for one thread at a time (docs/security.md): no pool is shared here.
What a thread gives must be, bit for bit, what it gives alone. Threads are switched as often as the interpreter can.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cache_machine import Machine
from torch import Tensor

from reliability import ops as fuzz
from reliability.batches import Batches
from reliability.report import Result, Settings, command
from torch_paged_kv import ops

NUM_THREADS = 2
OP_CASES, MACHINE_STEPS, GENERATES = 1000, 1500, 6


def run(settings: Settings) -> Result:
    """Ops, caches, and generate."""
    result = Result("threads")
    with often_switched():
        ops_in_threads(settings, result)
        machines_in_threads(settings, result)
        generate_in_threads(settings, result)
    return result


@contextmanager
def often_switched() -> Iterator[None]:
    """The interpreter changes threads every few microseconds instead of every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """`work(number)` in every thread, all begun together; what they return. One that raises makes this raise."""
    together = threading.Barrier(NUM_THREADS)
    results: list[Any] = [None] * NUM_THREADS
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            together.wait()
            with torch.no_grad():  # which is a thread's own
                results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def ops_in_threads(settings: Settings, result: Result) -> None:
    """Attention over one pool that both threads only read: the same bits as one after the other."""
    again, device = command(settings, "threads"), torch.device(settings.device)
    lots = settings.count(OP_CASES) // 100 or 1
    for lot in range(lots):

        def attend(lot: int = lot) -> None:
            cases = []
            for number in range(100):
                dice = fuzz.Dice(f"{settings.seed} {lot} {number}")
                torch.manual_seed(dice.getrandbits(63))
                cases.append(fuzz.copied(fuzz.draw_attention_case(dice), device))

            def all_of_them(_: int) -> list[tuple[Tensor, ...]]:
                return [tuple(x.cpu() for x in case.run(ops.paged_attention_with_lse)) for case in cases]

            alone = all_of_them(0)
            for mine in at_once(all_of_them):
                for number, (now, before) in enumerate(zip(mine, alone, strict=True)):
                    assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True)), f"case {number} of {lot}"
            result.counts["op calls in threads"] += NUM_THREADS * len(cases)

        result.guard(f"ops, lot {lot}", again, attend)


def machines_in_threads(settings: Settings, result: Result) -> None:
    """Random operations on caches, each thread with pool, prefix cache and host tier of its own."""
    again, steps = command(settings, "threads"), settings.count(MACHINE_STEPS)
    for kind in (Machine, Batches):

        def play(number: int, kind: Any = kind) -> int:
            machine = kind(settings.seed * 100 + number, settings.device)
            for _ in range(steps):
                machine.step()
                machine.check()
            machine.check(*(machine.caches if kind is Machine else machine.batches))
            gc.collect()  # which may find the garbage of the other thread
            lost: int = machine.close()
            return lost

        result.counts["cache steps in threads"] += NUM_THREADS * steps
        result.guard(f"caches, {kind.__name__}", again, lambda play=play: sum(at_once(play)))  # type: ignore[misc]


def generate_in_threads(settings: Settings, result: Result) -> None:
    """Each thread generates with caches of its own: with a model of its own, patched, and with one they share."""
    import models

    import torch_paged_kv
    from torch_paged_kv import PagedKVCache as ModelCache

    again, device = command(settings, "threads"), settings.device
    rounds = settings.count(GENERATES)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    for family in ("llama", "gemma3"):
        batches = [
            {name: tensor.to(device) for name, tensor in models.prompts(lens, seed=seed).items()}
            for seed, lens in enumerate(([9, 5], [4, 11, 7]))
        ]
        shared = models.tiny(family).to(device)
        expected = [shared.generate(**batch, **options) for batch in batches]

        def own_model(number: int, family: str = family, batches: Any = batches) -> list[Tensor]:
            model = models.tiny(family).to(device)
            with torch_paged_kv.paged(model, block_size=4):
                return [model.generate(**batches[number], **options) for _ in range(rounds)]

        def one_model(number: int, shared: Any = shared, batches: Any = batches) -> list[Tensor]:
            tokens = []
            for _ in range(rounds):
                cache = ModelCache(shared.config, block_size=4, num_blocks=60)
                tokens.append(shared.generate(**batches[number], past_key_values=cache, **options))
                cache.check()
                cache.reset()
                assert cache.pool.num_free == 60
            return tokens

        for name, work in (("a model each", own_model), ("one model", one_model)):

            def compare(work: Any = work, expected: Any = expected) -> None:
                for mine, right in zip(at_once(work), expected, strict=True):
                    for tokens in mine:
                        assert torch.equal(tokens, right), "other tokens than alone"

            result.counts["generates in threads"] += NUM_THREADS * rounds
            result.guard(f"generate, {family}, {name}", again, compare)
