"""A few of the sweeps, each to its end; `make faults` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed.harness import run

from shortage.sweeps import TIMEOUT, Sweep, build, judge, sweep_here


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("requests"))


@pytest.mark.parametrize(
    ("sweep", "first", "last", "least"),
    [
        (Sweep("all_reduce 64 B", "allocation"), 1, 100, 9),
        (Sweep("messages 16 MB", "allocation"), 1, 100, 10),
        (Sweep("barrier", "descriptor", "make"), 1, 100, 3),
        (Sweep("barrier", "socket_call", "make"), 1, 100, 2),
        (Sweep("barrier", "allocation", "make"), 30, 45, 16),  # while it takes descriptors and maps the segment
        (Sweep("receive in vain", "allocation", "destroy"), 1, 100, 0),  # it rarely asks at all
        (Sweep("barrier", "descriptor", "make", victim=0), 1, 100, 4),
        (Sweep("subgroup", "descriptor"), 1, 100, 2),
        (Sweep("operator", "allocation"), 1, 100, 9),
        (Sweep("barrier", "thread", "make", "tcp"), 1, 100, 2),
        (Sweep("barrier", "descriptor", "make", "tcp"), 1, 100, 10),
        (Sweep("barrier", "allocation", "make", "tcp"), 48, 58, 11),  # while it makes the links
        (Sweep("dist.all_reduce 64 B", "allocation", "call", "tcp"), 1, 100, 10),
        (Sweep("receive in vain", "allocation", "destroy", "tcp"), 1, 100, 5),
    ],
    ids=str,
)
def test_what_runs_out_is_an_error_on_all_ranks(library: Path, sweep: Sweep, first: int, last: int, least: int) -> None:
    runs = run(sweep_here, 2, library, sweep, last, first)[0]
    failures = [each for each in runs if each[sweep.victim].place]
    assert len(failures) >= least
    assert [wrong for each in runs for wrong in judge(sweep, each, noticed=TIMEOUT)] == []
