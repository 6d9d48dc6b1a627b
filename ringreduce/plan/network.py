"""What a plan runs over, for those who count loads or time: links of some capacity, and a route for every two ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Route(NamedTuple):
    """The links from one rank to another, each with the share of the bytes that crosses it (less than 1 where traffic
    is spread over several paths), and the seconds until the first byte is there."""

    links: tuple[tuple[int, float], ...]
    latency: float


@dataclass(frozen=True)
class Network:
    """Directed links by number: what messages call them, and bytes per second.  `route` takes (source, target)."""

    names: tuple[str, ...]
    capacity: tuple[float, ...]
    route: Callable[[int, int], Route]


@dataclass(frozen=True)
class LikeGroups:
    """Groups of `places` ranks each, as of hosts, over a network that is the same for each: to exchange them changes
    nothing.  `links` has, for every link, the one of the first group that it is like, or -1 for one that all share."""

    places: int
    links: tuple[int, ...]


def switch(size: int, bandwidth: float, latency: float = 0.0) -> Network:
    """Ranks on one switch: each sends `bandwidth` bytes per second and receives as much, at once.  Link `2 r` leaves
    rank `r`, link `2 r + 1` ends there; the switch itself is never full."""
    names = tuple(name for rank in range(size) for name in (f"{rank} -> switch", f"switch -> {rank}"))
    return Network(
        names,
        (bandwidth,) * (2 * size),
        lambda source, target: Route(((2 * source, 1.0), (2 * target + 1, 1.0)), latency),
    )
