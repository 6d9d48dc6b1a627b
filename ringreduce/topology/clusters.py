"""Clusters: several copies of a machine, joined by a network.

A JSON document describes one: `machine` (a file, from the document's folder on, or a preset), `hosts`, and what
`hosts_of` takes besides.

    {"machine": "hgx-h100", "hosts": 8, "gbps": 50, "hosts_per_leaf": 4, "taper": 2}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ringreduce.common.failures import TopologyError
from ringreduce.topology.graph import Link, LinkGraph, LinkKind, Node, NodeKind, both_directions

_KINDS = {"nics": int, "gbps": float, "rails": bool, "hosts_per_leaf": int, "taper": float, "in_network": bool}


def cluster(document: Mapping[str, Any], machine: LinkGraph, where: str) -> LinkGraph:
    """The graph of a JSON document, given that of its `machine`.  Raises TopologyError that names the key at fault."""
    known = {"machine": str, "hosts": int, **_KINDS}
    for key, value in document.items():
        kind = known.get(key)
        if kind is None:
            raise TopologyError(f"{where}: {key!r} is unknown; a cluster has {', '.join(known)}")
        number = kind is float and isinstance(value, int)
        if isinstance(value, bool) != (kind is bool) or not (number or isinstance(value, kind)):
            raise TopologyError(f"{where}: {key} is {value!r:.40}; expected a value of type {kind.__name__}")
    if not 2 <= document.get("hosts", 0) <= MOST_HOSTS:
        raise TopologyError(f"{where}: hosts is {document.get('hosts')!r}; a cluster has from 2 to {MOST_HOSTS}")
    return hosts_of(machine, document["hosts"], **{key: document[key] for key in _KINDS if key in document})


MOST_HOSTS = 1024

MOST_NICS = 64
"""Of a host."""


def hosts_of(
    graph: LinkGraph,
    count: int,
    nics: int | None = None,
    gbps: float | None = None,
    rails: bool = False,
    hosts_per_leaf: int | None = None,
    taper: float = 1.0,
    in_network: bool = False,
) -> LinkGraph:
    """`count` copies of a machine, each with the prefix `host<h>/`, joined by their NICs.

    `nics` of each are used, the first ones (default: all); where the machine has fewer, its CPUs get what is missing,
    in turn.  `gbps` is what a NIC carries, GB/s in one direction (default: what the link to it does).

    One `network` joins them, which carries all that NICs send; or a switch for each so many hosts (`hosts_per_leaf`),
    or one for the k-th NICs of all hosts (`rails`). The way from such a switch to the network has the width of the NICs
    below it over `taper`. With `in_network` its switches combine what passes them (SHARP). Raises TopologyError for a
    machine without either NICs or CPUs, for several hosts, and for numbers that make no sense.
    """
    _check(graph, count, nics, gbps, rails, hosts_per_leaf, taper)
    one = _with_nics(graph, nics, gbps)
    used = [node.name for node in one.of_kind(NodeKind.NIC)][:nics]
    nodes: list[Node] = []
    links: list[Link] = []
    for host in range(count):
        prefix = f"host{host}/"
        nodes += [replace(node, name=prefix + node.name, host=host) for node in one.nodes]
        links += [replace(link, src=prefix + link.src, dst=prefix + link.dst) for link in one.links]
    ports = list(_ports(one, used, count, rails, hosts_per_leaf))
    for nic, switch, feed in ports:
        links += both_directions(nic, switch, LinkKind.NETWORK, feed.capacity, 1, feed.source)
    below: dict[str, float] = {}
    for _, switch, feed in ports:
        below[switch] = below.get(switch, 0.0) + feed.capacity
    for switch, wide in below.items() if rails or hosts_per_leaf else ():
        nodes.append(Node(switch, NodeKind.NETWORK, len(nodes), reduces=in_network))
        links += both_directions(switch, "network", LinkKind.NETWORK, wide / taper, 1, f"NICs below, over {taper:g}")
    nodes.append(Node("network", NodeKind.NETWORK, reduces=in_network))
    assumed = (
        (*one.assumed, "The network between hosts carries all that their NICs send.") if taper == 1 else one.assumed
    )
    return LinkGraph(f"{count} hosts of {graph.name}", tuple(nodes), tuple(links), assumed)


def _check(
    graph: LinkGraph,
    count: int,
    nics: int | None,
    gbps: float | None,
    rails: bool,
    hosts_per_leaf: int | None,
    taper: float,
) -> None:
    if count < 2:
        raise TopologyError(f"{graph.name}: {count} hosts need no network; give 2 or more")
    if len({node.host for node in graph.nodes}) > 1:
        raise TopologyError(f"{graph.name} is several hosts already; give the graph of one")
    if nics is not None and not 1 <= nics <= MOST_NICS:
        raise TopologyError(f"{graph.name}: nics is {nics}; give from 1 to {MOST_NICS}")
    if gbps is not None and not 0 < gbps < float("inf"):
        raise TopologyError(f"{graph.name}: a NIC of {gbps} GB/s; give a finite number above 0")
    if rails and hosts_per_leaf is not None:
        raise TopologyError(
            f"{graph.name}: NICs are on rails, or on a switch for each {hosts_per_leaf} hosts; give one"
        )
    if hosts_per_leaf is not None and not 0 < hosts_per_leaf < count:
        raise TopologyError(f"{graph.name}: {hosts_per_leaf} hosts a switch, of {count}; give from 1 to {count - 1}")
    if not 1 <= taper < float("inf"):
        raise TopologyError(f"{graph.name}: taper is {taper}; it must be at least 1, NICs over the way up")
    if taper != 1 and not rails and hosts_per_leaf is None:
        raise TopologyError(
            f"{graph.name}: taper is {taper}, but all NICs are on one network; give `hosts_per_leaf` or `rails`"
        )


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


def _ports(
    one: LinkGraph, used: list[str], count: int, rails: bool, hosts_per_leaf: int | None
) -> Iterator[tuple[str, str, Link]]:
    """Every NIC, what it is plugged into, and the link that feeds it."""
    for host in range(count):
        for at, name in enumerate(used):
            switch = f"rail{at}" if rails else f"leaf{host // hosts_per_leaf}" if hosts_per_leaf else "network"
            yield f"host{host}/{name}", switch, one.following[name][0]


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
