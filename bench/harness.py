"""What the benchmarks share: ranks, the timing loop, the command line, the rows, the header, progress.

Every function that communicates uses the default process group (Gloo, CPU tensors) and must be called by all ranks in
the same order. The backend under test never carries the benchmark's own traffic.
"""

import argparse
import contextlib
import gc
import inspect
import itertools
import json
import math
import multiprocessing
import os
import pickle
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

Key = TypeVar("Key", bound=Hashable)
Mark = TypeVar("Mark")
Found = TypeVar("Found")
Call = Callable[[], object]

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = timedelta(seconds=120)  # of every group; a rank that waits longer is stuck, as no collective here takes 5 s


def start_ranks(ranks: int, measure: Callable[..., Found], *args: object) -> Found:
    """Run `measure(*args)` in `ranks` new processes, as `become_rank` does, and return what it returned on rank 0.

    If one fails, all end, and this process with them: the reason on stderr, exit status 1.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    try:
        spawn(_run_rank, (ranks, store.port, measure, args), nprocs=ranks)
    except ProcessException as error:
        sys.exit(str(error))
    found: Found = pickle.loads(store.get("found"))
    return found


def _run_rank(rank: int, ranks: int, port: int, measure: Callable[..., object], args: tuple[object, ...]) -> None:
    store = dist.TCPStore("localhost", port)
    found = become_rank(measure, *args, store=store, rank=rank, world_size=ranks)
    if rank == 0:
        store.set("found", pickle.dumps(found))


def become_rank(measure: Callable[..., Found], *args: object, **meeting: Any) -> Found:
    """`measure(*args)` with one CPU thread and the default process group, which is Gloo's and never timed.

    `meeting` goes to init_process_group: empty under torchrun, whose environment says how to meet.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT, **meeting)
    found = measure(*args)
    dist.destroy_process_group()
    return found


def forked(body: Callable[..., object], *args: object) -> tuple[ForkProcess, Connection]:
    """A new process that runs `body(*args, pipe)`, and this process's end of that pipe."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=body, args=(*args, theirs))
    process.start()
    theirs.close()
    return process, ours


class CannotRun(Exception):
    """The request makes no sense here: which argument, and what would do."""


@dataclass(frozen=True)
class Schedule:
    """How long to measure a call: `warmup` times at first, then in `rounds` batches that last `min_time` s together."""

    warmup: int
    rounds: int
    min_time: float

    MAX_BATCH = 10_000  # calls; keeps the recorded times and GPU events few

    def batch(self, mean_us: float) -> int:
        """Calls in the next batch, if one takes `mean_us`."""
        return min(max(1, round(self.min_time * 1e6 / self.rounds / mean_us)), self.MAX_BATCH)


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over `iterations` calls.

    `mean` is the batches' duration on their slowest rank over the calls made, as in nccl-tests. `min`, `median` and
    `p99` are of single calls, each timed on the rank where it took longest.
    """

    iterations: int
    mean: float
    min: float
    median: float
    p99: float


def time_alternating(calls: Mapping[Key, Call], schedule: Schedule, device: torch.device) -> dict[Key, Timing]:
    """Time each call, taking turns batch by batch so that a drift of the machine hits all alike.

    A batch starts with a barrier and one untimed call, which align the ranks; then calls follow back to back. Its
    length comes from the mean so far on the slowest rank, so it is the same on every rank.
    """
    single: dict[Key, list[Tensor]] = {key: [] for key in calls}  # per batch, per call: the slowest rank's time
    totals: dict[Key, list[float]] = {key: [] for key in calls}  # per batch: the slowest rank's sum
    estimate: dict[Key, float] = {}
    with _no_garbage_collection():
        for key, call in calls.items():
            call()  # may set things up; not part of the estimate
            estimate[key] = float(_slowest(_time_batch(call, schedule.warmup, device)).mean())
        for _ in range(schedule.rounds):
            for key, call in calls.items():
                dist.barrier()
                call()
                intervals = _time_batch(call, schedule.batch(estimate[key]), device)
                *_, total = combined = _slowest(torch.cat([intervals, intervals.sum(0, keepdim=True)]))
                single[key].append(combined[:-1])
                totals[key].append(float(total))
                estimate[key] = sum(totals[key]) / sum(map(len, single[key]))
    return {key: _timing(torch.cat(single[key]), sum(totals[key])) for key in calls}


def _time_batch(call: Call, iterations: int, device: torch.device) -> Tensor:
    """This rank's microseconds for each of `iterations` back-to-back calls: host clock, or events of the stream."""
    if device.type == "cuda":
        events = _marks(call, iterations, _recorded_event)
        torch.cuda.synchronize(device)
        return torch.tensor([a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)], dtype=torch.float64)
    return torch.tensor(_marks(call, iterations, time.perf_counter_ns)).diff().double() / 1e3


def _marks(call: Call, iterations: int, mark: Callable[[], Mark]) -> list[Mark]:
    marks = [mark()]
    for _ in range(iterations):
        call()
        marks.append(mark())
    return marks


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(call: Call, repeat: int) -> float:
    """Mean of `repeat` calls on the slowest rank; all begin together."""
    dist.barrier()
    return float(_slowest(torch.tensor(own_seconds(call, repeat), dtype=torch.float64)))


def own_seconds(call: Call, repeat: int) -> float:
    """Mean of `repeat` calls in this process."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def _slowest(values: Tensor) -> Tensor:
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def _timing(single: Tensor, total: float) -> Timing:
    low, median, p99 = single.quantile(torch.tensor([0.0, 0.5, 0.99], dtype=single.dtype)).tolist()
    return Timing(single.numel(), total / single.numel(), low, median, p99)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def save(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report as JSON, each of its rows on a line."""

    def lines(values: Iterable[str], indent: str) -> str:
        return ",\n".join(indent + each for each in values)

    text = {key: json.dumps(value, default=str) for key, value in report.items()}
    text["rows"] = "[\n" + lines((json.dumps(row, default=str) for row in report["rows"]), "  ") + "\n ]"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + lines((f'"{key}": {value}' for key, value in text.items()), " ") + "\n}\n")


def main(*measures: Callable[..., Iterable[Mapping[str, Any]]]) -> int:
    """A program that makes a `report` of the rows of one of `measures`, which the command line names if there are more.

    Parameters of a measure are options. Its docstring describes them, or the program's if it is the only one.
    """
    form, about = argparse.RawDescriptionHelpFormatter, sys.modules["__main__"].__doc__ or ""
    codes = "Exit code: 0, 1 if a result was wrong or something could not be measured, 2 if it makes no sense here."
    parser = argparse.ArgumentParser(description=about, epilog=codes, formatter_class=form)
    commands = parser.add_subparsers(required=True, metavar="SCENARIO") if len(measures) > 1 else None
    for measure in measures:
        command, text = parser, inspect.getdoc(measure) or ""
        if commands:
            name, line = measure.__name__, text.splitlines()[0]
            command = commands.add_parser(name, help=line, description=text, formatter_class=form)
        for name, parameter in inspect.signature(measure, eval_str=True).parameters.items():
            command.add_argument(f"--{name.replace('_', '-')}", **_described(parameter))
        command.add_argument("--json", type=Path, metavar="FILE", help="the report, written anew after each row")
        command.set_defaults(run=measure)
    options = vars(parser.parse_args())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as with Ctrl-C, no process stays behind
    measure, path = options.pop("run"), options.pop("json")
    try:
        title = (measure.__doc__ if commands else about) or measure.__name__
        return report(title.splitlines()[0], measure(**options), path)
    except CannotRun as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


def _described(parameter: inspect.Parameter) -> dict[str, Any]:
    """A parameter as argparse wants an option."""
    default, kind = parameter.default, parameter.annotation
    if default is False:
        return {"action": "store_true"}
    found: dict[str, Any] = {"default": default, "help": f"(default {default})" if default else None}
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        found |= {"nargs": "+", "help": f"(default {' '.join(map(str, default))})" if default else None}
    if get_origin(kind) is Literal:
        return {**found, "choices": get_args(kind)}
    if get_origin(kind) is Annotated:
        return {**found, "type": kind.__metadata__[0], "metavar": "SIZE"}
    return {**found, "type": kind, "metavar": kind.__name__.upper()}


def report(benchmark: str, rows: Iterable[Mapping[str, Any]], path: Path | None = None) -> int:
    """Prints an `origin` and a table of the rows, and each row on stderr as soon as it is there; saves them in `path`.

    The columns are the rows' keys. Lists and dicts are left out of the table. A row {"note": ...} says what could not
    be measured, and {"header": ...} has more for the header. Returns 1 if there is a note or a row has "wrong" results.
    """
    from rich.console import Console
    from rich.table import Table

    if os.environ.get("RANK", "0") != "0":  # under torchrun the first rank reports for all
        return int(any(row.get("wrong") for row in rows))
    header, found, notes = origin(benchmark), [], []
    print(*format_origin(header), sep="\n", flush=True)
    for row in rows:
        if "header" in row:
            header |= row["header"]
            print("".join(f"# {key:<9} {what}\n" for key, what in row["header"].items()), end="", flush=True)
            continue
        if "note" in row:
            notes.append(row["note"])
        else:
            found.append(row)
        print(words(row), file=sys.stderr, flush=True)
        if path:
            save(path, {"header": header, "rows": found, "notes": notes})
    columns = {key: None for row in found for key in _cells(row)}
    table = Table()
    for column in columns:
        table.add_column(column, justify="right")
    for row in found:
        table.add_row(*(_cells(row).get(column, "") for column in columns))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(*(f"# left out: {note}" for note in notes), sep="\n", end="\n" if notes else "")
    return int(bool(notes) or any(row.get("wrong") for row in found))


def words(row: Mapping[str, Any]) -> str:
    """A row as a line."""
    return ", ".join(f"{key} {cell}" for key, cell in _cells(row).items())


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    return {key: _cell(each) for key, each in row.items() if not isinstance(each, list | dict)}


def _cell(value: Any) -> str:
    return format(value, ".0f" if abs(value) >= 1e4 else ".4g") if isinstance(value, float) else str(value)


def origin(benchmark: str) -> dict[str, Any]:
    """What every report's header begins with: what was run, when, how, and on what."""
    return {
        "benchmark": benchmark,
        "date": now(),
        "command": command(),
        "machine": machine(),
        "versions": versions(),
    }


def format_origin(header: Mapping[str, Any]) -> list[str]:
    """An `origin`, less its versions, as lines that start with "#"; the last is the machine."""
    facts = header["machine"]
    return [
        f"# {header['benchmark']}",
        f"# date      {header['date']}",
        f"# command   {header['command']}",
        f"# machine   {facts['cpu']}, {facts['cores']} cores, {facts['memory_gb']} GB, {facts['kernel']}",
    ]


def command() -> str:
    """The command line that started this run, to be pasted again."""
    module = sys.modules["__main__"].__spec__  # of `python -m`
    script = shlex.join(["-m", module.name.removesuffix(".__main__"), *sys.argv[1:]] if module else sys.argv)
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return f"python {script}"
    hosts, ranks = os.environ.get("GROUP_WORLD_SIZE", "1"), os.environ["LOCAL_WORLD_SIZE"]
    return f"torchrun --nnodes={hosts} --nproc-per-node={ranks} {script}"


def machine() -> dict[str, object]:
    """The machine this process runs on, in the words of its own system files."""
    from ringreduce.tuning.machine import identify

    cores = os.sched_getaffinity(0)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    facts: dict[str, object] = {
        "cpu": identify(cores).cpu,
        "cores": len(cores),
        "memory_gb": round(memory / 1e9, 1),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return facts


def versions() -> dict[str, str]:
    """Versions of what takes part; ringreduce's with the instruction set that its kernels use."""
    import ringreduce
    from ringreduce import _C

    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    found["ringreduce"] = f"{ringreduce.__version__} ({_C.instruction_set()})"
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def parse_bytes(text: str) -> int:
    """A size such as "8", "512K" or "64M", for argparse; the letters are powers of 1024, as in nccl-tests."""
    digits, unit = (text[:-1], text[-1].upper()) if text and text[-1].isalpha() else (text, "")
    if not digits.isdigit() or unit not in ("", "K", "M", "G"):
        raise argparse.ArgumentTypeError(f"not a size: {text!r} (write 8, 512K, 64M or 1G)")
    return int(digits) << (10 * " KMG".index(unit or " "))


Bytes = Annotated[int, parse_bytes]


def format_bytes(size: int) -> str:
    """The short form that `parse_bytes` reads, with a unit: "8 B", "4 KiB", "64 MiB"."""
    power = min(int(math.log2(size)) // 10, 3) if size else 0
    return f"{size / 1024**power:g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
