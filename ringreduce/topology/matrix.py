"""Reads the matrix of `nvidia-smi topo -m` (and `-mp`) into a link graph.

NVLinks between two GPUs are links of the graph, unless a GPU shows more of them than it can have: then each goes to an
NVSwitch, and NV# is what the GPU has in all.  The PCIe tree below follows from the link classes, see `classes`.  What a
link carries is not in a matrix: it comes from the user, from the GPUs' models, or is assumed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations

from ringreduce.common.failures import TopologyError
from ringreduce.topology.classes import Device, LinkClass, Pair, pcie_tree, some
from ringreduce.topology.graph import Link, LinkGraph, LinkKind, Node, NodeKind, both_directions
from ringreduce.topology.listing import CLASSES, HOW_TO, LONGEST_LINE, Listing, Row, find_listing
from ringreduce.topology.rates import (
    MOST_NVLINKS,
    NO_PEER_ACCESS,
    Assumed,
    Model,
    Rate,
    fabric_link,
    model,
    model_in,
    models_named,
    peer_access,
    reduces,
    slot,
    smp,
)

_MODEL_NAME = re.compile(
    r"^(?:[^\w\n]*GPUs? ?(\d[\d,\- ]{0,400}):|\|\s+(\d{1,4})\s) {0,8}(\w[^\n|]{0,80})", re.MULTILINE
)
"""As `nvidia-smi -L`, `nvidia-smi nvlink --status` and the table of `nvidia-smi` list GPUs, and as bug reports name
several in one line."""

_ACCESS = re.compile(r"GPU(\d{1,4})((?:[\s|]+(?:X|OK|NS|CNS|GNS|TNS|DR|U))+)[\s|]*$")
_ACCESS_COMMAND = re.compile(r"topo\s+(?:-p2p|--p2pstatus)\s+(\w)")
_NO_ACCESS = {"CNS", "GNS", "TNS"}
"""Where the chipset, the GPU or the machine cannot do it; the other words are of links or of settings."""

MOST_SEARCHED = 1 << 20
"""Models are looked for in so many characters of a text."""


def read_matrix(text: str, where: str, assume: Assumed) -> LinkGraph:
    """The graph of the first matrix in `text`, which errors call `where`; GPUs are named by their number in it.

    Raises TopologyError, with line and column, if there is no matrix or if it is not whole.
    """
    listing = find_listing(text, where)
    rows = {row.label.text: row for row in sorted(listing.gpus, key=lambda row: int(row.label.text[3:]))}
    others = listing.others
    bonds = _bonds(listing)
    notes = list(listing.assumed)
    models = _models(text, rows, bonds, assume, where, notes)
    access = _access(text, rows, notes) if assume.peer_access is None else {}

    gpus = [
        _gpu(row, models.get(gpu), replace(assume, peer_access=access.get(gpu, assume.peer_access)))
        for gpu, row in rows.items()
    ]
    fastest = max((gpu.slot for gpu in gpus), key=lambda rate: rate.gbps)
    nics = [_nic(at, label, listing, fastest) for at, label in enumerate(others)]
    switches, fabric = _fabric(rows, bonds, models, assume, where, notes)
    tree = pcie_tree([*gpus, *nics], _classes([*rows, *others], listing), smp(assume))

    if not all(gpu.node.peer_access or gpu.node.name in access for gpu in gpus):
        notes.append(NO_PEER_ACCESS)
    if nics:
        notes.append("The speed of NICs is not in it: as much as the GPUs' slots carry is assumed for each.")
    nodes = (*(gpu.node for gpu in gpus), *switches, *tree.nodes, *(nic.node for nic in nics))
    return LinkGraph(where, nodes, (*fabric, *tree.links), (*notes, *tree.assumed))


Bonds = Mapping[tuple[str, str], int]
"""How many NVLinks join two GPUs, in both orders."""


def _bonds(listing: Listing) -> Bonds:
    return {
        (row.label.text, label): int(cell.text[2:])
        for row in listing.gpus
        for label, cell in zip(listing.columns, row.cells, strict=True)
        if cell.text.startswith("NV")
    }


def _classes(labels: Sequence[str], listing: Listing) -> dict[Pair, LinkClass]:
    """The classes between the devices with these labels, by position, where the matrix has them."""
    position = {label: at for at, label in enumerate(labels)}
    classes = {}
    for row in (*listing.gpus, *listing.nics):
        for label, cell in zip(listing.columns, row.cells, strict=False):
            one, other = sorted((position.get(row.label.text, -1), position[label]))
            if cell.text in CLASSES and one >= 0:
                classes[one, other] = CLASSES[cell.text]
    return classes


def _gpu(row: Row, known: Model | None, assume: Assumed) -> Device:
    numa, cores = _numbers(row.numa_affinity), _numbers(row.cpu_affinity)
    node = Node(
        row.label.text,
        NodeKind.GPU,
        int(row.label.text[3:]),
        numa=min(numa) if len(numa) == 1 else None,
        detail=known.name if known else "",
        peer_access=peer_access(known, assume),
    )
    return Device(node, slot(known, assume), numa, cores)


def _nic(at: int, label: str, listing: Listing, carries: Rate) -> Device:
    name = listing.names.get(label, label)
    return Device(
        Node(name, NodeKind.NIC, at, detail=label if name != label else ""),
        Rate(carries.gbps, "assumed: a slot like the GPUs'"),
    )


def _numbers(text: str) -> frozenset[int]:
    """The numbers in a list such as "0-19,40-59"; none if it is something else, such as "N/A"."""
    return frozenset(chain.from_iterable(_ranges(text)))


def _ranges(text: str) -> list[range]:
    parts = [re.fullmatch(r"\s*(\d{1,5})(?:\s?-\s?(\d{1,5}))?\s*", part) for part in text.split(",")]
    return [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part] if all(parts) else []


def _models(
    text: str, rows: Mapping[str, Row], bonds: Bonds, assume: Assumed, where: str, notes: list[str]
) -> dict[str, Model]:
    """The model of each GPU of which it is known: from the user, else from a list of them in the text, else the only
    one with so many NVLinks that the text names."""
    most = {gpu: max((bonds.get((gpu, other), 0) for other in rows), default=0) for gpu in rows}
    if assume.gpu is not None:
        known = model(assume.gpu)
        for gpu, row in rows.items():
            if most[gpu] > (known.links if known.kind is LinkKind.NVLINK else 0):
                what = f"{gpu} has {most[gpu]} NVLinks, more than --gpu {known.name} can have; name the right model"
                raise _error(where, row, what)
        return dict.fromkeys(rows, known)
    named: dict[str, Model | None] = {}
    for several, one, name in _MODEL_NAME.findall(text):
        ranges, found = _ranges(several or one), model_in(name)
        named |= {gpu: found for gpu in rows if any(int(gpu[3:]) in each for each in ranges)}
    models = {gpu: listed for gpu in rows if (listed := named.get(gpu))}
    if any(most[gpu] > listed.links for gpu, listed in models.items()):
        notes.append("The GPU models that the text lists cannot have so many NVLinks; they were not used. Set --gpu.")
        return {}
    links = max(most.values())
    fitting = {
        known for known in models_named(text[:MOST_SEARCHED]) if known.kind is LinkKind.NVLINK and known.links >= links
    }
    if links and len(fitting) == 1 and not any(named.values()):
        (known,) = fitting
        notes.append(f"The GPUs are taken as {known.name}, since the text names it and no other that fits; set --gpu.")
        return dict.fromkeys(rows, known)
    return models


def _access(text: str, rows: Mapping[str, Row], notes: list[str]) -> dict[str, bool]:
    """Whether GPUs reach other GPUs' memory over PCIe, of those of which `nvidia-smi topo -p2p` in the text tells."""
    found: dict[str, set[str]] = {}
    command = ""
    for line in text.splitlines():
        if shown := _ACCESS_COMMAND.search(line):
            command = shown[1]
        if command not in ("", "r", "w") or len(line) > LONGEST_LINE:
            continue  # of NVLinks, atomics or something else
        if row := _ACCESS.search(line):
            found.setdefault(f"GPU{int(row[1])}", set()).update(re.findall(r"[A-Z]+", row[2]))
    if not rows.keys() <= found.keys():  # of another machine
        return {}
    access = {gpu: words <= {"X", "OK"} for gpu, words in found.items()
              if gpu in rows and ("OK" in words) != bool(words & _NO_ACCESS)}  # fmt: skip
    if blocked := [gpu for gpu in rows if not access.get(gpu, True)]:
        notes.append(
            f"`nvidia-smi topo -p2p` in it says that {some(blocked)} cannot reach other GPUs' memory over PCIe: what "
            "goes there passes a CPU's memory."
        )
    return access


def _fabric(
    rows: Mapping[str, Row], bonds: Bonds, models: Mapping[str, Model], assume: Assumed, where: str, notes: list[str]
) -> tuple[list[Node], list[Link]]:
    """The links that the GPUs have for each other, and the switches that they need."""
    switches: list[Node] = []
    links: list[Link] = []
    rates: list[Rate] = []

    def rate_of(*ends: str) -> Rate:
        rates.append(fabric_link(LinkKind.NVLINK, [models.get(gpu) for gpu in ends], assume))
        return rates[-1]

    for group in _joined(list(rows), bonds):
        lanes = {gpu: [bonds[gpu, other] for other in group if (gpu, other) in bonds] for gpu in group}
        if any(sum(lanes[gpu]) > (models[gpu].links if gpu in models else MOST_NVLINKS) for gpu in group):
            _check_switched(rows, group, bonds, where)
            name = f"NVSwitch{len(switches)}"
            reducing = all(reduces(models.get(gpu), max(lanes[gpu])) for gpu in group)
            switches.append(Node(name, NodeKind.NVSWITCH, len(switches), reduces=reducing))
            for gpu in group:
                links += _bond(gpu, name, max(lanes[gpu]), rate_of(gpu))
        else:
            for pair in combinations(group, 2):
                if pair in bonds:
                    links += _bond(*pair, bonds[pair], rate_of(*pair))
            if _may_be_switched(group, lanes, models):
                notes.append(
                    f"{len(group)} GPUs with {lanes[group[0]][0]} NVLinks to each other: direct links assumed; set "
                    "--gpu, for they may be on an NVSwitch."
                )
    notes += dict.fromkeys(rate.assumed for rate in rates if rate.assumed)
    return switches, links


def _joined(gpus: Sequence[str], bonds: Bonds) -> list[list[str]]:
    """The sets of GPUs that NVLinks join, directly or over others; without those that have none."""
    groups: list[list[str]] = []
    left = [gpu for gpu in gpus if any((gpu, other) in bonds for other in gpus)]
    while left:
        group = [left.pop(0)]
        for one in group:
            near = [gpu for gpu in left if (one, gpu) in bonds]
            group += near
            left = [gpu for gpu in left if gpu not in near]
        groups.append(sorted(group, key=gpus.index))
    return groups


def _check_switched(rows: Mapping[str, Row], group: Sequence[str], bonds: Bonds, where: str) -> None:
    """Behind one switch every GPU reaches every other, with the links of the one that has fewer."""
    most = {gpu: max(bonds.get((gpu, other), 0) for other in group) for gpu in group}
    for one, other in combinations(group, 2):
        count, fits = bonds.get((one, other), 0), min(most[one], most[other])
        if count != fits:
            raise _error(
                where,
                rows[one],
                f"{one} has more NVLinks than a GPU can, so it must be on an NVSwitch, but then {one} to {other} would "
                f"be NV{fits}, not {f'NV{count}' if count else 'without NVLink'}; {HOW_TO}",
            )


def _may_be_switched(group: Sequence[str], lanes: Mapping[str, Sequence[int]], models: Mapping[str, Model]) -> bool:
    """Whether few GPUs of an NVSwitch machine would look like these, which are linked as if directly."""
    counts = {count for gpu in group for count in lanes[gpu]}
    full = all(len(lanes[gpu]) == len(group) - 1 for gpu in group)
    return len(group) > 2 and full and len(counts) == 1 and min(counts) >= 6 and not all(gpu in models for gpu in group)


def _bond(one: str, other: str, lanes: int, rate: Rate) -> tuple[Link, Link]:
    source = f"{lanes} x {rate.gbps:g} GB/s, {rate.source}"
    return both_directions(one, other, LinkKind.NVLINK, lanes * rate.gbps, lanes, source)


def _error(where: str, row: Row, what: str) -> TopologyError:
    return TopologyError(f"{where}: line {row.label.line}, column {row.label.column}: {what}")
