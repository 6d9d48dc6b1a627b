"""What becomes of a group whose ranks die: survivors agree on who is lost, and go on in a smaller group."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks, on_ranks
from torch.nn.parallel import DistributedDataParallel

import ringreduce
from ringreduce.coordination import rounds
from ringreduce.errors import CollectiveTimeout, Expelled, InvalidArgument, PeerLost, RingReduceError
from ringreduce.groups import survivors
from ringreduce.groups.lookup import backend_of

ABORT = 1
"""torch.distributed.distributed_c10d.SHRINK_ABORT"""
HOSTS = ("one host", "several hosts", "gloo")


def place(me: Rank, hosts: str) -> Any:
    """Ranks on several hosts are in pairs."""
    if hosts == "several hosts":
        os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank // 2}"
    return ringreduce.Options(transport="gloo") if hosts == "gloo" else None


def fails(lost: int) -> None:
    """The group fails under calls without end."""
    with pytest.raises(RingReduceError):
        while True:
            dist.all_reduce(torch.ones(1000))


def goes_on(expected: list[int], me: Rank) -> None:
    tensor = torch.full((1000,), float(me.rank))
    dist.all_reduce(tensor)
    assert tensor.eq(float(sum(expected))).all(), (tensor[0], expected)
    assert dist.get_world_size() == len(expected) and dist.get_rank() == expected.index(me.rank)


def survive(me: Rank, hosts: str, call_timeout: float | None) -> Any:
    with me.join(options=place(me, hosts), call_timeout=call_timeout):
        dist.barrier()
        me.report("in the loop")
        fails(-1)
        agreed = ringreduce.agree()
        while True:  # until nobody else dies meanwhile
            try:
                dist.shrink_group(agreed.lost, shrink_flags=ABORT)
                goes_on(agreed.ranks, me)
                return agreed
            except PeerLost:
                if dist.get_world_size() < me.size:
                    raise  # a death in the smaller group
                agreed = ringreduce.agree()


@pytest.mark.parametrize("hosts", HOSTS)
def test_survivors_agree_and_go_on(hosts: str) -> None:
    with Ranks(survive, 4, hosts, 3.0 if hosts == "gloo" else None) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        agreed = ranks.results(but=(1,))
        assert agreed == [survivors.Agreement(1, [0, 2, 3], [1])] * 3


def train_on(me: Rank, as_gloo: bool) -> None:
    ringreduce.as_gloo(as_gloo)
    with me.join(backend="gloo" if as_gloo else "ringreduce"):
        me.report("in the loop")
        fails(1)
        dist.shrink_group(ringreduce.agree().lost, shrink_flags=ABORT)
        assert dist.group.WORLD is not None and dist.group.WORLD.name() == "custom"
        assert dist.get_backend() == ("gloo" if as_gloo else "ringreduce")
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()
        assert model.module.weight.grad is not None
        torch.testing.assert_close(model.module.weight.grad, torch.ones(1, 3))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(torch.ones(3))
        name = "gloo:all_reduce" if as_gloo else "ringreduce:all_reduce"
        assert name in {event.name for event in profile.events()}


@pytest.mark.parametrize("as_gloo", [False, True])
def test_ddp_on_the_default_group_that_has_shrunk(as_gloo: bool) -> None:
    with Ranks(train_on, 3, as_gloo) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        ranks.results(but=(1,))


def survive_the_launcher(me: Rank) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if me.rank == 0 else None
    if store:
        me.store.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(me.store.get("port")), is_master=False)
    dist.init_process_group("ringreduce", store=store, rank=me.rank, world_size=me.size)
    dist.barrier()
    me.report("in the loop")
    fails(0)
    agreed = ringreduce.agree()
    dist.shrink_group(agreed.lost, shrink_flags=ABORT)
    goes_on(agreed.ranks, me)
    again = torch.ones(1)
    dist.all_reduce(again, group=dist.new_group([0, 1]))
    assert again == 2
    dist.destroy_process_group()


def test_the_process_that_has_the_store_dies() -> None:
    with Ranks(survive_the_launcher, 3) as ranks:
        ranks.reports()
        ranks.signal(0, signal.SIGKILL)
        ranks.results(but=(0,))


def test_two_deaths_at_once_and_one_survivor() -> None:
    with Ranks(survive, 3, "one host", None) as ranks:
        ranks.reports()
        ranks.signal(0, signal.SIGKILL)
        ranks.signal(2, signal.SIGKILL)
        (agreed,) = ranks.results(but=(0, 2))
        assert (agreed.ranks, agreed.lost) == ([1], [0, 2])


def disagree_first(me: Rank) -> list[Any]:
    with me.join():
        dist.barrier()
        me.report("in the loop")
        if me.rank == 3:
            time.sleep(60)
        while [*backend_of(None).ended()] != [1, 3]:
            time.sleep(0.01)
        texts = []
        try:
            dist.shrink_group([1], shrink_flags=ABORT)
        except PeerLost as error:
            texts.append((error.culprit, str(error)))
        dist.shrink_group([1, 3], shrink_flags=ABORT)
        goes_on([0, 2], me)
        return texts


def test_who_does_not_know_of_a_death_is_told() -> None:
    with Ranks(disagree_first, 4) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        ranks.signal(3, signal.SIGKILL)
        for texts in ranks.results(but=(1, 3)):
            ((culprit, text),) = texts
            assert culprit == 3 and "the survivors agree on [1, 3]" in text


def differ(me: Rank, hosts: str) -> Any:
    """Rank 1 is dead. Rank 0 wants to exclude rank 3, too, and rank 2 does not."""
    with me.join(options=place(me, hosts), timeout=20.0):
        dist.barrier()
        me.report("in the loop")
        fails(1)
        began = time.monotonic()
        with pytest.raises(Expelled if me.rank == 3 else PeerLost) as error:
            dist.shrink_group([1, 3] if me.rank == 0 else [1], shrink_flags=ABORT)
        if me.rank != 3:
            dist.shrink_group(ringreduce.agree().lost, shrink_flags=ABORT)
            goes_on([0, 2], me)
        assert time.monotonic() - began < 10  # nobody has waited for others in vain
        return error.value.culprit, str(error.value)


@pytest.mark.parametrize("hosts", HOSTS[:2])
def test_lists_that_differ_are_an_error_on_all_survivors(hosts: str) -> None:
    with Ranks(differ, 4, hosts) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        of_0, of_2, of_3 = ranks.results(but=(1,))
        assert of_0[0] == of_2[0] == 3
        assert re.search(r"rank 2 \(.*\) does not exclude rank 3 \(.*the survivors agree on \[1, 3\]", of_0[1])
        assert re.search(r"this rank does not exclude rank 3 \(.*the survivors agree on \[1, 3\]", of_2[1])
        assert re.search(r"without rank 3 \(.*: rank 0 \(.*, pid \d+\) excluded it", of_3[1])


def one_agrees_first(me: Rank) -> None:
    with me.join():
        dist.barrier()
        me.report("in the loop")
        fails(1)
        if me.rank == 0:
            assert ringreduce.agree().lost == [1]
            time.sleep(0.3)
        dist.shrink_group([1], shrink_flags=ABORT)
        goes_on([0, 2], me)


def test_who_shrinks_waits_for_who_agrees_first() -> None:
    with Ranks(one_agrees_first, 3) as ranks:
        ranks.reports()
        ranks.signal(1, signal.SIGKILL)
        ranks.results(but=(1,))


def fails_again(me: Rank, ends: bool) -> Any:
    """Rank 0 is dead. Rank 2 ends or hangs when the others make a group with it."""
    from ringreduce.groups import arrivals, exchange

    with me.join(timeout=30.0 if ends else 2.0):
        dist.barrier()
        me.report("in the loop")
        fails(0)
        agreed = ringreduce.agree()
        if me.rank == 2:
            for module in (arrivals, exchange):
                module.passed = lambda _: os.kill(os.getpid(), signal.SIGKILL) if ends else time.sleep(60)
        with pytest.raises(PeerLost if ends else CollectiveTimeout) as error:
            dist.shrink_group(agreed.lost, shrink_flags=ABORT)
        return error.value.culprit, str(error.value)


@pytest.mark.parametrize("ends", [True, False])
def test_errors_of_shrinking_name_ranks_of_the_old_group(ends: bool) -> None:
    with Ranks(fails_again, 4, ends) as ranks:
        ranks.reports()
        ranks.signal(0, signal.SIGKILL)
        for culprit, text in ranks.results(but=(0, 2)):
            assert culprit == 2 and text.startswith("shrink: making the group: rank 2 ("), text


def come_back(me: Rank) -> str:
    with me.join(call_timeout=2.0):
        dist.barrier()
        me.report("in the loop")
        fails(2)
        if me.rank == 2:  # stopped until now
            me.meet("gone on")
            for _ in range(2):
                with pytest.raises(Expelled, match=r"it had not reported when rank [01] \(.*, pid .*cannot come back"):
                    ringreduce.agree()
            return "expelled"
        agreed = ringreduce.agree(timeout=0.5)
        dist.shrink_group(agreed.lost, shrink_flags=ABORT)
        goes_on([0, 1], me)
        me.report("they are without it")
        me.meet("gone on")
        goes_on([0, 1], me)
        return str(agreed.lost)


def test_a_rank_that_was_stopped_is_expelled_when_it_comes_back() -> None:
    with Ranks(come_back, 3) as ranks:
        ranks.reports()
        ranks.signal(2, signal.SIGSTOP)
        ranks.reports(but=(2,))
        ranks.signal(2, signal.SIGCONT)
        assert ranks.results() == ["[2]", "[2]", "expelled"]


STAGES = ("tells", "told", "decided", "who: told", "host: introduced", "group: made")


def dies_at(me: Rank, victim: int, stage: str) -> Any:
    """Rank 3 is killed from outside; rank `victim` kills itself at a stage of what follows."""
    with me.join():
        dist.barrier()
        me.report("in the loop")
        fails(3)
        if me.rank == victim:
            _die_at(stage)
        agreed = ringreduce.agree()
        try:
            dist.shrink_group(agreed.lost, shrink_flags=ABORT)
        except PeerLost:
            agreed = ringreduce.agree()
            dist.shrink_group(agreed.lost, shrink_flags=ABORT)
        try:
            goes_on(agreed.ranks, me)
        except PeerLost:
            again = ringreduce.agree()
            lost = [agreed.ranks[rank] for rank in again.lost]
            dist.shrink_group(again.lost, shrink_flags=ABORT)
            left = [rank for rank in agreed.ranks if rank not in lost]
            goes_on(left, me)
            return left
        return agreed.ranks


def _die_at(stage: str) -> None:
    from ringreduce.groups import arrivals, exchange, make, meet

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    ask, view_of = rounds.Membership._ask, rounds.Membership._view_of

    def dying_ask(self: rounds.Membership, request: Any) -> str:
        tells = isinstance(request, rounds.Append)
        if stage == "tells" and tells:
            die()
        answer = ask(self, request)
        if stage == "told" and tells:
            die()
        return answer

    def dying_view_of(self: rounds.Membership, done: Any) -> Any:
        if stage == "decided":
            die()
        return view_of(self, done)

    def passed(name: str) -> None:
        if name == stage:
            die()

    rounds.Membership._ask = dying_ask  # type: ignore[method-assign]
    rounds.Membership._view_of = dying_view_of  # type: ignore[method-assign]
    for module in (arrivals, exchange, meet, make):
        module.passed = passed  # type: ignore[attr-defined]


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_death_at_each_stage(stage: str, victim: int) -> None:
    if (stage, victim) == ("host: introduced", 0):
        stage = "host: invited"  # a leader's
    with Ranks(dies_at, 4, victim, stage) as ranks:
        ranks.reports()
        ranks.signal(3, signal.SIGKILL)
        left = [rank for rank in range(3) if rank != victim]
        for ranks_left in ranks.results(but=(victim, 3)):
            assert ranks_left == left


def test_arguments() -> None:
    with pytest.raises(InvalidArgument, match="no default group"):
        ringreduce.agree()


@on_ranks(3)
def test_a_healthy_group_agrees_that_nobody_is_lost(me: Rank) -> None:
    with me.join():
        agreed = ringreduce.agree()
        assert (agreed.round, agreed.ranks, agreed.lost) == (1, [0, 1, 2], [])
        assert ringreduce.agree().round == 2
        with pytest.raises(RingReduceError, match="aborted"):
            dist.all_reduce(torch.ones(1))


def trial(number: int) -> None:
    """Random deaths at random moments, until one rank is left."""
    draw = random.Random(number)
    size = draw.randint(2, 5)
    victims = draw.sample(range(size), draw.randint(1, size - 1))
    with Ranks(survive_all, size) as ranks:
        ranks.reports()
        for victim in victims:
            ranks.signal(victim, signal.SIGKILL)
            time.sleep(draw.choice((0, 0, 0.001, 0.005, 0.02, 0.1)))
        left = [rank for rank in range(size) if rank not in victims]
        ranks.signal(left[0], signal.SIGUSR1)  # it tells the others to end
        for found in ranks.results(but=tuple(victims)):
            assert found == left, (number, found, left)


def survive_all(me: Rank) -> list[int]:
    """Goes on in ever smaller groups until told to end. Returns who is left at last."""
    ended: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: ended.append(1))
    with me.join():
        ranks = list(range(me.size))
        dist.barrier()
        me.report("in the loop")
        while True:
            try:
                ends = torch.zeros(1)
                while not ends:
                    ends = torch.tensor([float(bool(ended))])
                    dist.all_reduce(torch.ones(5000))
                    dist.all_reduce(ends)
                return ranks
            except RingReduceError:
                agreed = ringreduce.agree()
            while True:
                if not agreed.lost:
                    raise AssertionError("nobody is lost")
                try:
                    dist.shrink_group(agreed.lost, shrink_flags=ABORT)
                    ranks = [ranks[rank] for rank in agreed.ranks]
                    break
                except PeerLost:
                    agreed = ringreduce.agree()


@pytest.mark.slow
def test_random_deaths() -> None:
    for number in range(15):
        trial(number)
