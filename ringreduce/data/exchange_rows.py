"""Rows that ranks hold in their own memory, exchanged between epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ringreduce.common.failures import InvalidArgument
from ringreduce.data.batches import like
from ringreduce.data.order import Order, integer
from ringreduce.data.permutation import Ids, Permutation

Tensors = TypeVar("Tensors", torch.Tensor, Sequence[torch.Tensor])


def exchange(
    rows: Tensors, order: Order, epoch: int, fraction: float = 1.0, group: dist.ProcessGroup | None = None
) -> Tensors:
    """Redistributes the rows of all ranks of `group` at random. Every rank gets as many as it has given.

    Call it on all ranks before each epoch, with the same order and epoch. With fraction=1, the rows of all ranks, one
    rank after the other, are permuted as `order` permutes the ids of this epoch. With less, each rank keeps all but
    that fraction of its rows, which are chosen anew in each epoch; the others are permuted among their places. This
    moves less, and can train as well ("Why Globally Re-shuffle? Revisiting Data Shuffling in Large Scale Deep
    Learning", Nguyen et al., IPDPS 2022).

    rows: a tensor, or several that belong together (examples and labels), of equal length in the first dimension. They
        are not changed, so this takes twice their memory. All ranks have the same dtypes and row shapes.
    order: its n is the number of rows of all ranks together. It shuffles.
    fraction: from 0 to 1.

    Returns new tensors, in the form of `rows`. Raises `InvalidArgument`, and what `all_to_all_single` raises.
    """
    tensors = [rows] if isinstance(rows, torch.Tensor) else [*rows]
    _check(tensors, order, fraction)
    epoch = integer("exchange", "epoch", epoch)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    lengths = torch.zeros(size, dtype=torch.int64, device="cpu")
    lengths[rank] = len(tensors[0])
    dist.all_reduce(lengths, group=group)
    if int(lengths.sum()) != order.n:
        raise InvalidArgument(
            f"exchange: rows are {lengths.tolist()} by rank, in all {lengths.sum()}; order.n is {order.n}"
        )
    moved = np.array([round(length * fraction) for length in lengths.tolist()])
    places, target, source = _places(int(lengths[rank]), moved, rank, order, epoch)
    _, send_splits = _by_rank(target, moved)
    owners, receive_splits = _by_rank(source, moved)
    # A rank sends its rows in the order of their new places, and each receiver has them in the order of the senders.
    sent = torch.from_numpy(places[np.argsort(target, kind="stable")])
    arrival = torch.from_numpy(places[np.argsort(owners, kind="stable")])
    results = []
    for tensor in tensors:
        outgoing, result = tensor[sent], tensor.clone()
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, receive_splits, send_splits, group=group)
        result[arrival] = incoming
        results.append(result)
    exchanged: Tensors = results[0] if isinstance(rows, torch.Tensor) else like(rows, results)
    return exchanged


def _check(tensors: list[torch.Tensor], order: Order, fraction: float) -> None:
    if not tensors or any(not isinstance(each, torch.Tensor) or each.dim() == 0 for each in tensors):
        raise InvalidArgument("exchange: rows must be a tensor of at least one dimension, or a sequence of such")
    if len({len(each) for each in tensors}) > 1:
        raise InvalidArgument(f"exchange: rows have lengths {[len(each) for each in tensors]}; they must be equal")
    if not isinstance(order, Order) or not order.shuffle:
        raise InvalidArgument(f"exchange: order is {order!r:.100}; give a ringreduce.data.Order that shuffles")
    if not isinstance(fraction, int | float | np.number) or not 0 <= fraction <= 1:
        raise InvalidArgument(f"exchange: fraction is {fraction!r:.60}; give a number from 0 to 1")


def _places(length: int, moved: Ids, rank: int, order: Order, epoch: int) -> tuple[Ids, Ids, Ids]:
    """Which of this rank's `length` rows take part, in ascending order; where each of them goes; which row replaces it.

    The latter two are positions among all rows that take part, rank after rank. `moved`: how many there are by rank.
    """
    first, count = int(moved[:rank].sum()), int(moved[rank])
    places = np.arange(count)
    if count < length:
        places = np.sort(Permutation(length, order.seed, epoch, rank + 1).at(places))
    own = np.arange(first, first + count)
    shuffle = Permutation(max(1, int(moved.sum())), order.seed, epoch)
    return places, shuffle.positions_of(own), shuffle.at(own)


def _by_rank(positions: Ids, moved: Ids) -> tuple[Ids, list[int]]:
    """Which rank each of these positions belongs to, and how many belong to each rank."""
    ranks = np.searchsorted(np.cumsum(moved), positions, side="right")
    return ranks, np.bincount(ranks, minlength=len(moved)).tolist()
