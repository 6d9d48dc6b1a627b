"""`ringreduce trace`: the flight records of all ranks as one trace, and which rank the others waited for.

A record has the latest calls of one process; `dump_flight_record` writes it, and every rank when its group breaks.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ringreduce.cli.terminal import Help, console, put, say, table
from ringreduce.common.failures import InvalidArgument
from ringreduce.common.files import content_of, write_file
from ringreduce.common.units import time_text

CLOCKS_DIFFER = 1e-3
"""Seconds by which the ends of two ranks' calls differ in the median, from which on their clocks count as different."""

ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "sparse_all_reduce")
"""How the names of collectives begin that no rank ends before all have begun them."""

MOST_UNFINISHED = 20
"""Lines about calls that some rank has not ended."""


class Call(NamedTuple):
    """A call as one rank recorded it. Times are in seconds since 1970 by that rank's clock."""

    rank: int
    group: str
    name: str  # "all_reduce", or "send 0->1"
    number: int  # among the group's collectives, or among the messages from one rank to another
    message: bool
    begun: float
    ended: float | None
    detail: dict[str, Any]


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
    recorded: dict[int, list[Call]] = {}
    members: dict[str, list[int]] = {}
    for path in arguments.records:
        rank = _rank_of(path)
        if rank in recorded:
            raise InvalidArgument(f"{path}: another file's name ends with {rank} too; give one for each rank")
        recorded[rank] = _read(path, rank, members)
    offsets = clock_offsets(recorded)
    calls = [_moved(call, offsets[rank]) for rank, its in recorded.items() for call in its]
    found = {
        "ranks": {str(rank): len(its) for rank, its in sorted(recorded.items())},
        "clock_offsets_s": {str(rank): offset for rank, offset in offsets.items() if offset},
        "last": waited_for(calls),
        "not_ended": not_ended(calls, members),
    }
    if arguments.save:
        write_file(arguments.save, json.dumps({"traceEvents": list(events(calls))}).encode())
    put(json.dumps(found, indent=1)) if arguments.json else _show(found, arguments.save)
    return 0


def _rank_of(path: Path) -> int:
    number = re.search(r"\d+$", path.name)
    if not number:
        raise InvalidArgument(f"{path}: its name must end with the rank, as in rank0; rename it")
    return int(number[0])


class _Unpickler(pickle.Unpickler):
    """Loads plain values only: a record may come from anybody."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.jit._pickle" and (name == "restore_type_tag" or name.startswith("build_")):
            return lambda value, *_: value  # these say the type of a list or a dictionary, which we need not know
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _read(path: Path, rank: int, members: dict[str, list[int]]) -> list[Call]:
    """The calls in a file. Adds the ranks of its groups to `members`."""
    content = content_of(path)
    try:
        record = _Unpickler(io.BytesIO(content)).load()
        for name, group in record["pg_config"].items():
            members[name] = json.loads(group["ranks"])
        return [_call(rank, entry) for entry in record["entries"]]
    except Exception as error:  # what has been pickled by others may raise any
        raise InvalidArgument(
            f"{path}: this is no flight record ({error}); ringreduce.dump_flight_record(path) writes one"
        ) from None


def _call(rank: int, entry: dict[str, Any]) -> Call:
    message = bool(entry["is_p2p"])
    done = entry["state"] == "completed" and entry["time_discovered_completed_ns"]
    return Call(
        rank,
        str(entry["process_group"][0]),
        str(entry["profiling_name"]).partition(":")[2],
        int(entry["p2p_seq_id" if message else "collective_seq_id"]),
        message,
        entry["time_created_ns"] / 1e9,
        entry["time_discovered_completed_ns"] / 1e9 if done else None,
        {"sizes": entry["input_sizes"], "dtypes": entry["input_dtypes"], "state": entry["state"]},
    )


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


def _collectives(calls: Iterable[Call]) -> dict[tuple[str, int], list[Call]]:
    """The collectives, as each rank that has them recorded them."""
    found: dict[tuple[str, int], list[Call]] = {}
    for call in calls:
        if not call.message:
            found.setdefault((call.group, call.number), []).append(call)
    return found


def waited_for(calls: Iterable[Call]) -> list[dict[str, Any]]:
    """For each rank, of how many collectives it began last of the ranks, and for how many seconds the first had waited
    then, in all. The rank that was waited for longest comes first."""
    last: dict[int, list[float]] = {}
    for each in _collectives(calls).values():
        if len(each) > 1:
            latest = max(each, key=lambda call: call.begun)
            last.setdefault(latest.rank, []).append(latest.begun - min(call.begun for call in each))
    rows = [{"rank": rank, "collectives": len(times), "waited_s": sum(times)} for rank, times in last.items()]
    return sorted(rows, key=lambda row: -row["waited_s"])


def not_ended(calls: Iterable[Call], members: dict[str, list[int]]) -> list[dict[str, Any]]:
    """The collectives that some rank has begun and not ended, the earliest first, and who has not begun them.

    Ranks without a file are left out, and calls that a rank's record may have had and has no longer.
    """
    calls = list(calls)
    latest: dict[tuple[str, int], int] = {}
    for call in calls:
        if not call.message:
            latest[call.group, call.rank] = max(call.number, latest.get((call.group, call.rank), 0))
    found = []
    with_files = {call.rank for call in calls}
    for (group, number), each in _collectives(calls).items():
        if all(call.ended is not None for call in each):
            continue
        ranks = members.get(group) or sorted(with_files)
        missing = [rank for rank in ranks if rank in with_files and latest.get((group, rank), 0) < number]
        waiting = sorted(call.rank for call in each if call.ended is None)
        begun = min(call.begun for call in each)
        found.append({"group": group, "number": number, "name": each[0].name, "begun": begun, "not_ended_by": waiting,
                      "not_begun_by": missing})  # fmt: skip
    return sorted(found, key=lambda row: row["begun"])


def events(calls: Iterable[Call]) -> Iterable[dict[str, Any]]:
    """The trace in Chrome's format: a process for each rank, a thread for each of its groups, times in microseconds."""
    calls = list(calls)
    groups = {group: number for number, group in enumerate(sorted({call.group for call in calls}))}
    start = min((call.begun for call in calls), default=0.0)
    end = max((call.ended or call.begun for call in calls), default=0.0)
    for rank in sorted({call.rank for call in calls}):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for rank, group in sorted({(call.rank, call.group) for call in calls}):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": groups[group], "args": {"name": f"group {group}"}}
    for call in calls:
        ended = end if call.ended is None else call.ended
        yield {
            "ph": "X",
            "pid": call.rank,
            "tid": groups[call.group],
            "name": call.name if call.ended is not None else f"{call.name} (not ended)",
            "ts": (call.begun - start) * 1e6,
            "dur": max(ended - call.begun, 0.0) * 1e6,
            "args": call.detail | {"number": call.number},
        }


def _show(found: dict[str, Any], saved: Path | None) -> None:
    to = console()
    for rank, offset in found["clock_offsets_s"].items():
        say(to, f"rank {rank}: its clock is {time_text(abs(offset))} {'ahead' if offset > 0 else 'behind'}; corrected")
    rows = table("rank", "began last", "others waited", right=("began last", "others waited"))
    for row in found["last"]:
        rows.add_row(str(row["rank"]), str(row["collectives"]), time_text(row["waited_s"]))
    to.print(rows) if found["last"] else say(to, "no collective is in the records of two ranks")
    for row in found["not_ended"][:MOST_UNFINISHED]:
        ranks = f"not ended by {_ranks(row['not_ended_by'])}"
        missing = f"; not begun by {_ranks(row['not_begun_by'])}" if row["not_begun_by"] else ""
        say(to, f"group {row['group']}: {row['name']} #{row['number']}: {ranks}{missing}")
    if len(found["not_ended"]) > MOST_UNFINISHED:
        say(to, f"{len(found['not_ended']) - MOST_UNFINISHED} more have not ended; --json has them all")
    if saved:
        say(to, f"trace: {saved}; open it at https://ui.perfetto.dev")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
