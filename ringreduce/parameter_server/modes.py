"""The modes of a key: `sync`, `asynchronous` and `ssp` say when pushes become updates, and what a pull may miss.

docs/parameter_server.md has the semantics.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ringreduce.errors import InvalidArgument


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


def sync(quorum: int | None = None, grace: float = 0.0, *, average: bool = True, group: str = "workers") -> Mode:
    """Works in rounds: every member of `group` pushes once, then the value is updated once with all pushes combined.

    With a `quorum`, a round ends `grace` seconds after that many members have pushed. A push that comes later is
    dropped, and its `wait()` returns the key. `average` divides the sum of the pushes by the sum of their weights;
    `reduce` updates are never averaged. Raises `InvalidArgument`.
    """
    if quorum is not None and (not isinstance(quorum, int) or quorum < 1):
        raise InvalidArgument(f"quorum is {quorum!r}; it must be a number of workers, at least 1, or None for all")
    if not grace >= 0:
        raise InvalidArgument(f"grace is {grace!r}; it must be seconds, 0 or more")
    if grace > 0 and quorum is None:
        raise InvalidArgument(f"grace is {grace!r} without a quorum, after which it begins; give quorum= too")
    return Mode("sync", quorum or 0, float(grace), 0, group, average)


def asynchronous() -> Mode:
    """Every push updates the value at once, and a pull gets the latest value."""
    return Mode("asynchronous")


def ssp(staleness: int, *, group: str = "workers") -> Mode:
    """Stale synchronous parallel: every push updates the value at once, but a pull waits until no member of `group` is
    more than `staleness` clocks behind this worker (see `KeyValue.clock`). Raises `InvalidArgument`."""
    if not isinstance(staleness, int) or staleness < 0:
        raise InvalidArgument(f"staleness is {staleness!r}; it must be a number of clocks, 0 or more")
    return Mode("ssp", staleness=staleness, group=group)
