"""Where views are decided. A directory is what can append to a value under a key, and compare and set it, in one order
for all who ask.

Every store of torch can, and so can the `ledger` of a host. A directory that cannot be reached raises an error; whether
the request was carried out is not known then, and it can be made again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

Answer = TypeVar("Answer")

UNANSWERED = 10.0
"""Seconds that a request to a store of torch may take."""
NOTHING = "ringreduce: nothing is here"
"""What a store says to a compare-and-set that expects this, where it has no value."""
PARTS = 10
"""In which these are waited for. Time for which the machine or this process was suspended takes no more than one."""


class Directory(Protocol):
    """What `rounds` needs. Thread-safe."""

    def get(self, key: str) -> str:
        """The value under a key; '': there is none."""

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Makes `desired` the value if it is `expected` ('': there is none); returns the value that is there then."""

    def append(self, key: str, text: str) -> str:
        """Puts `text` after what is there; returns all that is there then, which may have grown further."""


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


def value_of(store: Any, key: str) -> bytes | None:
    """What a store of torch has under a key; None: nothing. One round trip, where `check` and `get` take three."""
    found = bytes(store.compare_set(key, NOTHING, NOTHING))  # which sets nothing: nothing has this value
    return None if found == NOTHING.encode() else found


def appended(store: Any, key: str, text: str) -> bytes:
    """Puts `text` after what a store of torch has under a key; returns all that is there then. One round trip, as a
    `TCPStore` does not wait until it is done."""
    if store.has_extended_api():
        store.append(key, text)
        return value_of(store, key) or b""
    return append_by(lambda expected, desired: bytes(store.compare_set(key, expected, desired)).decode(), text).encode()


def append_by(compare_set: Callable[[str, str], str], text: str) -> str:
    """The same with what can only compare and set."""
    before = ""
    while (found := compare_set(before, before + text)) != before + text:
        before = found
    return found


class OfStore:
    """The directory in a store of torch, under a prefix: it lives as long as the store's host."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def get(self, key: str) -> str:
        return (value_of(self._store, f"{self._prefix}/{key}") or b"").decode()

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        return bytes(self._store.compare_set(f"{self._prefix}/{key}", expected, desired)).decode()

    def append(self, key: str, text: str) -> str:
        return appended(self._store, f"{self._prefix}/{key}", text).decode()


class Under:
    """What another directory has under a prefix."""

    def __init__(self, directory: Directory, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix

    def get(self, key: str) -> str:
        return self._directory.get(self._prefix + key)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        return self._directory.compare_set(self._prefix + key, expected, desired)

    def append(self, key: str, text: str) -> str:
        return self._directory.append(self._prefix + key, text)


class Bounded:
    """A store of torch whose requests all end. A `TCPStore` waits for an answer as long as its connection lives, which
    is many minutes where packets are lost. Is a `Values`; thread-safe.

    Raises `ConnectionError` if there is no answer in time. The request may be carried out later; until it has been
    answered, others fail at once.
    """

    def __init__(self, store: Any, seconds: float = UNANSWERED) -> None:
        self._store, self._seconds = store, seconds
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._under_way: list[float] = []
        """When the request under way began, if there is one."""
        given = self._requests, self._under_way  # and not this object, with which the thread ends
        threading.Thread(target=_carry_out, args=given, daemon=True, name="ringreduce store").start()

    def __del__(self) -> None:
        self._requests.put(None)

    def get(self, key: str) -> str:
        return (self.value(key) or b"").decode()

    def value(self, key: str) -> bytes | None:
        return self._ask(lambda: value_of(self._store, key))

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def add(self, key: str, value: int, /) -> int:
        return self._ask(lambda: int(self._store.add(key, value)))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(lambda: bool(self._store.check(list(keys))))

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        return self._ask(lambda: bytes(self._store.compare_set(key, expected, desired)).decode())

    def append(self, key: str, text: str) -> str:
        return self._ask(lambda: appended(self._store, key, text).decode())

    def names(self) -> list[str]:
        raise NotImplementedError("a store of torch does not list its keys")

    def _ask(self, request: Callable[[], Answer]) -> Answer:
        answers: queue.SimpleQueue[Answer | Exception] = queue.SimpleQueue()

        def carry_out() -> None:
            try:
                answers.put(request())
            except Exception as error:
                answers.put(error)

        since = next(iter(self._under_way), None)
        if since is None or time.monotonic() < since + self._seconds:
            self._requests.put(carry_out)
            for _ in range(PARTS):
                try:
                    answer = answers.get(timeout=self._seconds / PARTS)
                except queue.Empty:
                    continue
                if isinstance(answer, Exception):
                    try:
                        raise answer
                    finally:
                        del answer  # whose traceback leads here: a cycle, which keeps what all callers hold
                return answer
        raise ConnectionError(f"the store has not answered for {self._seconds:.0f} s")


def _carry_out(requests: queue.SimpleQueue[Callable[[], None] | None], under_way: list[float]) -> None:
    """One after the other, until None comes."""
    while request := requests.get():
        under_way.append(time.monotonic())
        request()
        under_way.clear()
        del request  # which keeps alive who has asked
