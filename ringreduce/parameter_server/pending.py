"""Pushes under way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringreduce._C import ParameterCall
    from ringreduce.parameter_server.key_value import Array, KeyValue


@dataclass(slots=True)
class Pending:
    """What `push` and `push_pull` return."""

    store: KeyValue
    calls: dict[str, ParameterCall]
    targets: Mapping[str, Array] | None = None
    """What `push_pull` pulls when the pushes are in."""

    def wait(self, timeout: float | None = None) -> list[str]:
        """Returns when every push is in the servers' values, with the keys of which one came late and was dropped.

        `timeout` is in seconds (default: that of `join`). Raises `CollectiveTimeout` naming who is waited for, after
        which `wait` can be called again; `ServerLost`; `UpdateFailed`.
        """
        deadline = time.monotonic() + (self.store.timeout if timeout is None else timeout)
        store = self.store
        # Pulls from other hosts are under way while the pushes are.
        pulls = store._begin_pulls(self.targets, deadline) if self.targets else []
        try:
            late = [key for key, call in self.calls.items() if store._finish(key, call, deadline)]
            for each in pulls:
                store._end_pull(each, deadline)
        finally:
            store._cancel(pulls)
        self.targets = None
        return late
