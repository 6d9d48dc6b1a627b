"""`ringreduce tune`: measures what runs best for which size, and keeps it for this machine."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ringreduce import plan, tuning
from ringreduce.cli.arguments import seconds
from ringreduce.cli.info import group_size
from ringreduce.cli.terminal import complain, console, progress, put, say, table
from ringreduce.common import compiled
from ringreduce.common.cores import own_cores
from ringreduce.common.failures import RingReduceError
from ringreduce.common.units import bytes_text, time_text
from ringreduce.config import PREFIX, Options, fetch_from, resolve
from ringreduce.plan import BUILDERS
from ringreduce.plan.by_cost import by_cost
from ringreduce.tuning import Cell

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ringreduce.cli import measure

RANKS_TUNED = (2, 4)
TUNING_SECONDS = 120.0


def add(command: Any) -> None:
    parser = command(
        description="Runs real groups of CPU ranks on this machine, measures which algorithm is best for which size, "
        "and keeps it for later groups.",
        epilog="example:\n  ringreduce tune --ranks 4 --collectives all_reduce --budget 30",
    )
    parser.add_argument("--ranks", type=group_size, nargs="+", default=RANKS_TUNED, help="group sizes (default: 2 4)")
    parser.add_argument("--collectives", choices=BUILDERS, nargs="+", default=tuple(BUILDERS), metavar="NAME",
                        help=f"default: {' '.join(BUILDERS)}")  # fmt: skip
    parser.add_argument(
        "--budget",
        type=seconds,
        default=TUNING_SECONDS,
        help="seconds for measuring (default: 120); starting ranks takes some more",
    )
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")


def run(arguments: argparse.Namespace) -> int:
    options, _ = resolve(None)
    ranks = sorted(set(arguments.ranks))
    try:
        return _tune(console(), options, ranks, arguments.collectives, arguments.budget, arguments.json)
    except KeyboardInterrupt:
        complain("interrupted: group sizes that were not finished are as they were")
        return 130


def _tune(
    console: Console, options: Options, ranks: list[int], collectives: list[str], budget: float, as_json: bool
) -> int:
    compiled.require("no ranks can be run here")
    from ringreduce.cli import measure

    if options.tuning == "off":
        raise RingReduceError(f"{PREFIX}TUNING is 'off': no group would use what is measured; unset it")
    end = time.monotonic() + budget
    path, known = tuning.renew(options.tuning, own_cores())
    if not as_json:
        say(console, f"probed the machine; {path} keeps what is found")
    left_out = total = 0
    documents = []
    for number, size in enumerate(ranks):
        slicing = measure.slicing_of(size)
        least_fetch = fetch_from(options, size, own_cores(), tuning.fetches(options))
        model = plan.table(size, decided=by_cost(size, known.machine, slicing, fetch_from=least_fetch))
        work = list(measure.tasks(size, collectives, model, slicing))
        with progress(console) as bars:
            bar = bars.add_task(f"{size} ranks", total=len(work))

            def show(
                number: int, task: measure.Task, cell: Cell, compared: bool, bars: Any = bars, bar: Any = bar
            ) -> None:
                nonlocal left_out, total
                left_out, total = left_out + (not compared), total + 1
                name = _name(cell.algorithm, cell.slice_bytes)
                text = f"{task.collective} of {bytes_text(task.block_bytes, 1024)}: {name}"
                bars.update(bar, completed=number + 1, description=text)

            began = time.monotonic()
            until = began + max(0.0, end - began) / (len(ranks) - number)
            cells = measure.measure(size, work, until, show)
        if not cells:
            complain(
                f"warning: {budget:g} s were too few for {size} ranks; nothing of them is kept; give a larger --budget"
            )
            continue
        known = tuning.keep(known, size, cells, path)
        took = time.monotonic() - began
        if as_json:
            rows = {name: [asdict(cell) for cell in row] for name, row in cells.items()}
            documents.append({"ranks": size, "seconds": took, "measured": rows})
        else:
            console.print(_findings(size, cells, took))
    if as_json:
        put(json.dumps({"file": str(path), "left_out": left_out, "groups": documents}, indent=1))
    if left_out:
        complain(
            f"warning: {left_out} of {total} sizes keep the model's choice, since {budget:g} s were too few to compare "
            "more; give a larger --budget"
        )
    return 0


def _findings(size: int, cells: dict[str, tuple[Cell, ...]], seconds: float) -> Table:
    shown = table("collective", "block", "best", "time", "the model's", "time", "gain",
                  title=f"{size} ranks, measured in {seconds:.0f} s")  # fmt: skip
    for collective in (name for name in BUILDERS if name in cells):
        for cell in cells[collective]:
            shown.add_row(
                collective,
                bytes_text(cell.bytes, 1024),
                _name(cell.algorithm, cell.slice_bytes),
                time_text(cell.seconds),
                _name(cell.model_algorithm, cell.model_slice_bytes),
                time_text(cell.model_seconds),
                f"{cell.model_seconds / cell.seconds:.2f}x" if cell.seconds < cell.model_seconds else "",
            )
    return shown


def _name(algorithm: str, slice_bytes: int) -> str:
    return f"{algorithm} in {bytes_text(slice_bytes, 1024)}" if slice_bytes else algorithm
