"""Workers and servers that are closed at the end of the process, and in a forked child, if the program has not."""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Any

open_until_exit: dict[Any, None] = {}
"""In the order in which they were made, even if the program has dropped them. `close` removes them from here."""


def _close_in_child() -> None:
    """A forked child has joined nothing, and others must notice the end of the parent."""
    for one in open_until_exit:
        one.close_in_child()
    open_until_exit.clear()


os.register_at_fork(after_in_child=_close_in_child)


@atexit.register
def _close_all() -> None:
    """Stops all servers at exit, because their threads must not call Python while the interpreter is finalised."""
    with contextlib.ExitStack() as closing:  # the latest first, and all of them, whatever one raises
        for one in open_until_exit:
            closing.callback(one.close)
