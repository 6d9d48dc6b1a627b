"""The order in which the examples of a data set are used: which ids each rank reads in each step."""

from __future__ import annotations

import operator
from collections import OrderedDict
from typing import Any

import numpy as np

from ringreduce.common.failures import InvalidArgument
from ringreduce.data.permutation import Ids, Permutation

BLOCK = 4096
"""Positions whose ids are computed at once: 64 take nearly as long."""
BLOCKS_KEPT = 4


class Order:
    """A random order of the ids 0 to n - 1, which is drawn anew for each epoch.

    All epochs follow each other without a gap, and step k uses the `batch` positions from k * batch on. So every batch
    has the same size, each id is used once in each epoch, and the number of the step is the whole state. The last batch
    of an epoch is completed by the first ids of the next one.

    Ids are computed when they are asked for, so n may be large. The order depends on n and `seed` only. It is the same
    on all machines, and does not depend on how many ranks read it.

    n: how many examples there are; batch: ids of a step, of all ranks together; seed: any integer from 0 to 2**63 - 1.
    shuffle: False for the ids in ascending order, in every epoch. Raises `InvalidArgument`.
    """

    def __init__(self, n: int, batch: int, seed: int = 0, shuffle: bool = True) -> None:
        for name, value, least in (("n", n, 1), ("batch", batch, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value < 2**63:
                raise InvalidArgument(f"Order: {name} is {value!r}; give an integer from {least} to 2**63 - 1")
        self.n, self.batch, self.seed, self.shuffle = int(n), int(batch), int(seed), bool(shuffle)
        self._blocks: OrderedDict[int, Ids] = OrderedDict()

    def ids(self, step: int, rank: int = 0, size: int = 1) -> Ids:
        """The ids that rank `rank` of `size` reads in this step, as int64, in an array of its own.

        The ids of ranks 0, 1, ... one after the other are the step's batch. The first ranks have one id more than the
        last ones if `batch` is not a multiple of `size`. Raises `InvalidArgument`.
        """
        return self.ids_at(*self.span(step, rank, size)).copy()

    def epoch(self, step: int) -> int:
        """The epoch of the step's first id."""
        return step * self.batch // self.n

    def steps(self, epochs: int = 1) -> int:
        """After how many steps each id has been used in each of the first `epochs` epochs."""
        return -(-epochs * self.n // self.batch)

    def span(self, step: int, rank: int, size: int) -> tuple[int, int]:
        """The positions, counted from the beginning of epoch 0, of the ids that a rank reads: first, and last + 1.

        Raises `InvalidArgument`.
        """
        step, rank, size = (integer("Order", *each) for each in (("step", step), ("rank", rank), ("size", size)))
        if not 0 <= rank < size:
            raise InvalidArgument(f"Order: rank is {rank} and size is {size}; rank must be from 0 to size - 1")
        if size > self.batch:
            raise InvalidArgument(f"Order: {size} ranks share a batch of {self.batch}; some would have nothing to read")
        if not 0 <= step < 2**62 // self.batch:
            raise InvalidArgument(f"Order: step is {step}; give an integer from 0 on")
        each, more = divmod(self.batch, size)
        first = step * self.batch + rank * each + min(rank, more)
        return first, first + each + (rank < more)

    def ids_at(self, begin: int, end: int) -> Ids:
        """The ids at the positions `begin` to `end` - 1, counted from the beginning of epoch 0. Not to be changed."""
        blocks = [self._block(number) for number in range(begin // BLOCK, (end - 1) // BLOCK + 1)]
        ids = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        skipped = begin // BLOCK * BLOCK
        return ids[begin - skipped : end - skipped]

    def _block(self, number: int) -> Ids:
        ids = self._blocks.get(number)
        if ids is None:
            epochs, places = np.divmod(np.arange(number * BLOCK, (number + 1) * BLOCK), self.n)
            ids = places
            if self.shuffle:
                cuts = np.flatnonzero(np.diff(epochs)) + 1
                parts = zip(np.split(epochs, cuts), np.split(places, cuts), strict=True)
                ids = np.concatenate([self.permutation(int(epoch[0])).at(place) for epoch, place in parts])
            ids.flags.writeable = False  # `ids_at` gives views
            self._blocks[number] = ids
            if len(self._blocks) > BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return ids

    def permutation(self, epoch: int) -> Permutation:
        """The order of an epoch's ids, if they are shuffled."""
        return Permutation(self.n, self.seed, epoch)

    def state(self) -> dict[str, int]:
        """What the order depends on, to be compared with that of a checkpoint."""
        return {"n": self.n, "batch": self.batch, "seed": self.seed, "shuffle": int(self.shuffle)}

    def __repr__(self) -> str:
        return f"Order(n={self.n}, batch={self.batch}, seed={self.seed}{'' if self.shuffle else ', shuffle=False'})"


def integer(where: str, name: str, value: Any) -> int:
    """Accepts what can be an index, such as an integer of NumPy or a tensor of one."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise InvalidArgument(f"{where}: {name} is {value!r:.60}; give an integer")
