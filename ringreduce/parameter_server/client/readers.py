"""`Follower`: keeps a model up to date with what workers train (`KeyValue.follow`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ringreduce import _C
from ringreduce.common.checks import check_is, check_text, whole
from ringreduce.errors import InvalidArgument
from ringreduce.parameter_server.arguments import Timeout
from ringreduce.parameter_server.client.calls import Calls


class Follower:
    """Keeps a model at whole rounds of what workers train. Made by `KeyValue.follow`."""

    def __init__(
        self, calls: Calls, pull: Callable[..., object], model: nn.Module, at_most_behind: int, prefix: str
    ) -> None:
        """`pull` is `KeyValue.pull`."""
        whole("at_most_behind", at_most_behind, 0, "a number of rounds, 0 or more and below 2**63")
        check_is("model", model, nn.Module, "a torch.nn.Module")
        check_text("prefix", prefix)
        self.version = -1
        """The version of the model's parameters; -1 before the first pull."""
        self._calls, self._client, self._most = calls, calls.client, at_most_behind
        parameters = {prefix + name: p for name, p in model.named_parameters()}
        self._parameters = {key: p for key, p in parameters.items() if p.requires_grad or calls.is_key(key)}
        if not self._parameters:
            raise InvalidArgument("the model has no parameters that are keys, so there is nothing to follow")
        self._copies = {key: torch.empty(p.shape, dtype=p.dtype, device="cpu") for key, p in self._parameters.items()}
        parts, self._places = [], []
        for key, copy in list(self._copies.items()):
            known = calls.lookup(key, calls.deadline(None))
            if not self._parameters[key].requires_grad and known.spec["update"]["kind"] == "assign":
                pull(key, self._parameters.pop(key).data)  # not trained, and shared by attach()
                continue
            if known.spec["mode"]["mode"] != "sync":
                raise InvalidArgument(f"{key!r} is in mode {known.spec['mode']['mode']}, which has no rounds: pull it")
            if known.shape != copy.shape or known.dtype != copy.dtype:
                raise InvalidArgument(f"{key!r} is {known.dtype} of shape {tuple(known.shape)}, and not the model's")
            parts += known.parts
            self._places += [copy.data_ptr() + part[2] for part in known.parts]
        self._parts = _C.ParameterParts(parts)
        self.pull()
        self._hook: Any = model.register_forward_pre_hook(self._keep_up)

    def behind(self) -> int:
        """Returns how many rounds the model is behind the latest one of all servers. Raises `ServerLost`."""
        return self._client.round_of(self._parts) - self.version

    def pull(self, timeout: Timeout = None) -> int:
        """Copies the latest round that all blocks have to the model; returns its version. Takes no time of the servers.

        `timeout` is in seconds (default: that of `join`). If it raises, the model is unchanged: `ServerLost`, or
        `CollectiveTimeout` if updates kept overtaking it.
        """
        left = max(0.0, self._calls.deadline(timeout) - time.monotonic())
        version = self._client.read_round(self._parts, self._places, left)
        with torch.no_grad():
            for key, parameter in self._parameters.items():
                parameter.copy_(self._copies[key])
        self.version = version
        return version

    def _keep_up(self, *_: object) -> None:
        if self.behind() > self._most:
            self.pull()

    def detach(self) -> None:
        """Stops following: the model keeps its present values."""
        self._hook.remove()
