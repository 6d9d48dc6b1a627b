"""`ringreduce tune`: every algorithm in every slice size, measured in real groups of processes on this machine.

For each collective and block size the candidates take turns, batch by batch, so that a drift of the machine hits all
alike.  After each lap the slower half is dropped (successive halving: Jamieson and Talwalkar, 2016).  The last few meet
the model's choice in `FINAL_LAPS` laps, and replace it only if they win nearly all of them.  All ranks follow the same
course, since it depends on times that they have agreed on: those of the slowest rank.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ringreduce import api, plan
from ringreduce.common.failures import RingReduceError
from ringreduce.config import Options, resolve, slicing_for, slot_bytes_for
from ringreduce.groups.choices import ANY_SIZE, lowered_plan
from ringreduce.plan import Slicing, Table
from ringreduce.plan.by_cost import BLOCKS, slices
from ringreduce.plan.cost import chunk_bytes
from ringreduce.tuning.decision import fetches
from ringreduce.tuning.record import Cell

SIZES = BLOCKS[:-1]
"""Bytes of a block, 64 B to 64 MB."""

MOST_BYTES = 512 * 1024**2
"""Of all ranks' tensors together; larger cells are left out."""

FIRST_CALLS = 5
"""Of each candidate, before it is known how long it takes."""

FINALISTS = 2
FINAL_LAPS = 7
NOISE = 0.95
"""What replaces the model's choice must take less than this share of its time: less is noise."""

LATE_SECONDS = 20.0
"""After the end of the time, before the ranks are ended: many ranks on few cores take long to start."""

LEAST_BATCH = 1e-3
"""Seconds that a batch takes at least, whatever the budget: the time of fewer calls is noise."""

MOST_OF_REST = 0.25
"""The share of the time that is left that the comparison of one cell may take. Where it would need more, the model's
choice stays, and the smaller blocks after it are compared."""

HOPELESS = 3.0
"""Candidates whose first calls take so many times those of the best are dropped at once."""


class Candidate(NamedTuple):
    algorithm: str
    slice_bytes: int  # 0: by the options' rule


@dataclass(frozen=True)
class Task:
    """One cell to be measured; the first candidate is the model's choice."""

    collective: str
    block_bytes: int
    candidates: tuple[Candidate, ...]


Report = Callable[[int, Task, Cell, bool], None]


def tasks(size: int, collectives: Iterable[str], model: Table, slicing: Slicing) -> Iterator[Task]:
    """What there is to be measured in a group of `size` ranks, largest blocks first, as they are the least elastic."""
    for block_bytes in reversed(SIZES):
        for collective in collectives:
            if _bytes_of_all(collective, block_bytes, size) > MOST_BYTES:
                continue
            chosen = plan.lookup(model[collective], block_bytes)
            first = Candidate(chosen.algorithm, chosen.slice_bytes)
            others = (
                Candidate(algorithm, slice_bytes)
                for algorithm in plan.BUILDERS[collective]
                for slice_bytes in (
                    0,
                    *slices(chunk_bytes(plan.build(collective, algorithm, size), block_bytes), slicing),
                )
            )
            candidates = tuple(dict.fromkeys((first, *others)))
            if len(candidates) > 1:
                yield Task(collective, block_bytes, candidates)


def measure(size: int, work: Sequence[Task], until: float, report: Report) -> dict[str, tuple[Cell, ...]]:
    """Runs the tasks on `size` new processes, until about that time of time.monotonic(); the cells per collective,
    ascending; none where the time was too short for all.

    `report(number of the task, task, cell, whether there was time to compare)` is called after each.  Raises
    RingReduceError if a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_run_rank, args=(rank, size, store.port, list(work), until, theirs), daemon=True)
        for rank in range(size)
    ]
    cells: dict[str, list[Cell]] = {}
    try:
        # The ranks inherit the mask: an interrupt while they import would print a traceback for each.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for process in ranks:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        for number, task in enumerate(work):
            found = _next_cell(ours, ranks, until + LATE_SECONDS)
            if isinstance(found, RingReduceError):
                raise found
            if found is None:
                return {}
            cell, compared = found
            cells.setdefault(task.collective, []).insert(0, cell)
            report(number, task, cell, compared)
        for process in ranks:
            process.join(30)
    finally:
        started = [process for process in ranks if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
    return {collective: tuple(row) for collective, row in cells.items()}


def _next_cell(
    pipe: Connection, ranks: Sequence[BaseProcess], until: float
) -> tuple[Cell, bool] | RingReduceError | None:
    """What a rank says next; None: the time is over."""
    with contextlib.suppress(EOFError):  # rank 0 is gone
        while not any(process.exitcode for process in ranks):
            if time.monotonic() > until:
                return None
            if pipe.poll(0.5):
                return cast("tuple[Cell, bool] | RingReduceError | None", pipe.recv())
    wait([process.sentinel for process in ranks], timeout=30)
    for process in ranks:
        process.join(1)
    ended = [(rank, process.exitcode) for rank, process in enumerate(ranks) if process.exitcode]
    if not ended:
        raise RingReduceError(f"rank 0 of {len(ranks)} said no more, and no rank has ended")
    rank, code = ended[0]
    raise RingReduceError(f"rank {rank} of {len(ranks)} ended with exit code {code}; its traceback is above")


def slicing_of(size: int) -> Slicing:
    """How the groups that are measured cut their chunks."""
    options, _ = resolve(Options(tuning="off", algorithms=""))
    return slicing_for(options, slot_bytes_for(size, options), fetches(options))


def _run_rank(rank: int, size: int, port: int, work: list[Task], until: float, pipe: Connection) -> None:
    """Interrupts are blocked here; the parent ends us, and says what went wrong."""
    try:
        _measure_all(rank, size, port, work, until, pipe)
    except RingReduceError as error:
        with contextlib.suppress(OSError):
            pipe.send(RingReduceError(f"rank {rank} of {size}: {error}"))
        raise SystemExit(1) from None


def _measure_all(rank: int, size: int, port: int, work: list[Task], until: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    options = Options(tuning="off", algorithms="")
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("ringreduce", store=store, rank=rank, world_size=size, pg_options=options)
    try:
        bench = _Bench(rank, size, dist.new_group(pg_options=options))
        left = sum(len(task.candidates) for task in work)
        for task in work:
            (late,) = bench.agree(time.monotonic() - until)
            measured = (
                None if late > LATE_SECONDS / 2 else bench.run(task, max(-late, 0.0), len(task.candidates) / left)
            )
            left -= len(task.candidates)
            if rank == 0:
                pipe.send(measured)
            if measured is None:
                break
        dist.barrier()
    finally:
        dist.destroy_process_group()


class _Bench:
    """One rank's part in measuring, in a group of its own; the default group is for what ranks tell each other."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.backend = group._get_backend(torch.device("cpu"))

    def agree(self, *values: float) -> list[float]:
        """The largest of each value over all ranks."""
        agreed = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return agreed.tolist()

    def run(self, task: Task, rest: float, share: float) -> tuple[Cell, bool]:
        """Measures one cell in about this share of the seconds that are left, and says whether it could compare."""
        call = _call(task.collective, task.block_bytes, self.rank, self.size, self.group)
        model, *rivals = task.candidates
        estimate: dict[Candidate, float] = {}
        count, taken = len(task.candidates), 0.0
        for candidate in task.candidates:
            self.batch(task, candidate, call, 1)  # may set things up
            estimate[candidate] = min(self.batch(task, candidate, call, 2) for _ in range(2))
            taken += FIRST_CALLS * estimate[candidate]
            ahead = FIRST_CALLS * (count - len(estimate)) * estimate[model]
            laps = (2 * count + (FINALISTS + 1) * FINAL_LAPS) * max(estimate[model], LEAST_BATCH)
            if taken + ahead + laps > MOST_OF_REST * rest:  # which all ranks find alike
                return Cell(task.block_bytes, *model, estimate[model], *model, estimate[model]), False

        def lap(candidates: Sequence[Candidate]) -> None:
            for candidate in candidates:
                calls = max(1, int(batch_seconds / estimate[candidate]))
                estimate[candidate] = self.batch(task, candidate, call, calls)

        rivals = [rival for rival in rivals if estimate[rival] < HOPELESS * min(estimate.values())]
        batch_seconds = 0.9 * rest * share / (2 * len(rivals) + (FINALISTS + 1) * FINAL_LAPS)
        batch_seconds = max(batch_seconds, LEAST_BATCH)
        while len(rivals) > FINALISTS:
            lap(rivals)
            rivals = sorted(rivals, key=estimate.__getitem__)[: max(FINALISTS, len(rivals) // 2)]
        times: dict[Candidate, list[float]] = {candidate: [] for candidate in (model, *rivals)}
        for _ in range(FINAL_LAPS):
            lap(tuple(times))
            for candidate, each in times.items():
                each.append(estimate[candidate])
        best = winner(times, model)
        cell = Cell(task.block_bytes, *best, statistics.median(times[best]), *model, statistics.median(times[model]))
        return cell, True

    def batch(self, task: Task, candidate: Candidate, call: Callable[[], object], calls: int) -> float:
        """Seconds for one call, the mean of so many on the slowest rank."""
        lowered, digest = lowered_plan(task.collective, candidate.algorithm, self.size, dist.get_rank())
        self.backend.add_plan(task.collective, lowered, digest, ANY_SIZE, candidate.slice_bytes)
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return self.agree((time.perf_counter() - begin) / calls)[0]


def winner(times: Mapping[Candidate, Sequence[float]], model: Candidate) -> Candidate:
    """The fastest by medians, if it beats the model's choice by more than noise, and in all laps but one."""
    best = min(times, key=lambda candidate: statistics.median(times[candidate]))
    wins = sum(a < b for a, b in zip(times[best], times[model], strict=True))
    clearly = statistics.median(times[best]) < NOISE * statistics.median(times[model])
    return best if clearly and wins >= len(times[model]) - 1 else model


def _call(collective: str, block_bytes: int, rank: int, size: int, group: Any) -> Callable[[], object]:
    """A call of the collective over blocks of so many bytes, float32, on tensors of its own."""

    def tensor(blocks: int = 1) -> torch.Tensor:
        return torch.full((max(block_bytes // 4, 1) * blocks,), 0.0, device="cpu")

    x = tensor()
    match collective:
        case "all_reduce":
            return lambda: api.all_reduce(x, group=group)
        case "broadcast":
            return lambda: api.broadcast(x, group=group)
        case "reduce":
            return lambda: api.reduce(x, group=group)
    parts = tensor(size)
    pieces = list(parts.chunk(size)) if rank == 0 else None
    match collective:
        case "reduce_scatter":
            return lambda: api.reduce_scatter_tensor(x, parts, group=group)
        case "all_gather":
            return lambda: api.all_gather_into_tensor(parts, x, group=group)
        case "gather":
            return lambda: api.gather(x, pieces, group=group)
        case "scatter":
            return lambda: api.scatter(x, pieces, group=group)
        case "all_to_all":
            out = tensor(size)
            return lambda: api.all_to_all_single(out, parts, group=group)
    raise AssertionError(collective)


def _bytes_of_all(collective: str, block_bytes: int, size: int) -> int:
    blocks = {"all_reduce": 1, "broadcast": 1, "reduce": 1, "all_to_all": 2 * size}.get(collective, size + 1)
    return block_bytes * blocks * size
