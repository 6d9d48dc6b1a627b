"""Pushes under way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringreduce._C import ParameterCall
    from ringreduce.parameter_server.key_value import Array, KeyValue, _Pull


@dataclass(slots=True)
class Pending:
    """What `push` and `push_pull` return."""

    store: KeyValue
    calls: dict[str, ParameterCall]
    targets: Mapping[str, Array] | None = None
    """What `push_pull` pulls when the pushes are in."""

    pulls: list[_Pull] | None = None
    """Those that have begun."""

    def __del__(self) -> None:
        if self.pulls:  # nobody waits for them: nothing may be written to the tensors, which go too
            self.store._cancel(self.pulls)

    def start(self, timeout: float | None = None) -> None:
        """Begins the pull of a `push_pull` now: its output may change from here on, and not only in `wait`."""
        deadline = time.monotonic() + (self.store.timeout if timeout is None else timeout)
        if self.targets and self.pulls is None:
            self.pulls = self.store._begin_pulls(self.targets, deadline)

    def wait(self, timeout: float | None = None) -> list[str]:
        """Returns when every push is in the servers' values, with the keys of which one came late and was dropped.

        `timeout` is in seconds (default: that of `join`). Raises `CollectiveTimeout` naming who is waited for, after
        which `wait` can be called again; `ServerLost`; `UpdateFailed`.
        """
        deadline = time.monotonic() + (self.store.timeout if timeout is None else timeout)
        store = self.store
        if self.targets and self.pulls is None:  # those from other hosts are under way while the pushes are
            self.pulls = store._begin_pulls(self.targets, deadline)
        pulls, self.pulls = self.pulls or [], None
        try:
            late = [key for key, call in self.calls.items() if store._finish(key, call, deadline)]
            for each in pulls:
                store._end_pull(each, deadline)
        finally:
            store._cancel(pulls)
        self.targets = None
        return late
