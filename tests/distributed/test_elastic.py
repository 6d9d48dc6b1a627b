"""Trainings whose members die or are stopped, and that let other processes in."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.elastic import STEPS, come, start, train
from distributed.harness import Rank, Ranks, run

from ringreduce.errors import Expelled


def test_a_training_without_faults() -> None:
    results = run(train, 3, 3, {})
    assert [each["rank"] for each in results] == [0, 1, 2]
    assert all((each["steps"], each["redone"], each["epoch"]) == (STEPS, 0, 0) for each in results)


@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
def test_survivors_go_on(hosts: str) -> None:
    with Ranks(on_hosts, 4, hosts, 4, {"size": 2, "step": 0}) as ranks:
        ranks.reports()
        time.sleep(0.1)
        ranks.signal(0, signal.SIGKILL)
        time.sleep(0.3)
        ranks.signal(2, signal.SIGKILL)
        results = ranks.results(but=(0, 2))
        assert [(each["size"], each["rank"]) for each in results] == [(2, 0), (2, 1)]
        assert results[0]["changes"][-1] == 2 and results[0]["steps"] == results[1]["steps"]


def on_hosts(me: Rank, hosts: str, *rest: Any) -> Any:
    if hosts == "several hosts":
        os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank // 2}"
    return train(me, *rest)


@pytest.mark.parametrize("hosts", ["one host", "several hosts"])
def test_a_fresh_process_joins(hosts: str) -> None:
    with Ranks(on_hosts, 4, hosts, 3, {"size": 3, "step": 1}) as ranks:
        ranks.reports(but=(3,))
        ranks.signal(1, signal.SIGKILL)
        come(ranks, 3)
        results = ranks.results(but=(1,))
        assert sorted(each["rank"] for each in results) == [0, 1, 2]
        assert results[2]["rank"] == 2 and results[2]["began"] > 0  # joiners come last


def test_one_is_left_and_two_join() -> None:
    with Ranks(train, 5, 3, {"size": 3, "step": 1}) as ranks:
        ranks.reports(but=(3, 4))
        ranks.signal(0, signal.SIGKILL)
        ranks.signal(2, signal.SIGKILL)
        come(ranks, 3, 4)
        results = ranks.results(but=(0, 2))
        assert {each["size"] for each in results} == {3} and results[0]["rank"] == 0


def test_a_joiner_is_killed() -> None:
    with Ranks(train, 4, 2, {"size": 3, "step": 1}) as ranks:
        ranks.reports(but=(2, 3))
        come(ranks, 2)
        time.sleep(0.02)
        ranks.signal(2, signal.SIGKILL)
        come(ranks, 3)
        results = ranks.results(but=(2,))
        assert {each["size"] for each in results} == {3}


def stops(me: Rank) -> str:
    """Rank 1 is stopped and continues later."""
    try:
        train(me, 3, {"size": 2, "step": 0}, timeout=timedelta(seconds=2), expel_after=1.0)
    except Expelled:
        return "expelled"
    return "trained"


def test_a_rank_that_was_stopped_is_expelled() -> None:
    with Ranks(stops, 3) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGSTOP)
        ranks.reports(but=(1,))
        ranks.signal(1, signal.SIGCONT)
        assert ranks.results() == ["trained", "expelled", "trained"]


def with_forked_children(me: Rank) -> tuple[int, int, int]:
    """Every member has a child like a DataLoader's, which holds all descriptors that the member had when it forked."""
    world = start(me, 3)
    state = world.state(step=0)
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # ends it where its parent was killed
        signal.pause()
    try:
        me.report("begins")
        while state.step < 30:
            world.attempt(lambda: (time.sleep(0.02), dist.all_reduce(torch.ones(1))))
            state.step += 1
        threads = [thread for thread in threading.enumerate() if thread.name == "ringreduce elastic"]
        return world.epoch, world.size, len(threads)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_forked_children_do_not_keep_an_old_view_alive() -> None:
    with Ranks(with_forked_children, 3) as ranks:
        ranks.reports()
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(but=(2,)) == [(1, 2, 1)] * 2
