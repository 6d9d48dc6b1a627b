"""`Calls`: what the calls of a worker share: its client, the keys that it knows, waiting, and saying for whom."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ringreduce import _C
from ringreduce.common.checks import shown
from ringreduce.coordination.wait import Found, Reminder, at_first
from ringreduce.errors import CollectiveTimeout, InvalidArgument, ServerLost, SystemFailure, UpdateFailed
from ringreduce.parameter_server.arguments import Timeout, check_average, check_key, check_wire, readable, seconds
from ringreduce.parameter_server.client.keys import Key, Part, parts_of_table
from ringreduce.parameter_server.client.questions import Questions
from ringreduce.parameter_server.entry import Entry
from ringreduce.parameter_server.exits import open_until_exit
from ringreduce.parameter_server.modes import Mode
from ringreduce.parameter_server.placement import cut, elements_per_block, place
from ringreduce.parameter_server.updates import CHANGEABLE, UpdateRule, check_dtype, numbers_of, same_but_numbers

log = logging.getLogger(__name__)

_CREATED_AT_ONCE = 1000
"""The most blocks in one control message."""
_EXPLAINS = 0.2
"""How many seconds, after a timeout, a server may take to say who is waited for."""


def _first_difference(name: str, here: Any, there: Any) -> tuple[str, Any, Any]:
    """Where two values, as JSON has them, differ first: the name of the innermost field, and what it is in each."""
    if isinstance(here, dict) and isinstance(there, dict):
        inner = next(key for key in (*here, *there) if here.get(key) != there.get(key))
        return _first_difference(inner, here.get(inner), there.get(inner))
    return name, here, there


class LocalServers(Protocol):
    """The servers of this process, as its worker sees them."""

    def wait_until_left(self, timeout: float) -> list[str]:
        """Waits until all workers have gone; returns the names of those that have not after `timeout` seconds."""

    def close(self) -> None: ...


class Calls:
    """What `KeyValue`, pushes, pulls, tables and followers share of one worker. Other threads may call `abort` only."""

    def __init__(
        self, entry: Entry, client: _C.ParameterClient, local: LocalServers | None, questions: Questions
    ) -> None:
        """`local`: the servers of this process, if it has any."""
        self.entry, self.store, self.client, self.local, self.questions = entry, entry.store, client, local, questions
        self.timeout = entry.timeout  # for calls that are given none, in seconds
        self.servers = entry.servers
        self._loads = [0] * entry.servers
        """By server: the bytes of the blocks there that this worker knows of, without tables."""
        self.has_left = False
        self.keys: dict[str, Key] = {}
        open_until_exit[self] = None

    def abort(self) -> None:
        """Ends every wait of this worker, now and later, with `Aborted`."""
        self.client.abort()
        self.questions.abort()

    def close(self) -> None:
        """Ends this worker and the servers of its process without waiting. The others see them end. Idempotent."""
        self.has_left = True
        self.questions.close()
        if self.local is not None:
            self.local.close()
        open_until_exit.pop(self, None)

    def close_in_child(self) -> None:
        self.questions.close()

    def deadline(self, timeout: Timeout) -> float:
        """Returns when a call with this timeout is over. Raises `InvalidArgument` if this worker has left."""
        if self.has_left:
            raise InvalidArgument("this worker has left; join again")
        return self.until(timeout)

    def until(self, timeout: Timeout) -> float:
        """Returns the same for a wait, which may also come after this worker has left."""
        timeout = self.timeout if timeout is None else timeout
        return time.monotonic() + seconds(timeout)

    def tell(self, kind: str, servers: list[int], deadline: float) -> None:
        """Tells servers a "clock", a "barrier" or a "leave", and waits until they have answered."""
        call = self.client.tell(kind, servers, timeout=deadline - time.monotonic())
        self.finish("", call, deadline, kind)

    def finish(self, key: str, call: _C.ParameterCall, deadline: float, kind: str = "") -> bool:
        """Waits for a call about `key`, or one of `kind` "clock", "barrier" or "leave". Returns whether a push came
        late for some block. Raises the error of a call that went wrong."""
        if not self.client.wait(call, timeout=at_first(deadline)):

            def who_is_late() -> str:
                answered = {(server, block) for server, block, _, _ in call.answers}
                waiting = next((each for each in call.asked if each not in answered), (0, 0))
                return self.who_is_late(key, *waiting, kind)

            self.wait_on(lambda seconds: self.client.wait(call, timeout=seconds), who_is_late, deadline)
        if call.went_well:
            return False
        late = False
        for server, block, outcome, _ in call.answers:
            if outcome == "failed":
                text = self.questions.ask(server, {"ask": "failure", "block": block}, deadline)["text"]
                raise UpdateFailed(f"the update of {key!r} on {self.questions.name_of(server)} raised: {text}", server)
            if outcome == "refused" and kind == "update_arguments":
                raise InvalidArgument(
                    f"update_arguments() of {key!r}: another worker has given another value for the same round; give "
                    "all workers the same at the same point of their loops"
                )
            if outcome == "refused":
                raise InvalidArgument(
                    f"{self.questions.name_of(server)} refused a request about {key!r}: the key has no value yet, or "
                    "this worker is no member any more"
                )
            late |= outcome == "late"
        return late

    def wait_on(self, wait: Callable[[float], Found], who_is_late: Callable[[], str], deadline: float) -> Found:
        """Goes on with a wait that has lasted for `at_first(deadline)`.

        Returns what `wait(seconds)` returns, which is None or False after so long in vain. Logs now and then who is
        late, and raises `CollectiveTimeout` at the deadline.
        """
        reminder = Reminder()
        began = time.monotonic() - reminder.next
        while (left := deadline - time.monotonic()) > 0:
            waited = time.monotonic() - began
            if reminder.due(waited):
                text = "%s; worker %d has waited %.0f s, and will wait %.0f s more"
                log.warning(text, who_is_late(), self.entry.worker, waited, left)
            found = wait(min(left, reminder.next - waited))
            if found is not None and found is not False:
                return found
        raise CollectiveTimeout(who_is_late())

    def who_is_late(self, key: str, server: int, block: int, kind: str = "") -> str:
        """Returns a text that says for whom an unanswered request waits."""
        name = self.questions.name_of(server)
        what = {"": f"{key!r} on {name}", "barrier": "the barrier"}.get(kind, f"{kind}() on {name}")
        question: dict[str, dict[str, Any]] = {
            "": {"ask": "awaited", "block": block},
            "barrier": {"ask": "absent", "group": self.entry.group},
        }
        why = f"{name} or its backup is busy or stopped"
        if kind in question:
            try:
                workers = self.questions.ask(server, question[kind], time.monotonic() + _EXPLAINS)["workers"]
                if workers := [each for each in workers if not each.startswith(f"worker {self.entry.worker} ")]:
                    return f"{what} waits for {', '.join(workers)}"
                why = f"no other worker is missing: it has no value yet, or is being updated, or {why}"
            except (CollectiveTimeout, InvalidArgument, ServerLost, SystemFailure) as error:
                why = str(error)
        return f"{what} is not ready; {why}"

    # ---- keys --------------------------------------------------------------------------------------------------------

    def is_key(self, key: str) -> bool:
        """Whether some worker has made the key."""
        return key in self.keys or bool(self.store.check([f"place/{key}"]) and self.store.get(f"place/{key}"))

    def lookup(self, key: str, deadline: float) -> Key:
        """Returns a key that this or another worker has made. Raises `InvalidArgument` if nobody has."""
        if key not in self.keys:
            check_key(key)
            if not self.is_key(key):
                raise InvalidArgument(
                    f"there is no key {shown(key)} yet: init() makes it on any worker, or attach(), by prefix= and name"
                )
            self.create(key, json.loads(self.store.get(f"place/{key}")), deadline)
        return self.keys[key]

    def init(
        self,
        pairs: list[tuple[str, Any]],
        update: UpdateRule,
        mode: Mode,
        wires: Sequence[str] = ("float32", "float32"),
        timeout: Timeout = None,
        saved: bool = True,
    ) -> None:
        """Makes keys. `saved`: snapshots have them."""
        deadline = self.deadline(timeout)
        sources = {}
        for name, tensor in pairs:
            check_key(name)
            source = readable(name, tensor)
            spec: dict[str, Any] = {
                "dtype": str(source.dtype).removeprefix("torch."),
                "shape": list(source.shape),
                "mode": mode.as_json(),
                "update": update.as_json(),
                "wire": list(wires),
            }
            if not saved:
                spec["saved"] = False
            check_wire(name, source, spec["wire"])
            if update.kind == "rowwise_adagrad":
                raise InvalidArgument(f"update of {name!r} is rowwise_adagrad(), which is for rows: use ps.Embedding")
            check_dtype(name, source.dtype, update)
            check_average(name, source, mode, update)
            sources[name] = spec, source
        calls, renumbered = {}, []
        for name, (spec, source) in sources.items():
            if self.place(name, spec, deadline):
                renumbered.append(name)
            parts = self.keys[name].everywhere
            calls[name] = self.client.send("initialise", parts, source.data_ptr(), timeout=deadline - time.monotonic())
        for name, call in calls.items():
            self.finish(name, call, deadline)
        self.change({name: self.keys[name].everywhere for name in renumbered}, numbers_of(update.as_json()), deadline)

    def place(self, key: str, spec: dict[str, Any], deadline: float, **more: Any) -> bool:
        """Makes the blocks of a key. Returns whether the numbers of its rule are still to be sent (see `agree`)."""
        size = getattr(torch, spec["dtype"]).itemsize
        per_block = more.setdefault("per_block", elements_per_block(size, self.entry.block_bytes))
        sizes = [count * size for _, count in cut(math.prod(spec["shape"]), per_block)]
        placed, renumbers = self.agree(key, spec, spec | more | {"servers": place(sizes, self._loads)})
        if more.get("restored") and placed["per_block"] != per_block:
            raise InvalidArgument(f"{key!r} has been cut otherwise already: restore() before init()")
        self.create(key, placed, deadline)
        return renumbers

    def agree(self, key: str, spec: dict[str, Any], wanted: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Returns what the first worker that made the key has told the store. Raises `InvalidArgument` if that differs
        from `spec`. If this is the first worker, it tells the store `wanted`. The first one after `restore` may give
        the rule other numbers, and then has to send them to the servers; also returns whether that is so."""
        wanted = wanted | {"made": secrets.token_hex(4)}
        place, asked = f"place/{key}", json.loads(json.dumps(spec))
        placed: dict[str, Any] = json.loads(self.store.compare_set(place, "", json.dumps(wanted)))
        renumbers = False
        if (
            placed.get("restored")
            and not wanted.get("restored")
            and same_but_numbers(placed["update"], asked["update"])
        ):
            other = placed | {"update": asked["update"], "restored": None, "by": secrets.token_hex(4)}
            placed = json.loads(self.store.compare_set(place, json.dumps(placed), json.dumps(other)))
            renumbers = placed == other
        for name, mine in asked.items():
            if placed.get(name) != mine:
                field, here, there = _first_difference(name, mine, placed.get(name))
                where = f"{name} of {key!r}" if field == name else f"{name} of {key!r} differs: its {field}"
                raise InvalidArgument(
                    f"{where} is {here!r} here, and {there!r} on the worker that made the key: give all workers the "
                    "same"
                )
        return placed, renumbers

    @contextlib.contextmanager
    def _making(self, key: str, placed: dict[str, Any]) -> Iterator[None]:
        """Frees the name of a key again if a server refuses to make it."""
        try:
            yield
        except InvalidArgument:
            self.store.compare_set(f"place/{key}", json.dumps(placed), "")
            raise

    def make_table(self, key: str, spec: dict[str, Any], deadline: float, restored: bool = False) -> _C.ParameterTable:
        """Makes each server's part of a table, unless it exists."""
        check_key(key)
        placed, renumbers = self.agree(key, spec, spec | ({"restored": True} if restored else {}))
        with self._making(key, placed):
            blocks = [
                int(self.questions.ask(server, {"ask": "create table", "key": key, "spec": placed}, deadline)["block"])
                for server in range(self.servers)
            ]
        if renumbers:
            self.change({key: parts_of_table(blocks)}, numbers_of(spec["update"]), deadline)
        return _C.ParameterTable(blocks, placed["dtype"], placed["table"]["width"])

    def create(self, key: str, placed: dict[str, Any], deadline: float) -> None:
        """Makes the blocks of a key on the servers, unless they exist, and learns where they are."""
        if key in self.keys:
            self.keys[key].spec = placed
            return
        if "table" in placed:
            raise InvalidArgument(f"{key!r} is a table of rows: use the ps.Embedding of that name")
        size = getattr(torch, placed["dtype"]).itemsize
        blocks = cut(math.prod(placed["shape"]), placed["per_block"])
        parts: list[Part | None] = [None] * len(blocks)
        spec = {name: value for name, value in placed.items() if name != "servers"}  # may be too long for a message
        for server in range(self.servers):
            mine = [i for i, owner in enumerate(placed["servers"]) if owner == server]
            for first in range(0, len(mine), _CREATED_AT_ONCE):
                some = mine[first : first + _CREATED_AT_ONCE]
                question = {"ask": "create", "key": key, "blocks": [blocks[i] for i in some], "spec": spec}
                with self._making(key, placed):
                    made = self.questions.ask(server, question, deadline)
                for i, (block, offset) in zip(some, made["blocks"], strict=True):
                    begin, count = blocks[i]
                    parts[i] = (server, block, begin * size, count * size, offset)
                    self._loads[server] += count * size
        self.keys[key] = Key(placed, [part for part in parts if part is not None], self.client)

    def change(self, parts: dict[str, _C.ParameterParts], numbers: dict[str, float], deadline: float) -> None:
        """Changes numbers of the rules of keys, of which `parts` are the blocks."""
        calls = [
            (name, self.client.change(each, CHANGEABLE.index(which), number, timeout=deadline - time.monotonic()))
            for name, each in parts.items()
            for which, number in numbers.items()
        ]
        for name, call in calls:
            self.finish(name, call, deadline, "update_arguments")
