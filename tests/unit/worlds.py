"""For searches of all worlds that can be reached."""

from __future__ import annotations

from array import array

import torch


def never_settles(settled: bytearray, before: array[int], after: array[int]) -> int:
    """How many worlds cannot come to one that is settled. `before` and `after`: the steps from one to another."""
    reached = torch.frombuffer(settled, dtype=torch.bool)
    begins, ends = (torch.frombuffer(each, dtype=torch.int64) for each in (before, after))
    while True:
        count = int(reached.sum())
        reached[begins[reached[ends]]] = True
        if int(reached.sum()) == count:
            return len(reached) - count
