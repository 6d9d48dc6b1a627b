"""What the commands write with: streams that may be closed or broken, consoles that cut nothing, numbers with units."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import textwrap
from io import TextIOWrapper
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn, cast

from ringreduce.common.files import naming

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


def open_streams() -> None:
    """Opens /dev/null for the standard streams that are closed, so that no other file or socket gets their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 (it stays open)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names of files, and for terminals without Unicode


def flushed(stream: IO[str]) -> bool:
    """Whether all that was printed could be written; if not, the rest is dropped: Python would try again at its end."""
    try:
        stream.flush()
        return True
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False


class _Output:
    """Standard output, whose errors name it: those of the operating system name no file."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        with naming("standard output"):
            return sys.stdout.write(text)

    def flush(self) -> None:
        with naming("standard output"):
            sys.stdout.flush()


OUTPUT = cast(IO[str], _Output())


def put(text: str) -> None:
    """Text as it is on standard output, such as JSON."""
    OUTPUT.write(f"{text}\n")


def complain(text: str) -> None:
    """A message on standard error, which may be closed or full."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def console() -> Console:
    """Standard output: as wide as the terminal, or as wide as it takes where there is none."""
    from rich.console import Console

    class Out(Console):
        def on_broken_pipe(self) -> NoReturn:
            """As everything else that writes to standard output; rich would exit here, with a code of its own."""
            raise BrokenPipeError

    known = Out(markup=False, file=OUTPUT)
    return known if known.is_terminal else Out(width=UNCUT, markup=False, file=OUTPUT)


def progress_console() -> Console:
    """Standard error, for what is only of interest while it is seen; JSON and tables stay alone on standard output."""
    from rich.console import Console

    class Seen(Console):
        def on_broken_pipe(self) -> None:
            """Nobody sees the progress; the command goes on."""

    return Seen(stderr=True)


def progress(to: Console) -> Progress:
    """A bar that shows what is done at the moment, and since when; it is gone afterwards."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*columns, console=to, transient=True, disable=not to.is_terminal)


def table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A light table; the columns named in `right` hold numbers.  Too narrow a terminal folds cells, never cuts them.
    Those of the columns in `whole` are not folded either, for names that are to be copied."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in columns:
        side: Literal["left", "right"] = "right" if name in right else "left"
        made.add_column(name, justify=side, overflow="fold", no_wrap=name in whole)
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
