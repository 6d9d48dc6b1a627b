"""A DDP training step and a tensor-parallel decoder layer: ringreduce against Gloo, one compute thread a rank.

    python bench/training.py                                       both, 2 ranks on this machine
    python bench/training.py ddp --bucket-mb 1 25 --tokens 64 256
    python bench/training.py tensor-parallel --compile --ranks 4

Every rank holds a group of either backend; the two take turns, round by round, in the same processes. A figure is the
median over the rounds of the slowest rank's mean of a round; "vs" is the median of the rounds' ratios of Gloo's step to
this backend's. Exit code: 0, 1 if a rank failed or a result was wrong, 2 if the request makes no sense here.

ddp: a stack of transformer layers and SGD; a step is forward, backward and optimizer.
  step    with DDP, its buckets all-reduced while backward goes on
  silent  the same with DDP's noop_hook: buckets are filled, and then left as they are
  alone   the same under no_sync: without DDP's buckets
  comm    the same buckets' all_reduces with nothing else to do
  hidden  of the communication, 1 - (step - silent) / comm. 1: the step takes no longer than without communication.
          0: it takes longer by all that the communication takes alone, which is the most to expect where each core has
          a rank that computes; below 0: the two disturb each other.

tensor-parallel: one decoder layer as in Llama, cut by DTensor's parallelize_module, bfloat16, one sequence, token by
token with a cache of keys and values. A step is a token.
  alone   this rank's share of the layer as plain modules, without DTensor and communication
  comm    its two all_reduces by themselves, synchronous
"""

import argparse
import dataclasses
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

BACKENDS = ("ringreduce", "gloo")
LAYERS = 8  # of the DDP network
SEQUENCE = 64  # tokens; fewer where a rank has fewer
HEAD = 64  # features of an attention head
GENERATED = 16  # tokens in a timed call

Measurements = dict[str, harness.Call]
Times = dict[str, list[float]]  # of each measurement, seconds by round


@dataclass(frozen=True)
class Row:
    """One backend in one case; milliseconds."""

    part: str
    case: str
    ranks: int
    backend: str
    step: float
    silent: float | None
    alone: float
    comm: float
    rate: float  # steps or tokens a second
    speedup: float
    hidden: float | None


def measure_ddp(groups: dict[str, dist.ProcessGroup], args: argparse.Namespace) -> Iterator[list[Row]]:
    for bucket_mb in args.bucket_mb:
        for tokens in args.tokens:
            models = {backend: network(args.params) for backend in groups}
            calls = {
                backend: ddp_calls(model, groups[backend], bucket_mb, tokens, args.params)
                for backend, model in models.items()
            }
            times = alternate(calls, args.rounds, args.repeat)
            ours, theirs = (nn.utils.parameters_to_vector(models[backend].parameters()) for backend in BACKENDS)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
            case = f"{len(ours) / 1e6:.1f} M, buckets {bucket_mb:g} MB, {tokens} tokens"
            yield rows("ddp", case, times, 1)


def network(parameters: float) -> nn.Module:
    """About as many, in layers of 12 width^2; the same in every process."""
    torch.manual_seed(0)
    width = max(HEAD, round((parameters / (12 * LAYERS)) ** 0.5 / HEAD) * HEAD)
    return nn.Sequential(
        *(
            nn.TransformerEncoderLayer(width, width // HEAD, 4 * width, dropout=0, batch_first=True)
            for _ in range(LAYERS)
        )
    )


def ddp_calls(
    model: nn.Module, group: dist.ProcessGroup, bucket_mb: float, tokens: int, parameters: float
) -> Measurements:
    def steps(trained: nn.Module) -> tuple[DistributedDataParallel, harness.Call]:
        ddp = DistributedDataParallel(
            trained, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-6)
        width = next(trained.parameters()).shape[-1]
        noise = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(-(-tokens // SEQUENCE), min(tokens, SEQUENCE), width, generator=noise)

        def step() -> None:
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()

        return ddp, step

    ddp, step = steps(model)
    silent_ddp, silent = steps(network(parameters))  # models of their own, as they drift apart
    silent_ddp.register_comm_hook(None, noop_hook)
    local_ddp, local = steps(network(parameters))

    def alone() -> None:
        with local_ddp.no_sync():
            local()

    for _ in range(3):  # DDP cuts its buckets anew after the first, and says so after the third
        step()
    sizes = str(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]).split(",")
    buckets = [torch.zeros(int(size) // 4) for size in sizes]

    def comm() -> None:
        for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]:
            work.wait()

    return {"step": step, "silent": silent, "alone": alone, "comm": comm}


class Attention(nn.Module):
    """Of one token over a cache of keys and values: the heads of one of `ranks` ranks."""

    def __init__(self, hidden: int, context: int, ranks: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, hidden // HEAD // ranks, context, HEAD))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = (layer(x).view(1, 1, -1, HEAD).transpose(1, 2) for layer in (self.q, self.k, self.v))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = (torch.arange(self.keys.shape[2]) <= position).view(1, 1, 1, -1)
        attended = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, seen)
        return self.o(attended.transpose(1, 2).reshape(1, 1, -1))


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = hidden * 11 // 4
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    def __init__(self, hidden: int, context: int, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.feed_forward = Attention(hidden, context, ranks), FeedForward(hidden)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), position)
        return x + self.feed_forward(self.norm2(x))


BY_COLUMNS = ("attention.q", "attention.k", "attention.v", "feed_forward.gate", "feed_forward.up")
BY_ROWS = ("attention.o", "feed_forward.down")


def measure_tensor_parallel(groups: dict[str, dist.ProcessGroup], args: argparse.Namespace) -> Iterator[list[Row]]:
    import ringreduce

    calls, outputs = {}, {}
    for backend, group in groups.items():
        calls[backend], generate = tensor_parallel_calls(group, args)
        before = ringreduce.stats()
        outputs[backend] = generate()
        # DTensor caches by mesh, and takes meshes for equal that differ in their group only.
        assert (ringreduce.stats() != before) == (backend == "ringreduce"), f"{backend} did not run on its own group"
    torch.testing.assert_close(*outputs.values(), rtol=0.05, atol=0.05)
    case = f"hidden {args.hidden}, bf16, {'compiled' if args.compile else 'eager'}"
    yield rows("tensor-parallel", case, alternate(calls, args.rounds, args.repeat), GENERATED)


def tensor_parallel_calls(
    group: dist.ProcessGroup, args: argparse.Namespace
) -> tuple[Measurements, Callable[[], Tensor]]:
    """What is timed, of GENERATED tokens each, and the step with its result."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layer, share = (DecoderLayer(args.hidden, args.context, ranks).bfloat16() for _ in range(2))
    for name in (*BY_COLUMNS, *BY_ROWS):
        linear = share.get_submodule(name)
        part = linear.weight.detach().chunk(ranks, 0 if name in BY_COLUMNS else 1)[rank]
        linear.weight = nn.Parameter(part.contiguous())
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(dist.get_backend(group),))
    parallelize_module(
        layer, mesh, {name: ColwiseParallel() for name in BY_COLUMNS} | {name: RowwiseParallel() for name in BY_ROWS}
    )
    if args.compile:
        layer.compile()
        share.compile()
    x = torch.randn(1, 1, args.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = [torch.tensor([args.context // 2 + token]) for token in range(GENERATED)]
    message = torch.zeros_like(x)

    @torch.no_grad()
    def generate(module: nn.Module) -> Tensor:
        y = x
        for position in positions:
            y = nn.functional.rms_norm(module(y, position), (args.hidden,))
        return y

    def comm() -> None:
        for _ in range(2 * GENERATED):
            dist.all_reduce(message, group=group)

    step = lambda: generate(layer)  # noqa: E731
    return {"step": step, "alone": lambda: generate(share), "comm": comm}, step


def alternate(calls: dict[str, Measurements], rounds: int, repeat: int) -> dict[str, Times]:
    """Each call `repeat` times in a row, in turn with the others; by backend."""
    times: dict[str, Times] = {backend: {name: [] for name in of_backend} for backend, of_backend in calls.items()}
    for of_backend in calls.values():
        for call in of_backend.values():
            call()
    for _ in range(rounds):
        for backend, of_backend in calls.items():
            for name, call in of_backend.items():
                call()
                times[backend][name].append(harness.seconds(call, repeat))
    return times


def rows(part: str, case: str, times: dict[str, Times], steps: int) -> list[Row]:
    """One a backend; a timed call is as many steps."""
    found = []
    for backend, measured in times.items():
        ms = {name: statistics.median(values) / steps * 1e3 for name, values in measured.items()}
        ratios = [g / s for g, s in zip(times["gloo"]["step"], measured["step"], strict=True)]
        silent = ms.get("silent")
        hidden = None if silent is None else 1 - (ms["step"] - silent) / ms["comm"]
        found.append(
            Row(
                part,
                case,
                dist.get_world_size(),
                backend,
                ms["step"],
                silent,
                ms["alone"],
                ms["comm"],
                1e3 / ms["step"],
                statistics.median(ratios),
                hidden,
            )
        )
    return found


PARTS = {"ddp": measure_ddp, "tensor-parallel": measure_tensor_parallel}


def measure(args: argparse.Namespace) -> list[Row]:
    """One rank, which returns all rows; rank 0 prints them, case by case."""
    groups = {backend: dist.new_group(backend=backend, timeout=harness.TIMEOUT) for backend in BACKENDS}
    found: list[Row] = []
    for part in args.parts:
        for case in PARTS[part](groups, args):
            found += case
            if dist.get_rank() == 0:
                print("\n".join(map(format_row, case)), flush=True)
    return found


HEADER = (
    f"{'part':15} {'case':36} {'ranks':>5} {'backend':10} {'step':>8} {'silent':>8} {'alone':>8} {'comm':>8} "
    f"{'per s':>8} {'vs':>6} {'hidden':>7}"
)


def format_row(row: Row) -> str:
    silent = "-" if row.silent is None else f"{row.silent:.2f}"
    hidden = "-" if row.hidden is None else f"{row.hidden:.0%}"
    return (
        f"{row.part:15} {row.case:36} {row.ranks:5} {row.backend:10} {row.step:8.2f} {silent:>8} {row.alone:8.2f} "
        f"{row.comm:8.3f} {row.rate:8.2f} {row.speedup:5.2f}x {hidden:>7}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("parts", nargs="*", metavar="PART", help="ddp, tensor-parallel (default both)")
    option("--ranks", type=int, default=2, help="to start here (default 2)")
    option("--rounds", type=int, default=5, help="turns that each measurement takes (default 5)")
    option("--repeat", type=int, default=3, help="calls in a turn (default 3)")
    option("--params", type=float, default=25e6, help="ddp: of the model (default 25e6)")
    option("--bucket-mb", type=float, nargs="+", default=[25], help="ddp: bucket_cap_mb (default 25, as DDP's)")
    option("--tokens", type=int, nargs="+", default=[32, 64], help="ddp: in a rank's batch (default 32 64)")
    option("--hidden", type=int, default=1024, help="tensor-parallel: width of the layer (default 1024)")
    option("--context", type=int, default=512, help="tensor-parallel: tokens that the cache holds (default 512)")
    option("--compile", action="store_true", help="tensor-parallel: by torch.compile; needs a C++ compiler")
    option("--json", type=Path, metavar="FILE", help="write header and rows")
    args = parser.parse_args()
    args.parts = args.parts or list(PARTS)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {unknown.pop()!r}; parts are {', '.join(PARTS)}")
    if min(args.ranks - 1, args.rounds, args.repeat, *args.tokens) < 1 or min(args.params, *args.bucket_mb) <= 0:
        parser.error("need 2 --ranks or more, --rounds, --repeat, --tokens of 1 or more, --params, --bucket-mb above 0")
    if args.hidden < 1 or args.hidden % (4 * HEAD * args.ranks) or args.context < 2 * GENERATED:
        parser.error(
            f"need --hidden in multiples of {4 * HEAD * args.ranks} for {args.ranks} ranks, --context {2 * GENERATED} "
            "or more"
        )
    if importlib.util.find_spec("ringreduce") is None:
        parser.error("ringreduce is not installed: pip install -e .")
    header = harness.origin("training step and decoder layer, ringreduce against Gloo")
    print("\n".join(f"# {name:9} {text}" for name, text in header.items()))
    header["method"] = (__doc__ or "").splitlines()
    print(HEADER, flush=True)
    found = harness.start_ranks(args.ranks, measure, args)
    if args.json:
        report = {"header": header, "rows": [dataclasses.asdict(row) for row in found]}
        harness.save(args.json, report)
        print(f"# JSON in {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
