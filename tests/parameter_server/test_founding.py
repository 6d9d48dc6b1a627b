"""Founding a parameter server when a founder dies, comes late, or is started again after the others serve."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from bodies.parameter_server import SMALL
from distributed.harness import Rank, Ranks, run
from processes import deadline

import ringreduce.parameter_server as ps
from ringreduce.coordination.founding import _founder
from ringreduce.coordination.process import has_ended
from ringreduce.errors import CollectiveTimeout, InvalidArgument, PeerLost
from ringreduce.parameter_server.arguments import MOST_SERVERS, MOST_WORKERS
from ringreduce.parameter_server.entry import Entry
from ringreduce.parameter_server.founding import _PREFIX as PREFIX

LONG = 2 * deadline()
"""A timeout that would fail the test if a call waited for it."""


def dies(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def replaced(where: str, by: Callable[..., None]) -> Any:
    """Replaces a function, given as "module.name", by another one."""
    module, _, name = where.partition(".")
    return mock.patch.object(sys.modules[f"ringreduce.parameter_server.{module}"], name, by)


def loses_a_founder(me: Rank, where: str, late: bool) -> tuple[str, int]:
    """Rank 2 dies once it has come. Rank 1 comes at once, or when rank 0 has been told."""
    options = SMALL | {"timeout": LONG}
    me.meet("all have begun")
    if me.rank == 2:
        me.report(os.getpid())
        with replaced(where, dies):
            ps.join(me.store, rank=2, size=3, **options)
    if me.rank == 1 and late:
        me.store.wait(["rank 0 has been told"])
    with pytest.raises(PeerLost) as raised:
        ps.join(me.store, rank=me.rank, size=3, **options)
    me.store.set("rank 0 has been told", "")
    return str(raised.value), raised.value.culprit


@pytest.mark.parametrize(
    ("where", "late"),
    [
        ("founding._agree_on_all", True),
        ("founding._make_known", True),
        ("founding._make_known", False),
        ("join.enter", False),
        ("founding._wait_for_founders", False),
    ],
)
def test_the_others_are_told_of_a_founder_that_dies_before_or_after_they_come(where: str, late: bool) -> None:
    with Ranks(loses_a_founder, 3, where, late) as ranks:
        (pid,) = ranks.reports(but=(0, 1))
        for said, culprit in ranks.results(but=(2,)):
            assert "server 2 (" in said and f"pid {pid})" in said and culprit == 2


def begins_last(me: Rank, fault: str) -> tuple[str, int]:
    """Rank 0 comes before rank 1 has begun. It is told of rank 2, and ends, before rank 1 comes."""
    options, kind = SMALL | {"timeout": LONG}, PeerLost if fault == "dies" else InvalidArgument
    if me.rank > 0:
        me.store.wait([rank_0 := f"{PREFIX}/default/attempt 0/rank 0"])
    if me.rank == 1:
        began = time.time()
        me.store.set("rank 1 has begun", "")
        while not has_ended(_founder(me.store.get(rank_0)).who):
            time.sleep(0.01)
        mock.patch("ringreduce.coordination.founding.process_began", lambda: began).start()
        mock.patch("ringreduce.parameter_server.entry.process_began", lambda: began).start()
    if me.rank == 2:
        me.store.wait(["rank 1 has begun"])
        if fault == "dies":
            replaced("founding._make_known", dies).start()
        else:
            options["block_bytes"] = 8192
    with pytest.raises(kind) as raised:
        ps.join(me.store, rank=me.rank, size=3, **options)
    return str(raised.value), raised.value.culprit


@pytest.mark.parametrize("fault", ["dies", "has other arguments"])
def test_one_that_begins_last_is_told_why_another_gave_up(fault: str) -> None:
    with Ranks(begins_last, 3, fault) as ranks:
        by_rank_0, by_rank_1 = ranks.results(but=(2,))
        assert by_rank_0 == by_rank_1 and by_rank_0[1] == 2


def is_an_earlier_attempt(me: Rank, port: int, comes: tuple[int, ...], where: str) -> None:
    """These ranks come, and all die together there, as when a launcher ends an attempt."""
    if me.rank in comes:
        with replaced(where, lambda *_: time.sleep(600)):
            me.report("comes")
            ps.join(torch.distributed.TCPStore("127.0.0.1", port), rank=me.rank, size=3, **SMALL | {"timeout": LONG})


def founds(me: Rank, port: int, founders: str) -> list[float]:
    store = torch.distributed.TCPStore("127.0.0.1", port)
    if founders == "servers":
        with ps.serve(store, rank=me.rank, size=3, memory=1 << 20, window=8 << 20, timeout=LONG):
            me.meet("all serve")
            return []
    with ps.join(store, rank=me.rank, size=3, **SMALL | {"timeout": LONG}) as kv:
        kv.init("w", torch.zeros(2), mode=ps.sync())
        kv.push_pull("w", torch.ones(2), out=(out := torch.empty(2))).wait()
        return out.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("founders", ["workers", "servers"])
@pytest.mark.parametrize("where", ["founding._agree_on_all", "founding._make_known", "join.enter"])
@pytest.mark.parametrize("comes", [(0,), (1, 2), (0, 1, 2)])
def test_what_an_earlier_attempt_has_left_behind_does_not_count(
    comes: tuple[int, ...], where: str, founders: str
) -> None:
    of_launcher = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Ranks(is_an_earlier_attempt, 3, of_launcher.port, comes, where) as ranks:
        ranks.reports(but=[rank for rank in range(3) if rank not in comes])
        while not all(of_launcher.check([f"{PREFIX}/default/attempt 0/rank {rank}"]) for rank in comes):
            time.sleep(0.01)
        for rank in comes:
            ranks.signal(rank, signal.SIGKILL)
        ranks.results(but=comes)
    assert run(founds, 3, of_launcher.port, founders) == [[] if founders == "servers" else [1.0, 1.0]] * 3


def founds_with_other_arguments(me: Rank, port: int) -> list[float]:
    """Rank 0 comes first, and does not notice at its first look that those of the earlier attempt have ended."""
    if me.rank == 0:
        first, check = iter([True]), Entry.check_founding
        with mock.patch.object(Entry, "check_founding", lambda entry: next(first, False) or check(entry)):
            return founds(me, port, "servers")
    store = torch.distributed.TCPStore("127.0.0.1", port)
    store.wait([f"{PREFIX}/default/attempt"])
    return founds(me, port, "servers")


def test_an_earlier_attempt_may_have_had_other_arguments() -> None:
    of_launcher = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Ranks(is_an_earlier_attempt, 3, of_launcher.port, (1, 2), "founding._make_known") as ranks:
        ranks.reports(but=[0])
        of_launcher.wait([f"{PREFIX}/default/attempt 0/block bytes"])
        ranks.signal(1, signal.SIGKILL)
        ranks.signal(2, signal.SIGKILL)
        ranks.results(but=(1, 2))
    assert run(founds_with_other_arguments, 3, of_launcher.port) == [[]] * 3


def waits_for_one(me: Rank) -> tuple[str, int] | None:
    me.meet("all are here")  # the timeout is short, and processes start as they can
    if me.rank == 2:
        return None
    with pytest.raises(CollectiveTimeout) as raised:
        ps.join(me.store, rank=me.rank, size=3, **SMALL | {"timeout": 0.5})
    return str(raised.value), raised.value.culprit


def test_a_timeout_names_the_founder_that_did_not_come() -> None:
    for said, culprit in run(waits_for_one, 3)[:2]:
        assert "server 2 did not come in time" in said and culprit == 2


def comes_again(me: Rank, backups: int) -> str:
    """Rank 1 is killed when all serve, and rank 2 comes in its place."""
    options = {"memory": 32 << 20, "window": 4 << 20, "backups": backups}
    if me.rank == 2:
        me.store.wait(["rank 1 is gone"])
        try:
            with ps.serve(me.store, rank=1, size=2, timeout=LONG, **options) as serving:
                assert serving.wait(0) in (False, True)
                me.store.set("come again", "")
                return f"serves {sorted(serving._local.serving())}"
        except InvalidArgument as error:
            me.store.set("come again", "")
            return str(error)
    with ps.serve(me.store, rank=me.rank, size=2, timeout=30.0, **options):
        me.report("serves")
        if me.rank == 1:
            time.sleep(600)
        me.store.wait(["come again"])
    return ""


@pytest.mark.parametrize("backups", [0, 1])
def test_a_server_that_is_started_again_is_told_or_joins(backups: int) -> None:
    with Ranks(comes_again, 3, backups) as ranks:
        ranks.reports(but=(2,))
        pid = ranks.pid(0)
        ranks.signal(1, signal.SIGKILL)
        ranks._processes[1].join(deadline())
        ranks.store.set("rank 1 is gone", "")
        said = ranks.results(but=(1,))[1]
    if backups:
        assert said in ("serves [0]", "serves [1]")
    else:
        assert "rank 1 cannot found the parameter server 'default' again: server 0 (" in said
        assert f"pid {pid}) serves already" in said and "another name=" in said


def test_counts_have_limits() -> None:
    fresh = torch.distributed.HashStore()
    with pytest.raises(InvalidArgument, match=f"servers is 1000000; .* at most {MOST_SERVERS}"):
        ps.serve(fresh, rank=0, size=1, servers=1_000_000)
    with pytest.raises(InvalidArgument, match=f"size {MOST_SERVERS + 1}; .* <= {MOST_SERVERS}"):
        ps.join(fresh, rank=0, size=MOST_SERVERS + 1)
    with pytest.raises(InvalidArgument, match=f"workers is {MOST_WORKERS + 1}; .* 0 to {MOST_WORKERS}"):
        ps.join(fresh, rank=0, size=1, workers=MOST_WORKERS + 1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
            r"SLURM_NTASKS is 2, .* set RANK=\$SLURM_PROCID WORLD_SIZE=\$SLURM_NTASKS, .* set WORLD_SIZE=1",
        ),
        (
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2"},  # srun --ntasks=2 in a larger job
            r"SLURM_STEP_NUM_TASKS is 2, .* WORLD_SIZE=\$SLURM_STEP_NUM_TASKS, ",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, r"OMPI_COMM_WORLD_SIZE is 3, .* set RANK=\$OMPI_COMM_WORLD_RANK"),
        ({"PMI_SIZE": "2"}, r"PMI_SIZE is 2, .* set RANK=\$PMI_RANK WORLD_SIZE=\$PMI_SIZE"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "WORLD_SIZE is 2, and this process would be alone: set MASTER_ADDR, MASTER_PORT, too",
        ),
        ({"PMI_SIZE": "2", "WORLD_SIZE": "1"}, ""),
        ({"PMI_SIZE": "1"}, ""),
        ({"SLURM_NTASKS": "2"}, ""),  # the script of the job
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1"}, ""),  # a shell by salloc
    ],
)
def test_one_of_several_processes_does_not_train_alone(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgument, match=message) if message else contextlib.nullcontext():
        ps.join(memory=1 << 20, window=8 << 20).leave()


def test_only_a_reader_is_in_the_group_of_readers() -> None:
    with pytest.raises(InvalidArgument, match=r"group is 'observers', .* join with role='reader'"):
        ps.join(group="observers")
