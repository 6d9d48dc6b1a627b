"""A server without a worker, as `ringreduce serve` has one: how long it serves, and the snapshots that it takes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ringreduce.errors import SystemFailure
from ringreduce.parameter_server.host import Host
from ringreduce.parameter_server.shard import Shard
from ringreduce.parameter_server.snapshots import Saving, file_of

open_servings: set[Serving] = set()
"""What is ended with the process, even if the program has dropped it."""


class Serving:
    """A server without a worker, made by `serve`. A context manager, at whose end it is closed."""

    def __init__(self, host: Host, number: int, servers: int, store: Any, taken: int = 0) -> None:
        """`taken`: snapshots that are none of its business, since they were asked for before it came."""
        self._host, self._servers, self._store = host, servers, store
        self.number = number
        self._taken = taken
        self._saving: list[Saving] = []
        self._parts = len(host.serving())
        """Servers that are served here: this one, and those that have ended and have their backups here."""

    def wait(self, timeout: float | None = None) -> bool:
        """Returns True when workers have come and all have left, or False after so many seconds."""
        return self._host.wait_until_served(timeout)

    def stats(self) -> dict[str, Any]:
        """As `KeyValue.stats` has it of a server."""
        return self._host.statistics()

    def ask_for_snapshot(self, *, last: bool = False) -> int:
        """Has all servers write a snapshot when each next calls `take_snapshots`; returns its number: that of the first
        server that asked, if it is to be the `last`."""
        number = int(self._store.add("snapshots", 1))
        return int(once(self._store, "last snapshot", str(number))) if last else number

    def serves(self, number: int) -> bool:
        """Whether server `number` is served here: it is this one, or has ended and has its backup here."""
        return number in self._host.serving()

    def give_away(self, timeout: float = 60.0) -> bool:
        """Has other processes serve what this one does, if servers have backups; returns whether they do. Then this
        process can end and nothing is lost, and no call fails. False if there is no other process that stays.

        One process gives away at a time: `timeout` is in seconds, for those before this one and its own snapshots too.
        """
        return self._host.give_away(timeout)

    def may_ask(self) -> bool:
        """Whether all servers have ended their parts of what was asked for, or failed to write them."""
        asked = int(self._store.add("snapshots", 0))
        return asked == 0 or int(self._store.add(f"snapshot {asked} ended", 0)) >= self._servers

    def take_snapshots(self, folder: str | os.PathLike[str], *, last: int = 0) -> int:
        """Begins this server's part of the next snapshot that was asked for, unless one is under way; returns how many
        it has written. Snapshot n is the folder `snapshot_path(folder, n)`, when all servers have written their parts.
        Each part is of a moment of its own; for one round of all servers, a worker calls `KeyValue.snapshot`. What a
        worker has asked for is written first. `last` is the number of the only one that is still to be written.

        Raises `SystemFailure` or `InvalidArgument` if this one's could not be written. The next call goes on with the
        one after it, or tries the `last` again.
        """
        if self._saving:
            if not all(saving.done.is_set() for saving in self._saving):
                return self._taken - 1
            done, self._saving = self._saving, []
            errors = [saving.error for saving in done if saving.error]
            self._end_parts(len(done), bool(errors), last)
            if errors:
                raise SystemFailure(f"the snapshot {done[0].path}: {errors[0]}")
        shards = self._serving(folder)
        self._taken = max(self._taken, last - 1)
        if any(shard.is_saving() for shard in shards.values()):
            return self._taken
        if self._taken >= (last or self._store.add("snapshots", 0)):
            return self._taken
        self._taken += 1
        target = f"{self.snapshot_path(folder, self._taken)}.partial-serve"
        try:
            for number, shard in shards.items():
                part = f"{number}-of-{self._servers}"
                if not Path(target, file_of(part)).exists():  # of a server that wrote it and has ended
                    self._saving.append(shard.save(target, part))
        except BaseException:
            if not self._saving and any(shard.is_saving() for shard in shards.values()):
                self._taken -= 1  # what a worker has asked for in this moment
                return self._taken
            self._saving = []  # those that began go on, but the snapshot will not be whole
            self._end_parts(len(shards), True, last)
            raise
        return self._taken - 1

    def _serving(self, folder: str | os.PathLike[str]) -> dict[int, Shard]:
        """What is served here. When that is more than before, the latest snapshot is taken up again if it still lacks
        parts, and nobody waits any more for parts that servers which have ended owe to earlier ones."""
        shards = self._host.serving()
        if len(shards) < self._parts:  # others serve them now
            self._parts = len(shards)
        if len(shards) > self._parts:
            asked = int(self._store.add("snapshots", 0))
            self._store.add(f"snapshot {asked} ended", len(shards) - self._parts)
            self._parts = len(shards)
            if self._taken and not self.snapshot_path(folder, self._taken).exists():
                self._taken -= 1
        return shards

    def _end_parts(self, parts: int, failed: bool, last: int) -> None:
        """After the last one the store may end, and the last one is tried again."""
        if not last:
            self._store.add(f"snapshot {self._taken} ended", parts)
        elif failed and self._taken == last:
            self._taken -= 1

    def snapshot_path(self, folder: str | os.PathLike[str], number: int) -> Path:
        """Named by when the servers began, and its number, so that names are in the order of time."""
        begun = once(self._store, "snapshots begun", time.strftime("%Y%m%dT%H%M%S"))
        return Path(folder).absolute() / f"{begun}-{number:06d}"

    def close(self) -> None:
        """Ends the server; workers that still need it get `ServerLost`. Idempotent."""
        self._host.close()
        open_servings.discard(self)

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def once(store: Any, key: str, value: str) -> str:
    """What the first process to come set."""
    return str(store.compare_set(key, "", value).decode())
