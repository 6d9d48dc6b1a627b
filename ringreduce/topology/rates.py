"""What links carry: GB/s in one direction by generation, and what has to be assumed where a source does not say.

All figures are of one direction, and capacities: no transfer is faster. Their sources: NVLink, the white papers of P100
(4 links of 20 GB/s), V100 (6 of 25), A100 (12 of 25), GA102 (4 of 14.0625), H100 (18 of 25) and Blackwell (18 of 50);
A800 and H800 have 8 links left (400 GB/s both ways). XGMI, AMD's pages on each Instinct GPU: 16 lanes of 23 GT/s (MI50,
MI60, MI100), 25 GT/s (MI200), 32 GT/s (MI300) and 38.4 GT/s (MI350); of MI300's 64 GB/s 48 are for data, the rest is
protocol (published: 47.7 over one link, 45.1 over each of seven). PCIe, the specifications: 8b/10b encoding to 5 GT/s,
128b/130b to 32 GT/s, FLITs of 242 bytes in 256 at 64 GT/s. Between CPUs: the links of the largest model of a family,
QPI and UPI of 20 lanes, xGMI of 16, at the clock of the data sheet. Single flows are far slower there (20 to 22 GB/s on
an EPYC 7542, 50 on Turin), so what to expect is for `expected` to say, not for a bound.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from ringreduce.common.failures import TopologyError
from ringreduce.topology.graph import LinkKind


@dataclass(frozen=True)
class Assumed:
    """What a user says about a machine because its listing does not.  None: the reader's own assumption, which it says.

    `gpu` is a model such as "v100"; rates are GB/s in one direction: of one NVLink (or XGMI link), of a GPU's PCIe
    slot, and of what joins two CPUs; `peer_access` says whether GPUs reach each other's memory over PCIe. Raises
    TopologyError for a model that is not known, and for rates not above 0.
    """

    gpu: str | None = None
    nvlink: float | None = None
    pcie: float | None = None
    smp: float | None = None
    peer_access: bool | None = None

    def __post_init__(self) -> None:
        for option, rate in (("--nvlink-gbps", self.nvlink), ("--pcie-gbps", self.pcie), ("--smp-gbps", self.smp)):
            if rate is not None and not (isfinite(rate) and rate > 0):
                raise TopologyError(f"{option} is {rate}; it must be above 0, in GB/s of one direction")
        if self.gpu is not None:
            model(self.gpu)


NOTHING = Assumed()


@dataclass(frozen=True)
class Model:
    """A GPU model: `links` links of `kind` (None: no links) that carry `rate` GB/s each, and the generation of PCIe."""

    name: str
    kind: LinkKind | None
    rate: float
    links: int
    pcie: int

    @property
    def reduces(self) -> bool:
        """Whether the switches that its links go to combine what passes them: from NVLink 4 on."""
        return self.kind is LinkKind.NVLINK and self.pcie >= 5

    @property
    def nvlink(self) -> int:
        """The generation of its NVLinks, of GPUs that have any; each came with the next PCIe, but for the first."""
        return next((number for number in (1, 5) if self.rate == NVLINK[number]), self.pcie - 1)

    @property
    def peer_access(self) -> bool:
        """Whether its driver lets other GPUs reach its memory over PCIe; that of GeForce does not."""
        return self.name not in _GEFORCE


@dataclass(frozen=True)
class Rate:
    """GB/s in one direction, and where the figure is from; `assumed` says, in words, what was supposed to get it."""

    gbps: float
    source: str
    assumed: str = ""


NVLINK: Mapping[int, float] = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
"""Per generation: GB/s of one link."""

_GA102 = 14.0625  # its links have half the lanes

_GEFORCE = ("rtx2080ti", "rtx3090", "rtx4090", "rtx5090")

_REDUCING_LANES = (8, 18)
"""NVLinks to a switch that H800 and H100 have, and those after them; A800 has 8 as well."""

MOST_NVLINKS = 18
"""No GPU in the table has more links: what shows more has a switch."""

_NVIDIA = {
    # rate, links, PCIe: models
    (NVLINK[1], 4, 3): "p100",
    (NVLINK[2], 6, 3): "v100",
    (NVLINK[2], 2, 3): "rtx2080ti titanrtx rtx6000 rtx8000",
    (NVLINK[3], 12, 4): "a100",
    (NVLINK[3], 8, 4): "a800",
    (NVLINK[3], 4, 4): "a30",
    (_GA102, 4, 4): "a40 a5000 a6000 rtx3090",
    (NVLINK[4], 18, 5): "h100 h200 h20 gh200",
    (NVLINK[4], 8, 5): "h800",
    (NVLINK[5], 18, 5): "b100 b200 gb200",
    (NVLINK[5], 18, 6): "b300 gb300",
    (0.0, 0, 3): "t4",
    (0.0, 0, 4): "a10 a10g a16 a4000 l4 l20 l40 l40s rtx4090 rtx6000ada",
    (0.0, 0, 5): "rtx5090 rtxpro6000",
}
_AMD = {
    (46.0, 2, 4): "mi50 mi60",
    (46.0, 3, 4): "mi100",
    (50.0, 3, 4): "mi210",
    (50.0, 8, 4): "mi250 mi250x",
    (48.0, 8, 5): "mi300a",
    (48.0, 7, 5): "mi300x mi308x mi325x",
    (76.8, 7, 5): "mi350x mi355x",
}

MODELS: Mapping[str, Model] = {
    name: Model(name, kind if links else None, rate, links, pcie)
    for kind, table in ((LinkKind.NVLINK, _NVIDIA), (LinkKind.XGMI, _AMD))
    for (rate, links, pcie), names in table.items()
    for name in names.split()
}

_COMPUTE_CAPABILITY = {
    **dict.fromkeys((60,), "p100"),
    **dict.fromkeys((70, 72), "v100"),
    **dict.fromkeys((75,), "rtx8000"),
    **dict.fromkeys((80,), "a100"),
    **dict.fromkeys((86,), "a6000"),
    **dict.fromkeys((89,), "l40s"),
    **dict.fromkeys((90,), "h100"),
    **dict.fromkeys((100, 101), "b200"),
    **dict.fromkeys((103,), "b300"),
    **dict.fromkeys((120, 121), "rtx5090"),
}
_GFX = {"906": "mi60", "908": "mi100", "910": "mi250", "90a": "mi250", "94": "mi300x", "95": "mi355x"}


def model(name: str) -> Model:
    """The model that a name says.  Raises TopologyError, with all known ones, if it says none."""
    if found := model_in(name):
        return found
    raise TopologyError(f"GPU model {name!r} is not known; known are {', '.join(MODELS)}")


def model_in(text: str) -> Model | None:
    """The model in a text such as "NVIDIA A100-SXM4-80GB" or "GeForce RTX 3090"."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    for length in (3, 2, 1):
        for at in range(len(words) - length + 1):
            if found := MODELS.get("".join(words[at : at + length])):
                return found
    return None


def models_named(text: str) -> set[Model]:
    """All models that are named in a text."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    joined = ("".join(words[at : at + length]) for length in (1, 2, 3) for at in range(len(words) - length + 1))
    return {MODELS[name] for name in joined if name in MODELS}


def model_of_architecture(sm: str, gcn: str) -> Model | None:
    """The best known model of a compute capability ("80") or of an AMD architecture ("gfx90a", "908")."""
    if re.fullmatch(r"\d{1,4}", sm) and not gcn:
        return MODELS.get(_COMPUTE_CAPABILITY.get(int(sm), ""))
    digits = gcn.removeprefix("gfx")
    return next((MODELS[name] for start, name in _GFX.items() if digits.startswith(start)), None)


def peer_access(known: Model | None, assume: Assumed) -> bool:
    """Whether GPUs reach each other's memory over PCIe."""
    return assume.peer_access if assume.peer_access is not None else known is None or known.peer_access


NO_PEER_ACCESS = (
    "The driver gives GeForce GPUs no access to each other over PCIe: what goes there passes a CPU's memory; "
    "--peer-access yes says that it is patched."
)

PCIE_GTS: Mapping[int, float] = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""Per generation: GT/s of a lane."""


def pcie(gts: float, lanes: int) -> float:
    """GB/s of a PCIe link of `lanes` lanes at `gts` GT/s, after encoding: 15.75 for 16 lanes at 8 GT/s."""
    useful = 8 / 10 if gts <= 5 else 128 / 130 if gts <= 32 else 242 / 256
    return gts * lanes * useful / 8


def slot(known: Model | None, assume: Assumed) -> Rate:
    """What the PCIe slot of a GPU carries where the listing does not say."""
    if assume.pcie is not None:
        return Rate(assume.pcie, "--pcie-gbps")
    if known is not None:
        return Rate(pcie(PCIE_GTS[known.pcie], 16), f"PCIe {known.pcie}.0 x16, as {known.name} has")
    return Rate(
        pcie(PCIE_GTS[3], 16),
        "assumed: PCIe 3.0 x16",
        "The speed of PCIe slots is not in it: PCIe 3.0 x16, 15.75 GB/s, assumed for each; set --gpu or --pcie-gbps.",
    )


_SMP = {
    # vendor, family, model from which on: links, GB/s of each; AMD's families as /proc/cpuinfo has them, and as some
    # NCCL versions pack them
    ("GenuineIntel", 6, 0xCF): (4, 50.0, "Emerald Rapids: UPI of 20 GT/s"),
    ("GenuineIntel", 6, 0xAD): (6, 60.0, "Granite Rapids: UPI of 24 GT/s"),
    ("GenuineIntel", 6, 0x8F): (4, 40.0, "Sapphire Rapids: UPI of 16 GT/s"),
    ("GenuineIntel", 6, 0x6A): (3, 28.0, "Ice Lake: UPI of 11.2 GT/s"),
    ("GenuineIntel", 6, 0x55): (3, 26.0, "Skylake: UPI of 10.4 GT/s"),
    ("GenuineIntel", 6, 0): (2, 24.0, "Broadwell: QPI of 9.6 GT/s"),
    **{("AuthenticAMD", family, 0x30): (4, 36.0, "Zen 2: xGMI of 18 GT/s") for family in (0x17, 0x8F)},
    **{("AuthenticAMD", family, 0): (4, 21.4, "Zen 1: xGMI of 10.7 GT/s") for family in (0x17, 0x8F)},
    **{("AuthenticAMD", family, 0x10): (4, 64.0, "Zen 4: xGMI of 32 GT/s") for family in (0x19, 0xAF)},
    **{("AuthenticAMD", family, 0): (4, 36.0, "Zen 3: xGMI of 18 GT/s") for family in (0x19, 0xAF)},
    **{("AuthenticAMD", family, 0): (4, 64.0, "Zen 5: xGMI of 32 GT/s") for family in (0x1A, 0xBF)},
}
_SMP_BY_ARCHITECTURE = {"ppc64": (1, 64.0, "POWER9: X-Bus"), "ppc64le": (1, 64.0, "POWER9: X-Bus")}
_WIDEST = max(links * gbps for links, gbps, _ in [*_SMP.values(), *_SMP_BY_ARCHITECTURE.values()])


def smp(assume: Assumed, vendor: str = "", family: int = 0, model: int = 0, architecture: str = "") -> Rate:
    """What joins two CPUs of a kind."""
    if assume.smp is not None:
        return Rate(assume.smp, "--smp-gbps")
    known = next(
        (found for (of, kind, since), found in _SMP.items() if (of, kind) == (vendor, family) and model >= since),
        _SMP_BY_ARCHITECTURE.get(architecture),
    )
    if known is not None:
        links, gbps, name = known
        return Rate(links * gbps, f"{links} x {gbps:g} GB/s, {name}")
    return Rate(
        _WIDEST,
        "assumed: as wide as any CPU's that is known here",
        f"What joins its CPUs is not in it: {_WIDEST:g} GB/s assumed, as much as any known CPU has; set --smp-gbps.",
    )


def fabric_link(kind: LinkKind, ends: Sequence[Model | None], assume: Assumed) -> Rate:
    """What one of the accelerators' own links carries: as much as the slower of the models at its ends."""
    if assume.nvlink is not None:
        return Rate(assume.nvlink, "--nvlink-gbps")
    known = [end for end in ends if end is not None and end.kind is kind]
    if len(known) == len(ends):
        slower = min(known, key=lambda end: end.rate)
        return Rate(slower.rate, f"{kind.value} of {slower.name}")
    usual, whose = (NVLINK[3], "NVLink 2 to 4 have") if kind is LinkKind.NVLINK else (MODELS["mi250"].rate, "mi250 has")
    return Rate(
        usual,
        f"assumed: as {whose}",
        f"The {kind.value} generation is not in it: {usual:g} GB/s per link assumed, as {whose}; set --gpu or "
        "--nvlink-gbps.",
    )


def reduces(known: Model | None, lanes: int) -> bool:
    """Whether an NVSwitch that a GPU has so many links to may combine what passes it."""
    return known.reduces if known else lanes in _REDUCING_LANES
