"""Pictures of a pool: a map of its blocks, and its use over time. Need matplotlib."""

from __future__ import annotations

import math
from typing import Any

from .stats import BlockState, Monitor

__all__ = ["block_map", "usage"]

KINDS = {  # kind -> (colour, what the legend says); told apart also by those who see no red and green
    "free": ("#eeeeee", "free"),
    "one sequence": ("#0072b2", "one sequence"),
    "shared": ("#e69f00", "several sequences"),
    "cached": ("#56b4e9", "prefix cache alone"),
    "other": ("#999999", "held by others"),
}
WASTE, KNOWN = "#ffffff", "#222222"
NAMED_UP_TO = 200  # blocks whose holders are written into the map


def block_map(monitor: Monitor, columns: int | None = None) -> Any:
    """A figure with a square for each block of the pool, in order of their numbers.

    Its colour tells who holds the block, a dark corner that the prefix cache knows it; the part of a live block that
    holds no token is hatched. In a small pool the sequences are named in it, as "<cache>.<row>".

    Args:
        monitor: of the pool.
        columns: squares in a line; None: about twice as many as there are lines.

    Returns:
        A ``matplotlib.figure.Figure``; ``figure.savefig(path)`` writes it.
    """
    figure, axes = _figure(9, 4.5)
    states = monitor.blocks()
    columns = columns or max(1, math.ceil(math.sqrt(2 * len(states))))
    lines = -(-len(states) // columns)
    for block, state in enumerate(states):
        _draw_block(axes, block % columns, block // columns, state, monitor.pool.block_size)
        if len(states) <= NAMED_UP_TO and state.owners:
            name = state.owners[0] + (f" +{len(state.owners) - 1}" if len(state.owners) > 1 else "")
            box = {"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 1}
            place = (block % columns + 0.5, block // columns + 0.5)
            axes.text(*place, name, ha="center", va="center", fontsize=6, bbox=box)
    axes.set(xlim=(0, columns), ylim=(lines, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_title(f"{len(states)} blocks of {monitor.pool.block_size} tokens")
    kinds = [state.kind for state in states]
    _legend(axes, [(f"{kinds.count(kind)} {text}", colour) for kind, (colour, text) in KINDS.items() if kind in kinds])
    return figure


def usage(monitor: Monitor) -> Any:
    """A figure of what the samples of a monitor say: blocks by holder, and hit tokens of the prefix cache, over time.

    Args:
        monitor: with at least one sample.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ValueError: there is no sample.
    """
    if not monitor.history:
        raise ValueError("history must hold a sample: call monitor.sample() now and then")
    figure, axes = _figure(9, 4)
    seconds = [sample.seconds for sample in monitor.history]
    series = {name: [sample.numbers[name] for sample in monitor.history] for name in monitor.history[0].numbers}
    layers = [series["blocks_live"], series["blocks_evictable"]]
    colours = [KINDS[kind][0] for kind in ("one sequence", "cached")]
    axes.stackplot(seconds, *layers, labels=["held by sequences", KINDS["cached"][1]], colors=colours, step="post")
    axes.step(seconds, series["blocks_total"], where="post", color="black", label="blocks of the pool")
    axes.set(xlabel="seconds", ylabel="blocks", ylim=(0, None))
    axes.margins(x=0)
    handles, labels = axes.get_legend_handles_labels()
    if "prefix_hit_tokens" in series:
        right = axes.twinx()
        right.step(
            seconds, series["prefix_hit_tokens"], where="post", color="#d55e00", label="tokens not computed again"
        )
        right.set(ylabel="tokens", ylim=(0, None))
        handles, labels = (both + more for both, more in zip((handles, labels), right.get_legend_handles_labels()))
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


def _figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure of its own, apart from pyplot's: nothing is shown, nothing has to be closed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _draw_block(axes: Any, x: int, y: int, state: BlockState, block_size: int) -> None:
    from matplotlib.patches import Polygon, Rectangle

    axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, facecolor=KINDS[state.kind][0], linewidth=0))
    if state.cached:
        corner = [(x + 0.96, y + 0.04), (x + 0.96, y + 0.24), (x + 0.76, y + 0.04)]
        axes.add_patch(Polygon(corner, facecolor=KNOWN, linewidth=0, zorder=3))
    empty = 1 - state.filled / block_size
    if state.owners and empty:
        axes.add_patch(
            Rectangle(
                (x + 0.04 + 0.92 * (1 - empty), y + 0.04),
                0.92 * empty,
                0.92,
                facecolor=WASTE,
                edgecolor=KINDS[state.kind][0],
                hatch="////",
                linewidth=0,
            )
        )


def _legend(axes: Any, entries: list[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=text) for text, colour in entries]
    handles.append(Patch(facecolor=KNOWN, label="known to the prefix cache"))
    handles.append(Patch(facecolor=WASTE, edgecolor="#555555", hatch="////", label="no token in it"))
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=len(handles), fontsize=8, frameon=False
    )
