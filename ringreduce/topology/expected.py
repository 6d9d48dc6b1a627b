"""What to expect: the time that NCCL or RCCL needs over links like a plan's, next to the bound that none can undercut.

A large tensor gets a share of the line rate, the *efficiency* of its fabric; a small one waits for the call, its
*base*; in between, pipelines fill:

    seconds = base + bytes / (efficiency * line) + fill * bytes / (bytes + half)

The line is the bandwidth of the widest plan that we have for these GPUs, whatever the size (`line_of`); between hosts
it is the bound, since NCCL plans in another way there.  On an odd subset NCCL's own rings can be slower than our plan:
what is expected is our plan at NCCL's efficiency.  The figures of `FABRICS` are fitted (`fit`) to the rows of
tests/fixtures/published_busbw.csv that its column `used` marks, at most half of those of each fabric, and compared
with the others.  A few rows say nothing about some figures: these stay near `GUESS`.  `ringreduce calibrate` makes a
table for one's own machine.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ringreduce.common import from_json
from ringreduce.common.failures import TopologyError
from ringreduce.common.files import content_of, json_of
from ringreduce.topology.graph import LinkKind, NodeKind
from ringreduce.topology.rates import model_in

if TYPE_CHECKING:
    from ringreduce.topology.planned import Planned


@dataclass(frozen=True)
class Fabric:
    """The figures of one fabric, in seconds and bytes, fitted to `figures` measurements.  Of `checked` others of 1 MiB
    and more, four in five are `within` this share of what is expected."""

    efficiency: float
    base: float
    fill: float
    half: float
    figures: int = 0
    checked: int = 0
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
        known = self.fabric
        if known.checked >= ENOUGH:
            others = f"{known.checked} figures of 1 MiB and more that it was not fitted to"
            return f"{self.name}: four in five of {others} are within {known.within:.0%}"
        if known.figures:
            return f"{self.name}: fitted to {known.figures}, too few figures to say how near"
        return f"{self.name}: no figures"


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

ENOUGH = 5
"""Figures that a fabric must have been checked with before it is said how near they are."""

MOST_HOSTS = 8
"""The published figures are of two hosts: of many, the hops between these take time that no figure tells."""

TRUSTED = 0.1
"""How much a figure of `GUESS` counts next to a measurement."""

PUBLISHED = "published figures of NCCL and RCCL"

FABRICS: Table = {
    "NVLink 2, direct": Fabric(0.835, 2.53e-05, 6.15e-05, 1.6e07, 2, 2, 0.0876, PUBLISHED),
    "NVLink 2, NVSwitch": Fabric(0.82, 2.5e-05, 6e-05, 1.6e07, 2, 1, 0.0855, PUBLISHED),
    "NVLink 3": Fabric(0.756, 3.95e-05, 0.000205, 2.21e07, 17, 11, 0.0424, PUBLISHED),
    "NVLink 4": Fabric(0.809, 2.5e-05, 6.01e-05, 1.6e07, 7, 7, 0.00914, PUBLISHED),
    "NVLink 4, NVLS": Fabric(0.674, 1.6e-05, 3.92e-05, 1.27e05, 19, 18, 0.0917, PUBLISHED),
    "hosts of NVLink 4": Fabric(0.628, 6.29e-05, 6.38e-05, 1.51e07, 2, 1, 0.00228, PUBLISHED),
    "XGMI": Fabric(0.945, 1.71e-05, 5.86e-05, 1.22e07, 16, 9, 0.0426, PUBLISHED),
    "NVLink 5": Fabric(0.774, 2.5e-05, 6e-05, 1.6e07, 1, 1, 0.0221, PUBLISHED),
    "NVLink 5, NVLS": Fabric(0.507, 2.97e-05, 0.000117, 1.58e07, 3, 3, 0.272, PUBLISHED),
    "PCIe, over the CPUs' memory": Fabric(0.463, 2.5e-05, 6.01e-05, 1.6e07, 1, 2, 0.2, PUBLISHED),
    "PCIe, across CPUs": Fabric(0.661, 2.5e-05, 6.01e-05, 1.6e07, 1, 0, 0, PUBLISHED),
    "PCIe": Fabric(0.804, 2.5e-05, 6e-05, 1.6e07, 1, 1, 0.237, PUBLISHED),
}
"""By the name of a fabric.  "NVLS" is with the switches' sums; the rest is without."""


NETWORKS = [
    f"hosts {inside}" for inside in ("over PCIe", "of XGMI", *(f"of NVLink {number}" for number in range(1, 6)))
]
KNOWN = {
    *(f"NVLink {number}, {joined}" for number in (1, 2) for joined in ("direct", "NVSwitch")),
    *(f"NVLink {number}{sums}" for number in (3, 4, 5) for sums in ("", ", NVLS")),
    *(f"{network}{sums}" for network in NETWORKS for sums in ("", ", SHARP")),
    *("XGMI", "PCIe", "PCIe, across CPUs", "PCIe, over the CPUs' memory"),
}
"""All names that `fabric_of` gives."""


def fabric_of(planned: "Planned") -> str | None:
    """The name, in a table, of what a plan's transfers cross; None where that has no name, such as memory or a CPU's
    NVLinks, and for NVLink of a generation that nothing says."""
    if planned.plan.size == 1:
        return None
    graph = planned.graph
    kinds = {link.kind for link in graph.links}
    used = {link.kind for link, load in zip(planned.routes.links, planned.crossing(1e9), strict=True) if load > 0}
    if LinkKind.C2C in used:
        return None
    if graph.several_hosts:
        inside = "of XGMI" if LinkKind.XGMI in kinds else "over PCIe"
        if LinkKind.NVLINK in kinds:
            inside = f"of NVLink {_generation(planned)}"
        name = (
            f"hosts {inside}, SHARP"
            if any(node.reduces for node in graph.of_kind(NodeKind.NETWORK))
            else f"hosts {inside}"
        )
        return name if name in KNOWN else None
    if LinkKind.PCIE in used:
        if not all(node.peer_access for node in graph.gpus):
            return "PCIe, over the CPUs' memory"
        return "PCIe, across CPUs" if LinkKind.SMP in used else "PCIe"
    if LinkKind.XGMI in used:
        return "XGMI"
    generation = _generation(planned) if LinkKind.NVLINK in used else None
    if generation is None:
        return None
    switched = any(node.kind is NodeKind.NVSWITCH for node in graph.nodes)
    name = f"NVLink {generation}" if generation > 2 else f"NVLink {generation}, {'NVSwitch' if switched else 'direct'}"
    return f"{name}, NVLS" if planned.in_switches else name


def _generation(planned: "Planned") -> int | None:
    """Of NVLink, by what the links' source says or else by the GPUs' model; None if neither is known."""
    for link in planned.graph.links:
        if link.kind is LinkKind.NVLINK and link.src in planned.ranks:
            if "assumed" not in link.source and (found := re.search(r"NVLink (\d)", link.source)):
                return int(found[1])
            detail = planned.graph.by_name[link.src].detail
            known = model_in(link.source) or (model_in(detail) if ":" not in detail else None)  # not a bus id
            return known.nvlink if known else None
    return None


def line_of(planned: "Planned") -> float:
    """GB/s that the efficiency of a fabric is a share of."""
    from ringreduce.topology.planner import widest

    if planned.graph.several_hosts:
        return planned.bound_in_switches or planned.bound
    return planned.of_links if planned.in_switches else widest(planned.graph, planned.collective).of_links


def expected(planned: "Planned", size_bytes: float, table: Table = FABRICS) -> Expected | None:
    """What a plan is expected to take; None where the table has no such fabric, or no figures of so many hosts."""
    name = fabric_of(planned)
    if name is None or len({node.host for node in planned.graph.ranks}) > MOST_HOSTS:
        return None
    inside = name.removeprefix("hosts of ")
    if name not in table and inside in table:  # as in one host, over the bound of all
        fabric = replace(table[inside], figures=0, checked=0)
        return Expected(fabric.seconds(size_bytes, line_of(planned)), f"{name}, as {inside} in one host", fabric)
    return Expected(table[name].seconds(size_bytes, line_of(planned)), name, table[name]) if name in table else None


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
    return replace(made(found.x), figures=len(points), source=source)


def checked(fabric: Fabric, others: Sequence[Measured]) -> Fabric:
    """With how well it agrees with measurements that it was not fitted to."""
    large = [at for at in others if at.size_bytes >= LARGE]
    apart = sorted(abs(fabric.seconds(at.size_bytes, at.line) / at.seconds - 1) for at in large)
    within = apart[math.ceil(0.8 * len(apart)) - 1] if apart else 0.0
    return replace(fabric, checked=len(large), within=_digits(within))


def calibrated(points: Sequence[Measured], source: str) -> Fabric:
    """Fitted to all measurements; how near that is shows a fit to every second one, checked with the others."""
    tried = checked(fit(points[::2], source), points[1::2])
    return replace(fit(points, source), checked=tried.checked, within=tried.within)


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


def to_json(table: Table) -> str:
    """For `--calibration`."""
    return json.dumps({name: asdict(fabric) for name, fabric in table.items()}, indent=1)


def load(path: str | Path) -> Table:
    """The table that a file has, on top of `FABRICS`.  Raises TopologyError that says what is wrong with it."""
    try:
        document = json_of(content_of(path))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TopologyError(f"{path} is no calibration: {why}; make one with `ringreduce calibrate`") from None
    if not isinstance(document, dict) or not document:
        raise TopologyError(f"{path}: it has {document!r:.40}; expected an object with a fabric's figures by its name")
    table = dict(FABRICS)
    for name, figures in document.items():
        where = f"{path}: {name!r}"
        if name not in KNOWN:
            raise TopologyError(f"{where} is no fabric that a plan can have; those are {', '.join(sorted(KNOWN))}")
        fabric: Fabric = from_json.load(Fabric, figures, where, TopologyError)
        for key, figure in figures.items():
            if key != "source" and not 0 <= figure < 1e15:
                raise TopologyError(f"{where}: {key} is {figure!r:.40}; it must be a number of at least 0")
        if not 0 < fabric.efficiency <= 10:
            raise TopologyError(f"{where}: efficiency is {fabric.efficiency}; it must be above 0, at most 10")
        table[str(name)] = fabric
    return table
