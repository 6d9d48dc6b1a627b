"""Machines that are several copies of one, joined by a network."""

from __future__ import annotations

from dataclasses import replace

from ringreduce.common.failures import TopologyError
from ringreduce.topology.graph import Link, LinkGraph, LinkKind, Node, NodeKind, both_directions


def hosts_of(graph: LinkGraph, count: int, nics: int | None = None, gbps: float | None = None) -> LinkGraph:
    """`count` copies of a machine, each with the prefix `host<h>/`, joined by NICs through one `network` node.

    `nics` of each are used, the first ones (default: all); where the machine has fewer, its CPUs get what is missing,
    in turn.  `gbps` is what a NIC carries, GB/s in one direction (default: what the link to it does).
    Raises TopologyError for a machine without either, for several hosts, and for numbers that make no sense.
    """
    if count < 2:
        raise TopologyError(f"{graph.name}: {count} hosts need no network; give 2 or more")
    if len({node.host for node in graph.nodes}) > 1:
        raise TopologyError(f"{graph.name} is several hosts already; give the graph of one")
    if nics is not None and nics < 1:
        raise TopologyError(f"{graph.name}: {nics} NICs join nothing; give 1 or more")
    if gbps is not None and not 0 < gbps < float("inf"):
        raise TopologyError(f"{graph.name}: a NIC of {gbps} GB/s; give a finite number above 0")
    one = _with_nics(graph, nics, gbps)
    used = [node.name for node in one.of_kind(NodeKind.NIC)][:nics]
    nodes: list[Node] = []
    links: list[Link] = []
    for host in range(count):
        prefix = f"host{host}/"
        nodes += [replace(node, name=prefix + node.name, host=host) for node in one.nodes]
        links += [replace(link, src=prefix + link.src, dst=prefix + link.dst) for link in one.links]
        for name in used:
            feed = one.following[name][0]
            links += both_directions(prefix + name, "network", LinkKind.NETWORK, feed.capacity, 1, feed.source)
    nodes.append(Node("network", NodeKind.NETWORK))
    assumed = (*one.assumed, "The network between hosts carries all that their NICs send.")
    return LinkGraph(f"{count} hosts of {graph.name}", tuple(nodes), tuple(links), assumed)


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
