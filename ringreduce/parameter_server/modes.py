"""The modes of a key: `sync`, `asynchronous` and `ssp` say when pushes become updates, and what a pull may miss.

docs/parameter_server.md has the semantics.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from ringreduce.common.checks import check_bool, check_text, number, shown, whole
from ringreduce.errors import InvalidArgument

READERS = "observers"
"""The group of readers, which a server does not count as its workers."""


@dataclass(frozen=True)
class Mode:
    """Made by `sync`, `asynchronous` or `ssp`."""

    mode: str
    quorum: int = 0
    grace: float = 0.0
    staleness: int = 0
    group: str = "workers"
    average: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def sync(
    quorum: int | None = None, grace: timedelta | float = 0.0, *, average: bool = True, group: str = "workers"
) -> Mode:
    """Works in rounds: every member of `group` pushes once, then the value is updated once with all pushes combined.

    With a `quorum`, a round ends `grace` (seconds, or a timedelta) after that many members have pushed. A push that
    comes later is dropped, and its `wait()` returns the key. `average` divides the sum of the pushes by the sum of
    their weights; `reduce` updates are never averaged. Raises `InvalidArgument`.
    """
    if quorum is not None:
        quorum = whole("quorum", quorum, 1, "a number of workers, at least 1, or None for all", 2**31 - 1)
    if isinstance(grace, timedelta):
        grace = grace.total_seconds()
    if not number(grace) >= 0:
        raise InvalidArgument(f"grace is {shown(grace)}; it must be seconds, 0 or more")
    if grace > 0 and quorum is None:
        raise InvalidArgument(f"grace is {shown(grace)} without a quorum, after which it begins; give quorum= too")
    check_bool("average", average)
    check_text("group", group)
    return Mode("sync", quorum or 0, number(grace), 0, group, average)


def asynchronous() -> Mode:
    """Every push updates the value at once, and a pull gets the latest value."""
    return Mode("asynchronous")


def ssp(staleness: int, *, group: str = "workers") -> Mode:
    """Stale synchronous parallel: every push updates the value at once, but a pull waits until no member of `group` is
    more than `staleness` clocks behind this worker (see `KeyValue.clock`). Raises `InvalidArgument`."""
    staleness = whole("staleness", staleness, 0, "a number of clocks, 0 or more and below 2**63")
    check_text("group", group)
    return Mode("ssp", staleness=staleness, group=group)
