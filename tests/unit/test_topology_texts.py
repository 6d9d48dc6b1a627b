"""What texts tell besides their tables, and what must be said of texts that lack something or are broken."""

import random
from pathlib import Path

import pytest

from ringreduce.errors import TopologyError
from ringreduce.plan import Plan, PlanError
from ringreduce.topology.graph import FABRIC, LinkGraph
from ringreduce.topology.rates import Assumed
from ringreduce.topology.read import read

FIXTURES = Path(__file__).parents[1] / "fixtures" / "topologies"
B300 = (FIXTURES / "b300_x7_odd_even_cores.txt").read_text()
PCIE = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-15\t0\nGPU1\tPHB\t X \t0-15\t0\n"
BUSES = "0000:0c:00.0", "0000:22:00.0"


def of_links(graph: LinkGraph) -> set[float]:
    """GB/s of one link of the accelerators' own."""
    return {link.capacity / link.lanes for link in graph.links if link.kind in FABRIC}


@pytest.mark.parametrize(
    "before",
    [
        "".join(f"GPU {gpu}: NVIDIA B300 SXM6 AC (UUID: GPU-0)\n         Link 0: 53.125 GB/s\n" for gpu in range(7)),
        "".join(f"|   {gpu}  NVIDIA B300 SXM6 AC            On  |   00000000:1B:00.0 Off |\n" for gpu in range(7)),
        "Our B300 host shows this:\n",
        "root@b300-07:~# nvidia-smi topo -m\n",
    ],
)
def test_blackwell_is_told_by_the_text(before: str) -> None:
    assert of_links(read(before + B300, "text")) == {50.0}


@pytest.mark.parametrize("before", ["", "B300 or H100?\n", "An L40S beside it.\n", "nvidia-smi topo -m\n"])
def test_a_text_that_names_no_model_or_two_tells_nothing(before: str) -> None:
    graph = read(before + B300, "text")
    assert of_links(graph) == {25.0}
    assert any("25 GB/s per link assumed" in line for line in graph.assumed)


def test_the_user_knows_better_than_the_text() -> None:
    assert of_links(read("B300\n" + B300, "text", Assumed(gpu="h100"))) == {25.0}


def access(word: str, command: str = "") -> str:
    return f"{command}\n \tGPU0\tGPU1\t\n GPU0\tX\t{word}\t\n GPU1\t{word}\tX\t\n"


@pytest.mark.parametrize("word", ["GNS", "CNS", "TNS"])
@pytest.mark.parametrize("command", ["", "$ nvidia-smi topo -p2p r", "$ nvidia-smi topo -p2p w"])
@pytest.mark.parametrize("first", [True, False])
def test_no_peer_access_is_told_by_the_text(word: str, command: str, first: bool) -> None:
    table = access(word, command)
    graph = read(table + PCIE if first else PCIE + table, "text")
    assert [gpu.peer_access for gpu in graph.gpus] == [False, False]
    assert any("topo -p2p" in line and "GPU0, GPU1" in line for line in graph.assumed)
    assert all(gpu.peer_access for gpu in read(PCIE + table, "text", Assumed(peer_access=True)).gpus)


@pytest.mark.parametrize("table", [access("GNS", "nvidia-smi topo -p2p n"), access("OK"), access("U"), access("NS")])
def test_other_tables_of_access_take_none_away(table: str) -> None:
    assert all(gpu.peer_access for gpu in read(PCIE + table, "text").gpus)


def test_access_that_a_patched_driver_gives_is_told_by_the_text() -> None:
    names = "GPU 0: NVIDIA GeForce RTX 4090\nGPU 1: NVIDIA GeForce RTX 4090\n"
    assert not any(gpu.peer_access for gpu in read(names + PCIE, "text").gpus)
    assert all(gpu.peer_access for gpu in read(names + PCIE + access("OK", "topo -p2p r"), "text").gpus)


def amd_smi(title: str, cell: str) -> str:
    one, other = BUSES
    return f"{title} TABLE:\n{' ' * 13}{one} {other}\n{one} SELF         {cell}\n{other} {cell}         SELF\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (amd_smi("WEIGHT", "15"), ["WEIGHT TABLE", "amd-smi topology"]),
        (amd_smi("CACHE COHERANCY", "C") + amd_smi("DMA", "T"), ["CACHE COHERANCY TABLE, DMA TABLE", "-wt"]),
        ("=== Weight between two GPUs ===\nGPU0 0 15\nGPU1 15 0\n", ["Weight between two GPUs", "rocm-smi --showtopo"]),
        ("GPU 0: NVIDIA B300\n  Link 0: 53.125 GB/s\n", ["nvidia-smi nvlink --status", "nvidia-smi topo -m"]),
        ("\t NPU0  NPU1\nNPU0  X  HCCS\nNPU1  HCCS  X\n", ["Ascend NPUs"]),
    ],
)
def test_what_is_missing_is_named(text: str, says: list[str]) -> None:
    with pytest.raises(TopologyError, match=r"line [12]") as error:
        read(text, "text")
    for each in says:
        assert each in str(error.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000])
def test_json_without_end_is_no_plan_and_no_machine(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)
    with pytest.raises(TopologyError):
        LinkGraph.from_json(text)
    with pytest.raises(TopologyError):
        read(text, "text")


def mutated(text: str, chance: random.Random) -> str:
    """A text with lines cut, doubled, moved, joined side by side or gone, or cut off within one."""
    lines = text.splitlines(keepends=True)
    for _ in range(chance.randint(1, 4)):
        at, to = chance.randrange(len(lines)), chance.randrange(len(lines))
        match chance.randrange(7):
            case 0:
                lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
            case 1:
                lines.insert(to, lines[at])
            case 2:
                lines[at], lines[to] = lines[to], lines[at]
            case 3:
                lines[at : at + 3] = []
            case 4:
                chance.shuffle(lines)
            case 5:
                lines[at] = lines[at].rstrip("\n") + "   " + lines[to]
            case 6:
                lines = lines[: at + 1]
        lines = lines or ["\n"]
    return "".join(lines)


def check_mutations(count: int, seed: int) -> int:
    """Reads so many mutated files; returns how many were machines all the same."""
    texts = [path.read_text() for path in sorted(FIXTURES.iterdir()) if path.suffix in (".txt", ".xml")]
    found = 0
    for at in range(count):
        chance = random.Random(f"{seed}/{at}")
        text = mutated(chance.choice(texts), chance)
        try:
            found += bool(read(text, "mutated").gpus)
        except TopologyError as error:
            assert "mutated: line" in str(error) or "mutated" in str(error)
        except Exception as error:
            raise AssertionError(f"seed {seed}/{at}: {text!r:.2000}") from error
    return found


def test_a_mutated_listing_is_a_machine_or_a_topology_error() -> None:
    assert 0 < check_mutations(300, seed=1) < 300
