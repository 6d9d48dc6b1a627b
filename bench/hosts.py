"""all_reduce between hosts next to Gloo's, and by the dtype on the wire, in namespaces (tests/net/network.py).

    python bench/hosts.py --hosts 4 --rate 1gbit --sizes 64M                          a wire's bandwidth
    python bench/hosts.py --hosts 2 --ranks 2 --rate 1gbit --sizes 64M                ranks that share a host
    python bench/hosts.py --hosts 4 --delay 0.005 --sizes 8 1K --collectives all_reduce barrier
    python bench/hosts.py --rate 100mbit --sizes 16M --ways ringreduce bfloat16 int8 int4

Needs root and iproute2. Each of --hosts has --ranks and --interfaces, of a --rate as tc writes it. --delay is in
seconds from host to host, --loss the share of frames that are lost. --ways are direct calls of ringreduce, those with a
`wire_dtype`, and dist.* with Gloo, which has the first interface only. With --no-feedback nothing is kept of what
rounding cuts off. In each of --rounds every way has a turn of as many calls as take --seconds, 3 at least, each after a
barrier; an untimed one goes before. A turn's time is the median over the calls of the slowest rank's.

    us        the rounds' median, least and most
    wrong     elements that differ from the sum by more than the wire's rounding, on any rank, in the last call of turns
    out/byte  what the host that sent most has sent in a turn / its calls / bytes; with headers, acknowledgements, and
              the barriers
    line      the bytes that must leave a host, 2(H-1)/H x bytes over H hosts, / us, as a share of the goodput of one
              interface by iperf3, if there is one: the better of that before and after the rows
    x gloo, x ringreduce    the time of Gloo, and of float32 on the wire, over that of the row in the same round, the
              rounds' median
"""

import gc
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import harness
import torch
import torch.distributed as dist

sys.path[1:1] = [str(harness.ROOT), str(harness.ROOT / "tests")]  # ringreduce, if not installed, and the network

from net.network import Network, unavailable  # noqa: E402
from net.ranks import Rank, RankFailed, Ranks  # noqa: E402

Collective = Literal["all_reduce", "barrier"]
Way = Literal["ringreduce", "gloo", "bfloat16", "int8", "int4"]
ROUNDED = {"bfloat16": 2**-8, "int8": 1 / 127, "int4": 1 / 7}
"""By dtype on the wire: what rounding may change a value by, as a share of the largest one."""

LEAST_CALLS = 3  # in a turn
PERIOD = 65521  # of the values


def serve(me: Rank, feedback: bool) -> None:
    """Makes the calls of one turn after another, as it is told, until there is none."""
    import ringreduce

    with me.join(backend="gloo", timeout=harness.TIMEOUT.total_seconds()):
        ours = dist.new_group(backend="ringreduce", timeout=harness.TIMEOUT)
        rests = {name: ringreduce.Feedback() if feedback else None for name in ROUNDED}

        def all_reduce(way: str, tensor: torch.Tensor) -> object:
            if way == "gloo":
                return dist.all_reduce(tensor)
            if way == "ringreduce":
                return ringreduce.all_reduce(tensor, group=ours)
            return ringreduce.all_reduce(tensor, group=ours, wire_dtype=way, feedback=rests[way])

        me.report(None)
        gc.disable()
        while order := me.hear():
            way, count, calls = order
            values = torch.arange(count).add_(me.rank).remainder_(PERIOD).float()
            tensor, times = torch.empty_like(values), []
            for _ in range(1 + calls):
                tensor.copy_(values)
                ringreduce.barrier(ours)
                begin = time.perf_counter()
                if count:
                    all_reduce(way, tensor)
                else:
                    dist.barrier() if way == "gloo" else ringreduce.barrier(ours)
                times.append(time.perf_counter() - begin)
            me.report((times[1:], wrong(tensor, me.size, ROUNDED.get(way, 0.0))))


def wrong(tensor: torch.Tensor, ranks: int, rounding: float) -> int:
    """Elements that are not the sum; each rank rounds its own, what it passes on, and what feedback adds."""
    expected = sum(torch.arange(len(tensor)).add_(rank).remainder_(PERIOD).float() for rank in range(ranks))
    return int(((tensor - expected).abs() > 2 * ranks * rounding * PERIOD).sum())


def rows_of(
    turn: Callable[[str, int], tuple[float, float, int]], ways: Sequence[str], rounds: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """A row of each way, without what depends on the collective. `turn` gives us, bytes and wrong elements."""
    calls = {way: max(LEAST_CALLS, int(seconds * 1e6 / turn(way, LEAST_CALLS)[0])) for way in ways}
    turns: dict[str, list[tuple[float, float, int]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 else ways[::-1]:
            turns[way].append(turn(way, calls[way]))
    for way in ways:
        times, sent, differ = (list(each) for each in zip(*turns[way], strict=True))
        row = {"way": way, "us": statistics.median(times), "least": min(times), "most": max(times)}
        row |= {"wrong": sum(differ), "times_us": times, "sent": statistics.median(sent)}
        for other in ("gloo", "ringreduce"):
            if other in ways and way not in ("gloo", other):
                both = zip(turns[other], times, strict=True)
                row[f"x {other}"] = statistics.median(theirs / mine for (theirs, *_), mine in both)
        yield row


def goodput(network: Network) -> float:
    """Bytes a second from host 0 to host 1 by one TCP connection, its first second left out; 0 without iperf3."""
    if not shutil.which("iperf3"):
        return 0.0
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    server = network.popen(1, ["iperf3", "--server", "--one-off", "--forceflush"], **pipe)
    assert server.stdout
    while "listening" not in (line := server.stdout.readline()):
        if not line:
            raise OSError("iperf3 --server has ended")
    client = ["iperf3", "--client", network.address(1), "--omit", "1", "--time", "2", "--json"]
    report = json.loads(network.popen(0, client, **pipe).communicate()[0])
    server.communicate()
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8


def hosts(
    hosts: int = 2,
    ranks: int = 1,
    rate: str = "",
    delay: float = 0.0,
    loss: float = 0.0,
    interfaces: int = 1,
    collectives: tuple[Collective, ...] = ("all_reduce",),
    sizes: tuple[harness.Bytes, ...] = (8, 1 << 10, 64 << 20),
    ways: tuple[Way, ...] = ("ringreduce", "gloo"),
    no_feedback: bool = False,
    rounds: int = 5,
    seconds: float = 0.3,
) -> Iterator[dict[str, Any]]:
    if hosts < 2 or min(ranks, interfaces, rounds) < 1 or seconds <= 0 or min(sizes) < 4:
        raise harness.CannotRun("need 2 --hosts, 1 of --ranks, --interfaces and --rounds, and --sizes of 4 B, or more")
    if reason := unavailable():
        raise harness.CannotRun(reason)
    found = []
    with Network(hosts, rate or None, delay, loss, interfaces) as network:
        goodputs = [goodput(network)]
        with Ranks(network, ranks, serve, not no_feedback, timeout=harness.TIMEOUT.total_seconds()) as all_ranks:

            def turn(size: int, way: str, calls: int) -> tuple[float, float, int]:
                before = [network.bytes_out(host) for host in range(hosts)]
                all_ranks.tell((way, size // 4, calls))
                times, differ = zip(*all_ranks.reports(), strict=True)
                sent = max(network.bytes_out(host) - start for host, start in enumerate(before))
                slowest = statistics.median(map(max, zip(*times, strict=True)))
                return 1e6 * slowest, sent / (1 + calls), sum(differ)

            try:
                all_ranks.reports()
                for collective in collectives:
                    for size in sizes if collective == "all_reduce" else (0,):
                        only = ways if size else [way for way in ways if way not in ROUNDED]
                        for row in rows_of(lambda *what, size=size: turn(size, *what), only, rounds, seconds):
                            found.append({"collective": collective, "bytes": size, **row})
            except RankFailed as error:
                yield {"note": str(error)}
        goodputs.append(goodput(network))
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    yield {"header": {"network": network.carrier, "TCP": congestion, "goodput": goodputs}}
    for row in found:
        sent, size = row.pop("sent"), row["bytes"]
        if size:
            row["out/byte"] = sent / size
        if size and max(goodputs):
            row["line"] = 2 * size * (hosts - 1) / hosts / row["us"] * 1e6 / max(goodputs)
        yield row


if __name__ == "__main__":
    sys.exit(harness.main(hosts))
