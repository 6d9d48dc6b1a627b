"""all_reduce_coalesced of many tensors against one all_reduce of as many bytes: what a list costs.

    python bench/fusion.py                   2 and 4 ranks on this machine, ringreduce and Gloo

Median time of a call on its slowest rank, in microseconds, from Python, float32, one CPU thread a rank; the four calls
of a row take turns, so that a drift of the machine hits all alike. `list`: all_reduce_coalesced; `one`: all_reduce of
one tensor of the same total size; `x one`: the ratio of the two; `singly`: all_reduce of one tensor after the other;
`gloo`: its all_reduce_coalesced. Sums are checked before the timing. Exit code: 0, 1 if a rank failed or was wrong.
"""

import argparse
import sys
from collections.abc import Sequence

import harness
import torch
import torch.distributed as dist


def resnet50() -> list[int]:
    """Elements of the 161 parameters of a ResNet-50, in order."""
    counts = [64 * 3 * 49, 64, 64]
    before = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            for convolution in ((width * before), (width * width * 9), (4 * width * width)):
                out = 4 * width if convolution == 4 * width * width and before != 4 * width else width
                counts += [convolution, out, out]
            if block == 0:
                counts += [before * 4 * width, 4 * width, 4 * width]
            before = 4 * width
    return [*counts, 2048 * 1000, 1000]


CASES = {
    "1000 x 4 KB": [1024] * 1000,
    "300 x 16 KB": [4 * 1024] * 300,
    "200 x 32 KB": [8 * 1024] * 200,
    "100 x 64 KB": [16 * 1024] * 100,
    "16 x 1 MB": [256 * 1024] * 16,
    "ResNet-50": resnet50(),
}


def measure(cases: Sequence[str], schedule: harness.Schedule) -> None:
    """One rank; rank 0 prints a row a case."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ours = dist.new_group(backend="ringreduce", timeout=harness.TIMEOUT)
    gloo = dist.new_group(backend="gloo", timeout=harness.TIMEOUT)
    for case in cases:
        counts = CASES[case]
        tensors = [torch.full((count,), float(rank + i % 7)) for i, count in enumerate(counts)]
        dist.all_reduce_coalesced(tensors, group=ours)
        for i, tensor in enumerate(tensors):
            assert tensor.eq(sum(range(ranks)) + i % 7 * ranks).all(), f"{case}: tensor {i} is wrong"
            tensor.zero_()  # and stays that; sums of sums would overflow
        one = torch.zeros(sum(counts))

        def singly(tensors: list[torch.Tensor] = tensors) -> None:
            for tensor in tensors:
                dist.all_reduce(tensor, group=ours)

        calls: dict[str, harness.Call] = {
            "list": lambda tensors=tensors: dist.all_reduce_coalesced(tensors, group=ours),
            "one": lambda one=one: dist.all_reduce(one, group=ours),
            "singly": singly,
            "gloo": lambda tensors=tensors: dist.all_reduce_coalesced(tensors, group=gloo),
        }
        timings = harness.time_alternating(calls, schedule, torch.device("cpu"))
        if rank == 0:
            times = {name: timing.median for name, timing in timings.items()}
            print(
                f"{ranks:5} {case:12} {4 * sum(counts) / 2**20:7.1f} {times['list']:10.0f} {times['one']:10.0f} "
                f"{times['list'] / times['one']:6.2f} {times['singly']:10.0f} {times['gloo']:10.0f}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="rank counts, one by one (default 2 4)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="turns that each call takes (default 5)")
    parser.add_argument("--min-time", type=float, default=1.0, help="seconds of each call in a case (default 1)")
    args = parser.parse_args()
    if min(args.ranks) < 2 or args.rounds < 1 or args.min_time <= 0:
        parser.error("need --ranks of 2 or more, --rounds of 1 or more and --min-time above 0")
    print("\n".join(f"# {name:9} {text}" for name, text in harness.machine().items()))
    print(f"{'ranks':>5} {'case':12} {'MiB':>7} {'list':>10} {'one':>10} {'x one':>6} {'singly':>10} {'gloo':>10}")
    for ranks in args.ranks:
        harness.start_ranks(ranks, measure, args.cases, harness.Schedule(2, args.rounds, args.min_time))
    return 0


if __name__ == "__main__":
    sys.exit(main())
