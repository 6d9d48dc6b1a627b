"""Groups and their tuning: rank 0's file decides for all ranks, and what it decides gives right results."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, run
from processes import Logged

import ringreduce.errors
from ringreduce.cli.measure import Candidate, Task, measure
from ringreduce.plan import BUILDERS
from ringreduce.tuning import Cell, Measured, Tuning, identify
from ringreduce.tuning.machine import probe
from ringreduce.tuning.record import load, save

OTHER = {"all_reduce": "ring", "reduce_scatter": "bidirectional_ring", "all_gather": "ring", "broadcast": "tree"}
"""Algorithms that no group runs unless it is told."""


def tuned(path: Path, ranks: int, algorithms: dict[str, str], slice_bytes: int) -> None:
    """Writes a file that has these algorithms as the best for all sizes."""
    cores = os.sched_getaffinity(0)
    cells = {
        name: (Cell(64, algorithm, slice_bytes, 1.0, algorithm, 0, 2.0),) for name, algorithm in algorithms.items()
    }
    save(Tuning(identify(cores), probe(cores), "now", {ranks: Measured("now", cells)}), path, replace=True)


def calls(me: Rank, paths: list[str], cache: Path | None = None) -> str:
    """Runs collectives of several sizes; returns what the group said was decided."""
    logged = Logged("ringreduce.groups")
    if cache:
        os.environ["XDG_CACHE_HOME"] = str(cache)
    os.environ["RINGREDUCE_TUNING"] = paths[me.rank]
    with me.join(options=ringreduce.Options(debug=1)):
        for count in (1, 100, 5000, 300_000):
            mine = torch.arange(count * me.size, dtype=torch.float32) % 1000 + me.rank
            parts = mine.view(me.size, count)
            total = (torch.arange(count * me.size) % 1000 * me.size + sum(range(me.size))).float()
            summed = mine.clone()
            dist.all_reduce(summed)
            assert summed.equal(total)
            part = torch.empty(count)
            dist.reduce_scatter_tensor(part, mine)
            assert part.equal(total.view(me.size, count)[me.rank])
            gathered = torch.empty(me.size, count)
            dist.all_gather_into_tensor(gathered, parts[0].contiguous())
            assert gathered.equal(torch.stack([parts[0] - me.rank + r for r in range(me.size)]))
            sent = mine.clone()
            dist.broadcast(sent, me.size - 1)
            assert sent.equal(mine - me.rank + me.size - 1)
    return "".join(logged.messages).partition("decided: ")[2]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_file_decides_and_all_ranks_agree(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    tuned(path, ranks, OTHER, slice_bytes=4096)
    decided = run(calls, ranks, [str(path)] * ranks)
    assert len(set(decided)) == 1
    for collective, algorithm in OTHER.items():
        assert f"{collective}:{algorithm}:0-:4096" in decided[0]
    assert "all_to_all:direct" in decided[0]


def test_rank_0_decides_where_files_differ(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{rank}.json") for rank in range(3)]
    tuned(Path(paths[0]), 3, OTHER, slice_bytes=0)
    tuned(Path(paths[1]), 3, {name: "direct" for name in OTHER if name != "all_reduce"}, slice_bytes=128)
    decided = run(calls, 3, [*paths[:2], "off"])
    assert len(set(decided)) == 1
    assert "all_reduce:ring:0-" in decided[0]
    assert ":128" not in decided[0]
    assert run(calls, 3, ["off", *paths[:2]]) == ["nothing"] * 3


def test_the_first_group_writes_the_file(tmp_path: Path) -> None:
    decided = run(calls, 2, ["auto"] * 2, tmp_path)
    assert "all_reduce:one_shot:0-" in decided[0]
    assert decided[0] == decided[1]
    (path,) = tmp_path.rglob("*.json")
    assert load(path).measured == {}
    assert run(calls, 2, ["auto"] * 2, tmp_path) == decided


@pytest.mark.slow
def test_measuring_gives_a_cell_for_every_task() -> None:
    work = [
        Task(name, 256, tuple(Candidate(algorithm, 0) for algorithm in algorithms))
        for name, algorithms in BUILDERS.items()
    ]
    told: list[int] = []
    cells = measure(2, work, time.monotonic() + 15, lambda number, *_: told.append(number))
    assert told == list(range(len(work)))
    assert list(cells) == list(BUILDERS)
    for name, (cell,) in cells.items():
        assert (cell.bytes, cell.model_algorithm) == (256, next(iter(BUILDERS[name])))
        assert cell.algorithm in BUILDERS[name]
        assert 0 < cell.seconds <= cell.model_seconds


@pytest.mark.slow
def test_a_rank_that_fails_is_told() -> None:
    wrong = Task("all_reduce", 64, (Candidate("star", 0), Candidate("ring", 0)))
    with pytest.raises(ringreduce.errors.RingReduceError, match=r"rank . of 2"):
        measure(2, [wrong], time.monotonic() + 60, lambda *_: None)


def test_nothing_is_kept_where_the_time_is_over() -> None:
    work = [Task("broadcast", 64, (Candidate("tree", 0), Candidate("direct", 0)))]
    assert measure(2, work, time.monotonic() - 20, lambda *_: None) == {}
