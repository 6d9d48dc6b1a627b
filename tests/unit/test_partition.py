"""How tensors are cut (csrc/core/partition.h): parts cover the whole, in order, without overlap, on unit boundaries."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ringreduce import _C

counts = st.integers(0, 10_000)
units = st.sampled_from([1, 4, 16, 64])


@given(begin=st.integers(0, 1000), count=counts, parts=st.integers(1, 40), unit=units)
def test_split_covers_the_whole_evenly(begin: int, count: int, parts: int, unit: int) -> None:
    ranges = [_C.split(begin, begin + count, parts, index, unit) for index in range(parts)]
    assert ranges[0][0] == begin and ranges[-1][1] == begin + count
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    sizes = [end - start for start, end in ranges]
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) <= 2 * unit - 1  # one unit, and what the last one lacks
    assert all((start - begin) % unit == 0 or start == begin + count for start, _ in ranges)


@given(count=counts, shares=st.lists(st.integers(1, 9), min_size=1, max_size=6), unit=units)
def test_stripes_cover_the_tensor_by_share(count: int, shares: list[int], unit: int) -> None:
    total = sum(shares)
    edges = [sum(shares[:i]) for i in range(len(shares) + 1)]
    stripes = [_C.stripe(count, a, b, total, unit) for a, b in pairwise(edges)]
    assert stripes[0][0] == 0 and stripes[-1][1] == count
    assert all(before[1] == after[0] for before, after in pairwise(stripes))
    for share, (begin, end) in zip(shares, stripes, strict=True):
        assert abs((end - begin) - count * share / total) <= 2 * unit
