"""A few of the sweeps over the parameter server, each to its end; `make faults` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.harness import run

from shortage.parameter_server import SERVER, Sweep
from shortage.sweeps import TIMEOUT, sweep_here


@pytest.mark.parametrize(
    ("sweep", "least"),
    [
        (Sweep("pull 4 KB", "descriptor", "found", victim=SERVER), 10),
        (Sweep("pull 4 KB", "allocation", "join"), 12),
        (Sweep("pull 4 KB", "descriptor", "join", victim=SERVER), 2),
        (Sweep("pull 4 KB", "socket_call", "join", "tcp"), 4),
        (Sweep("push 4 KB", "allocation"), 10),
        (Sweep("push 4 KB", "allocation", "call", "tcp"), 14),
        (Sweep("push 4 KB", "allocation", victim=SERVER), 1),
        (Sweep("push 4 KB beside a snapshot", "allocation", victim=SERVER), 4),
        (Sweep("restore", "socket_call", victim=SERVER), 1),
        (Sweep("pull 4 KB", "thread", "found", "tcp", SERVER), 4),
        (Sweep("push while its server ends", "descriptor"), 0),  # whether the caller hears of the backup in its call
    ],
    ids=str,
)
def test_what_runs_out_is_an_error_and_nothing_is_lost(library: Path, sweep: Sweep, least: int) -> None:
    runs = run(sweep_here, sweep.ranks, library, sweep, 100)[0]
    assert len([each for each in runs if each[sweep.victim].place]) >= least
    assert [wrong for each in runs for wrong in sweep.judge(each, noticed=TIMEOUT)] == []
