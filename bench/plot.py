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
PANELS = {"busbw": ("bus bandwidth (GB/s)", "{:g}"), "speedup": ("speed-up against {baseline}", "{:g}x")}
"""By column of the report: the axis's label, and how its numbers are written."""


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture of `report`, the JSON of ring_vs_tree.py, to `path`; its suffix chooses the format."""
    rows = report["rows"]
    counts = sorted({row["ranks"] for row in rows})
    panels = [column for column in PANELS if column in rows[0]]
    with mpl.rc_context(LOOK):
        width = max(7.5, 5.2 * len(counts))  # inches
        figure = Figure(figsize=(width, 2 + 3 * len(panels)), layout="constrained")
        grid = figure.subplots(len(panels), len(counts), sharex=True, sharey="row", squeeze=False)
        for column, ranks in enumerate(counts):
            for axes, what in zip(grid[:, column], panels, strict=True):
                for name in STYLES:
                    line(axes, name, [row for row in rows if row["ranks"] == ranks and row["variant"] == name], what)
            grid[0, column].set_title(f"{ranks} ranks", fontweight="bold")
            grid[-1, column].set_xlabel("size of the tensor")
            bytes_axis(grid[-1, column], [row["bytes"] for row in rows])
        for axes, what in zip(grid[:, 0], panels, strict=True):
            label, form = PANELS[what]
            axes.set_ylabel(label.format(baseline=STYLES[report["header"]["baseline"]][0]))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _, form=form: form.format(value)))
            axes.yaxis.set_minor_formatter(LogFormatter())
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
        figure.supxlabel(caption(report["header"], int(16 * width)), fontsize=8, color="#555555", x=0.01, ha="left")
        figure.savefig(path, dpi=150)


def line(axes: Axes, name: str, points: list[dict[str, Any]], column: str) -> None:
    label, colour, marker = STYLES[name]
    if not points:
        return
    sizes, values = [row["bytes"] for row in points], [row[column] for row in points]
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


def caption(header: dict[str, Any], width: int) -> str:
    """What, where and when, in lines of `width` letters."""
    machine = header["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    where = machine["gpus"][0] if header["device"] == "cuda" else f"{machine['cpu']}, {machine['cores']} cores"
    hosts = "" if header["hosts"] == 1 else f", {header['hosts']} hosts"
    text = (
        "all_reduce, float32 sum, in place, through torch.distributed. "
        f"{where}{hosts}, {machine['kernel']}. {versions}. {header['date']}.\n"
        "Bus bandwidth is 2(n-1)/n x size / mean time on the slowest rank, GB = 1e9 bytes; speed-up is of median times."
    )
    return "\n".join(textwrap.fill(paragraph, width) for paragraph in text.splitlines())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
