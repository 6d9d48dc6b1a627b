"""Pushes and pulls under way: `Pending`, which a program waits for after a push, and `Pulls`.

A worker copies the blocks of its own host itself; servers of other hosts send theirs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ringreduce import _C
from ringreduce.coordination.wait import at_first
from ringreduce.errors import CollectiveTimeout, InvalidArgument
from ringreduce.parameter_server.arguments import Timeout, check_priority, check_weight, readable, writable
from ringreduce.parameter_server.client.calls import Calls
from ringreduce.parameter_server.client.keys import Array, Key, Part
from ringreduce.parameter_server.modes import READERS

NOTHING = object()
"""Given to `push` instead of a tensor: the worker takes part in the round, and counts as zeros. If all workers push
nothing, the value and the optimizer's states stay as they are."""


@dataclass(slots=True)
class _Pull:
    """A pull of one key into `whole`, which is then copied to `target` unless it shares its memory."""

    key: str
    known: Key
    target: torch.Tensor
    whole: torch.Tensor  # a contiguous tensor. Keeps its memory alive, whatever becomes of `target`.
    memory: int  # the address of `whole`
    address: int  # the address of `target` at the beginning
    near: list[Part] | None = None
    """`Key.near` when the pull began. If the key has another list now, the pull begins again."""
    call: _C.ParameterCall | None = None
    push: _C.ParameterCall | None = None
    """The push that brings the values back, if one does. It is the latest of the key if the key has had `pushes`."""
    pushes: int = 0


class Pulls:
    """Pulls of several keys. The constructor checks the targets, `begin` begins the pulls, and `wait` or `cancel` ends
    them. Nothing is written to the targets after that.
    """

    def __init__(self, calls: Calls, targets: Mapping[str, Array], deadline: float) -> None:
        self._calls, self._pulls = calls, []
        self._pulls = [self._checked(key, tensor, deadline) for key, tensor in targets.items()]

    def __del__(self) -> None:
        self.cancel()

    def addresses(self) -> dict[str, int]:
        """Returns, by key, the address to which a push can bring the new values back. Only has keys whose blocks are
        all on this host and can always be read."""
        return {each.key: each.memory for each in self._pulls if each.known.requested is None}

    def follow(self, pushes: Mapping[str, _C.ParameterCall]) -> None:
        """Says which pushes bring the values back, by key."""
        for each in self._pulls:
            each.push, each.pushes = pushes.get(each.key), each.known.pushes

    def begin(self, deadline: float) -> None:
        """Begins the pulls. Idempotent."""
        try:
            for each in self._pulls:
                self._check_memory(each)
                if each.near is None:
                    self._ask(each, deadline)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Gives up the pulls, which may begin again. Idempotent."""
        for each in self._pulls:
            if each.call is not None:
                self._calls.client.cancel(each.call)
            if each.push is not None:
                each.push.drop_new_values()
            each.near = each.call = each.push = None

    def wait(self, deadline: float) -> dict[str, list[int]]:
        """Waits until all values are in the targets; returns the versions of their blocks, by key."""
        self.begin(deadline)
        try:
            versions = {each.key: self._end(each, deadline) for each in self._pulls}
        finally:
            self.cancel()
        changed = [each.target for each in self._pulls if not each.target.is_inference()]
        torch.autograd.graph.increment_version(changed)
        return versions

    def _checked(self, key: str, tensor: Any, deadline: float) -> _Pull:
        known = self._calls.keys.get(key) or self._calls.lookup(key, deadline)
        memory = _C.memory_of(tensor, known.like, True)
        if memory is not None:
            return _Pull(key, known, tensor, tensor.detach(), memory, memory)
        target = writable(key, tensor)
        known.check_like(key, target)
        if target.is_contiguous():
            whole = target.detach()
        else:
            whole = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        return _Pull(key, known, target, whole, whole.data_ptr(), target.data_ptr())

    def _ask(self, pull: _Pull, deadline: float) -> None:
        pull.near = pull.known.near
        if pull.known.requested is not None:
            left = deadline - time.monotonic()
            pull.call = self._calls.client.pull(pull.known.requested, pull.memory, timeout=left)

    def _check_memory(self, pull: _Pull) -> None:
        if pull.target.data_ptr() != pull.address:
            raise InvalidArgument(
                f"the tensor for {pull.key!r} got other memory while it was pulled: do not resize it, or give it other "
                "data, before wait() returns"
            )

    def _end(self, pull: _Pull, deadline: float) -> list[int]:
        self._check_memory(pull)
        while (versions := self._take(pull, deadline)) is None:
            if pull.call is not None:
                self._calls.client.cancel(pull.call)
            pull.known.split(self._calls.client)
            self._ask(pull, deadline)
        if pull.memory != pull.address:
            pull.target.copy_(pull.whole)
        return versions

    def _take(self, pull: _Pull, deadline: float) -> list[int] | None:
        """Waits until all blocks are in `whole`; returns their versions. Returns None if the pull must begin again,
        because a server on this host has ended and its backup is reached by TCP."""
        known, found = pull.known, {}
        if pull.push is not None and known.pushes == pull.pushes and (versions := pull.push.versions) is not None:
            return versions  # a later push would mix rounds; without one, all blocks are of the same round
        if pull.call is not None:
            self._calls.finish(pull.key, pull.call, deadline)
            found = {(server, block): version for server, block, _, version in pull.call.answers}
        if pull.near is not known.near:
            return None
        if known.near:
            client, here = self._calls.client, known.here
            read = client.read(here, pull.memory, at_first(deadline))
            if read is None:

                def again(seconds: float) -> list[int] | None:
                    return client.read(here, pull.memory, seconds)

                read = self._calls.wait_on(again, lambda: self._who_is_late(pull), deadline)
            if not read:
                return None
            found |= {part[:2]: version for part, version in zip(known.near, read, strict=True)}
        return [found[part[:2]] for part in known.parts]

    def _who_is_late(self, pull: _Pull) -> str:
        for part in pull.known.near:
            if self._calls.client.read(_C.ParameterParts([part]), pull.memory, 0.0) is None:
                return self._calls.who_is_late(pull.key, *part[:2])
        return f"{pull.key!r} has just become ready"


@dataclass(slots=True)
class Pending:
    """A push under way: what `push` and `push_pull` return."""

    through: Calls
    calls: dict[str, _C.ParameterCall]
    pulls: Pulls | None = None
    """The pull of a `push_pull`."""

    def start(self, timeout: Timeout = None) -> None:
        """Begins the pull of a `push_pull(start=False)`, whose output may change from here on.

        Does nothing for a push alone, or if the pull has begun. `timeout` is as for `wait`.
        """
        self.through.questions.check_caller()
        if self.pulls is not None:
            self.pulls.begin(self.through.until(timeout))

    def wait(self, timeout: Timeout = None) -> list[str]:
        """Waits until the servers have applied every push and, after `push_pull`, the new values are in the output.
        Returns the keys whose push came late and was dropped.

        `timeout` is in seconds (default: that of `join`). Raises `ServerLost`, `UpdateFailed`, or `CollectiveTimeout`,
        which names the worker or server that is waited for; after a timeout, `wait` can be called again. Raises
        `InvalidArgument` if the output of a `push_pull` got other memory meanwhile; the next `wait` then waits for the
        push alone.
        """
        deadline = self.through.until(timeout)
        if self.pulls is None:
            return self._finish(deadline)
        try:
            self.pulls.begin(deadline)  # now, so that values from other hosts come while pushes are under way
            late = self._finish(deadline)
            self.pulls.wait(deadline)
        except BaseException as error:
            self.pulls.cancel()
            if isinstance(error, InvalidArgument):
                self.pulls = None
            raise
        self.pulls = None
        return late

    def _finish(self, deadline: float) -> list[str]:
        return [key for key, call in self.calls.items() if self.through.finish(key, call, deadline)]


def push(
    calls: Calls,
    pairs: list[tuple[str, Any]],
    out: Mapping[str, Array] | None,
    start: bool,
    weight: float,
    priority: int,
    timeout: Timeout,
) -> Pending:
    """Pushes, and prepares the pull into `out`. Checks all arguments of both before anything is sent."""
    if calls.entry.group == READERS:
        raise InvalidArgument("a reader does not push; join with role='worker' to take part in training")
    check_weight(weight)
    check_priority(priority)
    deadline = calls.deadline(timeout)
    sources = [_source(calls, name, tensor, weight, deadline) for name, tensor in pairs]
    pulls = None if out is None else Pulls(calls, out, deadline)
    addresses = pulls.addresses() if pulls is not None and start else {}
    tensors = [(parts, memory, addresses.get(name, 0)) for name, parts, memory, _ in sources]
    for name, *_ in sources:
        calls.keys[name].pushes += 1
    left = deadline - time.monotonic()
    try:
        sent = calls.client.push(tensors, priority=int(priority), weight=float(weight), timeout=left)
    except CollectiveTimeout as error:
        raise CollectiveTimeout(f"{error}; {_what_fills_the_window(calls)}") from None
    under_way = {name: call for (name, *_), call in zip(sources, sent, strict=True)}
    if pulls is not None:
        pulls.follow({name: under_way[name] for name in addresses if name in under_way})
    return Pending(calls, under_way, pulls)


def _source(
    calls: Calls, name: str, tensor: Any, weight: float, deadline: float
) -> tuple[str, _C.ParameterParts, int, Any]:
    """Returns the key, its blocks, the address of the values, and the tensor that owns that memory."""
    known = calls.keys.get(name) or calls.lookup(name, deadline)
    if tensor is NOTHING:
        return name, known.everywhere, 0, tensor
    memory = _C.memory_of(tensor, known.like, False)
    if memory is None:
        tensor = readable(name, tensor)
        known.check_like(name, tensor)
        memory = tensor.data_ptr()
    if weight != 1 and not (known.dtype.is_floating_point or known.dtype.is_complex):
        raise InvalidArgument(f"weight is {weight}; a push of {known.dtype} ({name!r}) takes none but 1")
    return name, known.everywhere, memory, tensor


def _what_fills_the_window(calls: Calls) -> str:
    """Returns a text that says why a push has found no room in the window, and what to do."""
    advice = (
        "some of its blocks may have gone out: wait() for earlier pushes before new ones, push keys in the same "
        "order on all workers, or join with a larger window="
    )
    if waiting := calls.client.unanswered_push():
        for key, known in calls.keys.items():
            if any(part[:2] == waiting for part in known.parts):
                return f"{calls.who_is_late(key, *waiting)}; {advice}"
    return advice
