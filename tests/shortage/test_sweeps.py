"""Each place that asks for a resource is refused it once, and a few sweeps go to their end; `make faults` runs all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shortage import elastic, loader
from shortage.sweeps import TIMEOUT, Sweep, by_places, swept

AT_EACH_PLACE = [*((some, 190) for some in by_places()), (loader.by_places(), 20)]
SLOW = [(elastic.by_places(victim), 120) for victim in (0, elastic.FOUNDERS)]
EACH_REQUEST = [
    ([Sweep("all_reduce 64 B", "allocation"), Sweep("messages 16 MB", "allocation")], 19),
    ([Sweep("barrier", "descriptor", "make", "tcp"), Sweep("barrier", "thread", "make", "tcp", victim=0)], 12),
]


@pytest.mark.parametrize(
    ("sweeps", "least"),
    [
        *(pytest.param(*each, id=str(each[0][0])) for each in AT_EACH_PLACE + EACH_REQUEST),
        *(pytest.param(*each, id=str(each[0][0]), marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_what_runs_out_is_an_error_on_all_ranks(library: Path, sweeps: list[Any], least: int) -> None:
    found = swept(library, sweeps, most=500, noticed=TIMEOUT)
    assert {line["sweep"]: line["wrong"] for line in found if line["wrong"]} == {}
    assert sum(line["failures"] for line in found) >= least
