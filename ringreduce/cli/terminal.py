"""What the commands write with: consoles that cut nothing, and numbers with their units as text."""

from __future__ import annotations

import argparse
import sys
import textwrap
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

UNCUT = 10_000
"""Columns of a console that is no terminal: a pipe or a file has no right edge that a table would have to keep to."""

BAR = 20


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that fills paragraphs, but leaves alone what has lines of its own, as examples do."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=22)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)


def console() -> Console:
    """Standard output: as wide as the terminal, or as wide as it takes where there is none."""
    from rich.console import Console

    class Out(Console):
        def on_broken_pipe(self) -> NoReturn:
            """As everything else that writes to standard output; rich would exit here, with a code of its own."""
            raise BrokenPipeError

    known = Out(markup=False)
    return known if known.is_terminal else Out(width=UNCUT, markup=False)


def progress_console() -> Console:
    """Standard error, for what is only of interest while it is seen; JSON and tables stay alone on standard output."""
    from rich.console import Console

    return Console(stderr=True)


def progress(to: Console) -> Progress:
    """A bar that shows what is done at the moment, and since when; it is gone afterwards."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=to, transient=True, disable=not to.is_terminal)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A light table; the columns named in `right` hold numbers.  Too narrow a terminal folds cells, never cuts them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def say(to: Console, text: str, style: str = "") -> None:
    """A line of text as it is: neither markup nor highlighted, wrapped by the terminal alone."""
    to.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def bar(to: Console, share: float) -> str:
    """A bar of `BAR` columns, of which `share` (0 to 1) is filled."""
    full, empty = ("█", "░") if (to.encoding or "").startswith("utf") else ("#", ".")
    filled = min(BAR, max(0, round(share * BAR)))
    return full * filled + empty * (BAR - filled)


def printable(text: str) -> str:
    """`text` without what a terminal would obey: files and arguments may hold anything."""
    kept = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return kept.encode(sys.stderr.encoding or "utf-8", "backslashreplace").decode(sys.stderr.encoding or "utf-8")


def gigabytes(rate: float) -> str:
    """GB/s as a plain number of up to four digits."""
    return f"{rate:.4g}" if rate < 1000 else f"{rate:.0f}"
