"""Runs the sweeps of this folder, or lists what none of them has reached.

make faults [ONLY="all_gather allocation"]     the sweeps whose names have these words
make faults ONLY=--places                      the calls for resources that none has refused
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from processes import forking_context

from shortage import commands, elastic, groups, loader, parameter_server
from shortage.requests import ANY, place_name, places
from shortage.sweeps import LATE, NOTICED, Sweep, build, swept


def all_sweeps() -> Iterator[list[Sweep]]:
    """In lists of those that run in the same processes."""
    yield from commands.all_sweeps()
    yield from loader.all_sweeps()
    yield from elastic.all_sweeps()
    yield from parameter_server.all_sweeps()
    yield from groups.by_places()
    yield from groups.by_places(ANY, LATE)
    yield from groups.by_places("wait", LATE)
    yield from groups.one_by_one()


NOT_REACHED = {
    r"cuda|CUDA|nccl|Nccl|[gG]pu|Interpret|Party|Lookout|Trial|Lent|Stream(Device|Guard)|PeerEngine": "GPUs, of which "
    "sweeps have none",
    r"pybind11::|[bB]ind|PyInit|c10::|c10d::|thunk|process_wide|call_once": "bindings, what torch has, and what is "
    "made once, in the first run of a process, where nothing fails",
    r"Exchange|PointToPoint|C10d": "transport='gloo', where most requests are Gloo's",
    r"torch_ops|CallLog|Dumper|profil|counters|observe|Timetable|getFuture|heading": "compiled graphs, profiles, "
    "counters: no sweep asks for them; flight records that have calls: the one that is asked for has none",
    r"Shard|Server|Client|Block|Table|Dense|Replica|Leader|Follower|Near|Far|Wire|Session|Window|Snapshot|Archive|Partner|"
    r"Rule|Record|Row|Worker|Journal|Unconfirmed|Image|State|Message|parameter_server": "the parameter server: modes, "
    "rules, deaths and statistics that no sweep has",
    r"basic_string|to_string|onitored|late|describe|look|withdraw|measured": "texts of errors and warnings, which come "
    "after the one failure of a run",
    r"": "the rest: arguments, layouts and kinds of calls that no sweep has",
}
"""Functions whose calls no sweep has reached: what they are for, and why."""


def report_places(results: Path) -> None:
    """Prints which of the module's calls for resources no sweep of `results` has refused, by function."""
    reached = {place for line in results.read_text().splitlines() for place in json.loads(line)["places"]}
    listed = places()
    print(f"{len(listed)} places, {len(reached & {*listed})} reached; in Python {len(reached - {*listed})}")
    by_reason: dict[str, Counter[str]] = {reason: Counter() for reason in NOT_REACHED.values()}
    for name in map(place_name, (place for place in listed if place not in reached)):
        by_reason[next(why for pattern, why in NOT_REACHED.items() if re.search(pattern, name))][name] += 1
    for reason, names in by_reason.items():
        print(f"{names.total()} not reached: {reason}")
        for name, count in sorted(names.items()):
            print(f"   {count:3} {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of the names of sweeps")
    parser.add_argument("--most", type=int, default=2000, help="failures in one sweep")
    parser.add_argument("--noticed", type=float, default=NOTICED, help="seconds in which all ranks must have an error")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="sweeps at a time")
    parser.add_argument("--results", type=Path, default=Path("build/faults.jsonl"), help="gets a line for each sweep")
    parser.add_argument(
        "--places", action="store_true", help="only list the places that no sweep in results has reached"
    )
    args = parser.parse_args()
    if args.places:
        report_places(args.results)
        return 0
    chosen = [[each for each in some if all(part in str(each) for part in args.only)] for some in all_sweeps()]
    total, wrong, began = 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool, args.results.open("a") as out:
        os.environ.update(TORCH_FR_DUMP_TEMP_FILE=f"{folder}/rank", PYTHONFAULTHANDLER="1")
        forking_context()
        library = build(Path(folder))
        for found in pool.map(lambda some: swept(library, some, args.most, args.noticed), filter(None, chosen)):
            for line in found:
                total, wrong = total + line["failures"], wrong + sum(line["wrong"].values())
                out.write(json.dumps(line) + "\n")
                out.flush()
                print(f"{line['sweep']}: {line['failures']} failures, {sum(line['wrong'].values())} wrong", flush=True)
                for what, count in Counter(line["wrong"]).most_common(12):
                    print(f"   {count:3} {what}", flush=True)
    print(f"{total} failures, {wrong} wrong, {60 * total / (time.monotonic() - began):.0f} a minute")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
