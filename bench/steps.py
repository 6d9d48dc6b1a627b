"""Steps of real programs with ringreduce next to Gloo, as docs/does_it_pay.md has them.

    python bench/steps.py                                     2 and 4 ranks; about half an hour on a quiet machine
    python bench/steps.py --ranks 2 --seconds 60 --json steps.json

The steps and the way of measuring are those of `ringreduce bench`, which has two of these steps. A third team runs
ringreduce with RINGREDUCE_FETCH=0, as for ordinary users, who may not read other processes' memory. Each step runs for
about --seconds. Columns: images or tokens a second, speed-up over Gloo, and the share of a step with Gloo that is
communication.
"""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import harness

from ringreduce.cli.bench.compare import GLOO, OURS, Case, Comparison

FETCHLESS = f"{OURS}-fetch0"
NAMES = {GLOO: "Gloo", OURS: "ringreduce", FETCHLESS: "ordinary users"}

TRANSFORMER = Case("transformer", "DDP", batch=1, length=128, width=768, layers=12)
CASES = (
    Case("convolutional", "DDP", batch=8, length=64),
    Case("convolutional", "DDP", batch=32, length=64),
    TRANSFORMER,
    replace(TRANSFORMER, batch=4),
    replace(TRANSFORMER, by="FSDP2"),
    Case("decoder", "tensor parallel", batch=1, length=16, width=1024, layers=4),
)


def steps(ranks: tuple[int, ...] = (2, 4), seconds: float = 120.0) -> Iterator[dict[str, Any]]:
    if min(ranks) < 2:
        raise harness.CannotRun("--ranks must be at least 2")
    for count in ranks:
        for case in CASES:  # each with teams of its own: four copies of a net take as much memory as there may be
            with (
                tempfile.TemporaryDirectory() as folder,
                Comparison(count, Path(folder), lambda what: print(what, file=sys.stderr)) as teams,
            ):
                teams.start(GLOO, OURS)
                teams.start(FETCHLESS, environment={"RINGREDUCE_FETCH": "0"})
                found = teams.steps(case, seconds)
            for step in found:
                row = {"step": step.name, "ranks": count, "of": case.unit}
                row |= {name: step.rate(team) for team, name in NAMES.items()}
                row |= {f"speed-up, {NAMES[team]}": step.speedup(team) for team in (OURS, FETCHLESS)}
                yield {**row, "communication": step.communication(GLOO), "all": asdict(step)}
            if teams.notes:
                yield {"header": {case.by: teams.notes}}
            yield from ({"note": failure} for failure in teams.failures)


if __name__ == "__main__":
    sys.exit(harness.main(steps))
