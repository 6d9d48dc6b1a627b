"""`Serving`: a process with servers and without a worker, made by `serve`. Used by `ringreduce serve`."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from ringreduce.coordination.store import once
from ringreduce.errors import SystemFailure
from ringreduce.parameter_server.arguments import Timeout, path_of, seconds
from ringreduce.parameter_server.server.process import ServerProcess
from ringreduce.parameter_server.server.shard import Shard
from ringreduce.parameter_server.server.snapshots import Saving
from ringreduce.parameter_server.snapshot_files import file_of


class Serving:
    """The servers of a process without a worker, made by `serve`. A context manager that closes them."""

    def __init__(self, local: ServerProcess, number: int, servers: int, store: Any, taken: int = 0) -> None:
        """`taken` is the number of snapshots that were asked for before this process came."""
        self._local, self._servers, self._store = local, servers, store
        self.number = number
        self._taken = taken
        self._saving: list[Saving] = []
        self._parts = len(local.serving())
        """The number of servers here when it was last looked: those that began here, and backups that took over."""

    def wait(self, timeout: Timeout = None) -> bool:
        """Waits until workers have come and all have left; returns False after `timeout` seconds (None: no limit)."""
        return self._local.wait_until_served(None if timeout is None else seconds(timeout))

    @property
    def addresses(self) -> list[str]:
        """Where this process listens for workers and servers of other hosts. Empty if it does not."""
        return self._local.listener.addresses()

    def stats(self) -> dict[str, Any]:
        """Returns what `KeyValue.stats` has about a server of this process."""
        return self._local.statistics()

    def ask_for_snapshot(self, *, last: bool = False) -> int:
        """Asks all servers for a snapshot, which each begins in its next call of `take_snapshots`; returns its number.

        With `last`, it is the last one. If several processes ask for that, all get the number of the first.
        """
        number = int(self._store.add("snapshots", 1))
        return int(once(self._store, "last snapshot", str(number))) if last else number

    def serves(self, number: int) -> bool:
        """Whether server `number` is served here, because it began here or its backup here has taken over."""
        return number in self._local.serving()

    def give_away(self, timeout: timedelta | float = 60.0) -> bool:
        """Gives the servers of this process to other processes; returns whether that has worked. Then this process can
        end: nothing is lost and no call fails. Returns False if no other process stays.

        Only one process gives away at a time. `timeout` is in seconds and includes the wait for processes that leave
        before this one, and for snapshots that this one is writing.
        """
        manager = self._local.manager
        return manager is not None and manager.give_away(seconds(timeout))

    def may_ask(self) -> bool:
        """Whether another snapshot may be asked for: all servers have ended with their parts of the latest one."""
        asked = int(self._store.add("snapshots", 0))
        return asked == 0 or int(self._store.add(f"snapshot {asked} ended", 0)) >= self._servers

    def take_snapshots(self, folder: str | os.PathLike[str], *, last: int = 0) -> int:
        """Begins the parts of this process's servers of the next snapshot that was asked for, unless one is under way.
        Returns the number of snapshots that it has written its parts of.

        Snapshot n is in the folder `snapshot_path(folder, n)` when all servers have written their parts. Each part is
        of a moment of its own; for one round of all servers, a worker calls `KeyValue.snapshot`. A snapshot that a
        worker has asked for is written first. `last` is the number of the only snapshot that is still to be written (0:
        all).

        Raises `SystemFailure` or `InvalidArgument` if a part could not be written. The next call then goes on with the
        next snapshot, or tries the `last` one again.
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
                if not Path(target, file_of(part)).exists():  # else the server wrote it before it ended
                    self._saving.append(shard.save(target, part))
        except BaseException:
            if not self._saving and any(shard.is_saving() for shard in shards.values()):
                self._taken -= 1  # a worker has just asked for a snapshot, which goes first
                return self._taken
            self._saving = []  # parts that have begun go on, but the snapshot stays incomplete
            self._end_parts(len(shards), True, last)
            raise
        return self._taken - 1

    def _serving(self, folder: str | os.PathLike[str]) -> dict[int, Shard]:
        """Returns the servers that are served here, by number. If there are more than before, backups have taken over.
        Then the latest snapshot goes on if it lacks their parts, and earlier parts of lost servers count as ended."""
        shards = self._local.serving()
        if len(shards) < self._parts:  # servers have moved to other processes
            self._parts = len(shards)
        if len(shards) > self._parts:
            asked = int(self._store.add("snapshots", 0))
            self._store.add(f"snapshot {asked} ended", len(shards) - self._parts)
            self._parts = len(shards)
            if self._taken and not self.snapshot_path(folder, self._taken).exists():
                self._taken -= 1
        return shards

    def _end_parts(self, parts: int, failed: bool, last: int) -> None:
        """Tells the store that parts have been written or have failed. Not for the last snapshot, since the store may
        have ended then; if that fails, it is tried again."""
        if not last:
            self._store.add(f"snapshot {self._taken} ended", parts)
        elif failed and self._taken == last:
            self._taken -= 1

    def snapshot_path(self, folder: str | os.PathLike[str], number: int) -> Path:
        """Returns the folder of a snapshot. Its name has the time of the first one, then the number, to sort by."""
        begun = once(self._store, "snapshots begun", time.strftime("%Y%m%dT%H%M%S"))
        return path_of(folder) / f"{begun}-{number:06d}"

    def close(self) -> None:
        """Ends the servers of this process. Workers that find no backup of them get `ServerLost`. Idempotent."""
        self._local.close()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
