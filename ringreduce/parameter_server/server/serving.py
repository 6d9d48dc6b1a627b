"""`Serving`: a process with servers and without a worker, made by `serve`. Used by `ringreduce serve`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from ringreduce.common.system import explained
from ringreduce.coordination.store import once
from ringreduce.errors import SystemFailure
from ringreduce.parameter_server.arguments import Timeout, path_of, seconds
from ringreduce.parameter_server.server.process import ServerProcess
from ringreduce.parameter_server.server.shard import Shard
from ringreduce.parameter_server.server.snapshots import Saving, complete
from ringreduce.parameter_server.snapshot_files import file_of


class Serving:
    """The servers of a process without a worker, made by `serve`. A context manager that closes them."""

    def __init__(self, local: ServerProcess, number: int, servers: int, store: Any, taken: int = 0) -> None:
        """`taken` is the number of snapshots that were asked for before this process came."""
        self._local, self._servers, self._store = local, servers, store
        self.number = number
        self._taken = taken
        self._saving: dict[int, Saving] = {}
        self._parts = set(local.serving())
        """The servers here when it was last looked: those that began here, and backups that took over."""

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
        return asked == 0 or self._all_ended(asked)

    def take_snapshots(self, folder: str | os.PathLike[str], *, last: int = 0) -> int:
        """Begins the parts of this process's servers of the next snapshot that was asked for, unless one is under way.
        Returns the number of snapshots that it has written its parts of.

        Snapshot n is in the folder `snapshot_path(folder, n)` when all servers have written their parts. Each part is
        of a moment of its own; for one round of all servers, a worker calls `KeyValue.snapshot`. A snapshot that a
        worker has asked for is written first. `last` is the number of the only snapshot that is still to be written (0:
        all).

        Raises `SystemFailure` or `InvalidArgument` if a part could not be written. The next call then goes on with the
        next snapshot, or tries the `last` one again. Nothing is left of the one that failed, once all have ended it.
        """
        if self._saving:
            if not all(saving.done.is_set() for saving in self._saving.values()):
                return self._taken - 1
            done, self._saving = self._saving, {}
            errors = [f"{saving.path}: {saving.error}" for saving in done.values() if saving.error]
            self._end_parts(done, bool(errors), folder, last)
            if errors:
                raise SystemFailure(f"the snapshot {errors[0]}")
        shards = self._serving(folder)
        self._taken = max(self._taken, last - 1)
        if any(shard.is_saving() for shard in shards.values()):
            return self._taken
        if self._taken >= (last or self._store.add("snapshots", 0)):
            return self._taken
        self._taken += 1
        target = self.unfinished(folder, self._taken)
        try:
            for number, shard in shards.items():
                part = f"{number}-of-{self._servers}"
                if (target / file_of(part)).exists():  # from before the server ended, or the snapshot was incomplete
                    complete(target, self._servers)
                else:
                    self._saving[number] = shard.save(str(target), part)
            if there := shards.keys() - self._saving:
                self._end_parts(there, False, folder, last)
        except BaseException as error:
            if not self._saving and any(shard.is_saving() for shard in shards.values()):
                self._taken -= 1  # a worker has just asked for a snapshot, which goes first
                return self._taken
            self._saving = {}  # parts that have begun go on, but the snapshot stays incomplete
            self._end_parts(shards, True, folder, last)
            if isinstance(error, OSError):
                raise SystemFailure(f"the snapshot {target}: {explained(error)}") from None
            raise
        return self._taken - 1

    def _serving(self, folder: str | os.PathLike[str]) -> dict[int, Shard]:
        """Returns the servers that are served here, by number. If there are more than before, backups have taken over.
        Then the latest snapshot goes on if only their parts are missing; if not, these count as ended."""
        shards = self._local.serving()
        if taken_over := shards.keys() - self._parts:
            asked = int(self._store.add("snapshots", 0))
            if self._taken and not (self.snapshot_path(folder, self._taken).exists() or self._all_ended(self._taken)):
                self._taken -= 1
            if self._taken >= asked:
                self._say_ended(asked, taken_over)
        self._parts = set(shards)
        return shards

    def _end_parts(self, parts: Iterable[int], failed: bool, folder: str | os.PathLike[str], last: int) -> None:
        """Tells the store that parts have been written or have failed, and removes what is left of the snapshot if all
        have ended: nothing is, unless a part has failed. Not for the last snapshot, since the store may have ended
        then; if that fails, it is tried again."""
        if last:
            self._taken -= int(failed and self._taken == last)
            return
        self._say_ended(self._taken, parts)
        if self._all_ended(self._taken):
            shutil.rmtree(self.unfinished(folder, self._taken), ignore_errors=True)

    def _say_ended(self, number: int, parts: Iterable[int]) -> None:
        for part in parts:
            self._store.set(f"snapshot {number} ended/{part}", "")

    def _all_ended(self, number: int) -> bool:
        return bool(self._store.check([f"snapshot {number} ended/{part}" for part in range(self._servers)]))

    def unfinished(self, folder: str | os.PathLike[str], number: int) -> Path:
        """Returns the folder of a snapshot until it is complete."""
        path = self.snapshot_path(folder, number)
        return path.with_name(f"{path.name}.partial-serve")

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
