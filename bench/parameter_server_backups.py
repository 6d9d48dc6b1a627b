"""What a backup costs, and how soon calls go on when a server is killed. All on one host.

    python bench/parameter_server_backups.py                         64 MB, AdamW; then 100 kills
    python bench/parameter_server_backups.py --kills 500 --size 4K

Cost: steps of push_pull in sync with backups=1 and without, by turns, in groups of their own. A step is as
bench/parameter_server.py has it, and every rank is a worker and a server.

Kills: three servers, in turn with backups, and two workers, in processes of their own. The value is its own history:
worker w's i-th push adds 1 to element (w, i), so that a pull shows which pushes it has. A server is killed by SIGKILL
at a random moment. `resume` is the longest time that a worker's call took, of all its pushes and pulls. Exit code: 1 if
a push was lost or applied twice.
"""

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from typing import Any

import harness
import torch
import torch.distributed as dist
from parameter_server import bytes_of

import ringreduce.parameter_server as ps

STEPS, SERVERS, WORKERS, PUSHES = 5, 3, 2, 400
MODES = (ps.sync(), ps.asynchronous(), ps.ssp(1))


def cost(size: int, laps: int) -> tuple[list[float], list[float]]:
    """Seconds of a step without and with backups, by lap."""
    torch.set_num_threads(1)
    store = dist.distributed_c10d._get_default_store()
    found: tuple[list[float], list[float]] = ([], [])
    kvs, tensors = [], []
    for backups in (0, 1):
        place = {"rank": dist.get_rank(), "size": dist.get_world_size(), "name": f"with {backups}"}
        kv = ps.join(store, **place, backups=backups, window=max(64 << 20, 2 * size), memory=8 * size + (1 << 20))
        w = torch.zeros(size // 4)
        kv.init("w", w, update=ps.optimizer(torch.optim.AdamW, lr=1e-3))
        kvs.append(kv)
        tensors.append((torch.ones(size // 4), w))
    for lap in range(laps + 1):
        for backups in (0, 1):
            gradient, w = tensors[backups]
            kvs[backups].barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                kvs[backups].push_pull("w", gradient, out=w).wait()
            if lap > 0:  # the first touches memory
                found[backups].append((time.perf_counter() - begin) / STEPS)
    for kv in kvs:
        kv.barrier()
        kv.leave()
    return found


def serve(folder: str, rank: int, pipe: Any) -> None:
    store = dist.FileStore(f"{folder}/store", -1)
    with ps.serve(store, rank=rank, size=SERVERS, backups=1, memory=16 << 20, window=4 << 20, block_bytes=1024) as it:
        pipe.send("serves")
        it.wait()


def work(folder: str, pipe: Any, mode: ps.Mode) -> None:
    torch.set_num_threads(1)
    longest, faults = 0.0, ""
    store = dist.FileStore(f"{folder}/store", -1)
    with ps.join(store, role="worker", workers=WORKERS, window=4 << 20) as kv:
        me = kv.worker - SERVERS
        value = torch.zeros(WORKERS, PUSHES)
        kv.init("h", value, update=ps.reduce("sum"), mode=mode)
        kv.barrier()
        pipe.send("begins")
        before, push = value.clone(), torch.zeros(WORKERS, PUSHES)
        for i in range(PUSHES):
            push.zero_()
            push[me, i] = 1
            begin = time.perf_counter()
            kv.push("h", push).wait()
            if mode.mode == "ssp":
                kv.clock()
            kv.pull("h", value)
            longest = max(longest, time.perf_counter() - begin)
            if value.max() > 1 or (value < before).any() or value[me].sum() != i + 1:
                faults += f"worker {me} after push {i}; "
            before.copy_(value)
        kv.barrier()
        kv.pull("h", value)
        if (value != 1).any():
            faults += f"worker {me} in the end; "
    pipe.send((longest, faults))


def kill_one(mode: ps.Mode, chance: random.Random) -> tuple[float, str, bool]:
    """The longest time of a call, what was wrong, and whether the server was killed while workers pushed."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for body, arguments in [(serve, (rank,)) for rank in range(SERVERS)] + [(work, ())] * WORKERS:
            ours, theirs = multiprocessing.Pipe()
            more = (mode,) if body is work else ()
            process = multiprocessing.Process(target=body, args=(folder, *arguments, theirs, *more))
            process.start()
            started.append((process, ours))
        for _, pipe in started:
            pipe.recv()
        time.sleep(chance.uniform(0, 0.15))
        victim = started[chance.randrange(SERVERS)][0]
        os.kill(victim.pid or 0, signal.SIGKILL)
        within = not any(pipe.poll() for _, pipe in started[SERVERS:])
        results = [pipe.recv() for _, pipe in started[SERVERS:]]
        for process, _ in started:
            process.join()
        return max(longest for longest, _ in results), "".join(faults for _, faults in results), within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="of the cost")
    parser.add_argument("--size", default="64M")
    parser.add_argument("--laps", type=int, default=9)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.laps:
        alone, backed = harness.start_ranks(args.workers, cost, bytes_of(args.size), args.laps)
        ratio = statistics.median(b / a for a, b in zip(alone, backed, strict=True))
        print(f"{args.workers} workers and servers, {args.size} of parameters, AdamW; medians of {args.laps} laps")
        print(f"a step                 {1e3 * statistics.median(alone):8.2f} ms")
        print(f"a step with a backup   {1e3 * statistics.median(backed):8.2f} ms, {ratio:.2f} times as long")
    chance = random.Random(args.seed)
    wrong = 0
    for mode in MODES:
        trials = [kill_one(mode, chance) for _ in range(args.kills // len(MODES))]
        for _, faults, _ in trials:
            wrong += bool(faults)
            if faults:
                print(f"WRONG: {faults}")
        resumed = sorted(longest for longest, _, within in trials if within)
        if resumed:
            print(
                f"{mode.mode:12} {len(trials)} kills, {len(resumed)} while workers pushed; the longest call took "
                f"{1e3 * statistics.median(resumed):.0f} ms (median), {1e3 * resumed[-1]:.0f} ms (worst)"
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
