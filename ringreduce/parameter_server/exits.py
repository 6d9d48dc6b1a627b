"""Workers and servers that are closed at the end of the process, and in a forked child, if the program has not."""

from __future__ import annotations

import atexit
import os
from typing import Protocol


class Closable(Protocol):
    def close(self) -> None:
        """Ends it and its threads. Idempotent."""

    def close_in_child(self) -> None:
        """Closes what a forked child has inherited. It has joined nothing, and others must notice the end of the
        parent."""


_open: dict[Closable, None] = {}


def close_at_exit(one: Closable) -> None:
    """Keeps `one` until `has_closed`, and closes it at the end of the process, even if the program has dropped it."""
    _open[one] = None


def has_closed(one: Closable) -> None:
    _open.pop(one, None)


def _close_in_child() -> None:
    for one in _open:
        one.close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_close_in_child)


@atexit.register
def _close_all() -> None:
    """Stops all servers at exit, because their threads must not call Python while the interpreter is finalised."""
    for one in reversed(list(_open)):
        one.close()
