"""Sweeps: the same program again and again, each time with the next request for a resource failing in one rank.

A sweep ends when a run asks less often than that. Each run is in processes that have had many before, and is judged:
what was given is right; whoever raises does so soon after the request failed, and the victim is told what ran out;
afterwards no descriptor, thread, mapping or child is left. Each scenario (groups.py and others) has a class that says
how a run lives, and what else is wrong with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from distributed.harness import Rank, run
from processes import Logged

from shortage.requests import ANEW, KINDS, Asked, failing, place_name

NOTICED = 1.0
"""Seconds after the failure in which whoever raises has done so."""

TIMEOUT = 6.0
"""Of what is made: who waits so long was forgotten."""

LATE = 0.2
"""Seconds that slow requests take."""

LONG = 3.0
"""Seconds after which the story of a run tells where its threads are: longer than any run takes that goes well."""

KINDS_OF_CALLS = [kind for kind in KINDS if kind not in ("wait", "process", "disk")]

RAN_OUT = (
    *("SystemFailure", "MemoryError", "memory ran out", "memory has run out", "no memory", "Cannot allocate memory"),
    *("allocate memory", "start new thread", "start a thread", "Too many open files", "No space left"),
    "No buffer space",
)
"""One of these is in what the process is told whose request has failed."""

STORIES = 8
"""Runs of a sweep of which all is kept, if they went wrong."""

log = logging.getLogger("ringreduce.sweeps")

Values = list[tuple[torch.Tensor, torch.Tensor | float]]
"""What a call gave, and what it should have given: all of its elements, if that is a number."""


@dataclasses.dataclass
class Run:
    """What one rank met in one run."""

    error: str = ""  # the first, "Class: message"; empty: nothing raised
    raised: float = 0.0  # when that was
    place: str = ""  # of the request that failed
    failed: float = 0.0  # when that was
    took: float = 0.0  # seconds: the phase in which it may fail
    right: bool = True
    afterwards: str = ""  # the error of what should work again then
    logged: str = ""
    story: str = ""  # all that was logged, the traceback of each error, and after LONG the stacks of all threads
    left: str = ""
    made: bool = True  # whether there was a group afterwards
    applied: list[float] = dataclasses.field(default_factory=list)  # how often elements have had a push: least, most


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Of `kind`, in rank `victim` of `ranks`, while `phase`."""

    scenario: str
    kind: str
    phase: str = "call"
    transport: str = "shared_memory"
    victim: int = 1
    seconds: float = 0.0  # that the request takes instead of failing
    ranks: int = 2
    anew: bool = False  # one request at each place, instead of each request
    longest: float = 0.0  # seconds that the phase may take with all attempts; then nobody need hear of a failure before

    ran_out: ClassVar[tuple[str, ...]] = RAN_OUT

    def __str__(self) -> str:
        slow = f", {self.seconds:g} s late" if self.seconds else ""
        which = f"{self.kind} at each place" if self.anew else self.kind
        return f"{self.scenario}, {self.transport}: {self.phase}, {which} in rank {self.victim} of {self.ranks}{slow}"

    def live(self, turn: Turn) -> None:
        """What a rank does in a run."""
        raise NotImplementedError

    def wrong(self, runs: list[Run]) -> Iterator[str]:
        """What is wrong in this scenario alone."""
        raise NotImplementedError

    def must_be_told(self, runs: list[Run]) -> bool:
        """Whether the victim must be told what ran out."""
        return any(each.error or each.afterwards for each in runs)

    def told(self, runs: list[Run]) -> str:
        """What the victim was told."""
        return f"{runs[self.victim].error} {runs[self.victim].afterwards} {runs[self.victim].logged}"

    def run(self, me: Rank, library: Path, number: int, before: Counter[str] | None) -> Run:
        """The `number`-th request fails. Without `before`, nothing is said of what is left."""
        turn, logged = Turn(self, me, library, number), Logged(level=logging.WARNING)
        with its_story() as story:
            self.live(turn)
        turn.found.logged, turn.found.story = " | ".join(logged.messages), story.getvalue()
        logging.getLogger("ringreduce").removeHandler(logged)
        if before is not None:
            turn.found.left = left_over(before)
        return turn.found

    def judge(self, runs: list[Run], noticed: float = NOTICED) -> Iterator[str]:
        """What is wrong with a run."""
        failed = runs[self.victim].failed
        for rank, each in enumerate(runs):
            who = f"rank {rank}"
            if not each.right:
                yield f"{who} has wrong values"
            if each.left:
                yield f"{who} keeps {each.left}"
            if "CollectiveTimeout" in each.error + each.afterwards:
                yield f"{who} waited for its timeout: {each.error or each.afterwards}"
            if self.longest and each.took > max(noticed, self.longest):
                yield f"{who} took {each.took:.1f} s: {each.error}"
            if not self.longest and each.error and each.raised > failed + noticed > noticed:
                yield f"{who} hears of it {each.raised - failed:.1f} s later: {each.error}"
        if self.must_be_told(runs) and not any(name in self.told(runs) for name in self.ran_out):
            yield f"rank {self.victim} is not told what ran out: {self.told(runs)}"
        if self.seconds and (
            errors := [each.error or each.afterwards for each in runs if each.error or each.afterwards]
        ):
            yield f"a slow request is an error: {errors}"
        yield from self.wrong(runs)


@dataclasses.dataclass
class Turn:
    """One run, in one rank."""

    sweep: Sweep
    me: Rank
    library: Path
    number: int
    found: Run = dataclasses.field(default_factory=Run)

    def __str__(self) -> str:
        return f"{self.sweep}/{self.number}"

    def meet(self, what: str) -> None:
        self.me.meet(f"{self}: {what}")

    def armed(self, phase: str, do: Callable[[], Any], together: bool = False) -> Any:
        """Calls `do`. In the sweep's phase the victim's request fails; `together`: until all ranks have called it."""
        if phase != self.sweep.phase:
            return do()
        armed, number = contextlib.nullcontext(Asked()), self.number
        if self.me.rank == self.sweep.victim:
            number = ANEW if self.sweep.anew and number else number
            armed = failing(self.library, self.sweep.kind, number, self.sweep.seconds)  # type: ignore[assignment]
        try:
            with armed as asked:
                if together:
                    self.meet(f"{phase} is armed")
                began = time.monotonic()
                try:
                    return do()
                finally:
                    self.found.took = time.monotonic() - began
                    if together:
                        self.meet(f"{phase} is over")
        finally:
            self.found.place, self.found.failed = asked.place, asked.when
            if asked.place:
                log.info("%.3f s ago a request failed at %s", time.monotonic() - asked.when, asked.place)

    def attempt(self, do: Callable[[], Any], again: int = 0) -> Any:
        """What `do` returns, if it raises and so `again` times more. An error of the last is one of afterwards."""
        for left in reversed(range(again + 1)):
            try:
                return do()
            except Exception as error:
                log.info("an attempt has failed", exc_info=True)
                if not self.found.error:
                    self.found.error, self.found.raised = said(error), time.monotonic()
                if again and not left:
                    self.found.afterwards = said(error)
        return None

    def afterwards(self, do: Callable[[], Any]) -> None:
        try:
            do()
        except Exception as error:
            log.info("what comes afterwards has failed", exc_info=True)
            self.found.afterwards = self.found.afterwards or said(error)


@contextlib.contextmanager
def its_story() -> Iterator[io.StringIO]:
    """What `Run.story` gets of a run."""
    text, logger = io.StringIO(), logging.getLogger("ringreduce")
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(threadName)s: %(message)s", "%M:%S"))

    def stacks() -> None:
        names = {each.ident: each.name for each in threading.enumerate()}
        for thread, frame in sys._current_frames().items():
            log.info("%s, after %g s:\n%s", names.get(thread), LONG, "".join(traceback.format_stack(frame)))

    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    timer = threading.Timer(LONG, stacks)
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    timer.start()  # with all signals blocked, since `keep` waits for some that no other thread may get
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    try:
        yield text
    finally:
        timer.cancel()
        timer.join()
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def are_right(values: Values) -> bool:
    return all(bool((got.to_dense() == wanted).all()) for got, wanted in values)


def holdings() -> Counter[str]:
    """Of this process: what must be given back."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # listdir's own
            found["descriptor " + os.readlink(f"/proc/self/fd/{fd}").split(":")[0]] += 1
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            found["children"] += len(Path(f"/proc/self/task/{task}/children").read_text().split())
            found["threads"] += 1
    found["mappings"] = Path("/proc/self/maps").read_text().count("memfd:ringreduce")
    return found


def left_over(before: Counter[str]) -> str:
    """What there is more than before, once errors' frames are gone, and threads that are about to end have ended."""
    gc.collect()
    end = time.monotonic() + 5.0
    while (more := holdings() - before) and time.monotonic() < end:
        time.sleep(0.01)
    return ", ".join(f"{count} {what}" for what, count in more.items())


def sweep_here(me: Rank, library: Path, sweep: Sweep, most: int, first: int = 1) -> list[list[Run]]:
    """All runs, up to the `most`-th request; each rank has the same list, of a Run for each rank."""
    all_runs: list[list[Run]] = []
    sweep.run(me, library, 0, None)  # what the first run of a process makes for good is there now
    gc.collect()
    gc.freeze()  # all that is there now, so that each run's collection is short
    before = holdings()
    for number in range(first, most + 1):
        me.begin(f"{sweep}, request {number}")
        own = sweep.run(me, library, number, before)
        me.store.set(f"{sweep}/{number}/{me.rank}", json.dumps(dataclasses.asdict(own)))
        runs = [Run(**json.loads(me.store.get(f"{sweep}/{number}/{rank}"))) for rank in range(me.size)]
        all_runs.append(runs)
        if not runs[sweep.victim].place:
            break
    return all_runs


def sweeps_here(me: Rank, library: Path, sweeps: list[Sweep], most: int) -> list[list[list[Run]]]:
    """One after the other in the same processes, of which places know that they have failed before."""
    return [sweep_here(me, library, sweep, most) for sweep in sweeps]


def swept(library: Path, sweeps: list[Sweep], most: int, noticed: float = NOTICED) -> list[dict[str, Any]]:
    """What came of each."""
    began, none = time.monotonic(), {"places": {}, "stories": []}
    try:
        runs_of_all = run(sweeps_here, sweeps[0].ranks, library, sweeps, most)[0]
    except (Exception, pytest.fail.Exception) as error:
        return [{"sweep": str(sweeps[0]), "failures": 0, "wrong": {f"BROKE: {str(error)[:4000]}": 1}, **none}]
    seconds, found = (time.monotonic() - began) / len(sweeps), []
    for sweep, runs in zip(sweeps, runs_of_all, strict=True):
        bad, stories = Counter[str](), []
        for each in runs:
            for verdict in (verdicts := list(sweep.judge(each, noticed))):
                bad[f"{place_name(each[sweep.victim].place)}: {verdict[:230]}"] += 1
            if verdicts:
                by_rank = (f"rank {rank}, {own.took:.1f} s:\n{own.story}" for rank, own in enumerate(each))
                stories.append("\n".join((*verdicts, *by_rank)))
        reached = Counter(each[sweep.victim].place for each in runs if each[sweep.victim].place)
        line = {"sweep": str(sweep), "failures": reached.total(), "wrong": bad, "seconds": round(seconds, 1)}
        found.append({**line, "places": reached, "stories": stories[:STORIES]})
    return found


def build(folder: Path) -> Path:
    """Of requests.cpp, the library."""
    made = folder / "requests.so"
    source = Path(__file__).with_name("requests.cpp")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(["c++", *flags, str(source), "-o", str(made)], check=True)
    return made
