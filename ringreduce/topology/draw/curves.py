"""Times as curves: over the size of the data, and over the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringreduce.common.units import bytes_text, time_text
from ringreduce.topology.draw.style import INK, colour, dash, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""By name: (bytes or ranks, seconds) of every point, all above 0."""

LEFT, WIDTH = 0.09, 0.67
"""Of the axes, as shares of the paper; the curves' names are at their right."""

MOST_MARKED = 40
"""Points up to which each is marked."""


def time_over_size(curves: Curves, path: str | Path, title: str) -> None:
    """Draw seconds over bytes, a curve an algorithm; a band below says which is the fastest where."""
    figure = sheet(title)
    axes = figure.add_axes((LEFT, 0.17, WIDTH, 0.71))
    _draw(axes, curves)
    axes.tick_params(labelbottom=False)
    _fastest(figure, axes, curves)
    _ticks(axes.xaxis, axes.get_xlim(), 10, bytes_text)
    save(figure, path)


def time_over_ranks(curves: Curves, path: str | Path, title: str) -> None:
    """Draw seconds over the number of ranks, a curve an algorithm."""
    figure = sheet(title)
    axes = figure.add_axes((LEFT, 0.11, WIDTH, 0.77))
    _draw(axes, curves)
    _ticks(axes.xaxis, axes.get_xlim(), 2, lambda value: f"{value:,.0f}")
    axes.set_xlabel("ranks")
    save(figure, path)


def _draw(axes: Axes, curves: Curves) -> None:
    """The lines, on logarithmic axes, each named at its right end."""
    ends = []
    for at, (name, points) in enumerate(curves.items()):
        xs, ys = zip(*sorted(points), strict=True)
        marker = "o" if len(xs) <= MOST_MARKED else ""
        axes.plot(xs, ys, color=colour(at), linestyle=dash(at), linewidth=2.2, marker=marker, markersize=3.5)
        ends.append((name, colour(at), xs[-1], ys[-1]))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(color="#E8E8E8", linewidth=0.8)
    axes.set_axisbelow(True)
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)
    _ticks(axes.yaxis, axes.get_ylim(), 10, time_text)
    axes.set_ylabel("time")
    at_ends = [axes.transAxes.inverted().transform(axes.transData.transform((x, y))) for _, _, x, y in ends]
    heights = _spread([y for _, y in at_ends], 0.038)
    style: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "axes fraction", "annotation_clip": False}
    style |= {"va": "center", "fontsize": 10, "fontweight": "bold"}
    for (name, its_colour, *_), (x, y), height in zip(ends, at_ends, heights, strict=True):
        leader = {"arrowstyle": "-", "color": its_colour, "linewidth": 0.7, "shrinkB": 3, "relpos": (0, 0.5)}
        axes.annotate(name, (x, y), (1.03, height), color=its_colour, arrowprops=leader, **style)


def _spread(wanted: Sequence[float], least: float) -> list[float]:
    """The places, in their order, moved so that no two are closer than `least`."""
    order = sorted(range(len(wanted)), key=lambda at: wanted[at])
    placed = list(wanted)
    for _ in range(200):
        for one, other in pairwise(order):
            missing = least - (placed[other] - placed[one])
            if missing > 0:
                placed[one] -= missing / 2
                placed[other] += missing / 2
    return placed


def _ticks(axis: Axis, limits: tuple[float, float], base: int, text: Callable[[float], str]) -> None:
    """Ticks at powers of the base, fewer or with steps between where the axis is long or short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    decades = math.log(limits[1] / limits[0], base)
    between = (1.0, 2.0, 5.0) if base == 10 and decades < 3 else (1.0,)
    axis.set_major_locator(LogLocator(base=base, subs=between, numticks=16))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _fastest(figure: Figure, above: Axes, curves: Curves) -> None:
    """A band under the curves, with the colour of the fastest of them at every size that all have."""
    seconds = [dict(points) for points in curves.values()]
    sizes = sorted(set.intersection(*map(set, seconds)))
    band = figure.add_axes((LEFT, 0.095, WIDTH, 0.045), sharex=above)
    for at, size in enumerate(sizes):
        best = min(range(len(seconds)), key=lambda curve: seconds[curve][size])
        begin = math.sqrt(sizes[max(at - 1, 0)] * size)
        end = math.sqrt(sizes[min(at + 1, len(sizes) - 1)] * size)
        band.axvspan(begin, end, facecolor=colour(best), linewidth=0)
    band.set_yticks([])
    band.set_xlabel("bytes")
    for edge in band.spines.values():
        edge.set_visible(False)
    figure.text(LEFT - 0.008, 0.1175, "fastest", ha="right", va="center", fontsize=9.5, color=INK)
