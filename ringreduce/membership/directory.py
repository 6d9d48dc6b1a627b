"""Where views are kept. A directory is what can compare and set a value under a key, in one order for all who ask.

Every store of torch can, and so can the `ledger` of a host. A directory that cannot be reached raises an error; whether
the request was carried out is not known then, and it can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Directory(Protocol):
    """What `rounds` needs. Thread-safe."""

    def get(self, key: str) -> str:
        """The value under a key; '': there is none."""

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Makes `desired` the value if it is `expected` ('': there is none); returns the value that is there then."""


class Values(Directory, Protocol):
    """More of the same, of which `survivors.KeyStore` makes a store of torch: what `ledger` and `etcd` have."""

    def value(self, key: str) -> bytes | None:
        """The value under a key; None: there is none."""

    def set(self, key: str, value: str | bytes) -> None: ...

    def add(self, key: str, value: int, /) -> int:
        """Adds to a number; returns the sum."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all have values."""

    def names(self) -> list[str]:
        """All that have a value."""


class OfStore:
    """The directory in a store of torch, under a prefix: it lives as long as the store's host."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def get(self, key: str) -> str:
        key = f"{self._prefix}/{key}"
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else ""

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        return bytes(self._store.compare_set(f"{self._prefix}/{key}", expected, desired)).decode()
