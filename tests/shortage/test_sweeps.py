"""Each place that asks for a resource is refused it once, and a few sweeps go to their end; `make faults` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.harness import run

from shortage import commands, elastic, loader
from shortage.groups import GroupSweep, by_places
from shortage.parameter_server import SERVER, ServerSweep
from shortage.sweeps import TIMEOUT, Sweep, sweep_here, swept

AT_EACH_PLACE: list[tuple[list[Sweep], int]] = [
    *((some, 190) for some in by_places()),
    (loader.by_places(), 20),
    (commands.in_ci(), 18),
]
SLOW = [
    *((elastic.by_places(victim), 120) for victim in (0, elastic.FOUNDERS)),
    ([GroupSweep("subgroup", "allocation", transport="tcp", ranks=3)], 120),
    ([ServerSweep("push without the backup", "allocation", "call", "tcp", SERVER, anew=True)], 1),
]
EACH_REQUEST: list[tuple[list[Sweep], int]] = [
    ([commands.CommandSweep("serve", kind, ranks=2) for kind in ("descriptor", "thread", "disk")], 10),
    ([GroupSweep("all_reduce 64 B", "allocation"), GroupSweep("messages 16 MB", "allocation")], 19),
    (
        [GroupSweep("barrier", "descriptor", "make", "tcp"), GroupSweep("barrier", "thread", "make", "tcp", victim=0)],
        12,
    ),
]
OF_A_SERVER: list[tuple[list[Sweep], int]] = [
    ([ServerSweep("pull 4 KB", "descriptor", "found", victim=SERVER)], 10),
    ([ServerSweep("pull 4 KB", "allocation", "join")], 12),
    ([ServerSweep("pull 4 KB", "descriptor", "join", victim=SERVER)], 2),
    ([ServerSweep("pull 4 KB", "socket_call", "join", "tcp")], 4),
    ([ServerSweep("pull 4 KB", "socket_call", "join", victim=SERVER)], 1),
    ([ServerSweep("push 4 KB", "allocation")], 10),
    ([ServerSweep("push 4 KB", "allocation", "call", "tcp")], 14),
    ([ServerSweep("push 4 KB", "allocation", victim=SERVER)], 1),
    ([ServerSweep("push 4 KB", "allocation", "call", "tcp", SERVER)], 1),
    ([ServerSweep("push without the backup", "allocation", victim=SERVER, anew=True)], 1),
    ([ServerSweep("push 4 KB beside a snapshot", "allocation", victim=SERVER)], 4),
    ([ServerSweep(name, "disk", victim=SERVER) for name in ("snapshot", "periodic snapshot")], 10),
    ([ServerSweep("restore", "socket_call", victim=SERVER)], 1),
    ([ServerSweep("pull 4 KB", "thread", "found", "tcp", SERVER)], 4),
    # None, unless it makes a backup meanwhile, and unless the caller hears of the backup in its call.
    ([ServerSweep("push while its server ends", "thread", "call", "tcp", 2)], 0),
    ([ServerSweep("push while its server ends", "descriptor")], 0),
    ([ServerSweep("push while its server moves", "allocation", "call", "tcp", SERVER, anew=True)], 10),
]


@pytest.mark.parametrize(
    ("sweeps", "least"),
    [
        *(pytest.param(*each, id=str(each[0][0])) for each in AT_EACH_PLACE + EACH_REQUEST + OF_A_SERVER),
        *(pytest.param(*each, id=str(each[0][0]), marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_what_runs_out_is_an_error_on_all_ranks(library: Path, sweeps: list[Sweep], least: int) -> None:
    found = swept(library, sweeps, most=500, noticed=TIMEOUT)
    wrong = {line["sweep"]: line["wrong"] for line in found if line["wrong"]}
    assert wrong == {}, "\n".join((str(wrong), *(story for line in found for story in line["stories"])))
    assert sum(line["failures"] for line in found) >= least


@pytest.mark.slow
def test_a_founder_whose_links_end_when_others_know_it_as_a_member_gets_in_again(library: Path) -> None:
    """Requests from the meeting of the first group to the first calls in it."""
    sweep = elastic.WorldSweep("two hosts", "socket_call", "member", victim=1)
    runs = run(sweep_here, sweep.ranks, library, sweep, 14, 8)[0]
    assert len(runs) == 7
    assert [wrong for each in runs for wrong in sweep.judge(each, noticed=TIMEOUT)] == []


@pytest.mark.parametrize(
    ("transport", "text"),
    [
        ("shared_memory", "bytes of shared memory (channel_bytes"),
        ("tcp", "bytes of address space for a rank on another"),
    ],
)
def test_memory_that_cannot_be_mapped_is_told_with_what_to_do(library: Path, transport: str, text: str) -> None:
    runs = run(sweep_here, 2, library, GroupSweep("barrier", "mapping", "make", transport), 20)[0]
    told = [each[1].error for each in runs if text in each[1].error]
    assert told and [each for each in told if "Cannot allocate memory; free memory, or raise" not in each] == []
