"""Groups in processes that fork: what a child may do, and what it must leave alone."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bodies.collectives import all_reduce
from distributed.harness import Rank

from ringreduce.errors import PeerLost

CHILD_SECONDS = 20


def in_child(body: Callable[[], Any]) -> Callable[[], str]:
    """Starts `body` in a forked child; the result waits for what it returns, or for its error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_SECONDS)
        try:
            text = str(body())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode()[:60_000])
        os._exit(0)
    os.close(writer)

    def result() -> str:
        with open(reader) as pipe:
            text = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, f"the child ended with {status} (-14: it hung) and said {text!r}"
        return text

    return result


def drop_in_child(me: Rank) -> None:
    def child() -> str:
        works.clear()
        dist.destroy_process_group()
        gc.collect()
        return "gone"

    with me.join():
        works = [dist.all_reduce(torch.ones(30_000), async_op=True) for _ in range(50)]
        works += [dist.irecv(torch.ones(10), 1 - me.rank, tag=tag) for tag in range(10)]
        assert in_child(child)() == "gone"
        works += [dist.isend(torch.ones(10), 1 - me.rank, tag=tag) for tag in range(10)]
        all_reduce(me, 1000, 0)
        for work in works:
            work.wait()


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100,), float(index))


def load_and_reduce(me: Rank) -> None:
    with me.join():
        all_reduce(me, 1000, 0)
        dist.all_reduce(torch.ones(10), async_op=True).wait()  # the progress thread is there
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=True, timeout=20
        )
        for _ in range(2):
            for call, batch in enumerate(loader):
                assert batch[:, 0].tolist() == [4.0 * call + i for i in range(4)]
                work = dist.all_reduce(batch, async_op=True)
                all_reduce(me, 3000, call)
                work.wait()
                assert batch[:, -1].tolist() == [me.size * (4.0 * call + i) for i in range(4)]
    with me.join("afterwards"):  # the workers have outlived the group they were forked in
        assert len(list(loader)) == 16
        all_reduce(me, 1000, 2)
        del loader
        all_reduce(me, 1000, 3)


def leave_a_child_behind(me: Rank) -> None:
    with me.join():
        pid = 0
        if me.rank == 1:
            pid = os.fork()
            if pid == 0:
                signal.alarm(2 * CHILD_SECONDS)
                signal.pause()
        dist.barrier()
        me.report(pid)
        if me.rank == 1:
            signal.pause()
        with pytest.raises(PeerLost) as raised:  # and not the timeout, which comes late
            dist.all_reduce(torch.ones(10))
        assert raised.value.culprit == 1


def outlived_by_a_child(ranks: Any) -> None:
    """Kills rank 1 of those that run `leave_a_child_behind`, and waits for the others."""
    child = ranks.reports()[1]
    ranks.signal(1, signal.SIGKILL)
    try:
        ranks.results(but=(1,))
        os.kill(child, 0)  # it still lived
    finally:
        os.kill(child, signal.SIGKILL)
