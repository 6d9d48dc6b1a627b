"""Machines with published bandwidths."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from ringreduce.topology.clusters import hosts_of
from ringreduce.topology.graph import LinkGraph
from ringreduce.topology.presets import preset
from ringreduce.topology.rates import Assumed
from ringreduce.topology.read import read

Row = Mapping[str, str]

with (Path(__file__).parent.parent / "fixtures/published_busbw.csv").open(newline="") as file:
    ROWS: list[Row] = list(csv.DictReader(file))


def matrix(gpus: int, cell: str, numa: Callable[[int], int], assume: Assumed) -> LinkGraph:
    """What `nvidia-smi topo -m` shows where all pairs are joined alike."""
    names = [f"GPU{gpu}" for gpu in range(gpus)]
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"])]
    for gpu, name in enumerate(names):
        cells = ("X" if gpu == other else cell for other in range(gpus))
        lines.append("\t".join([name, *cells, f"{8 * gpu}-{8 * gpu + 7}", str(numa(gpu))]))
    return read("\n".join(lines) + "\n", "published", assume)


def xgmi(gpus: int) -> LinkGraph:
    """What `rocm-smi --showtopotype` shows of a hive."""
    names = [f"GPU{gpu}" for gpu in range(gpus)]
    lines = ["  ".join(names)]
    lines += ["  ".join([names[g], *("0" if g == o else "XGMI" for o in range(gpus))]) for g in range(gpus)]
    return read("\n".join(lines) + "\n", "published", Assumed(gpu="mi300x"))


def first(name: str) -> Callable[[Row], LinkGraph]:
    """The first GPUs of a preset."""
    return lambda row: preset(name).select(range(int(row["gpus"])))


def cube_mesh(row: Row) -> LinkGraph:
    gpus = {"2": (0, 1), "4": (0, 1, 2, 3), "8": range(8)}[row["gpus"]]
    return preset("dgx1-v100").select(gpus)


MACHINES: Mapping[str, Callable[[Row], LinkGraph]] = {
    "OCI BM.GPU3.8 (8xV100-SXM2, hybrid cube mesh)": cube_mesh,
    "HPE ProLiant Gen10 (8xV100-SXM2, hybrid cube mesh)": cube_mesh,
    "DGX-2 (12 of 16 V100: 1,2,6-15)": lambda row: preset("dgx2").select([1, 2, *range(6, 16)]),
    "8xA100-SXM4-40GB NVSwitch": first("dgx-a100"),
    "Azure ND A100 v4": first("dgx-a100"),
    "2x Azure NDmv4 (16xA100)": lambda row: hosts_of(preset("dgx-a100"), 2),
    "8xA100-PCIe in NVLink-bridge pairs (NV12), one pair": lambda row: matrix(2, "NV12", int, Assumed(gpu="a100")),
    "HGX H100": first("hgx-h100"),
    "HGX H200": first("hgx-h200"),
    "2x HGX H100 (8x400G)": lambda row: hosts_of(preset("hgx-h100"), 2),
    "2x OCI BM.GPU.H100.8": lambda row: hosts_of(preset("hgx-h100"), 2),
    "HGX H800 (8 links)": lambda row: matrix(8, "NV8", lambda gpu: gpu // 4, Assumed(gpu="h800")),
    "HGX B300": first("hgx-b200"),
    "GB200 NVL72": first("gb200-nvl72"),
    "MI300X x8": lambda row: xgmi(int(row["gpus"])),
    "8xRTX4090, 2x EPYC 7542": lambda row: matrix(
        8, "SYS", int, Assumed(gpu="rtx4090", smp=144, peer_access="no P2P" not in row["algorithm"])
    ),
    "4xRTX4090, one socket, P2P patch": lambda row: matrix(
        4, "PHB", lambda gpu: 0, Assumed(gpu="rtx4090", peer_access=True)
    ),
    "8xRTX5090, dual Xeon 8480+": lambda row: matrix(
        int(row["gpus"]), "SYS", lambda gpu: gpu * 2 // int(row["gpus"]), Assumed(gpu="rtx5090", smp=160)
    ),
}


@lru_cache
def machine(at: int) -> LinkGraph:
    row = ROWS[at]
    assert row["machine"] in MACHINES, f"say in MACHINES what joins the GPUs of {row['machine']!r}"
    return MACHINES[row["machine"]](row)


def in_switches(row: Row) -> bool:
    """Whether the row may have used the switches' sums: it says so, or it does not say which algorithm it is."""
    said = row["algorithm"]
    if "NVLS" in said and "off" not in said:
        return True
    return not any(word in said for word in ("Ring", "ring", "NVLS off", "no SHARP"))
