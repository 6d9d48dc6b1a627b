"""What every directed link carries of what it could."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringreduce.common.units import bytes_text, time_text
from ringreduce.topology.draw.style import GREY, INK, PALETTE, machine_name, rank_label, save, sheet
from ringreduce.topology.graph import FABRIC, LinkGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ringreduce.topology.planned import LinkLoad, Planned

MOST_IN_MATRIX = 16
"""GPUs whose links fit as a matrix."""

MOST_BARS = 40
"""More links than these are shown by their kinds."""


def loads(planned: Planned, size_bytes: int, path: str | Path) -> None:
    """Draw what every directed link carries of what it could, while `planned` runs on `size_bytes`.

    Links from GPU to GPU are a matrix, others bars; where those are many, links that do the same share one.
    """
    used = planned.loads(size_bytes)
    figure = sheet(
        f"{machine_name(planned.graph)}: what the links carry",
        f"{planned.collective} of {bytes_text(size_bytes)} in {time_text(planned.seconds(size_bytes))}, "
        f"planned {planned.bandwidth:.4g} GB/s of at most {planned.bound:.4g}",
    )
    ranks = set(planned.ranks)
    if 2 < len(ranks) <= MOST_IN_MATRIX and all({load.src, load.dst} <= ranks for load in used):
        _matrix(figure, planned, used)
    else:
        _bars(figure, planned.graph, used)
    save(figure, path)


def _matrix(figure: Figure, planned: Planned, used: Sequence[LinkLoad]) -> None:
    import numpy as np

    place = {name: at for at, name in enumerate(planned.ranks)}
    labels = [rank_label(planned.graph, name) for name in place]
    busy = np.full((len(place), len(place)), np.nan)
    for link in planned.graph.links:
        if link.kind in FABRIC and link.src in place and link.dst in place:
            busy[place[link.src], place[link.dst]] = 0.0
    axes = figure.add_axes((0.08, 0.07, 0.56, 0.74))
    small = len(place) > 10
    for load in used:
        row, column = place[load.src], place[load.dst]
        busy[row, column] = load.busy
        text = f"{load.busy:.0%}" if small else f"{bytes_text(load.bytes)}\n{load.busy:.0%}"
        axes.text(column, row, text, ha="center", va="center", fontsize=6.5 if small else 8.5,
                  color="white" if load.busy > 0.7 else INK)  # fmt: skip
    axes.imshow(busy, cmap="Blues", vmin=-0.05, vmax=1.25, aspect="auto")
    axes.xaxis.set_ticks_position("top")
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("to GPU")
    axes.set_ylabel("from GPU")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(len(place)), labels)
        axis.set_ticks([at - 0.5 for at in range(1, len(place))], minor=True)
        axis.set_tick_params(length=0, labelsize=11)
        axis.set_tick_params(which="minor", length=0)
    axes.grid(which="minor", color="white", linewidth=2)
    _bare(axes, "left", "right", "top", "bottom")
    unused = sum(link.kind in FABRIC for link in planned.graph.links) - len(used)
    _by_capacity(figure, used, unused)


def _by_capacity(figure: Figure, used: Sequence[LinkLoad], unused: int) -> None:
    """Beside the matrix: how busy links of each capacity are."""
    x, y = 0.70, 0.79
    explained = "A cell is a link: what crosses it, and which share\nof the time it is busy."
    figure.text(x, y, explained, fontsize=9, color=GREY, va="top", linespacing=1.4)
    y -= 0.09
    for capacity in sorted({load.capacity for load in used}, reverse=True)[:8]:
        busy = sorted(load.busy for load in used if load.capacity == capacity)
        share = f"{busy[-1]:.0%}" if busy[-1] - busy[0] < 0.005 else f"{busy[0]:.0%} to {busy[-1]:.0%}"
        what = f"{len(busy)} links of {capacity:.4g} GB/s"
        figure.text(x, y, what, fontsize=11, fontweight="bold", color=INK, va="top")
        figure.text(x, y - 0.03, f"busy {share} of the time", fontsize=10, color=INK, va="top")
        y -= 0.08
    if unused:
        figure.text(x, y, f"{unused} links are not used (pale)", fontsize=10, color=GREY, va="top")


def _bars(figure: Figure, graph: LinkGraph, used: Sequence[LinkLoad]) -> None:
    """Hollow: what the links can carry; filled: what they do, on average over the call."""
    groups: dict[tuple[Any, ...], list[LinkLoad]] = defaultdict(list)
    for load in used:
        ends = graph.by_name[load.src].kind, graph.by_name[load.dst].kind
        alike = (*ends, load.capacity, f"{load.bytes:.3g}") if len(used) > MOST_BARS else (load.src, load.dst)
        groups[alike].append(load)
    rows = sorted(groups.values(), key=lambda alike: -alike[0].busy)
    shown = [alike[0] for alike in rows[:MOST_BARS]]
    height = min(0.78, 0.06 * len(shown) + 0.04)
    axes = figure.add_axes((0.25, 0.87 - height, 0.53, height))
    most = max((load.capacity for load in used), default=1.0)
    for at, load in enumerate(shown):
        axes.barh(at, load.capacity, height=0.62, facecolor="none", edgecolor=GREY, linewidth=1)
        axes.barh(at, load.busy * load.capacity, height=0.62, color=PALETTE[0])
        axes.text(load.capacity + 0.012 * most, at, f"{load.busy:.0%}   {bytes_text(load.bytes)}",
                  va="center", fontsize=9 if len(shown) <= 30 else 7.5, color=INK)  # fmt: skip
    others = [f"  and {len(alike) - 1} alike" if len(alike) > 1 else "" for alike in rows]
    names = [
        f"{rank_label(graph, load.src)} → {rank_label(graph, load.dst)}{more}"
        for load, more in zip(shown, others, strict=False)
    ]
    axes.set_yticks(range(len(shown)), names, fontsize=9 if len(shown) <= 30 else 7.5)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, most * 1.02)
    axes.set_xlabel("GB/s: filled, what the link carries on average; hollow, what it can")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#EEEEEE")
    axes.set_axisbelow(True)
    _bare(axes, "left", "right", "top")
    if len(rows) > len(shown):
        figure.text(0.25, 0.015, f"and {len(rows) - len(shown)} more, no busier", fontsize=8.5, color=GREY)


def _bare(axes: Axes, *edges: str) -> None:
    for edge in edges:
        axes.spines[edge].set_visible(False)
