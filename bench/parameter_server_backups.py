"""What a backup costs, and how soon calls go on when a server is killed. On one host, or between hosts.

    python bench/parameter_server_backups.py                         64 MB, AdamW; then 100 kills
    python bench/parameter_server_backups.py --kills 500 --size 4K
    python bench/parameter_server_backups.py --laps 0 --kills 0 --in-a-row 500    of one parameter server
    python bench/parameter_server_backups.py --laps 0 --kills 0 --late 64M        a backup that starts late
    python bench/parameter_server_backups.py --hosts --kills 60 --cuts 9

Cost: steps of push_pull in sync with backups=1 and without, by turns, in groups of their own. A step is as
bench/parameter_server.py has it, and every rank is a worker and a server.

Kills: three servers, in turn with backups, and two workers, in processes of their own. The value is its own history:
worker w's i-th push adds 1 to element (w, i), so that a pull shows which pushes it has. A server is killed by SIGKILL
at a random moment. `resume` is the longest time that a worker's call took, of all its pushes and pulls. Exit code: 1 if
a push was lost or applied twice.

In a row: the same, but of one parameter server. A process is killed when all servers have backups again, and another
one joins in its place, as `ringreduce serve --join` does. `pause` is the longest time that a worker's call took from
one kill to the next.

Late: a server with so many bytes of parameters and AdamW's states gets a backup while it is pushed to: the longest push
and pull until then, beside the median of those before.

--hosts: three servers and three workers on three hosts, which are network namespaces (tests/net/network.py). Server 0
is killed, or its host is cut off for good with RINGREDUCE_DEAD_AFTER=5; then the calls of its host's worker do not
count.
"""

import argparse
import logging
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from parameter_server import bytes_of

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from net.network import Network, unavailable  # noqa: E402
from net.ranks import Rank, Ranks  # noqa: E402

import ringreduce.parameter_server as ps  # noqa: E402
from ringreduce.errors import Aborted, RingReduceError  # noqa: E402

STEPS, SERVERS, WORKERS, PUSHES = 5, 3, 2, 4000
MODES = (ps.sync(), ps.asynchronous(), ps.ssp(1))
HOSTS = [1, 2, 0, 1, 2, 0]  # of three servers, then of three workers; the store is on host 0
DEAD_AFTER = 5


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


def serve_on(folder: str, rank: int, pipe: Any) -> None:
    """Says when all that it serves has backups, until it is told to end."""
    store = dist.FileStore(f"{folder}/store", -1)
    if rank < SERVERS:
        place = {"rank": rank, "size": SERVERS, "backups": 1}
        it = ps.serve(store, **place, memory=16 << 20, window=4 << 20, block_bytes=1024)
    else:
        it = ps.serve(store, joins=True)
    while not pipe.poll(0.002):
        looked, shards = time.monotonic(), it._local.serving()
        try:
            said = sorted(number for number, shard in shards.items() if shard.server.has_backup)
        except Aborted:  # one has been given to another process
            continue
        new = Path(folder, f"{rank}.new")
        new.write_text(" ".join(map(str, [looked, *said])))
        new.rename(Path(folder, str(rank)))
    it.close()


def work_on(folder: str, pipe: Any, mode: ps.Mode) -> None:
    """Pushes until it is told to end. Between two kills it says what its longest call was."""
    torch.set_num_threads(1)
    longest, faults, i = 0.0, "", 0
    store = dist.FileStore(f"{folder}/store", -1)
    with ps.join(store, role="worker", workers=WORKERS, window=4 << 20) as kv:
        me = kv.worker - SERVERS
        value, push = torch.zeros(WORKERS, 1000), torch.zeros(WORKERS, 1000)
        kv.init("h", value, update=ps.reduce("sum"), mode=mode)
        push[me] = 1
        kv.barrier()
        pipe.send("begins")
        while True:
            if pipe.poll():
                if pipe.recv() == "end":
                    break
                pipe.send((longest, faults))
                longest = 0.0
            i += 1
            begin = time.perf_counter()
            kv.push("h", push).wait()
            kv.pull("h", value)
            longest = max(longest, time.perf_counter() - begin)
            if (value[me] != i).any():
                faults += f"worker {me} has pushed {i} times, and reads {value[me].unique().tolist()}; "
    pipe.send((longest, faults))


def in_a_row(kills: int, mode: ps.Mode, chance: random.Random) -> int:
    """Returns how often something was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        servers: dict[int, tuple[Any, Any]] = {}

        def start(body: Any, *more: Any) -> tuple[Any, Any]:
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=body, args=(folder, *more[:-1], theirs, *more[-1]))
            process.start()
            return process, ours

        def said_by(rank: int) -> str:
            path = Path(folder, str(rank))
            return path.read_text() if path.exists() else "0"

        def wait_for_backups() -> None:
            begun = time.monotonic()
            deadline, served = time.monotonic() + 60, [""]
            while served != [str(number) for number in range(SERVERS)]:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"after a minute only {served} have backups")
                time.sleep(0.005)
                said = [said_by(rank).split() for rank in servers]
                served = sorted(number for when, *numbers in said if float(when) > begun for number in numbers)

        for rank in range(SERVERS + 1):
            servers[rank] = start(serve_on, rank, ())
        workers = [start(work_on, (mode,)) for _ in range(WORKERS)]
        for _, pipe in workers:
            pipe.recv()
        pauses: list[float] = []
        wrong = 0
        for kill in range(kills):
            wait_for_backups()
            for _, pipe in workers:
                pipe.send("so far")
            for _, pipe in workers:
                pipe.recv()
            doomed = chance.choice([rank for rank in servers if len(said_by(rank).split()) > 1])
            time.sleep(chance.uniform(0, 0.02))
            os.kill(servers[doomed][0].pid, signal.SIGKILL)
            servers.pop(doomed)[0].join()
            wait_for_backups()
            for _, pipe in workers:
                pipe.send("so far")
            said = [pipe.recv() for _, pipe in workers]
            pauses.append(max(longest for longest, _ in said))
            for _, faults in said:
                wrong += bool(faults)
                if faults:
                    print(f"WRONG after kill {kill}: {faults}")
            servers[SERVERS + 1 + kill] = start(serve_on, SERVERS + 1 + kill, ())
        while not all(Path(folder, str(rank)).exists() for rank in servers):
            time.sleep(0.01)
        for some in (workers, [*servers.values()]):  # servers last
            for _, pipe in some:
                pipe.send("end")
            for process, _ in some:
                process.join()
        pauses.sort()
        print(
            f"{mode.mode:12} {kills} kills in a row; the longest call took {1e3 * statistics.median(pauses):.0f} ms "
            f"(median), {1e3 * pauses[int(0.95 * len(pauses))]:.0f} ms (95%), {1e3 * pauses[-1]:.0f} ms (worst)",
            flush=True,
        )
        return wrong


def late(size: int) -> None:
    """Two processes, of which the first has the server and the other gets its backup, and this one as a worker."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", -1)
        serving = ps.serve(store, rank=0, size=1, memory=8 * size + (1 << 20), window=2 * size)
        with ps.join(store, role="worker", window=2 * size) as kv:
            w, gradient = torch.zeros(size // 4), torch.ones(size // 4)
            kv.init("w", w, update=ps.optimizer(torch.optim.AdamW, lr=1e-3))
            ours, theirs = multiprocessing.Pipe()
            other = multiprocessing.Process(target=hold, args=(folder, theirs))
            other.start()
            ours.recv()
            steps: list[float] = []

            def step() -> None:
                begin = time.perf_counter()
                kv.push_pull("w", gradient, out=w).wait()
                steps.append(time.perf_counter() - begin)

            for _ in range(10):
                step()
            before = statistics.median(steps[2:])
            steps.clear()
            processes = serving._local.manager._directory.processes()
            its = processes[max(processes)]
            thread = threading.Thread(target=serving._local.have_backup, args=(0, its, 60.0))
            thread.start()
            while thread.is_alive() or len(steps) < 5:
                step()
            print(
                f"{size >> 20} MB with AdamW: a step takes {1e3 * before:.0f} ms, the longest while a backup starts "
                f"{1e3 * max(steps):.0f} ms, with the backup {1e3 * statistics.median(steps[-2:]):.0f} ms"
            )
            ours.send("end")
            other.join()
        serving.close()


def hold(folder: str, pipe: Any) -> None:
    with ps.serve(dist.FileStore(f"{folder}/store", -1), joins=True):
        pipe.send("is there")
        pipe.recv()


def between_hosts(me: Rank, mode: ps.Mode, lasts: float) -> tuple[float, str]:
    """The longest time of a call of a worker, and what was wrong. A worker pushes for so many seconds."""
    if me.rank < 3:
        logging.getLogger("ringreduce").setLevel(logging.ERROR)  # who takes over is no news here
        options: dict[str, Any] = {"memory": 16 << 20, "window": 4 << 20, "block_bytes": 1024}
        with ps.serve(me.store, rank=me.rank, size=3, backups=1, **options) as serving:
            me.report("serves")
            serving.wait(lasts + 60)
        return 0.0, ""
    kv = ps.join(me.store, role="worker", workers=3, window=4 << 20, timeout=20.0)
    mine, longest, faults = me.rank - 3, 0.0, ""
    kv.init("h", torch.zeros(1500), update=ps.reduce("sum"), mode=mode)  # of six blocks
    push, value = torch.zeros(1500), torch.zeros(1500)
    push[mine::3] = 1
    kv.barrier()
    me.report("begins")
    until = time.monotonic() + lasts
    for i in range(100_000):
        begin = time.perf_counter()
        try:
            kv.push("h", push).wait()
            if mode.mode == "ssp":
                kv.clock()
            kv.pull("h", value)
        except RingReduceError as error:  # of a worker that was cut off
            kv.calls.close()
            return longest, "" if me.host == 1 else str(error)
        longest = max(longest, time.perf_counter() - begin)
        if (value[mine::3] != i + 1).any():
            faults += f"worker {mine} after push {i}; "
        if time.monotonic() > until:
            break
    kv.leave()
    return longest, faults


def end_one(network: Network, mode: ps.Mode, chance: random.Random, cut: bool) -> tuple[float, str]:
    env = {"RINGREDUCE_DEAD_AFTER": str(DEAD_AFTER)}
    with Ranks(network, HOSTS, between_hosts, mode, 15.0 if cut else 1.0, env=env) as ranks:
        ranks.reports()
        time.sleep(chance.uniform(0.1, 0.4))
        if cut:
            for other in (0, 2):
                network.cut(1, other)
                network.cut(other, 1)
        else:
            ranks.signal(0, signal.SIGKILL)
        results = ranks.results(but=(0, 3) if cut else (0,))[2:]
    for other in (0, 2):
        network.cut(1, other, False)
        network.cut(other, 1, False)
    return max(longest for longest, _ in results), "".join(faults for _, faults in results)


def measure_hosts(kills: int, cuts: int, chance: random.Random) -> int:
    if why := unavailable():
        raise SystemExit(f"--hosts needs network namespaces: {why}")
    wrong = 0
    with Network(hosts=3) as network:
        for cut, all_of_them in ((False, kills), (True, cuts)):
            for mode in MODES:
                trials = [end_one(network, mode, chance, cut) for _ in range(all_of_them // len(MODES))]
                wrong += sum(bool(faults) for _, faults in trials)
                for faults in (faults for _, faults in trials if faults):
                    print(f"WRONG: {faults}")
                if trials:
                    took = sorted(longest for longest, _ in trials)
                    what = f"hosts cut off (dead after {DEAD_AFTER} s)" if cut else "servers killed"
                    print(
                        f"{mode.mode:12} {len(trials)} {what}; the longest call took "
                        f"{1e3 * statistics.median(took):.0f} ms (median), {1e3 * took[-1]:.0f} ms (worst)",
                        flush=True,
                    )
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="of the cost")
    parser.add_argument("--size", default="64M")
    parser.add_argument("--laps", type=int, default=9)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--in-a-row", type=int, default=0, help="kills of one parameter server, in each mode")
    parser.add_argument("--late", help="bytes of parameters, such as 64M")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", action="store_true", help="between hosts: only kills and cuts")
    parser.add_argument("--cuts", type=int, default=9, help="hosts cut off, with --hosts")
    args = parser.parse_args()
    if args.hosts:
        return measure_hosts(args.kills, args.cuts, random.Random(args.seed))
    if args.laps:
        alone, backed = harness.start_ranks(args.workers, cost, bytes_of(args.size), args.laps)
        ratio = statistics.median(b / a for a, b in zip(alone, backed, strict=True))
        print(f"{args.workers} workers and servers, {args.size} of parameters, AdamW; medians of {args.laps} laps")
        print(f"a step                 {1e3 * statistics.median(alone):8.2f} ms")
        print(f"a step with a backup   {1e3 * statistics.median(backed):8.2f} ms, {ratio:.2f} times as long")
    if args.late:
        late(bytes_of(args.late))
    chance = random.Random(args.seed)
    wrong = 0
    for mode in MODES[:2]:
        if args.in_a_row:
            wrong += in_a_row(args.in_a_row, mode, chance)
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
