"""A plan and what is known of it: its bound, its bandwidth, what it puts on each link, how long it takes.

The bandwidth is what the busiest link allows: bytes are counted step by step over the plan's own programs, so no figure
here is a formula's.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from ringreduce.plan import Plan, layout, verify
from ringreduce.plan.network import LikeGroups, Network
from ringreduce.plan.simulate import Simulated, renumbered, simulate
from ringreduce.topology.graph import LinkGraph, NodeKind
from ringreduce.topology.rings import Ring
from ringreduce.topology.routes import Routes
from ringreduce.topology.trees import WeightedTree

SUSTAINED_BYTES = 2**33
"""Of a tensor so large that latencies do not count."""

MOST_RANKS = 128
"""Beyond these only plans made for the links are candidates: the other algorithms' programs grow quadratically."""


class LinkLoad(NamedTuple):
    """What a plan puts on a directed link: bytes, GB/s that it has, seconds at that speed, and these as a share of the
    busiest link's."""

    src: str
    dst: str
    bytes: float
    capacity: float
    seconds: float
    busy: float


@dataclass(frozen=True)
class Planned:
    """A plan for the ranks of a graph, and what is known of it."""

    graph: LinkGraph
    routes: Routes
    plan: Plan
    bound: float
    """GB/s: no plan in which only ranks combine can be faster over these links; with `in_switches`, none at all."""
    proof: str
    """The cut that says so."""
    reason: str
    bound_in_switches: float | None = None
    """GB/s: the bound for plans that let switches combine (NVLS) too; None where switches cannot."""
    in_switches: bool = False
    """Whether the switches combine in this plan: then it is not for our engine, but shows what NCCL's NVLS can do."""
    rings: tuple[Ring, ...] = ()
    trees: tuple[WeightedTree, ...] = ()

    @property
    def ranks(self) -> tuple[str, ...]:
        """The node that each rank is on."""
        return self.routes.ranks

    @property
    def collective(self) -> str:
        return self.plan.collective

    @cached_property
    def several_hosts(self) -> bool:
        return self.graph.several_hosts

    @cached_property
    def _like_hosts(self) -> LikeGroups | None:
        """The hosts, if one of them shows what all do."""
        found = self.routes.like_hosts if self.several_hosts else None
        if found is None or not renumbered(self.plan, found.places):
            return None
        used = zip(found.links, self.crossing(1.0), strict=True)
        return None if any(load and image < 0 for image, load in used) else found

    @cached_property
    def numbers(self) -> dict[str, str | int]:
        """What JSON calls each node: GPUs by the index that their file gives them, if there is one host; anything else
        by its name."""
        one_host = len({node.host for node in self.graph.gpus}) == 1
        indices = {node.name: node.index for node in self.graph.gpus if one_host}
        return {node.name: indices.get(node.name, node.name) for node in self.graph.nodes}

    @cached_property
    def network(self) -> Network:
        return self.routes.network()

    @cached_property
    def bandwidth(self) -> float:
        """GB/s: the size over the time of the busiest link; infinite for a single rank.

        Between hosts the stages of a plan wait for one another's slots, so there what a simulation of a large tensor
        shows counts, if that is less.
        """
        if self.several_hosts and (self.plan.size <= MOST_RANKS or self._like_hosts or self.in_switches):
            return min(self.of_links, SUSTAINED_BYTES * 1e-9 / self.simulated(SUSTAINED_BYTES))
        return self.of_links

    @cached_property
    def of_links(self) -> float:
        """GB/s: what the busiest link allows."""
        seconds = self.seconds(1e9)
        return 1.0 / seconds if seconds else math.inf

    def loads(self, size_bytes: float) -> list[LinkLoad]:
        """Every directed link that is used, the busiest first."""
        crossing = zip(self.routes.links, self.crossing(size_bytes), strict=True)
        used = [(link, load, load / link.capacity * 1e-9) for link, load in crossing if load > 0]
        longest = max((seconds for _, _, seconds in used), default=0.0)
        return [
            LinkLoad(link.src, link.dst, load, link.capacity, seconds, seconds / longest)
            for link, load, seconds in sorted(used, key=lambda each: -each[2])
        ]

    def crossing(self, size_bytes: float) -> list[float]:
        """Bytes over each link of `routes`."""
        if self.in_switches:
            return self._over_network(size_bytes) if self.several_hosts else self._over_switches(size_bytes)
        return self.routes.loads(transfers(self.plan, size_bytes))

    def _over_switches(self, size_bytes: float) -> list[float]:
        """Each rank fetches its part of the sum, which all send to the switches, itself too, and has the result copied
        to all, itself too: ``(n + 1) / n`` of the tensor each way."""
        wide = self.routes.following
        own = {link.src: sum(each.capacity for each in wide[link.src]) for link in self.routes.links}
        each_way = size_bytes * (self.plan.size + 1) / self.plan.size
        ranks = set(self.ranks)
        return [
            each_way * link.capacity / own[link.src if link.src in ranks else link.dst]
            if {link.src, link.dst} & ranks else 0.0
            for link in self.routes.links
        ]  # fmt: skip

    def _over_network(self, size_bytes: float) -> list[float]:
        """Inside a host as its stages have it. Each rank then sends its part of the host's sum to the network's
        switches, which combine the hosts', and fetches the whole sum of it.  A switch below others sends up
        what it combined."""
        node, routes = self.graph.by_name, self.routes
        of: dict[int, list[int]] = {}  # ranks by host
        for rank, name in enumerate(self.ranks):
            of.setdefault(node[name].host, []).append(rank)
        host = {rank: number for number, ranks in of.items() for rank in ranks}
        network = {each.name for each in self.graph.of_kind(NodeKind.NETWORK)}
        sent = transfers(self.plan, size_bytes)
        crossing = routes.loads({pair: amount for pair, amount in sent.items() if host[pair[0]] == host[pair[1]]})
        groups = list(of.values())
        for rank, peer in (pair for at, ranks in enumerate(groups) for pair in zip(ranks, groups[at - 1], strict=True)):
            ways = [(link, share, routes.links[link].src) for link, share in routes.between[rank, peer]]
            ways += [(link, share, routes.links[link].dst) for link, share in routes.between[peer, rank]]
            for link, share, end in ways:
                if end not in network and node[end].host == host[rank]:
                    crossing[link] += share * size_bytes / len(groups[0])
        for at, (src, dst) in enumerate((link.src, link.dst) for link in routes.links):
            ends = {src, dst}
            if ends <= network and any(0 < len(self.graph.below(switch)) < len(of) for switch in ends):
                crossing[at] = size_bytes
        return crossing

    def seconds(self, size_bytes: float) -> float:
        """Seconds that the busiest link takes."""
        return max((load.seconds for load in self.loads(size_bytes)), default=0.0)

    def simulated(self, size_bytes: int) -> float:
        """Seconds with latencies and slices, as `plan.simulate` has it."""
        if size_bytes not in self._times:
            if self.plan.size == 1:
                seconds = 0.0
            elif self.in_switches:
                seconds = self.seconds(size_bytes) + 2 * self.network.route(0, self.plan.size - 1).latency
            else:
                smaller = [size for size in self._rounds if size < size_bytes]
                found = self._simulated(size_bytes, self._rounds[max(smaller)] if smaller else 1)
                seconds, self._rounds[size_bytes] = found.seconds, found.rounds
            self._times[size_bytes] = seconds
        return self._times[size_bytes]

    def _simulated(self, size_bytes: int, rounds: int) -> Simulated:
        """`rounds`: as `simulate` has it."""
        return simulate(self.plan, self.network, size_bytes, groups=self._like_hosts, rounds=rounds)

    @property
    def whole_hosts(self) -> int:
        """The hosts that the programs and loads of one stand for; 1 where all are there."""
        return 1

    def whole(self) -> Plan:
        """The plan with the programs of all ranks."""
        return self.plan

    def verify(self) -> None:
        """Raises PlanError if the plan is wrong."""
        verify(self.plan)

    @cached_property
    def _times(self) -> dict[float, float]:
        return {}

    @cached_property
    def _rounds(self) -> dict[int, int]:
        """In which the sizes were simulated so far."""
        return {}

    def to_json(self, size_bytes: int, more: Mapping[str, Any] = MappingProxyType({})) -> str:
        """All of this for one size, and `more`, for programs."""
        number = self.numbers
        ranks = [number[name] for name in self.ranks]
        document = {
            "machine": self.graph.name,
            "ranks": ranks,
            "collective": self.collective,
            "algorithm": self.plan.name,
            "size_bytes": size_bytes,
            "bandwidth_GBps": _finite(self.bandwidth),
            "bound_GBps": _finite(self.bound),
            "bound_in_switches_GBps": self.bound_in_switches,
            "time_s": 0.0 if math.isinf(self.bandwidth) else size_bytes * 1e-9 / self.bandwidth,
            "simulated_s": self.simulated(size_bytes),
            **more,
            "reason": self.reason,
            "proof": self.proof,
            "assumed": list(self.graph.assumed),
            "rings": [
                {"order": [ranks[r] for r in each.order], "width_GBps": each.width, "both_ways": each.both_ways}
                for each in self.rings
            ],
            "trees": [
                {"parents": [None if p is None else ranks[p] for p in each.parents], "width_GBps": each.width}
                for each in self.trees
            ],
            "links": [
                {"src": number[load.src], "dst": number[load.dst], "bytes": load.bytes,
                 "capacity_GBps": load.capacity, "time_s": load.seconds}
                for load in self.loads(size_bytes)
            ],
            "plan": json.loads(self.plan.to_json()),
        }  # fmt: skip
        return json.dumps(document, indent=1, allow_nan=False)


def transfers(plan: Plan, size_bytes: float) -> dict[tuple[int, int], float]:
    """Bytes that each rank sends to each other in one call, by the steps of the plan."""
    blocks = layout(plan.collective, plan.size).blocks
    block = size_bytes / min(blocks, plan.size)  # of all_to_all, with a block per pair, a rank has one row
    total = sum(channel.share for channel in plan.channels)
    sent: dict[tuple[int, int], float] = {}
    for channel in plan.channels:
        chunk = block * channel.share / total / channel.chunks
        for rank, program in enumerate(channel.programs):
            for step in program:
                for peer in step.send:
                    sent[rank, peer] = sent.get((rank, peer), 0.0) + chunk
    return sent


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
