"""Sweeps: the same program again and again, each time with the next request for a resource failing in one rank.

A sweep ends when a run asks less often than that. Each run makes a group in processes that have had many before, and is
judged: every rank that returns has right values; if one raises, so does each that has not returned, within a second and
naming the rank; afterwards the group works on all ranks or raises on all; and when it is destroyed no descriptor,
thread or mapping is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, run
from torch.distributed import distributed_c10d

import ringreduce
from ringreduce.errors import RingReduceError
from shortage.requests import ANEW, ANY, KINDS, Asked, failing, place_name

NOTICED = 1.0
"""Seconds in which all ranks must have an error once one has."""

TIMEOUT = 6.0
"""Of the groups: who waits so long was forgotten."""

LATE = 0.2
"""Seconds that slow requests take."""

Values = list[tuple[torch.Tensor, torch.Tensor | float]]
"""What a call gave, and what it should have given: all of its elements, if that is a number."""

Scenario = Callable[[Rank], Callable[[], Values]]
"""Prepares a call on a rank, in its default group, and returns what makes it."""

SMALL, LARGE = 16, 4 << 20  # elements of float32


def reduces(elements: int, all_reduce: Callable[[torch.Tensor], Any]) -> Scenario:
    def prepare(me: Rank) -> Callable[[], Values]:
        tensor = torch.full((elements,), float(me.rank + 1))

        def call() -> Values:
            all_reduce(tensor)
            return [(tensor, me.size * (me.size + 1) / 2)]

        return call

    return prepare


def feeds_back(me: Rank) -> Callable[[], Values]:
    rounded = functools.partial(ringreduce.all_reduce, wire_dtype="int8", feedback=ringreduce.Feedback())
    return reduces(1 << 17, rounded)(me)


def waits_for_it(tensor: torch.Tensor) -> None:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()


def coalesces(me: Rank) -> Callable[[], Values]:
    tensors = [torch.full((n,), 1.0) for n in (3, 100, 5)]

    def call() -> Values:
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        return [(tensor, float(me.size)) for tensor in tensors]

    return call


def gathers(me: Rank) -> Callable[[], Values]:
    got, own = [torch.zeros(1000) for _ in range(me.size)], torch.full((1000,), float(me.rank))

    def call() -> Values:
        dist.all_gather(got, own)
        return [(each, float(rank)) for rank, each in enumerate(got)]

    return call


def exchanges(elements: int) -> Scenario:
    def prepare(me: Rank) -> Callable[[], Values]:
        got, own = torch.zeros(me.size * elements), torch.full((me.size * elements,), float(me.rank))
        wanted = torch.arange(me.size, dtype=torch.float32).repeat_interleave(elements)

        def call() -> Values:
            dist.all_to_all_single(got, own)
            return [(got, wanted)]

        return call

    return prepare


def splits(me: Rank) -> Callable[[], Values]:
    got = torch.zeros((me.rank + 2) * me.size)
    sends, receives = [rank + 2 for rank in range(me.size)], [me.rank + 2] * me.size
    own = torch.full((sum(sends),), float(me.rank))
    wanted = torch.arange(me.size, dtype=torch.float32).repeat_interleave(me.rank + 2)

    def call() -> Values:
        dist.all_to_all_single(got, own, receives, sends)
        return [(got, wanted)]

    return call


def scatters(me: Rank) -> Callable[[], Values]:
    got, own = torch.zeros(1000), [torch.full((1000,), 1.0) for _ in range(me.size)]

    def call() -> Values:
        dist.reduce_scatter(got, own)
        return [(got, float(me.size))]

    return call


def from_a_root(me: Rank) -> Callable[[], Values]:
    tensor, summed = torch.full((1000,), float(me.rank)), torch.full((1000,), 1.0)

    def call() -> Values:
        dist.broadcast(tensor, 1)
        dist.reduce(summed, 0)
        root = [(summed, float(me.size))] if me.rank == 0 else []
        return [(tensor, 1.0), *root]

    return call


def sparse(me: Rank) -> Callable[[], Values]:
    tensor = torch.sparse_coo_tensor(torch.tensor([[me.rank]]), torch.ones(1), (8,), check_invariants=True)
    wanted = torch.cat([torch.ones(me.size), torch.zeros(8 - me.size)])

    def call() -> Values:
        dist.all_reduce(tensor)
        return [(tensor, wanted)]

    return call


def sends(elements: int) -> Scenario:
    """Each to the next, and from the one before."""

    def prepare(me: Rank) -> Callable[[], Values]:
        own, got = torch.full((elements,), float(me.rank)), torch.zeros(elements)
        to, source = (me.rank + 1) % me.size, (me.rank - 1) % me.size

        def call() -> Values:
            works = [dist.isend(own, to), dist.irecv(got, source)]
            for work in works:
                assert work is not None
                work.wait()
            return [(got, float(source))]

        return call

    return prepare


def waits_at_a_barrier(me: Rank) -> Callable[[], Values]:
    def call() -> Values:
        dist.barrier()
        return []

    return call


def takes_from_the_arena(me: Rank) -> Callable[[], Values]:
    def call() -> Values:
        tensor = ringreduce.empty(LARGE)
        tensor.fill_(1.0)
        ringreduce.all_reduce(tensor)
        return [(tensor, float(me.size))]

    return call


def receives_in_vain(me: Rank) -> Callable[[], Values]:
    """The group has the message until it ends."""
    got, source = torch.zeros(10), (me.rank - 1) % me.size

    def call() -> Values:
        dist.irecv(got, source)
        return []

    return call


def makes_a_subgroup(me: Rank) -> Callable[[], Values]:
    tensor = torch.ones(100)

    def call() -> Values:
        group = dist.new_group(list(range(me.size)), timeout=timedelta(seconds=TIMEOUT))
        dist.all_reduce(tensor, group=group)
        return [(tensor, float(me.size))]

    return call


CALLS: dict[str, Scenario] = {
    "all_reduce 64 B": reduces(SMALL, ringreduce.all_reduce),
    "all_reduce 16 MB": reduces(LARGE, ringreduce.all_reduce),
    "all_reduce int8 with feedback": feeds_back,
    "all_reduce int8": reduces(1 << 17, functools.partial(ringreduce.all_reduce, wire_dtype="int8")),
    "operator": reduces(1000, functools.partial(ringreduce.all_reduce, op=ringreduce.Op.torch(torch.add))),
    "dist.all_reduce 64 B": reduces(SMALL, dist.all_reduce),
    "dist.all_reduce 16 MB, async": reduces(LARGE, waits_for_it),
    "coalesced": coalesces,
    "all_gather": gathers,
    "all_to_all 4 KB": exchanges(512),
    "all_to_all 16 MB": exchanges(LARGE // 2),
    "all_to_all, split sizes": splits,
    "reduce_scatter": scatters,
    "broadcast and reduce": from_a_root,
    "sparse": sparse,
    "messages 64 B": sends(SMALL),
    "messages 16 MB": sends(LARGE),
    "barrier": waits_at_a_barrier,
    "arena": takes_from_the_arena,
    "subgroup": makes_a_subgroup,
    "receive in vain": receives_in_vain,
}

GROUP_GOES_ON = ("subgroup",)
"""After an error in one of these, which is another group's."""

FAILS_BEFORE_A_CALL = ("arena", "operator")
"""The others may be told by the victim's next call, which is another than theirs."""

TRANSPORTS: dict[str, dict[str, Any]] = {"shared_memory": {}, "tcp": {"transport": "tcp"}}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Of `kind`, in rank `victim` of `ranks`, while `phase`: "make", "call" or "destroy"."""

    scenario: str
    kind: str
    phase: str = "call"
    transport: str = "shared_memory"
    victim: int = 1
    seconds: float = 0.0  # that the request takes instead of failing
    ranks: int = 2
    anew: bool = False  # one request at each place, instead of each request

    def __str__(self) -> str:
        slow = f", {self.seconds:g} s late" if self.seconds else ""
        which = f"{self.kind} at each place" if self.anew else self.kind
        return f"{self.scenario}, {self.transport}: {self.phase}, {which} in rank {self.victim} of {self.ranks}{slow}"

    def run(self, me: Rank, library: Path, number: int, before: Counter[str] | None) -> Run:
        return one_run(me, library, self, number, before)

    def judge(self, runs: list[Any], noticed: float = NOTICED) -> Iterator[str]:
        return judge(self, runs, noticed)

    def fails(self, library: Path, number: int) -> contextlib.AbstractContextManager[Asked]:
        """For the `number`-th run."""
        return failing(library, self.kind, ANEW if self.anew and number else number, self.seconds)


@dataclasses.dataclass
class Run:
    """What one rank met in one run."""

    error: str = ""  # "Class: message"; empty: it returned
    when: float = 0.0
    right: bool = True
    made: bool = True  # whether there was a group afterwards
    afterwards: str = ""
    left: str = ""
    place: str = ""


def holdings() -> Counter[str]:
    """Of this process: what a group must give back."""
    found: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found["descriptor " + os.readlink(fd).split(":")[0]] += 1
        except FileNotFoundError:  # iterdir's own
            continue
    found["threads"] = len(list(Path("/proc/self/task").iterdir()))
    found["mappings"] = Path("/proc/self/maps").read_text().count("memfd:ringreduce")
    return found


def left_over(before: Counter[str]) -> str:
    """What there is more than before, once errors' frames are gone, and threads that are about to end have ended."""
    gc.collect()
    end = time.monotonic() + 5.0
    while (more := holdings() - before) and time.monotonic() < end:
        time.sleep(0.01)
    return ", ".join(f"{count} {what}" for what, count in more.items())


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def one_run(me: Rank, library: Path, sweep: Sweep, number: int, before: Counter[str] | None) -> Run:
    """The `number`-th request fails. Without `before`, nothing is said of what is left."""
    found = Run()

    def make() -> None:
        dist.init_process_group(
            "ringreduce",
            store=dist.PrefixStore(f"{sweep}/{number}", me.store),
            rank=me.rank,
            world_size=me.size,
            timeout=timedelta(seconds=TIMEOUT),
            pg_options=ringreduce.Options(**TRANSPORTS[sweep.transport]),
        )

    def armed(phase: str, do: Callable[[], Any]) -> Any:
        if phase != sweep.phase or me.rank != sweep.victim:
            return do()
        with sweep.fails(library, number) as asked:
            try:
                return do()
            finally:
                met.append(asked)

    met: list[Asked] = []  # in the victim
    try:
        armed("make", make)
        dist.barrier()
        call = CALLS[sweep.scenario](me)
        values = armed("call", call)
        found.right = all(bool((got.to_dense() == wanted).all()) for got, wanted in values)
    except Exception as error:
        found.error = said(error)
    found.when = time.monotonic()
    found.made = dist.is_initialized()
    if found.made:
        try:
            after = torch.ones(100)
            dist.all_reduce(after)
            found.right &= bool((after == me.size).all())
        except RingReduceError as error:
            found.afterwards = said(error)
    me.meet(f"{sweep}/{number}: used")
    if found.made:
        try:
            armed("destroy", dist.destroy_process_group)
        except Exception as error:
            found.error, found.when = found.error or said(error), time.monotonic()
    if dist.is_initialized():  # that failed
        dist.destroy_process_group()
    distributed_c10d._world.group_count = 0  # by which torch names the next group; a failed init_process_group counts
    found.place = met[0].place if met else ""
    if before is not None:
        found.left = left_over(before)
    return found


def judge(sweep: Sweep, runs: list[Run], noticed: float = NOTICED) -> Iterator[str]:
    """What is wrong with a run."""
    victim = runs[sweep.victim]
    for rank, each in enumerate(runs):
        who = f"rank {rank}"
        if not each.error and not each.right:
            yield f"{who} has wrong values"
        if each.left:
            yield f"{who} keeps {each.left}"
        if "CollectiveTimeout" in each.error + each.afterwards:
            yield f"{who} waited for its timeout: {each.error or each.afterwards}"
        if sweep.phase == "destroy":
            continue
        if rank != sweep.victim and each.error:
            if not (victim.error or victim.afterwards):  # the call may have ended for it
                yield f"{who} raises though rank {sweep.victim} does not: {each.error}"
            if f"rank {sweep.victim}" not in each.error:
                yield f"{who} does not name rank {sweep.victim}: {each.error}"
            if "CollectiveMismatch" in each.error and sweep.scenario not in FAILS_BEFORE_A_CALL:
                yield f"{who} is told of another call: {each.error}"
            if each.when > victim.when + noticed:
                yield f"{who} hears of it {each.when - victim.when:.1f} s later: {each.error}"
    groups = [each.afterwards for each in runs if each.made]
    if sweep.phase != "destroy" and len({bool(error) for error in groups}) > 1:
        yield f"afterwards the group works on some ranks only: {groups}"
    if sweep.seconds and any(each.error or each.afterwards for each in runs):
        yield f"a slow request is an error: {[each.error or each.afterwards for each in runs]}"
    if victim.error and not victim.afterwards and sweep.phase == "call" and sweep.scenario not in GROUP_GOES_ON:
        yield "the group works after an error"
    if victim.error and not any(name in victim.error for name in ("SystemFailure", "MemoryError", "allocate memory")):
        yield f"rank {sweep.victim} is not told what ran out: {victim.error}"


def sweep_here(me: Rank, library: Path, sweep: Any, most: int, first: int = 1) -> list[list[Any]]:
    """All runs, up to the `most`-th request; each rank has the same list, of a Run for each rank."""
    all_runs: list[list[Any]] = []
    sweep.run(me, library, 0, None)  # what the first run of a process makes for good is there now
    gc.collect()
    gc.freeze()  # all that is there now, so that each run's collection is short
    before = holdings()
    for number in range(first, most + 1):
        me.begin(f"{sweep}, request {number}")
        own = sweep.run(me, library, number, before)
        me.store.set(f"{sweep}/{number}/{me.rank}", json.dumps(dataclasses.asdict(own)))
        runs = [type(own)(**json.loads(me.store.get(f"{sweep}/{number}/{rank}"))) for rank in range(me.size)]
        all_runs.append(runs)
        if not runs[sweep.victim].place:
            break
    return all_runs


def sweeps_here(me: Rank, library: Path, sweeps: list[Any], most: int) -> list[list[list[Any]]]:
    """One after the other in the same processes, of which places know that they have failed before."""
    return [sweep_here(me, library, sweep, most) for sweep in sweeps]


def build(folder: Path) -> Path:
    """Of requests.cpp, the library."""
    made = folder / "requests.so"
    source = Path(__file__).with_name("requests.cpp")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(["c++", *flags, str(source), "-o", str(made)], check=True)
    return made


KINDS_OF_CALLS = [kind for kind in KINDS if kind not in ("wait", "process", "disk")]


def one_by_one() -> Iterator[list[Sweep]]:
    """Each request."""
    for ranks, transport, kind in itertools.product((2, 3), TRANSPORTS, KINDS_OF_CALLS):
        for victim in range(ranks):
            yield [Sweep("barrier", kind, "make", transport, victim, ranks=ranks)]
            yield [Sweep("receive in vain", kind, "destroy", transport, victim, ranks=ranks)]
            for name in CALLS:
                yield [Sweep(name, kind, "call", transport, victim, ranks=ranks)]


def by_places(kind: str = ANY, seconds: float = 0.0) -> Iterator[list[Sweep]]:
    """One request at each place that making a group, all calls and its end reach."""
    for victim in (0, 1):
        calls = [("barrier", "make"), *((name, "call") for name in CALLS), ("receive in vain", "destroy")]
        yield [
            Sweep(name, kind, phase, transport, victim, seconds, anew=True)
            for transport in TRANSPORTS
            for name, phase in calls
        ]


def swept(library: Path, sweeps: list[Any], most: int, noticed: float = NOTICED) -> list[dict[str, Any]]:
    """What came of each."""
    began = time.monotonic()
    try:
        runs_of_all = run(sweeps_here, sweeps[0].ranks, library, sweeps, most)[0]
    except (Exception, pytest.fail.Exception) as error:
        return [{"sweep": str(sweeps[0]), "failures": 0, "wrong": {f"BROKE: {str(error)[:1500]}": 1}, "places": {}}]
    seconds, found = (time.monotonic() - began) / len(sweeps), []
    for sweep, runs in zip(sweeps, runs_of_all, strict=True):
        bad = Counter[str]()
        for each in runs:
            for verdict in sweep.judge(each, noticed):
                bad[f"{place_name(each[sweep.victim].place)}: {verdict[:230]}"] += 1
        reached = Counter(each[sweep.victim].place for each in runs if each[sweep.victim].place)
        line = {"sweep": str(sweep), "failures": reached.total(), "wrong": bad, "seconds": round(seconds, 1)}
        found.append({**line, "places": reached})
    return found
