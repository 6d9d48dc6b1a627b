"""Pulls under way. A worker copies the blocks of its own host itself; servers of other hosts send theirs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ringreduce import _C
from ringreduce.errors import CollectiveTimeout, InvalidArgument
from ringreduce.parameter_server.arguments import check_like, writable

if TYPE_CHECKING:
    from ringreduce._C import ParameterCall
    from ringreduce.parameter_server.key_value import Array, KeyValue, Part, _Key


@dataclass(slots=True)
class _Pull:
    """A pull of one key into `whole`, which is then copied to `target` unless it shares its memory."""

    key: str
    known: _Key
    target: torch.Tensor
    whole: torch.Tensor
    """A contiguous tensor. Keeps its memory alive, whatever becomes of `target`."""
    memory: int
    """The address of `whole`."""
    place: int
    """The address of `target` at the beginning."""
    near: list[Part] | None = None
    """`_Key.near` when the pull began. If the key has another list now, the pull begins again."""
    call: ParameterCall | None = None
    push: ParameterCall | None = None
    """The push that brings the values back, if one does. It is the latest of the key if the key has had `pushes`."""
    pushes: int = 0


class Pulls:
    """Pulls of several keys. The constructor checks the targets, `begin` begins the pulls, and `wait` or `cancel` ends
    them. Nothing is written to the targets after that.
    """

    def __init__(self, store: KeyValue, targets: Mapping[str, Array], deadline: float) -> None:
        self._store, self._pulls = store, []
        self._pulls = [self._checked(key, tensor, deadline) for key, tensor in targets.items()]

    def __del__(self) -> None:
        self.cancel()

    def places(self) -> dict[str, int]:
        """Returns, by key, the address to which a push can bring the new values back. Only has keys whose blocks are
        all on this host and can always be read."""
        return {each.key: each.memory for each in self._pulls if each.known.asked is None}

    def follow(self, pushes: Mapping[str, ParameterCall]) -> None:
        """Says which pushes bring the values back, by key."""
        for each in self._pulls:
            each.push, each.pushes = pushes.get(each.key), each.known.pushes

    def begin(self, deadline: float) -> None:
        """Begins the pulls. Idempotent."""
        try:
            for each in self._pulls:
                self._check_place(each)
                if each.near is None:
                    self._ask(each, deadline)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Gives up the pulls, which may begin again. Idempotent."""
        for each in self._pulls:
            if each.call is not None:
                self._store._client.cancel(each.call)
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
        known = self._store._keys.get(key) or self._store._lookup(key, deadline)
        memory = _C.memory_of(tensor, known.like, True)
        if memory is not None:
            return _Pull(key, known, tensor, tensor.detach(), memory, memory)
        target = writable(key, tensor)
        check_like(key, known, target)
        if target.is_contiguous():
            whole = target.detach()
        else:
            whole = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        return _Pull(key, known, target, whole, whole.data_ptr(), target.data_ptr())

    def _ask(self, pull: _Pull, deadline: float) -> None:
        pull.near = pull.known.near
        if pull.known.asked is not None:
            left = deadline - time.monotonic()
            pull.call = self._store._client.pull(pull.known.asked, pull.memory, timeout=left)

    def _check_place(self, pull: _Pull) -> None:
        if pull.target.data_ptr() != pull.place:
            raise InvalidArgument(
                f"the tensor for {pull.key!r} got other memory while it was pulled: do not resize it, or give it other "
                "data, before wait() returns"
            )

    def _end(self, pull: _Pull, deadline: float) -> list[int]:
        self._check_place(pull)
        while (versions := self._take(pull, deadline)) is None:
            if pull.call is not None:
                self._store._client.cancel(pull.call)
            self._store._split(pull.known)
            self._ask(pull, deadline)
        if pull.memory != pull.place:
            pull.target.copy_(pull.whole)
        return versions

    def _take(self, pull: _Pull, deadline: float) -> list[int] | None:
        """Waits until all blocks are in `whole`; returns their versions. Returns None if the pull must begin again,
        because a server on this host has ended and its backup is reached by TCP."""
        known, found = pull.known, {}
        if pull.push is not None and known.pushes == pull.pushes and (versions := pull.push.versions) is not None:
            return versions  # a later push would mix rounds; without one, all blocks are of the same round
        if pull.call is not None:
            self._store._finish(pull.key, pull.call, deadline)
            found = {(server, block): version for server, block, _, version in pull.call.answers}
        if pull.near is not known.near:
            return None
        if known.near:
            left = max(0.0, deadline - time.monotonic())
            read = self._store._client.read(known.here, pull.memory, left)
            if read is None:
                raise CollectiveTimeout(self._who_is_late(pull))
            if not read:
                return None
            found |= {part[:2]: version for part, version in zip(known.near, read, strict=True)}
        return [found[part[:2]] for part in known.parts]

    def _who_is_late(self, pull: _Pull) -> str:
        for part in pull.known.near:
            if self._store._client.read(_C.ParameterParts([part]), pull.memory, 0.0) is None:
                return self._store._who_is_late(pull.key, *part[:2])
        return f"{pull.key!r} was not ready in time, and is now: pull again"
