"""Orders: exact permutations, spread evenly, the same for every number of ranks."""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.data import Order, Sampler
from ringreduce.data.permutation import Permutation
from ringreduce.errors import InvalidArgument


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 64, 65, 1000, 1440, 4096, 4097, 100_003])
def test_each_epoch_has_each_id_once(n: int) -> None:
    for epoch in range(3):
        values = Permutation(n, 7, epoch).at(np.arange(n))
        assert np.array_equal(np.sort(values), np.arange(n))
        assert np.array_equal(Permutation(n, 7, epoch).positions_of(values), np.arange(n))


@pytest.mark.slow
@given(st.integers(1, 3000), st.integers(1, 500), st.integers(0, 2**63 - 1), st.booleans())
def test_positions_are_the_epochs_one_after_the_other(n: int, batch: int, seed: int, shuffle: bool) -> None:
    order = Order(n, batch, seed, shuffle)
    steps = order.steps(2)
    ids = np.concatenate([order.ids(step) for step in range(steps)])
    for epoch in range(2):
        assert np.array_equal(np.sort(ids[epoch * n : (epoch + 1) * n]), np.arange(n))
    assert (steps - 1) * batch < 2 * n <= steps * batch
    assert [order.epoch(step) for step in range(steps)] == [step * batch // n for step in range(steps)]


@pytest.mark.slow
@given(st.integers(1, 10**15), st.integers(1, 300), st.integers(0, 10**9), st.data())
def test_any_number_of_ranks_shares_the_same_batch(n: int, batch: int, step: int, data: st.DataObject) -> None:
    order, size = Order(n, batch, 3), data.draw(st.integers(1, batch))
    shares = [order.ids(step, rank, size) for rank in range(size)]
    assert np.array_equal(np.concatenate(shares), order.ids(step))
    lengths = [len(share) for share in shares]
    assert min(lengths) >= 1 and lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def test_permutations_of_few_are_about_equally_frequent() -> None:
    """Chi-squared, against the value that a uniform draw exceeds once in 10,000 times."""
    for n, limit in ((3, 25.7), (4, 55.2)):
        found = Counter(tuple(Permutation(n, seed).at(np.arange(n)).tolist()) for seed in range(6000))
        expected = 6000 / len(list(itertools.permutations(range(n))))
        assert sum((found[each] - expected) ** 2 / expected for each in itertools.permutations(range(n))) < limit


def test_neighbours_are_spread() -> None:
    """Where each of 16 ranges of ids goes, and how far neighbours are apart, as in a uniform permutation of 2**16."""
    for seed in range(5):
        values = Permutation(65_536, seed).at(np.arange(65_536))
        table = np.histogram2d(np.arange(65_536), values, bins=16)[0]
        assert ((table - 256) ** 2 / 256).sum() < 320  # 225 degrees of freedom: exceeded once in 40,000 times
        assert abs(np.abs(np.diff(values)).mean() - 65_536 / 3) < 400  # 4.7 standard errors


def test_the_order_is_the_same_on_all_machines() -> None:
    assert Order(10**12, 4, 7).ids(123).tolist() == KNOWN


KNOWN = [575082820889, 102052230925, 843178483945, 932814766037]


def test_epochs_and_seeds_differ() -> None:
    order = Order(1000, 1000, 1)
    different = {tuple(order.ids(step)) for step in range(20)} | {tuple(Order(1000, 1000, s).ids(0)) for s in range(20)}
    assert len(different) == 39  # seed 1 is among both


def test_ids_are_the_callers_own() -> None:
    """Also where they are of one block of the order's; `rows[ids]` of a tensor warns if they cannot be written."""
    order = Order(100, 10)
    ids, expected = order.ids(0), order.ids(0).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.arange(100)[ids].tolist() == expected
    ids.sort()
    assert order.ids(0).tolist() == expected != ids.tolist()


def test_travels_to_other_processes() -> None:
    order = pickle.loads(pickle.dumps(Order(1000, 10, 5)))
    assert np.array_equal(order.ids(3), Order(1000, 10, 5).ids(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "n is 0; give an integer from 1"),
        ((10, 2.5), "batch is 2.5; give an integer from 1"),
        ((10, 2, -1), "seed is -1; give an integer from 0"),
        ((True, 2), "n is True"),
    ],
)
def test_wrong_orders(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Order(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 2), "rank is 2 and size is 2"),
        ((0, -1, 2), "rank is -1"),
        ((-1, 0, 1), "step is -1"),
        ((0, 0, 11), "11 ranks share a batch of 10"),
        ((1.5, 0, 1), "step is 1.5; give an integer"),
        (("x", 0, 1), "step is 'x'; give an integer"),
        ((True, 0, 1), "step is True; give an integer"),
        ((torch.tensor([1, 2]), 0, 1), r"step is tensor\(\[1, 2\]\); give an integer"),
        ((0, 0.0, 1), "rank is 0.0; give an integer"),
        ((0, 0, None), "size is None; give an integer"),
    ],
)
def test_wrong_shares(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Order(100, 10).ids(*arguments)


def test_any_integer_is_a_step() -> None:
    order = Order(100, 10)
    for three in (np.int32(3), np.uint8(3), torch.tensor(3), torch.tensor([3], dtype=torch.uint8)):
        span = order.span(three, 0, 2)
        assert span == (30, 35) and [type(each) for each in span] == [int, int]


def test_a_dataloader_takes_it_and_resumes() -> None:
    order = Order(50, 8, 2)
    loader = torch.utils.data.DataLoader(torch.arange(50), batch_sampler=Sampler(order, 1, 2))
    batches = [batch.tolist() for _ in range(2) for batch in loader]
    assert batches == [order.ids(step, 1, 2).tolist() for step in range(order.steps(2))]
    assert len(loader) == order.steps(3) - order.steps(2)

    resumed = Sampler(order, 0, 1)
    resumed.load_state_dict({"step": 4, "order": order.state()})
    assert [*resumed] == [order.ids(step).tolist() for step in range(4, order.steps(1))]
    with pytest.raises(InvalidArgument, match="of the order"):
        Sampler(Order(50, 9, 2)).load_state_dict(resumed.state_dict())
