"""Loaders: calls that are wrong, and processes that end at a bad moment."""

from __future__ import annotations

import pytest
import torch
from bodies.data import Rows
from distributed.harness import Rank, run

from ringreduce.data import Loader, Order
from ringreduce.errors import InvalidArgument


def odd_steps(me: Rank) -> None:
    order = Order(100, 10)
    with Loader(Rows(100), order, timeout=20) as loader:
        for wrong in (1.5, "x", None, torch.ones(2)):
            with pytest.raises(InvalidArgument, match=r"step is .*; give an integer"):
                loader.get(wrong)
        with pytest.raises(InvalidArgument, match="rank is 'x'; give an integer"):
            loader.get(3, "x", 2)
        assert loader.get(torch.tensor(3))[:, 0].tolist() == order.ids(3).tolist()
        assert loader.get(2)[:, 0].tolist() == order.ids(2).tolist(), "a wrong call has left something"


def test_a_step_is_an_integer() -> None:
    run(odd_steps, 1)
