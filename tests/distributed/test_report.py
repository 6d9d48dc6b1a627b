"""What can be seen of a group from outside: profiles, flight records, counters, lines."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks, run
from frameworks.launch import alone, python
from processes import Logged
from torch.profiler import ProfilerActivity, profile

import ringreduce
from ringreduce import _C
from ringreduce.errors import CollectiveMismatch, CollectiveTimeout, RingReduceError


def call_everything(me: Rank, asynchronous: bool) -> dict[str, list[list[int]]]:
    """Calls every collective once; returns the names and input shapes that profiles must show."""
    n, blocks = me.size, [torch.ones(3, 2) for _ in range(me.size)]
    works = [
        dist.all_reduce(torch.ones(4, 5), async_op=asynchronous),
        dist.broadcast(torch.ones(6), 0, async_op=asynchronous),
        dist.reduce(torch.ones(7), 0, async_op=asynchronous),
        dist.all_gather(blocks, torch.ones(3, 2), async_op=asynchronous),
        dist.reduce_scatter(torch.ones(3, 2), blocks, async_op=asynchronous),
        dist.gather(torch.ones(3, 2), blocks if me.rank == 0 else None, async_op=asynchronous),
        dist.scatter(torch.ones(3, 2), blocks if me.rank == 0 else None, async_op=asynchronous),
        dist.all_to_all_single(torch.ones(n * 8), torch.ones(n * 8), async_op=asynchronous),
        dist.barrier(async_op=asynchronous),
        dist.all_reduce(torch.eye(3).to_sparse(), async_op=asynchronous),
        dist.isend(torch.ones(9), 1) if me.rank == 0 else dist.irecv(torch.ones(9), 0) if me.rank == 1 else None,
    ]
    for work in works:
        if work is not None:
            work.wait()
    shapes: dict[str, list[list[int]]] = {
        "all_reduce": [[4, 5]],
        "broadcast": [[6]],
        "reduce": [[7]],
        "all_gather": [[3, 2]],
        "reduce_scatter": [[3, 2]] * n,
        "gather": [[3, 2]],
        "scatter": [[3, 2]] * n if me.rank == 0 else [[3, 2]],  # the output, where there is no input
        "all_to_all": [[n * 8]],
        "barrier": [],
        "sparse_all_reduce": [[3, 3]],
    }
    if me.rank < 2:
        shapes["send" if me.rank == 0 else "recv"] = [[9]]
    return shapes


# profiles


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(3)
def test_profiles_show_every_collective_with_its_shapes(me: Rank, asynchronous: bool, tmp_path: Path) -> None:
    with me.join():
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            expected = call_everything(me, asynchronous)
        events = {e.name: e.input_shapes for e in profiler.events() if e.name.startswith("ringreduce:")}
        assert events == {f"ringreduce:{name}": shapes for name, shapes in expected.items()}
        trace = tmp_path / f"{me.rank}.json"
        profiler.export_chrome_trace(str(trace))
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert set(events) <= names


# flight records


def analysis(folder: Path, *arguments: str) -> str:
    """What torch's analyser says of the records rank0, rank1, ... in `folder`."""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder), "-p", "rank"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def merged(folder: Path) -> dict[str, Any]:
    """What `ringreduce trace` says of the same records."""
    records = map(str, sorted(folder.glob("rank*")))
    command = [sys.executable, "-m", "ringreduce", "trace", *records, "--save", str(folder / "trace.json"), "--json"]
    said: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return said


def test_flight_records_on_demand(tmp_path: Path) -> None:
    run(recorded, 3, str(tmp_path))
    assert "Not all ranks joining collective" not in (text := analysis(tmp_path))
    assert "mismatch" not in text.lower()
    said = merged(tmp_path)
    assert said["not_ended"] == [] and {row["rank"] for row in said["last"]} <= {0, 1, 2}
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > sum(said["ranks"].values())


def recorded(me: Rank, folder: str) -> None:
    with me.join():
        expected = call_everything(me, False)
        pair = dist.new_group([0, 1])
        if me.rank < 2:
            dist.all_reduce(torch.ones(11), group=pair)
        path = Path(folder, f"rank{me.rank}")
        ringreduce.dump_flight_record(path)
        record = pickle.loads(path.read_bytes())

        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        own = [e for e in record["entries"] if e["process_group"][0] in (name, f"{name}:0 to 1")]
        names = [e["profiling_name"].split(":")[1].split(" ")[0] for e in own]
        names = [name.removeprefix("all_reduce_") for name in names]  # what torch 2.11 calls a barrier
        assert names == [name.removeprefix("sparse_") for name in expected]
        expected["reduce_scatter"] = [[me.size, 3, 2]]  # as one tensor
        sizes = [e["input_sizes"] or e["output_sizes"] for e in own]
        assert sizes == list(expected.values())
        assert all(e["state"] == "completed" and e["retired"] for e in own)
        for e in own:
            assert e["time_created_ns"] <= e["time_discovered_started_ns"] <= e["time_discovered_completed_ns"]
        collectives = [e for e in own if not e["is_p2p"]]
        assert [e["collective_seq_id"] for e in collectives] == list(range(1, len(collectives) + 1))
        assert record["pg_config"][name]["ranks"] == "[0, 1, 2]"
        groups = {group["name"]: group for group in record["ringreduce"]["groups"]}
        assert {group["job"] for group in groups.values()} == {groups[name]["id"]}  # that of the world
        assert len({group["id"] for group in groups.values()}) == len(groups)
        if me.rank < 2:
            (last,) = [e for e in record["entries"] if e["process_group"][0] == pair.group_name]
            assert last["input_sizes"] == [[11]] and last["input_dtypes"] == ["Float"]
            assert record["pg_config"][pair.group_name]["ranks"] == "[0, 1]"


@on_ranks(2)
def test_only_the_latest_calls_are_kept(me: Rank, tmp_path: Path) -> None:
    for kept in (0, 5):
        with me.join(f"keeping {kept}", options=ringreduce.Options(recorded_calls=kept)):
            for size in range(1, 13):
                dist.all_reduce(torch.ones(size))
            path = tmp_path / f"rank{me.rank}"
            ringreduce.dump_flight_record(path)
            entries = pickle.loads(path.read_bytes())["entries"]
            assert [e["input_sizes"] for e in entries] == [[[size]] for size in range(13 - kept, 13)]


def test_a_timeout_leaves_a_record_that_names_the_culprit(tmp_path: Path) -> None:
    run(timing_out, 3, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0", "rank1", "rank2"]
    text = analysis(tmp_path)
    assert "missing ranks: {2}" in text, text
    (row,) = merged(tmp_path)["not_ended"]
    assert row["calls"] == {"all_reduce": [0, 1]} and row["not_ended_by"] == [0, 1] and row["not_begun_by"] == [2]


def timing_out(me: Rank, folder: str) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank"
    with me.join(call_timeout=1):
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/read later, by a thread"
        dist.all_reduce(torch.ones(3))
        if me.rank < 2:
            with pytest.raises(CollectiveTimeout):
                dist.all_reduce(torch.ones(4))
        else:
            me.meet("timed out")
            ringreduce.dump_flight_record(f"{folder}/rank2")
        if me.rank < 2:
            me.meet("timed out")


def test_what_differs_between_calls_is_said(tmp_path: Path) -> None:
    run(making_different_calls, 2, str(tmp_path))
    how = {each.name: merged(each)["differ"][0]["how"] for each in tmp_path.iterdir()}
    assert how == {
        "sizes": ["4 elements on rank 0, 3 on rank 1"],
        "roots": ["root 0 on rank 0, 1 on rank 1"],
        "operations": ["op sum on rank 0, max on rank 1"],
        "dtypes": ["dtype Float on rank 0, Int on rank 1"],
        "splits": [
            "rank 0 sends 2 elements to rank 1, which expects 1",
            "rank 1 sends 2 elements to rank 0, which expects 1",
        ],
    }


def making_different_calls(me: Rank, folder: str) -> None:
    def calls(what: str) -> None:
        match what:
            case "sizes":
                dist.all_reduce(torch.ones(4 - me.rank))
            case "roots":
                dist.broadcast(torch.ones(4), me.rank)  # of which the ranks know only at the next call that waits
                dist.all_reduce(torch.ones(4))
            case "operations":
                dist.reduce(torch.ones(4), 0, [dist.ReduceOp.SUM, dist.ReduceOp.MAX][me.rank])
                dist.barrier()
            case "dtypes":
                dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.int32][me.rank]))
            case "splits":
                dist.all_to_all_single(torch.empty(3), torch.ones(4), [[2, 1], [1, 2]][me.rank], [2, 2])

    for what in ("sizes", "roots", "operations", "dtypes", "splits"):
        with me.join(what):
            with pytest.raises(CollectiveMismatch):
                calls(what)
            ringreduce.dump_flight_record(f"{folder}/{what}/rank{me.rank}")


def test_each_job_has_files_of_its_own(tmp_path: Path) -> None:
    jobs = tmp_path / "torch" / "ringreduce"
    for number in range(30):
        (jobs / f"old{number}").mkdir(parents=True)
        (jobs / f"old{number}" / "rank0").touch()
        os.utime(jobs / f"old{number}", (number, number))
    run(breaking_by_job, 2, str(tmp_path))
    kept = {path.name: sorted(each.name for each in path.iterdir()) for path in jobs.iterdir()}
    new = [files for job, files in kept.items() if not job.startswith("old")]
    assert new == [["rank0", "rank1"]] * 2 and len(kept) == 20 and "old12" in kept and "old11" not in kept


def breaking_by_job(me: Rank, cache: str) -> None:
    del os.environ["TORCH_FR_DUMP_TEMP_FILE"]
    os.environ["XDG_CACHE_HOME"] = cache
    for job in ("one", "another"):
        with me.join(job):
            group = dist.new_group()
            with pytest.raises(CollectiveMismatch):
                dist.all_reduce(torch.ones(3 + me.rank), group=group)
    _C.shutdown_all()  # as at the process's end, which waits for the records


@on_ranks(2)
def test_groups_that_break_at_once_leave_records(me: Rank) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank"
        with me.join():
            groups = [dist.new_group() for _ in range(12)]
            works = [dist.all_reduce(torch.ones(3 + me.rank), group=group, async_op=True) for group in groups]
            for work in works:
                with pytest.raises(CollectiveMismatch):
                    work.wait()
        _C.shutdown_all()  # as at the process's end, which waits for the records
        assert os.listdir(folder) == [f"rank{me.rank}"]
        assert len(pickle.loads(Path(folder, f"rank{me.rank}").read_bytes())["entries"]) == len(groups)


@on_ranks(2)
def test_a_record_that_cannot_be_written_does_no_harm(me: Rank) -> None:
    del os.environ["TORCH_FR_DUMP_TEMP_FILE"]
    os.environ["XDG_CACHE_HOME"] = os.environ["HOME"] = "/dev/null"
    with me.join(), pytest.raises(CollectiveMismatch):
        dist.all_reduce(torch.ones(3 + me.rank))


@on_ranks(2)
def test_errors_speak_of_the_call_that_was_made(me: Rank) -> None:
    with me.join(call_timeout=1):
        dist.all_to_all_single(torch.empty(4), torch.ones(4))
        dist.all_reduce(torch.eye(3).to_sparse())
        if me.rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"^all_to_all seq 3: .* its latest call is seq 2, all_reduce"):
                dist.all_to_all_single(torch.empty(4), torch.ones(4))
        me.meet("timed out")


# counters


@on_ranks(3)
def test_counters(me: Rank) -> None:
    with me.join():
        for _ in range(4):
            dist.all_reduce(torch.ones(100))
        pair = dist.new_group([0, 1])
        if me.rank < 2:
            dist.all_gather([torch.ones(10), torch.ones(10)], torch.ones(10), group=pair)
        dist.barrier()
        with pytest.raises(RingReduceError):
            dist.all_reduce(torch.ones(1, dtype=torch.bool), op=dist.ReduceOp.AVG)
        if me.rank == 0:
            me.meet("rank 0 is late")
            time.sleep(0.5)  # for the threads in which the others wait
        else:
            work = dist.barrier(async_op=True)
            torch.testing.assert_close(work.is_completed(), False)
            me.meet("rank 0 is late")
            work.wait()
        if me.rank == 0:
            dist.barrier()
        stats = ringreduce.stats()
        world = stats[dist.group.WORLD.group_name]  # type: ignore[union-attr]
        assert set(world) == {"all_reduce", "barrier"}
        assert world["all_reduce"].calls == 4 and world["all_reduce"].failed == 0
        assert world["all_reduce"].bytes == 4 * 400
        assert world["barrier"].calls == 2 and world["barrier"].bytes == 0
        if me.rank < 2:
            assert stats[pair.group_name]["all_gather"].bytes == 2 * 40
        else:
            assert world["barrier"].waited > 0
    pair = None  # the last that holds on to a group
    assert ringreduce.stats() == {}


# lines


@pytest.mark.slow
def test_debug_lines(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import ringreduce, torch, torch.distributed as dist\n"
        "dist.init_process_group('ringreduce', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(3))\n"
    )

    assert "ringreduce" not in alone(str(program))
    life = alone(str(program), RINGREDUCE_DEBUG="1")
    assert "[rank 0] made a group of ranks [0]" in life and "all_reduce #0" not in life
    lines = alone(str(program), RINGREDUCE_DEBUG="2")
    assert "[ringreduce rank 0 of" in lines and "all_reduce #0 done after" in lines
    lines = alone(str(program), RINGREDUCE_DEBUG="2", RINGREDUCE_RECORDED_CALLS="0")
    assert "all_reduce #0 done, 0.000 ms of it waiting" in lines
    assert "[rank 0] made a group of ranks [0]" in python(str(program), TORCH_LOGS="ringreduce.groups")


@on_ranks(2)
def test_users_of_torchrec_are_warned_once(me: Rank) -> None:
    logged = Logged("ringreduce.groups.make")
    with mock.patch.dict(sys.modules, {"torchrec": mock.Mock()}), me.join():
        dist.new_group()
    said = [text for text in logged.messages if "torchrec copies within a rank" in text]
    assert len(said) == 1
