"""The command `ringreduce`: what is set and decided on this machine (`info`), and better decisions (`tune`)."""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from dataclasses import fields

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import ringreduce
from ringreduce import _C, plan, tuning
from ringreduce.backend import slot_bytes_for
from ringreduce.config import PREFIX, Options, resolve
from ringreduce.errors import RingReduceError
from ringreduce.plan import BUILDERS, Machine, Range, Slicing
from ringreduce.plan.choose import SIZES
from ringreduce.tuning import Cell, Tuning

RANKS_SHOWN = (2, 4, 8, 16)
RANKS_TUNED = (2, 4)
TUNING_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="ringreduce", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, every knob with its origin, and what runs for which size")
    info.add_argument("--ranks", type=_ranks, nargs="+", default=RANKS_SHOWN, help="group sizes (default: 2 4 8 16)")
    tune = commands.add_parser("tune", help="measure what runs best for which size, and keep it for this machine")
    tune.add_argument("--ranks", type=_ranks, nargs="+", default=RANKS_TUNED, help="group sizes (default: 2 4)")
    tune.add_argument("--collectives", choices=BUILDERS, nargs="+", default=tuple(BUILDERS), metavar="NAME",
                      help=f"default: {' '.join(BUILDERS)}")  # fmt: skip
    tune.add_argument("--budget", type=_budget, default=TUNING_SECONDS, help="seconds for all of it (default: 120)")
    arguments = parser.parse_args()
    console = Console()
    try:
        options, origins = resolve(None)
        if arguments.command == "tune":
            return _tune(console, options, sorted(set(arguments.ranks)), arguments.collectives, arguments.budget)
        _info(console, options, origins, arguments.ranks)
        return 0
    except (RingReduceError, OSError) as error:
        console.print(f"[red]error:[/red] {error}", highlight=False)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted: group sizes that were not finished are as they were")
        return 130


def _info(console: Console, options: Options, origins: dict[str, str], ranks: list[int]) -> None:
    console.print(
        f"ringreduce {ringreduce.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()} with {_C.instruction_set()} kernels"
    )
    table = Table("option", "variable", "value", "from", "what it is")
    for knob in fields(Options):
        value = getattr(options, knob.name)
        table.add_row(knob.name, PREFIX + knob.name.upper(), repr(value), origins[knob.name], knob.metadata["help"])
    console.print(table)
    fetch = tuning.fetches(options)
    if fetch:
        how = "read where they are"
    elif options.fetch:
        how = "copied: the kernel does not let ranks read one another's memory (see kernel.yama.ptrace_scope)"
    else:
        how = f"copied, by {origins['fetch']}"
    console.print(f"ordinary tensors: {how}", highlight=False, soft_wrap=True)
    known: Tuning | None = None
    if options.tuning == "off":
        console.print("tuning: off, the built-in rules decide")
    else:
        known, origin = tuning.current(options.tuning or "auto", _cores())
        here = (
            "" if known.identity == tuning.identify(_cores()) else f", made on another machine ({known.identity.cpu})"
        )
        console.print(f"tuning: {origin}, probed {known.probed}{here}", highlight=False, soft_wrap=True)
        console.print(_figures(known.machine))
    for size in ranks:
        console.print(_choices(size, options, fetch, known))


def _figures(machine: Machine) -> Table:
    table = Table("what was probed", "figure")
    table.add_row("cores", str(machine.cores))
    table.add_row("cache of a core", _size(machine.cache_bytes))
    table.add_row("a flag to another core", _time(machine.hop))
    table.add_row("a core from rank to rank", _time(machine.turn))
    table.add_row("a rank looks before it yields", _time(machine.patience))
    for name, seconds in (
        ("copy in cache", machine.copy_cached),
        ("add in cache", machine.add_cached),
        ("copy in memory, one core", machine.copy_memory),
        ("copy in memory, each core", machine.copy_memory_all),
        ("add in memory, each core", machine.add_memory_all),
    ):
        table.add_row(name, f"{1e-9 / seconds:.1f} GB/s")
    for size, put, take in zip(machine.staging, machine.put, machine.take, strict=True):
        table.add_row(f"core to core through {_size(size)}", f"{1e-9 / put:.1f} GB/s in, {1e-9 / take:.1f} GB/s out")
    return table


def _choices(size: int, options: Options, fetch: bool, known: Tuning | None) -> Table:
    """What a group of so many ranks would run; times for the smallest compared block of each range."""
    slicing = tuning.slicing_for(options, slot_bytes_for(size, options), fetch)
    least_fetch = tuning.fetch_from(options, size, _cores(), fetch)
    decided = () if known is None else tuning.rules_for(known, size, slicing, least_fetch)
    measured = {} if known is None or size not in known.measured else known.measured[size].cells
    date = f", measured {known.measured[size].date}" if known is not None and measured else ""
    table = Table("collective", "bytes of a block", "algorithm", "slice", "at", "model", "measured",
                  title=f"{size} ranks{date}", title_justify="left")  # fmt: skip
    for collective, ranges in plan.table(size, plan.parse_algorithms(options.algorithms or ""), decided).items():
        begin = 0
        for entry in ranges:
            at = next((block for block in SIZES if block >= begin), begin)
            cell = next((cell for cell in measured.get(collective, ()) if cell.bytes == at), None)
            same = cell is not None and (cell.algorithm, cell.slice_bytes) == entry[1:]
            table.add_row(
                collective if begin == 0 else "",
                f"{_size(begin)} - {'' if entry.end is None else _size(entry.end)}",
                entry.algorithm,
                _size(entry.slice_bytes) if entry.slice_bytes else "",
                _size(at),
                "" if known is None else _time(_predicted(collective, entry, size, at, known.machine, slicing)),
                _time(cell.seconds) if cell is not None and same else "",
            )
            begin = entry.end or 0
    return table


def _predicted(collective: str, entry: Range, size: int, block: int, machine: Machine, slicing: Slicing) -> float:
    cost = plan.Cost(plan.build(collective, entry.algorithm, size), machine, slicing)
    return cost.seconds(block, entry.slice_bytes)


def _tune(console: Console, options: Options, ranks: list[int], collectives: list[str], budget: float) -> int:
    from ringreduce.tuning import measure

    if options.tuning == "off":
        raise RingReduceError(f"{PREFIX}TUNING is 'off': no group would use what is measured; unset it")
    path, known = tuning.renew(options.tuning or "auto", _cores())
    console.print(f"probed the machine; {path} keeps what is found", highlight=False, soft_wrap=True)
    seconds = budget / len(ranks)
    for size in ranks:
        slicing = measure.slicing_of(size)
        least_fetch = tuning.fetch_from(options, size, _cores(), tuning.fetches(options))
        model = plan.table(size, decided=plan.by_cost(size, known.machine, slicing, fetch_from=least_fetch))
        work = list(measure.tasks(size, collectives, model, slicing))
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(f"{size} ranks", total=len(work))

            def show(
                number: int, task: measure.Task, cell: Cell, progress: Progress = progress, bar: object = bar
            ) -> None:
                text = f"{task.collective} of {_size(task.block_bytes)}: {_name(cell.algorithm, cell.slice_bytes)}"
                progress.update(bar, completed=number + 1, description=text)  # type: ignore[arg-type]

            began = time.monotonic()
            cells = measure.measure(size, work, seconds, show)
        known = tuning.keep(known, size, cells, path)
        console.print(_findings(size, cells, time.monotonic() - began))
    return 0


def _findings(size: int, cells: dict[str, tuple[Cell, ...]], seconds: float) -> Table:
    table = Table("collective", "block", "best", "time", "the model's", "time", "gain",
                  title=f"{size} ranks, measured in {seconds:.0f} s", title_justify="left")  # fmt: skip
    for collective in (name for name in BUILDERS if name in cells):
        for cell in cells[collective]:
            table.add_row(
                collective,
                _size(cell.bytes),
                _name(cell.algorithm, cell.slice_bytes),
                _time(cell.seconds),
                _name(cell.model_algorithm, cell.model_slice_bytes),
                _time(cell.model_seconds),
                f"{cell.model_seconds / cell.seconds:.2f}x" if cell.seconds < cell.model_seconds else "",
            )
    return table


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} ranks; a group to look at has 2 to 256")
    return int(text)


def _budget(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} seconds; it must be a number above 0")
    return seconds


def _cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def _name(algorithm: str, slice_bytes: int) -> str:
    return f"{algorithm} in {_size(slice_bytes)}" if slice_bytes else algorithm


def _size(count: int) -> str:
    for unit, name in ((1024**3, "GB"), (1024**2, "MB"), (1024, "KB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def _time(seconds: float) -> str:
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns"
