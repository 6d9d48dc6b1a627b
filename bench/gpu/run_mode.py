"""`gpu_mode=run`, one kernel a call, with all ranks on one GPU: what ranks with a GPU each run, where there is one GPU.

    python -m bench.gpu.run_mode --json run-mode.json

First ranks are threads of one process: their kernels have room side by side and run at full speed. For each number of
ranks: every dtype and operation once; latency and bytes/s; many small calls, whose results are all checked. Then they
are two processes, whose kernels take turns by the GPU's time slices.
"""

import argparse
import functools
import os
import statistics
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from bench import harness
from bench.gpu import collectives, device, kernels, reports, threads

LATENCY_US = 15.0  # at most, of an all_reduce of 8 B
SHARE = 0.7  # at least, of what the plan's bytes allow, for an all_reduce of JUDGED_BYTES
JUDGED_BYTES = 256 << 20
MANY = 1_000_000  # small calls
GRAPH = 1000  # of them in a graph
SMALL = 1024  # elements of a small call

METHOD = (
    "Ranks share one GPU, each with a stream of its own. Their blocks together are at most its multiprocessors.",
    f"many: all_reduce of {SMALL} int64 in graphs of {GRAPH} calls; each call's input differs, each result is checked "
    "on the GPU by kernels of the graph.",
    "us: events around batches of back-to-back calls, on the slowest rank, median of batches. eager: from Python, "
    "where threads share the interpreter's lock. graph: the calls of a replay.",
    "share: bytes that the plan's steps read and write on all ranks, over what the GPU copies in a second, over us.",
)

OPS = {
    **{"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum},
    **{"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor},
}
"""What each operation does to two ranks' values."""

one_at_a_time = threading.Lock()  # for captures, of which a process takes one


def captured(me: threads.ThreadRank, what: str, calls: Any) -> "torch.cuda.CUDAGraph":
    """The graph of `calls()`. A capture begins by waiting for the whole GPU, so no rank may wait for another there."""
    torch.cuda.current_stream().synchronize()
    me.meet(f"capture {what}")
    graph = torch.cuda.CUDAGraph()
    with one_at_a_time, torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        calls()
    return graph


def every_row(me: threads.ThreadRank) -> tuple[int, int]:
    """Results compared and elements wrong, over every dtype and operation that torch can name."""
    import ringreduce

    compared = wrong = 0
    for name, dtype in kernels.DTYPES.items():
        for op, combine in OPS.items():
            if not ringreduce._C.kernel_supports(name, op):
                continue
            values = [(torch.arange(1000) % 3 + rank % 2).to(dtype) for rank in range(me.size)]
            wide = [value.to(torch.complex128 if dtype.is_complex else torch.float64) for value in values]
            if not (dtype.is_floating_point or dtype.is_complex):
                wide = values
            expected = functools.reduce(combine, wide).to(dtype)
            x = values[me.rank].cuda()
            ringreduce.all_reduce(x, getattr(dist.ReduceOp, op.upper()), group=me.group)
            compared += 1
            wrong += int((x.cpu().view(torch.uint8) != expected.view(torch.uint8)).sum())
    return compared, wrong


def many_calls(me: threads.ThreadRank, calls: int, seconds: float) -> tuple[int, int, float]:
    """Small calls made, elements wrong in them, and seconds."""
    import ringreduce

    group, size = me.group, me.size
    base = torch.arange(SMALL, device="cuda")
    source, x, total = base + me.rank, torch.empty_like(base), size * base + sum(range(size))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def step() -> None:
        source.add_(me.rank + 1)
        total.add_(size * (size + 1) // 2)
        x.copy_(source)
        ringreduce.all_reduce(x, group=group)
        wrong.add_((x != total).sum())

    step()
    graph = captured(me, "many", lambda: [step() for _ in range(min(GRAPH, calls))])
    me.meet("captured")
    done, began = 0, time.monotonic()
    while done < calls:
        for _ in range(10):
            graph.replay()
            done += min(GRAPH, calls)
        torch.cuda.current_stream().synchronize()
        me.store.set(f"enough{me.rank}{done}", "1" if time.monotonic() - began > seconds else "0")
        if any(me.store.get(f"enough{rank}{done}") == b"1" for rank in range(size)):  # the same for all
            break
    return done, int(wrong), time.monotonic() - began


def timed(me: threads.ThreadRank, what: str, call: Any, calls: int) -> float:
    """Microseconds of one of `calls` that `call()` makes, on this rank."""
    batches = []
    for batch in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.current_stream().synchronize()
        me.meet(f"{what} {batch}")
        begin.record()
        call()
        end.record()
        end.synchronize()
        if batch:
            batches.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(batches)


def speed(me: threads.ThreadRank, size: int) -> tuple[float, float, int]:
    """Microseconds of an all_reduce of `size` bytes, eager and in a graph, and elements wrong."""
    import ringreduce

    own = (torch.arange(size // 4, device="cuda") % 65521 + me.rank).float()
    total = sum((torch.arange(size // 4, device="cuda") % 65521 + rank).float() for rank in range(me.size))
    x = own.clone()
    ringreduce.all_reduce(x, group=me.group)
    wrong = int((x != total).sum())
    del own, total
    x.zero_()
    batch = 200 if size < 1 << 20 else 4

    def calls() -> None:
        for _ in range(batch):
            ringreduce.all_reduce(x, group=me.group)

    eager = timed(me, f"eager {size}", calls, batch)
    graph = captured(me, str(size), calls)
    return eager, timed(me, f"graph {size}", graph.replay, batch), wrong


def two_processes(stand_in: bool) -> list[dict[str, Any]]:
    """A rank of two, in processes on one GPU; what rank 0 found."""
    import ringreduce

    device.use(stand_in)
    torch.cuda.set_device(0)
    options: Any = ringreduce.Options(gpu_transport="peer", engine="gpu_mode=run")
    group = dist.new_group(backend="ringreduce", pg_options=options, timeout=harness.TIMEOUT)
    rank, rows = dist.get_rank(), []
    for count in (1, 64, 1024):
        wrong, times = 0, []
        for call in range(20):
            x = torch.arange(count, device="cuda").add_(rank * 7 + call).float()
            torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(x, group=group)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e6)
            wrong += int((x.cpu() != (torch.arange(count) * 2 + 7 + 2 * call).float()).sum())
        rows.append(
            {"ranks": 2, "where": "processes", "bytes": count * 4, "us": statistics.median(times), "wrong": wrong}
        )
    return rows


def measure(report: reports.Report, ranks: int, args: argparse.Namespace, gbps: float) -> None:
    """All rows of one number of ranks that are threads."""
    mine = {"ranks": ranks, "where": "threads"}
    blocks = torch.cuda.get_device_properties(0).multi_processor_count // ranks
    options: dict[str, Any] = {"timeout": 60, "gpu_transport": "peer"}
    options["engine"] = f"gpu_mode=run,gpu_blocks={blocks}"
    found = threads.run(every_row, ranks, **options)
    compared, wrong = found[0][0], sum(each for _, each in found)
    report.row(**mine, compared=compared, wrong=wrong)
    for size in args.sizes:
        for each in sorted({min(16, blocks), blocks}) if size > 1 << 20 else [blocks]:
            times = threads.run(speed, ranks, [size], **{**options, "engine": f"gpu_mode=run,gpu_blocks={each}"})
            eager, graph, wrong = max(t[0] for t in times), max(t[1] for t in times), sum(t[2] for t in times)
            algorithm = collectives.algorithm_for("all_reduce", ranks, size)
            bound = collectives.traffic("all_reduce", algorithm, ranks, size) / gbps / 1e3
            row = {"bytes": size, "blocks": each, "algorithm": algorithm, "eager_us": eager, "graph_us": graph}
            report.row(**mine, **row, bound_us=bound, share=bound / graph, wrong=wrong)
            if size == 8:
                report.bar(f"{ranks} threads: us of an all_reduce of 8 B in a graph", graph, at_most=LATENCY_US)
            elif size == JUDGED_BYTES and each == blocks:
                report.bar(f"{ranks} threads: 256 MB, of what its bytes allow", bound / graph, at_least=SHARE)
            torch.cuda.empty_cache()
    many = threads.run(many_calls, ranks, [args.calls, args.seconds], **options)
    calls, wrong, seconds = many[0][0], sum(each[1] for each in many), many[0][2]
    report.row(**mine, calls=calls, seconds=seconds, wrong=wrong)
    report.bar(f"{ranks} threads: small calls of {args.calls} that were made and right", calls if not wrong else 0,
               at_least=args.calls)  # fmt: skip


def main() -> int:
    parser = reports.parser(__doc__)
    option = parser.add_argument
    option("--ranks", type=int, nargs="+", default=[2, 4, 8], help="threads (default 2 4 8)")
    option("--calls", type=int, default=MANY, help="small calls for each (default a million)")
    option("--seconds", type=float, default=90, help="for which they may go on (default 90)")
    option("--sizes", type=harness.parse_bytes, nargs="+", default=[8, 64 << 10, 1 << 20, 16 << 20, JUDGED_BYTES])
    args = parser.parse_args()
    os.environ.update(threads.RESIDENT)  # before CUDA is used
    report = reports.begin(args, "one kernel a call, ranks on one GPU", method=list(METHOD))
    gbps = device.copy_gbps(min(max(args.sizes), JUDGED_BYTES), 10, 4)
    report.row(copy_gbps=gbps)
    why = ""
    for ranks in args.ranks:
        try:
            measure(report, ranks, args, gbps)
        except AssertionError as failure:  # of a rank; the other numbers of ranks may still do
            print(failure, flush=True)
            why = str(failure).splitlines()[-1]
            report.row(ranks=ranks, where="threads", failed=str(failure), wrong=1)
    for row in harness.start_ranks(2, two_processes, args.stand_in):
        report.row(**row)
    return report.end(why)


if __name__ == "__main__":
    sys.exit(main())
