"""Pulls under way. A worker copies the blocks of its own host itself; servers of other hosts send theirs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ringreduce import _C
from ringreduce.errors import CollectiveTimeout
from ringreduce.parameter_server.arguments import check_like, writable

if TYPE_CHECKING:
    from ringreduce._C import ParameterCall
    from ringreduce.parameter_server.key_value import Array, KeyValue, Part, _Key

SLICE = 0.25
"""Seconds after which a wait looks for Ctrl-C."""


@dataclass(slots=True)
class _Pull:
    """Of one key, to `whole`, which is `target` if that is contiguous."""

    key: str
    known: _Key
    target: torch.Tensor
    whole: torch.Tensor
    memory: int
    """The address of `whole`."""
    near: list[Part]
    """As the key had it: what is to be read here when the call is over."""
    call: ParameterCall | None = None


class Pulls:
    """Of several keys. They begin when this is made, and end by `wait` or `cancel`: nothing is written to the targets
    after that.
    """

    def __init__(self, store: KeyValue, targets: Mapping[str, Array], deadline: float) -> None:
        self._store = store
        self._pulls: list[_Pull] = []
        try:
            for key, tensor in targets.items():
                self._begin(key, tensor, deadline)
        except BaseException:
            self.cancel()
            raise

    def __del__(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Idempotent."""
        for each in self._pulls:
            if each.call is not None:
                self._store._client.cancel(each.call)
        self._pulls = []

    def wait(self, deadline: float) -> dict[str, list[int]]:
        """Returns the versions of all blocks, by key, when they are in the targets."""
        try:
            return {each.key: self._end(each, deadline) for each in self._pulls}
        finally:
            self.cancel()

    def _begin(self, key: str, tensor: Any, deadline: float) -> None:
        known = self._store._keys.get(key) or self._store._lookup(key, deadline)
        target = whole = tensor
        memory = _C.memory_of(tensor, known.like)
        if memory is None:
            target = whole = writable(key, tensor)
            check_like(key, known, target)
            if not target.is_contiguous():
                whole = torch.empty(target.shape, dtype=target.dtype, device="cpu")
            memory = whole.data_ptr()
        self._pulls.append(_Pull(key, known, target, whole, memory, known.near))
        self._ask(self._pulls[-1], deadline)

    def _ask(self, pull: _Pull, deadline: float) -> None:
        pull.near = pull.known.near
        if pull.known.asked is not None:
            left = deadline - time.monotonic()
            pull.call = self._store._client.pull(pull.known.asked, pull.memory, timeout=left)

    def _end(self, pull: _Pull, deadline: float) -> list[int]:
        versions = self._take(pull, deadline)
        while not versions:  # a server of this host has ended, and its backup is on another one
            if pull.call is not None:
                self._store._client.cancel(pull.call)
            self._store._split(pull.known)
            self._ask(pull, deadline)
            versions = self._take(pull, deadline)
        if pull.whole is not pull.target:
            pull.target.copy_(pull.whole)
        return versions

    def _take(self, pull: _Pull, deadline: float) -> list[int]:
        """Returns the versions of the blocks when all are in `whole`; nothing if they must be asked for again."""
        known, found = pull.known, {}
        if pull.call is not None:
            self._store._finish(pull.key, pull.call, deadline)
            found = {(server, block): version for server, block, _, version in pull.call.answers}
        if pull.near is not known.near:
            return []
        if known.near:
            read = self._read(pull, deadline)
            if not read:
                return []
            found |= {part[:2]: version for part, version in zip(known.near, read, strict=True)}
        return [found[part[:2]] for part in known.parts]

    def _read(self, pull: _Pull, deadline: float) -> list[int]:
        """Copies the blocks of this host; nothing if some are on another one by now."""
        while True:
            left = deadline - time.monotonic()
            versions = self._store._client.read(pull.known.here, pull.memory, max(0.0, min(left, SLICE)))
            if versions is not None:
                return versions
            if left <= SLICE:
                waiting = [part[:2] for part in pull.known.near]
                raise CollectiveTimeout(self._store._who_is_late(pull.key, waiting))
