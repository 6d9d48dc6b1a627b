"""`ringreduce top`: the groups of this host, what each rank does, and whom the others wait for.

It reads the memory that the ranks of a group share, through a descriptor that one of them keeps open. The ranks write
there for each other in any case, so being looked at costs them nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringreduce.cli.arguments import seconds
from ringreduce.cli.terminal import console, printable, put, say, table
from ringreduce.common import compiled
from ringreduce.common.failures import InvalidArgument
from ringreduce.common.ranks import numbers
from ringreduce.common.units import bytes_text, time_text

if TYPE_CHECKING:
    from ringreduce._C import GroupSeen, RankSeen

MEMORY = "/memfd:ringreduce (deleted)"
"""What the kernel calls the memory that the ranks of a group share (`network.local`)."""

SIGN_OF_LIFE = 0.5
"""Seconds: a rank that waits says so more often than that."""

LONGEST_PROGRAM = 100
"""Characters of a command line that are shown."""

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


class Group(NamedTuple):
    """A group, and its ranks on this host."""

    name: str
    job: str  # the same for the groups of a job, and in the paths of its flight records
    size: int
    user: str
    program: str  # the command line of the first rank here that still runs
    ranks: list[Rank]


def add(command: Any) -> None:
    parser = command(
        description="Shows the groups of this host that this user may see: of which job they are, what each rank does, "
        "since when, and which rank the others wait for. It costs the ranks nothing. Bytes are those of a rank's own "
        "block.",
        epilog="examples:\n  ringreduce top\n  ringreduce top --once --json",
    )
    parser.add_argument("--interval", type=seconds, default=1.0, help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="look twice, print, and end")
    parser.add_argument("--json", action="store_true", help="print each look as a line of JSON")
    parser.add_argument("--prometheus", action="store_true", help="print once, in the text format of Prometheus")


def run(arguments: argparse.Namespace) -> int:
    compiled.require("groups cannot be looked at here")
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


def _print(groups: dict[int, Group], arguments: argparse.Namespace) -> None:
    if arguments.prometheus:
        put(prometheus(groups))
    elif arguments.json:
        each = [
            group._asdict() | {"ranks": [rank._asdict() for rank in group.ranks], "verdict": verdict(group.ranks)}
            for group in groups.values()
        ]
        put(json.dumps(each))
    else:
        _show(groups, clear=not arguments.once)


class Watch:
    """What was seen at earlier looks, by which times and rates are known."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[RankSeen, float, float]] = {}
        """By memory and rank: what was seen last, when, and since when it has been in the same call or between two."""

    def look(self) -> dict[int, Group]:
        """The groups, by the numbers of their memory. Looks at all groups once."""
        groups, now, seen = {}, time.monotonic(), {}
        for memory, group in _memories():
            rows, global_of = [], {its.rank: its.global_rank for its in group.ranks}
            for its in group.ranks:
                before = self._before.get((memory, its.rank))
                same = before and (before[0].entered, before[0].completed) == (its.entered, its.completed)
                since = before[2] if before and same else now
                seen[memory, its.rank] = its, now, since
                rows.append(_rank(its, global_of, now - since, before and (before[0], now - before[1])))
            user, program = next(filter(None, (_process(its.pid) for its in rows)), ("", ""))
            groups[memory] = Group(group.name, group.job, group.size, user, program, rows)
        self._before = seen
        return groups


def _process(pid: int) -> tuple[str, str] | None:
    """Whose it is, and its command line; None: it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return (user, os.fsdecode(b" ".join(words))) if any(words) else None


def _memories() -> Iterator[tuple[int, GroupSeen]]:
    """The memory of each group that this user may read: its inode, and the group."""
    observe, known = compiled.load().observe, set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError, InvalidArgument):  # it has ended, is another user's, or of another version
            if os.readlink(link) != MEMORY:
                continue
            memfd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
            try:
                memory = os.fstat(memfd).st_ino
                if memory not in known and (group := observe(memfd)).ranks:
                    known.add(memory)
                    yield memory, group
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


def _title(group: Group) -> str:
    program = group.program if len(group.program) <= LONGEST_PROGRAM else f"{group.program[:LONGEST_PROGRAM]}..."
    here = f", {len(group.ranks)} of them here" if len(group.ranks) < group.size else ""
    return printable(f"group {group.name} of {group.size} ranks{here}, job {group.job}, {group.user}: {program}")


def _show(groups: dict[int, Group], clear: bool) -> None:
    to = console()
    if clear and to.is_terminal:
        put(CLEAR)
    if not groups:
        say(to, "no group of ringreduce is on this host, or none that this user may see")
    for group in groups.values():
        say(to, _title(group), style="bold")
        rows = table("rank", "pid", "state", "since", "waits for", "calls/s", "bytes/s", "latest call",
                     right=("rank", "pid", "since", "waits for", "calls/s", "bytes/s"))  # fmt: skip
        for its in group.ranks:
            waits_for = "" if its.waits_for is None else str(its.waits_for)
            since = time_text(its.since) if its.since else ""
            rows.add_row(str(its.rank), str(its.pid), its.state, since, waits_for,
                         f"{its.calls_per_s:.0f}", bytes_text(its.bytes_per_s), its.call)  # fmt: skip
        to.print(rows)
        if said := verdict(group.ranks):
            say(to, said)


METRICS: list[tuple[str, str, Callable[[Rank], float]]] = [
    ("calls_per_second", "collectives that the rank has ended", lambda its: its.calls_per_s),
    ("bytes_per_second", "bytes of the rank's own blocks in them", lambda its: its.bytes_per_s),
    ("since_seconds", "time in the present call, or since the latest", lambda its: its.since),
    ("waits", "1: the rank waits for another", lambda its: its.waits_for is not None),
    ("stopped", "1: the rank's process is stopped or has ended", lambda its: its.state in ("stopped", "has ended")),
]


def prometheus(groups: dict[int, Group]) -> str:
    """The text format of Prometheus, version 0.0.4."""
    lines = []
    for name, help, value in METRICS:
        lines += [f"# HELP ringreduce_{name} {help}", f"# TYPE ringreduce_{name} gauge"]
        for memory, group in groups.items():
            of_group = (
                f'group="{memory}",name={_quoted(group.name)},job={_quoted(group.job)},user={_quoted(group.user)}'
            )
            for its in group.ranks:
                labels = f'{of_group},rank="{its.rank}",pid="{its.pid}"'
                lines.append(f"ringreduce_{name}{{{labels}}} {float(value(its)):g}")
    return "\n".join(lines)


def _quoted(value: str) -> str:
    """As a label's value: with a backslash before each backslash and quote, and \\n for a line's end."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
