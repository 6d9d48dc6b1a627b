"""What to expect: the time that NCCL or RCCL needs over links like a plan's, next to the bound that none can undercut.

A large tensor gets a share of the line rate, the *efficiency* of its fabric; a small one waits for the call, its
*base*; in between, pipelines fill:

    seconds = base + bytes / (efficiency * line) + fill * bytes / (bytes + half)

The line is the plan's bandwidth by its busiest link; between hosts it is the bound, since NCCL plans in another way
there.  The figures of `FABRICS` are fitted (`fit`) to the rows of tests/fixtures/published_busbw.csv that its column
`used` marks, at most half of those of each fabric, and tested on all rows.  A few rows say nothing about some figures:
these stay near `GUESS`.  `ringreduce calibrate` makes a table for one's own machine.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ringreduce.common.failures import TopologyError
from ringreduce.topology.graph import LinkKind, NodeKind

if TYPE_CHECKING:
    from ringreduce.topology.planner import Planned


@dataclass(frozen=True)
class Fabric:
    """The figures of one fabric, in seconds and bytes; `figures` measurements that they were compared with, and the
    share by which nine in ten of those of 1 MiB and more differ at most."""

    efficiency: float
    base: float
    fill: float
    half: float
    figures: int = 0
    within: float = 0.0
    source: str = ""

    def seconds(self, size_bytes: float, line: float) -> float:
        """Of a tensor, with the line rate in GB/s."""
        filling = self.fill * size_bytes / (size_bytes + self.half)
        return self.base + size_bytes / (self.efficiency * line * 1e9) + filling


class Expected(NamedTuple):
    """What a plan is expected to take, and by which fabric of a table."""

    seconds: float
    name: str
    fabric: Fabric

    def __str__(self) -> str:
        if not self.fabric.figures:
            return f"on {self.name}, {self.fabric.source}"
        figures = f"{self.fabric.figures} figure{'s' * (self.fabric.figures > 1)}"
        return f"within {self.fabric.within:.0%} from 1 MiB on; {self.name}, {figures}"


class Measured(NamedTuple):
    """One figure: bytes, the plan's line rate in GB/s, and the seconds it took."""

    size_bytes: float
    line: float
    seconds: float


Table = Mapping[str, Fabric]

GUESS = Fabric(0.8, 25e-6, 60e-6, 16e6)
"""What is expected before anything is measured."""

LARGE = 2**20
"""Bytes from which `Fabric.within` counts: below, all is the call, which differs by a factor between programs."""

TRUSTED = 0.1
"""How much a figure of `GUESS` counts next to a measurement."""

PUBLISHED = "published figures of NCCL and RCCL"

FABRICS: Table = {
    "NVLink 2, direct": Fabric(0.835, 2.53e-05, 6.15e-05, 1.6e07, 4, 0.088, PUBLISHED),
    "NVLink 2, NVSwitch": Fabric(0.82, 2.5e-05, 6e-05, 1.6e07, 4, 0.0855, PUBLISHED),
    "NVLink 3": Fabric(0.756, 3.95e-05, 0.000205, 2.21e07, 35, 0.0722, PUBLISHED),
    "NVLink 4": Fabric(0.809, 2.5e-05, 6.01e-05, 1.6e07, 14, 0.0274, PUBLISHED),
    "NVLink 4, NVLS": Fabric(0.674, 1.6e-05, 3.92e-05, 127000, 41, 0.157, PUBLISHED),
    "hosts of NVLink 4": Fabric(0.628, 6.29e-05, 6.38e-05, 1.51e07, 4, 0.0108, PUBLISHED),
    "XGMI": Fabric(0.945, 1.71e-05, 5.86e-05, 1.22e07, 33, 0.0426, PUBLISHED),
    "NVLink 5": Fabric(0.774, 2.5e-05, 6e-05, 1.6e07, 2, 0.0221, PUBLISHED),
    "NVLink 5, NVLS": Fabric(0.507, 2.97e-05, 0.000117, 1.58e07, 6, 0.272, PUBLISHED),
    "PCIe, over the CPUs' memory": Fabric(0.463, 2.5e-05, 6.01e-05, 1.6e07, 3, 0.2, PUBLISHED),
    "PCIe, across CPUs": Fabric(0.661, 2.5e-05, 6.01e-05, 1.6e07, 2, 0.00204, PUBLISHED),
    "PCIe": Fabric(0.804, 2.5e-05, 6e-05, 1.6e07, 3, 0.237, PUBLISHED),
}
"""By the name of a fabric.  "NVLS" is with the switches' sums; the rest is without."""


def fabric_of(planned: "Planned") -> str | None:
    """The name, in a table, of what a plan's transfers cross; None for what no table has, such as memory."""
    if planned.plan.size == 1:
        return None
    if len({node.host for node in planned.graph.ranks}) > 1:
        lanes, network = _lanes(planned), planned.graph.of_kind(NodeKind.NETWORK)
        name = f"hosts of NVLink {_generation(lanes)}" if lanes else "hosts over PCIe"
        return f"{name}, SHARP" if any(node.reduces for node in network) else name
    used = {link.kind for link, load in zip(planned.routes.links, planned.crossing(1e9), strict=True) if load > 0}
    if LinkKind.PCIE in used:
        if not all(node.peer_access for node in planned.graph.gpus):
            return "PCIe, over the CPUs' memory"
        return "PCIe, across CPUs" if LinkKind.SMP in used else "PCIe"
    if LinkKind.XGMI in used:
        return "XGMI"
    if LinkKind.NVLINK not in used:
        return None
    generation = _generation(_lanes(planned))
    switched = any(node.kind is NodeKind.NVSWITCH for node in planned.graph.nodes)
    name = f"NVLink {generation}" if generation > 2 else f"NVLink {generation}, {'NVSwitch' if switched else 'direct'}"
    if planned.in_switches:
        name += ", NVLS"
    return name


def _lanes(planned: "Planned") -> list[tuple[int, float]]:
    """NVLinks of the GPU that has the most, and GB/s of one."""
    of: dict[str, tuple[int, float]] = {}
    for link in planned.graph.links:
        if link.kind is LinkKind.NVLINK and link.src in planned.ranks:
            of[link.src] = of.get(link.src, (0, 0.0))[0] + link.lanes, link.capacity / link.lanes
    return sorted(of.values())[-1:]


def _generation(lanes: list[tuple[int, float]]) -> int:
    """Of NVLink, by the links that a GPU has: 6 of V100, 12 of A100, 18 of H100, 8 of H800, 18 faster ones of B200."""
    count, gbps = lanes[0]
    if gbps > 40:
        return 5
    return 2 if count <= 6 else 3 if count in (12, 4) else 4


def line_of(planned: "Planned") -> float:
    """GB/s that the efficiency of a fabric is a share of."""
    if len({node.host for node in planned.graph.ranks}) > 1:
        return planned.bound_in_switches or planned.bound
    return planned.of_links


def expected(planned: "Planned", size_bytes: float, table: Table = FABRICS) -> Expected | None:
    """What a plan is expected to take; None where the table has no such fabric."""
    name = fabric_of(planned)
    if name is not None and name not in table:
        name = name.removeprefix("hosts of ")  # of these nothing is known: as in one host, over the bound of all
    if name is None or name not in table:
        return None
    return Expected(table[name].seconds(size_bytes, line_of(planned)), name, table[name])


def fit(points: Sequence[Measured], source: str) -> Fabric:
    """The figures that come nearest to some measurements, by their ratios."""
    from scipy.optimize import least_squares

    guess = (GUESS.efficiency, GUESS.base, GUESS.fill, GUESS.half)

    def made(logs: Sequence[float]) -> Fabric:
        efficiency, base, fill, half = (_digits(f * math.exp(log)) for f, log in zip(guess, logs, strict=True))
        return Fabric(efficiency, base, fill, half)

    def off(logs: Sequence[float]) -> list[float]:
        efficiency, base, fill, half = (f * math.exp(log) for f, log in zip(guess, logs, strict=True))
        fabric = Fabric(efficiency, base, fill, half)
        ratios = [math.log(fabric.seconds(at.size_bytes, at.line) / at.seconds) for at in points]
        return [*ratios, *(TRUSTED * log for log in logs)]

    found = least_squares(off, [0.0] * 4, bounds=(-5, [math.log(1 / GUESS.efficiency), 5, 5, 5]))
    return compared(made(found.x), points, source)


def compared(fabric: Fabric, points: Sequence[Measured], source: str) -> Fabric:
    """With how well it fits these measurements."""
    large = [at for at in points if at.size_bytes >= LARGE]
    apart = sorted(abs(fabric.seconds(at.size_bytes, at.line) / at.seconds - 1) for at in large)
    within = apart[math.ceil(0.9 * len(apart)) - 1] if apart else 0.0
    return replace(fabric, figures=len(points), within=_digits(within), source=source)


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def to_json(table: Table) -> str:
    """For `--calibration`."""
    return json.dumps({name: asdict(fabric) for name, fabric in table.items()}, indent=1)


def load(path: str | Path) -> Table:
    """The table that a file has, on top of `FABRICS`.  Raises TopologyError that says what is wrong with it."""
    known = {field.name: field.type for field in fields(Fabric)}
    try:
        document = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise TopologyError(f"{path} is no calibration: {error}; make one with `ringreduce calibrate`") from None
    if not isinstance(document, dict):
        raise TopologyError(f"{path}: it has {document!r:.40}; expected an object with a fabric's figures by its name")
    table = dict(FABRICS)
    for name, figures in document.items():
        where = f"{path}: {name!r}"
        if (
            not isinstance(figures, dict)
            or not {"efficiency", "base", "fill", "half"} <= figures.keys() <= known.keys()
        ):
            raise TopologyError(f"{where} is {figures!r:.60}; expected efficiency, base, fill and half")
        for key, figure in figures.items():
            if key != "source" and not (isinstance(figure, int | float) and 0 <= figure < 1e15):
                raise TopologyError(f"{where}: {key} is {figure!r:.40}; it must be a number of at least 0")
        if not 0 < figures["efficiency"] <= 10:
            raise TopologyError(f"{where}: efficiency is {figures['efficiency']}; it must be above 0, at most 10")
        table[str(name)] = Fabric(**figures)
    return table
