"""A directory in memory that the processes of one host share. A writer may die at any instruction; the others go on.

The memory begins with two words: the offset of the newest record, and the amount of memory that is taken. A record is
written once and never changes. It sets the value of a key, or appends to it, and names the record before it. A writer

1. takes free memory by adding to the second word,
2. writes its record there, with the newest record that it has seen as the one before,
3. makes its record the newest by a compare-and-set on the first word. If that fails, it reads the records that others
   have added, and continues with 2.

So step 3 puts all records into one order, and a record is complete before anyone can see it. A writer that dies before
step 3 wastes the memory that it took. A writer that is stopped before step 3 and continues later finds that the
compare-and-set fails.

Memory is never used again. A ledger belongs to one group, and has room for all that happens in its life (`BYTES`).
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringreduce.common import compiled
from ringreduce.common.descriptors import make_above_streams
from ringreduce.common.failures import SystemFailure
from ringreduce.coordination.store import Values

if TYPE_CHECKING:
    from ringreduce import _C

NEWEST, FREE = 0, 8
"""The offsets of the two words."""
FIRST = 64
"""The offset of the first record."""
_RECORD = struct.Struct("=QII")  # offset of the record before, bytes of the key, bytes of the value
APPENDS = 1 << 31
"""A flag in the third word: the value is appended to the one before."""

BYTES, BYTES_BY_RANK = 4 << 20, 64 << 10
"""The size of a ledger, and what is added to it for each rank. Pages that were never written take no memory."""


def ledger_bytes(ranks: int) -> int:
    """The size of the ledger of `ranks` ranks. For each rank, a round takes about 0.2 KB and making a group 1 KB."""
    return BYTES + BYTES_BY_RANK * ranks


class Ledger(Values):
    """A `store.Values` in shared memory, and a store of which a `KeyStore` is made. Thread-safe.

    Calls raise `SystemFailure` if the memory is full or damaged.
    """

    def __init__(self, memfd: int, begin: int, size: int) -> None:
        """Maps `size` bytes of `memfd` from offset `begin` on, which must be a multiple of the page size.

        The bytes must have been zero before the first process did this. The caller keeps the descriptor.
        """
        self._memory = make_above_streams(lambda: mmap.mmap(memfd, size, offset=begin))
        self._words: type[_C.SharedWord] = compiled.load().SharedWord
        self._newest = self._words(self._memory, NEWEST)
        self._free = self._words(self._memory, FREE)
        self._seen = 0
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        def put(now: bytes | None) -> bytes | None:
            return desired.encode() if (now or b"").decode() == expected else None

        return (self.change(key, put) or b"").decode()

    def value(self, key: str) -> bytes | None:
        with self._lock:
            self._read_on()
            return self._values.get(key)

    def append(self, key: str, text: str) -> str:
        return (self.change(key, lambda _: text.encode(), APPENDS) or b"").decode()

    def change(self, key: str, put: Callable[[bytes | None], bytes | None], appends: int = 0) -> bytes | None:
        """Replaces the value under a key by `put(value)`, and returns the value after that.

        If `put` returns None, nothing is changed. With `appends=APPENDS`, the result of `put` is appended to the value
        instead. `put` may be called several times, because others may change the value meanwhile.
        """
        with self._lock:
            taken, room = 0, 0
            while True:
                self._read_on()
                desired = put(self._values.get(key))
                if desired is None:
                    return self._values.get(key)
                needed = _RECORD.size + len(key.encode()) + len(desired)
                if needed > room:
                    room = -(-needed // 8) * 8
                    taken = self._take(room)
                self._write(taken, key, desired, appends)
                if self._newest.compare_set(self._seen, taken):
                    self._seen = taken
                    self._learn(key, desired, appends)
                    return self._values[key]

    def _take(self, size: int) -> int:
        begin: int = FIRST + self._free.add(size)
        if begin + size > len(self._memory):
            raise SystemFailure(
                f"the ledger of {len(self._memory)} bytes is full: too many changes of membership, durable commits or "
                "groups made of its ranks; make a new group, or start all processes of a world again"
            )
        return begin

    def _learn(self, key: str, value: bytes, appends: int) -> None:
        self._values[key] = self._values.get(key, b"") + value if appends else value

    def _write(self, at: int, key: str, value: bytes, appends: int) -> None:
        name = key.encode()
        _RECORD.pack_into(self._memory, at, self._seen, len(name), len(value) | appends)
        text = at + _RECORD.size
        self._memory[text : text + len(name)] = name
        self._memory[text + len(name) : text + len(name) + len(value)] = value

    def _read_on(self) -> None:
        """Reads the records that were added since the last call, and applies them in their order."""
        newest = at = self._newest.load()
        added: list[tuple[str, bytes, int]] = []
        while at != self._seen:
            if not FIRST <= at <= len(self._memory) - _RECORD.size or len(added) > len(self._memory) // _RECORD.size:
                raise SystemFailure(f"the group's ledger is damaged: it names a record at {at}")
            before, of_key, word = _RECORD.unpack_from(self._memory, at)
            text, of_value = at + _RECORD.size, word & ~APPENDS
            key = bytes(self._memory[text : text + of_key])
            added.append((key.decode(), bytes(self._memory[text + of_key : text + of_key + of_value]), word & APPENDS))
            at = before
        for record in reversed(added):
            self._learn(*record)
        self._seen = newest

    # what a `KeyStore` needs besides

    def set(self, key: str, value: str | bytes) -> None:
        text = value.encode() if isinstance(value, str) else value
        self.change(key, lambda _: text)

    def add(self, key: str, value: int) -> int:
        return int(self.change(key, lambda now: str(int(now or b"0") + value).encode()) or b"0")

    def check(self, keys: Sequence[str]) -> bool:
        with self._lock:
            self._read_on()
            return all(key in self._values for key in keys)
