"""all_reduce of ringreduce by ring, two-way ring, tree, direct exchange and its own choice, next to Gloo (and NCCL).

    python bench/ring_vs_tree.py --json ring_vs_tree.json            2 and 4 ranks on this machine
    python bench/plot.py ring_vs_tree.json ring_vs_tree.png          its picture
    torchrun --nproc-per-node=8 bench/ring_vs_tree.py --device cuda  the ranks torchrun started, on any number of hosts

The timed call is dist.all_reduce(tensor, op, group=group), from Python, one CPU thread per rank, on zeros, which stay
zeros; sums of sums would overflow. Calls follow back to back after a barrier and one untimed call, for --min-time
seconds in --rounds batches; variants take turns batch by batch. The first size is measured twice and the first
measurement dropped, to keep start-up out of the figures. --min-bytes and --max-bytes are the first and the last size,
each --factor times the one before.

    us            batch duration on the slowest rank / calls, in place
    busbw         size / us x 2(n-1)/n, GB/s, GB = 1e9 bytes
    min_us, median_us, p99_us   single calls in place, each timed on the rank where it took longest
    speedup       the --baseline's median over the variant's, in place, same run; the baseline is NCCL if it runs, or
                  Gloo
    apart_us      output.copy_(input) and then all_reduce(output), both timed: c10d's all_reduce is in place
    wrong         elements that differ from the exact result on any rank, in a call before and a call after the timing
                  of both; not counted with --no-check

Exit code: 0, 1 if any element was wrong or a rank failed, 2 if the request makes no sense here.
"""

import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import harness
import torch
import torch.distributed as dist
from torch import Tensor

Variant = Literal["ring", "bidirectional_ring", "tree", "direct", "auto", "gloo", "nccl"]
PEERS = ("gloo", "nccl")
PLACEMENTS = ("in_place", "out_of_place")


@dataclass(frozen=True)
class ExactInputs:
    """Inputs that cannot lie: integers that differ by rank, element and call, with a reduction known beforehand.

    They are drawn from a generator seeded by (call, rank) and kept so small that the result, and every partial result
    in any order, is a number of the dtype. So there is one right answer, bit for bit, and each rank computes it alone
    from the seeds. The values repeat after `PERIOD` elements, a prime: data that lands in the wrong place shows unless
    it is off by a multiple of that, which no power of two is.
    """

    PERIOD = 65521

    dtype: torch.dtype
    op: str
    ranks: int

    def fill(self, tensor: Tensor, rank: int, call: int) -> None:
        """Write into the 1-D `tensor` what `rank` contributes to the collective number `call`."""
        for part, values in self._tiles(tensor, self._pattern(rank, call)):
            part.copy_(values)

    def wrong(self, tensor: Tensor, call: int) -> int:
        """How many elements of the 1-D `tensor` differ from the reduction over all ranks of call number `call`."""
        _, combine = harness.OPS[self.op]
        expected = functools.reduce(combine, (self._pattern(rank, call) for rank in range(self.ranks)))
        if self.op == "avg":
            expected = expected // self.ranks
        return sum(int((part != values).count_nonzero()) for part, values in self._tiles(tensor, expected))

    def _pattern(self, rank: int, call: int) -> Tensor:
        exact = int(2 / torch.finfo(self.dtype).eps) if self.dtype.is_floating_point else torch.iinfo(self.dtype).max
        exact = min(exact, 2**53)
        generator = torch.Generator().manual_seed(call * self.ranks + rank)

        def integers(low: int, high: int) -> Tensor:
            return torch.randint(low, high + 1, (self.PERIOD,), generator=generator)

        if self.op == "product":  # powers of two, with signs: 1 or 2 while the product of all ranks fits, else 1
            sign = 1 - 2 * integers(0, 1) if self.dtype.is_signed else 1
            return sign * 2 ** integers(0, 1 if 2**self.ranks <= exact else 0)
        unit = self.ranks if self.op == "avg" else 1  # so that the average is an integer too
        bound = exact // (unit * self.ranks) if self.op in ("sum", "avg") else exact
        if bound == 0:
            raise ValueError(f"{self.op} over {self.ranks} ranks is not exact in {self.dtype}; use a wider one")
        signed = self.dtype.is_signed and self.op not in ("band", "bor", "bxor")
        return unit * integers(-bound if signed else 0, bound)

    def _tiles(self, tensor: Tensor, pattern: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The tensor as whole periods and a rest, each with the values that belong there."""
        values = pattern.to(tensor.device, self.dtype)
        whole = tensor.numel() // self.PERIOD * self.PERIOD
        yield tensor[:whole].view(-1, self.PERIOD), values
        yield tensor[whole:], values[: tensor.numel() - whole]


@dataclass
class Trial:
    """One variant at one size: its group, and buffers shared with the other variants."""

    group: dist.ProcessGroup
    op: dist.ReduceOp.RedOpType
    source: Tensor  # input of the out-of-place call
    output: Tensor
    buffer: Tensor  # input and output of the in-place call

    def out_of_place(self) -> None:
        self.output.copy_(self.source)
        dist.all_reduce(self.output, self.op, group=self.group)

    def in_place(self) -> None:
        dist.all_reduce(self.buffer, self.op, group=self.group)

    def wrong(self, inputs: ExactInputs, call: int) -> Tensor:
        """Wrong elements on this rank after a fresh call of each kind."""
        for tensor in (self.source, self.buffer):
            inputs.fill(tensor, dist.get_rank(), call)
        self.output.fill_(1)
        self.out_of_place()
        self.in_place()
        return torch.tensor(inputs.wrong(self.output, call) + inputs.wrong(self.buffer, call))


@dataclass(frozen=True)
class Settings:
    """The command line, checked."""

    sizes: list[int]
    dtype: str
    op: str
    device: str
    variants: tuple[Variant, ...]
    baseline: str
    schedule: harness.Schedule
    check: bool


def measure(settings: Settings) -> list[dict[str, Any]]:
    """One rank; every rank returns all rows."""
    device = torch.device(settings.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))
        torch.cuda.set_device(device)
    groups = {variant: open_group(variant) for variant in settings.variants}
    numbers = itertools.count()
    rows: list[dict[str, Any]] = []
    sizes = [settings.sizes[0], *settings.sizes]  # the first is dropped: the ranks have only just started
    progress = harness.Progress(f"{dist.get_world_size()} ranks", len(sizes), shown=dist.get_rank() == 0)
    for number, size in enumerate(sizes):
        measured = measure_size(settings, groups, size, device, numbers)
        rows += measured if number else []
        progress.advance(harness.format_bytes(size))
    return rows


def open_group(variant: Variant) -> dist.ProcessGroup:
    """A group of all ranks for this variant."""
    if variant in PEERS:
        backend, options = variant, None
    else:
        import ringreduce

        algorithms = "" if variant == "auto" else f"all_reduce:{variant}"
        backend, options = "ringreduce", ringreduce.Options(algorithms=algorithms)
    group: dist.ProcessGroup = dist.new_group(backend=backend, pg_options=options, timeout=harness.TIMEOUT)
    return group


def measure_size(
    settings: Settings,
    groups: dict[Variant, dist.ProcessGroup],
    size: int,
    device: torch.device,
    numbers: Iterator[int],
) -> list[dict[str, Any]]:
    """Check, time and check again every variant at one size; `numbers` numbers the checked calls."""
    dtype, ranks = harness.DTYPES[settings.dtype], dist.get_world_size()
    inputs, (op, _) = ExactInputs(dtype, settings.op, ranks), harness.OPS[settings.op]
    buffers = [torch.zeros(size // dtype.itemsize, dtype=dtype, device=device) for _ in range(3)]
    trials = {variant: Trial(group, op, *buffers) for variant, group in groups.items()}
    wrong = dict.fromkeys(trials, 0)

    def check() -> None:
        for variant, trial in trials.items():
            if settings.check:
                here = trial.wrong(inputs, next(numbers))
                dist.all_reduce(here)
                wrong[variant] += int(here)

    check()
    buffers[-1].zero_()
    calls: dict[tuple[str, str], harness.Call] = {
        (variant, placement): getattr(trial, placement) for variant, trial in trials.items() for placement in PLACEMENTS
    }
    timings = harness.time_alternating(calls, settings.schedule, device)
    check()
    baseline = timings.get((settings.baseline, "in_place"))
    rows = []
    for variant in trials:
        here, apart = (timings[variant, placement] for placement in PLACEMENTS)
        row = {"ranks": ranks, "bytes": size, "variant": variant, "us": here.mean}
        row |= {"busbw": size / here.mean / 1e3 * 2 * (ranks - 1) / ranks}
        row |= {"min_us": here.min, "median_us": here.median, "p99_us": here.p99}
        row |= {"speedup": baseline.median / here.median} if baseline else {}
        row |= {"apart_us": apart.mean}
        rows.append(row | ({"wrong": wrong[variant]} if settings.check else {}))
    return rows


def ring_vs_tree(
    ranks: tuple[int, ...] = (),
    min_bytes: harness.Bytes = 8,
    max_bytes: harness.Bytes = 64 << 20,
    factor: int = 8,
    dtype: str = "float32",
    op: str = "sum",
    device: Literal["cpu", "cuda"] = "cpu",
    variants: tuple[Variant, ...] = (),
    baseline: str = "",
    warmup: int = 3,
    rounds: int = 4,
    min_time: float = 0.2,
    no_check: bool = False,
) -> Iterator[dict[str, Any]]:
    if dtype not in harness.DTYPES or op not in harness.OPS:
        raise harness.CannotRun(f"--dtype is one of {' '.join(harness.DTYPES)}, --op one of {' '.join(harness.OPS)}")
    itemsize = harness.DTYPES[dtype].itemsize
    if min_bytes < itemsize or max_bytes < min_bytes or factor < 2:
        raise harness.CannotRun(f"need {itemsize} <= --min-bytes <= --max-bytes and --factor >= 2")
    if warmup < 1 or rounds < 1 or min_time <= 0:
        raise harness.CannotRun("--warmup and --rounds must be at least 1, --min-time above 0")
    if device == "cuda" and not torch.cuda.is_available():
        raise harness.CannotRun("--device cuda: torch finds no GPU here")
    world = os.environ.get("WORLD_SIZE")
    if world and ranks:
        raise harness.CannotRun(f"--ranks is for runs without torchrun, which has started {world} ranks already")
    nccl = device == "cuda" and dist.is_nccl_available()
    variants = variants or (
        "ring",
        "bidirectional_ring",
        "tree",
        "direct",
        "auto",
        "gloo",
        *(("nccl",) if nccl else ()),
    )
    if set(variants) - set(PEERS) and importlib.util.find_spec("ringreduce") is None:
        raise harness.CannotRun("ringreduce is not installed: pip install -e . (or --variants gloo)")
    baseline = baseline or ("nccl" if "nccl" in variants else "gloo")
    sizes = list(harness.sizes(min_bytes, max_bytes, factor, itemsize))
    schedule = harness.Schedule(warmup, rounds, min_time)
    settings = Settings(sizes, dtype, op, device, variants, baseline, schedule, not no_check)
    hosts = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    yield {"header": {"hosts": hosts, "device": device, "dtype": dtype, "op": op, "baseline": baseline}}
    if world:
        yield from harness.become_rank(measure, settings)
    else:
        for count in ranks or (2, 4):
            yield from harness.start_ranks(count, measure, settings)


if __name__ == "__main__":
    sys.exit(harness.main(ring_vs_tree))
