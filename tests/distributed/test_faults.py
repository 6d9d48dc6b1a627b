"""What every rank sees when another dies, stops, comes late or calls something else; and that nothing is left over.

Times are bounded from below and above, and each fault has its control: the same program without it goes on.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from bodies import faults
from bodies.faults import NOTICED, leftovers
from distributed.harness import Ranks, run

from ringreduce.errors import CollectiveTimeout, SystemFailure

# what faults leave behind


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    run(faults.joins, 1)  # now the server that all ranks are forked from is there, with a directory of its own
    before = leftovers()
    yield
    assert leftovers() == before


# death


def test_survivors_of_a_kill_name_the_dead_rank_at_once() -> None:
    with Ranks(faults.reduce_in_a_loop, 4, 60.0, 20.0, [0, 1, 3]) as ranks:
        faults.death_is_known(ranks, 2, NOTICED)


def test_without_a_kill_the_loop_goes_on() -> None:
    run(faults.reduce_in_a_loop, 4, 0.5 + NOTICED, 20.0, [])


def test_nothing_is_left_when_all_ranks_are_killed() -> None:
    with Ranks(faults.reduce_in_a_loop, 3, 60.0, 20.0, []) as ranks:
        ranks.reports()
        for rank in range(3):
            ranks.signal(rank, signal.SIGKILL)  # and nothing_left_behind looks


def test_recv_from_a_killed_rank() -> None:
    with Ranks(faults.recv_from_nobody, 3) as ranks:
        faults.death_is_known(ranks, 1, NOTICED)


# stopped and late ranks


def test_survivors_of_a_stop_time_out_and_name_the_stopped_rank() -> None:
    with Ranks(faults.reduce_in_a_loop, 3, 60.0, 3.0, [0, 1, 2]) as ranks:
        ranks.reports()
        time.sleep(0.3)
        stopped = ranks.signal(1, signal.SIGSTOP)
        for kind, message, culprit, when in ranks.reports(but=(1,)):
            assert (kind, culprit) == (CollectiveTimeout, 1)
            assert "rank 1" in message and str(ranks.pid(1)) in message
            assert stopped + 2 < when < stopped + 5  # the call may have begun before the stop
        ranks.signal(1, signal.SIGCONT)
        ranks.results()


def test_a_stop_shorter_than_the_timeout_is_no_error() -> None:
    with Ranks(faults.reduce_in_a_loop, 3, 3.0, 3.0, []) as ranks:
        faults.is_stopped_for_a_second(ranks)


def test_time_in_which_all_ranks_were_frozen_is_not_waited() -> None:
    """As by a container that is paused, or a virtual machine that is moved."""
    with Ranks(faults.waits_while_all_are_stopped, 2) as ranks:
        ranks.reports()
        time.sleep(0.3)
        for rank in range(2):
            ranks.signal(rank, signal.SIGSTOP)
        time.sleep(2.5)  # longer than the timeout
        for rank in range(2):
            ranks.signal(rank, signal.SIGCONT)
        time.sleep(0.3)
        ranks.store.set("go on", "")
        assert ranks.results() == [[2.0] * 6, [2.0] * 3 + [0.0] * 3]


@pytest.mark.parametrize("shared", (True, False))
@pytest.mark.parametrize("size", (2, 3))
def test_a_rank_that_goes_on_after_the_timeout_changes_no_tensor_of_others(size: int, shared: bool) -> None:
    with Ranks(faults.stop_in_the_middle, size, 1, shared) as ranks:
        faults.goes_on_late(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("shared", (True, False))
def test_a_rank_that_goes_on_after_the_timeout_takes_nothing_that_was_changed(shared: bool) -> None:
    for _ in range(4):  # the rank is not always stopped inside of a call
        with Ranks(faults.gather_late, 2, shared) as ranks:
            faults.goes_on_late(ranks)


def test_waiting_for_a_late_rank_costs_almost_no_cpu_time() -> None:
    assert max(run(faults.wait_for_a_late_rank, 3)) < 0.05


# mismatches


@pytest.mark.parametrize("late", (0, 0.3), ids=("together", "one rank late"))
def test_mismatches_are_known_to_all_ranks_at_once(late: float) -> None:
    faults.mismatches_are_known(run(faults.call_something_else, 3, late), NOTICED)


def test_leaving_out_a_call_is_a_mismatch() -> None:
    faults.leaving_out_is_known(run(faults.leave_out_a_call, 3))


def test_recv_of_another_size_or_dtype_leaves_the_group_usable() -> None:
    run(faults.recv_another_size, 2)


# what runs out


def test_a_call_without_a_thread_breaks_the_group() -> None:
    run(faults.begin_without_threads, 2)


def test_the_others_hear_at_once_that_a_rank_has_no_memory() -> None:
    for kind, message, culprit, took in run(faults.reduce_without_memory, 2)[0]:
        assert (kind, culprit) == (SystemFailure, 1) and "reported by rank 1" in message, message
        assert took < 10  # the timeout is 30 s


# ends


def test_destroying_a_group_ends_the_calls_under_way() -> None:
    run(faults.destroy_early, 3)


def test_abort_wakes_all_waiting_ranks() -> None:
    faults.abort_is_known(run(faults.abort_while_waiting, 3), NOTICED)


# wrong arguments


def test_wrong_arguments_are_named_and_leave_the_group_usable() -> None:
    run(faults.wrong_arguments, 3)
