"""What the tests of operators of the user's own share: operators, what they are called on, and where."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from distributed.harness import Rank
from processes import Logged

import ringreduce
from ringreduce import Op

PLACEMENTS: dict[str, dict[str, str | Sequence[int]]] = {
    "one host": {},
    "gloo": {"RINGREDUCE_TRANSPORT": "gloo"},
    "tcp": {"RINGREDUCE_TRANSPORT": "tcp"},
    "2 x 2": {"RINGREDUCE_HOST_ID": (0, 0, 1, 1)},
    "interleaved": {"RINGREDUCE_HOST_ID": (0, 1, 0, 1)},
    "uneven": {"RINGREDUCE_HOST_ID": (0, 1, 1, 1)},
}


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of 2 x 2 matrices of whole numbers: it does not commute, and is exact."""
    return a @ b


PRODUCT = Op.torch(product, element=(2, 2), check=True)


def matrices(rank: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * count + rank)
    return torch.randint(-3, 4, (count, 2, 2), generator=generator)


def folded(ranks: Sequence[int], count: int) -> torch.Tensor:
    return functools.reduce(product, (matrices(rank, count) for rank in ranks))


def placed(me: Rank, placement: dict[str, Any], body: Callable[..., Any], *args: Any) -> Any:
    for name, value in placement.items():
        os.environ[name] = value if isinstance(value, str) else f"host {value[me.rank]}"
    with me.join():
        return body(me, *args)


def later(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The larger value with its index; of equal ones the lower index."""
    wins = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] < a[1]))
    return torch.where(wins, b[0], a[0]), torch.where(wins, b[1], a[1])


ELEMENT_BYTES = (1, 3, 12, 24, 48, 4100, 512 * 1024)


def rightmost(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """b, except where its first byte is 0: associative, and not commutative."""
    first = b.view(np.uint8).reshape(len(b), -1)[:, 0]
    return np.where(first == 0, a, b)


WELFORD = np.dtype([("count", "<i8"), ("mean", "<f8"), ("squares", "<f8")])


class Merge:
    """An operator that its function leads to."""

    def __init__(self, wrong: float = math.nan) -> None:
        self.op, self.wrong = Op.torch(self.merge, name="merge"), wrong

    def merge(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if (a == self.wrong).any():
            raise ValueError("wrong")
        return a + b


def lives_on(me: Rank) -> None:
    x = matrices(me.rank, 3)
    ringreduce.all_reduce(x, op=PRODUCT)
    assert torch.equal(x, folded(range(me.size), 3))
    dist.barrier()


def logged_by_operators() -> Logged:
    logging.getLogger("ringreduce.operators.call").setLevel(logging.DEBUG)
    return Logged("ringreduce.operators.call")
