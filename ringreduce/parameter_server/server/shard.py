"""`Shard`: a C++ server or backup, with the keys and rules of its blocks. A `ServerProcess` has several."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from typing import Any

from ringreduce import _C
from ringreduce.errors import Aborted, InvalidArgument
from ringreduce.parameter_server.modes import READERS
from ringreduce.parameter_server.server.snapshots import Saving
from ringreduce.parameter_server.server.updates import PythonUpdates, check_call, rule_for, rule_for_rows
from ringreduce.parameter_server.updates import Function

_KNOWN = 16
"""The number of latest snapshots whose result is remembered."""
_LOOK = 0.002
"""Seconds between checks whether a backup has the whole state of its server."""
_PART = re.compile("[0-9]+-of-[0-9]{1,6}")


class Shard:
    """The blocks of one server. The C++ server stores a block's description as a note, so the backup has it, too."""

    def __init__(self, capacity: int, functions: dict[str, Function], backed_up: bool = False) -> None:
        self._updates = PythonUpdates(functions)
        self.server = _C.ParameterServer(capacity, self._updates, backed_up)
        self._places: dict[tuple[str, str, int], tuple[int, int]] = {}
        """(block, offset) by key, the token in the key's spec, and first element. The token ("made") distinguishes keys
        that were made under the same name one after the other."""
        self._blocks: dict[int, dict[str, Any]] = {}
        """By block: its key, the key's spec, its first element and its number of elements."""
        self.savings: dict[str, Saving] = {}  # the latest snapshots, by folder
        self._follows = self._is_backup = False
        self.takes_over_quietly = False  # for a backup: its server gives its blocks away, so the takeover is not logged

    def lead(self, is_closing: Callable[[], bool], **partner: Any) -> None:
        """Gives the server a backup on this host with the whole state. Raises `ConnectionError` if it ends before."""
        self.server.lead(**partner)
        while self.server.backup_starts:
            if is_closing():
                raise Aborted("this process's servers are being closed")
            time.sleep(_LOOK)
        if not self.server.has_backup:
            raise ConnectionError(f"{partner['name']} has ended before it had all of its server")

    def follow(self, **partner: Any) -> None:
        """Makes it the backup of a server on this host."""
        self.server.follow(**partner)
        self._follows = self._is_backup = True

    def follow_far(self, on_silence: Callable[[str], None]) -> None:
        """Makes it the backup of a server that is reached by TCP."""
        self.server.follow_far(on_silence)
        self._follows = self._is_backup = True

    def has_workers(self) -> bool:
        """Whether the server has workers; readers do not count."""
        with contextlib.suppress(Aborted):
            return any(group != READERS for group, _ in self.server.workers().values())
        return False

    def check_serving(self) -> None:
        """Raises `InvalidArgument` for a backup that has not taken over. After a takeover, reads its blocks' notes."""
        if self._is_backup and not self.server.serves:
            raise InvalidArgument("this is the backup of another server, which still serves")
        if self._follows:
            self._follows = False
            for note, block, offset in self.server.notes():
                self._remember(json.loads(note), block, offset)

    def _remember(self, about: dict[str, Any], block: int, offset: int) -> None:
        self._places[about["key"], about["spec"]["made"], about["begin"]] = block, offset
        self._blocks[block] = about

    def save(self, folder: str, part: str) -> Saving:
        """Begins this server's part ("0-of-2") of a snapshot. Raises `InvalidArgument` if one is under way."""
        if not _PART.fullmatch(part):
            raise InvalidArgument(f"part is {part!r:.60}; it must be a number of a server and how many there are")
        self.check_serving()
        saving = self.savings[folder] = Saving(self.server, self._blocks, folder, part)
        for old in list(self.savings)[:-_KNOWN]:
            del self.savings[old]
        return saving

    def is_saving(self) -> bool:
        """Whether a snapshot is being written."""
        return any(not saving.done.is_set() for saving in list(self.savings.values()))

    def create_table(self, key: str, spec: dict[str, Any]) -> int:
        """Makes this server's block of a table, unless it exists; returns its id."""
        if (key, spec["made"], 0) not in self._places:
            table = {name: spec["table"][name] for name in ("width", "seed", "low", "high")}
            rule = rule_for_rows(spec["update"], bool(spec["mode"]["average"]))
            self._make({"key": key, "spec": spec, "begin": 0, "count": 0}, rule, **table)
        return self._places[key, spec["made"], 0][0]

    def create(self, key: str, blocks: list[list[int]], spec: dict[str, Any]) -> list[tuple[int, int]]:
        """Makes blocks of a key, given as (first element, elements), unless they exist; returns (id, offset) of each.
        Raises `InvalidArgument`, for instance if there is no room or no such function."""
        update = spec["update"]
        name = update["python"].get("function")
        if name is not None and name not in self._updates.functions:
            raise InvalidArgument(
                f"no function {name!r} is known to the server of pid {os.getpid()}; "
                f"give it to join(functions={{{name!r}: ...}}) on every rank"
            )
        if name is not None:
            check_call(name, self._updates.functions[name], update["python"]["arguments"])
        if not blocks:
            raise InvalidArgument(f"no blocks of {key!r:.60} were asked for")
        rule = rule_for(update, spec["dtype"], bool(spec["mode"]["average"]))
        for begin, count in blocks:
            if (key, spec["made"], begin) in self._places:
                continue
            block = self._make({"key": key, "spec": spec, "begin": begin, "count": count}, rule)
            if rule["kind"] == "python":
                self._updates.add(block, key, begin, count, spec["dtype"], update)
        return [self._places[key, spec["made"], begin] for begin, _ in blocks]

    def _make(self, about: dict[str, Any], rule: dict[str, Any], **table: Any) -> int:
        spec, mode = about["spec"], about["spec"]["mode"]
        block, offset = self.server.create(
            dtype=spec["dtype"],
            count=about["count"],
            rule=rule,
            note=json.dumps(about),
            **{name: mode[name] for name in ("mode", "quorum", "grace", "staleness", "group")},
            **table,
        )
        self._remember(about, block, offset)
        return block
