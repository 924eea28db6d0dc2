"""Pool, forks, crops, reorder, prefix cache and swaps under random operations, against models in plain Python.

Four kinds of step, counted apart. An *op step* is one call of allocate, free or fork on all rows of a table, after
which tables, lengths, reference counts, free queue, slots and copy pairs equal the model's. A *cache step* is one
operation of a cache that shares a pool, a prefix cache and a host tier with others; a *batch step* one of a cache of
several rows with padding and a sliding window; a *state machine step* a cache step that hypothesis chose.
"""

from __future__ import annotations

from allocator_model import WORLDS, Player
from cache_machine import Machine

from reliability.batches import Batches
from reliability.report import Result, Settings, command
from reliability.state_machine import run_examples
from torch_paged_kv import ops

OP_STEPS = {"cpu": 1_000_000, "cuda": 50_000}
CACHE_STEPS = {"cpu": 30_000, "cuda": 3_000}
BATCH_STEPS = {"cpu": 30_000, "cuda": 3_000}
EXAMPLES = {"cpu": 150, "cuda": 10}
ROUND = 500  # steps of a machine before another takes its place
OP_SHARE, CACHE_SHARE, BATCH_SHARE, EXAMPLE_SHARE = 0.1, 0.1, 0.1, 0.05  # of the minutes


def run(settings: Settings) -> Result:
    """All four kinds of step."""
    result = Result("allocator")
    op_steps(settings, result)
    machine_steps(settings, result, Machine, "cache steps", CACHE_STEPS, CACHE_SHARE)
    machine_steps(settings, result, Batches, "batch steps", BATCH_STEPS, BATCH_SHARE)
    state_machine_steps(settings, result)
    return result


def op_steps(settings: Settings, result: Result) -> None:
    """Worlds in turn, `ROUND` steps at a time; each goes on where it was."""
    again = command(settings, "allocator")
    players = {world: Player(world, settings.seed, settings.device, ops) for world in WORLDS}
    worlds = list(players)
    for number in settings.numbers(OP_STEPS[settings.device] // ROUND, OP_SHARE):
        world = worlds[number % len(worlds)]

        def play(player: Player = players[world]) -> None:
            for _ in range(ROUND):
                player.step()
                result.counts["op steps"] += 1

        if not result.guard(f"op steps, world {world}", again, play):
            worlds.remove(world)  # its model and its tensors have parted
            if not worlds:
                break
    for world in worlds:

        def empty(player: Player = players[world]) -> int:
            for index, table in enumerate(player.both.tables):
                player.both.free([0] * len(table.model.lens), table=index)
            return player.both.pool.num_blocks - player.both.num_free

        result.guard(f"the end of world {world}", again, empty)
    for player in players.values():
        for what, times in player.done.items():
            result.counts[f"op steps·{what}"] += times


def machine_steps(
    settings: Settings,
    result: Result,
    kind: type[Machine] | type[Batches],
    name: str,
    steps: dict[str, int],
    share: float,
) -> None:
    """Machines of consecutive seeds, `ROUND` steps each; at their end every block must be free."""
    for number in settings.numbers(max(1, steps[settings.device] // ROUND), share):

        def play(seed: int = settings.seed * 1_000_003 + number) -> int:
            machine = kind(seed, settings.device)
            try:
                for step in range(ROUND):
                    machine.step()
                    machine.check()
                    result.counts[name] += 1
                    if step % 50 == 0:
                        machine.check(*(machine.caches if isinstance(machine, Machine) else machine.batches))
            finally:
                for what, times in machine.done.items():
                    result.counts[f"{name}·{what}"] += times
            return machine.close()

        result.guard(f"{name}, machine {number}", command(settings, "allocator"), play)


def state_machine_steps(settings: Settings, result: Result) -> None:
    """Hypothesis, in lots of ten examples."""
    lot = 10
    for number in settings.numbers(max(1, EXAMPLES[settings.device] // lot), EXAMPLE_SHARE):

        def examples(number: int = number) -> int:
            steps, lost = run_examples(lot, settings.seed * 1_000_003 + number, settings.device)
            result.counts["state machine steps"] += steps
            return lost

        result.guard(f"state machine, lot {number}", command(settings, "allocator"), examples)
