"""What a group over several hosts adds: plans between hosts, and the links that they run over."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringreduce import plan
from ringreduce.common.failures import CollectiveTimeout, RingReduceError, TopologyError
from ringreduce.groups.meet import Meeting
from ringreduce.network.interfaces import speed_of
from ringreduce.network.listener import Door, Peer
from ringreduce.plan import Plan, Rule, Slicing
from ringreduce.plan import across_hosts as between
from ringreduce.plan.choose import ROOTED
from ringreduce.topology import hosts_file
from ringreduce.topology.host_order import ring_order

BY_ROOT = tuple(collective for collective in ROOTED if collective not in between.PLAIN)
"""Collectives whose plans between hosts are for a root of their own: see `plans_for_root`."""

FEW = 4
"""Plans in which no rank has more peers on other hosts, rings and trees that is, have their links made at once. The
links of others are made when such a plan first runs."""

CONNECT_SECONDS = 60.0
"""For a link to be made, if the call that needs it does not end before: addresses that nothing answers at may be tried
for as long as that, and a group's timeout is half an hour."""

PATIENCE = 2.0
"""Seconds in which, while a group is made, the lower rank of a pair may connect before the higher one tries as well:
more than a door waits for further interfaces (`paths.GRACE_SECONDS`)."""

LEARN_SECONDS = 5.0
"""For neighbours to connect so that the way between them can be measured; who is later is not waited for."""

PROCESSES = 40e-6
"""Seconds a message takes beside what TCP sees of its way: system calls, and a rank that has to notice. Between four
namespaces on a 2-core Xeon, November 2026, where half of TCP's round trip was 5 us, with 0 us here plans were chosen
that took up to 1.5 times as long (16 KB), with 15 us up to 1.7 times (1 MB)."""

UNDER_WAY = 1 << 20
"""Bytes that are assumed to be on their way to a host at most. TCP's windows go to 4 MB and more, but lines between
sites have losses and other users; a plan that sends more than it must should not rely on them being fast."""

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each, in the order of rings."""

log = logging.getLogger(__name__)


class Wire(NamedTuple):
    """What is known of the network between hosts, and from where."""

    latency: float = 50e-6
    """Seconds, one way."""
    bandwidth: float = 1.25e9
    """Bytes per second that a host sends."""
    latency_from: str = "assumed"
    bandwidth_from: str = "assumed"

    def __str__(self) -> str:
        return (
            f"latency {self.latency * 1e6:.3g} us ({self.latency_from}), "
            f"bandwidth {self.bandwidth * 8e-9:.3g} Gbit/s ({self.bandwidth_from})"
        )


def by_file(path: str, hosts: Hosts, labels: Sequence[str]) -> tuple[Hosts, Wire | None]:
    """The hosts in the order of the best ring, and the slowest of its hops, by what a file says of hosts with these
    labels. If it does not know them: the hosts as they are, None, and a warning.

    Raises OSError and ValueError as `hosts_file.load` does.
    """
    measured = hosts_file.load(path)
    try:
        latency, bandwidth = measured.of(labels)
        order = ring_order([[1e-9 * value for value in row] for row in bandwidth]).order
    except (ValueError, TopologyError) as error:
        log.warning("%s does not serve this job: %s. Rings go through hosts as they come", path, error)
        return hosts, None
    hops = list(zip(order, (*order[1:], order[0]), strict=True))
    said = f"{path}, {measured.date}: the slowest hop of the ring"
    slowest = max(latency[a][b] for a, b in hops), min(bandwidth[a][b] for a, b in hops)
    return tuple(hosts[number] for number in order), Wire(*slowest, said, said)


class Noticed(NamedTuple):
    """What the first rank of a host has to say of its way to those of the hosts next to it."""

    round_trips: list[tuple[int, float]]
    """Ranks, and seconds."""
    speed: float | None
    """Bytes per second of the interfaces; None if nobody knows."""


def wire_of(noticed: Mapping[int, Noticed]) -> Wire:
    """What plans are chosen by, from what the first ranks of hosts have noticed; who said nothing is not in it.

    Of a hop's two ends the one with the shorter round trip is right: the other was disturbed. Of hops the longest
    counts: no plan ends before it has been crossed. It is rounded to 1, 2 or 5, so that, but for networks between
    two of these, plans and with them the order of float sums are the same from run to run.
    """
    hops: dict[frozenset[int], float] = {}
    for rank, said in noticed.items():
        for peer, seconds in said.round_trips:
            hop = frozenset((rank, peer))
            hops[hop] = min(seconds, hops.get(hop, math.inf))
    wire = Wire()
    if speeds := _if_all_known(said.speed for said in noticed.values()):
        wire = wire._replace(bandwidth=min(speeds), bandwidth_from="the slowest host's interfaces")
    if not hops:
        return wire
    wire = wire._replace(
        latency=_round(max(hops.values()) / 2 + PROCESSES), latency_from=f"measured: the longest of {len(hops)} hops"
    )
    likely = UNDER_WAY / (2 * wire.latency)
    if likely < wire.bandwidth:
        wire = wire._replace(bandwidth=likely, bandwidth_from="assumed of a line of this length")
    return wire


def _if_all_known(speeds: Iterable[float | None]) -> list[float]:
    """The values, or an empty list if one of them is None."""
    given = list(speeds)
    known = [speed for speed in given if speed is not None]
    return known if len(known) == len(given) else []


def _round(seconds: float) -> float:
    """To the nearest of 1, 2 and 5 times a power of ten."""
    power = math.floor(math.log10(seconds))
    near = [float(f"{digit}e{power}") for digit in (1, 2, 5, 10)]
    return min(near, key=lambda each: abs(math.log(each / seconds)))


PACKED = {"float32": 1.0, "bfloat16": 1 / 2, "int8": 33 / 128, "int4": 17 / 128}
"""By `Options.wire_dtype`: what is left of float32's bytes (csrc/kernels/packing.h)."""


@functools.lru_cache(maxsize=64)
def plans_for(
    hosts: Hosts, wire: Wire, slicing: Slicing, wire_dtype: str = "float32", few_roundings: bool = False
) -> tuple[tuple[Rule, ...], Mapping[tuple[str, str], Plan]]:
    """What runs for which size between these hosts, and the plans by collective and name; the same on all ranks.

    Plans of rooted collectives are for a root of their own: see `plans_for_root`.
    """
    rules: list[Rule] = []
    plans = {}
    for collective in plan.BUILDERS:
        if collective not in ROOTED:
            packed = PACKED[wire_dtype]
            for begin, end, chosen in between.choose(
                collective,
                hosts,
                wire.latency,
                wire.bandwidth,
                slicing=slicing,
                packed=packed,
                few_roundings=few_roundings,
            ):
                rules.append(Rule(collective, chosen.name, begin, end))
                plans[collective, chosen.name] = chosen
    return tuple(rules), plans


@functools.lru_cache(maxsize=256)
def plans_for_root(
    hosts: Hosts, wire: Wire, slicing: Slicing, collective: str, root: int, few_roundings: bool = False
) -> tuple[tuple[int | None, Plan], ...]:
    """The same for one rooted collective and root: up to which size of a block, exclusive, and the plan."""
    chosen = between.choose(
        collective, hosts, wire.latency, wire.bandwidth, root, slicing=slicing, few_roundings=few_roundings
    )
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
    round_trip: float
    """Seconds, as TCP finds it of late, of the slowest connection; grows while much is under way."""
    resent: int
    """Packets that TCP has sent again."""


class Links:
    """This rank's door, and the group that gets what comes through it. Lives until the group is shut down."""

    order: Hosts
    """The ranks of each host, in the order of rings."""
    wire: Wire
    """The same on all ranks, as `order` is. Before `learn`: what is assumed."""

    def __init__(
        self,
        meeting: Meeting,
        name: str,
        rank: int,
        order: Hosts,
        wire: Wire | None,
        connections: int,
        dead_after: float,
    ) -> None:
        """`wire`: what rank 0 had read in a file, if it had."""
        assert meeting.door is not None
        self._door: Door = meeting.door
        self._meeting, self._name, self._rank = meeting, name, rank
        self._connections, self._dead_after = connections, dead_after
        self.order, self.wire, self._known = order, wire or Wire(), wire is not None
        self.group: Any = None
        """What the connections go to; None before `open` and after `close`."""
        here = next(host for host in meeting.hosts if rank in host)
        self.elsewhere = [r not in here for r in range(len(meeting.names))]
        self.unreached: set[int] = set()
        """Peers that a call needed a link to, and that did not answer in time."""

    def open(self, group: Any) -> None:
        """From here on peers are let in, and their connections go to `group`."""
        peers = {
            r: Peer(*self._meeting.names[r], self._meeting.doors[r]) for r, far in enumerate(self.elsewhere) if far
        }
        self.group = group
        self._door.open(
            self._rank,
            self._name,
            self._meeting.secret,
            peers,
            group.add_link,
            self._connections,
            self._dead_after,
            self._meeting.exchange.ranks,
        )

    def connect(self, peer: int, seconds: float) -> None:
        """Has a link to `peer`, which need not be in any call, made; called by the engine when it needs one."""
        try:
            self._door.connect([peer], time.monotonic() + min(seconds, CONNECT_SECONDS))
        except CollectiveTimeout:
            self.unreached.add(peer)
            raise

    def connect_all(self, peers: Iterable[int], seconds: float) -> None:
        """Has the links to these peers made, all at once; they have theirs to this rank made at the same time."""
        until = time.monotonic() + min(seconds, CONNECT_SECONDS)
        try:
            self._door.connect(peers, until, PATIENCE, self._meeting.exchange.raise_if_lost)
        except CollectiveTimeout as error:
            if error.culprit not in self._door.reached:
                raise
            raise CollectiveTimeout(str(error)) from None  # it may be waiting for another rank, of its host

    def learn(self, seconds: float) -> None:
        """Settles `wire`, before plans are chosen. Called on all ranks, which all hear it from rank 0.

        The first ranks of neighbouring hosts connect, which rings will need anyway, and tell what they notice. Links
        that cannot be made now are nobody's error yet.
        """
        if self._known:
            return
        patience = min(LEARN_SECONDS, seconds / 4)
        until = time.monotonic() + 2 * patience
        exchange = self._meeting.exchange
        firsts = [host[0] for host in self.order]
        if self._rank in firsts:
            exchange.tell("wire", self._notice(firsts, patience))
        if self._rank == 0:
            noticed = {}
            for first in firsts:
                try:
                    noticed[first] = Noticed(*exchange.told("wire", first, until))
                except CollectiveTimeout as error:
                    log.info("plans are chosen without what it knows: %s", error)
            self.wire = exchange.publish("wire", wire_of(noticed))
        else:
            self.wire = Wire(*exchange.answer("wire", time.monotonic() + min(seconds, CONNECT_SECONDS)))

    def _notice(self, firsts: Sequence[int], patience: float) -> Noticed:
        at = firsts.index(self._rank)
        near = {firsts[at - 1], firsts[(at + 1) % len(firsts)]}
        try:
            self.connect_all(near, patience)
        except RingReduceError as error:
            log.info("plans are chosen without what a link would tell: %s", error)
        contacts = {peer: contact for peer in sorted(near) if (contact := self._door.contacts.get(peer))}
        speeds = _if_all_known(map(speed_of, {name for contact in contacts.values() for name in contact.interfaces}))
        round_trips = [(peer, contact.round_trip) for peer, contact in contacts.items()]
        return Noticed(round_trips, sum(speeds) if speeds else None)

    def close(self) -> None:
        """Lets nobody in any more; called when the group is shut down."""
        self._door.close()
        self.group = None  # which keeps this alive

    @property
    def hosts(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The name of each host, and its ranks, in the order of rings."""
        return tuple((self._meeting.names[host[0]][0], host) for host in self.order)

    @property
    def stats(self) -> dict[int, LinkStats]:
        """Of the links that there are, by the rank at the other end."""
        group = self.group
        return {
            c.peer: LinkStats(
                tuple(c.paths), c.bytes_out, c.bytes_in, c.frames_out, c.frames_in, c.round_trip, c.resent
            )
            for c in (group.links() if group else ())
        }

    @property
    def refused(self) -> dict[str, int]:
        """Connections that this rank refused, by reason; see `Door.counts`."""
        return {reason: number for reason, number in self._door.counts.items() if reason != "accepted"}
