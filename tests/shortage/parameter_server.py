"""Sweeps over the parameter server: as in sweeps.py, each run makes one in processes that have had many before.

    make faults ONLY="parameter_server push allocation"

Rank 0 has a server, rank 1 is the worker that makes the call, and rank 2 a worker that looks at what has come of it
(with backups, it has the other server too). A request fails in the server's process or in the caller's. Each run is
judged: a worker that returns has right values; a push is applied once if it was acknowledged, and never twice; who
raises is told what ran out, or who has failed, within a second; the others go on, unless the server has ended; nothing
is left; and what could not be joined or founded can be, afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bodies.parameter_server import APART, NEAR
from distributed.harness import Rank
from torch._C._distributed_c10d import HashStore

import ringreduce.parameter_server as ps
from ringreduce.errors import SystemFailure
from shortage.requests import ANY, place_name
from shortage.sweeps import KINDS_OF_CALLS, RAN_OUT, TIMEOUT, Run, Sweep, Turn, Values, are_right

SERVER, CALLER, WITNESS = 0, 1, 2

SMALL, LARGE = 1024, 4 << 20  # elements of float32

SIZES = {"window": 32 << 20, "memory": 160 << 20, "timeout": TIMEOUT}

PLACES = {"one host": NEAR, "tcp": APART}

SERVES_ON = ("Dense::copy", "Table::grow")
"""Functions of a server where a failed request loses a snapshot or a push, not the server (a backup would differ)."""


@dataclasses.dataclass
class Party:
    """A rank's part of a parameter server."""

    me: Rank
    name: str
    backups: int
    folder: Path  # for snapshots
    serving: ps.Serving | None = None
    kv: ps.KeyValue | None = None

    @property
    def worker(self) -> ps.KeyValue:
        assert self.kv is not None
        return self.kv

    def found(self) -> None:
        """Servers are in ranks 0 and 2 if they have backups, otherwise in rank 0."""
        if self.me.rank == SERVER or (self.backups and self.me.rank == WITNESS):
            number, size = self.me.rank // WITNESS, 1 + self.backups
            self.serving = ps.serve(
                self.me.store, rank=number, size=size, name=self.name, backups=self.backups, **SIZES
            )

    def join(self) -> None:
        if self.me.rank != SERVER:
            self.kv = ps.join(
                self.me.store, role="worker", name=self.name, timeout=TIMEOUT, window=int(SIZES["window"])
            )

    def prepared(self, scenario: Scenario) -> Callable[[], Values]:
        if self.me.rank != SERVER and self.kv is None:
            return nothing
        if self.kv is not None:
            self.kv.init("after", torch.zeros(SMALL), update=ps.reduce("sum"), mode=ps.asynchronous())
        return scenario(self)

    def end(self) -> None:
        """Ends both, whatever one raises."""
        with contextlib.ExitStack() as ending:
            for each in (self.serving, self.kv.calls if self.kv is not None else None):
                if each is not None:
                    ending.callback(each.close)
            if self.kv is not None:
                self.kv.leave()


Scenario = Callable[[Party], Callable[[], Values]]
"""Prepares a call on a rank that has joined, and returns what makes it: all ranks call it."""


def nothing() -> Values:
    return []


def initialises(elements: int) -> Scenario:
    def prepare(party: Party) -> Callable[[], Values]:
        def call() -> Values:
            got, value = torch.zeros(elements), torch.full((elements,), 7.0)
            party.worker.init("v", value)
            party.worker.pull("v", got)
            return [(got, 7.0)]

        return call if party.me.rank == CALLER else nothing

    return prepare


def pushes(elements: int, mode: ps.Mode, pulls: bool = False) -> Scenario:
    """Adds one to "w"."""

    def prepare(party: Party) -> Callable[[], Values]:
        if party.kv is not None:
            party.kv.init("w", torch.zeros(elements), update=ps.reduce("sum"), mode=mode)
        one, got = torch.ones(elements), torch.zeros(elements)

        def call() -> Values:
            if pulls:
                party.worker.push_pull("w", one, out=got).wait()
                return [(got, 1.0)]
            party.worker.push("w", one).wait()
            return []

        return call if party.me.rank == CALLER else nothing

    return prepare


def pulls(elements: int) -> Scenario:
    def prepare(party: Party) -> Callable[[], Values]:
        got = torch.full((elements,), -1.0)
        if party.kv is not None:
            party.kv.init("w", torch.zeros(elements))

        def call() -> Values:
            party.worker.pull("w", got)
            return [(got, 0.0)]

        return call if party.me.rank == CALLER else nothing

    return prepare


def uses_rows(pulls: bool) -> Scenario:
    """Adds one to rows of a table, or pulls them."""

    def prepare(party: Party) -> Callable[[], Values]:
        if party.kv is None:
            return nothing
        table = ps.Embedding(party.kv, "rows", 16, update=ps.reduce("sum"), mode=ps.asynchronous(), initial=(0.0, 0.0))
        ids = torch.arange(0, 600, 3)

        def call() -> Values:
            if not pulls:
                table.push(ids, torch.ones(len(ids), 16)).wait()
            return [(table.pull(ids), 0.0 if pulls else 1.0)]

        return call if party.me.rank == CALLER else nothing

    return prepare


def is_whole_or_absent(folder: Path, takes: Callable[[], object]) -> Values:
    """`takes` a snapshot below `folder`. One that cannot be written leaves nothing there."""
    try:
        takes()
    except SystemFailure as error:
        if left := [*folder.glob("*.partial-*")]:
            raise RuntimeError(f"{left} is left") from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return []


def snapshots(party: Party) -> Callable[[], Values]:
    def call() -> Values:
        folder = party.folder
        return is_whole_or_absent(folder, lambda: party.worker.snapshot(folder / "one").wait())

    return call if party.me.rank == CALLER else nothing


def serves_a_snapshot(party: Party) -> Callable[[], Values]:
    """As `ringreduce serve --every` does."""

    def take() -> None:
        assert party.serving is not None
        number = party.serving.ask_for_snapshot()
        while party.serving.take_snapshots(party.folder) < number:
            time.sleep(0.001)

    return (lambda: is_whole_or_absent(party.folder, take)) if party.me.rank == SERVER else nothing


def restores(party: Party) -> Callable[[], Values]:
    """What another parameter server has saved."""
    if party.me.rank != CALLER:
        return nothing
    got = torch.zeros(SMALL)
    with ps.join(HashStore(), rank=0, size=1, memory=SIZES["memory"]) as other:
        other.init("s", torch.full((SMALL,), 3.0))
        other.snapshot(party.folder).wait()

    def call() -> Values:
        try:
            party.worker.restore(party.folder)
        finally:
            shutil.rmtree(party.folder)
        party.worker.pull("s", got)
        return [(got, 3.0)]

    return call


def pushes_beside_a_snapshot(party: Party) -> Callable[[], Values]:
    """Of which the server has taken no piece yet."""
    call = pushes(SMALL, ps.asynchronous())(party)
    party.me.meet(f"{party.name}: initialised")
    if party.serving is not None:
        party.serving._local.server.begin_snapshot()
    return call


CALLS: dict[str, Scenario] = {
    "init 4 KB": initialises(SMALL),
    "init 16 MB": initialises(LARGE),
    "push 4 KB": pushes(SMALL, ps.asynchronous()),
    "push 16 MB": pushes(LARGE, ps.asynchronous()),
    "push_pull 4 KB": pushes(SMALL, ps.asynchronous(), pulls=True),
    "push_pull 16 MB": pushes(LARGE, ps.asynchronous(), pulls=True),
    "pull 4 KB": pulls(SMALL),
    "pull 16 MB": pulls(LARGE),
    "rows pushed": uses_rows(pulls=False),
    "rows pulled": uses_rows(pulls=True),
    "snapshot": snapshots,
    "periodic snapshot": serves_a_snapshot,
    "restore": restores,
    "push 4 KB beside a snapshot": pushes_beside_a_snapshot,
}


def takes_over(leaves: bool) -> Scenario:
    """Server 0 ends, or moves to where its backup is, while the caller adds one to "w"."""

    def prepare(party: Party) -> Callable[[], Values]:
        call = pushes(SMALL, ps.asynchronous(), pulls=True)(party)

        def ends() -> Values:
            assert party.serving is not None
            if leaves:
                party.serving._local.hand_over(0)
            else:
                party.serving._local.shards[0].server.stop()
            return []

        return ends if party.me.rank == SERVER else call

    return prepare


def pushes_without_the_backup(party: Party) -> Callable[[], Values]:
    """Rank 2 has left: rank 0 has both servers, and no backup."""
    if party.serving is not None and party.me.rank == WITNESS:
        party.serving.close()
        party.serving = None
    party.me.meet(f"{party.name}: alone")
    return pushes(SMALL, ps.asynchronous(), pulls=True)(party)


BACKED_UP: dict[str, Scenario] = {
    "push without the backup": pushes_without_the_backup,
    "push 4 KB, backed up": pushes(SMALL, ps.asynchronous()),
    "push_pull 16 MB, backed up": pushes(LARGE, ps.asynchronous(), pulls=True),
    "rows pushed, backed up": uses_rows(pulls=False),
    "push while its server ends": takes_over(leaves=False),
    "push while its server moves": takes_over(leaves=True),
}
"""With two servers, each of which has the other's backup."""


@dataclasses.dataclass(frozen=True)
class ServerSweep(Sweep):
    """`phase`: "found", "join", "call" or "end". `transport` is a place."""

    transport: str = "one host"
    victim: int = CALLER
    ranks: int = 3

    def __str__(self) -> str:
        return f"parameter_server, {super().__str__()}"

    def live(self, turn: Turn) -> None:
        os.environ["RINGREDUCE_HOST_ID"] = f"host {PLACES[self.transport][turn.me.rank]}"
        os.environ["RINGREDUCE_SOCKET_IFNAME"] = "=lo"
        folder = turn.library.with_name(f"snapshot {turn}".replace("/", " "))  # removed with the library
        party = Party(turn.me, str(turn), int(self.scenario in BACKED_UP), folder)

        def phase(name: str, do: Callable[[], Any], again: int = 0) -> Any:
            turn.meet(name)
            attempt = functools.partial(turn.attempt, do, again=again)
            return turn.armed(name, attempt, together=name != "found")

        for name, do in (("found", party.found), ("join", party.join)):
            phase(name, do, again=int(self.phase == name))
        call = phase("prepare", lambda: party.prepared({**CALLS, **BACKED_UP}[self.scenario])) or nothing
        turn.found.right = are_right(phase("call", call) or [])
        turn.meet("called")
        turn.afterwards(lambda: look(party, turn.found))
        turn.meet("used")
        phase("end", party.end)
        party.serving = party.kv = None

    def told(self, runs: list[Run]) -> str:
        return super().told(runs) + (runs[CALLER].error if self.victim == SERVER else "")

    def wrong(self, runs: list[Run]) -> Iterator[str]:
        victim, caller, witness = runs[self.victim], runs[CALLER], runs[WITNESS]
        served = "server" if self.scenario == "push without the backup" else "server 0"  # rank 0 has both
        for rank, each in enumerate(runs):
            who, met = f"rank {rank}", [what for what in (each.error, each.afterwards) if what]
            if rank != self.victim and any(served not in what for what in met):
                yield f"{who} is not told who has failed: {met}"
            if rank != self.victim and self.victim != SERVER and met:
                yield f"{who} cannot go on though only the worker of rank {self.victim} has failed: {met}"
            lost = ("SystemFailure: server ",) if rank == SERVER else ("ServerLost", "PeerLost")
            ended = self.victim == SERVER and each.afterwards.startswith(lost)
            # Over TCP, who has no memory for a connection, or whose socket call fails, has lost the server by that.
            cut = rank == self.victim and self.transport == "tcp" and any(name in each.afterwards for name in RAN_OUT)
            if each.afterwards and not ended and not cut:
                yield f"{who} cannot go on: {each.afterwards}"
        stopped = self.scenario == "push while its server ends"
        if self.victim == SERVER and self.kind == "allocation" and self.phase == "call" and not stopped:
            met = [what for each in (caller, witness) for what in (each.error, each.afterwards)]
            heard = [what for what in met if "ServerLost" in what]
            if any("it has failed" in what for what in heard) and not victim.afterwards:
                yield f"the process of the server that has failed goes on: {heard}"
            if any(not any(name in what for name in RAN_OUT) for what in heard):
                yield f"a worker is not told what ran out: {heard}"
        if self.scenario.startswith("push") and not witness.afterwards and witness.applied:
            if max(witness.applied) > 1:
                yield f"a push was applied {witness.applied} times"
            if min(witness.applied) < 1 and not caller.error:
                yield "a push that was acknowledged is lost"
        serves_on = self.kind == "disk" or any(each in place_name(victim.place) for each in SERVES_ON)
        if self.scenario not in BACKED_UP and serves_on and witness.afterwards:
            yield f"the server has ended: {witness.afterwards}"


def look(party: Party, found: Run) -> None:
    """Whether a worker can go on, what has come of the call, and whether a server's process knows that it failed."""
    if party.serving is not None:
        end = time.monotonic() + TIMEOUT
        while any(shard.server.has_ended for shard in [*party.serving._local.shards.values()]):
            assert time.monotonic() < end, "a server that has ended is kept"
            time.sleep(0.01)
        party.serving.wait(0)  # raises if the server has failed and nobody takes over
    if party.kv is None:
        return
    after = torch.zeros(SMALL)
    party.kv.push("after", torch.ones(SMALL)).wait()
    party.kv.pull("after", after)
    found.right &= bool((after >= 1).all() and (after <= 2).all())
    if party.me.rank == WITNESS and party.kv.calls.is_key("w"):
        w = torch.zeros(party.kv.calls.lookup("w", time.monotonic() + TIMEOUT).spec["shape"])
        party.kv.pull("w", w)
        found.applied = [float(w.min()), float(w.max())]


def by_places(victim: int, place: str) -> list[Sweep]:
    phases = [("pull 4 KB", phase) for phase in ("found", "join", "end") if (phase, victim) != ("found", CALLER)]
    calls = [(name, "call") for name in (*CALLS, *BACKED_UP)]
    return [ServerSweep(name, ANY, phase, place, victim, anew=True) for name, phase in (*phases, *calls)]


def all_sweeps() -> Iterator[list[Sweep]]:
    for place in PLACES:
        for victim in (SERVER, CALLER):
            yield by_places(victim, place)
        for name, victim in itertools.product(("snapshot", "periodic snapshot", "restore"), (SERVER, CALLER)):
            yield [ServerSweep(name, "disk", "call", place, victim)]
        for kind in KINDS_OF_CALLS:
            for victim in (SERVER, CALLER, WITNESS):
                for phase in ("found", "join", "end"):
                    if victim != WITNESS and (phase, victim) != ("found", CALLER):
                        yield [ServerSweep("pull 4 KB", kind, phase, place, victim)]
                for name in (*CALLS, *BACKED_UP):
                    has_backup = name in BACKED_UP and name != "push without the backup"
                    if victim != WITNESS or has_backup:
                        yield [ServerSweep(name, kind, "call", place, victim)]
