"""What `Attached` watches: the parameters that it trains, changes of their tensors, and what a model must not have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ringreduce.errors import InvalidArgument
from ringreduce.parameter_server.client.pending import Pending

_SAMPLE = 256
"""The most elements of a tensor that are compared to notice changes that torch does not count."""


def sample(tensor: torch.Tensor) -> bytes:
    """Returns some elements of a tensor."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: -(-flat.numel() // _SAMPLE) or 1].resolve_conj().resolve_neg().clone()
    return some.view(torch.uint8).numpy().tobytes()


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns what tells whether a tensor was changed: its version, its memory, and some of its elements."""
    if tensor.layout is not torch.strided:
        return (tensor._version, 0, b"")
    return tensor._version, tensor.data_ptr(), sample(tensor)


class Seen:
    """Remembers a tensor, or that there was none, to notice when it is replaced or changed."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self._tensor = None if tensor is None else weakref.ref(tensor)
        self._state = None if tensor is None else _state(tensor)

    def is_still(self, tensor: torch.Tensor | None, whole: bool = True) -> bool:
        """Whether the tensor is the same and unchanged. Without `whole`, its elements are not compared."""
        if tensor is None or self._tensor is None or self._state is None:
            return tensor is None and self._tensor is None
        now = _state(tensor)
        return self._tensor() is tensor and (now == self._state if whole else now[:2] == self._state[:2])


class Hook:
    """A hook of a module. A copy of it does nothing, so a copy of the model is a model of its own."""

    def __init__(self, call: Callable[..., None] = lambda *_: None, copied: Callable[[], None] | None = None) -> None:
        self._call, self._copied = call, copied

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        if self._copied is not None:
            self._copied()
        return Hook, ()


@dataclass(eq=False, slots=True)
class Trained:
    """A parameter of the optimizer."""

    key: str
    parameter: nn.Parameter
    priority: int
    hooked: bool = False
    passes: int = 0
    """The number of backward passes since the last step, or the last zero_grad, that have computed its gradient."""
    dropped: bool = False  # whether zero_grad has cleared its gradient after it was pushed
    computed: Seen | None = None  # its gradient after the last of them. None if the caller may change it (`no_sync`).
    stepped: Seen | None = None  # its gradient at the last step. Only with overlap_forward.
    pushed: Pending | None = None  # the push that belongs to the step under way
    pulling: Pending | None = None
    """The push of the last step, until its new value is there. Outlives `step` only with overlap_forward."""
    stale: bool = False  # whether its gradient was computed from the old value, since the new one had not come yet
    value: Seen = field(default_factory=lambda: Seen(None))  # the parameter when its latest value had come

    def check(self) -> None:
        """Raises `InvalidArgument` if the gradient is not what torch's optimizer would use, or was pushed otherwise."""
        if self.pulling is None and not self.value.is_still(self.parameter):
            raise InvalidArgument(
                f"{self.key!r} was changed in place since the last step, or got other memory, and the servers do not "
                "know of it: change values by a rule of your own on the servers, and load them before attach() or by "
                "kv.restore()"
            )
        begun = f"{self.key!r} was pushed {'once' if self.pushed is not None else '0 times'} since the last step"
        gradient = self.parameter.grad
        if (
            self.passes == 0
            and self.pulling is not None
            and not (self.stepped is not None and self.stepped.is_still(gradient))
        ):
            self.stale |= gradient is not None and bool(gradient.any())  # zeros are from zero_grad(set_to_none=False)
        if self.stale:
            raise InvalidArgument(
                f"{begun}, and its gradient was computed before its new value had come, since its module was not "
                "called: attach() without overlap_forward=True, or call pull() of the attached optimizer after step()"
            )
        if self.dropped:
            raise InvalidArgument(
                f"{begun}, by a backward pass whose gradients zero_grad() then cleared: run backward passes that no "
                "step() may follow in `with optimizer.no_sync():`"
            )
        if self.pushed is not None and self.passes > 1:
            raise InvalidArgument(
                f"{begun}, and {self.passes} backward passes have computed its gradient, unlike in the steps before: "
                "let all passes but the last run in `with optimizer.no_sync():`"
            )
        changed = self.computed is not None and not self.computed.is_still(gradient)
        if changed and (self.pushed is not None or gradient is not None):
            raise InvalidArgument(
                f"the gradient of {self.key!r} was changed after backward, by clip_grad_norm_ or a GradScaler perhaps, "
                "and may have been pushed before: torch.nn.utils.get_total_norm() only reads gradients; to clip the "
                "average of all workers, give attach() max_norm=; to change this worker's gradients before they are "
                "pushed, run backward in `with optimizer.no_sync():`"
            )


def check_tensors(tensors: Mapping[str, torch.Tensor], buffers: Collection[str]) -> None:
    """Raises `InvalidArgument` if a tensor is sparse, or if two parameters have the same memory."""
    owners: dict[int, str] = {}
    for key, each in tensors.items():
        if each.layout is not torch.strided:
            raise InvalidArgument(f"{key!r} has the layout {each.layout}; attach() takes dense tensors only")
        if key in buffers or each.numel() == 0:
            continue
        if (other := owners.setdefault(each.data_ptr(), key)) != key:
            raise InvalidArgument(
                f"{key!r} and {other!r} are two parameters with the same memory: to tie weights, give both modules "
                "the same nn.Parameter"
            )


def check_fresh(optimizer: torch.optim.Optimizer) -> None:
    """Raises `InvalidArgument` if the optimizer has made steps, since the servers would begin without its states."""
    for state in optimizer.state.values():
        if state["step"] > 0 if "step" in state else any(each is not None for each in state.values()):
            raise InvalidArgument(
                f"optimizer, {type(optimizer).__name__}, has states, of step() or load_state_dict(), and the servers "
                "begin without them: attach() a new optimizer, or call optimizer.state.clear() to train without them; "
                "to go on with the states of a snapshot, use kv.restore()"
            )


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of an expanded tensor that has memory of its own."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
