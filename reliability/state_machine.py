"""The cache machine of the tests as a state machine of hypothesis, which shortens what it finds to a few steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis
import torch
from cache_machine import Machine
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

STEPS_PER_EXAMPLE = 50
dice = st.randoms(use_true_random=False)  # drawn by hypothesis, choice by choice


class CacheStateMachine(RuleBasedStateMachine):
    """Pool, prefix cache, forks, crops and swaps; after each step the accounts close, and caches hold their tokens."""

    device = "cpu"
    steps = 0  # of all examples
    lost = 0

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(0, self.device)

    def do(self, operation: str, dice: random.Random) -> None:
        self.machine.random = dice
        getattr(self.machine, operation)()
        type(self).steps += 1

    @invariant()
    def accounts_close(self) -> None:
        self.machine.check(*self.machine.caches)

    def teardown(self) -> None:
        type(self).lost += self.machine.close()


def has_caches(self: CacheStateMachine) -> bool:
    return bool(self.machine.caches)


def has_room(self: CacheStateMachine) -> bool:
    return 0 < len(self.machine.caches) < 6


def has_swapped(self: CacheStateMachine) -> bool:
    return bool(self.machine.swapped)


def add_rule(operation: str, *conditions: Callable[[CacheStateMachine], bool]) -> None:
    def step(self: CacheStateMachine, dice: random.Random) -> None:
        self.do(operation, dice)

    step.__name__ = operation
    function = rule(dice=dice)(step)
    for condition in conditions:
        function = precondition(condition)(function)
    setattr(CacheStateMachine, operation, function)


for name in ("admit", "evict", "clear"):
    add_rule(name)
for name in ("append", "register", "truncate", "drop", "reset", "swap_out"):
    add_rule(name, has_caches)
for name in ("swap_in", "forget"):
    add_rule(name, has_swapped)
add_rule("fork", has_room)


def run_examples(examples: int, seed: int, device: str) -> tuple[int, int]:
    """So many examples of at most STEPS_PER_EXAMPLE steps each: steps made, and blocks lost.

    Raises whatever the shortest failing example raises; hypothesis prints its steps.
    """

    class Seeded(CacheStateMachine):
        """The machine, with counts of its own."""

    Seeded.device = device
    hypothesis.seed(seed)(Seeded)
    limits = settings(
        max_examples=examples,
        stateful_step_count=STEPS_PER_EXAMPLE,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    with torch.no_grad():
        run_state_machine_as_test(Seeded, settings=limits)
    return Seeded.steps, Seeded.lost
