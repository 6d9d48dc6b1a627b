"""Rows that are exchanged between epochs: none is lost, and they go where the order says."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from distributed.harness import Rank, on_ranks, run

from ringreduce.data import Order, exchange
from ringreduce.errors import InvalidArgument

LENGTHS = ([5, 0, 9], [40, 41, 39], [1, 1, 1])


def exchanged(me: Rank, lengths: list[int], fraction: float) -> list[tuple[list[int], int]]:
    """This rank's rows after each of three exchanges, and how many have stayed at their place."""
    order = Order(sum(lengths), 4, seed=3)
    first = sum(lengths[: me.rank])
    ids = torch.arange(first, first + lengths[me.rank])
    labels = (ids * 7).to(torch.float32)[:, None].repeat(1, 3)
    found = []
    with me.join():
        for epoch in range(3):
            before = ids
            ids, labels = exchange((ids, labels), order, epoch, fraction)
            assert torch.equal(labels, (ids * 7).to(torch.float32)[:, None].repeat(1, 3)), "a label is of another row"
            found.append((ids.tolist(), int((ids == before).sum())))
        assert torch.equal(exchange(ids, order, 3, 0.0), ids)
    return found


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_all_rows_go_where_the_order_says(lengths: list[int]) -> None:
    results = run(exchanged, len(lengths), lengths, 1.0)
    expected = np.arange(sum(lengths))
    for epoch in range(3):
        expected = expected[Order(sum(lengths), 4, seed=3).permutation(epoch).at(np.arange(sum(lengths)))]
        assert [len(result[epoch][0]) for result in results] == lengths
        assert np.concatenate([result[epoch][0] for result in results]).tolist() == expected.tolist()


def test_a_fraction_moves_and_the_rest_stays() -> None:
    lengths = LENGTHS[1]
    results = run(exchanged, 3, lengths, 0.25)
    for epoch in range(3):
        now = sorted(each for result in results for each in result[epoch][0])
        assert now == list(range(sum(lengths))), "a row is lost or there twice"
    stayed = [result[0][1] / length for result, length in zip(results, lengths, strict=True)]
    assert all(0.74 <= each <= 0.85 for each in stayed)
    new = [len({*results[0][epoch + 1][0]} - {*results[0][epoch][0]}) for epoch in range(2)]
    assert all(3 <= each <= 10 for each in new), "10 of 40 rows move, and a third of them comes back"


class Pair(NamedTuple):
    ids: torch.Tensor
    labels: torch.Tensor


@on_ranks(2)
def test_rows_keep_their_form(me: Rank) -> None:
    """Rows in a named tuple, under a default device that is not theirs."""
    ids = torch.arange(4) + 4 * me.rank
    with me.join(), torch.device("meta"):
        pair = exchange(Pair(ids, 2 * ids), Order(8, 2), 0, np.float32(1))
    assert isinstance(pair, Pair) and torch.equal(pair.labels, 2 * pair.ids)


@on_ranks(2)
def test_wrong_arguments(me: Rank) -> None:
    with me.join():
        for arguments, message in [
            ((torch.zeros(3), Order(7, 2), 0), r"rows are \[3, 3\] by rank, in all 6; order.n is 7"),
            (((torch.zeros(3), torch.zeros(2)), Order(6, 2), 0), r"lengths \[3, 2\]; they must be equal"),
            ((torch.zeros(3), Order(6, 2), 0, 1.5), "fraction is 1.5"),
            ((torch.zeros(3), Order(6, 2), 0, None), "fraction is None"),
            ((torch.zeros(3), Order(6, 2), "a"), "epoch is 'a'; give an integer"),
            ((torch.zeros(3), 6, 0), "order is 6; give a ringreduce.data.Order that shuffles"),
            (
                (torch.zeros(3), Order(6, 2, shuffle=False), 0),
                "shuffle=False.*; give a ringreduce.data.Order that shuf",
            ),
            ((torch.zeros(()), Order(6, 2), 0), "at least one dimension"),
        ]:
            with pytest.raises(InvalidArgument, match=message):
                exchange(*arguments)
