"""Permutations of range(n) whose single values can be computed, however large n is. They need no memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8

Ids = NDArray[np.int64]
_Words = NDArray[np.uint64]


def mixed(*numbers: int) -> int:
    """A hash of 64 bits of integers (the finalizer of SplitMix64, once for each)."""
    value = 0
    for number in numbers:
        value = (value ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value


class Permutation:
    """A permutation of range(n), drawn by `key`. The same on every machine and with every version of NumPy.

    A Feistel network permutes the numbers of as many bits as n - 1 has. It is applied again to a value that is not
    below n, which happens at most once on average ("cycle walking"; Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002).
    """

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._low = np.uint64(bits // 2)
        self._masks = np.uint64((1 << bits - bits // 2) - 1), np.uint64((1 << bits // 2) - 1)  # of the high, the low
        self._keys = [np.uint64(mixed(*key, number)) for number in range(ROUNDS)]

    def at(self, positions: Ids) -> Ids:
        """The values at these positions."""
        return self._walk(positions, self._keys)

    def positions_of(self, values: Ids) -> Ids:
        """Where these values are."""
        return self._walk(values, self._keys[::-1])

    def _walk(self, numbers: Ids, keys: list[np.uint64]) -> Ids:
        words = self._network(numbers.astype(np.uint64), keys)
        while len(outside := np.flatnonzero(words >= self.n)):
            words[outside] = self._network(words[outside], keys)
        return words.astype(np.int64)

    def _network(self, words: _Words, keys: list[np.uint64]) -> _Words:
        halves = [words >> self._low, words & self._masks[1]]
        # Each round changes one half by the other. Done in the opposite order, the rounds undo each other.
        first = 0 if keys is self._keys else 1
        for number, key in enumerate(keys):
            changed = (number + first) % 2
            halves[changed] ^= _hash(halves[1 - changed] ^ key) & self._masks[changed]
        return halves[0] << self._low | halves[1]


def _hash(words: _Words) -> _Words:
    """Two rounds of multiply and xor-shift: the bits of each word, mixed."""
    words = (words ^ words >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    words = (words ^ words >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return words ^ words >> np.uint64(32)
