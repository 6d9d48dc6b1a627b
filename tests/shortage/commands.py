"""Sweeps over commands and what else writes files: rank 0 runs one in its own process, where requests fail.

Each run is judged: a command that ends with an error says what ran out, and it can be run again at once; a worker of
`serve` works, or hears that the server has failed; no file is half written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from processes import free_ports

import ringreduce
import ringreduce.parameter_server as ps
from ringreduce import cli, tuning
from ringreduce.tuning.machine import probe
from ringreduce.tuning.record import save
from shortage.requests import KINDS
from shortage.sweeps import TIMEOUT, Run, Sweep, Turn, are_right

FIXES = (
    "ulimit -n",
    "ulimit -u",
    "free memory",
    "not enough memory",
    "MemoryError",
    "memory ran out",
    "No space left on device",
)

DIES_AND_HEARS = "test $RINGREDUCE_LIFE = 1 || kill -KILL $$; trap 'exit 0' USR1; kill -USR1 $PPID; while :; do :; done"
"""A command that dies in its first life, and in the second sends its keeper a signal, which is passed on to it."""


class Said(io.StringIO):
    """What a command prints. `heard` is called when it serves."""

    def __init__(self, heard: Callable[[], object]) -> None:
        super().__init__()
        self._heard = heard

    def write(self, text: str) -> int:
        if " serves with " in text:
            self._heard()
        return super().write(text)


def command(*words: str, heard: Callable[[], object] = lambda: None) -> None:
    """Raises what it says if it ends with an error."""
    output, errors = Said(heard), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = cli.main(words)
    if code:
        raise RuntimeError(f"exit code {code}: {errors.getvalue()}")


def keep(folder: Path) -> None:
    before, children = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGCHLD)
    try:
        command("keep", "sh", "-c", DIES_AND_HEARS)
    finally:
        signal.signal(signal.SIGCHLD, children)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def tuned() -> tuning.Tuning:
    return tuning.Tuning(tuning.identify((0,)), probe((0,)), "now", {})


WRITES: dict[str, Callable[[Path], object]] = {
    "keep": keep,
    "flight record": lambda folder: ringreduce.dump_flight_record(folder / "new" / "record"),
    "tuning file": lambda folder: save(tuned(), folder / "new" / "tuning", replace=True),
    "plan": lambda folder: command("plan", "dgx1-v100", "--gpus", "0-3", "--save", str(folder / "old")),
}
"""What one process does alone. It may write to a folder, which has one file, "old"."""


@dataclasses.dataclass(frozen=True)
class CommandSweep(Sweep):
    """`scenario`: of WRITES, or "serve", whose worker is rank 1."""

    phase: str = "run"
    transport: str = "command"
    victim: int = 0
    ranks: int = 1
    longest: float = 3.0

    ran_out = FIXES

    def live(self, turn: Turn) -> None:
        with tempfile.TemporaryDirectory() as folder:
            if self.scenario == "serve":
                self._serve(turn, Path(folder))
            else:
                (Path(folder) / "old").write_bytes(b"old")
                turn.armed("run", lambda: turn.attempt(lambda: self._write(turn, Path(folder)), again=1))

    def _write(self, turn: Turn, folder: Path) -> None:
        try:
            WRITES[self.scenario](folder)
        except Exception:
            there = [path for path in folder.rglob("*") if path.is_file()]
            if [(path.name, path.read_bytes()) for path in there] != [("old", b"old")]:
                turn.found.afterwards = f"not only the old file is there, as it was: {there}"
            raise

    def _serve(self, turn: Turn, folder: Path) -> None:
        """In two sessions, of which the second must work."""
        store, (port,) = turn.me.store, free_ports(1)
        words = ("serve", "--store", f"127.0.0.1:{port}", "--memory", "16M", "--timeout", "3", "--snapshots")

        def serve(session: str) -> None:
            try:
                command(*words, str(folder / session), heard=lambda: store.set(session, str(port)))
            finally:
                store.set(session, "0")  # a worker that has not come need not
            if parts := [str(path) for path in folder.rglob("*.part*")]:
                raise RuntimeError(f"half written: {parts}")

        def work(session: str) -> None:
            try:
                if its_port := int(store.get(session)):
                    self._work(turn, its_port)
            except Exception:
                end = time.monotonic() + 1.0
                while int(store.get(session)) and time.monotonic() < end:  # it may be ending
                    time.sleep(0.01)
                raise

        do = serve if turn.me.rank == self.victim else work
        turn.armed("run", lambda: turn.attempt(lambda: do(f"{turn}: first"), again=2 * turn.me.rank))
        turn.meet("first is over")
        turn.afterwards(lambda: do(f"{turn}: again"))

    def _work(self, turn: Turn, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
        with ps.join(store, role="worker", timeout=TIMEOUT, window=1 << 20) as kv:
            got = torch.zeros(1000)
            kv.init("w", torch.zeros(1000), update=ps.reduce("sum"), mode=ps.asynchronous())
            kv.push_pull("w", torch.ones(1000), out=got).wait()
            turn.found.right &= are_right([(got, 1.0)])

    def wrong(self, runs: list[Run]) -> Iterator[str]:
        for rank, each in enumerate(runs):
            if each.afterwards:
                yield f"rank {rank}, afterwards: {each.afterwards}, after {each.error}"
            if rank != self.victim and each.error and "server 0" not in each.error:
                yield f"rank {rank} is not told who has failed: {each.error}"


def in_ci() -> list[Sweep]:
    """Those of one process, in which nobody waits for another."""
    kinds = ("thread", "descriptor", "socket_call", "process", "disk")
    return [CommandSweep(name, kind) for name in WRITES for kind in kinds]


def all_sweeps() -> Iterator[list[Sweep]]:
    kinds = [kind for kind in KINDS if kind != "wait"]
    yield from ([CommandSweep(name, kind) for kind in kinds] for name in WRITES)
    for kind in kinds:
        yield [CommandSweep("serve", kind, ranks=2)]
