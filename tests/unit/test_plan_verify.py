"""verify refuses what is wrong, and says where: each right plan is broken in each way, and each rule once by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ringreduce.plan import BUILDERS, Channel, Plan, PlanError, Program, Read, Step, build, verify

Breaker = Callable[[st.DataObject, Plan, Step], tuple[Step, ...]]
"""From a step of a right plan to the steps that replace it in a wrong one."""


def drop_step(data: st.DataObject, plan: Plan, step: Step) -> tuple[Step, ...]:
    return ()


def duplicate_send(data: st.DataObject, plan: Plan, step: Step) -> tuple[Step, ...]:
    assume(step.send)
    return step, step


def drop_peer(data: st.DataObject, plan: Plan, step: Step) -> tuple[Step, ...]:
    assume(step.send)
    return (replace(step, send=step.send[1:]),)


def change_sender(data: st.DataObject, plan: Plan, step: Step) -> tuple[Step, ...]:
    assume(step.recv)
    return (replace(step, recv=(data.draw(another(plan.size, step.recv[0])), *step.recv[1:])),)


def change_receiver(data: st.DataObject, plan: Plan, step: Step) -> tuple[Step, ...]:
    assume(step.send)
    return (replace(step, send=(data.draw(another(plan.size, step.send[0])), *step.send[1:])),)


def change_chunk(data: st.DataObject, plan: Plan, step: Step) -> tuple[Step, ...]:
    chunks = 1 + max(step.chunk for channel in plan.channels for program in channel.programs for step in program)
    return (replace(step, chunk=data.draw(another(chunks + 1, step.chunk))),)


def drop_read(data: st.DataObject, plan: Plan, step: Step) -> tuple[Step, ...]:
    assume(step.read is not Read.NONE)
    return (replace(step, read=Read.NONE),)


def drop_write(data: st.DataObject, plan: Plan, step: Step) -> tuple[Step, ...]:
    assume(step.write and not (plan.collective == "broadcast" and step.read is Read.INPUT))  # the root's is optional
    return (replace(step, write=False),)


def another(count: int, value: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1).filter(lambda other: other != value)


BREAKERS = [drop_step, duplicate_send, drop_peer, change_sender, change_receiver, change_chunk, drop_read, drop_write]


@pytest.mark.slow
@pytest.mark.parametrize("breaker", BREAKERS)
@settings(max_examples=150)
@given(data=st.data())
def test_a_plan_broken_anywhere_is_refused_where_it_is_broken(breaker: Breaker, data: st.DataObject) -> None:
    collective = data.draw(st.sampled_from(sorted(BUILDERS)))
    plan = build(collective, data.draw(st.sampled_from(sorted(BUILDERS[collective]))), data.draw(st.integers(2, 9)))
    verify(plan)

    index = data.draw(st.integers(0, len(plan.channels) - 1))
    channel = plan.channels[index]
    rank = data.draw(st.integers(0, plan.size - 1))
    program = channel.programs[rank]
    at = data.draw(st.integers(0, len(program) - 1))
    program = (*program[:at], *breaker(data, plan, program[at]), *program[at + 1 :])
    programs = (*channel.programs[:rank], program, *channel.programs[rank + 1 :])
    channels = (*plan.channels[:index], replace(channel, programs=programs), *plan.channels[index + 1 :])

    with pytest.raises(PlanError, match=rf"plan '{plan.name}' .*channel {index}\b.* rank \d+.*\(chunk \d+\)"):
        verify(replace(plan, channels=channels))


def plan(collective: str, *programs: Program, chunks: int = 1, share: int = 1) -> Plan:
    return Plan("hand", collective, len(programs), (Channel(share, chunks, programs),))


SEND = Step(0, Read.INPUT, send=(1,))
TAKE = Step(0, recv=(0,), write=True)
KEEP = Step(0, Read.INPUT, write=True)


def test_a_plan_by_hand_is_right() -> None:
    """The negative controls below are each one change away from this."""
    verify(plan("broadcast", (SEND,), (TAKE,)), depth=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan("broadcast", (SEND, SEND), (TAKE,)), r"rank 0, step 1 .*sends to rank 1 is never received"),
        (plan("broadcast", (SEND,), ()), r"rank 0, step 0 .*sends to rank 1 is never received"),
        (plan("broadcast", (), (TAKE,)), r"rank 1, step 0 \(chunk 0\) waits for a message from rank 0; rank 0 has fin"),
        (plan("broadcast", (SEND,), (replace(TAKE, recv=(1,)),)), "rank 1, step 0 .*receives from itself"),
        (
            plan("broadcast", (SEND,), (replace(TAKE, recv=(2,)),)),
            r"rank 1, step 0 .*receives from rank 2; ranks are 0..1",
        ),
        (
            plan("broadcast", (replace(SEND, send=(-1,)),), (TAKE,)),
            r"rank 0, step 0 .*sends to rank -1; ranks are 0..1",
        ),
        (plan("broadcast", (replace(SEND, send=(1, 1)),), (TAKE,)), "rank 0, step 0 .*sends to a rank twice"),
        (plan("broadcast", (replace(SEND, chunk=1),), (TAKE,)), r"rank 0, step 0 \(chunk 1\): there is no such chunk"),
        (plan("broadcast", (replace(SEND, read=Read.NONE),), (TAKE,)), "rank 0, step 0 .*no operand"),
        (plan("broadcast", (SEND,), (replace(TAKE, write=False),)), "rank 1, step 0 .*goes nowhere"),
        (plan("broadcast", (replace(SEND, read=Read.OUTPUT),), (TAKE,)), "rank 0, step 0 .*has not written"),
        (plan("broadcast", (SEND,), (replace(TAKE, read=Read.INPUT),)), "rank 1, step 0 .*no input"),
        (plan("broadcast", (SEND,), (TAKE,), share=0), "channel 0: share is 0; it must be at least 1"),
        (plan("broadcast", (SEND,), (TAKE,), chunks=0), "channel 0: chunks is 0; it must be at least 1"),
        (plan("broadcast", (SEND,), (TAKE,), chunks=2), r"rank 1 \(chunk 1\): no step writes this output chunk"),
        (replace(plan("broadcast", (SEND,), (TAKE,)), size=3), r"2 programs; there must be one per rank, 3"),
        (replace(plan("broadcast", (SEND,), (TAKE,)), channels=()), "no channels"),
        (replace(plan("broadcast"), size=0), "size must be at least 1"),
        (plan("whisper", (SEND,), (TAKE,)), "'whisper' is unknown; known are all_reduce"),
        (plan("scatter", (SEND, KEEP), (TAKE,)), "rank 1, step 0 .*no output"),
        (plan("reduce", (KEEP,), (replace(SEND, send=(0,)),)), "rank 1, step 0 .*never received"),
        (plan("reduce", (KEEP,), ()), r"rank 0 \(chunk 0\): the output lacks the contribution of rank 1"),
        (plan("reduce", (KEEP,), (), ()), "lacks the contribution of ranks 1, 2"),
        (plan("reduce", (TAKE, KEEP), (TAKE,)), "receives from itself"),
    ],
)
def test_each_rule_has_its_message(wrong: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verify(wrong)


def test_a_contribution_counts_once() -> None:
    first = Step(0, Read.INPUT, recv=(1,), write=True)
    again = Step(0, Read.OUTPUT, recv=(1,), write=True)
    give = Step(0, Read.INPUT, send=(0,))
    with pytest.raises(
        PlanError, match=r"channel 0, rank 0, step 1 \(chunk 0\): takes the contribution of rank 1 twice"
    ):
        verify(plan("reduce", (first, again), (give, give)))


def test_collectives_that_move_data_have_nothing_to_combine() -> None:
    back = Step(0, recv=(0,), write=True, send=(0,))
    with pytest.raises(PlanError, match=r"rank 0, step 1 .*the contribution of rank 0 twice"):
        verify(plan("broadcast", (SEND, Step(0, Read.INPUT, recv=(1,), write=True)), (back,)))


def test_messages_arrive_in_the_order_they_were_sent() -> None:
    programs = ((SEND, replace(SEND, chunk=1)), (replace(TAKE, chunk=1), TAKE))
    with pytest.raises(PlanError, match=r"rank 1, step 0 \(chunk 1\): rank 0 sent chunk 0 here"):
        verify(plan("broadcast", *programs, chunks=2))


def test_overwritten_input_is_not_read() -> None:
    """As if in place: rank 0 writes the sum over its input, then sends that 'input' to rank 1."""
    combine = Step(0, Read.INPUT, recv=(1,), write=True)
    with pytest.raises(PlanError, match=r"rank 0, step 1 .*overwritten: in place, output is input"):
        verify(plan("all_reduce", (combine, SEND), (Step(0, Read.INPUT, send=(0,)), Step(0, Read.INPUT, (0,), True))))


def test_ranks_that_combine_in_different_orders_are_refused() -> None:
    """Rank 0 adds ((0 + 1) + 2) in two steps, where the others add all three in one: maybe other bits."""
    give = [Step(0, Read.INPUT, send=tuple(peer for peer in range(3) if peer != rank)) for rank in range(3)]
    in_two = (Step(0, Read.INPUT, recv=(1,), write=True), Step(0, Read.OUTPUT, recv=(2,), write=True))
    programs = (
        (give[0], *in_two),
        (give[1], Step(0, Read.INPUT, recv=(0, 2), write=True)),
        (give[2], Step(0, Read.INPUT, recv=(0, 1), write=True)),
    )
    with pytest.raises(
        PlanError, match=r"channel 0 \(chunk 0\): ranks 0 and [12] combine the contributions differently"
    ):
        verify(plan("all_reduce", *programs))
    verify(plan("reduce", (*in_two,), *(((Step(0, Read.INPUT, send=(0,))),) for _ in range(2))))


def test_a_cycle_of_waits_is_named_link_by_link() -> None:
    wait = [Step(0, recv=(peer,), write=True, send=(peer,)) for peer in (1, 0)]
    with pytest.raises(
        PlanError,
        match=r"channel 0: deadlock: rank 0, step 0 \(chunk 0\) waits for a message from rank 1; "
        r"rank 1, step 0 \(chunk 0\) waits for a message from rank 0$",
    ):
        verify(plan("all_reduce", (wait[0],), (wait[1],)))


def test_what_is_no_plan_is_named() -> None:
    with pytest.raises(PlanError, match=r"plan is 5; give a ringreduce\.Plan"):
        verify(5)


def test_an_outbox_needs_a_slot() -> None:
    with pytest.raises(PlanError, match="outbox of 0 slots"):
        verify(build("all_gather", "direct", 2), depth=0)


def test_the_root_of_a_broadcast_may_write_or_not() -> None:
    verify(plan("broadcast", (replace(SEND, write=True),), (TAKE,)))
    verify(plan("broadcast", (SEND,), (TAKE,)))
