"""Reads `rocm-smi --showtopotype`, all of `rocm-smi --showtopo`, or `amd-smi topology` into a link graph.

They print tables of GPU against GPU: the link type (XGMI or PCIE, 0 or SELF on the diagonal), a weight, hops.  rocm-smi
calls GPUs by number, amd-smi by bus id; these are numbered as they follow.  XGMI means that two GPUs are in one hive,
not that a link joins them.  The weight is 15 for each link on the way, so where it is given, only pairs of the least
weight are linked; where it is not, all are taken to be, and `LinkGraph.assumed` says so.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ringreduce.common.failures import TopologyError
from ringreduce.topology.classes import Device, pcie_tree, some
from ringreduce.topology.graph import LinkGraph, LinkKind, Node, NodeKind, both_directions
from ringreduce.topology.rates import Assumed, fabric_link, model, slot, smp

HOW_TO = "run `rocm-smi --showtopo` and save all that it prints"

_NAME = r"(?:GPU\d{1,4}|[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d)"
_LABEL = rf"(?<![\w.:-])(?P<label>{_NAME})"
_ROW = re.compile(rf"{_LABEL}[ \t|]+(?=(?:XGMI|PCIE|SELF|UNKNOWN|N/A|\d{{1,5}})(?:[ \t|]|$))")
_TYPE = re.compile(rf"{_LABEL}[ \t|]+(?:(?:0|SELF)[ \t|]+)?(?:XGMI|PCIE)(?![\w-])")
_ALONE = re.compile(rf"[ \t|]*{_NAME}[ \t|]*")
_TABLE = re.compile(
    r"\b(?:(?:ACCESS|WEIGHT|HOPS|NUMA BW|CACHE COHER[AE]NCY|ATOMICS|DMA|BI-DIRECTIONAL|LINK TYPE) TABLE(?=:)|"
    r"(?:Weight|Hops|Link Type) between two GPUs(?= =))"
)
_TITLE = re.compile(rf"ROCm System Management Interface|{_TABLE.pattern}")
_NUMA = re.compile(r"GPU[\[ ](\d{1,4})(?:\.\.(\d{1,4}))?\b[^\n]{0,40}Numa Node: (\d{1,4})")

_CELL = re.compile(r"[^\s|]+")

LONGEST_LINE = 20_000
MOST_TABLES = 1000


@dataclass(frozen=True)
class _Row:
    """A GPU's row: where it begins (from 1), each cell with its column, and whether the line above names one GPU."""

    line: int
    column: int
    label: str
    cells: tuple[tuple[str, int], ...]
    alone: bool


def is_rocm(text: str) -> bool:
    """Whether a text has a row with AMD's link types, or one of the titles above them."""
    return _TYPE.search(text) is not None or _TITLE.search(text) is not None


def tables_of_amd_smi(text: str) -> str:
    """What `amd-smi topology` prints, by what it prints with --json; "" if `text` is something else, or cut off."""
    if not (text.lstrip().startswith("[") and '"link_type"' in text):
        return ""
    try:
        to = {gpu["gpu"]: {link["gpu"]: link for link in gpu["links"]} for gpu in json.loads(text)}
        lines = []
        for title, key, itself in (("LINK TYPE", "link_type", "SELF"), ("WEIGHT", "weight", 0)):
            lines.append(f"{title} TABLE:")
            for gpu, links in to.items():
                cells = (itself if other == gpu else links.get(other, {}).get(key, "N/A") for other in to)
                lines.append(" ".join(map(str, (f"GPU{gpu}", *cells))))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return ""
    return "\n".join(lines)


def read_rocm(text: str, where: str, assume: Assumed) -> LinkGraph:
    """The graph of the tables in `text`, which errors call `where`.

    Raises TopologyError, with line and column, if the table of link types is not whole.
    """
    tables = _tables(text)
    types = _types_in(tables, text, where)
    _check(types, where)
    notes: list[str] = []
    hives = [pair for pair in combinations(range(len(types)), 2) if types[pair[0]].cells[pair[1]][0] == "XGMI"]
    linked = _linked(hives, next((table for table in tables if _is_weights(table, types)), None), notes)

    known = model(assume.gpu) if assume.gpu is not None else None
    if known and hives and known.kind is not LinkKind.XGMI:
        raise _error(
            where, types[0], f"GPUs with XGMI are in it, which --gpu {known.name} does not have; name the right model"
        )
    rate = fabric_link(LinkKind.XGMI, (known,), assume)
    if linked:
        notes += filter(None, [rate.assumed])
        notes.append("How many XGMI links join two GPUs is not in it: one assumed.")

    numa = {
        gpu: int(node) for first, last, node in _NUMA.findall(text) for gpu in range(int(first), int(last or first) + 1)
    }
    by_bus = ":" in types[0].label
    if by_bus:
        notes.append("GPUs are numbered as they follow in it, for it calls them by bus id.")
    indices = [place if by_bus else int(row.label[3:]) for place, row in enumerate(types)]
    details = [row.label if by_bus else known.name if known else "" for row in types]
    devices = [
        Device(
            Node(f"GPU{at}", NodeKind.GPU, at, numa=numa.get(at), detail=detail),
            slot(known, assume),
            frozenset({numa[at]} if at in numa else ()),
        )
        for at, detail in zip(indices, details, strict=True)
    ]
    tree = pcie_tree(devices, {}, smp(assume))
    links = [
        link
        for one, other in linked
        for link in both_directions(
            devices[one].node.name, devices[other].node.name, LinkKind.XGMI, rate.gbps, source=rate.source
        )
    ]
    nodes = (*(device.node for device in devices), *tree.nodes)
    return LinkGraph(where, nodes, (*links, *tree.links), (*notes, *tree.assumed))


def _types_in(tables: list[list[_Row]], text: str, where: str) -> list[_Row]:
    """The table of link types."""
    types = next((table for table in tables if any(cell in ("XGMI", "PCIE") for cell, _ in _all(table))), None)
    types = types or next((table for table in tables if _is_alone(table)), None)
    if types is not None:
        return types
    before = text[: found.start()] if (found := _TITLE.search(text)) else ""
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    what = "no table of XGMI and PCIE follows"
    if shown := dict.fromkeys(_TABLE.findall(text)):
        what = f"it has {some(list(shown))}, but no row of link types (XGMI, PCIE)"
    how_to = "run `amd-smi topology` without options, or with -wt" if "TABLE:" in text else HOW_TO
    raise TopologyError(f"{where}: line {line}, column {column}: {what}; {how_to}")


def _tables(text: str) -> list[list[_Row]]:
    """The tables, in order: rows until a GPU repeats or a title follows.  Of tables side by side the left is first."""
    sides: list[list[dict[str, _Row]]] = [[{}]]
    above = ""
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        rows = list(_ROW.finditer(line)) if len(line) <= LONGEST_LINE else []
        sides += [[{}] for _ in range(len(rows) - len(sides))]
        for at, tables in enumerate(sides):
            found = rows[at] if at < len(rows) else None
            if "==" in line or (found and found["label"] in tables[-1]):
                tables.append({})
            if found:
                end = rows[at + 1].start() if at + 1 < len(rows) else len(line)
                cells = tuple((cell[0], cell.start() + 1) for cell in _CELL.finditer(line, found.end(), end))
                alone = _ALONE.fullmatch(above) is not None
                tables[-1][found["label"]] = _Row(number, found.start() + 1, found["label"], cells, alone)
        if max(map(len, sides)) > MOST_TABLES:
            break
        above = line
    return [list(table.values()) for tables in sides for table in tables if table]


def _all(table: Sequence[_Row]) -> list[tuple[str, int]]:
    return [cell for row in table for cell in row.cells]


def _is_alone(table: Sequence[_Row]) -> bool:
    """Whether this is all that is said of a single GPU."""
    return table[0].alone and [cell for cell, _ in _all(table)] in (["0"], ["SELF"])


def _is_weights(table: Sequence[_Row], types: Sequence[_Row]) -> bool:
    """Whether these are weights: numbers for the same GPUs, larger ones than hops."""
    numbers = [int(cell) for cell, _ in _all(table) if re.fullmatch(r"\d{1,5}", cell)]
    same = [row.label for row in table] == [row.label for row in types]
    whole = len(numbers) == len(_all(table)) == len(types) ** 2 and all(len(row.cells) == len(types) for row in table)
    return same and whole and max(numbers, default=0) >= 10


def _linked(
    hives: Sequence[tuple[int, int]], weights: Sequence[_Row] | None, notes: list[str]
) -> list[tuple[int, int]]:
    """The pairs with a link of their own, of those in one hive."""
    if weights is None:
        if hives:
            notes.append(
                "Which GPUs of a hive are linked directly is not in it: all pairs assumed; give --showtopo whole."
            )
        return list(hives)
    weight = {pair: int(weights[pair[0]].cells[pair[1]][0]) for pair in hives}
    least = min(weight.values(), default=0)
    return [pair for pair in hives if weight[pair] == least]


def _check(rows: Sequence[_Row], where: str) -> None:
    """Raises TopologyError unless the table is square, symmetric, and has types that are known."""
    for at, row in enumerate(rows):
        if len(row.cells) != len(rows):
            what = f"{row.label} has {len(row.cells)} cells for {len(rows)} GPUs: the text was cut off; {HOW_TO}"
            raise _error(where, row, what)
        for to, (cell, column) in enumerate(row.cells):
            if cell not in (("0", "SELF") if at == to else ("XGMI", "PCIE")):
                fits = "0 or SELF" if at == to else "XGMI or PCIE"
                what = f"{row.label} to {rows[to].label} is {cell}, but it must be {fits}; {HOW_TO}"
                raise _error(where, row, what, column)
            back = rows[to].cells[at][0] if at < len(rows[to].cells) else cell
            if back != cell:
                what = f"{row.label} to {rows[to].label} is {cell}, but the other way it is {back}; {HOW_TO}"
                raise _error(where, row, what, column)


def _error(where: str, row: _Row, what: str, column: int | None = None) -> TopologyError:
    return TopologyError(f"{where}: line {row.line}, column {column or row.column}: {what}")
