"""`attach`: trains a torch.nn model with a parameter server, in an unchanged training loop."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringreduce.common.checks import check_bool, check_is, check_text, number, shown
from ringreduce.errors import InvalidArgument
from ringreduce.parameter_server.arguments import check_mode
from ringreduce.parameter_server.client import watching
from ringreduce.parameter_server.client.key_value import KeyValue
from ringreduce.parameter_server.client.models import models_of
from ringreduce.parameter_server.client.pending import NOTHING, push
from ringreduce.parameter_server.client.watching import Hook, Seen, Trained
from ringreduce.parameter_server.modes import Mode, asynchronous, sync
from ringreduce.parameter_server.updates import assign
from ringreduce.parameter_server.updates import optimizer as optimizer_rule

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Arguments of optimizers that select an implementation and do not change the result."""

_ALL_AT_ONCE = (
    "give the optimizer all parameters before; one that is trained later may have requires_grad=False until then"
)


def _copied(value: Any) -> Any:
    """A setting, which does not change with a list in `param_groups`."""
    return tuple(value) if isinstance(value, list) else value


class Attached(torch.optim.Optimizer):
    """Made by `attach`, and used in place of the optimizer.

    `step` pushes the gradient of every parameter once, and returns when the new values are there. If each step has one
    backward pass, gradients are pushed while `backward` runs, from the second step on, if they were cleared before.
    With `overlap_forward`, `step` returns at once: a module's values are there before its forward pass, and all before
    `state_dict`.

    A `torch.optim.lr_scheduler` takes it as its optimizer. The servers update with the `param_groups` of the time when
    a step begins to push. The states of the optimizer are on the servers, and `state_dict()` does not have them.
    """

    def __init__(
        self,
        kv: KeyValue,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mode: Mode,
        prefix: str,
        wires: tuple[str, str],
        max_norm: float | None,
        overlap_forward: bool,
    ) -> None:
        self.late = 0
        """The number of pushes that came late and were dropped, which only happens if the mode has a quorum."""
        self.total_norm: torch.Tensor | None = None
        """With `max_norm`: the norm of all gradients at the last step, before they were clipped."""
        watching.check_fresh(optimizer)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks
        self._kv, self._optimizer, self._mode, self._prefix, self._max_norm = kv, optimizer, mode, prefix, max_norm
        self._models = models_of(kv.calls)
        self._overlaps_forward = overlap_forward
        self._settings = set(inspect.signature(type(optimizer).__init__).parameters) - {"params", *_HOW}
        self._step_supports_amp_scaling = True  # a GradScaler calls step(), which refuses it
        self._called: set[nn.Module] = set()
        self._begun = False  # whether a gradient has been computed since the last step, or the last zero_grad
        self._cleared = False
        """Whether all gradients were cleared since the last step. Until then, a backward pass may be of another loss,
        such as that of the generator of a GAN, whose gradients will be cleared and never pushed."""
        self._had_gradients = True
        """Whether there were gradients after the last step, which may since have been cleared."""
        self._overlaps = self._irregular = self._accumulates = self._wrong = False
        self._in_ddp = isinstance(model, DistributedDataParallel)
        names = {parameter: name for name, parameter in model.named_parameters()}
        places = {parameter: place for place, parameter in enumerate(model.parameters())}
        self._trained: dict[nn.Parameter, Trained] = {}
        self._grouped = self._members()
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter not in names:
                raise InvalidArgument(f"the optimizer has a parameter {tuple(parameter.shape)} that model has not")
            # The first layers have the greatest priority, since they are needed first.
            self._trained[parameter] = Trained(prefix + names[parameter], parameter, -places[parameter])
        others = {prefix + name: each for each, name in names.items() if each not in self._trained}
        buffers = {prefix + name: each for name, each in model.named_buffers()}
        self._shared = others.keys() | buffers.keys()
        trained = {each.key: each.parameter for each in self._trained.values()}
        watching.check_tensors({**trained, **others, **buffers}, buffers.keys())
        self._models.check_detached(trained, self._shared, optimizer)
        self._told = self._models.last_told.get(optimizer) or self._now()
        self._models.claim(self, trained, self._shared)
        self._check_all_clip_alike()
        self._begin(wires)
        self._share(others, saved=True)
        self._share(buffers, saved=False)
        self._at_push = self._now()
        self._hooks = list(self._hook(model))

    # ---- at the beginning --------------------------------------------------------------------------------------------

    def _check_all_clip_alike(self) -> None:
        mine = torch.tensor([self._max_norm or 0.0], dtype=torch.float64, device="cpu")
        first = mine.clone()
        self._share({f"{min(each.key for each in self._trained.values())}#max_norm": first}, saved=False)
        if not first.equal(mine):
            raise InvalidArgument(
                f"max_norm is {self._max_norm} here, and {first.item() or None} on the first worker: give all workers "
                "the same"
            )

    def _begin(self, wires: tuple[str, str]) -> None:
        """Makes the keys of the parameters that are trained, and pulls their values."""
        for group, arguments in zip(self.param_groups, self._told, strict=True):
            values = [(self._trained[each].key, each.detach()) for each in group["params"]]
            self._kv.calls.init(values, optimizer_rule(type(self._optimizer), **arguments), self._mode, wires)
        self._kv.pull({each.key: each.parameter.data for each in self._trained.values()})
        if self._max_norm is not None and self._mode.mode == "sync":
            zeros = {f"{each.key}#gradient": torch.zeros_like(each.parameter) for each in self._trained.values()}
            zeros[f"{self._prefix}#used"] = torch.zeros(len(self._trained), device="cpu")
            self._kv.calls.init(list(zeros.items()), assign(), sync(group=self._mode.group), saved=False)

    def _share(self, tensors: Mapping[str, torch.Tensor], saved: bool) -> None:
        """Gives tensors that are not trained the values of the first worker."""
        some = {
            key: watching.without_repeats(each.detach())
            for key, each in tensors.items()
            if each.numel() > 0 and key not in self._models.detached
        }
        if not saved:  # as bytes, so that buffers may have any dtype
            some = {k: e.reshape(-1).view(torch.uint8) if e.is_contiguous() else e for k, e in some.items()}
        self._kv.calls.init(list(some.items()), assign(), asynchronous(), saved=saved)
        for key, tensor in some.items():
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self._kv.pull(key, value)
            if not torch.equal(value, tensor):
                tensor.copy_(value)

    def _hook(self, model: Any) -> Iterator[Any]:
        for each in self._trained.values():
            each.value = Seen(each.parameter)
        yield from self._hook_unfrozen()
        # First of all hooks, since others may read or compute values.
        yield model.register_forward_pre_hook(Hook(self._before_model, self._check_whole), prepend=True)
        self._of_module: dict[nn.Module, list[Trained]] = {}
        # Otherwise all values are there when step() returns.
        for module in model.modules() if self._overlaps_forward else ():
            own = [self._trained[p] for p in module.parameters(recurse=False) if p in self._trained]
            self._of_module[module] = own
            if own:
                yield module.register_forward_pre_hook(Hook(self._before_module, self._check_whole), prepend=True)
            yield module.register_state_dict_pre_hook(Hook(lambda *_: self.pull()))

    def _hook_unfrozen(self) -> Iterator[Any]:
        """Hooks the parameters that have become trainable."""
        for each in self._trained.values():
            if each.parameter.requires_grad and not each.hooked:
                each.hooked = True
                parameter: Any = each.parameter
                yield parameter.register_post_accumulate_grad_hook(partial(self._computed, each))

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def _computed(self, of: Trained, parameter: torch.Tensor) -> None:
        """Called after a backward pass has computed a gradient."""
        of.stale |= of.pulling is not None
        if self._accumulates:  # in no_sync()
            if of.pushed is None:
                of.computed = None
            return
        if not self._begun:
            self._begun, self._at_push = True, self._now()
        of.passes += 1
        if of.passes > 1:
            self._irregular = True
        if self._overlaps and self._cleared and of.pushed is None and not of.stale:
            self._tell()
            self._push(of, parameter.grad)
        if of.passes == 1 or of.pushed is None:
            of.computed = Seen(parameter.grad)

    def _push(self, of: Trained, gradient: Any) -> None:
        value = NOTHING if gradient is None else gradient
        # Not started yet: the backward pass, and forward passes before step(), may still need the old value.
        out = {of.key: of.parameter.data}
        of.pushed = push(self._kv.calls, [(of.key, value)], out, False, 1.0, of.priority, None)

    def _before_module(self, module: nn.Module, _: Any) -> None:
        self._called.add(module)
        self._finish(self._of_module[module])

    def _before_model(self, model: nn.Module, _: Any) -> None:
        """Pulls the parameters of modules that are not called themselves: it is not known when these are needed."""
        self._hooks += self._hook_unfrozen()
        self._in_ddp |= DistributedDataParallel._active_ddp_module is not None
        if not self._cleared and self._had_gradients and all(each.grad is None for each in self._trained):
            self._forget()  # they were cleared by the model's zero_grad, perhaps
        for module, own in self._of_module.items():
            if module not in self._called:
                self._finish(own)

    def _finish(self, parameters: list[Trained]) -> None:
        for each in parameters:
            if each.pulling is None:
                continue
            # Values of servers on other hosts are written to the parameter as they come; others are not before wait().
            intact = each.value.is_still(each.parameter, whole=self._kv.calls.keys[each.key].requested is None)
            self.late += len(each.pulling.wait())
            each.pulling = None
            # As after an optimizer's step: autograd raises if the old value was saved for a backward pass.
            torch.autograd.graph.increment_version(each.parameter)
            if intact:  # otherwise the next step() raises
                each.value = Seen(each.parameter)

    def _check_whole(self) -> None:
        """Raises `InvalidArgument` while values are being pulled: a copy of the model would have old ones."""
        if each := next((each for each in self._trained.values() if each.pulling is not None), None):
            raise InvalidArgument(
                f"the model is copied or saved before the new value of {each.key!r} has come: call pull() of the "
                "attached optimizer first"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls `closure`, if it is given, pushes every gradient that has not been pushed, and ends the step. Returns
        what `closure` has returned.

        A parameter without a gradient counts as zeros in the average of the workers. If it has none on any worker, it
        and the optimizer's states stay as they are. Raises `InvalidArgument`, which names the parameter, if what has
        been pushed is not its gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if hasattr(self, "found_inf"):
            for name in ("found_inf", "grad_scale"):  # which the scaler does not remove after an error
                self.__dict__.pop(name, None)
            raise InvalidArgument(
                "a GradScaler calls step(), and the servers use the average of all workers' gradients, which it cannot "
                "unscale: train with torch.autocast in bfloat16, which needs no scaler, or GradScaler(enabled=False)"
            )
        try:
            self._check_groups()
            for each in self._trained.values():
                each.check()
            self._irregular |= self._begun and self._at_push != self._now()
            self._tell()
        except InvalidArgument as error:
            self._wrong = True
            if self._in_ddp:
                raise InvalidArgument(
                    f"{error} (The model is wrapped in DistributedDataParallel, which changes gradients and values "
                    "itself: call the model that was attached, not the wrapper)"
                ) from None
            raise
        if self._max_norm is not None:
            self._clip(self._max_norm)
        for each in self._trained.values():
            if each.pushed is None:
                self._finish([each])
                self._push(each, each.parameter.grad)
        if self._mode.mode == "ssp":
            self._kv.clock()
        for each in self._trained.values():
            assert each.pushed is not None
            each.pushed.start()
            each.pulling, each.pushed = each.pushed, None
            each.stepped = Seen(each.parameter.grad) if self._overlaps_forward else None
            each.computed, each.passes = None, 0
        self._begun = self._cleared = False
        self._had_gradients = any(each.grad is not None for each in self._trained)
        self._overlaps = not self._irregular and self._max_norm is None
        if not self._overlaps_forward:
            self.pull()
        return loss

    def _members(self) -> list[list[int]]:
        """Which parameters each group has, in no order."""
        return [sorted(map(id, group["params"])) for group in self.param_groups]

    def _check_groups(self) -> None:
        ours, theirs = self.param_groups, self._optimizer.param_groups
        if len(ours) != len(theirs) or any(a is not b for a, b in zip(ours, theirs, strict=False)):
            raise InvalidArgument(
                "the param_groups of the optimizer that was given to attach() have been replaced, by load_state_dict() "
                "perhaps: use load_state_dict() of the attached optimizer"
            )
        if self._members() != self._grouped:
            raise InvalidArgument(f"the parameters of param_groups have changed since attach(): {_ALL_AT_ONCE}")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context push nothing: `step`, or the first backward pass after it, pushes the sum.

        If no backward pass follows, the gradients may be changed before `step`, on this worker alone.
        """
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._forget()

    def _forget(self) -> None:
        """Called when the gradients have been cleared."""
        for each in self._trained.values():
            if each.pushed is None:
                each.computed, each.passes, each.stale = None, 0, False
            else:
                each.dropped = True
        self._begun, self._cleared = any(each.pushed is not None for each in self._trained.values()), True

    # ---- settings ----------------------------------------------------------------------------------------------------

    def _now(self) -> list[dict[str, Any]]:
        """Returns the settings of each parameter group that determine its updates."""
        return [
            {key: _copied(value) for key, value in group.items() if key in self._settings}
            for group in self.param_groups
        ]

    def _tell(self) -> None:
        """Tells the servers settings that have changed, before anything of this step is pushed."""
        now = self._now()
        if now == self._told:
            return
        if pushed := next((each.key for each in self._trained.values() if each.pushed is not None), None):
            raise InvalidArgument(
                f"settings in param_groups have changed after {pushed!r} was pushed once for this step: change them "
                "before backward, unlike in the steps before, or run backward in `with optimizer.no_sync():`"
            )
        for group, before, after in zip(self.param_groups, self._told, now, strict=True):
            changed = {name: value for name, value in after.items() if before[name] != value}
            if changed:
                self._kv.update_arguments([self._trained[each].key for each in group["params"]], **changed)
        self._told = now

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_trained"):
            raise InvalidArgument(f"add_param_group() comes after attach(): {_ALL_AT_ONCE}")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads settings, such as those that schedulers change. Raises `InvalidArgument` if there are states of
        parameters, since these are on the servers: restore a snapshot."""
        if state_dict.get("state"):
            raise InvalidArgument(
                "state_dict has states of parameters, and those of an attached optimizer are on the servers: save them "
                "with kv.snapshot() and load them with kv.restore()"
            )
        super().load_state_dict(state_dict)
        self._optimizer.param_groups[:] = self.param_groups

    # ---- clipping ----------------------------------------------------------------------------------------------------

    def _clip(self, max_norm: float) -> None:
        """Clips the gradients as `clip_grad_norm_` does. In sync, all workers first get the combined gradients."""
        if self._mode.mode == "sync":
            trained = list(self._trained.values())
            used = torch.tensor([float(each.parameter.grad is not None) for each in trained], device="cpu")
            pushes = {
                f"{each.key}#gradient": torch.zeros_like(each.parameter) if grad is None else grad
                for each in trained
                for grad in [each.parameter.grad]
            }
            gradients = {key: torch.empty_like(each) for key, each in pushes.items()}
            marks = f"{self._prefix}#used"
            self._kv.push_pull(pushes | {marks: used}, out=gradients | {marks: used}).wait()
            for each, count, gradient in zip(trained, used.tolist(), gradients.values(), strict=True):
                each.parameter.grad = gradient if count > 0 else None
        found = [each.grad for each in self._trained if each.grad is not None]
        none = torch.zeros((), device="cpu")
        self.total_norm = nn.utils.clip_grad_norm_(list(self._trained), max_norm) if found else none

    # ---- new values --------------------------------------------------------------------------------------------------

    def pull(self) -> None:
        """Waits for pushes and pulls under way. Afterwards the model has the values for its next forward pass."""
        self._finish(list(self._trained.values()))

    def detach(self) -> None:
        """Waits for pushes and pulls under way, and removes the hooks from the model.

        Raises `InvalidArgument` if a backward pass has pushed gradients that no step() followed: the servers apply
        them, and the model does not have the result.
        """
        try:
            self.pull()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._models.release(self, self._shared)
            self._models.last_told[self._optimizer] = self._told
        pushed = next((each.key for each in self._trained.values() if each.pushed is not None), None)
        if pushed and not self._wrong:
            raise InvalidArgument(
                f"{pushed!r} was pushed once by a backward pass that no step() followed, so the servers have a newer "
                "value than the model: call step(), or run such a pass in `with optimizer.no_sync():`"
            )


def attach(
    kv: KeyValue,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    mode: Mode | None = None,
    prefix: str = "",
    push_wire: str = "float32",
    pull_wire: str = "float32",
    max_norm: float | None = None,
    overlap_forward: bool = False,
) -> Attached:
    """Lets the servers update the model's parameters as `optimizer` would, in `mode` (default: `sync()`).

        optimizer = ps.attach(kv, model, optimizer)

    The training loop stays as it is: `zero_grad`, `backward`, `step`. Every worker calls `attach`, and all begin with
    the values of the first one, of frozen parameters and buffers too. The key of a parameter is `prefix` followed by
    its name. `push_wire` and `pull_wire` are as for `KeyValue.init`.

    With `max_norm`, `step` clips the gradients as `torch.nn.utils.clip_grad_norm_` does: in `sync` the average of all
    workers' gradients, which costs another push and pull of each; in other modes those of each worker.

    With `overlap_forward`, `step` does not wait for the new values. Those of a module arrive before its forward pass,
    while the modules before it compute. Every parameter must then be used only in the forward pass of the module that
    owns it: not by another module that runs first, as with tied weights, and not by a term of the loss. Call `pull()`
    before anything else reads values, such as an average of them. Where torch kept an old value for `backward`, it
    raises a RuntimeError; a wrong use that it cannot see is not noticed.

    Raises `InvalidArgument` for an optimizer that needs whole tensors, and if another attached model has the same keys.
    """
    mode = sync() if mode is None else mode
    check_is("kv", kv, KeyValue, "what ps.join() returns")
    check_is("model", model, nn.Module, "a torch.nn.Module")
    check_is("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    check_text("prefix", prefix)
    check_mode(mode)
    if max_norm is not None and not 0 < number(max_norm) < math.inf:
        raise InvalidArgument(f"max_norm is {shown(max_norm)}; it must be a number above 0, or None")
    if max_norm is not None and mode.mode == "sync" and (mode.quorum or not mode.average):
        raise InvalidArgument("max_norm takes sync() that averages, without a quorum: all clip the same gradient")
    check_bool("overlap_forward", overlap_forward)
    return Attached(kv, model, optimizer, mode, prefix, (push_wire, pull_wire), max_norm, overlap_forward)
