"""Pool, prefix cache, forks and swaps together: 10^5 random operations against a plain Python model."""

from __future__ import annotations

import pytest
from cache_machine import Machine

STEPS, SEEDS = 20_000, 5

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_operations(seed: int) -> None:
    machine = Machine(seed)
    for step in range(STEPS):
        machine.step()
        machine.check(*(machine.caches if step % 50 == 0 else ()))
    for name in ("admit", "append", "register", "fork", "truncate", "drop", "reset", "swap_out", "swap_in", "evict"):
        assert machine.done[name] > STEPS / 100, machine.done
    for name in ("hits", "refused", "clear", "forget"):
        assert machine.done[name] > 0, machine.done
    assert machine.prefix.stats()["evictions"] > 0
    assert machine.close() == 0
