"""The order of hosts in a ring: against all orders where these can be counted, else its bound and planted rings."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.errors import TopologyError
from ringreduce.topology import host_order
from ringreduce.topology.host_order import HostRing, ring_order

SIZE = 64


def hops(matrix, order):
    return [matrix[one][other] for one, other in zip(order, (*order[1:], order[0]), strict=True)]


def worth(matrix, order):
    """What an order is compared by: its slowest hop, then the sum of all."""
    speeds = hops(matrix, order)
    return min(speeds), pytest.approx(sum(speeds))


def best(matrix):
    """The slowest hop and the sum of the best ring, by looking at all of them; None if there is no ring."""
    size = len(matrix)
    rings = ([0, *order] for order in itertools.permutations(range(1, size)))
    found = max((min(hops(matrix, ring)), sum(hops(matrix, ring))) for ring in rings)
    return found if found[0] > 0 else None


def is_ring(ring, size):
    return sorted(ring.order) == list(range(size)) and ring.order[0] == 0


def random(kind, size, seed):
    generator = np.random.default_rng(seed)
    scale = generator.lognormal(size=(2, size))
    continent = generator.integers(5, size=size)
    between = generator.uniform(0.05, 0.5, size=(5, 5))[continent][:, continent]
    place = generator.uniform(size=(size, 2))
    distance = np.hypot(*(place[:, None] - place).T)
    noise = generator.uniform(0.8, 1, size=(size, size))
    return {
        "uniform": lambda: generator.uniform(0.1, 10, size=(size, size)),
        "lognormal": lambda: generator.lognormal(size=(size, size)),
        "few speeds": lambda: generator.integers(1, 6, size=(size, size)).astype(float),
        "egress x ingress": lambda: np.outer(*scale),
        "least of egress and ingress": lambda: np.minimum.outer(*scale),
        "continents": lambda: noise * np.where(continent[:, None] == continent, 10 * noise, between),
        "distance": lambda: 1 / (distance + 0.01),
        "distance, asymmetric": lambda: noise / (distance + 0.01),
    }[kind]()


KINDS = (
    "uniform",
    "lognormal",
    "few speeds",
    "egress x ingress",
    "least of egress and ingress",
    "continents",
    "distance",
    "distance, asymmetric",
)


def planted(size, degree, seed, fastest=2.0):
    """Fast links, of 1 to `fastest`: a hidden ring, and others so that `degree` leave each host; all else is slow."""
    generator = np.random.default_rng(seed)
    matrix = generator.uniform(0.01, 0.5, size=(size, size))
    for host in range(size):
        others = generator.choice(size, degree - 1, replace=False)
        matrix[host, others] = generator.uniform(1, fastest, size=degree - 1)
    ring = generator.permutation(size)
    matrix[ring, np.roll(ring, -1)] = generator.uniform(1, fastest, size=size)
    return matrix, min(hops(matrix, ring.tolist()))


@pytest.mark.parametrize("size", range(2, 8))
@pytest.mark.parametrize("kind", KINDS)
def test_small_rings_are_the_best_of_all(kind, size):
    for seed in range(3):
        matrix = random(kind, size, seed)
        ring = ring_order(matrix)
        assert is_ring(ring, size)
        assert best(matrix) == worth(matrix, ring.order)
        assert ring.bandwidth == min(hops(matrix, ring.order)) == ring.bound


def square(entries):
    return st.integers(2, 6).flatmap(lambda size: st.lists(st.tuples(*[entries] * size), min_size=size, max_size=size))


@given(square(st.integers(0, 3)))
def test_links_of_zero_are_none(rows):
    expected = best(rows)
    if expected is None:
        with pytest.raises(TopologyError, match=r"row.*column|row\), column"):
            ring_order(rows)
    else:
        ring = ring_order(rows)
        assert expected == worth(rows, ring.order)
        assert ring.bandwidth <= ring.bound


@pytest.mark.parametrize("kind", KINDS)
def test_64_hosts_are_within_5_percent_of_the_bound(kind):
    for seed in range(2):
        matrix = random(kind, SIZE, seed)
        ring = ring_order(matrix)
        assert is_ring(ring, SIZE)
        assert ring.bandwidth == min(hops(matrix, ring.order))
        assert 0.95 * ring.bound <= ring.bandwidth <= ring.bound


@pytest.mark.parametrize("degree", [2, 3, 4, 5, 6])
def test_a_hidden_ring_of_fast_links_is_found(degree):
    for seed in range(12):
        matrix, slowest = planted(SIZE, degree, seed)
        ring = ring_order(matrix)
        assert is_ring(ring, SIZE)
        assert ring.bandwidth == min(hops(matrix, ring.order)) >= 0.95 * slowest


def test_a_hidden_ring_among_links_of_one_speed_is_found():
    for seed in range(5):
        matrix, _ = planted(SIZE, 3, seed, fastest=1.0)
        ring = ring_order(matrix)
        assert (ring.bandwidth, ring.bound) == (1, 1)


def test_the_bound_holds_for_a_graph_that_is_well_connected_but_has_no_ring():
    # Petersen's graph: every host has three fast neighbours, it is covered by cycles, and no ring goes through it.
    matrix = np.full((10, 10), 1.0)
    for host in range(5):
        for one, other in ((host, (host + 1) % 5), (host + 5, (host + 2) % 5 + 5), (host, host + 5)):
            matrix[one, other] = matrix[other, one] = 9
    ring = ring_order(matrix)
    assert (ring.bandwidth, ring.bound) == (1, 1)
    assert "as a search of all of them showed" in ring.reason
    assert ring_order(np.where(matrix == 1, 2, matrix)).bound == 2


@pytest.mark.parametrize(
    "matrix, reason",
    [
        # Hosts 0 and 1, and 2 and 3, are near each other; nothing fast leads from one pair to the other.
        ([[0, 9, 1, 1], [9, 0, 1, 1], [2, 2, 0, 9], [2, 2, 9, 0]], "do not lead from every host to every other"),
        # Only host 0 has fast links, to and from the others.
        ([[0, 9, 9, 9], [9, 0, 1, 1], [9, 1, 0, 1], [9, 1, 1, 0]], "a next one of its own"),
    ],
)
def test_the_reason_says_which_bound_it_is(matrix, reason):
    ring = ring_order(matrix)
    assert (ring.bandwidth, ring.bound) == (1, 1)
    assert reason in ring.reason and "1 GB/s; no ring's is faster" in ring.reason


def test_what_is_left_undecided_is_not_taken_for_a_proof(monkeypatch):
    matrix = random("continents", SIZE, 0)
    optimum = ring_order(matrix).bandwidth
    monkeypatch.setattr(host_order, "ROUNDS", 1)
    ring = ring_order(matrix)
    assert is_ring(ring, SIZE)
    assert ring.bandwidth < optimum <= ring.bound
    assert f"no ring's exceeds {ring.bound:.4g} GB/s" in ring.reason


@pytest.mark.parametrize("size", [5, 9, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_other_numbers_for_the_hosts_change_nothing(kind, size):
    matrix = random(kind, size, 7)
    ring = ring_order(matrix)
    for seed in range(3):
        names = np.random.default_rng(seed).permutation(size)
        again = ring_order(matrix[names][:, names])
        assert (again.bandwidth, again.bound) == (ring.bandwidth, ring.bound)
        if size <= host_order.EXACT:
            assert worth(matrix, names[list(again.order)].tolist()) == worth(matrix, ring.order)


def test_the_same_matrix_gives_the_same_ring():
    matrix = random("lognormal", SIZE, 3)
    assert ring_order(matrix) == ring_order(matrix.tolist()) == ring_order(matrix.copy())


def test_units_do_not_matter():
    matrix = random("uniform", 12, 1)
    assert ring_order(matrix * 1e300).order == ring_order(matrix).order == ring_order(matrix * 1e-300).order


def test_the_sum_counts_among_equally_fast_rings():
    # All links have 1 but a ring of 5s over all hosts, of which 20 -> 0 has 1 again: the others of it should be taken.
    matrix = np.ones((20, 20))
    ring = np.random.default_rng(1).permutation(20)
    matrix[ring, np.roll(ring, -1)] = 5
    matrix[ring[-1], ring[0]] = 1
    matrix[:, ring[0]] = 1
    assert sum(hops(matrix, ring_order(matrix).order)) == 19 * 5 + 1


def test_the_diagonal_is_ignored():
    matrix = random("uniform", 6, 2)
    expected = ring_order(matrix)
    np.fill_diagonal(matrix, np.nan)
    assert ring_order(matrix) == expected


def test_one_host():
    assert ring_order([[0.0]]) == HostRing((0,), np.inf, np.inf, "one host sends nothing to others")


@pytest.mark.parametrize(
    "matrix, message",
    [
        ([], "is empty"),
        ([[0, 1], [1]], "row 1 has 1 entries; there are 2 rows"),
        ([[0, 1, 2], [1, 0, 2]], "row 0 has 3 entries; there are 2 rows"),
        ([1.0, 2.0], "row 0 has 1 entries"),
        ([[0, 1], [-2, 0]], r"row 1, column 0 \(from host 1 to host 0\) is -2 GB/s"),
        ([[0, float("nan")], [2, 0]], r"row 0, column 1 \(from host 0 to host 1\) is nan GB/s"),
        ([[0, 1, 1], [1, 0, float("inf")], [1, 1, 0]], r"row 1, column 2 .* is inf GB/s"),
        ([[0, "fast"], [1, 0]], r"row 0, column 1 .* is 'fast'; it must be a number"),
        ([[0, None], [1, 0]], r"row 0, column 1 .* is None; it must be a number"),
        ([[0, 0], [1, 0]], r"host 0 \(row\) reaches host 1 \(column\) over no links"),
        ([[0, 1, 1], [0, 0, 1], [0, 1, 0]], r"host 1 \(row\) reaches host 0 \(column\) over no links"),
        ([[0, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]], r"host \d \(row\) is left without a next host"),
        ([[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]], r"no ring .* host 0 \(row\) to host 3 \(column\)"),
    ],
)
def test_matrices_without_a_ring(matrix, message):
    with pytest.raises(TopologyError, match=message):
        ring_order(matrix)
