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
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ringreduce.cli.terminal import console, put, say, table
from ringreduce.common.failures import InvalidArgument
from ringreduce.common.files import content_of, write_file
from ringreduce.common.ranks import numbers
from ringreduce.common.units import time_text

CLOCKS_DIFFER = 1e-3
"""Seconds by which the ends of two ranks' calls differ in the median, from which on their clocks count as different."""

ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", "sparse_all_reduce")
"""How the names of collectives begin that no rank ends before all have begun them."""

MOST_CALLS = 20
"""Lines about calls that ranks made differently, or that some rank has not ended."""

LARGEST = 2 << 30
"""Bytes of a record; a call takes some 170."""


class Group(NamedTuple):
    """A group, or two of its ranks where one sends messages to the other."""

    name: str
    id: str  # which no other group has: names come again in other jobs


class Call(NamedTuple):
    """A call as one rank recorded it. Times are in seconds since 1970 by that rank's clock."""

    rank: int
    group: Group
    name: str  # "all_reduce", or "send 0->1"
    number: int  # among the group's collectives, or among the messages from one rank to another
    message: bool
    begun: float  # when its turn came: an asynchronous call is made earlier
    ended: float | None
    alike: dict[str, Any]  # by ALIKE, what all ranks of the group must have alike in it
    blocks: tuple[list[int], list[int]] | None  # of all_to_all: the elements to each rank, and those from each
    detail: dict[str, Any]


class Record(NamedTuple):
    """A rank's file."""

    path: Path
    process: str
    jobs: set[str]
    begun: float
    clock: str
    """Equal for ranks whose times are by one clock."""
    calls: list[Call]
    groups: dict[Group, list[int]]
    """The global ranks of each group."""

    def __str__(self) -> str:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.begun))
        return f"{self.path} ({self.process}; its first group was made at {began})"


ALIKE = {"elements": "{} elements", "dtype": "dtype {}", "root": "root {}", "reduce_op": "op {}"}
"""How differences between the calls of ranks are said, by what differs."""

ALIKE_OUTPUTS = ("all_gather", "scatter")
"""Collectives whose outputs have the same sizes on all ranks. Inputs have, in the others."""


def add(command: Any) -> None:
    parser = command(
        description="Reads the flight records of ranks, prints which rank the others waited for and which calls have "
        "not ended, and writes a trace for https://ui.perfetto.dev. A record is what "
        "ringreduce.dump_flight_record(path) writes, and each rank when its group breaks.",
        epilog="example:\n  ringreduce trace fr/rank0 fr/rank1 --save trace.json",
    )
    parser.add_argument(
        "records", metavar="RECORD", nargs="+", type=Path, help="a rank's file; its name ends with the rank"
    )
    parser.add_argument("--save", type=Path, metavar="OUT.json", help="write the trace to this file")
    parser.add_argument("--json", action="store_true", help="print as JSON what is printed otherwise")


def run(arguments: argparse.Namespace) -> int:
    records: dict[int, Record] = {}
    for path in arguments.records:
        rank = _rank_of(path)
        if rank in records:
            raise InvalidArgument(f"{path}: another file's name ends with {rank} too; give one for each rank")
        records[rank] = _read(path, rank)
    _check_one_job(records)
    offsets = clock_offsets(records)
    calls = [_moved(call, offsets[rank]) for rank, its in records.items() for call in its.calls]
    members = {group: ranks for record in records.values() for group, ranks in record.groups.items()}
    found = {
        "ranks": {str(rank): len(its.calls) for rank, its in sorted(records.items())},
        "without_file": sorted({rank for ranks in members.values() for rank in ranks} - records.keys()),
        "clock_offsets_s": {str(rank): offset for rank, offset in offsets.items() if offset},
        "last": waited_for(calls),
        "differ": differences(calls, members),
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
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; give the files in it, as in {path}/rank0 {path}/rank1")
    if not path.exists():
        raise InvalidArgument(f"{path}: there is no such file")
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
        if "ringreduce" not in record:
            raise ValueError("it does not say of which job it is, so this version of ringreduce has not written it")
        origin = record["ringreduce"]
        groups = [(Group(str(each["name"]), str(each["id"])), _integers(each["ranks"])) for each in origin["groups"]]
        return Record(
            path,
            f"pid {int(origin['pid'])} on {origin['host']}",
            {str(each["job"]) for each in origin["groups"]},
            min((_seconds(each["made_ns"]) for each in origin["groups"]), default=0.0),
            str(origin["boot"] or origin["host"]),
            [_call(rank, entry, *groups[entry["pg_id"]]) for entry in record["entries"]],
            dict(groups),
        )
    except Exception as error:  # what others have pickled may raise any
        raise InvalidArgument(
            f"{path}: this is no flight record, or one that is cut off ({error}); ringreduce.dump_flight_record(path) "
            "writes one"
        ) from None


def _integers(values: Iterable[Any]) -> list[int]:
    return [int(value) for value in values]


def _call(rank: int, entry: dict[str, Any], group: Group, ranks: list[int]) -> Call:
    message = bool(entry["is_p2p"])
    begun = _seconds(entry["time_discovered_started_ns"] or entry["time_created_ns"])
    done = entry["state"] == "completed" and bool(entry["time_discovered_completed_ns"])
    name = str(entry["profiling_name"]).partition(":")[2]
    inputs, outputs = (
        [math.prod(_integers(shape)) for shape in entry[f"{side}_sizes"]] for side in ("input", "output")
    )
    blocks = None
    if name == "all_to_all":
        split = _integers(entry.get("splits", ()))
        sides = (split[: len(ranks)], split[len(ranks) :]) if split else (inputs, outputs)
        blocks = _blocks(sides[0], len(ranks)), _blocks(sides[1], len(ranks))
    elements = outputs if name in ALIKE_OUTPUTS else inputs
    alike = {
        "elements": None if blocks else " + ".join(map(str, elements)),
        "dtype": ", ".join(sorted({str(dtype) for dtype in (*entry["input_dtypes"], *entry["output_dtypes"])})),
        "root": ranks[entry["root"]] if "root" in entry else None,
        "reduce_op": str(entry["reduce_op"]) if "reduce_op" in entry else None,
    }
    return Call(
        rank,
        group._replace(name=str(entry["process_group"][0])) if message else group,
        name,
        int(entry["p2p_seq_id" if message else "collective_seq_id"]),
        message,
        begun,
        _seconds(entry["time_discovered_completed_ns"]) if done else None,
        alike,
        blocks,
        {
            "sizes": str(entry["input_sizes"]),
            "dtypes": str(entry["input_dtypes"]),
            "state": str(entry["state"]),
            "queued_us": round((begun - _seconds(entry["time_created_ns"])) * 1e6, 3),
        },
    )


def _blocks(elements: list[int], ranks: int) -> list[int]:
    """Of one side of an all_to_all, which may be one tensor for all ranks."""
    return elements if len(elements) == ranks else [sum(elements) // ranks] * ranks


def _check_one_job(records: Mapping[int, Record]) -> None:
    """Raises `InvalidArgument` if a rank's group has a rank whose file is of another job."""
    for record in records.values():
        for rank in sorted({rank for ranks in record.groups.values() for rank in ranks} & records.keys()):
            other = records[rank]
            if other.jobs and not record.jobs & other.jobs:
                raise InvalidArgument(
                    f"these records are of different jobs: {record} and {other}; give those of one job"
                )


def _seconds(nanoseconds: Any) -> float:
    """Checked, since everything is shown from the earliest time on."""
    if not isinstance(nanoseconds, int) or nanoseconds <= 0:
        raise ValueError(f"a time is {nanoseconds!r}")
    return nanoseconds / 1e9


def _moved(call: Call, by: float) -> Call:
    return call._replace(begun=call.begun - by, ended=None if call.ended is None else call.ended - by)


def clock_offsets(records: Mapping[int, Record]) -> dict[int, float]:
    """Seconds by which each rank's clock is ahead of that of the first rank; 0 where they have one, or seem alike.

    Ranks end a collective of ENDS_TOGETHER at about the same time, so the median of the differences of these times is
    the difference of their clocks.
    """
    ends: dict[str, dict[tuple[Group, int], list[float]]] = {}
    for _, record in sorted(records.items()):
        of_clock = ends.setdefault(record.clock, {})
        for call in record.calls:
            if call.ended is not None and call.name.startswith(ENDS_TOGETHER):
                of_clock.setdefault((call.group, call.number), []).append(call.ended)
    first = records[min(records)].clock
    offsets = {first: 0.0}
    for clock in ends.keys() - offsets.keys():
        common = ends[clock].keys() & ends[first].keys()
        apart = [statistics.median(ends[clock][call]) - statistics.median(ends[first][call]) for call in common]
        offset = statistics.median(apart) if apart else 0.0
        offsets[clock] = offset if abs(offset) >= CLOCKS_DIFFER else 0.0
    return {rank: offsets[record.clock] for rank, record in sorted(records.items())}


def _collectives(calls: list[Call]) -> dict[tuple[Group, int], list[Call]]:
    """The collectives, as each rank that has them recorded them."""
    found: dict[tuple[Group, int], list[Call]] = {}
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


def differences(calls: list[Call], members: Mapping[Group, list[int]]) -> list[dict[str, Any]]:
    """The collectives that ranks made differently, the earliest first, and how in words."""
    found = []
    for (group, number), each in _collectives(calls).items():
        names = _ranks_by([(call.name, call.rank) for call in each])
        how = [_by(names, "by")] if len(names) > 1 else [*_unlike(each), *_uneven(each, members[group])]
        if how:
            begun = min(call.begun for call in each)
            found.append({"group": group.name, "number": number, "calls": names, "begun": begun, "how": how})
    return sorted(found, key=lambda row: row["begun"])


def _ranks_by(pairs: Iterable[tuple[Any, int]]) -> dict[Any, list[int]]:
    """The ranks of each value, as the lowest rank has it first."""
    found: dict[Any, list[int]] = {}
    for value, rank in sorted(pairs, key=lambda pair: pair[1]):
        found.setdefault(value, []).append(rank)
    return found


def _by(ranks: Mapping[Any, list[int]], word: str) -> str:
    return ", ".join(f"{value} {word} {numbers(its)}" for value, its in ranks.items())


def _unlike(each: list[Call]) -> Iterable[str]:
    for what, words in ALIKE.items():
        ranks = _ranks_by([(call.alike[what], call.rank) for call in each])
        if len(ranks) > 1:
            (first, its), *others = ranks.items()
            yield _by({words.format(first): its, **dict(others)}, "on")


def _uneven(each: list[Call], members: list[int]) -> Iterable[str]:
    """Of an all_to_all: which ranks expect other blocks than they are sent."""
    of = {members.index(call.rank): call for call in each if call.blocks and call.rank in members}
    for at, sender in sorted(of.items()):
        for to, receiver in sorted(of.items()):
            assert sender.blocks and receiver.blocks
            sent, expected = sender.blocks[0][to], receiver.blocks[1][at]
            if sent != expected:
                yield f"rank {sender.rank} sends {sent} elements to rank {receiver.rank}, which expects {expected}"


def not_ended(calls: list[Call], members: Mapping[Group, list[int]], files: Collection[int]) -> list[dict[str, Any]]:
    """The calls that some rank has begun and not ended, the earliest first: who called what, and which ranks of `files`
    have not begun them. A call that a rank's record has no longer counts as begun."""
    latest: dict[tuple[Group, int], int] = {}
    for call in calls:
        if not call.message:
            latest[call.group, call.rank] = max(call.number, latest.get((call.group, call.rank), 0))
    found = []
    for each in [*_collectives(calls).values(), *([call] for call in calls if call.message)]:
        if all(call.ended is not None for call in each):
            continue
        group, number = each[0].group, each[0].number
        ranks = () if each[0].message else members.get(group, ())
        found.append(
            {
                "group": group.name,
                "number": number,
                "calls": _ranks_by([(call.name, call.rank) for call in each]),
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
    lanes: dict[tuple[int, Group], list[float]] = {}  # when the latest call on each thread ends
    threads: dict[tuple[int, Group, int], int] = {}
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
            name = {"name": f"group {call.group.name}"}
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
    for offset, ranks in _ranks_by([(offset, int(rank)) for rank, offset in found["clock_offsets_s"].items()]).items():
        apart = f"{time_text(abs(offset))} {'ahead of' if offset > 0 else 'behind'}"
        say(to, f"{numbers(ranks)}: the clock there is {apart} rank {min(records)}'s; corrected")
    rows = table("rank", "began last", "others waited", right=("began last", "others waited"))
    for row in found["last"]:
        rows.add_row(str(row["rank"]), str(row["collectives"]), time_text(row["waited_s"]))
    if found["last"]:
        to.print(rows)
    else:
        say(to, "no collective is in the records of two ranks")
    lines: dict[str, list[str]] = {}
    for row in sorted([*found["differ"], *found["not_ended"]], key=lambda row: row["begun"]):
        name = next(iter(row["calls"])) if len(row["calls"]) == 1 else "different calls"
        said = lines.setdefault(f"group {row['group']}: {name} #{row['number']}", [])
        said += row.get("how", ())
        said += [
            f"not {what} by {numbers(row[key])}"
            for what, key in (("ended", "not_ended_by"), ("begun", "not_begun_by"))
            if row.get(key)
        ]
    for title, said in list(lines.items())[:MOST_CALLS]:
        say(to, f"{title}: {'; '.join(said)}")
    if len(lines) > MOST_CALLS:
        say(to, f"{len(lines) - MOST_CALLS} more calls differ or have not ended; --json has them all")
    if saved:
        say(to, f"trace: {saved}, for https://ui.perfetto.dev")
