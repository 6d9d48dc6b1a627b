"""What is expected, against published measurements: the table is refitted from the rows marked `used`, and compared
with all of them.  And `ringreduce calibrate`, on logs as nccl-tests print them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest
from bodies.published_topologies import ROWS, Row, in_switches, machine

from ringreduce.cli import main
from ringreduce.cli.calibrate import read_log
from ringreduce.errors import TopologyError
from ringreduce.topology.clusters import hosts_of
from ringreduce.topology.expected import (
    FABRICS,
    KNOWN,
    PUBLISHED,
    Expected,
    Fabric,
    Measured,
    checked,
    expected,
    fabric_of,
    fit,
    line_of,
)
from ringreduce.topology.expected import load as load_table
from ringreduce.topology.planner import algorithms, plan_for
from ringreduce.topology.presets import PRESETS, preset
from ringreduce.topology.rates import Assumed
from ringreduce.topology.read import read

MIB = 2**20


def measured(at: int, row: Row) -> tuple[str, Measured]:
    """The fabric of a row, and its figure; those without a size are of large tensors."""
    graph, collective, ranks = machine(at), row["collective"], int(row["gpus"])
    size = int(row["bytes"] or 2**34)
    moved = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "reduce": 1.0}.get(collective, 1 - 1 / ranks)
    switched = in_switches(row) and "nvls" in algorithms(graph, collective)
    planned = plan_for(graph, collective, 2**30, "nvls" if switched else "auto")
    name = fabric_of(planned)
    assert name is not None
    return name, Measured(size, line_of(planned), size * moved / float(row["busbw_GBps"]) * 1e-9)


@pytest.fixture(scope="module")
def figures() -> dict[str, list[tuple[Row, Measured]]]:
    found = defaultdict(list)
    for at, row in enumerate(ROWS):
        name, point = measured(at, row)
        found[name].append((row, point))
    return dict(found)


@pytest.mark.slow
def test_the_table_is_what_half_of_the_figures_give(figures: dict[str, list[tuple[Row, Measured]]]) -> None:
    for name, rows in figures.items():
        used = [point for row, point in rows if row["used"]]
        assert len(used) <= len(rows) / 2, name
        if not used:
            assert name not in FABRICS
            continue  # `expected` has another for it
        again = checked(fit(used, PUBLISHED), [point for row, point in rows if not row["used"]])
        for figure in ("efficiency", "base", "fill", "half", "figures", "checked", "within"):
            assert getattr(FABRICS[name], figure) == pytest.approx(getattr(again, figure), rel=0.02, abs=2e-3), name
    assert set(FABRICS) <= set(figures)


def test_expected_times_are_near_the_published_ones(figures: dict[str, list[tuple[Row, Measured]]]) -> None:
    """All rows, and apart from them those that nothing was fitted to: these show what a user may expect."""
    ratios: dict[tuple[bool, bool], list[float]] = defaultdict(list)  # by (of 1 MiB and more, fitted)
    for name, rows in figures.items():
        fabric = FABRICS.get(name) or FABRICS[name.removeprefix("hosts of ")]
        for row, point in rows:
            ratio = fabric.seconds(point.size_bytes, point.line) / point.seconds
            ratios[point.size_bytes >= MIB, bool(row["used"])].append(ratio)
    assert sum(map(len, ratios.values())) == len(ROWS)

    def near(ratios: list[float], factor: float) -> float:
        return sum(1 / factor <= ratio <= factor for ratio in ratios) / len(ratios)

    assert near(ratios[True, True] + ratios[True, False], 1.2) >= 0.85
    assert near(ratios[True, False], 1.2) >= 0.85
    assert near(ratios[False, True] + ratios[False, False], 1.6) >= 0.85
    assert near(ratios[False, False], 1.6) >= 0.75


def test_nothing_is_expected_to_be_faster_than_its_bound() -> None:
    for name in ("dgx1-v100", "dgx2", "dgx-a100", "hgx-h100", "hgx-b200", "pcie-8"):
        planned = plan_for(preset(name))
        found = expected(planned, 2**30)
        assert found is not None and found.seconds > 2**30 * 1e-9 / planned.bound


def test_what_has_no_table_is_not_expected() -> None:
    assert expected(plan_for(preset("dgx-a100").select([3])), MIB) is None
    assert expected(plan_for(preset("dgx-a100")), MIB, {}) is None
    assert fabric_of(plan_for(hosts_of(preset("pcie-4"), 2, gbps=12.5))) == "hosts over PCIe"
    assert expected(plan_for(hosts_of(preset("dgx-a100"), 2)), MIB) is not None
    assert expected(plan_for(hosts_of(preset("dgx-a100"), 2, in_network=True)), MIB) is None
    assert {fabric_of(plan_for(preset(name))) for name in PRESETS} <= KNOWN


LOG = """# nThread 1 nGpus 8 minBytes 8 maxBytes 8589934592 step: 8(factor) warmup iters: 5 iters: 20 validation: 1
# Collective test starting: all_reduce_perf
# Using devices
#  Rank  0 Group  0 Pid  4711 on       node device  0 [0x07] NVIDIA A100-SXM4-80GB
{ranks}#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
{rows}# Out of bounds values : 0 OK
"""


def written(path: Path, truth: Fabric, line: float, sizes: list[int]) -> Path:
    rows = ""
    for size in sizes:
        took = truth.seconds(size, line) * 1e6
        rows += (
            f"{size:12d} {size // 4:12d}   float     sum      -1 {took:9.2f}  1.0  1.0    N/A {took:9.2f}  1  1    0\n"
        )
    ranks = "".join(f"#  Rank  {rank} Group  0 Pid  4711 on       node device  {rank} [0x0f] NVIDIA A100\n"
                    for rank in range(1, 8))  # fmt: skip
    path.write_text(LOG.format(ranks=ranks, rows=rows))
    return path


def test_it_is_said_how_much_is_known() -> None:
    assert re.search(
        r"NVLink 3: four in five of 11 figures .* not fitted to are within \d+%", str(found_for("dgx-a100"))
    )
    assert str(found_for("hgx-b200")) == "NVLink 5: fitted to 1, too few figures to say how near"
    hosts = expected(plan_for(hosts_of(preset("dgx-a100"), 2)), MIB)
    assert str(hosts) == "hosts of NVLink 3, as NVLink 3 in one host: no figures"


def found_for(name: str) -> Expected | None:
    return expected(plan_for(preset(name)), MIB)


def test_generations_are_read_and_not_guessed() -> None:
    """A P100 has four NVLinks, as an A30 has, and a GPU in a subset of a DGX-1 any number."""
    assert fabric_of(plan_for(preset("dgx1-p100"))) == "NVLink 1, direct"
    assert fabric_of(plan_for(preset("dgx1-v100", Assumed(nvlink=18)).select([0, 3]))) == "NVLink 2, direct"
    unknown = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\tX\tNV12\t0-7\t0\nGPU1\tNV12\tX\t0-7\t0\n"
    assert fabric_of(plan_for(read(unknown, "two"))) is None
    assert fabric_of(plan_for(read(unknown, "two", Assumed(gpu="a100")))) == "NVLink 3"


@pytest.mark.parametrize("name", ["dgx-a100", "hgx-h100"])
def test_the_line_is_that_of_large_tensors(name: str) -> None:
    large = plan_for(preset(name), size_bytes=2**33)
    assert line_of(plan_for(preset(name), size_bytes=8)) == line_of(large) == large.of_links


def test_calibration_finds_what_a_log_was_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = Fabric(0.7, 60e-6, 200e-6, 8e6)
    line = plan_for(preset("dgx-a100")).bandwidth
    sizes = [4**power for power in range(2, 17)]
    log = written(tmp_path / "log", truth, line, sizes)
    made = tmp_path / "a100.json"
    assert main(["calibrate", str(log), "dgx-a100", "--save", str(made)]) == 0
    assert "NVLink 3: 69.7% of 171.4 GB/s" in capsys.readouterr().out
    found = load_table(made)["NVLink 3"]
    assert (found.efficiency, found.base) == pytest.approx((0.7, 60e-6), rel=0.02)
    assert found.figures == len(sizes) and found.within < 0.03
    assert main(["plan", "dgx-a100", "--size", "1GB", "--json", "--calibration", str(made)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["expected_s"] == pytest.approx(truth.seconds(1e9, line), rel=0.03)
    assert document["bound_GBps"] == pytest.approx(line)
    assert main(["simulate", "dgx-a100", "--algorithm", "rings", "--calibration", str(made)]) == 0
    assert "expected" in capsys.readouterr().out
    assert main(["calibrate", str(log), "dgx-a100"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["NVLink 3"]


def test_logs_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path / "log", FABRICS["NVLink 3"], 171.4, [MIB])
    assert main(["calibrate", str(log), "dgx2"]) == 2
    assert "of 8 ranks, and dgx2 has 16; choose as many with --gpus" in capsys.readouterr().err
    text = log.read_text()
    with pytest.raises(TopologyError, match="how many ranks"):
        read_log("nothing", "log", None)
    with pytest.raises(TopologyError, match="no row of sizes"):
        read_log(text[: text.index("# Out")].rpartition("\n  ")[0], "log", None)
    with pytest.raises(TopologyError, match="give --collective"):
        read_log(text.replace("all_reduce_perf", "what"), "log", None)
    assert read_log(text.replace("all_reduce_perf", "alltoall_perf"), "log", None).collective == "all_to_all"


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is no calibration"),
        ("[]", "expected an object"),
        ("{}", "expected an object"),
        ('{"NVLink 9": {}}', "'NVLink 9' is no fabric that a plan can have; those are .*NVLink 3, NVLS"),
        ('{"NVLink 3": {"base": 1}}', "'NVLink 3'.efficiency is missing"),
        ('{"NVLink 3": {"efficiency": 0, "base": 1, "fill": 0, "half": 1}}', "efficiency is 0; it must be above 0"),
        ('{"NVLink 3": {"efficiency": 1, "base": -1, "fill": 0, "half": 1}}', "base is -1; it must be a number"),
    ],
)
def test_wrong_calibrations_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad").write_text(text)
    with pytest.raises(TopologyError, match=message):
        load_table(tmp_path / "bad")
