"""From a graph to a plan: which algorithm, over which links, how fast, and how close to what is possible.

The candidates are the decomposition's rings or trees, a hierarchy where ranks stand in groups, routes packed for the
collective where those stay below its bound, and the algorithms that know nothing of links (`plan.builders`); each is
simulated for the size at hand, with latencies, and the fastest is taken.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from typing import Any

from ringreduce.common.failures import TopologyError
from ringreduce.plan import BUILDERS, COLLECTIVES, Plan, build, ring, tree
from ringreduce.plan.routed import routed
from ringreduce.topology import many_hosts
from ringreduce.topology.bound import Bound, Cuts, Partition, bound, reducing_domains, tightest
from ringreduce.topology.decompose import AS_GOOD, Decomposition, decompose
from ringreduce.topology.graph import LinkGraph, NodeKind
from ringreduce.topology.packing import MOST_RANKS as MOST_PACKED
from ringreduce.topology.packing import pack
from ringreduce.topology.planned import MOST_RANKS, Planned, transfers
from ringreduce.topology.routes import Routes, all_routes
from ringreduce.topology.stages import directed, hierarchies, weighted

SIZE_BYTES = 160_000_000
"""A plan is for this size unless one is given: the gradients of the texts this grew out of."""

LEAST_GAIN = 0.9
"""The plan with the most bandwidth is taken unless another is simulated to take less than this share of its time:
a smaller difference depends on latencies, which are guesses."""

WIDE = 0.95
"""Where links work for more than half of that time, the other plan must have this share of the bandwidth: bandwidth is
proven, and simulated queues are not."""

ENOUGH = 0.99
"""The share of the bound from which all_reduce gets no routes of its own, which take more channels."""

MOST_SHALLOW = 8
"""Ranks up to which all_reduce gets routes of its own even where trees reach the bound: these may be shallower."""

FEW_HOSTS = 8
"""With more hosts than these that are all alike, only one host's programs are made (`many_hosts`)."""


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
    full = _full_rings(graph, collective) if algorithm == "auto" else None
    if full and LEAST_GAIN * full.simulated(size_bytes) <= size_bytes * 1e-9 / full.bound:  # nothing gains enough
        return full
    candidates = _candidates(graph, collective)
    if algorithm != "auto":
        if algorithm not in candidates:
            raise TopologyError(
                f"algorithm {algorithm!r} is not possible for {collective} here; possible are {', '.join(candidates)}"
            )
        return candidates[algorithm]
    first = best = next(iter(candidates.values()))
    usual = first.simulated(size_bytes)
    links_decide, enough = first.seconds(size_bytes) > usual / 2, LEAST_GAIN * usual
    for each in candidates.values():
        narrow = links_decide and each.of_links < WIDE * first.of_links
        # No plan takes less than its busiest link needs, which is known without a simulation.
        if each.in_switches or narrow or each.seconds(size_bytes) >= enough:
            continue
        if each.simulated(size_bytes) < enough:
            best, enough = each, each.simulated(size_bytes)
    if best is first:
        return first
    why = f"simulated with latencies it takes {enough:.3g} s, and {first.plan.name} {usual:.3g} s"
    return replace(best, reason=f"{best.reason}; {why}")


def algorithms(graph: LinkGraph, collective: str) -> tuple[str, ...]:
    """What `plan_for` could choose from, that with the most bandwidth first."""
    return tuple(_candidates(graph, collective))


def widest(graph: LinkGraph, collective: str) -> Planned:
    """The plan with the most bandwidth over the busiest link, whatever latencies are."""
    return _full_rings(graph, collective) or next(iter(_candidates(graph, collective).values()))


@lru_cache(maxsize=64)
def _full_rings(graph: LinkGraph, collective: str) -> Planned | None:
    """The rings of a host, if they reach the bound: most machines need no more, and nothing else is made for them."""
    if graph.several_hosts:
        return None
    made = next(_made_for_links(decompose(graph), collective), None)
    return made if made and made.rings and made.of_links >= AS_GOOD * made.bound else None


@lru_cache(maxsize=64)
def _candidates(graph: LinkGraph, collective: str) -> dict[str, Planned]:
    """By name; first, of those made for these links and as fast as any of them, the one with the fewest channels."""
    if (hosts := len({node.host for node in graph.ranks})) > FEW_HOSTS:
        if collective == "all_reduce" and (alike := many_hosts.candidates(graph)):
            return alike
        if hosts > many_hosts.MOST_WHOLE:
            raise TopologyError(
                f"{graph.name}: more than {many_hosts.MOST_WHOLE} hosts are planned for all_reduce only, and only if "
                "all are alike, on one network or on rails; take another collective or fewer hosts"
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
    if collective not in OVER_LINKS and not others:
        routes, why = all_routes(graph), "not all pairs have links of their own: over every link"
        limit = _cut(collective, Cuts(routes), parts.partitions)
        others = unaware(routes, limit, why)
        own = max((each.of_links for each in made), default=0.0)
        if any(each.of_links > own for each in others):
            made = list(_packed(routes, limit, why, collective))
    best = max((each.of_links for each in (*made, *(others if collective not in OVER_LINKS else ()))), default=0.0)
    made += others
    made.sort(key=lambda each: (each.plan.name in BUILDERS[collective] and collective in OVER_LINKS,
                                each.of_links < AS_GOOD * best, len(each.plan.channels)))  # fmt: skip
    if more["bound_in_switches"] and (switched := _switched(made, routes)):
        what = "switches combine and copy (NVLS)" if switched.name == "nvls" else "network combines and copies (SHARP)"
        about = f"{parts.why_links}; the {what}, which NCCL can use and our engine cannot"
        limit = bound(collective, parts.cuts, parts.partitions, in_switches=True)
        made.append(Planned(graph, routes, switched, limit.bandwidth, limit.proof, about, in_switches=True, **more))
    if not made and collective in OVER_LINKS:
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
    if not routes.graph.several_hosts:
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

    for plan, shapes in _rings_and_trees(parts, collective):
        yield planned(plan, parts.why_shape, **shapes)
    if collective == "all_reduce":
        for plan, why in hierarchies(parts.routes):
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
    direct = [build(collective, "direct", routes.size)] if collective not in OVER_LINKS else []
    others = [Planned(routes.graph, routes, plan, 0.0, "", "") for plan in direct if _possible(plan, routes)]
    others += _made_for_links(parts, collective) if parts else ()
    reached = max((each.of_links for each in others), default=0.0)
    deep = collective == "all_reduce" and routes.size <= MOST_SHALLOW and any(each.trees for each in others)
    if reached >= (ENOUGH if collective == "all_reduce" else AS_GOOD) * limit.bandwidth and not deep:
        return
    found = pack(collective, routes, limit.bandwidth)
    if found is None:
        return
    if found.bound < limit.bandwidth and (collective == "all_reduce" or collective not in OVER_LINKS):
        limit = Bound(found.bound, limit.partition, "a linear program: under its prices of links no routes cost less")
    plan = routed(collective, routes.size, found.channels, "routed")
    several = f"{len(plan.channels)} channels" if len(plan.channels) > 1 else "one channel"
    why = f"{links}; routes of its own for every block in {several}, since others reach {reached:.4g} GB/s"
    yield Planned(routes.graph, routes, plan, limit.bandwidth, limit.proof, why)


def _possible(plan: Plan, routes: Routes) -> bool:
    return all(pair in routes.between for pair in transfers(plan, 1))


OVER_LINKS = {
    "all_reduce": (ring.all_reduce, tree.all_reduce_over),
    "reduce_scatter": (ring.reduce_scatter, tree.reduce_scatter_over),
    "all_gather": (ring.all_gather, tree.all_gather_over),
    "broadcast": (ring.broadcast, tree.broadcast_over),
    "reduce": (ring.reduce, tree.reduce_over),
}
"""The collectives that run over rings, and over trees."""


def _rings_and_trees(parts: Decomposition, collective: str) -> Iterator[tuple[Plan, dict[str, Any]]]:
    if collective in OVER_LINKS:
        over_rings, over_trees = OVER_LINKS[collective]
        if parts.rings:
            yield over_rings(directed(parts.rings), "rings"), {"rings": parts.rings}
        if parts.trees:
            yield over_trees(weighted(parts.trees), "trees"), {"trees": parts.trees}
