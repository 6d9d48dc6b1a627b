"""Many hosts that are alike: one host's programs and a rule stand for all, so 1,024 hosts are planned in seconds.

Hosts are alike if each is a copy of the first, with names after its prefix ``host<h>/``, and has links to the same
switches of the network.  all_reduce goes in stages there (`plan.hierarchical`).  Host `h` does what the first host
does, with the hosts renumbered as the algorithm between hosts has it (`plan.symmetric`).  So the links of the first
host show the load of all, and its messages, which it gets back itself, show the time (`simulate_first`).  Bounds come
from the first host and a second one that is as wide as all others together.

Up to `FEW` hosts every rank's program is made instead; tests compare the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ringreduce.common.failures import TopologyError
from ringreduce.plan import Plan, build, hierarchical, lower_for, symmetric, verify
from ringreduce.plan.network import LikeGroups, Network, Route
from ringreduce.plan.simulate import Simulated, simulate_first
from ringreduce.topology.bound import Bound, Cuts, bound, reducing_domains
from ringreduce.topology.clusters import hosts_by_kind, of_hosts
from ringreduce.topology.graph import LinkGraph, NodeKind
from ringreduce.topology.planned import Planned, transfers
from ringreduce.topology.routes import Routes, all_routes
from ringreduce.topology.stages import inside_groups

MOST_WHOLE = 64
"""Hosts up to which the programs of all ranks are made, for those who run them."""

Inside = Sequence[tuple[Plan, Plan, int]]
"""By channel: reduce_scatter and all_gather inside a host, and the weight."""


@dataclass(frozen=True, kw_only=True)
class OneForAll(Planned):
    """A plan in stages, with the programs of the first host only.  `routes` are those of two hosts."""

    hosts: int
    inside: Inside
    across: str
    """The algorithm between hosts, a symmetric one."""
    two: Planned
    """The same stages between two hosts, with all programs."""

    @property
    def ranks(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.graph.ranks)

    @property
    def several_hosts(self) -> bool:
        return True

    @property
    def _like_hosts(self) -> LikeGroups:
        found = self.routes.like_hosts
        assert found is not None  # as `candidates` saw
        return found

    @property
    def whole_hosts(self) -> int:
        return self.hosts

    def _of_two(self, rank: int) -> int:
        """The rank of the first two hosts that stands for a rank: the second host stands for all but the first."""
        places = self._like_hosts.places
        return rank if rank < places else places + rank % places

    @cached_property
    def network(self) -> Network:
        two = self.routes.network()

        def route(source: int, target: int) -> Route:
            return two.route(self._of_two(source), self._of_two(target))

        return replace(two, route=route)

    def crossing(self, size_bytes: float) -> list[float]:
        images = self._like_hosts.links
        if self.in_switches:
            each = self.two.crossing(size_bytes)
            return [load if image == at else 0.0 for at, (image, load) in enumerate(zip(images, each, strict=True))]
        loads = [0.0] * len(self.routes.links)
        for (rank, peer), amount in transfers(self.plan, size_bytes).items():
            for link, share in self.routes.between[self._of_two(rank), self._of_two(peer)]:
                loads[images[link]] += share * amount
        return loads

    def _simulated(self, size_bytes: int, rounds: int) -> Simulated:
        rule = symmetric("all_reduce", self.across, self.hosts)
        assert rule is not None
        hosts, like = self.hosts, self._like_hosts
        return simulate_first(
            self.plan, self.network, size_bytes, like, lambda host: rule.opposite(host, hosts), rounds=rounds
        )

    def whole(self) -> Plan:
        """Raises TopologyError beyond `MOST_WHOLE` hosts."""
        if self.hosts > MOST_WHOLE:
            raise TopologyError(
                f"{self.graph.name}: one host's programs stand for those of {self.hosts}; all of them are made for at "
                f"most {MOST_WHOLE}"
            )
        return _in_stages(self.inside, build("all_reduce", self.across, self.hosts), self.plan.name)

    def verify(self) -> None:
        """Proves the stages, between two hosts, and the algorithm between all hosts."""
        verify(self.two.plan)
        lower_for("all_reduce", self.across, self.hosts, 0)

    def to_json(self, size_bytes: int, more: Mapping[str, Any] = MappingProxyType({})) -> str:
        rule = f"the programs of host 0; those of the other {self.hosts - 1} are alike, by the rule of {self.across}"
        return super().to_json(size_bytes, {**more, "programs": rule})


def candidates(graph: LinkGraph) -> dict[str, Planned]:
    """The plans of all_reduce by name, that with the most bandwidth first; none where hosts are not alike."""
    two = first_two(graph)
    routes = all_routes(two) if two else None
    like = routes.like_hosts if routes else None
    if two is None or routes is None or like is None or len(routes.components) > 1:
        return {}
    hosts, places = len(graph.ranks) // like.places, like.places
    inside = list(inside_groups(routes, (tuple(range(places)), tuple(range(places, 2 * places)))))
    cuts = Cuts(_with_wide_second(routes, hosts))
    limit = bound("all_reduce", cuts, hosts=hosts)
    summed = bound("all_reduce", cuts, in_switches=True, hosts=hosts) if reducing_domains(routes) else None

    def planned(across: str, name: str, limit: Bound, why: str, in_switches: bool = False) -> OneForAll:
        rule = symmetric("all_reduce", across, hosts)
        assert rule is not None
        whole, first = build("all_reduce", across, 2), Plan(across, "all_reduce", hosts, rule.channels(hosts))
        about = f"over every link; {hosts} hosts that are alike: {why}"
        own = (limit.bandwidth, limit.proof, about, summed.bandwidth if summed else None, in_switches)
        of_two = Planned(two, routes, _in_stages(inside, whole, name), *own)
        plan = _in_stages(inside, first, name, made=1)
        return OneForAll(graph, routes, plan, *own, hosts=hosts, inside=inside, across=across, two=of_two)

    names = [name for name in ("ring", "halving_doubling") if symmetric("all_reduce", name, hosts)]
    made = [planned(name, f"hierarchical_{name}", limit, f"in stages, by {name} between hosts") for name in names]
    if any(node.reduces for node in two.of_kind(NodeKind.NETWORK)) and summed:
        what = "the network combines and copies (SHARP), which NCCL can use and our engine cannot"
        made.append(planned("ring", "sharp", summed, what, in_switches=True))
    return {each.plan.name: each for each in made}


def first_two(graph: LinkGraph) -> LinkGraph | None:
    """The first two hosts of several that are alike, with the network; None if they are not."""
    alike = hosts_by_kind(graph)
    return of_hosts(graph, alike[0][:2]) if alike and len(alike) == 1 and len(alike[0]) > 1 else None


def _with_wide_second(routes: Routes, hosts: int) -> Routes:
    """With all links of the second host as wide as those of all hosts but the first together."""
    node = routes.graph.by_name
    second = node[routes.ranks[-1]].host

    def wide(name: str) -> bool:
        return node[name].kind is not NodeKind.NETWORK and node[name].host == second

    links = (
        replace(link, capacity=link.capacity * (hosts - 1)) if wide(link.src) or wide(link.dst) else link
        for link in routes.links
    )
    return replace(routes, links=tuple(links))


def _in_stages(inside: Inside, across: Plan, name: str, made: int | None = None) -> Plan:
    places = inside[0][0].size
    groups = [range(host * places, (host + 1) * places) for host in range(across.size)]
    stages = [hierarchical.Stages(scatter, across, gather, weight) for scatter, gather, weight in inside]
    return hierarchical.all_reduce(groups, stages, name, made)
