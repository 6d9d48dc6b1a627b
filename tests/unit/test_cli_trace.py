"""`ringreduce trace`: flight records of several ranks, as one trace."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from ringreduce import cli
from ringreduce.cli.trace import CLOCKS_DIFFER

BEGIN, QUEUED = 1_800_000_000.0, 0.25


def nanoseconds(after_begin: float) -> Any:
    return math.nan if math.isnan(after_begin) else round((BEGIN + after_begin) * 1e9)


def entry(
    number: int, begun: float, ended: float | None, name: str = "all_reduce", group: str = "0", **facts: Any
) -> dict[str, Any]:
    """As C++ writes it, but for the fields that `trace` does not read. Times are seconds after BEGIN.

    distributed/test_report.py reads records that C++ has written."""
    message = " " in name
    return {
        "pg_id": 0,
        "process_group": (group, "default_pg"),
        "profiling_name": f"ringreduce:{name}",
        "is_p2p": message,
        "collective_seq_id": 0 if message else number,
        "p2p_seq_id": number if message else 0,
        "state": "started" if ended is None else "completed",
        "time_created_ns": nanoseconds(begun - QUEUED),
        "time_discovered_started_ns": nanoseconds(begun),
        "time_discovered_completed_ns": None if ended is None else nanoseconds(ended),
        "input_sizes": [[1000]],
        "output_sizes": [[1000]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        **facts,
    }


def origin(
    ranks: tuple[int, ...] = (0, 1, 2), job: str = "job", host: str = "a", boot: str | None = None, id: str = "id"
) -> dict[str, Any]:
    group = {"name": "0", "ranks": list(ranks), "id": f"{job} {id}", "job": job, "made_ns": nanoseconds(-1.0)}
    return {"host": host, "pid": 7, "boot": f"boot of {host}" if boot is None else boot, "groups": [group]}


def record(folder: Path, rank: int, entries: list[dict[str, Any]], *ranks: int, **of: Any) -> str:
    """`ranks`: of its one group."""
    path = folder / f"rank{rank}"
    path.write_bytes(pickle.dumps({"ringreduce": origin(ranks or (0, 1, 2), **of), "entries": entries}))
    return str(path)


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["trace", *arguments, "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def test_the_rank_that_came_last_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        record(tmp_path, 0, [entry(1, 0.0, 1.0), entry(2, 2.0, 2.5)]),
        record(tmp_path, 1, [entry(1, 0.9, 1.0), entry(2, 2.4, 2.5)]),
        record(tmp_path, 2, [entry(1, 0.1, 1.0), entry(2, 2.0, 2.5), entry(1, 3.0, 3.1, "send 2->0")]),
    ]
    said = found(capsys, *paths)
    assert said["ranks"] == {"0": 2, "1": 2, "2": 3} and said["not_ended"] == [] and said["clock_offsets_s"] == {}
    ((last),) = said["last"]
    assert last["rank"] == 1 and last["collectives"] == 2 and last["waited_s"] == pytest.approx(1.3, abs=1e-5)
    assert cli.main(["trace", *paths]) == 0
    assert "1.3 s" in capsys.readouterr().out


def test_calls_that_have_not_ended_name_who_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        record(tmp_path, 0, [entry(7, 0.0, 0.1), entry(8, 1.0, None)]),
        record(tmp_path, 1, [entry(7, 0.0, 0.1)]),
        record(tmp_path, 2, [entry(7, 0.0, 0.1), entry(8, 1.5, None)]),
    ]
    (row,) = found(capsys, *paths)["not_ended"]
    assert row["calls"] == {"all_reduce": [0, 2]} and row["number"] == 8
    assert row["not_ended_by"] == [0, 2] and row["not_begun_by"] == [1]
    assert cli.main(["trace", *paths]) == 0
    assert "all_reduce #8: not ended by ranks 0, 2; not begun by rank 1" in capsys.readouterr().out
    # a rank without a file is named apart
    said = found(capsys, paths[0], paths[2])
    assert said["not_ended"][0]["not_begun_by"] == [] and said["without_file"] == [1]
    assert cli.main(["trace", paths[0], paths[2]]) == 0
    assert "there is no file of rank 1" in capsys.readouterr().out
    # one that has made no call has begun none
    record(tmp_path, 1, [])
    assert found(capsys, *paths)["not_ended"][0]["not_begun_by"] == [1]


def test_different_calls_and_messages_that_have_not_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        record(tmp_path, 0, [entry(1, 0.0, None), entry(4, 1.0, None, "send 0->1", "0:0 to 1")], 0, 1),
        record(tmp_path, 1, [entry(1, 0.0, None, "all_gather"), entry(4, 1.5, None, "recv 0->1", "0:0 to 1")], 0, 1),
    ]
    assert cli.main(["trace", *paths]) == 0
    said = capsys.readouterr().out
    assert "group 0: different calls #1: all_reduce by rank 0, all_gather by rank 1; not ended by ranks 0, 1" in said
    assert "send 0->1 #4: not ended by rank 0" in said and "recv 0->1 #4: not ended by rank 1" in said


# What each rank says of a call, and how `trace` says that it differs.
DIFFERENT = {
    "sizes": ([{"input_sizes": [[4]]}, {"input_sizes": [[3]]}], "all_reduce", "4 elements on rank 0, 3 on rank 1"),
    "shapes alone": ([{"input_sizes": [[4]]}, {"input_sizes": [[2, 2]]}], "all_reduce", ""),
    "several tensors": (
        [{"input_sizes": [[4], [2, 3]]}, {"input_sizes": [[4], [5]]}],
        "all_reduce",
        "4 + 6 elements on rank 0, 4 + 5 on rank 1",
    ),
    "outputs": (
        [{"output_sizes": [[2, 4]]}, {"output_sizes": [[2, 3]]}],
        "all_gather",
        "8 elements on rank 0, 6 on rank 1",
    ),
    "inputs of an all_gather": ([{"input_sizes": [[4]]}, {"input_sizes": [[3]]}], "all_gather", ""),
    "outputs of a gather": ([{"output_sizes": [[4], [4]]}, {"output_sizes": []}], "gather", ""),
    "dtypes": (
        [{"input_dtypes": ["Float"]}, {"input_dtypes": ["Double"], "output_dtypes": ["Double"]}],
        "reduce",
        "dtype Float on rank 0, Double on rank 1",
    ),
    "roots": ([{"root": 0}, {"root": 1}], "broadcast", "root 0 on rank 0, 1 on rank 1"),
    "operations": ([{"reduce_op": "sum"}, {"reduce_op": "max"}], "reduce", "op sum on rank 0, max on rank 1"),
    "split sizes": (
        [{"splits": [1, 2, 1, 3]}, {"splits": [4, 3, 2, 3]}],
        "all_to_all",
        "rank 1 sends 4 elements to rank 0, which expects 3",
    ),
    "blocks": (
        [{"input_sizes": [[8]], "output_sizes": [[8]]}, {"input_sizes": [[4], [1]], "output_sizes": [[4], [1]]}],
        "all_to_all",
        "",
    ),
}


@pytest.mark.parametrize("ended", [None, 1.0])
@pytest.mark.parametrize("what", DIFFERENT)
def test_calls_that_differ(what: str, ended: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, name, said = DIFFERENT[what]
    paths = [
        record(tmp_path, rank, [entry(1, 0.0, ended, name, **each), entry(2, 2.0, 3.0)], 0, 1)
        for rank, each in enumerate(facts)
    ]
    differ = found(capsys, *paths)["differ"]
    assert [(row["number"], row["how"]) for row in differ] == ([(1, [said])] if said else [])
    assert cli.main(["trace", *paths]) == 0
    waits = "; not ended by ranks 0, 1" if ended is None else ""
    assert not said or f"group 0: {name} #1: {said}{waits}\n" in capsys.readouterr().out


def test_records_of_different_jobs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [entry(1, 0.0, 1.0)]
    paths = [record(tmp_path, 0, calls), record(tmp_path, 1, calls), record(tmp_path, 2, calls, job="other", host="b")]
    assert cli.main(["trace", *paths]) == 2
    said = capsys.readouterr().err
    assert "of different jobs" in said and f"{paths[0]} (pid 7 on a; " in said and f"{paths[2]} (pid 7 on b; " in said
    assert paths[1] not in said
    # groups that have no ranks in common need no group that has them all
    paths[2:] = [record(tmp_path, 2, calls, 2, 3, job="other"), record(tmp_path, 3, calls, 2, 3, job="other")]
    paths[:2] = [record(tmp_path, rank, calls, 0, 1) for rank in (0, 1)]
    said = found(capsys, *paths)
    assert said["without_file"] == [] and sum(row["collectives"] for row in said["last"]) == 2
    # a group that was made again in one job is another group, though it has the name of the first
    paths = [record(tmp_path, 0, calls, 0, 1), record(tmp_path, 1, [entry(1, 5.0, 6.0, "broadcast")], 0, 1, id="later")]
    said = found(capsys, *paths)
    assert said["last"] == said["differ"] == []


def test_clocks_of_other_hosts_are_corrected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ahead = 5.0
    here = [entry(number, number, number + 0.5) for number in range(1, 6)]
    there = [entry(number, number + ahead, number + 0.5 + ahead + 1e-5 * number) for number in range(1, 6)]
    root = [entry(9, 9.0, 9.1, "broadcast")]  # ends at a rank before others begin: tells nothing of clocks
    calls = [*there, entry(9, 20.0, 20.1, "broadcast")]
    for of in ({"host": "a"}, {"boot": ""}):  # one host has one clock
        paths = [record(tmp_path, rank, each, **of) for rank, each in enumerate((here + root, calls))]
        assert found(capsys, *paths)["clock_offsets_s"] == {}
    paths = [record(tmp_path, rank, calls, host=host) for rank, calls, host in
             ((0, here + root, "a"), (1, calls, "b"), (2, here[:0], "b"))]  # fmt: skip
    said = found(capsys, *paths)
    assert said["clock_offsets_s"] == {"1": pytest.approx(ahead, abs=1e-4), "2": pytest.approx(ahead, abs=1e-4)}
    trace = tmp_path / "trace.json"
    assert cli.main(["trace", *paths, "--save", str(trace)]) == 0
    assert "ranks 1, 2: the clock there is 5 s ahead of rank 0's; corrected" in capsys.readouterr().out
    calls = [each for each in json.loads(trace.read_text())["traceEvents"] if each["ph"] == "X"]
    begins = [{each["pid"]: each["ts"] for each in calls if each["args"]["number"] == number} for number in range(1, 6)]
    assert all(abs(each[0] - each[1]) < CLOCKS_DIFFER * 1e6 for each in begins)


def test_the_trace_has_all_calls(tmp_path: Path) -> None:
    calls = [entry(1, 0.0, 0.25), entry(2, 0.5, None), entry(1, 0.5, 0.75, "send 0->1", "0:0 to 1")]
    calls.append(entry(3, 0.6, 0.7))  # beside one that has not ended
    trace = tmp_path / "trace.json"
    assert cli.main(["trace", record(tmp_path, 3, calls), "--save", str(trace)]) == 0
    written = json.loads(trace.read_text())["traceEvents"]
    named = {(each["name"], each.get("tid")): each["args"]["name"] for each in written if each["ph"] == "M"}
    assert named == {
        ("process_name", None): "rank 3",
        ("thread_name", 0): "group 0",
        ("thread_name", 1): "group 0:0 to 1",
        ("thread_name", 2): "group 0",
    }
    shown = [(each["name"], each["tid"], each["ts"], each["dur"]) for each in written if each["ph"] == "X"]
    assert [(name, thread) for name, thread, *_ in shown] == [
        ("all_reduce", 0),
        ("all_reduce (not ended)", 0),
        ("send 0->1", 1),
        ("all_reduce", 2),
    ]
    assert shown[0][2:] == pytest.approx((0.0, 0.25e6), abs=1) and shown[1][3] == pytest.approx(0.25e6, abs=1)
    assert all(each["args"]["queued_us"] == pytest.approx(QUEUED * 1e6) for each in written if each["ph"] == "X")


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("record", pickle.dumps({}), "must end with the rank"),
        ("rank0", b"no pickle", "no flight record"),
        ("rank0", b"", "this file is empty"),
        ("rank0", pickle.dumps({"ringreduce": origin(), "entries": []})[:-3], "cut off"),
        ("rank0", pickle.dumps({"ringreduce": {}, "entries": []}), "no flight record"),
        ("rank0", pickle.dumps({"ringreduce": origin(), "entries": [entry(1, math.nan, 1.0)]}), "a time is nan"),
        ("rank0", pickle.dumps({"ringreduce": origin(), "entries": [entry(1, -BEGIN, 1.0)]}), "a time is -"),
        ("rank0", pickle.dumps([1]), "no flight record"),
        ("rank0", pickle.dumps({"ringreduce": origin(), "entries": [{}]}), "cut off ('pg_id')"),
        ("rank0", pickle.dumps({"pg_config": {}, "entries": []}), "does not say of which job it is"),
        ("rank0", pickle.dumps(Harmful()), "it refers to posix.system"),
    ],
)
def test_what_is_no_record_is_refused(
    name: str, content: bytes, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert cli.main(["trace", str(tmp_path / name)]) == 2
    assert why in capsys.readouterr().err


def test_two_files_of_a_rank_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    paths = [record(tmp_path, 1, []), record(tmp_path / "other", 1, [])]
    assert cli.main(["trace", *paths]) == 2
    assert "another file's name ends with 1 too" in capsys.readouterr().err
    assert cli.main(["trace", paths[0]]) == 0 and "no collective is in" in capsys.readouterr().out
