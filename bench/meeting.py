"""What making a group costs a rank as groups grow, without torch: `python bench/meeting.py [--ranks 16 64 256 1024]`.

Ranks are forked from one process, meet by a store in a folder, and some make their program of the ring all_reduce. They
are all on one host first, then on hosts of 8 (as RINGREDUCE_HOST_ID says; links are not made). Printed are questions
to the store, CPU time and memory: of rank 0, and the most of any other rank; and the time until all have met, which the
machine's cores share.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ringreduce.coordination.endpoint import Location
from ringreduce.groups.exchange import Exchange
from ringreduce.groups.meet import meet
from ringreduce.plan import lower_for

PER_HOST = 8
EVERY = 64
"""In larger groups every so manieth rank makes its program: they are alike, and cores are few."""
COLUMNS = ("questions", "meet_cpu_ms", "meet_mb", "program_cpu_ms", "program_mb")


class FolderStore:
    """A store that counts what it is asked."""

    def __init__(self, folder: str) -> None:
        self._folder, self.questions = Path(folder), 0

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", ".")

    def set(self, key: str, value: str) -> None:
        self.questions += 1
        partial = self._path(f"{key}.{os.getpid()}")
        partial.write_text(value)
        partial.rename(self._path(key))

    def get(self, key: str) -> bytes:
        self.questions += 1
        return self._path(key).read_bytes()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.questions += 1
        return [self._path(key).read_bytes() for key in keys]

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        return all(self._path(key).exists() for key in keys)

    def add(self, key: str, value: int) -> int:
        self.questions += 1
        with open(self._path(key), "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            value += int(file.read() or 0)
            file.truncate(0)
            file.write(str(value))
        return value


def memory_mb() -> float:
    """Of this process alone, which it has written to."""
    fields = Path("/proc/self/smaps_rollup").read_text().split()
    return (int(fields[fields.index("Private_Dirty:") + 1])) / 1024


def run(rank: int, size: int, per_host: int, folder: str) -> dict[str, Any]:
    store = FolderStore(folder)
    place = Location(host_id=str(rank // per_host), interfaces="lo") if per_host < size else Location()
    before, cpu = memory_mb(), time.process_time()
    meeting = meet(Exchange(store, rank, size, 600.0), lambda _: 4096, {}, lambda *_: "", location=place)
    met, met_mb = time.process_time(), memory_mb()
    end = time.monotonic()
    if rank % EVERY == 0 or size <= EVERY:
        lower_for("all_reduce", "ring", size, rank)
    found = {
        "questions": store.questions,
        "meet_cpu_ms": 1e3 * (met - cpu),
        "meet_mb": met_mb - before,
        "program_cpu_ms": 1e3 * (time.process_time() - met),
        "program_mb": memory_mb() - met_mb,
        "end": end,
    }
    meeting.close()
    return found


def measure(size: int, per_host: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        begin = time.monotonic()
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    Path(folder, f"found.{rank}").write_text(json.dumps(run(rank, size, per_host, folder)))
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
        if failed:
            sys.exit(f"{failed} of {size} ranks failed")
        found = [json.loads(Path(folder, f"found.{rank}").read_text()) for rank in range(size)]
    cells = ", ".join(f"{found[0][column]:.4g} / {max(rank[column] for rank in found[1:]):.4g}" for column in COLUMNS)
    took = max(rank["end"] for rank in found) - begin
    print(f"{size:5} ranks, {per_host:4} a host: {took:6.2f} s; {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 256, 1024])
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a leader has three descriptors for each rank of its host
    print("rank 0 / most of another: " + ", ".join(COLUMNS))
    for size in args.ranks:
        for per_host in (size, PER_HOST):
            measure(size, per_host)


if __name__ == "__main__":
    main()
