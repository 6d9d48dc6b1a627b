"""From a graph to a plan: which algorithm, over which links, how fast, and how close to what is possible.

The candidates are the decomposition's rings or trees, a hierarchy where ranks stand in groups, routes packed for the
collective where those stay below its bound, and the algorithms that know nothing of links (`plan.builders`); each is
simulated for the size at hand, with latencies, and the fastest is taken. Its bandwidth is what its busiest link allows:
bytes are counted step by step over the plan's own programs, so no figure here is a formula's.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import permutations
from types import MappingProxyType
from typing import Any, NamedTuple

from ringreduce.common.failures import TopologyError
from ringreduce.plan import BUILDERS, COLLECTIVES, Plan, build, hierarchical, layout, ring, tree, verify
from ringreduce.plan.network import LikeGroups, Network
from ringreduce.plan.routed import routed
from ringreduce.plan.simulate import exchanged, simulate
from ringreduce.topology.bound import Bound, Cuts, Partition, bound, reducing_domains, tightest
from ringreduce.topology.decompose import AS_GOOD, Decomposition, decompose
from ringreduce.topology.graph import LinkGraph, NodeKind
from ringreduce.topology.packing import MOST_RANKS as MOST_PACKED
from ringreduce.topology.packing import pack
from ringreduce.topology.rings import Ring
from ringreduce.topology.routes import Routes, all_routes, fabric_routes
from ringreduce.topology.trees import WeightedTree

SIZE_BYTES = 160_000_000
"""A plan is for this size unless one is given: the gradients of the texts this grew out of."""

LEAST_GAIN = 0.9
"""The plan with the most bandwidth is taken unless another is simulated to take less than this share of its time:
closer, the latencies decide, and they are guesses."""

ENOUGH = 0.99
"""The share of the bound from which all_reduce gets no routes of its own, which take more channels."""

MOST_SHALLOW = 8
"""Ranks up to which all_reduce gets routes of its own even where trees reach the bound: these may be shallower."""

SUSTAINED_BYTES = 2**33
"""Of a tensor so large that latencies do not count."""

FEW_HOSTS = 8
"""Beyond these, one host's programs stand for those of all hosts where these are alike (`many_hosts`)."""

MOST_RANKS = 128
"""Beyond these only plans made for the links are candidates: programs of others grow with the square."""

DENOMINATORS = (*range(1, 101), 1000, 10000)


class LinkLoad(NamedTuple):
    """What a plan puts on a directed link: bytes, GB/s that it has, and seconds at that speed.  A GPU is called by the
    index that its file gives it, if there is one host; anything else by its name."""

    src: str | int
    dst: str | int
    bytes: float
    capacity: float
    seconds: float


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
        return len({node.host for node in self.graph.ranks}) > 1

    @cached_property
    def _like_hosts(self) -> LikeGroups | None:
        """The hosts, if one of them shows what all do."""
        found = self.routes.like_hosts if self.several_hosts else None
        if found is None or not exchanged(self.plan, found.places):
            return None
        used = zip(found.links, self.crossing(1.0), strict=True)
        return None if any(load and image < 0 for image, load in used) else found

    @cached_property
    def _numbers(self) -> dict[str, int]:
        one_host = len({node.host for node in self.graph.gpus}) == 1
        return {node.name: node.index for node in self.graph.gpus if one_host}

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
        number = self._numbers
        shares = self.crossing(size_bytes)
        used = [
            LinkLoad(
                number.get(link.src, link.src),
                number.get(link.dst, link.dst),
                load,
                link.capacity,
                load / link.capacity * 1e-9,
            )
            for link, load in zip(self.routes.links, shares, strict=True)
            if load > 0
        ]
        return sorted(used, key=lambda load: -load.seconds)

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
        """What the busiest link needs."""
        return max((load.seconds for load in self.loads(size_bytes)), default=0.0)

    def simulated(self, size_bytes: int) -> float:
        """Seconds with latencies and slices, as `plan.simulate` has it."""
        if size_bytes not in self._times:
            if self.plan.size == 1:
                seconds = 0.0
            elif self.in_switches:
                seconds = self.seconds(size_bytes) + 2 * self.network.route(0, self.plan.size - 1).latency
            else:
                seconds = self._simulated(size_bytes)
            self._times[size_bytes] = seconds
        return self._times[size_bytes]

    def _simulated(self, size_bytes: int) -> float:
        return simulate(self.plan, self.network, size_bytes, groups=self._like_hosts).seconds

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

    def to_json(self, size_bytes: int, more: Mapping[str, Any] = MappingProxyType({})) -> str:
        """All of this for one size, and `more`, for programs."""
        ranks = [self._numbers.get(name, name) for name in self.ranks]
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
                {"src": load.src, "dst": load.dst, "bytes": load.bytes, "capacity_GBps": load.capacity,
                 "time_s": load.seconds}
                for load in self.loads(size_bytes)
            ],
            "plan": json.loads(self.plan.to_json()),
        }  # fmt: skip
        return json.dumps(document, indent=1, allow_nan=False)


def plan_for(
    graph: LinkGraph, collective: str = "all_reduce", size_bytes: int = SIZE_BYTES, algorithm: str = "auto"
) -> Planned:
    """The plan of a collective for the GPUs of a graph (`LinkGraph.select` restricts it to a job's).

    `size_bytes` is of the whole tensor: of all ranks' blocks together for all_gather and reduce_scatter, of one rank's
    tensor for all_to_all.  `algorithm` is "auto" or one of `algorithms`.  Raises TopologyError for an algorithm that
    this machine has no links for, and if the ranks are not connected.
    """
    if collective not in COLLECTIVES:
        raise TopologyError(f"collective {collective!r} is unknown; known are {', '.join(COLLECTIVES)}")
    if size_bytes < 1:
        raise TopologyError(f"size_bytes is {size_bytes}; it must be at least 1")
    candidates = _candidates(graph, collective)
    if algorithm != "auto":
        if algorithm not in candidates:
            raise TopologyError(
                f"algorithm {algorithm!r} is not possible for {collective} here; possible are {', '.join(candidates)}"
            )
        return candidates[algorithm]
    first = best = next(iter(candidates.values()))
    enough = LEAST_GAIN * first.simulated(size_bytes)
    for each in candidates.values():
        # No plan takes less than its busiest link needs, which is known without a simulation.
        if each.in_switches or each.seconds(size_bytes) >= enough:
            continue
        if each.simulated(size_bytes) < enough:
            best, enough = each, each.simulated(size_bytes)
    if best is first:
        return first
    taken, usual = best.simulated(size_bytes), first.simulated(size_bytes)
    why = f"simulated with latencies it takes {taken:.3g} s, and {first.plan.name} {usual:.3g} s"
    return replace(best, reason=f"{best.reason}; {why}")


def algorithms(graph: LinkGraph, collective: str) -> tuple[str, ...]:
    """What `plan_for` could choose from, that with the most bandwidth first."""
    return tuple(_candidates(graph, collective))


def widest(graph: LinkGraph, collective: str) -> Planned:
    """The plan with the most bandwidth over the busiest link, whatever latencies are."""
    return next(iter(_candidates(graph, collective).values()))


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


def weights(widths: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of the widths, as small as four digits of precision allow."""
    widest = max(widths)
    for top in DENOMINATORS:
        rounded = [max(1, round(width / widest * top)) for width in widths]
        if all(
            math.isclose(each / top, width / widest, rel_tol=1e-4) for each, width in zip(rounded, widths, strict=True)
        ):
            break
    divisor = math.gcd(*rounded)
    return [each // divisor for each in rounded]


@lru_cache(maxsize=64)
def _candidates(graph: LinkGraph, collective: str) -> dict[str, Planned]:
    """By name; first, of those made for these links and as fast as any of them, the one with the fewest channels."""
    if (hosts := len({node.host for node in graph.ranks})) > FEW_HOSTS:
        from ringreduce.topology.many_hosts import MOST_WHOLE, candidates

        if collective == "all_reduce" and (alike := candidates(graph)):
            return alike
        if hosts > MOST_WHOLE:
            raise TopologyError(
                f"{graph.name}: more than {MOST_WHOLE} hosts are planned for all_reduce only, and only if all "
                "are alike, on one network or on rails; take another collective or fewer hosts"
            )
    parts = decompose(graph)
    routes, limit, more, why = parts.routes, _limit(graph, collective), _in_switches(graph, collective), parts.why_links
    made = [*_made_for_links(parts, collective), *_packed(routes, limit, why, collective, parts)]
    if made and (tight := min(made, key=lambda each: each.bound)).bound < limit.bandwidth:
        limit = replace(limit, bandwidth=tight.bound, proof=tight.proof)
        made = [replace(each, bound=tight.bound, proof=tight.proof) for each in made]

    def unaware(routes: Routes, limit: Bound, why: str) -> list[Planned]:
        plans = (build(collective, name, routes.size) for name in BUILDERS[collective])
        about = ((plan, f"{why}; {plan.name}, which knows nothing of links") for plan in plans)
        return [
            Planned(graph, routes, plan, limit.bandwidth, limit.proof, text, **more)
            for plan, text in (about if routes.size <= MOST_RANKS else ())
            if _possible(plan, routes)
        ]

    others = unaware(routes, limit, why)
    if collective not in OVER_RINGS and not others:
        routes, why = all_routes(graph), "not all pairs have links of their own: over every link"
        limit = _cut(collective, Cuts(routes), parts.partitions)
        others = unaware(routes, limit, why)
        own = max((each.of_links for each in made), default=0.0)
        if any(each.of_links > own for each in others):
            made = list(_packed(routes, limit, why, collective))
    best = max((each.of_links for each in (*made, *(others if collective not in OVER_RINGS else ()))), default=0.0)
    made += others
    made.sort(key=lambda each: (each.plan.name in BUILDERS[collective] and collective in OVER_RINGS,
                                each.of_links < AS_GOOD * best, len(each.plan.channels)))  # fmt: skip
    if more["bound_in_switches"] and (switched := _switched(made, routes)):
        what = "switches combine and copy (NVLS)" if switched.name == "nvls" else "network combines and copies (SHARP)"
        about = f"{parts.why_links}; the {what}, which NCCL can use and our engine cannot"
        limit = bound(collective, parts.cuts, parts.partitions, in_switches=True)
        made.append(Planned(graph, routes, switched, limit.bandwidth, limit.proof, about, in_switches=True, **more))
    if not made and collective in OVER_RINGS:
        raise TopologyError(f"{graph.name}: no rings or trees were found for {collective} over these links")
    if not made:
        one, other = next(p for p in permutations(range(routes.size), 2) if p not in routes.between)
        raise TopologyError(
            f"{graph.name}: {collective} goes from rank to rank directly, and there is no path from "
            f"{routes.ranks[one]} to {routes.ranks[other]}; add the PCIe links to the topology"
        )
    return {each.plan.name: each for each in made}


def _switched(made: Sequence[Planned], routes: Routes) -> Plan | None:
    """The plan that says between which ranks switches combine: of one host all of them, else its places."""
    if len({node.host for node in routes.graph.ranks}) == 1:
        everyone = any(len(domain) == routes.size for domain in reducing_domains(routes))
        return replace(build("all_reduce", "two_shot", routes.size), name="nvls") if made and everyone else None
    reducing = any(node.reduces for node in routes.graph.of_kind(NodeKind.NETWORK))
    alike = len(set(Counter(node.host for node in routes.graph.ranks).values())) == 1
    stages = (each.plan for each in made if each.plan.name == "hierarchical_ring")
    return next((replace(plan, name="sharp") for plan in stages if reducing and alike), None)


def _cut(collective: str, cuts: Cuts, tried: Sequence[Partition]) -> Bound:
    single = collective not in ("all_reduce", "all_to_all") and 1 < cuts.routes.size <= MOST_PACKED
    return bound(collective, cuts, (*tried, tightest(collective, cuts)) if single else tried)


@lru_cache(maxsize=64)
def _limit(graph: LinkGraph, collective: str) -> Bound:
    """Over the links that the decomposition uses."""
    parts = decompose(graph)
    return _cut(collective, parts.cuts, parts.partitions)


@lru_cache(maxsize=64)
def _in_switches(graph: LinkGraph, collective: str) -> dict[str, Any]:
    """What switches that combine would make possible."""
    parts = decompose(graph)
    if collective != "all_reduce" or parts.routes.size == 1 or not reducing_domains(parts.routes):
        return {"bound_in_switches": None}
    return {"bound_in_switches": bound(collective, parts.cuts, parts.partitions, in_switches=True).bandwidth}


def _made_for_links(parts: Decomposition, collective: str) -> Iterator[Planned]:
    limit, more = _limit(parts.routes.graph, collective), _in_switches(parts.routes.graph, collective)

    def planned(plan: Plan, why: str, **shapes: Any) -> Planned:
        about = f"{parts.why_links}; {why}"
        return Planned(parts.routes.graph, parts.routes, plan, limit.bandwidth, limit.proof, about, **more, **shapes)

    for plan, shapes in (*_rings(parts, collective), *_trees(parts, collective)):
        yield planned(plan, parts.why_shape, **shapes)
    if collective == "all_reduce":
        for plan, why in _hierarchies(parts.routes):
            if _possible(plan, parts.routes):
                yield planned(plan, why)


def _packed(
    routes: Routes, limit: Bound, links: str, collective: str, parts: Decomposition | None = None
) -> Iterator[Planned]:
    """Routes of their own for every block, where what there is already stays below the bound: the rings and trees of a
    decomposition, or direct exchange."""
    hosts = {node.host for node in routes.graph.ranks}
    if not 1 < routes.size <= MOST_PACKED or (collective == "all_reduce" and len(hosts) > 1):  # these go in stages
        return
    direct = [build(collective, "direct", routes.size)] if collective not in OVER_RINGS else []
    others = [Planned(routes.graph, routes, plan, 0.0, "", "") for plan in direct if _possible(plan, routes)]
    others += _made_for_links(parts, collective) if parts else ()
    reached = max((each.of_links for each in others), default=0.0)
    deep = collective == "all_reduce" and routes.size <= MOST_SHALLOW and any(each.trees for each in others)
    if reached >= (ENOUGH if collective == "all_reduce" else AS_GOOD) * limit.bandwidth and not deep:
        return
    found = pack(collective, routes, limit.bandwidth)
    if found is None:
        return
    if found.bound < limit.bandwidth and (collective == "all_reduce" or collective not in OVER_RINGS):
        limit = Bound(found.bound, limit.partition, "a linear program: under its prices of links no routes cost less")
    plan = routed(collective, routes.size, found.channels, "routed")
    several = f"{len(plan.channels)} channels" if len(plan.channels) > 1 else "one channel"
    why = f"{links}; routes of its own for every block in {several}, since others reach {reached:.4g} GB/s"
    yield Planned(routes.graph, routes, plan, limit.bandwidth, limit.proof, why)


def _possible(plan: Plan, routes: Routes) -> bool:
    return all(pair in routes.between for pair in transfers(plan, 1))


Found = tuple[Plan, dict[str, Any]]

OVER_RINGS = {
    "all_reduce": ring.all_reduce,
    "reduce_scatter": ring.reduce_scatter,
    "all_gather": ring.all_gather,
    "broadcast": ring.broadcast,
    "reduce": ring.reduce,
}
OVER_TREES = {
    "all_reduce": tree.all_reduce_over,
    "reduce_scatter": tree.reduce_scatter_over,
    "all_gather": tree.all_gather_over,
    "broadcast": tree.broadcast_over,
    "reduce": tree.reduce_over,
}


def _rings(parts: Decomposition, collective: str) -> Iterator[Found]:
    if parts.rings and collective in OVER_RINGS:
        yield OVER_RINGS[collective](_directed(parts.rings), "rings"), {"rings": parts.rings}


def _trees(parts: Decomposition, collective: str) -> Iterator[Found]:
    if parts.trees and collective in OVER_TREES:
        yield OVER_TREES[collective](_weighted(parts.trees), "trees"), {"trees": parts.trees}


def _directed(rings: Sequence[Ring]) -> list[tuple[tuple[int, ...], int]]:
    """Every ring in each of its directions, with its weight."""
    return [
        (order, weight)
        for each, weight in zip(rings, weights([each.width for each in rings]), strict=True)
        for order in ((each.order, each.order[::-1]) if each.both_ways else (each.order,))
    ]


def _weighted(trees: Sequence[WeightedTree]) -> list[tuple[tree.Tree, int]]:
    return [(each.parents, w) for each, w in zip(trees, weights([each.width for each in trees]), strict=True)]


def _groups(routes: Routes) -> Partition:
    """Ranks that are close to each other: of a host, else joined by links of their own, else of a NUMA node; nothing if
    that gives one group, groups of one, or groups of several sizes."""
    nodes = [routes.graph.by_name[name] for name in routes.ranks]
    own = {rank: part[0] for part in fabric_routes(routes.graph).components for rank in part}
    numa = [(node.host, node.numa) for node in nodes]
    for keys in ([node.host for node in nodes], [own[rank] for rank in range(routes.size)], numa):
        groups = tuple(tuple(r for r, mine in enumerate(keys) if mine == key) for key in dict.fromkeys(keys))
        if len(groups) > 1 and len(groups[0]) > 1 and len({len(group) for group in groups}) == 1:
            return groups
    return ()


def _hierarchies(routes: Routes) -> Iterator[tuple[Plan, str]]:
    groups = _groups(routes)
    if not groups:
        return
    try:
        inside = list(inside_groups(routes, groups))
    except TopologyError:  # a group is not connected by itself
        return
    why = f"in groups: {' | '.join(' '.join(routes.ranks[rank] for rank in group) for group in groups)}"
    for name in ("ring", "halving_doubling") if len(groups) > 2 else ("ring",):  # of two groups they are the same
        across = build("all_reduce", name, len(groups))
        stages = [hierarchical.Stages(scatter, across, gather, weight) for scatter, gather, weight in inside]
        yield hierarchical.all_reduce(groups, stages, f"hierarchical_{name}"), why


def inside_groups(routes: Routes, groups: Partition) -> Iterator[tuple[Plan, Plan, int]]:
    """The first group's rings or trees, by places, which the others are taken to have too."""
    if not routes.graph.gpus:
        one = ((tuple(range(len(groups[0]))), 1),)
        yield ring.reduce_scatter(one), ring.all_gather(one), 1
        return
    first = decompose(routes.graph.select(groups[0]))
    for order, weight in () if first.trees else _directed(first.rings):
        yield ring.reduce_scatter(((order, 1),)), ring.all_gather(((order, 1),)), weight
    for shape, weight in _weighted(first.trees) if first.trees else ():
        yield tree.reduce_scatter_over(((shape, 1),)), tree.all_gather_over(((shape, 1),)), weight


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
