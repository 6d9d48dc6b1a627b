"""What a directory of views must do, and directories made of torch's stores.

A directory holds values under keys. It can append to a value, and compare and set it. It carries out the requests of
all processes in one order. Every store of torch can do this; `ledger` and `etcd` are directories, too.

A directory that cannot be reached raises an error. Then it is not known whether the request was carried out, and the
caller may repeat it.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from ringreduce.common import system
from ringreduce.common.failures import CollectiveTimeout, InvalidArgument
from ringreduce.coordination.wait import Pauses, wait_for

Answer = TypeVar("Answer")

PAUSES = Pauses(1 / 8, 0.0002, 0.05)
"""Between two looks for a key."""
UNANSWERED = 10.0
"""Seconds that a request to a store of torch may take in `Bounded`."""
NOTHING = "ringreduce: nothing is here"
"""No value equals it. `value_of` compares with it, since a store without a value answers with the expected text."""
PARTS = 10
"""The time is waited for in so many parts. If this process is suspended meanwhile, that uses up one part at most."""


METHODS = ("set", "get", "add", "check")
"""Of `Store`."""


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...


class Directory(Protocol):
    """The requests that `rounds` makes. Implementations are thread-safe."""

    def get(self, key: str) -> str:
        """The value under a key; '': there is none."""

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Makes `desired` the value if it is `expected` ('': there is none); returns the value that is there then."""

    def append(self, key: str, text: str) -> str:
        """Puts `text` after what is there; returns all that is there then, which may have grown further."""


class Values(Directory, Protocol):
    """A directory with the further requests of which `torch_store` makes a store of torch."""

    def get(self, key: str) -> str:
        return (self.value(key) or b"").decode()

    def append(self, key: str, text: str) -> str:
        """If a server fails meanwhile, `text` may be appended twice."""
        return append_by(lambda expected, desired: self.compare_set(key, expected, desired), text)

    def value(self, key: str) -> bytes | None:
        """The value under a key; None: there is none."""

    def set(self, key: str, value: str | bytes) -> None: ...

    def add(self, key: str, value: int, /) -> int:
        """Adds `value` to the number under a key and returns the sum. A number that is not there counts as 0."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys have values."""


def value_of(store: Any, key: str) -> bytes | None:
    """The value under a key in a store; None: none. One round trip, where `check` and `get` take three."""
    if hasattr(store, "value"):
        return cast("bytes | None", store.value(key))
    if lacks(store, "compare_set"):
        return cast(Store, store).get(key) if store.check([key]) else None
    found = bytes(store.compare_set(key, NOTHING, NOTHING))  # changes nothing, since no value is NOTHING
    return None if found == NOTHING.encode() else found


def without_prefixes(store: Any) -> Any:
    """What is below torch's `PrefixStore`s."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def lacks(store: Any, method: str) -> bool:
    """Whether a store has no such method. One written in Python inherits those of torch's `Store`, which only raise."""
    store = without_prefixes(store)
    kinds = type(store).__mro__
    found = next((kind for kind in kinds if method in vars(kind)), None)
    if found is None or found.__name__ != "Store":
        return not hasattr(store, method)
    return not any(kind.__module__.startswith("torch.") for kind in kinds[: kinds.index(found)])


def require(store: Any, methods: Sequence[str]) -> None:
    """Raises `InvalidArgument` if a store has not all of these methods."""
    if missing := [f"{method}()" for method in methods if lacks(store, method)]:
        name = type(without_prefixes(store)).__name__
        raise InvalidArgument(f"the store, a {name}, has no {', '.join(missing)}; it needs {', '.join(methods)}")


def once(store: Any, key: str, value: str) -> str:
    """Sets a key of a store of torch unless it is set; returns its value."""
    return str(store.compare_set(key, "", value).decode())


def appended(store: Any, key: str, text: str) -> bytes:
    """Appends `text` to the value under a key in a store of torch, and returns the value after that.

    Takes one round trip, because `append` of a `TCPStore` does not wait for an answer.
    """
    if store.has_extended_api():
        store.append(key, text)
        return value_of(store, key) or b""
    return append_by(lambda expected, desired: bytes(store.compare_set(key, expected, desired)).decode(), text).encode()


def append_by(compare_set: Callable[[str, str], str], text: str) -> str:
    """Appends `text` to a value by `compare_set(expected, desired)` alone, and returns the value after that."""
    before = ""
    while (found := compare_set(before, before + text)) != before + text:
        before = found
    return found


def get(store: Store, key: str, whom: str, deadline: float, look: Callable[[], None] = lambda: None) -> str:
    """What the store has under `key`; waits for it, for `whom`, until `deadline`, then raises `CollectiveTimeout`.
    Calls `look` now and then, which may raise."""

    def there() -> bool:
        if not (found := store.check([key])):
            look()
        return found

    if not wait_for(there, PAUSES, deadline):
        raise CollectiveTimeout(f"making the group: {whom} did not come in time")
    return str(store.get(key).decode())


class Under:
    """The part of another directory whose keys begin with `prefix`."""

    def __init__(self, directory: Directory, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix

    def get(self, key: str) -> str:
        return self._directory.get(self._prefix + key)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        return self._directory.compare_set(self._prefix + key, expected, desired)

    def append(self, key: str, text: str) -> str:
        return self._directory.append(self._prefix + key, text)


class Bounded(Values):
    """A store of torch whose requests all end, as a `Values`. Thread-safe.

    A `TCPStore` alone waits for an answer as long as its connection lives, which is many minutes if packets are lost.
    Here a request raises `ConnectionError` if it is not answered within `seconds`. It may still be carried out later.
    Until it is answered, further requests fail at once.
    """

    def __init__(self, store: Any, seconds: float = UNANSWERED) -> None:
        # Before what may raise, since __del__ needs it.
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        require(store, ("compare_set", *METHODS))
        self._store, self._seconds = store, seconds
        self._under_way: list[float] = []
        """The time at which the request under way began; empty if there is none."""
        given = self._requests, self._under_way  # not this object: the thread must not keep it alive, since it ends it
        thread = threading.Thread(target=_carry_out, args=given, daemon=True, name="ringreduce store")
        system.start(thread)
        _threads[thread] = self._requests

    def __del__(self) -> None:
        self._requests.put(None)

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
                        del answer  # its traceback holds this frame: a cycle, which would keep all that callers hold
                return answer
        raise ConnectionError(f"the store has not answered for {self._seconds:.0f} s")


_threads: weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Callable[[], None] | None]] = (
    weakref.WeakKeyDictionary()
)
"""Those that carry out requests."""


@atexit.register
def _end_threads() -> None:
    """Waits for requests under way: a thread that is in a store's C++ code when Python ends makes the process abort."""
    deadline, threads = time.monotonic() + UNANSWERED, list(_threads.items())
    for _, requests in threads:
        requests.put(None)
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _carry_out(requests: queue.SimpleQueue[Callable[[], None] | None], under_way: list[float]) -> None:
    """The thread of a `Bounded`: carries out one request after the other, until it gets None."""
    while request := requests.get():
        under_way.append(time.monotonic())
        request()
        under_way.clear()
        del request  # it holds the caller's objects, and the next one may not come for long
