"""A store of torch over any `store.Values`, such as a ledger or etcd."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from ringreduce.common.failures import CollectiveTimeout
from ringreduce.coordination.store import Directory, Under, Values
from ringreduce.coordination.wait import Pauses, wait_for

PAUSES = Pauses(1 / 4, 0.0002, 0.02)
"""Between two looks for keys."""


class KeyStore(Store):
    """A store of torch whose values are kept elsewhere, such as in a ledger or in etcd. Thread-safe."""

    def __init__(self, values: Values, prefix: str) -> None:
        """`prefix`: what all keys of this store begin with in `values`."""
        super().__init__()
        self._values, self._prefix, self._seconds = values, prefix, 300.0

    def clone(self) -> KeyStore:  # torch asks for a copy that several threads can use, as they can this one
        return self

    def directory(self, name: str) -> Directory:
        """A directory in the same store, with keys of its own."""
        return Under(self._values, f"{self._prefix}{name}/")

    def set(self, key: str, value: str | bytes) -> None:
        self._values.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Waits for the key. Raises `CollectiveTimeout` if it does not come within the store's timeout."""
        while (value := self.value(key)) is None:
            self.wait([key])
        return value

    def value(self, key: str) -> bytes | None:
        """The value that is there now; None: none. Does not wait."""
        return self._values.value(self._prefix + key)

    def add(self, key: str, value: int) -> int:
        return self._values.add(self._prefix + key, value)

    def check(self, keys: list[str]) -> bool:
        return self._values.check([self._prefix + key for key in keys])

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = (
            each.decode() if isinstance(each, bytes) else each for each in (expected_value, desired_value)
        )
        found = self._values.compare_set(self._prefix + key, expected, desired)
        if found or not expected:
            return found.encode()
        now = self.value(key)  # another process may have set it; if not, torch's stores return the expected value
        return expected.encode() if now is None else now

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        """Deletes nothing and returns False: a ledger cannot, and nobody needs it."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        seconds = timeout.total_seconds() if timeout is not None else self._seconds
        if not wait_for(lambda: self.check(keys), PAUSES, time.monotonic() + seconds):
            raise CollectiveTimeout(f"the store: not all of {keys} came within {seconds:.1f} s")
