"""`ringreduce top`: the groups of this host, what each rank does, and whom the others wait for.

It reads the memory that the ranks of a group share, through a descriptor that one of them keeps open. The ranks write
there for each other in any case, so being looked at costs them nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.cli.arguments import seconds
from ringreduce.cli.terminal import Help, console, put, say, table
from ringreduce.common import compiled
from ringreduce.common.failures import InvalidArgument, SystemFailure
from ringreduce.common.ranks import numbers
from ringreduce.common.units import bytes_text, time_text

if TYPE_CHECKING:
    from ringreduce._C import RankSeen

MEMORY = "/memfd:ringreduce (deleted)"
"""What the kernel calls the memory that the ranks of a group share (`network.local`)."""

SIGN_OF_LIFE = 0.5
"""Seconds: a rank that waits says so more often than that."""

CLEAR = "\x1b[H\x1b[2J"


class Rank(NamedTuple):
    """A rank, as it was seen at two moments."""

    rank: int
    pid: int
    state: str  # "in a call", "waits", "between calls", "stopped", "has left", "has ended"
    call: str  # its latest call, with its number
    since: float  # seconds that it has been in this call, or between calls, as far as we have looked
    waits_for: int | None
    calls_per_s: float
    bytes_per_s: float


def add(commands: Any, summary: str) -> None:
    parser = commands.add_parser(
        "top",
        help=summary,
        description="Shows the groups of this host that this user may see: what each rank does, since when, and which "
        "rank the others wait for. It costs the ranks nothing. Bytes are those of a rank's own block.",
        epilog="examples:\n  ringreduce top\n  ringreduce top --once --json",
        formatter_class=Help,
    )
    parser.add_argument("--interval", type=seconds, default=1.0, help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look twice, print, and end")
    parser.add_argument("--json", action="store_true", help="print each look as a line of JSON")
    parser.add_argument("--prometheus", action="store_true", help="print once, in the text format of Prometheus")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if missing := compiled.why_not():
        raise SystemFailure(f"groups cannot be looked at here: {missing}")
    once = arguments.once or arguments.prometheus
    watch = Watch()
    watch.look()
    try:
        while True:
            time.sleep(arguments.interval)
            _print(watch.look(), arguments)
            if once:
                return 0
    except KeyboardInterrupt:
        if once:
            raise
        return 0  # it has no other end


def _print(groups: dict[int, list[Rank]], arguments: argparse.Namespace) -> None:
    if arguments.prometheus:
        put(prometheus(groups))
    elif arguments.json:
        each = [{"ranks": [rank._asdict() for rank in ranks], "verdict": verdict(ranks)} for ranks in groups.values()]
        put(json.dumps(each))
    else:
        _show(groups, clear=not arguments.once)


class Watch:
    """What was seen at earlier looks, by which times and rates are known."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[RankSeen, float, float]] = {}
        """By memory and rank: what was seen last, when, and since when it has been in the same call or between two."""

    def look(self) -> dict[int, list[Rank]]:
        """The ranks of each group, by the number of its memory. Looks at all groups once."""
        groups, now, seen = {}, time.monotonic(), {}
        for memory, ranks in _memories():
            rows, global_of = [], {its.rank: its.global_rank for its in ranks}
            for its in ranks:
                before = self._before.get((memory, its.rank))
                same = before and (before[0].entered, before[0].completed) == (its.entered, its.completed)
                since = before[2] if before and same else now
                seen[memory, its.rank] = its, now, since
                rows.append(_rank(its, global_of, now - since, before and (before[0], now - before[1])))
            groups[memory] = rows
        self._before = seen
        return groups


def _memories() -> Iterator[tuple[int, list[RankSeen]]]:
    """The memory of each group that this user may read: its inode, and the ranks in it."""
    observe, known = compiled.load().observe, set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError, InvalidArgument):  # it has ended, is another user's, or of another version
            if os.readlink(link) != MEMORY:
                continue
            memfd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
            try:
                memory = os.fstat(memfd).st_ino
                if memory not in known and (ranks := observe(memfd)):
                    known.add(memory)
                    yield memory, ranks
            finally:
                os.close(memfd)


def _rank(its: RankSeen, global_of: dict[int, int], since: float, before: tuple[RankSeen, float] | None) -> Rank:
    waits = its.waits_for >= 0 and its.since_sign < SIGN_OF_LIFE
    calls = size = 0.0
    if before:
        last, passed = before
        calls = (its.completed - last.completed) / passed
        lately = [each for number, each in its.recent if last.completed < number <= its.completed]
        size = calls * sum(lately) / len(lately) if lately else 0.0  # the ranks keep only their latest calls
    number = f" #{its.number or its.entered}" if its.entered else ""
    call = its.call.partition(", plan=")[0] + (")" if ", plan=" in its.call else "")
    waits_for = global_of.get(its.waits_for, its.waits_for) if waits else None
    return Rank(its.global_rank, its.pid, _state(its, waits), call + number, since, waits_for, calls, size)


def _state(its: RankSeen, waits: bool) -> str:
    if its.left:
        return "has left"
    try:
        process = Path(f"/proc/{its.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    if process in "Tt":
        return "stopped"
    if process in "ZX":
        return "has ended"
    if waits:
        return "waits"
    return "in a call" if its.entered > its.completed else "between calls"


def verdict(ranks: list[Rank]) -> str:
    """Whom the others wait for, in a sentence; "" if nobody waits for long."""
    waiting = {each.rank: each.waits_for for each in ranks if each.waits_for is not None and each.since > SIGN_OF_LIFE}
    of = {each.rank: each for each in ranks}
    waits = f"{numbers(list(waiting))} wait{'s' * (len(waiting) == 1)} for"
    said = []
    for rank in sorted(set(waiting.values()) - waiting.keys()):
        its = of.get(rank)
        who = f"rank {rank} (pid {its.pid}), which {_which(its)}" if its else f"rank {rank}, which is on another host"
        said.append(f"{waits} {who}")
    return "; ".join(said)


def _which(its: Rank) -> str:
    return its.state if its.state.startswith("has") else f"has been {its.state} for {time_text(its.since)}"


def _show(groups: dict[int, list[Rank]], clear: bool) -> None:
    to = console()
    if clear and to.is_terminal:
        put(CLEAR)
    if not groups:
        say(to, "no group of ringreduce is on this host, or none that this user may see")
    for ranks in groups.values():
        rows = table("rank", "pid", "state", "since", "waits for", "calls/s", "bytes/s", "latest call",
                     right=("rank", "pid", "since", "waits for", "calls/s", "bytes/s"))  # fmt: skip
        for its in ranks:
            waits_for = "" if its.waits_for is None else str(its.waits_for)
            since = time_text(its.since) if its.since else ""
            rows.add_row(str(its.rank), str(its.pid), its.state, since, waits_for,
                         f"{its.calls_per_s:.0f}", bytes_text(its.bytes_per_s), its.call)  # fmt: skip
        to.print(rows)
        if said := verdict(ranks):
            say(to, said)


METRICS: list[tuple[str, str, Callable[[Rank], float]]] = [
    ("calls_per_second", "collectives that the rank has ended", lambda its: its.calls_per_s),
    ("bytes_per_second", "bytes of the rank's own blocks in them", lambda its: its.bytes_per_s),
    ("since_seconds", "time in the present call, or since the latest", lambda its: its.since),
    ("waits", "1: the rank waits for another", lambda its: its.waits_for is not None),
    ("stopped", "1: the rank's process is stopped or has ended", lambda its: its.state in ("stopped", "has ended")),
]


def prometheus(groups: dict[int, list[Rank]]) -> str:
    """The text format of Prometheus, version 0.0.4."""
    lines = []
    for name, help, value in METRICS:
        lines += [f"# HELP ringreduce_{name} {help}", f"# TYPE ringreduce_{name} gauge"]
        for memory, ranks in groups.items():
            for its in ranks:
                labels = f'group="{memory}",rank="{its.rank}",pid="{its.pid}"'
                lines.append(f"ringreduce_{name}{{{labels}}} {float(value(its)):g}")
    return "\n".join(lines)
