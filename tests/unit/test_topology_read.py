"""Readers of machine descriptions: every fixture gives the machine that it is of, in whatever way it was pasted, and
what is not whole gives an error with line and column."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.errors import TopologyError
from ringreduce.topology.graph import FABRIC, LinkGraph, LinkKind, NodeKind
from ringreduce.topology.rates import MODELS, NOTHING, Assumed, model_in, pcie, smp
from ringreduce.topology.read import load, read

FIXTURES = Path(__file__).parents[1] / "fixtures" / "topologies"
MATRIX = (FIXTURES / "dgx1_v100.txt").read_text()


def fixture(name: str, assume: Assumed = NOTHING) -> LinkGraph:
    return load(FIXTURES / name, assume)


def lanes(graph: LinkGraph) -> list[int]:
    """Links of the accelerators' own that each GPU has."""
    return [sum(link.lanes for link in graph.following[gpu.name] if link.kind in FABRIC) for gpu in graph.gpus]


def joined(graph: LinkGraph, *nodes: str) -> set[str]:
    """What hangs directly on a switch or CPU: of `nodes`' neighbours over PCIe."""
    return {link.dst for node in nodes for link in graph.following[node] if link.kind is LinkKind.PCIE}


def names(graph: LinkGraph, kind: NodeKind) -> list[str]:
    return [node.name for node in graph.of_kind(kind)]


def same_machine(one: LinkGraph, other: LinkGraph) -> bool:
    return (one.nodes, one.links) == (other.nodes, other.links)


def place(error: pytest.ExceptionInfo[TopologyError]) -> tuple[int, int]:
    found = re.search(r"line (\d+), column (\d+)", str(error.value))
    assert found, error.value
    return int(found[1]), int(found[2])


# name: links of each GPU, NVSwitches, CPUs, NICs
MACHINES = {
    "dgx1_v100.txt": ([6] * 8, 0, [0, 1], 4),
    "dgx1_v100_blanks_nics_out_of_order.txt": ([6] * 8, 0, [0, 1], 4),
    "dgx1_v100_pcie_only.txt": ([0] * 8, 0, [0, 1], 4),
    "dgx1_p100_glued_header_soc.txt": ([4] * 8, 0, [0, 1], 4),
    "a6000_x3_one_pair_ansi.txt": ([4, 4, 0], 0, [0], 0),
    "h100_x8_numa_out_of_order.txt": ([18] * 8, 1, [0, 1, 2, 3], 2),
    "x4_nvswitch_empty_affinity.txt": ([18] * 4, 1, [0, 1], 0),
    "v100_x4_numa_one_tab_late.txt": ([4, 4, 5, 5], 0, [0], 0),
    "a100_x4_nv12_pairs.txt": ([12] * 4, 0, [0, 1, 2, 3], 0),
    "b200_x8_one_off_the_fabric.txt": ([18, 18, 0, 18, 18, 18, 18, 18], 1, [0, 1], 0),
    "a100_x4_markdown.txt": ([12] * 4, 0, [0, 1, 2, 3], 2),
    "v100_x1_of_4_cgroup.txt": ([0], 0, [0, 1, 2], 4),
    "v100_x4_power9_numa_0_8.txt": ([3] * 4, 0, [0, 8], 4),
    "rtx3090_x4_pairs.txt": ([4] * 4, 0, [0], 0),
    "pcie_x8_six_and_two.txt": ([0] * 8, 0, [0, 1], 0),
    "a100_x8_pxb_10_nics.txt": ([12] * 8, 1, [0, 1, 2], 10),
    "v100_x8_one_cpu.txt": ([6] * 8, 0, [0], 4),
    "v100_x4_nic_elsewhere.txt": ([4, 4, 5, 5], 0, [0, 1], 1),
    "rocm_x8_xgmi.txt": ([7] * 8, 0, [0], 0),
    "rocm_x8_two_hives.txt": ([3] * 8, 0, [0, 1], 0),
    "mi300a_x4_tabs.txt": ([3] * 4, 0, [0, 1, 2, 3], 0),
    "mi50_x4_tables_side_by_side.txt": ([0] * 4, 0, [1], 0),
    "b300_x7_odd_even_cores.txt": ([18] * 7, 1, [0, 1], 0),
    "h100_x8_nic_rows_cut.txt": ([18] * 8, 1, [0, 1], 12),
    "rtx4090_x4_named_in_one_line.txt": ([0] * 4, 0, [0], 0),
    "a100_x2_pxb_to_one_nic.txt": ([12] * 2, 0, [0, 1], 5),
    "aws_p4d_a100_x8.xml": ([0] * 8, 0, [0, 1], 4),
    "azure_nc48_a100_x2.xml": ([12] * 2, 0, [0, 1], 1),
    "azure_nc96_a100_x4.xml": ([0] * 4, 0, [0, 1, 2, 3], 1),
    "azure_nd40_v100_x8.xml": ([0] * 8, 0, [0, 1], 1),
    "oci_h100_x8.xml": ([18] * 8, 4, [0, 1], 16),
    "oci_a100_x8.xml": ([0] * 8, 0, [1, 3, 5, 7], 8),
    "rccl_4p2h.xml": ([2] * 8, 0, [0], 1),
    "rccl_4p4h.xml": ([3] * 16, 0, [1], 16),
    "rccl_8p1h.xml": ([7, 6] * 4, 0, [1, 3], 4),
    "rccl_4p_940.xml": ([3] * 4, 0, [0, 1, 2, 3], 4),
}
CUT_OFF = {"cut_off_gpu7.txt": (9, 36), "cut_off_no_header.txt": (7, 117), "cut_off_nics.txt": (5, 44)}


def test_every_fixture_is_known() -> None:
    files = {path.name for path in FIXTURES.iterdir() if path.suffix in (".txt", ".xml")}
    assert files == {*MACHINES, *CUT_OFF}


@pytest.mark.parametrize("name", MACHINES)
def test_machine(name: str) -> None:
    links, switches, cpus, nics = MACHINES[name]
    graph = fixture(name)
    assert lanes(graph) == links
    assert [gpu.name for gpu in graph.gpus] == [f"GPU{at}" for at in range(len(links))]
    assert names(graph, NodeKind.NVSWITCH) == [f"NVSwitch{at}" for at in range(switches)]
    assert names(graph, NodeKind.CPU) == [f"CPU{at}" for at in cpus]
    assert len(names(graph, NodeKind.NIC)) == nics
    assert all(link.source for link in graph.links)
    both_ways = {(link.dst, link.src): (link.capacity, link.lanes) for link in graph.links}
    assert both_ways == {(link.src, link.dst): (link.capacity, link.lanes) for link in graph.links}
    to_cpus = {link.dst for link in graph.links if link.kind is LinkKind.SMP}
    assert len(to_cpus) == (len(cpus) if len(cpus) > 1 else 0)
    assert LinkGraph.from_json(graph.to_json()) == graph


@pytest.mark.parametrize("name", CUT_OFF)
def test_what_is_cut_off_is_refused(name: str) -> None:
    with pytest.raises(TopologyError, match="cut off") as error:
        fixture(name)
    assert place(error) == CUT_OFF[name]


# The PCIe tree of a matrix.


def test_hidden_classes_follow_from_nics() -> None:
    graph = fixture("dgx1_v100.txt")
    groups = {frozenset(joined(graph, switch)) for switch in names(graph, NodeKind.PCIE)}
    assert groups == {
        frozenset({"CPU0", "GPU0", "GPU1", "mlx5_0"}),
        frozenset({"CPU0", "GPU2", "GPU3", "mlx5_1"}),
        frozenset({"CPU1", "GPU4", "GPU5", "mlx5_2"}),
        frozenset({"CPU1", "GPU6", "GPU7", "mlx5_3"}),
    }
    assert not any("joined over PCIe" in text for text in graph.assumed)


def test_numa_column_tells_cpus_apart() -> None:
    graph = fixture("h100_x8_numa_out_of_order.txt")
    assert [joined(graph, f"CPU{cpu}") & {gpu.name for gpu in graph.gpus} for cpu in range(4)] == [
        {"GPU0", "GPU3"},
        {"GPU1", "GPU2"},
        {"GPU4", "GPU7"},
        {"GPU5", "GPU6"},
    ]
    assert any("GPU0-GPU3, GPU1-GPU2" in text and "one CPU" in text for text in graph.assumed)


def test_pairs_are_said_to_be_where_the_tree_has_them() -> None:
    graph = fixture("a100_x2_pxb_to_one_nic.txt")
    assert [joined(graph, *joined(graph, at)) - {at} for at in ("GPU0", "GPU1", "NIC2")] == [{"PCIe0"}] * 3
    assert any(text.endswith("GPU0-GPU1 taken as below one PCIe switch.") for text in graph.assumed)


def test_numa_nodes_that_differ_leave_nothing_to_assume() -> None:
    assert not any("joined over PCIe" in text for text in fixture("a100_x4_nv12_pairs.txt").assumed)


def test_empty_affinity_does_not_shift_numa() -> None:
    graph = fixture("x4_nvswitch_empty_affinity.txt")
    assert [gpu.numa for gpu in graph.gpus] == [0, 1, 1, 1]


def test_markdown_affinity_is_found_by_header() -> None:
    assert [gpu.numa for gpu in fixture("a100_x4_markdown.txt").gpus] == [3, 2, 1, 0]


def test_node_is_apart_host_bridges_of_one_cpu() -> None:
    graph = fixture("pcie_x8_six_and_two.txt")
    assert joined(graph, "CPU0") == {"GPU0", "PCIe0", "PCIe1", "GPU5"}
    assert joined(graph, "PCIe0") == {"CPU0", "GPU1", "GPU2"}
    bridge = graph.by_ends["PCIe0", "CPU0"]
    assert bridge.capacity == pytest.approx(2 * graph.by_ends["GPU1", "PCIe0"].capacity)


def test_pxb_is_switches_on_a_switch() -> None:
    graph = fixture("a100_x8_pxb_10_nics.txt")
    (leaf,) = joined(graph, "GPU0")
    (top,) = joined(graph, leaf) - {"GPU0"}
    leaves = joined(graph, top) - {"CPU0"}
    assert joined(graph, *leaves) - {top} == {"GPU0", "GPU1", "mlx5_2", "mlx5_3"}  # named by the NIC legend
    assert graph.by_name["mlx5_2"].detail == "NIC2"


def test_contradictions_are_resolved_and_said() -> None:
    graph = fixture("a100_x8_pxb_10_nics.txt")  # SYS between GPUs and NICs of NUMA node 0
    assert any("farther apart in it than the rest allows" in text for text in graph.assumed)
    flat = read("GPU0 X SYS PHB\nGPU1 SYS X PHB\nGPU2 PHB PHB X\n", "flat")
    assert joined(flat, "CPU0") == {"GPU0", "GPU1", "GPU2"}
    assert any("GPU0-GPU1" in text for text in flat.assumed)


def test_numa_nodes_and_classes_that_contradict() -> None:
    header = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
    sys_in_one = read(header + "GPU0\t X \tSYS\t0-3\t0\nGPU1\tSYS\t X \t0-3\t0\n", "sys")
    assert names(sys_in_one, NodeKind.CPU) == ["CPU0"]
    assert any("SYS, but in one NUMA node" in text for text in sys_in_one.assumed)
    phb_in_two = read(header + "GPU0\t X \tPHB\t0-3\t0\nGPU1\tPHB\t X \t4-7\t1\n", "phb")
    assert names(phb_in_two, NodeKind.CPU) == ["CPU0"]
    assert any("two NUMA nodes" in text for text in phb_in_two.assumed)


@pytest.mark.parametrize(
    ("one", "other", "cpus"),
    [
        ("0-3\t0", "0-3\t1", ["CPU0", "CPU1"]),
        ("0-3\t\t2", "4-7\t\t2", ["CPU2"]),
        ("0-3\t0,3-9", "0-3\t1,19-25", ["CPU0", "CPU1"]),
        ("\t1", "\t1", ["CPU1"]),
        ("0-3\tN/A", "0-3\tN/A", ["CPU0"]),
    ],
)
def test_affinity_columns(one: str, other: str, cpus: list[str]) -> None:
    header = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    graph = read(f"{header}GPU0\t X \tNV4\t{one}\t\tN/A\nGPU1\tNV4\t X \t{other}\t\tN/A\n", "affinity")
    assert names(graph, NodeKind.CPU) == cpus


def test_affinity_after_a_wrap() -> None:
    rows = "GPU0    X   NV4\n0-3   0\nGPU1   NV4   X   4-7   1\n"
    graph = read(f"  GPU0  GPU1  CPU Affinity  NUMA Affinity\n{rows}", "wrap")
    assert [gpu.numa for gpu in graph.gpus] == [0, 1]


def test_cpu_affinity_helps_where_nothing_else_does() -> None:
    header = "\tGPU0\tGPU1\tCPU Affinity\n"
    apart = read(header + "GPU0\t X \tNV4\t0-3\nGPU1\tNV4\t X \t4-7\n", "apart")
    assert names(apart, NodeKind.CPU) == ["CPU0", "CPU1"]
    together = read(header + "GPU0\t X \tNV4\t0-3\nGPU1\tNV4\t X \t0-3\n", "together")
    assert names(together, NodeKind.CPU) == ["CPU0"]


# What links carry.


def test_rates() -> None:
    assert pcie(8.0, 16) == pytest.approx(15.754, abs=1e-3)
    assert pcie(5.0, 16) == 8.0
    assert pcie(64.0, 16) == pytest.approx(121.0)
    assert [(MODELS[name].rate, MODELS[name].links) for name in ("p100", "v100", "a100", "h800", "b200", "mi300x")] == [
        (20.0, 4),
        (25.0, 6),
        (25.0, 12),
        (25.0, 8),
        (50.0, 18),
        (48.0, 7),
    ]
    for text, name in {
        "Tesla V100-SXM2-32GB": "v100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A10": "a10",
        "NVIDIA GeForce RTX 3090": "rtx3090",
        "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
        "AMD Instinct MI300X": "mi300x",
    }.items():
        assert model_in(text) is MODELS[name]
    assert model_in("NVIDIA A1000 Laptop") is None
    assert smp(NOTHING, "AuthenticAMD", 0x19, 1).gbps == 4 * 36.0
    assert smp(NOTHING, "AuthenticAMD", 0x19, 0x11).gbps == 4 * 64.0
    assert smp(NOTHING, "GenuineIntel", 6, 143).gbps == 4 * 40.0
    assert smp(Assumed(smp=31.0), "GenuineIntel", 6, 143).gbps == 31.0


def test_what_a_matrix_does_not_say_is_assumed_and_said() -> None:
    graph = fixture("dgx1_v100.txt")
    assert graph.by_ends["GPU0", "GPU3"].capacity == 2 * 25.0
    for option in ("--nvlink-gbps", "--pcie-gbps", "--smp-gbps", "--gpu"):
        assert any(option in text for text in graph.assumed)


def test_the_user_says_what_links_carry() -> None:
    graph = fixture("dgx1_v100.txt", Assumed(nvlink=18.0, pcie=12.0, smp=9.0))
    assert graph.by_ends["GPU0", "GPU1"].capacity == 18.0
    assert graph.by_ends["GPU0", "GPU3"].capacity == 36.0
    assert graph.by_ends["GPU0", "PCIe0"].capacity == 12.0
    assert graph.by_ends["CPU0", "CPU1"].capacity == 9.0
    assert len(graph.assumed) == 1 and "NICs" in graph.assumed[0]


def test_the_model_says_what_links_carry() -> None:
    assert fixture("dgx1_p100_glued_header_soc.txt", Assumed(gpu="P100")).by_ends["GPU0", "GPU1"].capacity == 20.0
    b200 = fixture("b200_x8_one_off_the_fabric.txt", Assumed(gpu="NVIDIA B200"))
    assert b200.by_ends["GPU0", "NVSwitch0"].capacity == 18 * 50.0
    assert b200.by_ends["GPU0", "CPU0"].capacity == pytest.approx(pcie(32.0, 16))


def test_models_in_the_text_are_used() -> None:
    listed = "GPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-1)\nGPU 1: NVIDIA RTX A6000 (UUID: GPU-2)\n"
    graph = read(f"{listed}GPU0 X NV4\nGPU1 NV4 X\n", "mixed")
    assert graph.by_ends["GPU0", "GPU1"].capacity == 4 * 14.0625
    assert [gpu.detail for gpu in graph.gpus] == ["rtx3090", "a6000"]
    slower = read("GPU 0: Tesla V100-SXM2\nGPU 1: Tesla P100-SXM2\nGPU0 X NV2\nGPU1 NV2 X\n", "mixed")
    assert slower.by_ends["GPU0", "GPU1"].capacity == 2 * 20.0
    other = read("GPU 0: Tesla T4 (UUID: GPU-1)\nGPU0 X NV4\nGPU1 NV4 X\n", "of another machine")
    assert any("cannot have so many" in text for text in other.assumed)


@pytest.mark.parametrize("several", ["GPU 0,1,2,3", "GPU 0, 1, 2, 3", "GPU 0-3", "GPUs 0 - 1,2-3", "GPU0-3"])
def test_one_line_may_name_the_model_of_several_gpus(several: str) -> None:
    text = (FIXTURES / "rtx4090_x4_named_in_one_line.txt").read_text()
    line = "GPU 0,1,2,3: NVIDIA GeForce RTX 4090"
    graph = read(text.replace(line, line.replace("GPU 0,1,2,3", several)), "one line")
    each = read(text.replace(line, "".join(line.replace("0,1,2,3", f"{at}") + "\n" for at in range(4))), "one line")
    assert graph == each and {gpu.detail for gpu in graph.gpus} == {"rtx4090"}
    assert graph.by_ends["GPU0", "PCIe0"].capacity == pytest.approx(pcie(16.0, 16))
    assert any("GeForce" in text for text in graph.assumed)
    some = read(text.replace(line, "GPU 1,3: NVIDIA GeForce RTX 4090\nGPU 0,2: NVIDIA RTX A6000"), "two lines")
    assert [gpu.detail for gpu in some.gpus] == ["a6000", "rtx4090"] * 2


def test_wrong_models_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"'v1000' is not known; known are .*v100"):
        Assumed(gpu="v1000")
    with pytest.raises(TopologyError, match=r"GPU0 has 18 NVLinks, more than --gpu a100") as error:
        fixture("h100_x8_numa_out_of_order.txt", Assumed(gpu="a100"))
    assert place(error) == (2, 1)
    with pytest.raises(TopologyError, match="XGMI"):
        fixture("rccl_4p2h.xml", Assumed(gpu="a100"))
    with pytest.raises(TopologyError, match="XGMI"):
        fixture("rocm_x8_xgmi.txt", Assumed(gpu="a100"))
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TopologyError, match="--nvlink-gbps"):
            Assumed(nvlink=rate)


def test_few_gpus_of_a_switch_are_told_by_their_model() -> None:
    matrix = "GPU0 X NV8 NV8\nGPU1 NV8 X NV8\nGPU2 NV8 NV8 X\n"
    direct = read(matrix, "x3")
    assert not names(direct, NodeKind.NVSWITCH)
    assert any("may be on an NVSwitch" in text for text in direct.assumed)
    assert names(read(matrix, "x3", Assumed(gpu="a800")), NodeKind.NVSWITCH) == ["NVSwitch0"]


def test_too_many_links_for_direct_ones_and_not_a_switch() -> None:
    with pytest.raises(TopologyError, match="must be on an NVSwitch") as error:
        read("GPU0 X NV12 NV12\nGPU1 NV12 X SYS\nGPU2 NV12 SYS X\n", "odd")
    assert place(error) == (2, 1)


# What people put around a matrix.

ROW = re.compile(r"^(GPU|mlx)", re.MULTILINE)
SURROUNDINGS = {
    "text before and after": lambda text: (
        f"## Bug\nOn GPU0 it hangs; X is SYS.\n$ nvidia-smi topo -m\n{text}\nThe GPU1 too."
    ),
    "legend": lambda text: text + "\nLegend:\n\n  X    = Self\n  SYS  = over CPUs\n  NV#  = # bonded\n\nNIC Legend:\n",
    "windows": lambda text: text.replace("\n", "\r\n"),
    "hashes": lambda text: ROW.sub(r"# \1", text),
    "quoted": lambda text: "".join(f"> {line}\n" for line in text.splitlines()),
    "indented": lambda text: "".join(f"      {line}\n" for line in text.splitlines()),
    "blank lines": lambda text: text.replace("\n", "\n\n"),
    "mpirun": lambda text: "".join(f"[1,0]<stdout>:{line}\n" for line in text.splitlines()),
    "log": lambda text: "".join(f"2024-01-02 03:04:05 node7 | {line}\n" for line in text.splitlines()),
    "no header": lambda text: text.split("\n", 1)[1],
    "no indent": lambda text: text.lstrip(),
    "glued header": lambda text: re.sub(r"(GPU\d)\t(?=GPU|mlx)", r"\1", text),
    "colours": lambda text: text.replace("GPU0\tGPU1", "\x1b[4mGPU0\tGPU1", 1).replace("Affinity", "Affinity\x1b[0m"),
    "colours without escape": lambda text: text.replace("\tGPU0", "\t[4mGPU0", 1).replace("Affinity", "Affinity[0m"),
    "blanks": lambda text: text.expandtabs(8),
    "one blank": lambda text: re.sub(r"[\t ]+", " ", text),
    "unbreakable blanks": lambda text: text.replace("\t", "\xa0\xa0"),
    "glued cells": lambda text: text.replace("SYS\tSYS", "SYSSYS"),
    "x glued": lambda text: text.replace(" X \t", " X "),
    "byte order mark": lambda text: "\ufeff" + text,
    "affinity left out": lambda text: re.sub(r"\t(CPU Affinity|\d+-\S+)$", "", text, flags=re.MULTILINE),
    "rows of nics left out": lambda text: "".join(
        line + "\n" for line in text.splitlines() if not line.startswith("mlx")
    ),
    "wrapped": lambda text: re.sub(r"^(GPU\d.{20})", r"\1\n", text, flags=re.MULTILINE),
    "wrapped in a cell": lambda text: re.sub(r"^(.{0,4}GPU\d\t.{12,}?S)(?=YS)", r"\1\n", text, flags=re.MULTILINE),
    "peer access after": lambda text: text + "\n\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n",
    "peer access before": lambda text: " \tGPU0\tGPU1\n GPU0\tX\tGNS\n GPU1\tGNS\tX\n\n" + text,
    "html": lambda text: f"<details>\n<pre>\n{text}</pre>\n</details>",
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_paste(name: str) -> None:
    pasted = SURROUNDINGS[name](MATRIX)
    assert pasted != MATRIX
    assert same_machine(read(pasted, name), fixture("dgx1_v100.txt"))


def test_columns_of_a_table_may_stand_anywhere() -> None:
    table = """
    | NUMA Affinity | GPU1 | | CPU Affinity | GPU0 | mlx5_0 |
    |---|---|---|---|---|---|
    | 1 | X | GPU1 | 8-15 | NV4 | SYS |
    | 0 | NV4 | GPU0 | 0-7 | X | PIX |
    | | SYS | mlx5_0 | | PIX | X |
    """
    plain = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity\nGPU0\tX\tNV4\tPIX\t0-7\t0\nGPU1\tNV4\tX\tSYS\t8-15\t1\n"
    assert same_machine(read(table, "table"), read(plain, "plain"))


def test_tables_of_who_reaches_whom_are_passed_over() -> None:
    access = "| | GPU0 | GPU1 | GPU2 |\n|--|--|--|--|\n| GPU0 | X | OK | **TNS** |\n| GPU1 | OK | X | NS |\n"
    matrix = "      GPU0  GPU1  GPU2\nGPU0   X    PIX   SYS\nGPU1  PIX    X    SYS\nGPU2  SYS   SYS    X\n"
    plain = read(matrix, "matrix")
    assert same_machine(read(f"{access}\n{matrix}", "after"), plain)
    assert same_machine(read(f"{matrix}\n{access}", "before"), plain)
    with pytest.raises(TopologyError, match=r"topo -p2p") as error:
        read(access, "alone")
    assert place(error) == (3, 3)


def test_the_first_matrix_is_read_whether_or_not_a_table() -> None:
    table = "| | GPU0 | GPU1 |\n|--|--|--|\n| GPU0 | X | NV4 |\n| GPU1 | NV4 | X |\n"
    matrix = "GPU0 X SYS\nGPU1 SYS X\n"
    assert lanes(read(f"{table}\n{matrix}", "table first")) == [4, 4]
    assert lanes(read(f"{matrix}\n{table}", "matrix first")) == [0, 0]


def test_columns_that_are_no_devices() -> None:
    table = """
    | | Card | GPU0 | GPU1 | NUMA |
    |---|---|---|---|---|
    | GPU0 | left | X | **NV4** | 0 |
    | GPU1 | right | **NV4** | X | 1 |
    """
    assert [gpu.numa for gpu in read(table, "table").gpus] == [0, 1]
    short = read(
        "      GPU0  GPU1  NIC0  CPU Affinity  NUMA\nGPU0   X  NV4  PIX  0-3  0\nGPU1  NV4  X  SYS  4-7  1\n", ""
    )
    assert [gpu.numa for gpu in short.gpus] == [0, 1] and names(short, NodeKind.NIC) == ["NIC0"]


def test_nics_whose_columns_were_lost() -> None:
    rows = "GPU0  X  NV8  0-3  0\nGPU1  NV8  X  4-7  1\nNIC0  PIX  SYS\nNIC1  SYS  PHB\nNIC2  SYS\nNIC3 X SYS\n"
    graph = read(f"      GPU0  GPU1  CPU Affinity  NUMA Affinity\n{rows}\nNIC Legend:\n\n  NIC0: mlx5_4\n", "cut")
    assert names(graph, NodeKind.NIC) == ["mlx5_4", "NIC1"]
    assert joined(graph, *joined(graph, "GPU0")) >= {"GPU0", "mlx5_4"}
    assert joined(graph, "CPU1") == {"GPU1", "NIC1"}


def test_numa_nodes_of_memory_are_not_of_cpus() -> None:
    header = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    tray = read(f"{header}GPU0\tX\tNV18\t0-1\t0\t\t2\nGPU1\tNV18\tX\t\t1\t\t10\n", "tray")
    assert [gpu.numa for gpu in tray.gpus] == [0, 1]
    sliced = read(f"{header}GPU0\tX\tNV6\t0-71\t0,5-11\t\t4\nGPU1\tNV6\tX\t72-143\t1,13-19\t\t12\n", "sliced")
    assert names(sliced, NodeKind.CPU) == ["CPU0", "CPU1"]


def test_a_second_matrix_is_left_out_and_said() -> None:
    graph = read(MATRIX + "\n" + MATRIX, "two")
    assert same_machine(graph, fixture("dgx1_v100.txt"))
    assert any("Another matrix begins in line 16" in text for text in graph.assumed)


ESCAPED = MATRIX.replace("\t", "\\t").rstrip("\n")
STRINGS = {
    "JSON": json.dumps({"host": "node7", "topology": MATRIX}),
    "JSON in JSON": json.dumps({"body": json.dumps({"topology": MATRIX})}),
    "one line": f"TOPO='{ESCAPED}\\n'\n".replace("\nGPU", "\\nGPU").replace("\nmlx", "\\nmlx"),
    "Python": "TOPO = (\n" + "".join(f'    "{line}\\n"\n' for line in ESCAPED.split("\n")) + ")\n",
    "Java": "String topo =\n" + "".join(f'        + "{line}\\n"\n' for line in ESCAPED.split("\n")),
    "shell": "".join(f"    printf '{line}\\n'\n" for line in ESCAPED.split("\n")),
    "colours": f'x = "{ESCAPED}\\n"'.replace("\\tGPU0", "\\t\\x1b[4mGPU0", 1).replace("Affinity", "Affinity\\x1b[0m"),
    "Windows": json.dumps({"topology": MATRIX.replace("\n", "\r\n")}),
    "blanks": "".join(f"    '{line}\\n'\n" for line in MATRIX.expandtabs(8).rstrip("\n").split("\n")),
}


@pytest.mark.parametrize("name", STRINGS)
def test_a_string_of_a_program_or_of_json(name: str) -> None:
    graph = read(STRINGS[name], name)
    assert same_machine(graph, fixture("dgx1_v100.txt"))
    assert graph.name == name


def test_a_string_for_each_line() -> None:
    lines = ["      GPU0  GPU1  CPU Affinity  NUMA Affinity", "GPU0  X  NV4  0-3  0", "GPU1  NV4  X  4-7  1"]
    plain = read("\n".join(lines), "plain")
    assert [gpu.numa for gpu in plain.gpus] == [0, 1]
    for before, after in (('    "', '",'), ("- '", "'"), ('  console.log("', '");')):
        assert same_machine(read("".join(f"{before}{line}{after}\n" for line in lines), "lines"), plain)


def test_a_string_that_is_cut_off() -> None:
    text = json.dumps({"topology": MATRIX[: MATRIX.index("\nGPU7\t")]})
    with pytest.raises(
        TopologyError, match=r"^cut, with \\n and \\t written out: .*GPU7 has a column but no row"
    ) as error:
        read(text, "cut")
    assert place(error) == (8, 53)


def edited(line: int, old: str, new: str) -> str:
    """The matrix with the first `old` of a line (from 1) replaced."""
    lines = MATRIX.split("\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        (edited(3, "NV1", "NV2"), (2, 10), r"GPU0 to GPU1 is NV1, but GPU1 to GPU0 is NV2 \(line 3, column 6\)"),
        (edited(3, "NV1\t", ""), (3, 49), "GPU1 has 11 cells for 12 columns"),
        (edited(3, " X ", "SYS"), (3, 10), "only from itself to itself is X"),
        (edited(4, "SYS", "X"), (4, 22), "only from itself to itself is X"),
        (edited(4, "SYS", "N/A"), (4, 21), "GPU2 has 4 cells for 12 columns, then 'N/A'"),
        ("\tGPU0\tGPU1\nGPU0\tX\tQX2\nGPU1\tQX2\tX\n", (2, 7), "2 columns, then 'QX2', no link class of `nvidia-smi"),
        ("   GPU0  GPU1\nGPU0  X  QX\nGPU1  QX  X\n", (2, 8), "GPU0 has 1 cells for 2 columns, then 'QX', no link"),
        ("\tGPU0\tGPU1\nGPU0\tX\tMX\nGPU1\tMX\tX\n", (2, 1), "of MetaX GPUs"),
        ("   GPU0  GPU1\nGPU0  X  MT2\nGPU1  MT2  X\n", (2, 1), "of Moore Threads GPUs"),
        ("  GPU0 GPU1 GPU2\nGPU0 X SYS MPB\nGPU1 SYS X SYS\nGPU2 MPB SYS X\n", (2, 1), "of Moore Threads GPUs"),
        ("  GPU0 GPU1 GPU2\nGPU0 X SYS SYS\nGPU1 SYS X SPB\nGPU2 SYS SPB X\n", (3, 1), "of Moore Threads GPUs"),
        ("          Phy-ID12  Phy-ID13\nPhy-ID12  X  SIO\nPhy-ID13  SIO  X\n", (1, 1), "of Ascend NPUs"),
        ("      NPU0  NPU1\nNPU0  X  HCCS\nNPU1  HCCS  X\n", (1, 1), "of Ascend NPUs"),
        ("         GPU 0/0|GPU 1/0\nGPU 0/0 |S  |XL8\nGPU 1/0 |XL8  |S\n", (1, 1), "of Intel's GPUs"),
        ('[{"gpu": 0, "links": [{"gpu": 1, "link_type": "XGMI"', (1, 1), "part of what `amd-smi topology --json`"),
        ("      GPU0  GPU1  CPU\nGPU0  X  NV1  PHB\nGPU1  NV1  X  PHB\n", (3, 18), "no header that can be read"),
        (edited(5, "GPU3", "GPU9"), (5, 1), "GPU9 has a row but no column"),
        ("\n".join(MATRIX.split("\n")[:8]), (8, 53), "GPU7 has a column but no row"),
        (edited(10, "PIX", "SYS"), (2, 38), "GPU0 to mlx5_0 is PIX, but mlx5_0 to GPU0 is SYS"),
        (edited(2, "NV2", "NV0"), (2, 18), "NV0"),
        (edited(2, "PIX", "NV1"), (2, 38), "no row of its own"),
        ("\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\tX\n", (2, 1), "topo -p2p.*run `nvidia-smi topo -m`"),
        ("\tGPU0\tGPU1\tCPU Affinity\n", (1, 2), "no row"),
        ("GPU0 X SYS PIX\nGPU1 SYS X PIX\n", (2, 15), "no row says whether GPUs follow GPU1"),
        ("| | GPU0 | GPU1 |\n|--|--|--|\n| GPU0 | X | |\n| GPU1 | NV1 | X |\n", (3, 14), "no link class"),
        ("| | GPU0 | GPU1 |\n|--|--|--|\n| GPU0 | X | NV1 |\n| GPU1 | NV1\n", (4, 13), "no link class"),
        ("| | GPU0 | GPU1 |\n|--|--|--|\n| GPU0 | X | NV1 |\n", (3, 17), "GPU1 has a column but no row"),
        ("| | GPU0 |\n|--|--|\n| GPU0 | X |\n| GPU0 | X |\n", (4, 3), "second row"),
        ("\n\nsee GPU0\n", (3, 1), "no matrix"),
    ],
)
def test_what_is_not_whole_is_refused(text: str, where: tuple[int, int], what: str) -> None:
    with pytest.raises(TopologyError, match=what) as error:
        read(text, "paste")
    assert place(error) == where
    assert str(error.value).startswith("paste: ")


MOST_ENDS = 300
"""Of a longer text not every end is tried: reading it takes longer too."""


@pytest.mark.parametrize("name", [name for name in MACHINES if name.endswith(".txt")])
@pytest.mark.parametrize("first", [0, 1])
def test_a_text_that_ends_anywhere_is_refused_or_has_all_gpus(name: str, first: int) -> None:
    text = (FIXTURES / name).read_text().split("\n", first)[-1]
    whole = lanes(fixture(name))
    for end in range(first, len(text), 1 + len(text) // MOST_ENDS):
        try:
            graph = read(text[:end], name)
        except TopologyError:
            continue
        assert lanes(graph) == whole, text[:end]


# XML.

CPU = '<cpu numaid="0" affinity="ff" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="85">'
SPEED = 'link_speed="16 GT/s" link_width="16"'


def system(*gpus: str, after: str = "") -> str:
    """A machine with GPUs that hold the given elements, all on one CPU."""
    elements = "\n".join(
        f'<pci busid="0000:0{at}:00.0" class="0x030200" {SPEED}><gpu dev="{at}" sm="80">{inside}</gpu></pci>'
        for at, inside in enumerate(gpus)
    )
    return f'<system version="1">\n{CPU}\n{elements}\n{after}</cpu>\n</system>'


def to_gpu(at: int, count: int = 2) -> str:
    return f'<nvlink target="0000:0{at}:00.0" count="{count}" tclass="0x030200"/>'


def test_switches_are_kept_with_their_lanes() -> None:
    graph = fixture("oci_h100_x8.xml")
    assert [graph.by_ends["GPU5", f"NVSwitch{at}"].lanes for at in range(4)] == [4, 5, 5, 4]
    assert graph.by_ends["GPU5", "NVSwitch1"].capacity == 5 * 25.0
    assert graph.by_ends["PCIe0", "CPU0"].capacity == 8.0  # 5 GT/s, as the file has it
    assert not graph.assumed


def test_ports_of_a_card_share_its_slot() -> None:
    graph = fixture("oci_h100_x8.xml")
    (card,) = joined(graph, "mlx5_0")
    assert joined(graph, "mlx5_1") == {card}
    assert graph.by_ends["mlx5_0", card].capacity == 180 / 8
    assert graph.by_name[card].detail.startswith("card")


def test_a_nic_carries_no_more_than_its_slot() -> None:
    slot = '<pci busid="0000:0a:00.0" class="0x020700" link_speed="8 GT/s" link_width="4">'
    graph = read(system("", after=f'{slot}<nic><net name="n0" speed="200000"/></nic></pci>'), "nic")
    assert graph.by_ends["n0", "CPU0"].capacity == pytest.approx(pcie(8.0, 4))


def test_xgmi_counts_and_architectures() -> None:
    graph = fixture("rccl_8p1h.xml")
    assert (graph.by_ends["GPU0", "GPU1"].lanes, graph.by_ends["GPU0", "GPU1"].capacity) == (4, 4 * 50.0)
    assert graph.by_ends["GPU0", "GPU1"].kind is LinkKind.XGMI
    assert fixture("rccl_4p_940.xml").by_ends["GPU0", "GPU1"].capacity == 48.0


def test_links_to_itself_are_hidden_ones() -> None:
    graph = fixture("azure_nc96_a100_x4.xml")
    assert any("hypervisor" in text and "GPU0 (12)" in text for text in graph.assumed)
    half = read(system(to_gpu(1), to_gpu(1)), "half")
    assert half.by_ends["GPU1", "GPU0"].lanes == 2
    assert any("GPU0 to GPU1 2, back none" in text for text in half.assumed)


def test_speeds_that_are_empty_are_assumed_from_the_model() -> None:
    graph = fixture("azure_nc48_a100_x2.xml")
    assert graph.by_ends["GPU0", "CPU0"].capacity == pytest.approx(pcie(16.0, 16))
    assert any("0001:00:00.0" in text for text in graph.assumed)
    assert graph.by_ends["eth0", "CPU0"].capacity == 12.5
    assert graph.by_ends["CPU0", "CPU1"].capacity == 4 * 36.0


def test_files_without_gpu_elements_say_what_is_missing() -> None:
    for name in ("aws_p4d_a100_x8.xml", "azure_nd40_v100_x8.xml", "oci_a100_x8.xml"):
        assert any("NCCL_TOPO_DUMP_FILE" in text for text in fixture(name).assumed)


def test_switches_of_one_bus_id_stay_apart() -> None:
    graph = fixture("rccl_4p4h.xml")
    assert sum(node.detail == "0000:c5:00.0" for node in graph.of_kind(NodeKind.PCIE)) > 1


def test_gpus_are_named_by_dev_then_rank_then_order() -> None:
    by_dev = system("", "").replace('dev="0"', 'dev="3"')
    assert [gpu.name for gpu in read(by_dev, "dev").gpus] == ["GPU1", "GPU3"]
    by_rank = system("", "").replace('dev="0"', 'rank="5"').replace('dev="1"', 'rank="4"')
    assert [(gpu.name, gpu.detail) for gpu in read(by_rank, "rank").gpus] == [
        ("GPU4", "0000:01:00.0"),
        ("GPU5", "0000:00:00.0"),
    ]
    by_order = system("", "").replace('dev="1"', 'dev="0"')
    assert [gpu.name for gpu in read(by_order, "order").gpus] == ["GPU0", "GPU1"]


def test_links_to_cpus_and_over_c2c() -> None:
    power9 = read(
        system('<nvlink target="0004:00:00.0" count="3" tclass="0x068001"/>').replace('sm="80"', 'sm="70"'), "power9"
    )
    assert power9.by_ends["GPU0", "CPU0"].kind is LinkKind.C2C
    grace = read(system('<c2c bw="44712" count="10"/>'), "grace")
    assert grace.by_ends["GPU0", "CPU0"].capacity == pytest.approx(447.12)


def test_odd_links_are_left_out_and_said() -> None:
    gone = read(system('<nvlink target="0000:99:00.0" count="2" tclass="0x030200"/>'), "gone")
    assert lanes(gone) == [0]
    assert any("GPU0 to 0000:99:00.0" in text for text in gone.assumed)
    unequal = read(system(to_gpu(1, 2), to_gpu(0, 3)), "unequal")
    assert unequal.by_ends["GPU0", "GPU1"].lanes == 3
    assert any("GPU0 to GPU1 2, back 3" in text for text in unequal.assumed)
    twice = read(system(to_gpu(1) + to_gpu(1), to_gpu(0, 4)), "twice")
    assert twice.by_ends["GPU0", "GPU1"].lanes == 4


def test_several_hosts() -> None:
    switch = '<nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>'
    nic = f'<pci busid="0000:0a:00.0" class="0x020700" {SPEED}><nic><net name="mlx5_0" speed="200000"/></nic></pci>'
    one = system(switch, switch, after=nic).replace("<cpu ", '<cpu host_hash="0x1" ')
    other = system(switch, switch, after=nic).replace("<cpu ", '<cpu host_hash="0x2" ')
    body = other[other.index("<cpu") : other.index("</system>")]
    graph = read(one.replace("</system>", body + "</system>"), "hosts")
    assert [gpu.name for gpu in graph.gpus] == ["host0/GPU0", "host0/GPU1", "host1/GPU0", "host1/GPU1"]
    assert {link.dst for link in graph.following["NVSwitch0"]} == {gpu.name for gpu in graph.gpus}
    assert {link.dst for link in graph.following["network"]} == {"host0/mlx5_0", "host1/mlx5_0"}
    assert graph.by_ends["host1/mlx5_0", "network"].capacity == 25.0
    assert not any(link.kind is LinkKind.SMP for link in graph.links)


def test_xml_within_a_report() -> None:
    text = "My file:\n```xml\n" + (FIXTURES / "rccl_4p2h.xml").read_text() + "```\nGPU0 hangs.\n"
    assert same_machine(read(text, "report"), fixture("rccl_4p2h.xml"))


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('<system version="1">\n  <cpu>\n </system>', (3, 4), "mismatched tag"),
        ("<system>\n", (2, 1), "no element|unclosed|not well-formed"),
        ('<graphs version="1"/>', (1, 1), "NCCL_GRAPH_DUMP_FILE"),
        ('<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology/>', (2, 39), "hwloc"),
        ('<!DOCTYPE s [<!ENTITY a "b">]><system>&a;</system>', (1, 13), "document type"),
        ("<nvidia_smi_log/>", (1, 1), "nvidia-smi -q -x"),
        ('<?xml version="1.0"?><html/>', (1, 22), "<html>"),
        ('<system version="1"/>', (1, 1), "no <cpu>"),
        (f'<system version="1">{CPU}</cpu></system>', (1, 1), "no GPU"),
        (system(to_gpu(1, -1), ""), (3, 102), "count of <nvlink> is '-1'"),
        (system('<c2c bw="x" count="1"/>'), (3, 102), "<c2c>"),
        ('<system version="1">' + "<cpu>" * 100, (1, 336), "too many"),
    ],
)
def test_xml_that_is_no_topology(text: str, where: tuple[int, int], what: str) -> None:
    with pytest.raises(TopologyError, match=what) as error:
        read(text, "file.xml")
    assert place(error) == where


# rocm-smi.

TYPES = "       GPU0  GPU1  GPU2\nGPU0   0     XGMI  XGMI\nGPU1   XGMI  0     PCIE\nGPU2   XGMI  PCIE  0\n"


def test_weights_tell_which_gpus_are_linked() -> None:
    xgmi = TYPES.replace("PCIE", "XGMI")
    weights = "=== Weight between two GPUs ===\nGPU0 0 15 30\nGPU1 15 0 15\nGPU2 30 15 0\n"
    hops = "=== Hops between two GPUs ===\nGPU0 0 1 1\nGPU1 1 0 1\nGPU2 1 1 0\n"
    numa = "=== Numa Nodes ===\n" + "".join(f"GPU[{at}]\t\t: (Topology) Numa Node: {at // 2}\n" for at in range(3))
    graph = read(f"{weights}{hops}=== Link Type between two GPUs ===\n{xgmi}{numa}", "rocm", Assumed(gpu="mi100"))
    assert {link.dst for link in graph.following["GPU0"] if link.kind in FABRIC} == {"GPU1"}
    assert graph.by_ends["GPU0", "GPU1"].capacity == 46.0
    assert joined(graph, "CPU0") == {"GPU0", "GPU1"} and joined(graph, "CPU1") == {"GPU2"}
    assert not any("all pairs" in text for text in graph.assumed)


def test_types_alone_are_taken_as_links_and_said() -> None:
    graph = read(TYPES, "rocm")
    assert lanes(graph) == [2, 1, 1]
    assert any("all pairs assumed" in text for text in graph.assumed)


def test_numa_nodes_in_both_ways_that_rocm_smi_prints_them() -> None:
    for name in ("GPU[{}]\t\t", "GPU {}          "):
        numa = "".join(f"{name.format(at)}: (Topology) Numa Node: {at}\n" for at in range(3))
        assert [gpu.numa for gpu in read(TYPES + numa, "rocm").gpus] == [0, 1, 2]


def test_a_single_gpu_of_amd() -> None:
    title = "=== Link Type between two GPUs ===\n"
    assert [gpu.name for gpu in read(f"{title}       GPU0\nGPU0   0\n", "one").gpus] == ["GPU0"]
    with pytest.raises(TopologyError, match="rocm-smi") as error:
        read(f"\n{title}       GPU0  GPU1\nGPU0   0\n", "cut")
    assert place(error) == (2, 5)


def test_weights_or_numa_nodes_alone_are_refused() -> None:
    weights = "=== Weight between two GPUs ===\n      GPU0  GPU1\nGPU0  0  15\nGPU1  15  0\n"
    numa = "== ROCm System Management Interface ==\n== Numa Nodes ==\nGPU[0]\t\t: (Topology) Numa Node: 0\n"
    for text in (weights, numa):
        with pytest.raises(
            TopologyError, match=r"no (row of link types|table of XGMI) .*; run `rocm-smi --showtopo`"
        ) as error:
            read(text, "rocm")
        assert place(error)[0] == 1


BUSES = [f"0000:{bus}:00.0" for bus in ("0c", "22", "9f", "af")]


def amd_smi(title: str, cells: list[list[str]]) -> str:
    rows = "".join(
        f"{bus} " + "".join(f"{cell:<13}" for cell in row) + "\n" for bus, row in zip(BUSES, cells, strict=True)
    )
    return f"{title} TABLE:\n{' ' * 13}{' '.join(BUSES)}\n{rows}"


def test_amd_smi_calls_gpus_by_bus() -> None:
    def cells(itself: str, near: str, far: str) -> list[list[str]]:
        return [[itself if at == to else near if at // 2 == to // 2 else far for to in range(4)] for at in range(4)]

    access = amd_smi("ACCESS", cells("ENABLED", "ENABLED", "ENABLED"))
    types = amd_smi("LINK TYPE", cells("SELF", "XGMI", "XGMI"))
    after = amd_smi("NUMA BW", cells("N/A", "50000-50000", "0-0")) + amd_smi("DMA", cells("SELF", "T", "T"))
    graph = read(access + amd_smi("WEIGHT", cells("0", "15", "30")) + types + after, "amd-smi")
    assert [(gpu.name, gpu.detail) for gpu in graph.gpus] == [(f"GPU{at}", bus) for at, bus in enumerate(BUSES)]
    assert [{link.dst for link in graph.following[gpu.name] if link.kind in FABRIC} for gpu in graph.gpus] == [
        {"GPU1"},
        {"GPU0"},
        {"GPU3"},
        {"GPU2"},
    ]
    assert any("bus id" in text for text in graph.assumed)
    without_weights = read(access + amd_smi("WEIGHT", cells("0", "0", "0")) + types + after, "amd-smi")
    assert lanes(without_weights) == [3] * 4
    assert any("all pairs assumed" in text for text in without_weights.assumed)
    over_pcie = read(amd_smi("LINK TYPE", cells("SELF", "PCIE", "PCIE")), "amd-smi")
    assert lanes(over_pcie) == [0] * 4


def test_amd_smi_in_json() -> None:
    def to(gpu: int) -> list[dict[str, object]]:
        kinds = {other: ("XGMI", 15) if gpu // 2 == other // 2 else ("XGMI", 30) for other in reversed(range(4))}
        return [{"gpu": other, "link_type": kind, "weight": weight} for other, (kind, weight) in kinds.items()]

    said = [{"gpu": gpu, "bdf": BUSES[gpu], "links": to(gpu)} for gpu in range(4)]
    graph = read(json.dumps(said), "amd-smi.json")
    assert graph.name == "amd-smi.json" and lanes(graph) == [1] * 4
    assert [{link.dst for link in graph.following[gpu.name] if link.kind in FABRIC} for gpu in graph.gpus] == [
        {"GPU1"},
        {"GPU0"},
        {"GPU3"},
        {"GPU2"},
    ]
    del said[3]["links"][2:]  # type: ignore[union-attr]
    with pytest.raises(TopologyError, match=r"^amd-smi.json, as tables: line 2, .*GPU3 is XGMI, but .* it is N/A"):
        read(json.dumps(said), "amd-smi.json")


@pytest.mark.parametrize(
    ("old", "new", "where"),
    [("  PCIE\n", "\n", (3, 1)), ("GPU2   XGMI", "GPU2   PCIE", (2, 20)), ("0     PCIE", "PCIE  0", (3, 14))],
)
def test_rocm_tables_that_are_not_whole(old: str, new: str, where: tuple[int, int]) -> None:
    assert old in TYPES
    with pytest.raises(TopologyError, match="rocm-smi") as error:
        read(TYPES.replace(old, new), "rocm")
    assert place(error) == where


# Files.


def test_json_of_our_own() -> None:
    graph = fixture("dgx1_v100.txt")
    assert read(graph.to_json(), "json") == read("\ufeff" + graph.to_json(), "json") == graph


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "machine.txt"
    path.write_bytes(MATRIX.encode(encoding))
    assert same_machine(load(path), fixture("dgx1_v100.txt"))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "line 1, column 1: it is empty"),
        (b" \n\t\n", "line 1, column 1: it is empty"),
        (b"GPU0\n\x00\x01", "line 2, column 1: it is binary"),
        (b"ab\nc\xff", "line 2, column 2: it is not UTF-8"),
        (b"\xff\xfea", "it is not UTF-16"),
        (b"hello", "line 1, column 1: it begins 'hello'"),
        (b"{", "line 1, column 2: not JSON"),
        (b"x" * (17 << 20), "more than 16 MiB"),
    ],
)
def test_files_that_are_no_topology(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "machine.txt"
    path.write_bytes(content)
    with pytest.raises(TopologyError, match=what) as error:
        load(path)
    assert str(path) in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, what in {
        tmp_path / "missing": "does not exist",
        tmp_path: "is a directory",
        tmp_path / "file" / "below": "cannot be read: Not a directory",
        "nul\0byte": "cannot be read",
    }.items():
        with pytest.raises(TopologyError, match=what):
            load(path)


@pytest.mark.parametrize(
    "piece",
    [
        *("GPU0 GPU1\n", "GPU0|GPU1|\n", "GPU0 X\n", "<", "{", "X ", "\x1b[4m", "GPU0 XGMI ", "GPU1 0 XGMI\n"),
        *("<system>  ", "\\nGPU0\\t", "\\nGPU0 X\\\\\\\\", "0000:0c:00.0 ", "0000:0c:00.0 SELF\n"),
    ],
)
def test_a_megabyte_of_noise(piece: str) -> None:
    with pytest.raises(TopologyError) as error:
        read(piece * (1_000_000 // len(piece)), "noise")
    place(error)


# Random machines and random damage.


@dataclass(frozen=True)
class Machine:
    """GPUs and NICs by the path from their CPU to their switch, and NVLinks between GPUs."""

    paths: tuple[tuple[int, ...], ...]
    gpus: int
    bonds: dict[tuple[int, int], int]

    def class_of(self, one: int, other: int) -> str:
        for depth, name in enumerate(("SYS", "NODE", "PHB", "PXB")):
            if self.paths[one][depth] != self.paths[other][depth]:
                return name
        return "PIX"

    def cell(self, one: int, other: int) -> str:
        bond = self.bonds.get((min(one, other), max(one, other)))
        return " X " if one == other else f"NV{bond}" if bond else self.class_of(one, other)

    @property
    def labels(self) -> list[str]:
        return [f"GPU{at}" if at < self.gpus else f"mlx5_{at - self.gpus}" for at in range(len(self.paths))]

    def rows(self) -> list[list[str]]:
        size = range(len(self.paths))
        return [
            [
                label,
                *(self.cell(at, to) for to in size),
                *((f"{path[0]}", f"{path[0]}") if at < self.gpus else ("", "")),
            ]
            for at, (label, path) in enumerate(zip(self.labels, self.paths, strict=True))
        ]

    def text(self) -> str:
        header = ["", *self.labels, "CPU Affinity", "NUMA Affinity"]
        return "".join("\t".join(row) + "\n" for row in [header, *self.rows()])


@st.composite
def machines(draw: st.DrawFn, with_nvlink: bool = True) -> Machine:
    count = draw(st.integers(1, 7))
    small = st.integers(0, 1)
    paths = draw(st.lists(st.tuples(small, small, small, small), min_size=count, max_size=count + 3))
    pairs = [(one, other) for one in range(count) for other in range(one + 1, count)] if with_nvlink else []
    bonds = {pair: draw(st.integers(1, 3)) for pair in pairs if draw(st.booleans())}
    return Machine(tuple(paths), count, bonds)


def styled(draw: st.DrawFn, machine: Machine) -> str:
    """The machine in one of the ways that people paste it."""
    if draw(st.booleans()):  # a table, its columns in any order
        order = draw(st.permutations(range(len(machine.paths) + 3)))
        nics = iter(sorted(at for at in order if machine.gpus < at <= len(machine.paths)))  # these keep their order
        order = [next(nics) if machine.gpus < at <= len(machine.paths) else at for at in order]
        header = ["", *machine.labels, "CPU Affinity", "NUMA Affinity"]
        rows = [header, ["---"] * len(header), *machine.rows()]
        return "".join("| " + " | ".join(row[at] for at in order) + " |\n" for row in rows)
    apart = draw(st.sampled_from(["\t", "   ", " \t"]))
    header = [*machine.labels, "CPU Affinity", "NUMA Affinity"]
    lines = [draw(st.sampled_from(["", apart])) + apart.join(header), *(apart.join(row) for row in machine.rows())]
    if draw(st.booleans()):
        lines[0] = "\x1b[4m" + lines[0] + "\x1b[0m"
    if draw(st.booleans()) and len(machine.labels) == machine.gpus > 1:
        del lines[0]
    prefix = draw(st.sampled_from(["", "  ", "# ", "> ", "[1,0]<stdout>:", "node7: "]))
    end = draw(st.sampled_from(["\n", "\r\n", "\n\n", " \n"]))
    around = draw(st.sampled_from(["", "GPU topology:\n", "$ nvidia-smi topo -m\n", "X = Self\n"]))
    return around + "".join(prefix + line + end for line in lines) + around


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_style_gives_the_same_machine(data: st.DataObject) -> None:
    machine = data.draw(machines())
    text = data.draw(st.composite(styled)(machine))
    assert same_machine(read(text, "styled"), read(machine.text(), "plain"))


LEVELS = {(NodeKind.CPU, ""): 0, (NodeKind.PCIE, "host bridge"): 1, (NodeKind.PCIE, "PCIe switch"): 2}


def met(graph: LinkGraph, one: str, other: str) -> set[str]:
    """Which classes two devices may have in a graph's tree."""

    def up(name: str) -> list[str]:
        path = [name]
        while graph.by_name[path[-1]].kind is not NodeKind.CPU:
            near = {node: (graph.by_name[node].kind, graph.by_name[node].detail) for node in joined(graph, path[-1])}
            above = [node for node, what in near.items() if what in LEVELS and node not in path]
            path.append(min(above, key=lambda node: LEVELS[near[node]]))
        return path

    below_one, below_other = up(one), up(other)
    shared = next((node for node in below_one if node in below_other), None)
    if shared is None:
        return {"SYS"}
    if graph.by_name[shared].kind is NodeKind.CPU:
        return {"PHB", "NODE"}
    if graph.by_name[shared].detail == "host bridge":
        return {"PHB"}
    return {"PIX"} if below_one.index(shared) == below_other.index(shared) == 1 else {"PXB"}


@settings(max_examples=200, deadline=None)
@given(machines(with_nvlink=False))
def test_the_tree_has_the_classes_of_the_matrix(machine: Machine) -> None:
    graph = read(machine.text(), "tree")
    labels = machine.labels
    for one in range(len(labels)):
        for other in range(one):
            assert machine.class_of(one, other) in met(graph, labels[one], labels[other])


def damaged(draw: st.DrawFn, text: str) -> str:
    """The text with characters, values, cells or lines replaced, left out or in another order."""
    for _ in range(draw(st.integers(1, 3))):
        parts = re.split(draw(st.sampled_from(["(\n)", '("[^"]*")', "(\\s+)", "()"])), text)
        one, other = (draw(st.integers(0, len(parts) - 1)) for _ in range(2))
        new = draw(st.sampled_from([parts[other], "", '""', '"0"', '"-1"', "X", "NV4", "SYS"]) | st.text(max_size=8))
        parts[one] = new
        text = "".join(parts)
    return text


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damage_is_an_error_or_a_graph(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*MACHINES, *CUT_OFF]))
    text = data.draw(st.composite(damaged)((FIXTURES / name).read_text()))
    try:
        graph = read(text, name)
    except TopologyError as error:
        assert str(error).startswith(name)
    else:
        assert json.loads(graph.to_json())["nodes"]
