"""`attach`: trains a torch.nn model with a parameter server, in an unchanged training loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ringreduce.errors import InvalidArgument
from ringreduce.parameter_server.arguments import check_mode
from ringreduce.parameter_server.checks import check_is, check_text
from ringreduce.parameter_server.key_value import KeyValue
from ringreduce.parameter_server.modes import Mode, sync
from ringreduce.parameter_server.pending import Pending
from ringreduce.parameter_server.updates import optimizer as optimizer_rule

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Arguments of optimizers that select an implementation and do not change the result."""


class Attached:
    """Made by `attach`, and used in place of the optimizer.

    Gradients are pushed while `backward` runs, and are `None` afterwards. Call `backward` once a step; `step` ends the
    step. A layer's new values are pulled before its forward pass, and all values before `state_dict`.
    """

    def __init__(
        self,
        kv: KeyValue,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: Mode,
        prefix: str,
        wires: dict[str, str],
    ) -> None:
        check_is("kv", kv, KeyValue, "what ps.join() returns")
        check_is("model", model, nn.Module, "a torch.nn.Module")
        check_is("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        check_text("prefix", prefix)
        check_mode(mode)
        self.late = 0
        """The number of pushes that came late and were dropped, which only happens if the mode has a quorum."""
        self._kv, self._optimizer, self._ssp = kv, optimizer, mode.mode == "ssp"
        self._under_way: dict[str, Pending] = {}
        self._keys: dict[nn.Module, list[str]] = {}
        self._called: set[nn.Module] = set()
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._groups = list(_arguments(optimizer))
        values: dict[nn.Parameter, str] = {}
        for group, arguments in zip(optimizer.param_groups, self._groups, strict=True):
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            for parameter in trained:
                if parameter not in names:
                    raise InvalidArgument(f"the optimizer has a parameter {tuple(parameter.shape)} that model has not")
                values[parameter] = prefix + names[parameter]
            rule = optimizer_rule(type(optimizer), **arguments)
            kv.init(
                {values[each]: each.detach() for each in trained},
                update=rule,
                mode=mode,
                push_wire=wires["push"],
                pull_wire=wires["pull"],
            )
        kv.pull({key: parameter.data for parameter, key in values.items()})
        self._hooks = list(self._hook(model, values))

    def _hook(self, model: Any, values: dict[nn.Parameter, str]) -> Iterator[Any]:
        for place, parameter in enumerate(model.parameters()):
            if parameter in values:  # the first layers have the greatest priority, since they are needed first
                yield parameter.register_post_accumulate_grad_hook(partial(self._push, values[parameter], -place))
        yield model.register_forward_pre_hook(self._pull_uncalled)
        for module in model.modules():
            self._keys[module] = [values[p] for p in module.parameters(recurse=False) if p in values]
            if self._keys[module]:
                yield module.register_forward_pre_hook(self._pull_of)
        yield model.register_state_dict_pre_hook(lambda *_: self.pull())

    def _push(self, key: str, priority: int, parameter: torch.Tensor) -> None:
        if key in self._under_way:
            raise InvalidArgument(
                f"{key!r} has a second gradient and no forward pass between: call backward once a step, on the sum"
            )
        assert parameter.grad is not None
        # Not started yet: the backward pass may still need the old values of this parameter.
        pushed = self._kv.push_pull(key, parameter.grad, out=parameter.data, priority=priority, start=False)
        self._under_way[key] = pushed
        parameter.grad = None

    def _pull_of(self, module: nn.Module, _: Any) -> None:
        self._called.add(module)
        self._finish(self._keys[module])

    def _pull_uncalled(self, model: nn.Module, _: Any) -> None:
        """Pulls the parameters of modules that are not called themselves: it is not known when these are needed."""
        for module, keys in self._keys.items():
            if module not in self._called:
                self._finish(keys)

    def _finish(self, keys: list[str]) -> None:
        for key in keys:
            if key in self._under_way:
                self.late += len(self._under_way[key].wait())
                del self._under_way[key]

    def step(self, closure: None = None) -> None:
        """Ends a step. Raises `InvalidArgument` if the optimizer's settings have changed, since the servers keep those
        of `attach`."""
        if closure is not None:
            raise InvalidArgument("step() of an attached optimizer takes no closure")
        if list(_arguments(self._optimizer)) != self._groups:
            raise InvalidArgument(
                "the optimizer's arguments have changed, by a scheduler perhaps, but the servers update with those of "
                "attach(); use ps.function() for a rule that changes"
            )
        if self._ssp:
            self._kv.clock()
        for pending in self._under_way.values():
            pending.start()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none)

    def pull(self) -> None:
        """Waits for pushes and pulls under way. Afterwards the model has the values for its next forward pass."""
        self._finish(list(self._under_way))

    def detach(self) -> None:
        """Waits for pushes and pulls under way, and removes the hooks from the model."""
        self.pull()
        for hook in self._hooks:
            hook.remove()


def attach(
    kv: KeyValue,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    mode: Mode | None = None,
    prefix: str = "",
    push_wire: str = "float32",
    pull_wire: str = "float32",
) -> Attached:
    """Lets the servers update the model's parameters as `optimizer` would, in `mode` (default: `sync()`).

        optimizer = ps.attach(kv, model, optimizer)

    The training loop stays as it is: `zero_grad`, `backward`, `step`. Every worker calls `attach`, and all begin with
    the values of the first one. The key of a parameter is `prefix` followed by its name. `push_wire` and `pull_wire`
    are as for `KeyValue.init`. Raises `InvalidArgument` for an optimizer that needs whole tensors.
    """
    wires = {"push": push_wire, "pull": pull_wire}
    return Attached(kv, model, optimizer, sync() if mode is None else mode, prefix, wires)


def _arguments(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """Yields the settings of each parameter group that determine its updates."""
    known = inspect.signature(type(optimizer).__init__).parameters
    for group in optimizer.param_groups:
        yield {key: value for key, value in group.items() if key in known and key not in ("params", *_HOW)}
