"""Which keys of a worker belong to models that are attached, or were: two trainings must not share one unnoticed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from ringreduce.errors import InvalidArgument
from ringreduce.parameter_server.client import watching
from ringreduce.parameter_server.client.calls import Calls


@dataclass(eq=False)
class Models:
    """Of a worker."""

    attached: WeakValueDictionary[str, torch.optim.Optimizer] = field(default_factory=WeakValueDictionary)
    """By key: what `attach` has made."""
    trained: WeakKeyDictionary[torch.optim.Optimizer, Mapping[str, nn.Parameter]] = field(
        default_factory=WeakKeyDictionary
    )
    """For each of these: its parameters, by key."""
    detached: dict[str, bytes] = field(default_factory=dict)
    """For keys of models that were detached: some of the elements of each parameter; nothing of what was shared."""
    last_told: WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]] = field(default_factory=WeakKeyDictionary)
    """For optimizers of models that were detached: the settings that the servers had last."""

    def check_detached(
        self, trained: Mapping[str, nn.Parameter], shared: Collection[str], optimizer: torch.optim.Optimizer
    ) -> None:
        """Raises `InvalidArgument` if a model that was detached has had these keys, and this is another training."""
        for key, before in self.detached.items():
            if not (key in trained or key in shared):
                continue
            now = watching.sample(trained[key]) if key in trained else b""
            if bool(now) != bool(before):
                what = "and is not trained now" if before else "but was not trained"
            elif now != before:
                what = "and has other values now"
            elif now and optimizer not in self.last_told:
                what = "by another optimizer, whose states the servers have"
            else:
                continue
            raise InvalidArgument(
                f"{key!r} belonged to a model that was attached before, {what}: give attach() another prefix=, with "
                "which all begins anew"
            )

    def claim(self, owner: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], shared: Collection[str]) -> None:
        """Raises `InvalidArgument` if another attached model has the keys or trains one of the parameters."""
        for other in set(self.attached.values()):
            its = {parameter: key for key, parameter in self.trained[other].items()}
            for key, parameter in trained.items():
                if parameter in its:
                    raise InvalidArgument(
                        f"{key!r} is trained by another attached optimizer, as {its[parameter]!r}: attach one "
                        "optimizer with all parameters of both"
                    )
        keys = {*trained, *shared}
        if taken := sorted(key for key in keys if key in self.attached):
            raise InvalidArgument(
                f"{taken[0]!r} belongs to another model that is attached already: give each model a prefix= of its "
                "own, or detach() the other one"
            )
        self.attached.update(dict.fromkeys(keys, owner))
        self.trained[owner] = trained

    def release(self, owner: torch.optim.Optimizer, shared: Collection[str]) -> None:
        for key in [key for key, other in self.attached.items() if other is owner]:
            del self.attached[key]
        self.detached |= dict.fromkeys(shared, b"")
        self.detached |= {key: watching.sample(parameter) for key, parameter in self.trained[owner].items()}


_models: WeakKeyDictionary[Calls, Models] = WeakKeyDictionary()


def models_of(worker: Calls) -> Models:
    return _models.setdefault(worker, Models())
