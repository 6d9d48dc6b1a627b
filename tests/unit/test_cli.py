"""The command `ringreduce` as a new user meets it: what it prints, what it says if something is wrong, its pictures."""

import json
import os
import pty
import random
import struct
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ringreduce import cli
from ringreduce.cli import arguments
from ringreduce.plan import Plan, verify
from ringreduce.topology import draw, live
from ringreduce.topology.graph import LinkGraph, LinkKind, Node, NodeKind, both_directions
from ringreduce.topology.planner import plan_for
from ringreduce.topology.presets import preset
from ringreduce.topology.rates import Assumed

DGX1 = ("dgx1-v100", "--nvlink-gbps", "18")

Captured = pytest.CaptureFixture[str]


def run(*words: str) -> int:
    """The exit code of a command, whether it returns it or exits with it."""
    try:
        return cli.main(words)
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        return ended.code


def fails(capsys: Captured, *words: str) -> str:
    """What a command that must fail says on standard error; it says nothing else."""
    assert run(*words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return said.err


def prints(capsys: Captured, *words: str) -> str:
    assert run(*words) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    path = tmp_path / "noise"
    path.write_bytes(random.Random(5).randbytes(10_000_000))
    return path


# Arguments.

RANKS = ("--ranks", "8", "--link-gbps", "8")
NO_SECONDS = ("0", "-1", "nan", "inf", "1e20")
NO_SIZES = ("", "-3", "abc", "MB", "0", "0.2", "1e6", "160Mbit", "1..2MB", "nan", "٣", "9" * 400)
NO_GPUS = {
    "": "''",
    "0,,1": "''",
    "0,x": "'x'",
    "-1": "'-1'",
    "3-1": "write 1-3",
    "0,1,1": "names GPU 1 twice",
    "0-3,2": "names GPU 2 twice",
    "0-999999": "more GPUs than any machine has",
    "0,9": "there is no GPU 9; it has GPUs 0 to 7",
}
WRONG: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    *((("top", "--once", "--interval", no), ("argument --interval", repr(no))) for no in NO_SECONDS),
    *((("plan", *DGX1, "--size", no), ("argument --size", repr(no), "160MB")) for no in NO_SIZES),
    *(
        ((command, *DGX1, "--gpus", text), ("argument --gpus", named))
        for command in ("topo", "plan", "simulate")
        for text, named in NO_GPUS.items()
    ),
    *(
        (("topo", "dgx1-v100", option, value), (f"argument {option}: {value!r} GB/s",))
        for option in ("--nvlink-gbps", "--pcie-gbps", "--smp-gbps")
        for value in ("0", "-4", "fast", "nan", "inf")
    ),
    *(
        (("plan", *DGX1, "--plot", name), ("argument --plot", name))
        for name in ("rings", "rings.jpeg", "no/such/folder/rings.png")
    ),
    *(((command, *DGX1, "--algorithm", "star"), ("'star'", "rings")) for command in ("plan", "simulate")),
    (("plan", *DGX1, "--collective", "allsum"), ("argument --collective: 'allsum'", "all_reduce")),
    (("simulate", "--ranks", "8"), ("--link-gbps",)),
    (("simulate", "--link-gbps", "8"), ("--ranks",)),
    *((("simulate", "--ranks", no, "--link-gbps", "8"), (f"argument --ranks: {no}",)) for no in ("1", "99999")),
    (("simulate", "--ranks", "x", "--link-gbps", "8"), ("argument --ranks: 'x'",)),
    (("simulate", *RANKS, "--latency-us", "-1"), ("argument --latency-us: '-1'",)),
    (("simulate", *RANKS, "--parameter-server", "8"), ("argument --parameter-server: '8'",)),
    (("simulate", *RANKS, "--gpus", "0,1"), ("argument --gpus",)),
    (("simulate", *RANKS, "--algorithm", "rings"), ("argument --algorithm: 'rings'",)),
    (("simulate", *RANKS, "--ranks", "2000", "--collective", "gather"), ("more than 1024 are not simulated",)),
    (("simulate", *DGX1, "--ranks", "8"), ("argument --ranks",)),
    (("simulate", *DGX1, "--gpus", "2"), ("a collective needs 2",)),
]


@pytest.mark.parametrize(("words", "named"), WRONG)
def test_wrong_arguments_are_named(words: tuple[str, ...], named: tuple[str, ...], capsys: Captured) -> None:
    said = fails(capsys, *words)
    assert all(each in said for each in named), said


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("160000000", 160_000_000),
        ("160MB", 160_000_000),
        ("160 mb", 160_000_000),
        ("2.5GB", 2_500_000_000),
        ("7KB", 7000),
        ("64MiB", 64 * 2**20),
        ("64M", 64 * 2**20),
        ("1.5K", 1536),
        ("1TB", 10**12),
        ("512B", 512),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert arguments.size_bytes(text) == count


def test_gpu_lists() -> None:
    assert arguments.gpu_list("0,1,3") == (0, 1, 3)
    assert arguments.gpu_list("6,0-2") == (6, 0, 1, 2)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("allreduce", "all_reduce"),
        ("ncclAllReduce", "all_reduce"),
        ("all-gather", "all_gather"),
        ("all_gather_into_tensor", "all_gather"),
        ("ReduceScatter", "reduce_scatter"),
        ("reduce_scatter_tensor", "reduce_scatter"),
        ("bcast", "broadcast"),
        ("all_to_all_single", "all_to_all"),
        ("reduce", "reduce"),
    ],
)
def test_collectives_in_every_spelling(spelling: str, name: str) -> None:
    assert arguments.collective(spelling) == name


def test_pictures_need_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "; pip install matplotlib" in fails(capsys, "topo", "dgx1-v100", "--plot", "rings.png")


def test_a_plan_that_cannot_be_saved_is_named(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "missing" / "plan.json"
    assert fails(capsys, "plan", *DGX1, "--save", str(path)) == f"error: {path}: No such file or directory\n"


# Files.


def test_without_arguments_usage_with_an_example(capsys: Captured) -> None:
    assert "ringreduce plan dgx1-v100" in fails(capsys)
    for command in ("plan", "simulate"):
        said = fails(capsys, command)
        assert "usage:" in said
        assert f"for example: ringreduce {command} dgx1-v100" in said


@pytest.mark.parametrize("command", ["topo", "plan", "simulate"])
def test_files_that_are_no_topology_are_named(command: str, tmp_path: Path, noise: Path, capsys: Captured) -> None:
    missing = tmp_path / "missing.txt"
    said = fails(capsys, command, str(missing))
    assert str(missing) in said
    assert "neither a file nor a preset" in said
    assert "dgx1-v100" in said
    assert "did you mean dgx1-p100 or dgx1-v100?" in fails(capsys, command, "dgx1")
    assert "did you mean hgx-h100" in fails(capsys, command, "hgx-h10")

    empty = tmp_path / "empty.txt"
    empty.touch()
    assert str(empty) in fails(capsys, command, str(empty))

    assert str(tmp_path) in fails(capsys, command, str(tmp_path))

    said = fails(capsys, command, str(noise))
    assert str(noise) in said
    assert len(said) < 2000
    assert all(letter.isprintable() or letter == "\n" for letter in said)


@pytest.mark.parametrize("command", ["topo", "plan"])
def test_names_in_brackets_are_shown_as_they_are(command: str, tmp_path: Path, capsys: Captured) -> None:
    nodes = (
        Node("GPU0", NodeKind.GPU, 0, detail="H100 [/b]"),
        Node("GPU1", NodeKind.GPU, 1),
        Node("s[/x]", NodeKind.PCIE),
    )
    links = [x for gpu in ("GPU0", "GPU1") for x in both_directions(gpu, "s[/x]", LinkKind.PCIE, 16.0)]
    path = tmp_path / "brackets.json"
    path.write_text(LinkGraph("brackets", nodes, tuple(links)).to_json())
    shown = prints(capsys, command, str(path))
    assert ("H100 [/b]" if command == "topo" else "s[/x]") in shown


def test_gpus_are_named_by_their_index_in_the_file(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "some.json"
    path.write_text(preset("dgx1-v100").select([2, 5, 6]).to_json())
    assert json.loads(prints(capsys, "plan", str(path), "--gpus", "6,2", "--json"))["ranks"] == [6, 2]
    assert "there is no GPU 0; it has GPU 2, 5, 6" in fails(capsys, "plan", str(path), "--gpus", "0")


def test_rates_for_a_file_that_has_its_own_are_refused(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "own.json"
    path.write_text(preset("dgx1-v100").to_json())
    assert "states its own rates" in fails(capsys, "plan", str(path), "--nvlink-gbps", "18")
    assert "has GPUs of its own" in fails(capsys, "plan", "dgx1-v100", "--gpu", "h100")


def test_messages_hold_nothing_that_a_terminal_obeys(capsys: Captured) -> None:
    said = fails(capsys, "plan", "\x1b[31mred\x07\udcff")
    assert "red" in said
    assert all(letter.isprintable() or letter == "\n" for letter in said)


def test_a_topology_comes_from_standard_input_too() -> None:
    command = [sys.executable, "-m", "ringreduce", "topo", "-"]
    ended = subprocess.run(command, input=preset("dgx1-v100").to_json(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "8 GPUs" in ended.stdout

    ended = subprocess.run(command, input=b"\xff\x00" * 1000, capture_output=True, check=False)
    assert ended.returncode == 2
    assert b"error: /dev/stdin: line 1" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_topo_follows_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    path = tmp_path / "machine.json"
    path.write_text(preset("dgx1-p100").to_json())
    monkeypatch.setenv("RINGREDUCE_TOPO_FILE", str(path))
    assert "dgx1-p100" in prints(capsys, "topo")

    path.write_text("nothing")
    said = fails(capsys, "topo")
    assert "RINGREDUCE_TOPO_FILE" in said
    assert str(path) in said


# What is printed.


def test_topo_shows_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert prints(capsys, "topo")
    monkeypatch.setattr(live, "probe", lambda assume, memory: preset("dgx-a100"))
    assert "dgx-a100: 8 GPUs" in prints(capsys, "topo")


def test_topo_shows_links_rates_rings_and_assumptions(capsys: Captured) -> None:
    out = prints(capsys, "topo", *DGX1)
    rows = [line.split() for line in out.splitlines()]
    assert ["GPU", *map(str, range(8))] in rows
    assert ["0", "X", "NV1", "NV1", "NV2", "NV2", "SYS", "SYS", "SYS"] in rows
    assert ["NV2", "36", "8", "2", "x", "NVLink", "between", "the", "two"] in rows
    assert ["NV1", "18", "8", "1", "x", "NVLink", "between", "the", "two"] in rows
    assert any(row[:4] == ["0", "to", "3", "108"] for row in rows)
    assert "ring, 36 GB/s both ways: 0 3 2 1 5 6 7 4 0" in out
    assert "ring, 18 GB/s both ways: 0 1 3 7 5 4 6 2 0" in out
    graph = preset("dgx1-v100", Assumed(nvlink=18))
    for line in graph.assumed:
        assert line in out


def test_topo_of_many_and_of_single_gpus(capsys: Captured) -> None:
    assert "2556" in prints(capsys, "topo", "gb200-nvl72")
    assert "nothing is planned" in prints(capsys, "topo", *DGX1, "--gpus", "3")


def test_topo_json_is_a_topology_file(tmp_path: Path, capsys: Captured) -> None:
    out = prints(capsys, "topo", *DGX1, "--json")
    assert LinkGraph.from_json(out) == preset("dgx1-v100", Assumed(nvlink=18))
    path = tmp_path / "machine.json"
    path.write_text(out)
    again = prints(capsys, "topo", str(path), "--json")
    assert LinkGraph.from_json(again).links == LinkGraph.from_json(out).links


def test_plan_says_how_fast_of_what_and_why(capsys: Captured) -> None:
    out = prints(capsys, "plan", *DGX1, "--collective", "allreduce", "--size", "160MB")
    assert "2.59 ms" in out
    assert "planned 61.71 GB/s of at most 61.71 (100.0%)" in out
    planned = plan_for(preset("dgx1-v100", Assumed(nvlink=18)))
    assert planned.reason in out
    assert planned.proof in out
    assert sum("GPU" in line and "█" in line for line in out.splitlines()) == 32


def test_plan_keeps_the_order_of_the_gpus(capsys: Captured) -> None:
    assert "on GPUs 3, 0, 1" in prints(capsys, "plan", *DGX1, "--gpus", "3,0,1")


def test_plan_json_is_whole_and_its_plan_right(tmp_path: Path, capsys: Captured) -> None:
    saved = tmp_path / "plan.json"
    words = ("plan", *DGX1, "--gpus", "0,1,3", "--size", "16MB", "--json", "--save", str(saved))
    document = json.loads(prints(capsys, *words))
    assert 0 < document["bandwidth_GBps"] <= document["bound_GBps"] * 1.0001
    assert document["time_s"] == pytest.approx(16e6 / document["bandwidth_GBps"] * 1e-9)
    assert document["reason"]
    assert {"src", "dst", "bytes", "capacity_GBps"} <= document["links"][0].keys()
    assert {end for link in document["links"] for end in (link["src"], link["dst"])} == {0, 1, 3}
    plan = Plan.from_json(json.dumps(document["plan"]))
    verify(plan)
    assert (plan.collective, plan.size) == ("all_reduce", 3)
    assert Plan.from_json(saved.read_text()) == plan


@pytest.mark.parametrize("gpu", ["0", "7"])
def test_a_plan_needs_two_gpus_or_says_that_nothing_moves(gpu: str, capsys: Captured) -> None:
    assert "nothing moves" in prints(capsys, "plan", *DGX1, "--gpus", gpu)


def test_json_is_pure_on_a_narrow_terminal() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ringreduce", "topo", "gb200-nvl72", "--json"]
    environ = {**os.environ, "COLUMNS": "20", "TERM": "xterm-256color", "FORCE_COLOR": "1"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environ) as process:
        os.close(theirs)
        read = bytearray()
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so where a pipe would be at its end
                break
            if not part:
                break
            read += part
    os.close(ours)
    assert process.returncode == 0
    assert len(json.loads(read.decode())["nodes"]) > 72


def test_tables_are_not_cut_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out = prints(capsys, "simulate", *DGX1, "--size", "1MB")
    assert "…" not in out
    assert "hierarchical_ring" in out
    assert "NVS6 NVS6 NVS6 NVS6 NVS6" in prints(capsys, "topo", "dgx2")


def test_terminals_without_unicode_are_served() -> None:
    command = [sys.executable, "-m", "ringreduce", "plan", *DGX1, "--gpus", "0,1"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, capture_output=True, env=environ, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii()
    assert b"####" in ended.stdout


@pytest.mark.parametrize("words", [("--json",), ()])
def test_a_reader_that_goes_away_is_no_error(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "ringreduce", "topo", *DGX1, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == cli.NOBODY_READS
    assert said == b""


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupted(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(arguments, "machine", interrupted)
    assert run("topo") == cli.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("command", ["", "topo", "plan", "simulate", "doctor", "info", "keep", "serve", "tune"])
def test_help_fits_a_screen_and_has_an_example(command: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = prints(capsys, *([command] if command else []), "--help")
    lines = out.splitlines()
    assert len(lines) <= 42
    assert max(map(len, lines)) <= 84
    assert f"  ringreduce {command}" in out
    assert "example" in out


def test_doctor_works_without_arguments(capsys: Captured) -> None:
    out = prints(capsys, "doctor")
    for subject in ("torch", "C++ compiler", "shared memory", "NCCL", "network", "locked memory"):
        assert subject in out


# Simulations.


def test_simulate_over_sizes_of_a_machine(capsys: Captured) -> None:
    out = prints(capsys, "simulate", *DGX1, "--size", "160MB", "--algorithm", "rings,halving_doubling")
    rows = [line.split() for line in out.splitlines()]
    assert ["size", "rings", "halving_doubling", "bound", "expected"] in rows
    last = next(row for row in rows if row[:2] == ["160", "MB"])
    assert last[2] == "*"
    assert float(last[3]) == pytest.approx(2.6, abs=0.05)
    assert last[4] == "ms"
    assert last[-4:-2] == ["2.59", "ms"] and 2.6 < float(last[-2]) < 3.5  # bound, expected


def test_simulate_over_ranks_and_a_parameter_server(capsys: Captured) -> None:
    words = ("--ranks", "256", "--link-gbps", "10", "--over", "ranks", "--parameter-server", "256,8")
    words += ("--algorithm", "bidirectional_ring,halving_doubling", "--latency-us", "0")
    out = prints(capsys, "simulate", *words, "--size", "10MB")
    header = next(line for line in out.splitlines() if "halving_doubling" in line)
    assert "server, 1 shard" in header
    assert "server, 8 shards" in header
    counts = [line.split()[0] for line in out.splitlines() if line.split() and line.split()[0].isdecimal()]
    assert counts == ["2", "4", "8", "16", "32", "64", "128", "256"]
    rows = {line.split()[0]: line for line in out.splitlines() if line.split()}
    # By the formulas: 2 x 255/256 x 10 MB at 10 GB/s; 2 x 256 workers, and an eighth of it.
    assert "* 1.99 ms" in rows["256"]
    assert " 512 ms" in rows["256"]
    assert " 64 ms" in rows["256"]


def test_simulate_assumes_a_latency_and_says_so(capsys: Captured) -> None:
    words = ("simulate", "--ranks", "64", "--link-gbps", "10", "--size", "1kB", "--algorithm", "ring,two_shot")
    out = prints(capsys, *words)
    assert "15 us" in out and "set --latency-us" in out
    # A ring's 126 steps wait one after the other, and 2 x 15 us are enough for an exchange between all.
    row = next(line.split() for line in out.splitlines() if line.split()[:2] == ["1", "KB"])
    assert row[2:4] == ["1.89", "ms"] and row[4] == "*"
    assert "set --latency-us" not in prints(capsys, *words, "--latency-us", "15")


def test_simulate_says_what_it_leaves_out(capsys: Captured) -> None:
    words = ("--ranks", "2000", "--link-gbps", "10", "--size", "1MB", "--algorithm", "two_shot,tree")
    assert "tree of 2000 ranks is left out" in prints(capsys, "simulate", *words)


def test_simulate_over_the_gpus_of_a_machine(capsys: Captured) -> None:
    out = prints(capsys, "simulate", *DGX1, "--over", "ranks", "--size", "16MB")
    counts = [line.split()[0] for line in out.splitlines() if line.split() and line.split()[0].isdecimal()]
    assert counts == ["2", "3", "4", "5", "6", "7", "8"]


# Pictures.


def test_commands_write_the_pictures_that_are_asked_for(tmp_path: Path, capsys: Captured) -> None:
    rings, links, sizes, ranks, topo = (
        tmp_path / f"{name}.png" for name in ("rings", "links", "sizes", "ranks", "topo")
    )
    prints(capsys, "plan", *DGX1, "--plot", str(rings), "--plot-links", str(links))
    prints(capsys, "topo", *DGX1, "--plot", str(topo))
    prints(capsys, "simulate", *DGX1, "--size", "1MB", "--plot", str(sizes))
    prints(capsys, "simulate", "--ranks", "8", "--link-gbps", "9", "--over", "ranks", "--plot", str(ranks))
    for path in (rings, links, sizes, ranks, topo):
        assert png_size(path) == (1753, 1240)


@pytest.mark.parametrize(("ending", "magic"), [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_pictures_in_the_format_that_the_name_says(ending: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{ending}"
    draw.machine(preset("dgx1-v100"), (), (), path)
    assert path.read_bytes().startswith(magic)


def hosts(count: int) -> LinkGraph:
    """Hosts of four GPUs on an NVSwitch, with a NIC each."""
    nodes = [Node("network", NodeKind.NETWORK)]
    links = []
    for host in range(count):
        nodes.append(Node(f"host{host}/NVSwitch0", NodeKind.NVSWITCH, host=host))
        for index in range(4):
            gpu, nic = f"host{host}/GPU{index}", f"host{host}/NIC{index}"
            nodes += [Node(gpu, NodeKind.GPU, index, host), Node(nic, NodeKind.NIC, index, host)]
            links += both_directions(gpu, f"host{host}/NVSwitch0", LinkKind.NVLINK, 300, 12)
            links += both_directions(gpu, nic, LinkKind.PCIE, 25)
            links += both_directions(nic, "network", LinkKind.NETWORK, 25)
    return LinkGraph(f"{count} hosts", tuple(nodes), tuple(links))


MACHINES: dict[str, Callable[[], LinkGraph]] = {
    "rings": lambda: preset("dgx1-v100"),
    "trees": lambda: preset("dgx1-v100").select(range(5)),
    "switch": lambda: preset("dgx2"),
    "pcie": lambda: preset("pcie-8"),
    "pair": lambda: preset("dgx1-v100").select((0, 5)),
    "rack": lambda: preset("gb200-nvl72"),
    "hosts": lambda: hosts(3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_no_labels_overlap(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = seen(monkeypatch)
    graph = MACHINES[name]()
    planned = plan_for(graph)
    draw.machine(
        graph, planned.rings, planned.trees, tmp_path / "machine.png", ranks=planned.ranks, note=planned.reason
    )
    draw.loads(planned, 160_000_000, tmp_path / "loads.png")
    assert len(shown) == 2
    for figure in shown:
        assert not overlapping(figure)


def test_no_labels_of_curves_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = seen(monkeypatch)
    curves = {f"hierarchical_halving_doubling_{at}": [(2.0, 1e-3), (64.0, 0.5 + 1e-3 * at)] for at in range(9)}
    draw.time_over_size(curves, tmp_path / "sizes.png", "Time over size")
    draw.time_over_ranks(curves, tmp_path / "ranks.png", "Time over ranks")
    assert len(shown) == 2
    for figure in shown:
        assert not overlapping(figure)


def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved from now on."""
    from matplotlib.figure import Figure

    shown: list[Any] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (shown.append(self), save(self, *a, **k)))
    return shown


def overlapping(figure: Any) -> list[tuple[str, ...]]:
    """Texts that overlap each other or leave the paper."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    undrawn = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    boxes = [
        (text.get_text(), Text.get_window_extent(text, renderer).padded(-1)) for text in texts if text not in undrawn
    ]
    paper = figure.bbox
    outside = [
        (text,) for text, box in boxes if box.x0 < 0 or box.x1 > paper.width or box.y0 < 0 or box.y1 > paper.height
    ]
    return outside + [(a, b) for (a, one), (b, other) in combinations(boxes, 2) if one.overlaps(other)]


def test_wrong_arguments_in_the_parsers_themselves() -> None:
    for parse, text in ((arguments.count, "0"), (arguments.servers, "1,2,3"), (arguments.rate, "")):
        with pytest.raises(ArgumentTypeError):
            parse(text)
