"""Update rules, by which a server combines a value with pushes: `assign`, `reduce`, `optimizer` and `function`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch

from ringreduce.common.checks import check_text, number, shown
from ringreduce.errors import InvalidArgument

REDUCTIONS = ("sum", "product", "min", "max", "band", "bor", "bxor", "logaddexp")
ELEMENT_WISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
UNSUITABLE = {
    "Adafactor": "its second moments are sums over rows and columns of whole tensors",
    "LBFGS": "it needs all parameters at once, and calls the model again",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients; a table's rows (ps.Embedding) take torch.optim.Adam's update when pushed",
}


@dataclass(frozen=True)
class UpdateRule:
    """An update rule, made by `assign`, `reduce`, `rowwise_adagrad`, `optimizer` or `function`. Contains only strings
    and numbers, which are sent to the servers."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    python: dict[str, Any] = field(default_factory=dict)
    """What the server calls in Python if the rule does not run in C++: the name of a class of torch.optim or of a
    function, and its arguments."""

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "fields": self.fields, "python": self.python}


def assign() -> UpdateRule:
    """The value becomes what was pushed. In `sync` that is the average or the sum of the workers' pushes."""
    return UpdateRule("assign")


def reduce(op: str = "sum") -> UpdateRule:
    """The value becomes `value op push`. `op` is 'sum', 'product', 'min', 'max', 'band', 'bor', 'bxor' or 'logaddexp'.
    'band', 'bor' and 'bxor' are for integers and bool; 'logaddexp', log(exp(value) + exp(push)), is for floating point.
    Raises `InvalidArgument`."""
    if not isinstance(op, str) or op not in REDUCTIONS:
        raise InvalidArgument(f"op is {shown(op)}; it must be one of {', '.join(REDUCTIONS)}")
    return UpdateRule("reduce", {"op": op})


def rowwise_adagrad(lr: float = 0.01, eps: float = 1e-8) -> UpdateRule:
    """Adagrad for the rows of a table (`Embedding`), with one sum per row, of the mean squares of its gradients.

    The state of a row is one number, instead of one for each element. Raises `InvalidArgument` if a number is negative.
    """
    for name, value in (("lr", lr), ("eps", eps)):
        if not 0 <= number(value) < math.inf:
            raise InvalidArgument(f"{name} is {shown(value)}; it must be a number, 0 or more, that a float can hold")
    return UpdateRule("rowwise_adagrad", {"lr": float(lr), "eps": float(eps)})


def _is_sent(value: Any) -> bool:
    """Whether a value can be an argument that is sent to the servers: a number, or None."""
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 63)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and math.isfinite(number(value))


def _as_sent(value: Any) -> Any:
    """Real numbers of other types than Python's own, such as NumPy's, as these."""
    if isinstance(value, tuple):
        return tuple(map(_as_sent, value))
    if isinstance(value, (int, float)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def function(name: str, **arguments: Any) -> UpdateRule:
    """A Python function that every founder has given to `join(functions={name: f})` under this name.

    A server calls `f(value, push, state, info, **arguments)` for every update of every block. `value` is a
    1-dimensional tensor with the block's elements, to be changed in place, and `push` is a tensor of the same shape
    with the pushes combined. `state` is a dictionary of the block, which is kept between updates. `info` is an `Info`.
    `arguments` must be numbers, strings or None; otherwise raises `InvalidArgument`.
    """
    check_text("name", name)
    arguments = {key: _as_sent(value) for key, value in arguments.items()}
    for key, value in arguments.items():
        if not isinstance(value, str) and not _is_sent(value):
            raise InvalidArgument(
                f"{key} is {shown(value)}; arguments of a function must be strings, None, or numbers of 64 bits"
            )
    return UpdateRule("python", python={"function": name, "arguments": arguments})


def optimizer(kind: type[torch.optim.Optimizer], **arguments: Any) -> UpdateRule:
    """A step of an element-wise optimizer of torch.optim, with the push as gradient, such as
    `optimizer(torch.optim.AdamW, lr=1e-3)`. `arguments` are those of the optimizer.

    On x86-64, SGD, Adam, AdamW, Adagrad and RMSprop of float32 and float64 values run in C++, and give the bits of
    torch's default path on CPUs. Other optimizers and dtypes run in torch, in the server's process. Raises
    `InvalidArgument` for an optimizer that needs more than one block at a time, and for wrong arguments.
    """
    name = getattr(kind, "__name__", shown(kind))
    if name in UNSUITABLE and getattr(torch.optim, name, None) is kind:
        raise InvalidArgument(f"torch.optim.{name} cannot update blocks of a tensor: {UNSUITABLE[name]}")
    if name not in ELEMENT_WISE or getattr(torch.optim, name, None) is not kind:
        raise InvalidArgument(
            f"kind is {name}; it must be one of torch.optim: {', '.join(ELEMENT_WISE)}; for others use ps.function()"
        )
    arguments = {key: _as_sent(value) for key, value in arguments.items()}
    for key, value in arguments.items():
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(map(_is_sent, numbers)):
            raise InvalidArgument(
                f"{key} is {shown(value)}; an optimizer's arguments must be Python numbers, of at most 64 bits"
            )
    python = {"optimizer": name, "arguments": arguments}
    try:
        fields = _native(name, kind([torch.zeros(1, device="cpu")], **arguments).defaults)
        if fields is None:
            _try_step(name, arguments, torch.get_default_dtype())
    except Exception as error:  # which one depends on the optimizer
        raise InvalidArgument(f"torch.optim.{name} does not take these arguments: {error}") from None
    return UpdateRule("python", python=python) if fields is None else UpdateRule(*fields, python)


CHANGEABLE = ("lr", "momentum", "dampening", "weight_decay", "beta1", "beta2", "eps", "lr_decay", "alpha")
"""The numbers of a rule that may change between updates, in the order of csrc/parameter_server/block/rules.h."""


def numbers_of(rule: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a rule, from `as_json`, that may change. `betas` are two of them."""
    found = rule["fields"] if rule["kind"] != "python" else _flat(rule["python"].get("arguments", {}))
    return {name: float(found[name]) for name in CHANGEABLE if name in found and "function" not in rule["python"]}


def _flat(arguments: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = arguments.get("betas", (None, None))
    pair = {} if beta1 is None else {"beta1": beta1, "beta2": beta2}
    return {name: value for name, value in arguments.items() if name != "betas"} | pair


def _folded(numbers: dict[str, Any]) -> dict[str, Any]:
    pair = {"betas": (numbers["beta1"], numbers["beta2"])} if "beta1" in numbers else {}
    return {name: value for name, value in numbers.items() if name not in ("beta1", "beta2")} | pair


def with_numbers(rule: dict[str, Any], numbers: dict[str, float]) -> dict[str, Any]:
    """Returns a rule, from `as_json`, with other numbers."""
    changed = {name: value for name, value in numbers.items() if numbers_of(rule).get(name, value) != value}
    fields = rule["fields"] | {name: value for name, value in changed.items() if name in rule["fields"]}
    python = rule["python"]
    if "arguments" in python and changed:
        pair = ("beta1", "beta2")
        arguments = python["arguments"] | {name: value for name, value in changed.items() if name not in pair}
        if changed.keys() & set(pair):
            arguments["betas"] = [numbers[name] for name in pair]
        python = python | {"arguments": arguments}
    return {"kind": rule["kind"], "fields": fields, "python": python}


def changed_numbers(key: str, rule: dict[str, Any], arguments: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers to change in a rule, from `as_json`, for `KeyValue.update_arguments`. Raises
    `InvalidArgument` if the rule has no such argument, does not take the value, or would need other states."""
    if not arguments:
        raise InvalidArgument(f"no arguments to change are given for {key!r}: name some, such as lr=0.01")
    known = numbers_of(rule)
    names = sorted({"betas" if each.startswith("beta") else each for each in known})
    for name, value in arguments.items():
        if name not in names:
            can = f"{', '.join(names)} can" if names else "none of its arguments can"
            raise InvalidArgument(f"{name} of {key!r} cannot be changed; of this rule, {can}")
        pair = isinstance(value, (tuple, list)) and len(value) == 2
        if pair is not (name == "betas") or not all(map(_is_number, value if pair else (value,))):
            kind = "a pair of numbers" if name == "betas" else "a number"
            raise InvalidArgument(f"{name} of {key!r} is {shown(value)}; it must be {kind} that a float can hold")
    numbers = {name: float(value) for name, value in _flat(arguments).items()}
    if (known.get("momentum", 0) == 0) != (numbers.get("momentum", known.get("momentum", 0)) == 0):
        raise InvalidArgument(
            f"momentum of {key!r} cannot become {numbers['momentum']}: it decides what a server keeps"
        )
    if "optimizer" in rule["python"]:
        all_of_them = _with_tuples(rule["python"]["arguments"] | arguments)
        optimizer(getattr(torch.optim, rule["python"]["optimizer"]), **all_of_them)
    elif rule["kind"] == "rowwise_adagrad":
        rowwise_adagrad(**(known | numbers))
    return numbers


def same_but_numbers(rule: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rules, from `as_json`, differ only in numbers that may change."""
    if (rule["fields"].get("momentum", 0) == 0) != (other["fields"].get("momentum", 0) == 0):
        return False
    return with_numbers(other, numbers_of(rule)) == with_numbers(rule, numbers_of(rule))


def check_dtype(key: str, dtype: torch.dtype, rule: UpdateRule) -> None:
    """Raises `InvalidArgument` if the rule is an optimizer that cannot update tensors of this dtype."""
    if "optimizer" not in rule.python or dtype in (torch.float32, torch.float64):
        return
    name = rule.python["optimizer"]
    try:
        _try_step(name, rule.python["arguments"], dtype)
    except Exception as error:
        raise InvalidArgument(
            f"{key!r} is {dtype}, which torch.optim.{name} cannot update: pass float32, or use another rule ({error})"
        ) from None


def _try_step(name: str, arguments: dict[str, Any], dtype: torch.dtype) -> None:
    """Makes one step of an optimizer, which raises what torch raises if it cannot."""
    with torch.device("cpu"):  # the optimizer makes tensors, too
        one = torch.ones(1, device="cpu").to(dtype)
        by_optimizer(name, arguments)(one, one.clone(), 1, (), ())


def _native(name: str, d: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Returns kind and fields of the C++ rule that does the same; None if there is none."""
    if any(d.get(flag) for flag in ("amsgrad", "capturable", "differentiable", "foreach", "fused")):
        return None
    common = {key: d[key] for key in ("lr", "weight_decay", "maximize") if key in d}
    if name == "SGD":
        return "sgd", common | {key: d[key] for key in ("momentum", "dampening", "nesterov")}
    if name in ("Adam", "AdamW"):
        own = {"eps": d["eps"], "decoupled": bool(d["decoupled_weight_decay"])}
        return "adam", common | dict(zip(("beta1", "beta2"), d["betas"], strict=True)) | own
    if name == "Adagrad":
        return "adagrad", common | {key: d[key] for key in ("lr_decay", "initial_accumulator_value", "eps")}
    if name == "RMSprop":
        return "rmsprop", common | {key: d[key] for key in ("momentum", "alpha", "eps", "centered")}
    return None


def check_for_rows(rule: UpdateRule) -> None:
    """Raises `InvalidArgument` for a rule that cannot update rows of a table."""
    fields, allowed = rule.fields, ("assign", "reduce", "sgd", "adam", "adagrad", "rowwise_adagrad")
    name = rule.python.get("optimizer") or rule.python.get("function") or rule.kind
    if rule.kind not in allowed or (rule.kind == "reduce" and fields["op"] != "sum"):
        raise InvalidArgument(
            f"update is {name!r}; rows of a table take ps.rowwise_adagrad(), ps.assign(), ps.reduce('sum'), or "
            "ps.optimizer() of SGD, Adagrad, Adam or AdamW"
        )
    if fields.get("momentum") or fields.get("lr_decay"):
        raise InvalidArgument(
            f"{name} has momentum or lr_decay, which change with every step; a table's row is only updated when it is "
            "pushed to"
        )


Function = Callable[..., None]


def check_functions(functions: Any) -> None:
    """Checks the argument `functions` of `join` and `serve`."""
    if functions is None:
        return
    if not isinstance(functions, dict):
        raise InvalidArgument(f"functions is {shown(functions)}; it must be a dictionary of functions by name")
    for name, call in functions.items():
        check_text("a name in functions", name)
        if not callable(call):
            raise InvalidArgument(f"functions[{name!r:.60}] is {shown(call)}; it must be a function")


Update = Callable[[torch.Tensor, torch.Tensor, int, Sequence[Any], Sequence[float]], None]
"""Updates a block: its value, the push, the version, the pushes' `Push` fields, and the rule's CHANGEABLE numbers."""


def _with_tuples(arguments: dict[str, Any]) -> dict[str, Any]:
    """JSON has made lists of tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}


def by_optimizer(name: str, arguments: dict[str, Any], changeable: Collection[str] = ()) -> Update:
    made: list[Any] = []

    def update(
        value: torch.Tensor, push: torch.Tensor, version: int, pushes: Sequence[Any], numbers: Sequence[float]
    ) -> None:
        if not made:
            parameter = torch.nn.Parameter(value)
            made.extend((parameter, getattr(torch.optim, name)([parameter], **_with_tuples(arguments))))
        parameter, optimizer = made
        now = dict(zip(CHANGEABLE, numbers, strict=False))
        optimizer.param_groups[0] |= _folded({each: now[each] for each in changeable})
        parameter.data = value  # the block's two buffers alternate
        parameter.grad = push
        optimizer.step()
        parameter.grad = None

    return update
