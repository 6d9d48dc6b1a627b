"""`ringreduce info`: versions, every knob with its origin, and what runs for which size on this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
from dataclasses import asdict, fields
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import ringreduce
from ringreduce import plan, tuning
from ringreduce.cli.terminal import console, put, say, table
from ringreduce.common import compiled
from ringreduce.common.cores import crowded, own_cores
from ringreduce.common.failures import SystemFailure
from ringreduce.common.units import bytes_text, time_text
from ringreduce.config import OTHER_VARIABLES, PREFIX, Options, fetch_from, resolve, slicing_for, slot_bytes_for
from ringreduce.gpu import kernels, nccl
from ringreduce.gpu.rules import rules as gpu_rules
from ringreduce.plan.by_cost import BLOCKS
from ringreduce.plan.cost import Cost, Machine
from ringreduce.tuning import Tuning

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RANKS_SHOWN = (2, 4, 8, 16)

_size = partial(bytes_text, base=1024)


def add(command: Any) -> None:
    parser = command(
        description="Versions, every knob with its origin, and what groups of CPU ranks run for which size, as probed "
        "and tuned on this machine. K, M and G in its tables are powers of 1024.",
        epilog="example:\n  ringreduce info --ranks 2 8",
    )
    parser.add_argument(
        "--ranks", type=group_size, nargs="+", default=RANKS_SHOWN, help="group sizes (default: 2 4 8 16)"
    )
    parser.add_argument("--json", action="store_true", help="versions, options and what was probed, as JSON")


def run(arguments: argparse.Namespace) -> int:
    options, origins = resolve(None)
    if arguments.json:
        put(json.dumps(_document(options, origins), indent=1))
    else:
        _info(console(), options, origins, arguments.ranks)
    return 0


def _versions() -> dict[str, str | None]:
    built_for = None if compiled.why_not() else compiled.load().instruction_set()
    return {
        "ringreduce": ringreduce.__version__,
        "torch": metadata.version("torch") if find_spec("torch") else None,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "kernels": built_for,
    }


def _document(options: Options, origins: dict[str, str]) -> dict[str, Any]:
    """For --json."""
    knobs = {knob.name: {"value": getattr(options, knob.name), "from": origins[knob.name]} for knob in fields(Options)}
    document = {"versions": _versions(), "options": knobs, "engine": asdict(options.parts), "tuning": None}
    if not compiled.why_not() and options.tuning != "off":
        known, origin = tuning.current(options.tuning, own_cores())
        document["tuning"] = {"from": origin, **asdict(known)}
    return document


def _info(console: Console, options: Options, origins: dict[str, str], ranks: list[int]) -> None:
    missing = compiled.why_not()
    found = _versions()
    torch = f"torch {found['torch']}" if found["torch"] else "no torch"
    console.print(
        f"ringreduce {found['ringreduce']}, {torch}, Python {found['python']}, {found['machine']} with "
        f"{found['kernels'] or 'no'} kernels"
    )
    say(console, f"options; ringreduce.Options has each in small letters, without {PREFIX}")
    shown = table("variable", "value", "from", "what it is", whole=("variable", "from"))
    for knob in fields(Options):
        origin = "default" if origins[knob.name] == "default" else "variable"
        value = repr(getattr(options, knob.name))
        shown.add_row(PREFIX + knob.name.upper(), value, origin, knob.metadata["help"])
    for variable, meaning in OTHER_VARIABLES.items():
        given = os.environ.get(variable)
        shown.add_row(variable, *(("", "default") if given is None else (repr(given), "variable")), meaning)
    console.print(shown)
    shown = table("part of engine", "value", "what it is", whole=("part of engine",))
    for part in fields(options.parts):
        shown.add_row(part.name, repr(getattr(options.parts, part.name)), part.metadata["help"])
    console.print(shown)
    if missing:
        say(console, f"groups cannot be made here, nor this machine be probed: {missing}")
    else:
        _machine(console, options, origins, ranks)


def _machine(console: Console, options: Options, origins: dict[str, str], ranks: list[int]) -> None:
    """What groups do on this machine."""
    from ringreduce import _C

    fetch = tuning.fetches(options)
    if fetch:
        how = "read where they are"
    elif options.fetch:
        how = "copied: the kernel does not let ranks read one another's memory (see kernel.yama.ptrace_scope)"
    else:
        how = f"copied, by {origins['fetch']}"
    console.print(f"ordinary tensors: {how}", highlight=False, soft_wrap=True)
    console.print(f"threads: {_threads(ranks)}", highlight=False, soft_wrap=True)
    console.print(f"CUDA tensors: {_cuda_tensors(options)}", highlight=False, soft_wrap=True)
    if not _C.cuda_unavailable() and options.gpu_transport in ("auto", "peer"):
        console.print(_choices_of_gpus(ranks, options))
    known: Tuning | None = None
    if options.tuning == "off":
        console.print("tuning: off, the built-in rules decide")
    else:
        known, origin = tuning.current(options.tuning, own_cores())
        here = (
            ""
            if known.identity == tuning.identify(own_cores())
            else f", made on another machine ({known.identity.cpu})"
        )
        console.print(f"tuning: {origin}, probed {known.probed}{here}", highlight=False, soft_wrap=True)
        console.print(_figures(known.machine))
    for size in ranks:
        console.print(_choices(size, options, fetch, known))


def _threads(ranks: list[int]) -> str:
    """Those that torch computes with in each process, and the first group that has too many."""
    import torch

    threads, cores = torch.get_num_threads(), len(own_cores())
    wrong = next(filter(None, (crowded(size, threads, cores) for size in sorted(ranks))), ())
    return "; ".join([f"{threads} in a process", *wrong])


def _cuda_tensors(options: Options) -> str:
    """What becomes of them on this machine, as far as one process can tell."""
    from ringreduce import _C

    if missing := _C.cuda_unavailable():
        return f"none; {missing}"
    if options.gpu_transport == "host":
        return "through the host's memory, by gpu_transport"
    if options.gpu_transport == "nccl":
        try:
            return f"over NCCL {_C.nccl_version(nccl.places())}"
        except SystemFailure as missing:
            return f"none; {missing}"
    made, fix = kernels.origin()
    return f"on their GPUs, kernels {made}" if made else f"through the host's memory: no kernels; {fix}"


def _figures(machine: Machine) -> Table:
    shown = table("what was probed", "figure")
    shown.add_row("cores", str(machine.cores))
    shown.add_row("cache of a core", _size(machine.cache_bytes))
    shown.add_row("a flag to another core", time_text(machine.hop))
    shown.add_row("a core from rank to rank", time_text(machine.turn))
    shown.add_row("a core from rank to rank, by a wake-up", time_text(machine.wake))
    shown.add_row("a rank looks before it yields", time_text(machine.patience))
    for name, seconds in (
        ("copy in cache", machine.copy_cached),
        ("add in cache", machine.add_cached),
        ("copy in memory, one core", machine.copy_memory),
        ("copy in memory, each core", machine.copy_memory_all),
        ("add in memory, each core", machine.add_memory_all),
        ("copy from memory to cache", machine.copy_scratch),
        ("copy from another process to cache", machine.fetch_scratch),
    ):
        if seconds > 0:
            shown.add_row(name, f"{1e-9 / seconds:.1f} GB/s")
    for size, into, out in zip(machine.staging, machine.put, machine.take, strict=True):
        shown.add_row(f"core to core through {_size(size)}", f"{1e-9 / into:.1f} GB/s in, {1e-9 / out:.1f} GB/s out")
    return shown


def _choices(size: int, options: Options, fetch: bool, known: Tuning | None) -> Table:
    """What a group of so many ranks would run; times for the smallest compared block of each range."""
    slicing = slicing_for(options, slot_bytes_for(size, options), fetch)
    least_fetch = fetch_from(options, size, own_cores(), fetch)
    decided = () if known is None else tuning.rules_for(known, size, slicing, least_fetch)
    measured = {} if known is None or size not in known.measured else known.measured[size].cells
    date = f", measured {known.measured[size].date}" if known is not None and measured else ""
    shown = table("collective", "bytes of a block", "algorithm", "slice", "at", "model", "measured",
                  title=f"{size} ranks{date}")  # fmt: skip
    for collective, ranges in plan.table(size, plan.parse_algorithms(options.algorithms), decided).items():
        begin = 0
        for entry in ranges:
            at = next((block for block in BLOCKS if block >= begin), begin)
            cell = next((cell for cell in measured.get(collective, ()) if cell.bytes == at), None)
            cost = known and Cost(plan.build(collective, entry.algorithm, size), known.machine, slicing)
            same = cell is not None and (cell.algorithm, cell.slice_bytes) == entry[1:]
            shown.add_row(
                collective if begin == 0 else "",
                f"{_size(begin)} - {'' if entry.end is None else _size(entry.end)}",
                entry.algorithm,
                _size(entry.slice_bytes) if entry.slice_bytes else "",
                _size(at),
                time_text(cost.seconds(at, entry.slice_bytes)) if cost else "",
                time_text(cell.seconds) if cell is not None and same else "",
            )
            begin = entry.end or 0
    return shown


def _choices_of_gpus(ranks: list[int], options: Options) -> Table:
    """What groups of so many ranks would run on GPUs that no topology is known of, where it differs by size or rule."""
    shown = table("ranks", "their GPUs", "collective", "bytes of a block", "algorithm", "by",
                  title="CUDA tensors, unless NVML tells of links")  # fmt: skip
    user = plan.parse_algorithms(options.algorithms)
    modes = {"run": [False], "steps": [True]}.get(options.parts.gpu_mode, [False, True])
    for size, steps in ((size, steps) for size in ranks for steps in modes):
        built_in = gpu_rules(size, steps=steps)
        of_rules = {rule.collective for rule in (*user, *built_in)}
        for collective, ranges in plan.table(size, user, built_in).items():
            begin = 0
            for entry in ranges if collective in of_rules else ():
                mine = any(r.collective == collective and r.begin <= begin < (r.end or begin + 1) for r in user)
                shown.add_row(
                    str(size),
                    "shared" if steps else "one each",
                    collective,
                    f"{_size(begin)} - {'' if entry.end is None else _size(entry.end)}",
                    entry.algorithm,
                    "algorithms" if mine else "built in, not measured",
                )
                begin = entry.end or 0
    return shown


def group_size(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} ranks; a group to look at has 2 to 256")
    return int(text)
