"""Trains with DistributedDataParallel and draws when each rank computed and when its gradients were all-reduced.

    python examples/overlap.py --trace overlap.json --png overlap.png
    torchrun --nproc-per-node=2 examples/overlap.py

DDP packs gradients into buckets and starts a bucket's all_reduce as soon as all its gradients are there, while backward
goes on. Printed is what that saves, the hidden share of the communication:

    hidden = 1 - (step - silent) / communication

step: a training step, forward to optimizer; silent: the same step, with buckets that are filled as ever and then left
as they are (DDP's noop_hook); communication: the same buckets' all_reduces with nothing else to do. Each is the median
over the rounds, in which they take turns, of the slowest rank. 1: the step takes no longer than without communication.
0: it takes longer by all that the communication takes alone. Below 0: the two disturb each other. On a machine that has
a core per compute thread and none besides, 0 is the most that can be expected: what carries the data is the same cores.

`--trace` is JSON for chrome://tracing or ui.perfetto.dev: a process per rank, with a line for what it computes and one
for its all_reduces, each with when it was asked for. Their times are the group's flight record's, which is always kept;
nothing is added to the steps. Gloo has no such record: there a communication hook takes the times.

Exit code: 0, 1 if a rank failed, 2 if it cannot run here.
"""

import argparse
import functools
import gc
import importlib.util
import json
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before any group: it keeps the default group that it finds when it is imported
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn.parallel import DistributedDataParallel

LAYERS, TOKENS = 8, 64
COLOURS = {"forward": "#56B4E9", "backward": "#0072B2", "wait": "#DDDDDD", "optimizer": "#999999"}
COMMUNICATION = "#D55E00"


@dataclass(frozen=True)
class Span:
    """Something a rank did; nanoseconds since 1970."""

    rank: int
    line: str  # "computation" or "communication"
    name: str
    begin: int
    end: int
    asked: int  # when it was asked for; `begin` for what is not


def make_model(parameters: float) -> nn.Module:
    """A stack of transformer layers with about as many parameters, the same weights in every process."""
    torch.manual_seed(0)
    width = max(64, round((parameters / (12 * LAYERS)) ** 0.5 / 64) * 64)
    layers = (
        nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0, batch_first=True) for _ in range(LAYERS)
    )
    return nn.Sequential(*layers)


class Training:
    """A model on random data, and what was noted of its steps."""

    def __init__(self, args: argparse.Namespace, hook: Callable[..., Any] | None = None) -> None:
        self.model = make_model(args.params)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True)
        if hook:
            self.ddp.register_comm_hook(None, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        width = next(self.model.parameters()).shape[-1]
        self.x = torch.randn(1, TOKENS, width, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.spans: list[Span] = []
        # Python finds no cycle through a parameter's hook, which therefore must not hold self, and by it the group.
        self.last_gradient = last_gradient = [0]
        for parameter in self.model[0].parameters():  # whose gradients are the last
            parameter.register_post_accumulate_grad_hook(lambda _: last_gradient.__setitem__(0, time.time_ns()))

    def step(self) -> None:
        marks = [time.time_ns()]
        self.optimizer.zero_grad()
        loss = self.ddp(self.x).square().mean()
        marks.append(time.time_ns())
        loss.backward()
        marks += [*self.last_gradient, time.time_ns()]
        self.optimizer.step()
        marks.append(time.time_ns())
        rank = dist.get_rank()
        for name, begin, end in zip(COLOURS, marks[:-1], marks[1:], strict=True):
            self.spans.append(Span(rank, "computation", name, begin, end, begin))

    def buckets(self) -> list[Tensor]:
        """Tensors as large as DDP's buckets; to be asked after the first steps, since DDP cuts them anew then."""
        sizes = self.ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        return [torch.zeros(int(size) // 4) for size in str(sizes).split(",")]


def noting_hook(spans: list[Span], group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own all_reduce, whose times it notes."""
    asked, tensor, name = time.time_ns(), bucket.buffer(), f"bucket {bucket.index()}"

    def end(future: torch.futures.Future[Any]) -> Tensor:
        spans.append(Span(dist.get_rank(), "communication", name, asked, time.time_ns(), asked))
        result: Tensor = future.value()[0]
        return result

    tensor.div_(group.size())
    return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(end)


def recorded(since: int) -> list[Span]:
    """The all_reduces that the flight record has since then."""
    import ringreduce

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "record")
        ringreduce.dump_flight_record(path)
        entries = pickle.loads(path.read_bytes())["entries"]
    found = []
    for entry in entries:
        asked, begin, end = (
            entry[f"time_{when}_ns"] for when in ("created", "discovered_started", "discovered_completed")
        )
        if asked >= since and entry["profiling_name"].endswith(":all_reduce"):
            size = 4 * sum(functools.reduce(int.__mul__, shape, 1) for shape in entry["input_sizes"])
            found.append(Span(dist.get_rank(), "communication", f"{size / 2**20:.1f} MB", begin, end, asked))
    return found


def slowest(call: Callable[[], object], repeat: int) -> float:
    """Milliseconds of a call, on average, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    taken = torch.tensor((time.perf_counter() - start) / repeat * 1e3, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def run(args: argparse.Namespace) -> None:
    """One rank, in a group that is there already; rank 0 prints and writes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group, noted = dist.group.WORLD, []
    hook = None if args.backend == "ringreduce" else functools.partial(noting_hook, noted)
    training = Training(args)
    silent = Training(args, noop_hook)
    traced = Training(args, lambda _, bucket: hook(group, bucket)) if hook else training
    for one in (training, silent, traced):
        for _ in range(3):
            one.step()
    buckets = training.buckets()

    def communicate() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    calls = {"step": training.step, "silent": silent.step, "communication": communicate}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            call()
            times[name].append(slowest(call, args.steps))
    step, without, communication = (statistics.median(times[name]) for name in calls)

    dist.barrier()
    noted.clear()
    traced.spans.clear()
    since = time.time_ns()
    for _ in range(args.steps):
        traced.step()
    spans = traced.spans + (noted if hook else recorded(since))
    gathered: list[list[Span]] = [[] for _ in range(size)]
    dist.all_gather_object(gathered, spans)
    if rank != 0:
        return
    count = sum(p.numel() for p in training.model.parameters())
    sizes = ", ".join(f"{b.nbytes / 2**20:.1f}" for b in buckets)
    print(f"{args.backend}, {size} ranks, {count / 1e6:.1f} M parameters in buckets of {sizes} MB")
    print(f"  a step            {step:8.1f} ms, {1e3 / step:.2f} a second")
    print(f"  without all_reduce{without:8.1f} ms")
    print(f"  all_reduces alone {communication:8.1f} ms")
    print(f"  hidden            {1 - (step - without) / communication:8.0%}", flush=True)
    everything = sorted((s for of_rank in gathered for s in of_rank), key=lambda s: s.begin)
    if args.trace:
        args.trace.write_text(json.dumps(chrome_trace(everything)) + "\n")
        print(f"  trace in {args.trace}")
    if args.png:
        draw(everything, args)
        print(f"  picture in {args.png}")


def chrome_trace(spans: list[Span]) -> dict[str, Any]:
    """As chrome://tracing reads it: microseconds, a process per rank, a thread per line."""
    start = min(s.begin for s in spans)
    lines = {"computation": 0, "communication": 1}
    events: list[dict[str, Any]] = []
    for rank in sorted({s.rank for s in spans}):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for line, tid in lines.items():
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": line}})
    for s in spans:
        place = {"pid": s.rank, "tid": lines[s.line], "ts": (s.begin - start) / 1e3, "dur": (s.end - s.begin) / 1e3}
        waited = {"asked_us_before": (s.begin - s.asked) / 1e3} if s.line == "communication" else {}
        events.append({"ph": "X", "name": s.name, **place, "args": waited})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(spans: list[Span], args: argparse.Namespace) -> None:
    """Two lines a rank, over time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    start, ranks = min(s.begin for s in spans), sorted({s.rank for s in spans})
    rows = [(rank, line) for rank in ranks for line in ("computation", "communication")]
    figure = Figure(figsize=(11, 1.2 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for s in spans:
        y = rows.index((s.rank, s.line))
        colour = COLOURS.get(s.name, COMMUNICATION)
        if s.asked < s.begin:
            axes.barh(y, (s.begin - s.asked) / 1e6, 0.15, (s.asked - start) / 1e6, color=COMMUNICATION)
        axes.barh(y, (s.end - s.begin) / 1e6, 0.8, (s.begin - start) / 1e6, color=colour, edgecolor="white", lw=0.5)
    axes.set_yticks(range(len(rows)), [f"rank {rank}, {line}" for rank, line in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(f"{args.steps} steps, {args.backend}, buckets of up to {args.bucket_mb:g} MB", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    patches.append(Patch(color=COMMUNICATION, label="all_reduce of a bucket (thin: waits for its turn)"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8)
    figure.savefig(args.png, dpi=150)


def start_rank(rank: int, args: argparse.Namespace, port: int) -> None:
    """One process of those that this script starts itself."""
    meet(args, store=dist.TCPStore("localhost", port), rank=rank, world_size=args.ranks)


def meet(args: argparse.Namespace, **meeting: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(args.backend, **meeting)
    run(args)
    gc.collect()  # models in cycles hold the group; a thread of Gloo that frees tensors at the exit aborts
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--ranks", type=int, help="to start here (default 2; not with torchrun)")
    option("--backend", choices=("ringreduce", "gloo"), default="ringreduce")
    option("--params", type=float, default=25e6, help="of the model (default 25e6)")
    option("--bucket-mb", type=float, default=25, help="DDP's bucket_cap_mb (default 25)")
    option("--steps", type=int, default=3, help="in a round, and in the pictures (default 3)")
    option("--rounds", type=int, default=5, help="turns of each measurement (default 5)")
    option("--trace", type=Path, metavar="FILE.json", help="write a Chrome trace")
    option("--png", type=Path, metavar="FILE.png", help="draw the timeline")
    args = parser.parse_args()
    world = os.environ.get("WORLD_SIZE")
    if world and args.ranks:
        parser.error(f"--ranks is for runs without torchrun, which has started {world} ranks already")
    args.ranks = int(world or args.ranks or 2)
    if args.ranks < 2 or args.steps < 1 or args.rounds < 1 or args.params <= 0 or args.bucket_mb <= 0:
        parser.error("need 2 --ranks or more, --steps and --rounds of 1 or more, --params and --bucket-mb above 0")
    if args.backend == "ringreduce" and importlib.util.find_spec("ringreduce") is None:
        parser.error("ringreduce is not installed: pip install -e . (or --backend gloo)")
    if args.png and importlib.util.find_spec("matplotlib") is None:
        parser.error("--png needs matplotlib: pip install matplotlib")
    for path in filter(None, (args.trace, args.png)):
        path.parent.mkdir(parents=True, exist_ok=True)
    if world:
        meet(args)
        return 0
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    try:
        spawn(start_rank, (args, store.port), nprocs=args.ranks)
    except ProcessException as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
