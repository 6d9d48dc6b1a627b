"""Calls that are not the same on all ranks are errors, also if no rank waits for another in them; and calls while the
process ends work as long as Python does."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks, run, run_cases
from processes import GROUP_TIMEOUT, ROOT, deadline

import ringreduce
from ringreduce.errors import CollectiveMismatch, CollectiveTimeout, PeerLost

TRANSPORTS = ("memory", "tcp", "gloo")


def ones(count: int = 4) -> torch.Tensor:
    return torch.ones(count)


def parts(me: Rank) -> list[torch.Tensor]:
    return [ones() for _ in range(me.size)]


def one_more(me: Rank) -> None:
    for _ in range(2 if me.rank == 0 else 1):
        dist.broadcast(ones(), src=0)


def after(call: Callable[[Rank], Any]) -> Callable[[Rank], Any]:
    """The call, after a broadcast of which each rank is the root."""
    return lambda me: (dist.broadcast(ones(), src=me.rank), call(me))


def message(me: Rank) -> None:
    if me.rank == 0:
        dist.send(ones(), 1)
    elif me.rank == 1:
        dist.recv(ones(), 0)


DIFFERENT: dict[str, Callable[[Rank], Any]] = {
    "broadcast": lambda me: dist.broadcast(ones(), src=me.rank),
    "scatter": lambda me: dist.scatter(ones(), parts(me), src=me.rank),
    "reduce": lambda me: dist.reduce(ones(), dst=(me.rank + 1) % me.size),
    "gather": lambda me: dist.gather(ones(), dst=(me.rank + 1) % me.size),
    "objects": lambda me: dist.broadcast_object_list([me.rank], src=me.rank),
    "scattered objects": lambda me: dist.scatter_object_list([None], list(range(me.size)), src=me.rank),
    "size": lambda me: dist.gather(ones(4 + 4 * (me.rank > 0)), parts(me) if me.rank == 0 else None, dst=0),
    "kind": lambda me: dist.broadcast(ones(), src=0) if me.rank == 0 else dist.reduce(ones(), dst=0),
    "often": lambda me: [dist.broadcast(ones(), src=me.rank) for _ in range(100)],
    "then reduce": after(lambda me: dist.reduce(ones(), dst=(me.rank + 1) % me.size)),
    "then barrier": after(lambda _: dist.barrier()),
    "asynchronous": lambda me: dist.broadcast(ones(), src=me.rank, async_op=True).wait(),
}


def error_of(call: Callable[[], Any]) -> tuple[type[BaseException], str] | None:
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None


def make_and_end(me: Rank, transport: str, call: Callable[[Rank], Any]) -> Any:
    if transport != "memory":
        os.environ["RINGREDUCE_TRANSPORT"] = transport
    timeout = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group("ringreduce", store=me.store, rank=me.rank, world_size=me.size, timeout=timeout)
    error = error_of(lambda: (call(me), dist.destroy_process_group()))
    if dist.is_initialized():
        dist.destroy_process_group()  # which has nothing more to say
    return error


def over_each_transport(function: Callable[..., Any], size: int) -> dict[str, list[Any]]:
    return run_cases(function, size, {transport: (transport,) for transport in TRANSPORTS})


def different(me: Rank, transport: str, what: str) -> Any:
    return make_and_end(me, transport, DIFFERENT[what])


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_different_last_calls_are_an_error_of_at_least_one_rank(transport: str, size: int) -> None:
    for what, found in run_cases(different, size, {what: (transport, what) for what in DIFFERENT}).items():
        errors = [error for error in found if error]
        assert any(kind is CollectiveMismatch and text.count(" called ") == 2 for kind, text in errors), (what, errors)
        assert all(kind in (CollectiveMismatch, PeerLost) for kind, _ in errors), (what, errors)


def call_once_more(me: Rank, transport: str) -> Any:
    return make_and_end(me, transport, one_more)


def test_a_call_more_than_the_others_is_an_error() -> None:
    for transport, found in over_each_transport(call_once_more, 2).items():
        errors = [error for error in found if error]
        assert errors, transport
        if transport != "memory":  # the root waits, and finds that rank 1 has left
            continue
        for kind, text in errors:
            assert kind is CollectiveMismatch
            assert "called broadcast(count=4" in text and "never called" in text


def send_after(me: Rank, transport: str) -> Any:
    return make_and_end(me, transport, after(message))


def test_a_message_compares_the_calls_before_it() -> None:
    for transport, (_, (kind, text)) in over_each_transport(send_after, 2).items():
        assert kind is CollectiveMismatch and "root=0" in text and "root=1" in text, transport


def meet_after(me: Rank, transport: str) -> Any:
    return make_and_end(me, transport, after(lambda _: ringreduce.monitored_barrier(timeout=20)))


@pytest.mark.parametrize("transport", ("memory", "tcp"))
def test_a_monitored_barrier_compares_the_calls_before_it(transport: str) -> None:
    errors = run(meet_after, 2, transport)
    assert any(error and error[0] is CollectiveMismatch for error in errors), errors


def equal_calls(me: Rank, transport: str) -> Any:
    def call(me: Rank) -> None:
        for root in range(50):
            dist.broadcast(ones(), src=root % me.size)
        for root in range(me.size):
            dist.gather(ones(), parts(me) if me.rank == root else None, dst=root)

    return make_and_end(me, transport, call)


def test_equal_calls_with_changing_roots_are_no_error() -> None:
    assert over_each_transport(equal_calls, 3) == dict.fromkeys(TRANSPORTS, [None] * 3)


def wait_for_centuries(me: Rank, transport: str) -> None:
    if transport != "memory":
        os.environ["RINGREDUCE_TRANSPORT"] = transport
    centuries = timedelta(days=109_500)
    with me.join(timeout=centuries.total_seconds()):
        dist.group.WORLD.set_timeout(centuries)
        x = ones()
        for late in range(2):
            if me.rank == late:
                me.meet(f"late {late}")
            work = dist.all_reduce(x, async_op=True)
            if me.rank != late:
                me.meet(f"late {late}")
            assert work.wait(centuries)
        if me.rank == 0:
            message = dist.irecv(x, 1)
            me.meet("message")
            assert message.wait(centuries)
        else:
            me.meet("message")
            assert dist.isend(x, 0).wait(centuries)
        dist.all_reduce(x)


def test_timeouts_of_centuries_are_long() -> None:
    over_each_transport(wait_for_centuries, 2)


def pass_strided(me: Rank, transport: str) -> None:
    if transport != "memory":
        os.environ["RINGREDUCE_TRANSPORT"] = transport
    x, y = torch.arange(24.0).reshape(4, 6), torch.zeros(4, 6)
    with me.join():
        if me.rank == 0:
            dist.send(x[:, ::2], 1)
            dist.send(x.t(), 1, tag=3)
        else:
            dist.recv(y[:, 1::2], 0)
            assert torch.equal(y[:, 1::2], x[:, ::2]) and not y[:, ::2].any()
            assert dist.recv(y.t(), tag=3) == 0
            assert torch.equal(y, x)


def test_messages_of_strided_tensors() -> None:
    over_each_transport(pass_strided, 2)


def wait_for_a_message(me: Rank, transport: str, sends: bool) -> tuple[str, str]:
    """Each rank sends to the other, or receives from it, and does nothing else."""
    if transport != "memory":
        os.environ["RINGREDUCE_TRANSPORT"] = transport
    x, other = torch.ones(16 << 20), 1 - me.rank
    with me.join(timeout=300.0, call_timeout=2.0):  # 300 s are more than the test may take
        with pytest.raises((CollectiveTimeout, PeerLost)) as raised:  # PeerLost: the other has closed its connections
            dist.send(x, other) if sends else dist.recv(x, other)
        return type(raised.value).__name__, str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_that_nobody_takes_or_sends_name_the_rank(transport: str, sends: bool) -> None:
    found = run(wait_for_a_message, 2, transport, sends)
    assert all(re.search(r"rank [01] \(.*, pid \d+\)", said) for _, said in found), found
    assert "CollectiveTimeout" in [kind for kind, _ in found]


@on_ranks(2)
def test_columns_as_outputs_take_little_memory_besides_their_staging(me: Rank) -> None:
    output, x = torch.ones(32 << 20, 2, dtype=torch.uint8), torch.ones(32 << 20, dtype=torch.uint8)
    with me.join():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        dist.all_gather(list(output.unbind(1)), x)
        more, output = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, output.nbytes
        assert more < 3 * output


# while the process ends

ENDS = """
import atexit, logging, multiprocessing.util, os, sys, weakref
rank, port = map(int, sys.argv[1:])

def call(where):
    x = torch.ones(4)
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).get_future().then(lambda future: future.value()).wait()
    print(where, x.tolist(), flush=True)

class Handler(logging.Handler):
    def close(self):
        call("logging")
        super().close()

class Anything:
    pass

atexit.register(call, "atexit before")
handler, anything = Handler(), Anything()
weakref.finalize(anything, call, "weakref")
for priority in (5, -5):
    multiprocessing.util.Finalize(None, call, (f"multiprocessing {priority}",), exitpriority=priority)
import torch
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("ringreduce", store=store, rank=rank, world_size=2)
atexit.register(call, "atexit after")
"""

FORGETS = """
import sys
import torch
import torch.distributed as dist
rank, port = map(int, sys.argv[1:])
dist.init_process_group(
    "ringreduce", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=2
)
dist.broadcast(torch.ones(4), src=rank)
"""

DESTROYS_ANOTHER = """
import sys, time
import torch
import torch.distributed as dist
rank, port = map(int, sys.argv[1:])
dist.init_process_group(
    "ringreduce", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=2
)
other = dist.new_group()

def destroy(future):
    time.sleep(1)  # the main thread is at its end by then
    dist.destroy_process_group(other)
    print("destroyed", flush=True)

dist.all_reduce(torch.ones(4), async_op=True).get_future().then(destroy)
"""


def outputs(program: str) -> list[tuple[str, str]]:
    """What the two ranks of a program write; they end well, and in time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), str(store.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        written = [rank.communicate(timeout=deadline()) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], written
    return written


def test_handlers_of_the_end_may_call() -> None:
    for written, errors in outputs(ENDS):
        lines = written.splitlines()
        assert len(lines) == 6 and all(line.endswith("[4.0, 4.0, 4.0, 4.0]") for line in lines), (written, errors)


def test_a_process_that_ends_without_destroying_its_group_warns_of_different_calls() -> None:
    errors = [errors for _, errors in outputs(FORGETS)]
    assert any("ranks of the group made different calls" in each for each in errors), errors


def test_a_callback_may_destroy_another_group_while_the_process_ends() -> None:
    assert [written for written, _ in outputs(DESTROYS_ANOTHER)] == ["destroyed\n"] * 2
