"""What all pictures share: paper, colours, title, and numbers with their units."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringreduce.common.files import write_file
from ringreduce.topology.graph import LinkGraph, Node, NodeKind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

A4 = (11.69, 8.27)
"""Inches."""

DPI = 150

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")
"""Of Okabe and Ito, "Color Universal Design", 2008: told apart by the colour-blind too."""

DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.5)), (0, (1.5, 1)))
"""For what comes after the palette's end: the colours again, dashed."""

TINTS = ("#E8F0F7", "#F9F0E3", "#E9F4EC", "#F6EAF2")
INK, GREY, PALE = "#222222", "#8A8A8A", "#D5D5D5"


def sheet(title: str, note: str = "", inches: tuple[float, float] = A4) -> Figure:
    """An empty picture with its title and, below that, a line in grey."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, facecolor="white")
    figure.text(0.03, 0.965, _one_line(title, 70), fontsize=16, fontweight="bold", color=INK, va="top")
    if note:
        figure.text(0.03, 0.922, _one_line(note, 115), fontsize=10.5, color=GREY, va="top")
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Writes a picture in the format that the ending of its file's name says. Raises OSError that names the file."""
    content = BytesIO()
    figure.savefig(content, dpi=DPI, format=Path(path).suffix[1:].lower() or "png")
    write_file(path, content.getvalue())


def machine_name(graph: LinkGraph) -> str:
    """The name of a graph; of one that is a file's, without its folders."""
    return graph.name.rpartition("/")[2] or graph.name


def colour(at: int) -> str:
    """Of the ring, tree or curve number `at`."""
    return PALETTE[at % len(PALETTE)]


def dash(at: int) -> Any:
    """The line style that goes with `colour`."""
    return DASHES[at // len(PALETTE) % len(DASHES)]


def literal(text: str) -> str:
    """`text` in which matplotlib sees no formula."""
    return text.replace("$", r"\$")


def _one_line(text: str, most: int) -> str:
    line = " ".join(text.split())
    return literal(line if len(line) <= most else line[: most - 1] + "…")


def rank_label(graph: LinkGraph, name: str) -> str:
    """A GPU or core by its index alone, after that of its host where there are several; other nodes by their names."""
    node = graph.by_name[name]
    if node.kind not in (NodeKind.GPU, NodeKind.CORE):
        return name
    return f"{node.host}/{node.index}" if graph.several_hosts else str(node.index)


def spoken(node: Node) -> str:
    """A node by its kind and number, without its host: "GPU 3", "PCIe 1", "NIC mlx5_0"."""
    if node.kind in (NodeKind.GPU, NodeKind.CORE):
        return f"{'GPU' if node.kind is NodeKind.GPU else 'core'} {node.index}"
    name = re.sub(r"^(PCIe|CPU|NVSwitch|NIC)(?=\d+$)", r"\1 ", node.name.rpartition("/")[2])
    return f"NIC {name}" if node.kind is NodeKind.NIC and not name.startswith("NIC") else name
