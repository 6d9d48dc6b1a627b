"""What a group makes of its topology: which plan serves which size, and why.

Ranks on CPUs of one NUMA node share one memory: there are no links to plan over, and measured rules decide (`tuning`).
A plan comes from here if a file describes the machine (RINGREDUCE_TOPO_FILE: rank `r` of the world is on its r-th GPU
or core), if the ranks are bound to the cores of several NUMA nodes, or for CUDA tensors if each rank has a GPU of its
own.  Rank 0 plans; the others get plans and reasons from it, so that all run the same.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.common.failures import TopologyError
from ringreduce.plan import Plan, Rule, ranges_between
from ringreduce.plan.by_cost import MARGIN
from ringreduce.topology.graph import Link, LinkGraph, LinkKind, Node, NodeKind, both_directions
from ringreduce.topology.hardware import numa_nodes

if TYPE_CHECKING:
    from ringreduce.topology.planned import Planned

TENSOR_SIZES = tuple(4**power * 1024 for power in range(1, 10, 2))
"""Bytes of the whole tensor, 4 KB to 256 MB, at which plans are compared."""

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")


class OnHost(NamedTuple):
    """A host, and which ranks of the group are on it."""

    name: str
    ranks: tuple[int, ...]


class Served(NamedTuple):
    """From `begin` bytes of a block up to `end`, exclusive, `plan` serves its collective; GB/s as in `planner`."""

    begin: int
    end: int | None
    plan: Plan
    bandwidth: float
    bound: float
    reason: str


@dataclass(frozen=True)
class GroupTopology:
    """What was found and planned for a group.  `str()` of it is for people."""

    source: str
    """Where the links are known from."""
    machine: str
    ranks: tuple[str, ...]
    """The node that each rank of the group is on; empty where nothing is known of that."""
    served: tuple[Served, ...] = ()
    """What the topology has planned; the tuned rules serve the rest."""
    assumed: tuple[str, ...] = ()
    hosts: tuple[OnHost, ...] = ()
    """Where the ranks of a group over several hosts are, in the order of rings; empty if all are on one."""
    links: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Of this rank to those on other hosts, as far as they are made: the rank, and the path of each connection, such as
    "10.0.0.1:5 -> 10.0.0.2:6 via eth0"."""
    registered: tuple[str, ...] = ()
    """The plans that `register_plan` has given the group, which serve before all others: the latest last."""
    wire: str = ""
    """Latency and bandwidth between hosts that plans are chosen by, and where they are known from."""

    def rules(self) -> tuple[Rule, ...]:
        """For `plan.table`."""
        return tuple(Rule(each.plan.collective, each.plan.name, each.begin, each.end) for each in self.served)

    def plans(self) -> Mapping[tuple[str, str], Plan]:
        """By collective and name."""
        return {(each.plan.collective, each.plan.name): each.plan for each in self.served}

    @property
    def channels(self) -> int:
        """The most that a plan has."""
        return max((len(each.plan.channels) for each in self.served), default=0)

    def to_json(self) -> str:
        served = [{**each._asdict(), "plan": json.loads(each.plan.to_json())} for each in self.served]
        return json.dumps({**vars(self), "served": served})

    @staticmethod
    def from_json(text: str) -> "GroupTopology":
        """Load what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        served = (Served(**{**each, "plan": Plan.from_json(json.dumps(each["plan"]))}) for each in fields["served"])
        lists = {name: tuple(fields[name]) for name in ("ranks", "assumed", "registered")}
        lists["hosts"] = tuple(OnHost(name, tuple(ranks)) for name, ranks in fields["hosts"])
        lists["links"] = tuple((peer, tuple(paths)) for peer, paths in fields["links"])
        return GroupTopology(**{**fields, **lists, "served": tuple(served)})

    def __str__(self) -> str:
        lines = [f"{self.machine} ({self.source})"]
        if self.ranks:
            lines.append("ranks on " + " ".join(self.ranks))
        for host in self.hosts:
            lines.append(f"{host.name}: rank{'s' * (len(host.ranks) > 1)} {', '.join(map(str, host.ranks))}")
        if self.wire:
            lines.append(f"between hosts: {self.wire}; rings go through hosts in this order")
        for peer, paths in self.links:
            lines.append(f"link to rank {peer}: {'; '.join(paths)}")
        lines += [f"registered: {each}" for each in self.registered]
        if not self.served and not self.hosts:
            lines.append("nothing planned over links: the tuned rules decide (`ringreduce info`)")
        for each in self.served:
            end = "" if each.end is None else str(each.end)
            lines.append(
                f"{each.plan.collective} of {each.begin}-{end} bytes: {each.plan.name}, {each.bandwidth:.4g} of at "
                f"most {each.bound:.4g} GB/s; {each.reason}"
            )
        return "\n".join((*lines, *(f"assumed: {each}" for each in self.assumed)))


@lru_cache(maxsize=16)
def plan_group(graph: LinkGraph, source: str) -> GroupTopology:
    """Plans for the GPUs, or cores, of a graph, one a rank.

    Between cores every value is a copy in memory, so the measured rules stay, except where a hierarchy is predicted to
    take less than MARGIN of the time of two_shot: it sends less from NUMA node to NUMA node.
    """
    ranks = tuple(node.name for node in graph.ranks)
    served: list[Served] = []
    for collective in (COLLECTIVES if graph.gpus else ("all_reduce",)) if len(ranks) > 1 else ():
        planned = dict(_plans_of_gpus(graph, collective) if graph.gpus else _plans_of_cores(graph))
        blocks = len(ranks) if collective in ("reduce_scatter", "all_gather") else 1
        chosen = [(max(1, size // blocks), each.plan.name if each else "", 0) for size, each in planned.items()]
        by_name = {each.plan.name: each for each in planned.values() if each}
        for rule in ranges_between(collective, chosen):
            if each := by_name.get(rule.algorithm):
                served.append(Served(rule.begin, rule.end, each.whole(), each.bandwidth, each.bound, each.reason))
    return GroupTopology(source, graph.name, ranks, tuple(served), graph.assumed)


def _planner() -> ModuleType:
    """Needs what a group else does without."""
    try:
        return import_module("ringreduce.topology.planner")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"it needs {error.name}; pip install scipy", name=error.name) from None


def _plans_of_gpus(graph: LinkGraph, collective: str) -> Iterator[tuple[int, "Planned"]]:
    planner = _planner()
    for size in TENSOR_SIZES:
        yield size, planner.plan_for(graph, collective, size)


def _plans_of_cores(graph: LinkGraph) -> Iterator[tuple[int, "Planned | None"]]:
    """None where the tuned rules stay."""
    planner = _planner()
    names = [name for name in planner.algorithms(graph, "all_reduce") if name.startswith("hierarchical")]
    direct = planner.plan_for(graph, "all_reduce", algorithm="two_shot")
    for size in TENSOR_SIZES:
        planned = [planner.plan_for(graph, "all_reduce", size, name) for name in names]
        best = min(planned, key=lambda each: each.simulated(size), default=direct)
        yield size, best if best.simulated(size) < MARGIN * direct.simulated(size) else None


def graph_of_file(graph: LinkGraph, source: str, global_ranks: Sequence[int]) -> LinkGraph:
    """The part of a described machine that a group is on, in the order of its ranks.

    Raises TopologyError if the machine has fewer GPUs, or cores, than the world has ranks.
    """
    if max(global_ranks) >= len(graph.ranks):
        raise TopologyError(
            f"{source}: rank {max(global_ranks)} of the world is on none of its {len(graph.ranks)} GPUs or cores, "
            "since rank r is on the r-th; start fewer ranks, or describe the whole machine"
        )
    return graph.select(global_ranks)


def graph_of_gpus(machine: LinkGraph, buses: Sequence[str]) -> LinkGraph | None:
    """The part of a live machine that ranks on the GPUs with these bus ids are on, in their order; None if one of them
    is not in it, or two ranks share one."""
    places = [
        next((place for place, gpu in enumerate(machine.gpus) if gpu.detail.endswith(bus.lower())), None)
        for bus in buses
    ]
    known = [place for place in places if place is not None]
    return machine.select(known) if len(set(known)) == len(buses) else None


def graph_of_cores(cores: Sequence[frozenset[int]], memory_gbps: Callable[[], float]) -> LinkGraph | None:
    """The machine as ranks bound to `cores` see it, where these lie on several NUMA nodes, each rank's on one of them;
    else None.  `memory_gbps` says what a core moves to or from memory."""
    nodes = numa_nodes()
    homes = [next((node for node, its in nodes.items() if mine <= its), None) for mine in cores]
    if None in homes or len(set(homes)) < 2:
        return None
    used = sorted({home for home in homes if home is not None})
    cpus = tuple(Node(f"CPU{node}", NodeKind.CPU, node, numa=node) for node in used)
    ranks = tuple(Node(f"core of rank {rank}", NodeKind.CORE, rank, numa=home) for rank, home in enumerate(homes))
    gbps = memory_gbps()
    links: list[Link] = []
    for rank in ranks:
        links += both_directions(rank.name, f"CPU{rank.numa}", LinkKind.MEMORY, gbps, source="the tuning's probe")
    for at, one in enumerate(cpus):
        for other in cpus[at + 1 :]:
            links += both_directions(one.name, other.name, LinkKind.SMP, gbps, source="assumed: as one core")
    said = (
        f"{gbps:.3g} GB/s between NUMA nodes, as one core moves in memory; RINGREDUCE_TOPO_FILE describes the real ones"
    )
    return LinkGraph(f"{len(used)} NUMA nodes", (*cpus, *ranks), tuple(links), (said,))
