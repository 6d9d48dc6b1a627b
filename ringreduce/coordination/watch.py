"""Watches the members of a view in a thread. When one on this machine ends, their group notices at once."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch.distributed as dist

from ringreduce.common import system
from ringreduce.coordination.endpoint import address_of
from ringreduce.coordination.process import ended_among, open_process
from ringreduce.coordination.protocol import View, log_key, read
from ringreduce.coordination.store import Directory


class Watch:
    """Watches the other members of one view until `stop`.

    It also looks now and then whether a member has left the view, and aborts the group if so. A member that could not
    make the group has no other way to tell the others, which would wait for it until the timeout of a call.
    """

    def __init__(self, view: View, me: str, directory: Directory, look_every: float) -> None:
        """`me`: this process's name. `look_every`: seconds between two looks for a member that has left the view."""
        self._view, self._directory, self._look_every = view, directory, look_every
        self._found: set[str] = set()
        self._pidfds: dict[int, str] = {}
        for member in view.members:
            if member.name != me:
                try:
                    self._pidfds[open_process(address_of(member).who)] = member.name
                except ProcessLookupError:
                    self._found.add(member.name)
                except OSError:  # on another machine, or no descriptor is left: this end will show by a call that fails
                    pass
        self._lock = threading.Lock()
        self._group: Any = None
        self._over = self._store_is_gone = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="ringreduce elastic")

    def attach(self, group: Any) -> None:
        """To be called when the members' group has been made. Starts the thread, which the making did not need."""
        with self._lock:
            self._group = group
            if self._found:
                group.notice()
        system.start(self._thread)

    def ended(self) -> list[str]:
        """The names of members whose processes have ended."""
        with self._lock:
            now = () if self._over else ended_among(self._pidfds, 0)
            return sorted(self._found | {self._pidfds[fd] for fd in now})

    def cut_off(self) -> list[str]:
        """The names of members whose connections have closed; those on other machines may have ended or not."""
        with self._lock:
            return [self._view.names[rank] for rank in self._group.ended()] if self._group is not None else []

    def stop(self) -> None:
        """Ends the watch; to be called before the group is destroyed. The thread ends within `look_every` seconds."""
        with self._lock:
            first, self._group, self._over = not self._over, None, True
        if first and not self._thread.ident:
            self._close()

    def _run(self) -> None:
        known: dict[int, str] = dict(self._pidfds)
        while not self._over:
            ready = ended_among(known, self._look_every)
            self._found |= {known.pop(fd) for fd in ready}
            left = not (ready or self._store_is_gone) and self._somebody_left()
            with self._lock:
                if self._group is not None and left:
                    self._group.abort()
                elif self._group is not None and ready:
                    self._group.notice()
        self._close()

    def _close(self) -> None:
        for fd in self._pidfds:
            os.close(fd)

    def _somebody_left(self) -> bool:
        try:
            return bool(read(self._view, self._directory.get(log_key(self._view.epoch))).reports)
        except (RuntimeError, OSError) as error:  # the directory is out of reach
            self._store_is_gone |= is_closed(error)
            return False


def is_closed(error: Exception) -> bool:
    """Whether the error means that the connection of a `TCPStore` has closed. A `TCPStore` never makes another one."""
    return isinstance(error, dist.DistNetworkError) and "Timeout" not in str(error)
