"""Clusters: several copies of a machine, joined by a network.

A JSON document describes one, with the fields of `Cluster`.

    {"machine": "hgx-h100", "hosts": 8, "gbps": 50, "hosts_per_leaf": 4, "taper": 2}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from ringreduce.common.failures import TopologyError
from ringreduce.common.from_json import load
from ringreduce.topology.graph import Link, LinkGraph, LinkKind, Node, NodeKind, both_directions

MOST_HOSTS = 1024

MOST_NICS = 64
"""Of a host."""


@dataclass(frozen=True)
class Cluster:
    """Copies of a machine, each with the prefix `host<h>/`, joined by their NICs.

    One `network` joins them, which carries all that NICs send; or a switch for each so many hosts (`hosts_per_leaf`),
    or one for the k-th NICs of all hosts (`rails`). The way from such a switch to the network has the width of the NICs
    below it over `taper`. With `in_network` its switches combine what passes them (SHARP).
    """

    hosts: int
    machine: str = ""
    """In JSON: a file, from the document's folder on, or a preset."""
    nics: int | None = None
    """That are used of each host, the first ones (default: all); where the machine has fewer, its CPUs get what is
    missing, in turn."""
    gbps: float | None = None
    """What a NIC carries, GB/s in one direction (default: what the link to it does)."""
    rails: bool = False
    hosts_per_leaf: int | None = None
    taper: float = 1.0
    in_network: bool = False

    def check(self, where: str) -> None:
        """Raises TopologyError for numbers that make no sense."""
        if self.hosts < 2:
            raise TopologyError(f"{where}: {self.hosts} hosts need no network; give 2 or more")
        if self.nics is not None and not 1 <= self.nics <= MOST_NICS:
            raise TopologyError(f"{where}: nics is {self.nics}; give from 1 to {MOST_NICS}")
        if self.gbps is not None and not 0 < self.gbps < float("inf"):
            raise TopologyError(f"{where}: a NIC of {self.gbps} GB/s; give a finite number above 0")
        leaf = self.hosts_per_leaf
        if self.rails and leaf is not None:
            raise TopologyError(f"{where}: NICs are on rails, or on a switch for each {leaf} hosts; give one")
        if leaf is not None and not 0 < leaf < self.hosts:
            raise TopologyError(f"{where}: {leaf} hosts a switch, of {self.hosts}; give from 1 to {self.hosts - 1}")
        if not 1 <= self.taper < float("inf"):
            raise TopologyError(f"{where}: taper is {self.taper}; it must be at least 1, NICs over the way up")
        if self.taper != 1 and not self.rails and leaf is None:
            raise TopologyError(
                f"{where}: taper is {self.taper}, but all NICs are on one network; give `hosts_per_leaf` or `rails`"
            )


def cluster(document: Any, machine: LinkGraph, where: str) -> LinkGraph:
    """The graph of a JSON document, given that of its `machine`.  Raises TopologyError that names the key at fault."""
    given: Cluster = load(Cluster, document, f"{where}: cluster", TopologyError)
    if given.hosts > MOST_HOSTS:
        raise TopologyError(f"{where}: hosts is {given.hosts}; a cluster has from 2 to {MOST_HOSTS}")
    return _copied(machine, given)


def hosts_of(graph: LinkGraph, count: int, **joined: Any) -> LinkGraph:
    """`count` copies of a machine, `joined` as the fields of `Cluster` say.

    Raises TopologyError for a machine without either NICs or CPUs, for several hosts, and for numbers that make no
    sense.
    """
    return _copied(graph, Cluster(count, **joined))


def _copied(graph: LinkGraph, how: Cluster) -> LinkGraph:
    how.check(graph.name)
    if len({node.host for node in graph.nodes}) > 1:
        raise TopologyError(f"{graph.name} is several hosts already; give the graph of one")
    one = _with_nics(graph, how.nics, how.gbps)
    used = [node.name for node in one.of_kind(NodeKind.NIC)][: how.nics]
    nodes: list[Node] = []
    links: list[Link] = []
    for host in range(how.hosts):
        prefix = f"host{host}/"
        nodes += [replace(node, name=prefix + node.name, host=host) for node in one.nodes]
        links += [replace(link, src=prefix + link.src, dst=prefix + link.dst) for link in one.links]
    below: dict[str, float] = {}  # what the NICs on each switch carry
    for host in range(how.hosts):
        for at, name in enumerate(used):
            leaf = f"leaf{host // how.hosts_per_leaf}" if how.hosts_per_leaf else "network"
            switch, feed = f"rail{at}" if how.rails else leaf, one.following[name][0]
            links += both_directions(f"host{host}/{name}", switch, LinkKind.NETWORK, feed.capacity, 1, feed.source)
            below[switch] = below.get(switch, 0.0) + feed.capacity
    for switch, wide in below.items() if how.rails or how.hosts_per_leaf else ():
        nodes.append(Node(switch, NodeKind.NETWORK, len(nodes), reduces=how.in_network))
        source = f"NICs below, over {how.taper:g}"
        links += both_directions(switch, "network", LinkKind.NETWORK, wide / how.taper, 1, source)
    nodes.append(Node("network", NodeKind.NETWORK, reduces=how.in_network))
    assumed = "The network between hosts carries all that their NICs send."
    whole = (*one.assumed, assumed) if how.taper == 1 else one.assumed
    return LinkGraph(f"{how.hosts} hosts of {graph.name}", tuple(nodes), tuple(links), whole)


def hosts_by_kind(graph: LinkGraph) -> list[list[int]] | None:
    """The numbers of the hosts, those together that are copies of each other and on the same switches of the network.

    Hosts are copies if their nodes have the same names after the prefix ``host<h>/``.  None if they share anything but
    the network, or if the ranks do not follow host by host.
    """
    host = {node.name: None if node.kind is NodeKind.NETWORK else node.host for node in graph.nodes}
    counted = Counter(node.host for node in graph.ranks)
    numbers = list(counted)
    if [node.host for node in graph.ranks] != list(counted.elements()):
        return None
    parts: dict[int, tuple[list[Any], set[Any]]] = {number: ([], set()) for number in numbers}

    def first(name: str) -> str:
        return name if host[name] is None else name.removeprefix(f"host{host[name]}/")

    for node in graph.nodes:
        if node.kind is not NodeKind.NETWORK:
            if node.host not in parts or first(node.name) == node.name:
                return None
            parts[node.host][0].append(replace(node, name=first(node.name), host=0))
    for link in graph.links:
        ends = {host[link.src], host[link.dst]} - {None}
        if len(ends) > 1:
            return None
        for number in ends:
            assert number is not None
            parts[number][1].add((first(link.src), first(link.dst), link.kind, link.capacity))
    kinds: dict[Any, list[int]] = {}
    for number, (nodes, links) in parts.items():
        kinds.setdefault((tuple(nodes), frozenset(links)), []).append(number)
    return list(kinds.values())


def of_hosts(graph: LinkGraph, numbers: Collection[int]) -> LinkGraph:
    """The part of a graph that is in some hosts, with the network."""
    return graph.part(tuple(node for node in graph.nodes if node.kind is NodeKind.NETWORK or node.host in numbers))


def _with_nics(graph: LinkGraph, nics: int | None, gbps: float | None) -> LinkGraph:
    """The machine with at least `nics` NICs, or at least one, that carry `gbps` each."""
    there = [node.name for node in graph.of_kind(NodeKind.NIC)]
    links = list(graph.links)
    if gbps is not None:
        links = [
            replace(link, capacity=gbps, source="gbps") if link.src in there or link.dst in there else link
            for link in links
        ]
    missing = max(nics or 1, len(there)) - len(there)
    cpus = graph.of_kind(NodeKind.CPU)
    if missing and gbps is None:
        raise TopologyError(f"{graph.name} has {len(there)} NICs; give `gbps`, and it gets {missing} of that speed")
    if missing and not cpus:
        raise TopologyError(f"{graph.name} has {len(there)} NICs, and no CPU that more could be at; give its listing")
    nodes = list(graph.nodes)
    for index in range(len(there), len(there) + missing):
        assert gbps is not None
        cpu = cpus[index % len(cpus)]
        nodes.append(Node(f"NIC{index}", NodeKind.NIC, index, numa=cpu.numa))
        links += both_directions(f"NIC{index}", cpu.name, LinkKind.PCIE, gbps, 1, "gbps")
    with_nics = replace(graph, nodes=tuple(nodes), links=tuple(links))
    for nic in with_nics.of_kind(NodeKind.NIC):
        if not with_nics.following[nic.name]:
            raise TopologyError(f"{graph.name}: {nic.name} has no link to the rest of the machine; give it one")
    return with_nics
