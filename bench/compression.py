"""all_reduce between two hosts by the dtype of its values on the wire, in namespaces (tests/net/network.py).

    python bench/compression.py --rate 100mbit --size 4M
    python bench/compression.py --rate 10gbit --size 64M

Needs root and iproute2. One rank a host. With `--no-feedback` nothing is kept of what rounding cuts off. In each round
every dtype has its turn, with a barrier, an untimed call and `--calls` timed ones. A round's time is the median over
the calls of the slowest rank's. Columns: the rounds' median time; speed-up, float32's time divided by this dtype's in
the same round, the rounds' median, least and most; and the bytes that the first host has sent by its interface's
counter, as a share of float32's.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import harness
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]  # ringreduce, where it is not installed, and the network

from net.network import Network, unavailable  # noqa: E402
from net.ranks import Rank, Ranks  # noqa: E402

WIRE_DTYPES = ("float32", "bfloat16", "int8", "int4")


def serve(me: Rank, count: int, calls: int, fed: bool) -> None:
    """Times the calls of one dtype after another, as it is told, until there is none."""
    import ringreduce

    values = torch.randn(count, generator=torch.Generator().manual_seed(me.rank))
    rests = {wire_dtype: ringreduce.Feedback() if fed else None for wire_dtype in WIRE_DTYPES}
    with me.join(timeout=300.0):
        me.report(None)
        while wire_dtype := me.hear():
            times = []
            ringreduce.barrier()
            for _ in range(1 + calls):
                tensor = values.clone()
                start = time.perf_counter()
                ringreduce.all_reduce(tensor, wire_dtype=wire_dtype, feedback=rests[wire_dtype])
                times.append(time.perf_counter() - start)
            me.report(times[1:])


def measure(rate: str | None, count: int, rounds: int, calls: int, fed: bool) -> dict[str, dict[str, list[float]]]:
    """By dtype: seconds of each round, and the bytes that the first host has sent in it."""
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "bytes": []} for name in WIRE_DTYPES}
    with Network(hosts=2, rate=rate) as network, Ranks(network, 1, serve, count, calls, fed, timeout=600.0) as ranks:
        ranks.reports()
        for turn in range(rounds + 1):  # the first makes links, and is not counted
            for wire_dtype in WIRE_DTYPES[:: -1 if turn % 2 else 1]:
                before = network.bytes_out(0)
                ranks.tell(wire_dtype)
                times = ranks.reports()
                if turn > 0:
                    slowest = [max(each) for each in zip(*times, strict=True)]
                    found[wire_dtype]["seconds"].append(statistics.median(slowest))
                    found[wire_dtype]["bytes"].append((network.bytes_out(0) - before) / (calls + 1))
        ranks.tell(None)
        ranks.results()
    return found


def rows_of(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    whole = found["float32"]
    rows = []
    for wire_dtype, each in found.items():
        ratios = [float32 / ours for float32, ours in zip(whole["seconds"], each["seconds"], strict=True)]
        rows.append(
            {
                "wire_dtype": wire_dtype,
                "ms": 1e3 * statistics.median(each["seconds"]),
                "speedup": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "bytes": statistics.median(each["bytes"]) / statistics.median(whole["bytes"]),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", help="of each interface, as tc has it: 100mbit (default: as fast as it goes)")
    parser.add_argument("--size", type=harness.parse_bytes, default="16M", help="bytes of float32 (default: 16M)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5, help="timed calls of a dtype in a round")
    parser.add_argument("--no-feedback", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if reason := unavailable():
        print(f"it cannot run here: {reason}", file=sys.stderr)
        return 2
    fed = not args.no_feedback
    rows = rows_of(measure(args.rate, args.size // 4, args.rounds, args.calls, fed))
    return harness.report("compression: all_reduce by wire_dtype between two namespaces", rows, args.json)


if __name__ == "__main__":
    sys.exit(main())
