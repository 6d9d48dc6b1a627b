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
    ("scenario", "kind", "phase", "least"),
    [
        ("all_reduce 64 B", "allocation", "call", 9),
        ("messages 16 MB", "allocation", "call", 10),
        ("barrier", "descriptor", "make", 3),
    ],
)
def test_what_runs_out_is_an_error_on_all_ranks(
    library: Path, scenario: str, kind: str, phase: str, least: int
) -> None:
    sweep = Sweep(scenario, kind, phase)
    runs = run(sweep_here, 2, library, sweep, 100)[0]
    failures = [each for each in runs if each[sweep.victim].place]
    assert len(failures) >= least
    assert [wrong for each in runs for wrong in judge(sweep, each, noticed=TIMEOUT)] == []
