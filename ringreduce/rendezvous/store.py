"""How ranks tell each other things while a group is made, by any store: torch's, or one without torch.

    exchange = Exchange(store, rank, size, timeout)
    answer = exchange("doors", ["10.0.0.1:5"], lambda values: ...)     # on all ranks; `values` are theirs, on rank 0

Every rank tells the store its value; rank 0 alone collects them, and what it makes of them all get. So a rank asks the
store a number of times that does not grow with the ranks. A wait ends early when a rank has said that it cannot go on
(`give_up`), or when a process of this machine that is waited for has ended.

Waits look less and less often, after a quarter of the time that has passed. They do not block in the store: torch's
keeps its lock meanwhile, and ranks may be threads that share one; and it writes a warning for each wait that times out.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ringreduce.common import failures
from ringreduce.common.failures import CollectiveTimeout, PeerLost, RingReduceError, SystemFailure
from ringreduce.membership.directory import value_of

SHORTEST, LONGEST, LONGEST_BY_RANK = 0.0002, 0.05, 0.0005
"""Seconds between two looks; the third for each rank, so that one store, and the cores of one host, serve them all."""
CHECK_PROCESSES, CHECK_BY_RANK = 0.25, 0.001
"""Seconds between two looks whether processes have ended, and the same for each rank."""
CHECK_KNOWN_ENDS = 0.005
"""Seconds between two looks where whoever makes the group knows of ends."""
LOOKS = 10
"""Where a look at the store takes longer than a tenth of LONGEST, other questions wait for so many looks."""
LEST = 1.0
"""Seconds that the others wait longer than rank 0, which can tell them whom it has missed."""

WHO = "who"
"""The first phase, in which all ranks tell at least {"who": identity()}."""
RANK_0 = "rank 0, which waits for all ranks,"


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


ended: contextvars.ContextVar[Callable[[], list[int]] | None] = contextvars.ContextVar("ended", default=None)
"""Where the ranks of a group that is being made were in another one: those of its ranks whose end shows there. With it,
the death of a rank that has not told the store anything is seen, too."""


gives_up: contextvars.ContextVar[Callable[[RingReduceError], None] | None] = contextvars.ContextVar(
    "gives_up", default=None
)
"""What to do when this process cannot go on with a group that is being made, before it closes its connections."""


looks: contextvars.ContextVar[Callable[[], RingReduceError | None] | None] = contextvars.ContextVar(
    "looks", default=None
)
"""What a wait also calls now and then while a group is made. If it returns an error, the wait raises that."""


def passed(stage: str) -> None:
    """Called at each stage of making a group. Tests put something else here."""


class Who(NamedTuple):
    """How others name a rank and, on its machine, see its end."""

    host: str
    pid: int
    pids: str
    """Processes for which it is equal have the same numbers for processes."""
    began: int
    """When the kernel started the process. Once it has ended, its number may go to a process that began later."""


class Exchange:
    """A rank's part in making one group."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: float, cards: Sequence[dict[str, Any]] = ()
    ) -> None:
        """`cards`: what the ranks have told before, instead of the first phase: see `card`."""
        self.store, self.rank, self.size, self.cards = store, rank, size, cards
        self.deadline = time.monotonic() + timeout
        # A group may be made again under the same store prefix; but not by the same cards.
        self.prefix = f"ringreduce/{0 if cards else store.add(f'ringreduce/generation/{rank}', 1)}"
        self.watched = range(size) if rank == 0 else [0]
        """The ranks without which a wait is in vain: where they are on this machine, their end ends it."""
        self._known = {rank: Who(*card["who"]) for rank, card in enumerate(cards)}
        self._ended = ended.get()

    def __call__(self, phase: str, value: Any, answer: Callable[[list[Any]], Any] = list) -> Any:
        """What rank 0's `answer` makes of the values of all ranks, as JSON has it. To be called on all ranks.

        Raises `CollectiveTimeout` naming the ranks that did not come in time; what `answer` raises; `PeerLost` if
        another rank has given up, or is on this machine and has ended.
        """
        self.tell(phase, value)
        if self.rank == 0:
            return self.publish(phase, self.decide(answer, self.collect(phase)))
        return self.answer(phase)

    def decide(self, answer: Callable[[list[Any]], Any], values: list[Any]) -> Any:
        try:
            return answer(values)
        except RingReduceError as error:  # what rank 0 finds wrong with the ranks' values is everybody's error
            self._tell_error(type(error).__name__, str(error), error.culprit)
            raise

    def tell(self, phase: str, value: Any) -> None:
        self.store.set(f"{self.prefix}/{phase}/{self.rank}", json.dumps(value))
        passed(f"{phase}: told")

    def told(self, phase: str, rank: int, deadline: float | None = None) -> Any:
        """What a rank has told; waits for it until then."""
        if phase == WHO and self.cards:
            return self.cards[rank]
        key = f"{self.prefix}/{phase}/{rank}"
        if deadline:
            return json.loads(self._come(key, lambda: [rank], deadline))
        return json.loads(self.store.get(key))

    def has_told(self, phase: str, rank: int) -> bool:
        return bool(phase == WHO and self.cards) or self.store.check([f"{self.prefix}/{phase}/{rank}"])

    def publish(self, phase: str, answer: Any) -> Any:
        self.store.set(f"{self.prefix}/{phase}", json.dumps(answer))
        passed(f"{phase}: published")
        return answer

    def answered(self, phase: str) -> bool:
        return self.store.check([f"{self.prefix}/{phase}"])

    def answer(self, phase: str, deadline: float | None = None) -> Any:
        """What rank 0 has published, or will."""
        text = self._come(f"{self.prefix}/{phase}", RANK_0, deadline)
        passed(f"{phase}: answered")
        return json.loads(text)

    def _come(self, key: str, whom: str | Callable[[], list[int]], deadline: float | None) -> bytes:
        """The value of a key, once it is there."""
        found: list[bytes] = []

        def look() -> bool:
            if (value := _peek(self.store, key)) is not None:
                found.append(value)
            return bool(found)

        self.wait(_asleep(look), whom, deadline)
        return found[0]

    def collect(self, phase: str) -> list[Any]:
        """What all ranks have told."""
        if phase == WHO and self.cards:
            return list(self.cards)
        keys = [f"{self.prefix}/{phase}/{rank}" for rank in range(self.size)]
        came: dict[int, Any] = {}

        def late() -> list[int]:
            """Those who have not come; meanwhile, who those are that have."""
            for rank in [rank for rank in range(self.size) if rank not in came]:
                if self.store.check([keys[rank]]):
                    came[rank] = self.told(phase, rank)
                    if phase == WHO:
                        self.know(rank, came[rank]["who"])
            return [rank for rank in range(self.size) if rank not in came]

        self.wait(_asleep(lambda: self.store.check(keys)), late)
        multi_get = getattr(self.store, "multi_get", None)
        texts = multi_get(keys) if multi_get else map(self.store.get, keys)
        passed(f"{phase}: collected")
        return [json.loads(text) for text in texts]

    def wait(
        self,
        ready: Callable[[float], bool],
        whom: str | Callable[[], list[int]],
        deadline: float | None = None,
        first: float = 0.0,
    ) -> None:
        """Returns when `ready(seconds)` says so, which may take that long to look, and the first time `first`.

        `whom`: what is waited for, or the ranks that have not come yet.
        """
        began = checked = asked = before = time.monotonic()
        deadline = deadline or self.deadline + (LEST if whom == RANK_0 else 0.0)
        pause = first
        try:
            while not ready(pause):
                now = time.monotonic()
                took = max(now - before - pause, 0.0)
                # Where the store is far away, most looks are for what is waited for.
                turn = LOOKS * took < LONGEST or now - asked > LOOKS * took or now > deadline
                pause = min(max((now - began) / 4, SHORTEST, first), max(LONGEST, LONGEST_BY_RANK * self.size))
                if turn and (now - began > LONGEST or now > deadline):
                    self.raise_if_given_up()
                between = CHECK_KNOWN_ENDS if self._ended else CHECK_PROCESSES
                if now - checked > max(between, CHECK_BY_RANK * self.size) or now > deadline:
                    checked = now
                    missing = whom() if turn and callable(whom) else []
                    try:
                        self.raise_if_dead()
                    except PeerLost:
                        if ready(0.0):  # it did its part before it ended
                            return
                        raise
                    if now > deadline and (missing or not callable(whom)):
                        text = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else whom
                        culprit = missing[0] if missing else 0
                        raise CollectiveTimeout(f"making the group: {text} did not come in time", culprit)
                asked = time.monotonic() if turn else asked
                before = time.monotonic()
        except RingReduceError:
            raise
        except RuntimeError as error:  # torch's: the store, which a process of a rank may hold, is gone
            if (rank := self._dead()) >= 0:
                raise PeerLost(f"making the group: {self.describe(rank)} died", rank) from None
            raise SystemFailure(f"making the group: its store cannot be asked any more: {error}") from None

    def raise_if_lost(self) -> None:
        self.raise_if_given_up()
        self.raise_if_dead()

    def know(self, rank: int, who: Sequence[Any]) -> None:
        """`who`: what the rank has told as its `identity`."""
        self._known[rank] = Who(*who)

    def raise_if_dead(self) -> None:
        """Raises `PeerLost` if one of the ranks that are watched has ended, as far as this process can see."""
        if self.rank != 0 and 0 not in self._known and self.store.check([f"{self.prefix}/{WHO}/0"]):
            self.know(0, self.told(WHO, 0)["who"])
        if (rank := self._dead()) >= 0:
            self.raise_if_given_up()  # which may be the reason for its end
            raise PeerLost(f"making the group: {self.describe(rank)} died", rank)

    def _dead(self) -> int:
        """The first of the watched ranks that has ended, as far as this process can see; -1: none."""
        if self._ended and (found := self._ended()):
            return found[0]
        for rank in self.watched:
            who = self._known.get(rank)
            if who and rank != self.rank and who.pids == _pid_namespace() and has_ended(who):
                return rank
        return -1

    def describe(self, rank: int) -> str:
        who = self._known.get(rank)
        return f"rank {rank} ({who.host}, pid {who.pid})" if who else f"rank {rank}"

    def give_up(self, error: RingReduceError) -> None:
        """Tells the others that this rank does not come, and why. The first to say so is heard."""
        if tell := gives_up.get():
            tell(error)
        if isinstance(error, CollectiveTimeout | PeerLost):
            self._tell_error(type(error).__name__, str(error), error.culprit)
        else:
            culprit = error.culprit if error.culprit >= 0 else self.rank
            me = f"rank {self.rank} ({socket.gethostname()}, pid {os.getpid()})"
            self._tell_error("PeerLost", f"making the group: {me}: {error}", culprit)

    def _tell_error(self, kind: str, why: str, culprit: int) -> None:
        with contextlib.suppress(Exception):  # the store may be gone, and what counts is the error
            if not self.store.check([f"{self.prefix}/given up"]):
                self.store.set(f"{self.prefix}/given up", json.dumps([kind, why, culprit]))

    def raise_if_given_up(self) -> None:
        """Raises what keeps another rank from coming."""
        look = looks.get()
        found = look() if look else None
        if self.store.check([f"{self.prefix}/given up"]):
            kind, why, culprit = json.loads(self.store.get(f"{self.prefix}/given up"))
            raise getattr(failures, kind)(str(why), int(culprit))
        if found:
            raise found


def _peek(store: Store, key: str) -> bytes | None:
    """The value of a key; None: there is none."""
    if hasattr(store, "compare_set"):  # as torch's have
        return value_of(store, key)
    return store.get(key) if store.check([key]) else None


def _asleep(ready: Callable[[], bool]) -> Callable[[float], bool]:
    """For `Exchange.wait`, where there is nothing to wait at but time."""

    def after(pause: float) -> bool:
        time.sleep(pause)
        return ready()

    return after


@functools.cache
def identity() -> Who:
    """This process's."""
    return Who(socket.gethostname(), os.getpid(), _pid_namespace(), _began(os.getpid()))


os.register_at_fork(after_in_child=identity.cache_clear)


@functools.cache
def kernel() -> str:
    """Equal for processes of one machine, until it is started anew."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _pid_namespace() -> str:
    return f"{kernel()[:13]}/{os.stat('/proc/self/ns/pid').st_ino}"


def _began(pid: int) -> int:
    """When a process was started, in clock ticks since its machine was."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])  # the name before ")" may contain anything


def open_process(who: Who) -> int:
    """A pidfd of a process of this PID namespace.

    Raises `ProcessLookupError` if the process has ended, and another `OSError` if that cannot be found out.
    """
    pidfd = os.pidfd_open(who.pid)
    try:
        began = _began(who.pid)
    except OSError:  # it has just ended, which the descriptor shows, or /proc hides it from this user
        began = who.began
    if began != who.began:
        os.close(pidfd)
        raise ProcessLookupError(f"process {who.pid} has ended, and another one has its number")
    return pidfd


def has_ended(who: Who) -> bool:
    """Whether the process has, as far as this one can see."""
    try:
        pidfd = open_process(who)
    except ProcessLookupError:
        return True
    except OSError:  # nobody knows
        return False
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(pidfd)


def get(store: Store, key: str, whom: str, deadline: float, look: Callable[[], None] = lambda: None) -> str:
    """What the store has under `key`; waits for it, for `whom`, until `deadline`, then raises `CollectiveTimeout`.
    Calls `look` now and then, which may raise."""
    pause = SHORTEST
    while not store.check([key]):
        look()
        if time.monotonic() > deadline:
            raise CollectiveTimeout(f"making the group: {whom} did not come in time")
        time.sleep(pause)
        pause = min(pause * 9 / 8, LONGEST)
    return str(store.get(key).decode())
