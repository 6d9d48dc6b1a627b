"""Calls that Python cannot interrupt, such as those of torch's store, with an end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ringreduce.common import system

T = TypeVar("T")

_LOOK = 0.1
"""Seconds in which an interrupt is noticed at the latest."""


def bounded(call: Callable[[], T], seconds: float) -> T:
    """What the call returns or raises. Raises TimeoutError after so many seconds, and can be interrupted as other code.
    Then the call goes on in its thread, which does not keep the process alive."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    system.start(thread)
    left = seconds
    while thread.is_alive() and left > 0:
        thread.join(min(_LOOK, left))
        left -= _LOOK
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return results[0]
