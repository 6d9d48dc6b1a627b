"""bench/peers.py: what a row is made of, what a rank is told and answers, and that wrong results show."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import peers
import pytest
from peers import COLLECTIVES, Tally

from ringreduce.cli.bench import worker
from ringreduce.cli.bench.team import BackendFailed, Team
from ringreduce.cli.bench.worker import Bits, Call, Copy, Layout


@pytest.mark.parametrize(
    ("collective", "megabytes"),  # read + written by 4 ranks with a largest buffer of 8 MB
    [
        ("all_reduce", 32 + 32),
        ("reduce_scatter", 32 + 8),
        ("all_gather", 8 + 32),
        ("broadcast", 8 + 24),
        ("all_to_all", 32 + 32),
    ],
)
def test_least_traffic(collective: str, megabytes: int) -> None:
    assert peers.least_traffic(collective, 4, 8_000_000) == megabytes * 1_000_000


def test_sizes_are_rounded_up_to_equal_parts_without_repetition() -> None:
    counts = {name: [layout.count for layout in peers.layouts(name, 16, (8, 64, 100))] for name in COLLECTIVES}
    assert counts["all_reduce"] == counts["broadcast"] == [2, 16, 25]
    assert counts["all_gather"] == counts["reduce_scatter"] == counts["all_to_all"] == [16, 32]


def test_row() -> None:
    tally = Tally(layout=Layout("all_reduce", 2, 1 << 18), size=1 << 20)
    for round_us in (100, 400, 200):
        for name, factor in (("ringreduce", 1), ("gloo", 8), ("impi", 2), ("mpich", 3)):
            ranks = [
                {"times_ns": [1, round_us * factor * 1000, 10**9], "wrong": 0},
                {"times_ns": [2, 3, 4], "wrong": 0},
            ]
            tally.add(name, ranks, counted=True)
        for name, us in (("memcpy", 50), ("memcpy-nt", 40)):
            tally.add(name, [{"times_ns": [us * 1000], "wrong": 0}] * 2, counted=True)
    tally.add("impi", [{"times_ns": [1], "wrong": 3}, {"times_ns": [1], "wrong": 4}], counted=False)
    row = peers.make_row(tally, ["shared cache", "no shared cache", "no shared cache"], with_means=True)

    assert [row[name] for name in ("ringreduce", "gloo", "impi", "mpich")] == [200, 1600, 400, 600]
    assert (row["best peer"], row["x best"], row["x gloo"]) == ("impi", 2, 8)
    assert row["mean impi"] == pytest.approx((10**9 + 400_001) / 3e3)
    assert row["x best mean"] == pytest.approx((10**9 + 400_001) / (10**9 + 200_001))
    assert row["limit"] == pytest.approx(40)  # two ranks, two copies at once: as long as the faster kind of copy
    assert row["share"] == pytest.approx(0.2)
    assert (row["wrong"], row["wrong_in"]["impi"], row["shared"]) == (7, 7, "1 of 3")


def test_small_rows_have_no_limit() -> None:
    tally = Tally(layout=Layout("all_reduce", 2, 2), size=8)
    tally.add("memcpy", [{"times_ns": [100], "wrong": 0}], counted=True)
    assert "limit" not in peers.make_row(tally, [], with_means=False)


class Exact:
    """Rank 2 of 4 in a library that answers from the table of inputs, with `flaw` added to one element."""

    rank, ranks, version = 2, 4, "1"

    def __init__(self, table: Bits, call: int, flaw: int) -> None:
        self.table, self.flaw = np.roll(table, call, axis=1), flaw

    def barrier(self) -> None:
        pass

    def empty(self, count: int, dtype: str) -> Bits:
        return worker.private(count, dtype)

    def call(self, collective: str, dtype: str, source: Bits, output: Bits) -> Call:
        return partial(self._compute, collective, output)

    def _compute(self, collective: str, output: Bits) -> None:
        count = output.size * (self.ranks if collective == "reduce_scatter" else 1)
        inputs = np.resize(self.table[: self.ranks, :], (self.ranks, self.table.shape[1]))
        whole = np.stack([np.resize(row, count) for row in inputs])
        part = count // self.ranks
        mine = slice(self.rank * part, (self.rank + 1) * part)
        total = whole.view(np.float32).sum(axis=0).view(np.uint32)
        output[:] = {
            "all_reduce": total,
            "reduce_scatter": total[mine],
            "all_gather": whole[:, :part].reshape(-1),
            "broadcast": whole[0],
            "all_to_all": whole[:, mine].reshape(-1),
        }[collective]
        output[output.size // 2] += self.flaw


@pytest.mark.parametrize("flaw", (0, 1))
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_check_of_results(collective: str, flaw: int, tmp_path: Path) -> None:
    path = worker.write_inputs(tmp_path, "float32", 4)
    count = 4 * 70_001  # more than a period, and no multiple of one
    order = {
        "collective": collective,
        "dtype": "float32",
        "bytes": 4 * count,
        "iterations": 2,
        "call": 5,
        "inputs": path,
    }
    for work_us in (0, 5000):
        began = time.thread_time_ns()
        answer = worker.obey(Exact(np.load(path), 5, flaw), order | {"work_us": work_us})
        assert answer["wrong"] == flaw
        assert len(answer["times_ns"]) == 2
        assert time.thread_time_ns() - began >= 2 * 1000 * work_us


def test_orders_and_answers(tmp_path: Path) -> None:
    """A rank says hello, answers each order, reports an error instead of dying, and leaves when the driver does."""
    inputs = worker.write_inputs(tmp_path, "bfloat16", 2)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen(1)
        rank = threading.Thread(target=worker.serve, args=(Copy(1, 2), str(tmp_path / "socket")))
        rank.start()
        connection, _ = listener.accept()
    with connection, connection.makefile("rw") as lines:
        assert json.loads(lines.readline())["rank"] == 1
        order = {
            "collective": "copy",
            "dtype": "bfloat16",
            "bytes": 1000,
            "iterations": 3,
            "call": 1,
            "inputs": str(inputs),
        }
        for changed, found in ({}, "times_ns"), ({"collective": "scan"}, "error"), ({}, "times_ns"):
            lines.write(json.dumps(order | changed) + "\n")
            lines.flush()
            answer = json.loads(lines.readline())
            assert found in answer, answer
        assert (len(answer["times_ns"]), answer["wrong"]) == (3, 0)
    rank.join(10)
    assert not rank.is_alive()


def test_a_team_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match=r"impi with 2 ranks: .* status 3\nno such fabric"):
        Team("impi", 2, tmp_path, 30, ["sh", "-c", "echo no such fabric; exit 3"])


def test_a_team_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match=r"0 of 2 ranks came within 0.5 s"):
        Team("impi", 2, tmp_path, 0.5, ["sh", "-c", "sleep 1000"])


def test_ranks_that_are_each_alone_are_told(tmp_path: Path) -> None:
    """As a launcher starts them that belongs to another MPI than mpi4py."""
    alone = f"{sys.executable} $0 memcpy $2 1"
    with pytest.raises(BackendFailed, match="rank 0 came twice"):
        Team("impi", 2, tmp_path, 30, ["sh", "-c", f"{alone} & exec {alone}"])
