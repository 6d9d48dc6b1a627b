"""all_reduce between two hosts by the dtype of its values on the wire, in namespaces (tests/net/network.py).

    python bench/compression.py --rate 100mbit --size 4M
    python bench/compression.py --rate 10gbit --size 64M

Needs root and iproute2. One rank a host; interfaces have --rate, as tc has it, or are as fast as they go. With
`--no-feedback` nothing is kept of what rounding cuts off. In each round every dtype has its turn, with a barrier, an
untimed call and `--calls` timed ones. A round's time is the median over the calls of the slowest rank's. Columns: the
rounds' median time; speed-up, float32's time divided by this dtype's in the same round, the rounds' median, least and
most; and the bytes that the first host has sent by its interface's counter, as a share of float32's.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import harness
import torch

sys.path[1:1] = [
    str(harness.ROOT),
    str(harness.ROOT / "tests"),
]  # ringreduce, if not installed, and the network

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


def compression(
    rate: str = "", size: harness.Bytes = 16 << 20, rounds: int = 5, calls: int = 5, no_feedback: bool = False
) -> Iterator[dict[str, Any]]:
    if reason := unavailable():
        raise harness.CannotRun(f"it cannot run here: {reason}")
    found = measure(rate or None, size // 4, rounds, calls, not no_feedback)
    whole = found["float32"]
    for wire_dtype, each in found.items():
        ratios = [float32 / ours for float32, ours in zip(whole["seconds"], each["seconds"], strict=True)]
        yield {
            "wire_dtype": wire_dtype,
            "ms": 1e3 * statistics.median(each["seconds"]),
            "speedup": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "bytes": statistics.median(each["bytes"]) / statistics.median(whole["bytes"]),
        }


if __name__ == "__main__":
    sys.exit(harness.main(compression))
