"""Draws what ring_vs_tree.py measured: bus bandwidth and speed-up over size, one column per rank count.

python bench/plot.py ring_vs_tree.json ring_vs_tree.png
"""

import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
from harness import format_bytes
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, NullLocator

# Okabe and Ito's colours, told apart with any kind of colour vision; shape and label say the same again.
STYLES = {
    "auto": ("auto", "#F0E442", ""),
    "direct": ("direct", "#D55E00", "D"),
    "ring": ("ring", "#0072B2", "s"),
    "bidirectional_ring": ("ring x2", "#56B4E9", "v"),
    "tree": ("tree", "#009E73", "^"),
    "gloo": ("Gloo", "#999999", "X"),
    "nccl": ("NCCL", "#CC79A7", "P"),
}

LOOK: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture of `report`, the JSON of ring_vs_tree.py, to `path`; its suffix chooses the format."""
    header, rows = report["header"], report["rows"]
    counts = sorted({row["ranks"] for row in rows})
    present = [name for name in STYLES if any(row["variant"] == name for row in rows)]
    baseline = header["baseline"] if header["baseline"] in present else None
    with mpl.rc_context(LOOK):
        width, height = max(7.5, 5.2 * len(counts)), 5.0 if baseline is None else 8.0  # inches
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(1 if baseline is None else 2, len(counts), sharex=True, sharey="row", squeeze=False)
        for column, ranks in enumerate(counts):
            for name in present:
                points = [row for row in rows if row["ranks"] == ranks and row["variant"] == name]
                line(grid[0, column], name, points, [row["busbw"] for row in points])
                if baseline:
                    line(grid[1, column], name, points, [row["speedup"] for row in points])
            grid[0, column].set_title(f"{ranks} ranks", fontweight="bold")
            grid[-1, column].set_xlabel("size of the tensor")
            bytes_axis(grid[-1, column], [row["bytes"] for row in rows])
        grid[0, 0].set_ylabel("bus bandwidth (GB/s)")
        plain_numbers(grid[0, 0], "{:g}")
        if baseline:
            grid[1, 0].set_ylabel(f"speed-up against {STYLES[baseline][0]}")
            plain_numbers(grid[1, 0], "{:g}x")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(present), frameon=False)
        figure.supxlabel(caption(header, int(16 * width)), fontsize=8, color="#555555", x=0.01, ha="left")
        figure.savefig(path, dpi=150)


def line(axes: Axes, name: str, points: list[dict[str, Any]], values: list[float]) -> None:
    label, colour, marker = STYLES[name]
    sizes = [row["bytes"] for row in points]
    if name == "auto":  # a broad band, so that the algorithm it chose is seen on top of it
        axes.loglog(sizes, values, label=label, color=colour, alpha=0.7, linewidth=9, solid_capstyle="round", zorder=1)
    else:
        axes.loglog(sizes, values, label=label, color=colour, marker=marker, markersize=5, linewidth=1.8)


def bytes_axis(axes: Axes, sizes: list[int]) -> None:
    """A tick for each measured size, or for every second, third ... where that would be more than ten."""
    ticks = sorted(set(sizes))
    axes.set_xticks(ticks[:: math.ceil(len(ticks) / 10)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(round(size))))
    axes.tick_params(axis="x", rotation=40)


def plain_numbers(axes: Axes, form: str) -> None:
    """0.01, 0.1, 1 instead of powers of ten."""
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))
    axes.yaxis.set_minor_formatter(LogFormatter())


def caption(header: dict[str, Any], width: int) -> str:
    """What, where and when, in lines of `width` letters."""
    machine = header["machine"]
    where = machine["gpus"][0] if header["device"] == "cuda" else f"{machine['cpu']}, {machine['cores']} cores"
    hosts = "" if header["hosts"] == 1 else f", {header['hosts']} hosts"
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    what = f"all_reduce, {header['dtype']} {header['op']}, in place, through torch.distributed"
    text = (
        f"{what}. {where}{hosts}, {machine['kernel']}. {versions}. {header['date']}.\n"
        "Bus bandwidth is 2(n-1)/n x size / mean time on the slowest rank, GB = 1e9 bytes; speed-up is of median times."
    )
    return "\n".join(textwrap.fill(paragraph, width) for paragraph in text.splitlines())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
