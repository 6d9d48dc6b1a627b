"""Loaders: calls that are wrong, and processes that end at a bad moment."""

from __future__ import annotations

import os
import signal
import socket

import pytest
import torch
from bodies.data import Rows, is_alive, servers_of, until
from distributed.harness import Rank, run

from ringreduce.data import Loader, Order, loader
from ringreduce.errors import InvalidArgument


def odd_steps(me: Rank) -> None:
    order = Order(100, 10)
    with Loader(Rows(100), order, timeout=20) as reader:
        for wrong in (1.5, "x", None, torch.ones(2)):
            with pytest.raises(InvalidArgument, match=r"step is .*; give an integer"):
                reader.get(wrong)
        with pytest.raises(InvalidArgument, match="rank is 'x'; give an integer"):
            reader.get(3, "x", 2)
        assert reader.get(torch.tensor(3))[:, 0].tolist() == order.ids(3).tolist()
        assert reader.get(2)[:, 0].tolist() == order.ids(2).tolist(), "a wrong call has left something"


def test_a_step_is_an_integer() -> None:
    run(odd_steps, 1)


def comes_while_a_server_dies(me: Rank) -> None:
    """The supervisor sleeps until a server has died and a new reader has come. It sees the reader first."""
    rows, order, name = Rows(100), Order(100, 10), f"comes {os.getpid()}"
    with Loader(rows, order, name=name) as first:
        supervisor, next_message = loader._supervisors[-1], loader.next_message
        os.kill(supervisor, signal.SIGSTOP)
        (server,) = servers_of(supervisor)
        os.kill(server, signal.SIGKILL)
        until(lambda: not is_alive(server))

        def wakes_the_supervisor(connection: socket.socket) -> tuple[bytes, list[int]]:
            os.kill(supervisor, signal.SIGCONT)
            return next_message(connection)

        loader.next_message = wakes_the_supervisor
        with Loader(rows, order, name=name) as second:
            assert second.get(1)[:, 0].tolist() == order.ids(1).tolist()
        assert first.get(1)[:, 0].tolist() == order.ids(1).tolist()


def test_a_reader_may_come_while_a_server_dies() -> None:
    run(comes_while_a_server_dies, 1)
