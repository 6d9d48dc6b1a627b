"""A rank is killed while the others' main threads are busy with the driver: do they name it, and how soon?

    python -m bench.gpu.faults --json faults.json

Three processes share a GPU. Two of them call all_reduce, and then do nothing, load kernels, or queue thousands of
launches behind the call. The third never calls, and is killed. A row has the seconds from the kill to the error on each
survivor; another error, another culprit or none is wrong.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu import driver, reports
from bench.gpu.processes import Processes

RANKS, VICTIM = 3, 1
NAMED_S = 1.0  # at most, from the kill to the error
LAUNCHES = 2000
COUNT = 100_003
HANGS = 40.0  # seconds after which a survivor counts as hanging


def waits(x: torch.Tensor, _: Callable[[], None]) -> None:
    """Nothing else: the next call is the first to raise."""
    while True:
        dist.all_reduce(x)
        time.sleep(0.001)


def loads_kernels(x: torch.Tensor, load: Callable[[], None]) -> None:
    while True:
        load()
        dist.all_reduce(x)


def queues_launches(x: torch.Tensor, _: Callable[[], None]) -> None:
    y = torch.zeros(16, device="cuda")
    for _launch in range(LAUNCHES):
        y.add_(1)
    waits(x, lambda: None)


WAYS = {"waits": waits, "loads kernels": loads_kernels, "queues launches": queues_launches}


def rank_main(pipe: Any, rank: int, port: int, way: str, mode: str, image: bytes) -> None:
    import ringreduce
    from ringreduce.errors import RingReduceError

    torch.cuda.set_device(0)
    options: Any = ringreduce.Options(gpu_transport="peer", dump_when_broken=0, engine=f"gpu_mode={mode}")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=HANGS / 2)
    dist.init_process_group("ringreduce", store=store, rank=rank, world_size=RANKS, timeout=limit, pg_options=options)
    x = torch.ones(COUNT, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    pipe.send("ready")
    pipe.recv()
    if rank == VICTIM:
        time.sleep(2 * HANGS)
    gpu, launch_on = driver.Gpu(0), torch.cuda.Stream().cuda_stream

    def load() -> None:
        if image:
            gpu.kernels(image)(launch_on, "probe_nothing", driver.Probe())

    dist.all_reduce(x)
    try:
        WAYS[way](x, load)
    except RingReduceError as error:
        pipe.send((time.monotonic(), type(error).__name__, error.culprit, str(error)))
    os._exit(0)  # what is queued may hang, and so would an orderly end


def kill_one(stand_in: bool, way: str, mode: str, image: bytes) -> dict[str, Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mains = [(rank_main, rank, store.port, way, mode, image) for rank in range(RANKS)]
    found: dict[str, Any] = {"way": way, "mode": mode, "seconds": {}, "wrong": 0}
    with Processes(stand_in, mains) as ranks:
        for rank in range(RANKS):
            ranks.hear(rank)
        for rank in range(RANKS):
            ranks.tell(rank, "go")
        time.sleep(0.3)  # they are in the call, and busy
        killed = time.monotonic()
        ranks.kill(VICTIM)
        for rank in (rank for rank in range(RANKS) if rank != VICTIM):
            try:
                when, kind, culprit, text = ranks.hear(rank, HANGS)
            except (TimeoutError, EOFError, RuntimeError) as failure:
                found["wrong"], found[f"rank {rank}"] = found["wrong"] + 1, f"no error: {failure}"
                continue
            found["seconds"][rank] = round(when - killed, 3)
            if (kind, culprit) != ("PeerLost", VICTIM):
                found["wrong"], found[f"rank {rank}"] = found["wrong"] + 1, f"{kind} of {culprit}: {text}"
    return found


def main() -> int:
    parser = reports.parser(__doc__)
    parser.add_argument("--modes", nargs="+", choices=("steps", "run"), default=("steps", "run"))
    args = parser.parse_args()
    report = reports.begin(args, "a rank is killed while the others are busy with the driver")
    properties = torch.cuda.get_device_properties(0)
    with tempfile.TemporaryDirectory() as folder:
        image = driver.image(args.stand_in, (properties.major, properties.minor), Path(folder))
    if not image:
        report.note("loading kernels: there is no nvcc to make one")
    for mode in args.modes:
        for way in WAYS:
            if way == "loads kernels" and not image:
                continue
            row = kill_one(args.stand_in, way, mode, image)
            slowest = max(row["seconds"].values(), default=HANGS)
            report.row(f"{mode}, survivor {way}: named after {row['seconds']} s, {row['wrong']} wrong", **row)
            report.bar(f"{mode}, survivor {way}: seconds until the dead rank is named", slowest, at_most=NAMED_S)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
