"""What a group over several hosts adds: plans between hosts, and the links that they run over."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringreduce import plan
from ringreduce.plan import Plan, Rule, Slicing
from ringreduce.plan import hosts as between
from ringreduce.plan.choose import ROOTED
from ringreduce.rendezvous import Door, Meeting, Peer

FEW = 4
"""Plans in which no rank has more peers on other hosts, rings and trees that is, have their links made at once. The
links of others are made when such a plan first runs."""

CONNECT_SECONDS = 60.0
"""For a link to be made, if the call that needs it does not end before: addresses that nothing answers at may be tried
for as long as that, and a group's timeout is half an hour."""

PATIENCE = 2.0
"""Seconds in which, while a group is made, the lower rank of a pair may connect before the higher one tries as well:
more than a door waits for further interfaces (`links.GRACE_SECONDS`)."""

Hosts = tuple[tuple[int, ...], ...]


class Wire(NamedTuple):
    """What is known of the network between hosts."""

    latency: float = 50e-6
    """Seconds, one way."""
    bandwidth: float = 1.25e9
    """Bytes per second that a host sends."""


@functools.lru_cache(maxsize=64)
def plans_for(hosts: Hosts, wire: Wire, slicing: Slicing) -> tuple[tuple[Rule, ...], Mapping[tuple[str, str], Plan]]:
    """What runs for which size between these hosts, and the plans by collective and name; the same on all ranks.

    Plans of rooted collectives are for a root of their own: see `plans_for_root`.
    """
    rules: list[Rule] = []
    plans = {}
    for collective in plan.BUILDERS:
        if collective not in ROOTED:
            for begin, end, chosen in between.choose(collective, hosts, *wire, slicing=slicing):
                rules.append(Rule(collective, chosen.name, begin, end))
                plans[collective, chosen.name] = chosen
    return tuple(rules), plans


@functools.lru_cache(maxsize=256)
def plans_for_root(
    hosts: Hosts, wire: Wire, slicing: Slicing, collective: str, root: int
) -> tuple[tuple[int | None, Plan], ...]:
    """The same for one rooted collective and root: up to which size of a block, exclusive, and the plan."""
    chosen = between.choose(collective, hosts, *wire, root, slicing=slicing)
    return tuple((end, each) for _, end, each in chosen)


def peers_in(plans: Iterable[Plan], rank: int, hosts: Sequence[Sequence[int]]) -> list[int]:
    """The ranks on other hosts that `rank` is to be linked with from the start: those of plans that need few."""
    home = {r: number for number, host in enumerate(hosts) for r in host}

    def far(each: Plan, r: int) -> set[int]:
        steps = (step for channel in each.channels for step in channel.programs[r])
        return {peer for step in steps for peer in (*step.recv, *step.send) if home[peer] != home[r]}

    peers: set[int] = set()
    for each in plans:
        if all(len(far(each, r)) <= FEW for r in home):  # for all, as both ends of a link must think the same
            peers |= far(each, rank)
    return sorted(peers)


@dataclass(frozen=True)
class LinkStats:
    """Of the link from this rank to another one, since the group was made."""

    paths: tuple[str, ...]
    """Of each connection: "10.0.0.1:5 -> 10.0.0.2:6 via eth0"."""
    bytes_out: int
    bytes_in: int
    frames_out: int
    frames_in: int


class Links:
    """This rank's door, and the group that gets what comes through it. Lives until the group is shut down."""

    def __init__(self, meeting: Meeting, name: str, rank: int, connections: int, dead_after: float) -> None:
        assert meeting.door is not None
        self._door: Door = meeting.door
        self._meeting, self._name, self._rank = meeting, name, rank
        self._connections, self._dead_after = connections, dead_after
        self._group: Any = None
        here = next(host for host in meeting.hosts if rank in host)
        self.elsewhere = [r not in here for r in range(len(meeting.names))]

    def open(self, group: Any) -> None:
        """From here on peers are let in, and their connections go to `group`."""
        peers = {
            r: Peer(*self._meeting.names[r], self._meeting.doors[r]) for r, far in enumerate(self.elsewhere) if far
        }
        self._group = group
        self._door.open(
            self._rank,
            self._name,
            self._meeting.secret,
            peers,
            group.add_link,
            self._connections,
            self._dead_after,
        )

    def connect(self, peer: int, seconds: float) -> None:
        """Has a link to `peer`, which need not be in any call, made; called by the engine when it needs one."""
        self._door.connect([peer], time.monotonic() + min(seconds, CONNECT_SECONDS))

    def connect_all(self, peers: Iterable[int], seconds: float) -> None:
        """Has the links to these peers made, all at once; they have theirs to this rank made at the same time."""
        self._door.connect(peers, time.monotonic() + min(seconds, CONNECT_SECONDS), PATIENCE)

    def close(self) -> None:
        """Lets nobody in any more; called when the group is shut down."""
        self._door.close()
        self._group = None  # which keeps this alive

    @property
    def hosts(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The name of each host, and its ranks."""
        return tuple((self._meeting.names[host[0]][0], tuple(host)) for host in self._meeting.hosts)

    @property
    def group(self) -> Any:
        """What the connections go to; None before `open` and after `close`."""
        return self._group

    @property
    def stats(self) -> dict[int, LinkStats]:
        """Of the links that there are, by the rank at the other end."""
        group = self._group
        return {
            c.peer: LinkStats(tuple(c.paths), c.bytes_out, c.bytes_in, c.frames_out, c.frames_in)
            for c in (group.links() if group else ())
        }

    @property
    def refused(self) -> dict[str, int]:
        """Connections that this rank refused, by reason; see `Door.counts`."""
        return {reason: number for reason, number in self._door.counts.items() if reason != "accepted"}


_living: weakref.WeakValueDictionary[str, Links] = weakref.WeakValueDictionary()


def remember(name: str, links: Links) -> None:
    """For `all_links`: these are the links of the group that torch knows by this name."""
    _living[name] = links


def all_links() -> dict[str, Links]:
    """Of the groups of this process that have ranks on other hosts, by name."""
    return {name: links for name, links in list(_living.items()) if links.group is not None}


def links_of(group: Any) -> Links | None:
    """None if all ranks of the group are on one host."""
    return next((links for links in all_links().values() if links.group is group), None)
