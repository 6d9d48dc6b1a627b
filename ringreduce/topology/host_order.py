"""The order of hosts in a ring, from measured bandwidths.

Over the internet, and between racks, every pair of hosts has a bandwidth of its own, and another one back.  A ring is
as fast as its slowest hop, so the best order is that of a bottleneck travelling salesman: no other ring's slowest hop
is faster.  Among such rings the one whose hops are fastest in sum is taken.

How it is found.  For a threshold, look only at links that are at least so fast.  If they do not lead from every host
to every other, or cannot give each host a next one that is nobody else's, no ring goes over them alone: the largest
threshold that passes both tests bounds every ring.  Below it, rings are searched for: first an assignment of a next
host to each, which is one or several cycles; cycles are joined by swapping the next hosts of two; where that ends with
more than one, an integer programme is asked for another assignment, in which every cycle seen so far has a link out of
it (Dantzig, Fulkerson and Johnson, 1954).  It answers with one, or with the proof that no ring exists.  The search
goes by halves between the two.  Then segments of the ring change places while that makes the sum larger; up to `EXACT`
hosts the best sum is found by dynamic programming (Held and Karp, 1962).

Nothing depends on a clock, on chance or on hashes: every rank that is given the same matrix finds the same ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringreduce.common.failures import TopologyError

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]
Next = NDArray[np.intp]
"""The next host of each."""

EXACT = 11
"""Hosts up to which the sum is the largest there is.  Takes memory and time in proportion to 2^hosts hosts^2."""

ROUNDS = 200
"""Integer programmes for one threshold before it is left undecided, so that every search ends."""

NODES = 2000
"""Likewise, nodes in the tree of one programme."""

MOVES = 1 << 31
"""Moves that are looked at for the sum: 128 passes for 256 hosts, each of size^3 moves."""


@dataclass(frozen=True)
class HostRing:
    """A ring of hosts: `order[k]` sends to `order[k + 1]`, the last to the first, host 0 first.

    `bandwidth` is the GB/s of its slowest hop, `bound` what no ring's slowest hop exceeds (both infinite for one host),
    `reason` says in words which hop that is and why no ring is faster.
    """

    order: tuple[int, ...]
    bandwidth: float
    bound: float
    reason: str


def ring_order(bandwidth: Sequence[Sequence[float]] | Matrix) -> HostRing:
    """The bandwidth-optimal ring of hosts.

    `bandwidth[i][j]` is what host i sends to host j in GB/s, 0 where they cannot connect; the diagonal is ignored.
    Raises TopologyError, with row and column, for anything else, and where no ring reaches all hosts.
    """
    matrix = _checked(bandwidth)
    size = len(matrix)
    if size == 1:
        return HostRing((0,), np.inf, np.inf, "one host sends nothing to others")
    speeds = np.unique(matrix[matrix > 0])

    def faster(speed: float) -> Mask:
        return matrix >= speed

    connected = _last(speeds, lambda speed: _strongly_connected(faster(speed)))
    covered = _last(speeds, lambda speed: _unmatched(faster(speed)) is None)
    if connected < 0 or covered < 0:
        raise TopologyError(_why_none(matrix))
    limit, why = min(
        (connected, "faster links alone do not lead from every host to every other"),
        (covered, "faster links alone cannot give each host a next one of its own"),
    )
    gains = matrix / speeds[-1]
    # speeds[below] has a ring, speeds[above] has none, or none was found.
    below, above, stride = -1, limit + 1, 1
    following: Next | None = None
    while above - below > 1:
        at = (above + below) // 2 if following is not None else max(0, above - stride)
        stride *= 2
        found, decided = _ring_through(gains, faster(speeds[at]))
        if found is not None:
            below, following = at, found
            continue
        above = at
        if decided:
            limit, why = at - 1, "no ring goes over faster links alone, as a search of all of them showed"
    if following is None:
        raise TopologyError(_why_none(matrix))
    order = _with_best_sum(gains, faster(speeds[below]), _order(following))
    hops = [(matrix[one, other], one, other) for one, other in zip(order, (*order[1:], order[0]), strict=True)]
    slowest, one, other = min(hops)
    bound = float(speeds[limit])
    compared = "no ring's is faster" if slowest == bound else f"no ring's exceeds {bound:.4g} GB/s"
    reason = f"the slowest hop, from host {one} to host {other}, has {slowest:.4g} GB/s; {compared}: {why}"
    return HostRing(order, float(slowest), bound, reason)


def _checked(bandwidth: Any) -> Matrix:
    """The matrix with zeros on its diagonal."""
    size = len(bandwidth)
    if size == 0:
        raise TopologyError("the bandwidth matrix is empty; give a row and a column for each host")
    matrix = np.zeros((size, size))
    for row, entries in enumerate(bandwidth):
        count = len(entries) if hasattr(entries, "__len__") else 1
        if count != size:
            raise TopologyError(f"bandwidth row {row} has {count} entries; there are {size} rows, so {size} are needed")
        for column, entry in enumerate(entries):
            if row == column:
                continue
            where = f"bandwidth row {row}, column {column} (from host {row} to host {column})"
            try:
                matrix[row, column] = float(entry)
            except (TypeError, ValueError):
                raise TopologyError(f"{where} is {entry!r:.40}; it must be a number of GB/s") from None
            if not 0 <= matrix[row, column] < np.inf:
                raise TopologyError(f"{where} is {entry} GB/s; it must be finite, and 0 or more")
    return matrix


def _last(speeds: Matrix, passes: Callable[[float], bool]) -> int:
    """The last of the ascending speeds that passes a test which all before it pass too; -1 if none does."""
    below, above = -1, len(speeds)
    while above - below > 1:
        at = (below + above) // 2
        below, above = (at, above) if passes(speeds[at]) else (below, at)
    return below


def _strongly_connected(links: Mask) -> bool:
    from scipy.sparse.csgraph import connected_components

    return bool(connected_components(links, connection="strong")[0] == 1)


def _unmatched(links: Mask) -> int | None:
    """A host that is left without a next host if no two have the same; None if there is none."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    left = np.flatnonzero(maximum_bipartite_matching(csr_array(links), perm_type="column") < 0)
    return int(left[0]) if len(left) else None


def _why_none(matrix: Matrix) -> str:
    """Why the links that are there, whatever their speed, have no ring."""
    from scipy.sparse.csgraph import breadth_first_order

    links = matrix > 0
    for host in range(len(matrix)):
        reached = breadth_first_order(links, host, return_predecessors=False)
        for other in sorted({*range(len(matrix))} - {*reached.tolist()}):
            return (
                f"no ring reaches all hosts: host {host} (row) reaches host {other} (column) over no links above "
                "0 GB/s; measure them again, or open a port between them"
            )
    if (alone := _unmatched(links)) is not None:
        return (
            f"no ring reaches all hosts: too few have links, and host {alone} (row) is left without a next host "
            "(column) that is no other's; links of 0 GB/s are none"
        )
    row, column = np.argwhere(~links & ~np.eye(len(matrix), dtype=bool))[0]
    return (
        "no ring reaches all hosts over the links above 0 GB/s; at 0, and so none, is among others that from host "
        f"{row} (row) to host {column} (column)"
    )


def _ring_through(gains: Matrix, links: Mask) -> tuple[Next | None, bool]:
    """A ring over these links, if there is one; and whether that is decided.  `gains` are at most 1."""
    from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
    from scipy.sparse import csr_array, vstack

    size = len(gains)
    # A link that is not there costs more than any assignment gains.
    following = linear_sum_assignment(np.where(links, gains, -size), maximize=True)[1]
    if not links[np.arange(size), following].all():
        return None, True
    source, target = np.nonzero(links)
    count = len(source)
    one_each = csr_array(
        (np.ones(2 * count), (np.r_[source, size + target], np.r_[np.arange(count), np.arange(count)])),
        shape=(2 * size, count),
    )
    ways_out: list[Any] = []
    for _ in range(ROUNDS):
        ways_out += [_leaving(cycle, source, target) for cycle in _cycles(following)]
        following = _joined(gains, links, following)
        cycles = _cycles(following)
        if len(cycles) == 1:
            return following, True
        ways_out += [_leaving(cycle, source, target) for cycle in cycles]
        found = milp(
            np.zeros(count),
            constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(vstack(ways_out), 1, np.inf)],
            integrality=np.ones(count),
            bounds=Bounds(0, 1),
            options={"node_limit": NODES},
        )
        if found.x is None:
            return None, found.status == 2  # infeasible
        chosen = found.x > 0.5
        following = np.empty(size, dtype=np.intp)
        following[source[chosen]] = target[chosen]
    return None, False


def _leaving(cycle: Sequence[int], source: Next, target: Next) -> Any:
    """As a row over the links, those that leave a cycle."""
    from scipy.sparse import csr_array

    return csr_array((np.isin(source, cycle) & ~np.isin(target, cycle))[None].astype(float))


def _cycles(following: Next) -> list[list[int]]:
    left = [True] * len(following)
    cycles = []
    for start in range(len(following)):
        cycle = []
        host = start
        while left[host]:
            left[host] = False
            cycle.append(host)
            host = int(following[host])
        if cycle:
            cycles.append(cycle)
    return cycles


def _order(following: Next) -> tuple[int, ...]:
    return tuple(_cycles(following)[0])


def _joined(gains: Matrix, links: Mask, following: Next) -> Next:
    """With cycles joined, the best two first, as long as two hosts of different cycles may swap their next ones."""
    size = len(gains)
    following = following.copy()
    while len(cycles := _cycles(following)) > 1:
        cycle_of = np.empty(size, dtype=np.intp)
        for number, cycle in enumerate(cycles):
            cycle_of[cycle] = number
        allowed, gain = links[:, following], gains[:, following]
        allowed = allowed & allowed.T & (cycle_of[:, None] != cycle_of)
        if not allowed.any():
            break
        gain = np.where(allowed, gain + gain.T - gain.diagonal() - gain.diagonal()[:, None], -np.inf)
        one, other = np.unravel_index(gain.argmax(), gain.shape)
        following[[one, other]] = following[[other, one]]
    return following


def _with_best_sum(gains: Matrix, links: Mask, order: tuple[int, ...]) -> tuple[int, ...]:
    """A ring over these links with a larger sum of bandwidths; up to EXACT hosts, the largest."""
    gains = np.where(links, gains, -np.inf)
    return _held_karp(gains) if len(order) <= EXACT else _improved(gains, order)


def _held_karp(gains: Matrix) -> tuple[int, ...]:
    """The ring with the largest sum."""
    others = len(gains) - 1
    # best[hosts, last]: of the paths from host 0 through the hosts whose bits are set, to the last of them.
    best = np.full((1 << others, others), -np.inf)
    before = np.zeros((1 << others, others), dtype=np.intp)
    for hosts in range(1, 1 << others):
        for last in range(others):
            rest = hosts & ~(1 << last)
            if rest == hosts:
                continue
            if rest == 0:
                best[hosts, last] = gains[0, last + 1]
                continue
            sums = best[rest] + gains[1:, last + 1]
            before[hosts, last] = sums.argmax()
            best[hosts, last] = sums.max()
    hosts = (1 << others) - 1
    last = int((best[hosts] + gains[1:, 0]).argmax())
    order = []
    while hosts:
        order.append(last + 1)
        hosts, last = hosts & ~(1 << last), int(before[hosts, last])
    return (0, *reversed(order))


def _improved(gains: Matrix, order: tuple[int, ...]) -> tuple[int, ...]:
    """The ring after two neighbouring segments of it have changed places, again and again, while the sum grows.

    That is the move of three links that turns no segment round, which links of different speed each way would forbid.
    """
    size = len(order)
    ring = np.array(order)
    moves = MOVES
    improving = True
    while improving and moves > 0:
        improving = False
        for _ in range(size):  # the ring's first link takes part in every move; then the ring is turned by one
            ring = np.roll(ring, -1)
            # joins[a, b]: from the host at a to the one after b.  The segments are 1..a and a+1..b.
            joins = gains[ring[:, None], np.roll(ring, -1)]
            kept = joins.diagonal()
            moves -= size * size
            gain = joins[0][:, None] + joins + joins[:, 0] - kept[:, None] - kept - kept[0]
            gain = np.where(np.tri(size, k=-1, dtype=bool).T, gain, -np.inf)
            gain[0] = -np.inf
            first, last = np.unravel_index(gain.argmax(), gain.shape)
            if gain[first, last] > 1e-9 * kept.sum():
                ring = np.concatenate([ring[:1], ring[first + 1 : last + 1], ring[1 : first + 1], ring[last + 1 :]])
                improving = True
    start = int(np.flatnonzero(ring == 0)[0])
    return tuple(np.roll(ring, -start).tolist())
