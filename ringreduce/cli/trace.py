"""`ringreduce trace`: the flight records of all ranks as one trace, and which rank the others waited for.

A record has the latest calls of one process; `dump_flight_record` writes it, and every rank when its group breaks.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import pickle
import re
import statistics
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ringreduce.cli.terminal import Help, console, put, say, table
from ringreduce.common.failures import InvalidArgument
from ringreduce.common.files import content_of, write_file
from ringreduce.common.ranks import numbers
from ringreduce.common.units import time_text

CLOCKS_DIFFER = 1e-3
"""Seconds by which the ends of two ranks' calls differ in the median, from which on their clocks count as different."""

ANOTHER_RUN = 60.0
"""Seconds from which on a rank's times are too far from the others' for one run."""

ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "sparse_all_reduce")
"""How the names of collectives begin that no rank ends before all have begun them."""

MOST_UNFINISHED = 20
"""Lines about calls that some rank has not ended."""

LARGEST = 2 << 30
"""Bytes of a record; a call takes some 170."""


class Call(NamedTuple):
    """A call as one rank recorded it. Times are in seconds since 1970 by that rank's clock."""

    rank: int
    group: str
    name: str  # "all_reduce", or "send 0->1"
    number: int  # among the group's collectives, or among the messages from one rank to another
    message: bool
    begun: float  # when its turn came: an asynchronous call is made earlier
    ended: float | None
    detail: dict[str, Any]


class Record(NamedTuple):
    """A rank's file."""

    path: Path
    calls: list[Call]
    groups: dict[str, list[int]]
    """The global ranks of each group."""


def add(commands: Any, summary: str) -> None:
    parser = commands.add_parser(
        "trace",
        help=summary,
        description="Reads the flight records of ranks, prints which rank the others waited for and which calls have "
        "not ended, and writes a trace for https://ui.perfetto.dev. A record is what "
        "ringreduce.dump_flight_record(path) writes, and each rank when its group breaks.",
        epilog="example:\n  ringreduce trace fr/rank0 fr/rank1 --save trace.json",
        formatter_class=Help,
    )
    parser.add_argument(
        "records", metavar="RECORD", nargs="+", type=Path, help="a rank's file; its name ends with the rank"
    )
    parser.add_argument("--save", type=Path, metavar="OUT.json", help="write the trace to this file")
    parser.add_argument("--json", action="store_true", help="print as JSON what is printed otherwise")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    records: dict[int, Record] = {}
    for path in arguments.records:
        rank = _rank_of(path)
        if rank in records:
            raise InvalidArgument(f"{path}: another file's name ends with {rank} too; give one for each rank")
        records[rank] = _read(path, rank)
    offsets = clock_offsets({rank: record.calls for rank, record in records.items()})
    alike = {rank: offset for rank, offset in offsets.items() if abs(offset) < ANOTHER_RUN}
    calls = [_moved(call, alike.get(rank, 0.0)) for rank, its in records.items() for call in its.calls]
    members = {name: ranks for record in records.values() for name, ranks in record.groups.items()}
    found = {
        "ranks": {str(rank): len(its.calls) for rank, its in sorted(records.items())},
        "without_file": sorted({rank for ranks in members.values() for rank in ranks} - records.keys()),
        "of_another_run": sorted(_strangers(calls) | (offsets.keys() - alike.keys())),
        "clock_offsets_s": {str(rank): offset for rank, offset in alike.items() if offset},
        "last": waited_for(calls),
        "not_ended": not_ended(calls, members, records.keys()),
    }
    if arguments.save:
        write_file(arguments.save, json.dumps({"traceEvents": list(events(calls))}, allow_nan=False).encode())
    if arguments.json:
        put(json.dumps(found, indent=1))
    else:
        _show(found, records, arguments.save)
    return 0


def _rank_of(path: Path) -> int:
    number = re.search(r"[0-9]+$", path.name)
    if not number:
        raise InvalidArgument(f"{path}: its name must end with the rank, as in rank0; rename it")
    return int(number[0])


class _Unpickler(pickle.Unpickler):
    """Loads plain values only: a record may come from anybody."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.jit._pickle" and (name == "restore_type_tag" or name.startswith("build_")):
            return lambda value, *_: value  # these say the type of a list or a dictionary, which we need not know
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _read(path: Path, rank: int) -> Record:
    content = content_of(path, LARGEST)
    if not content:
        raise InvalidArgument(f"{path}: this file is empty; the rank ended before it wrote its record")
    try:
        record = _Unpickler(io.BytesIO(content)).load()
        groups = {str(name): _ranks_in(group["ranks"]) for name, group in record["pg_config"].items()}
        return Record(path, [_call(rank, entry) for entry in record["entries"]], groups)
    except Exception as error:  # what others have pickled may raise any
        raise InvalidArgument(
            f"{path}: this is no flight record, or one that is cut off ({error}); ringreduce.dump_flight_record(path) "
            "writes one"
        ) from None


def _ranks_in(text: str) -> list[int]:
    return [int(rank) for rank in json.loads(text)]


def _call(rank: int, entry: dict[str, Any]) -> Call:
    message = bool(entry["is_p2p"])
    begun = _seconds(entry["time_discovered_started_ns"] or entry["time_created_ns"])
    done = entry["state"] == "completed" and bool(entry["time_discovered_completed_ns"])
    return Call(
        rank,
        str(entry["process_group"][0]),
        str(entry["profiling_name"]).partition(":")[2],
        int(entry["p2p_seq_id" if message else "collective_seq_id"]),
        message,
        begun,
        _seconds(entry["time_discovered_completed_ns"]) if done else None,
        {
            "sizes": str(entry["input_sizes"]),
            "dtypes": str(entry["input_dtypes"]),
            "state": str(entry["state"]),
            "queued_us": round((begun - _seconds(entry["time_created_ns"])) * 1e6, 3),
        },
    )


def _seconds(nanoseconds: Any) -> float:
    """Checked, since everything is shown from the earliest time on."""
    if not isinstance(nanoseconds, int) or nanoseconds <= 0:
        raise ValueError(f"a time is {nanoseconds!r}")
    return nanoseconds / 1e9


def _moved(call: Call, by: float) -> Call:
    return call._replace(begun=call.begun - by, ended=None if call.ended is None else call.ended - by)


def clock_offsets(recorded: dict[int, list[Call]]) -> dict[int, float]:
    """Seconds by which each rank's clock is ahead of that of the first rank; 0 where clocks seem to be alike.

    Ranks end a collective of ENDS_TOGETHER at about the same time, so the median of the differences of these times is
    the difference of their clocks.
    """
    ends = {
        rank: {(c.group, c.number): c.ended for c in calls if c.ended is not None and c.name.startswith(ENDS_TOGETHER)}
        for rank, calls in sorted(recorded.items())
    }
    first = next(iter(ends.values()))
    offsets = {}
    for rank, its in ends.items():
        differences = [its[call] - first[call] for call in its.keys() & first.keys()]
        offset = statistics.median(differences) if differences else 0.0
        offsets[rank] = offset if abs(offset) >= CLOCKS_DIFFER else 0.0
    return offsets


def _strangers(calls: list[Call]) -> set[int]:
    """Ranks whose calls all ended long before any other rank's began."""
    spans: dict[int, tuple[float, float]] = {}
    for call in calls:
        begin, end = spans.get(call.rank, (math.inf, 0.0))
        spans[call.rank] = min(begin, call.begun), max(end, call.ended or call.begun)
    return {
        rank
        for rank, (_, end) in spans.items()
        if len(spans) > 1 and all(end + ANOTHER_RUN < begin for other, (begin, _) in spans.items() if other != rank)
    }


def _collectives(calls: list[Call]) -> dict[tuple[str, int], list[Call]]:
    """The collectives, as each rank that has them recorded them."""
    found: dict[tuple[str, int], list[Call]] = {}
    for call in calls:
        if not call.message:
            found.setdefault((call.group, call.number), []).append(call)
    return found


def waited_for(calls: list[Call]) -> list[dict[str, Any]]:
    """For each rank, of how many collectives it began last of the ranks, and for how many seconds the first had waited
    then, in all. The rank that was waited for longest comes first."""
    last: dict[int, list[float]] = {}
    for each in _collectives(calls).values():
        if len(each) > 1:
            latest = max(each, key=lambda call: call.begun)
            last.setdefault(latest.rank, []).append(latest.begun - min(call.begun for call in each))
    rows = [{"rank": rank, "collectives": len(times), "waited_s": sum(times)} for rank, times in last.items()]
    return sorted(rows, key=lambda row: -row["waited_s"])


def not_ended(calls: list[Call], members: dict[str, list[int]], files: Collection[int]) -> list[dict[str, Any]]:
    """The calls that some rank has begun and not ended, the earliest first: who called what, and which ranks of `files`
    have not begun them. A call that a rank's record has no longer counts as begun."""
    latest: dict[tuple[str, int], int] = {}
    for call in calls:
        if not call.message:
            latest[call.group, call.rank] = max(call.number, latest.get((call.group, call.rank), 0))
    of_call = _collectives(calls) | {
        (f"{call.rank} {call.group} {call.name}", call.number): [call] for call in calls if call.message
    }
    found = []
    for (_, number), each in of_call.items():
        if all(call.ended is not None for call in each):
            continue
        group, names = each[0].group, dict[str, list[int]]()
        for call in sorted(each):
            names.setdefault(call.name, []).append(call.rank)
        ranks = () if each[0].message else members.get(group, ())
        found.append(
            {
                "group": group,
                "number": number,
                "calls": names,
                "begun": min(call.begun for call in each),
                "not_ended_by": sorted(call.rank for call in each if call.ended is None),
                "not_begun_by": [rank for rank in ranks if rank in files and latest.get((group, rank), 0) < number],
            }
        )
    return sorted(found, key=lambda row: row["begun"])


def events(calls: list[Call]) -> Iterable[dict[str, Any]]:
    """The trace in Chrome's format: a process for each rank, threads for each of its groups, times in microseconds.

    Calls on one thread must not overlap, so a group has as many as it has calls at the same time.
    """
    calls = sorted(calls, key=lambda call: call.begun)
    start = calls[0].begun if calls else 0.0
    last = max((call.ended or call.begun for call in calls), default=0.0)
    lanes: dict[tuple[int, str], list[float]] = {}  # when the latest call on each thread ends
    threads: dict[tuple[int, str, int], int] = {}
    for rank in sorted({call.rank for call in calls}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for call in calls:
        ended = last if call.ended is None else call.ended
        ends = lanes.setdefault((call.rank, call.group), [])
        lane = next((each for each, end in enumerate(ends) if end <= call.begun), len(ends))
        ends[lane : lane + 1] = [ended]
        at = call.rank, call.group, lane
        if at not in threads:
            threads[at] = len(threads)
            name = {"name": f"group {call.group}"}
            yield {"ph": "M", "name": "thread_name", "pid": call.rank, "tid": threads[at], "args": name}
        yield {
            "ph": "X",
            "pid": call.rank,
            "tid": threads[at],
            "name": call.name if call.ended is not None else f"{call.name} (not ended)",
            "ts": (call.begun - start) * 1e6,
            "dur": max(ended - call.begun, 0.0) * 1e6,
            "args": call.detail | {"number": call.number},
        }


def _show(found: dict[str, Any], records: dict[int, Record], saved: Path | None) -> None:
    to = console()
    if found["without_file"]:
        say(to, f"there is no file of {numbers(found['without_file'])}, which may have ended first")
    for rank in found["of_another_run"]:
        say(to, f"{records[rank].path}: its times are far from the others'; is it of another run?")
    for rank, offset in found["clock_offsets_s"].items():
        say(to, f"rank {rank}: its clock is {time_text(abs(offset))} {'ahead' if offset > 0 else 'behind'} of rank "
            f"{min(records)}'s; corrected")  # fmt: skip
    rows = table("rank", "began last", "others waited", right=("began last", "others waited"))
    for row in found["last"]:
        rows.add_row(str(row["rank"]), str(row["collectives"]), time_text(row["waited_s"]))
    if found["last"]:
        to.print(rows)
    else:
        say(to, "no collective is in the records of two ranks")
    for row in found["not_ended"][:MOST_UNFINISHED]:
        (name, *others), ranks = row["calls"], f"not ended by {numbers(row['not_ended_by'])}"
        if others:
            name, ranks = "different calls", ", ".join(f"{name} by {numbers(by)}" for name, by in row["calls"].items())
        missing = f"; not begun by {numbers(row['not_begun_by'])}" if row["not_begun_by"] else ""
        say(to, f"group {row['group']}: {name} #{row['number']}: {ranks}{missing}")
    if len(found["not_ended"]) > MOST_UNFINISHED:
        say(to, f"{len(found['not_ended']) - MOST_UNFINISHED} more have not ended; --json has them all")
    if saved:
        say(to, f"trace: {saved}, for https://ui.perfetto.dev")
