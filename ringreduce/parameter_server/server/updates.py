"""Update rules as a server carries them out: in C++ where that has the rule, and otherwise in Python."""

from __future__ import annotations

import ctypes
import inspect
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringreduce.errors import InvalidArgument
from ringreduce.parameter_server.updates import Function, Update, by_optimizer, numbers_of


@dataclass(frozen=True)
class Push:
    """A push in an update, as an update function sees it."""

    worker: int
    clock: int
    """The worker's clock when it pushed."""
    pulled: int
    """The version that the worker had pulled before it pushed. The update makes version `Info.version`."""
    weight: float


@dataclass(frozen=True)
class Info:
    """What an update function is told about an update of a block."""

    key: str
    begin: int
    """The block's first element in the flattened tensor."""
    version: int
    """The version that this update makes."""
    pushes: list[Push]
    """The pushes of this update, ordered by worker. In `asynchronous` and `ssp` there is one."""

    @property
    def worker(self) -> int:
        return self.pushes[0].worker

    @property
    def clock(self) -> int:
        return self.pushes[0].clock

    @property
    def pulled(self) -> int:
        return self.pushes[0].pulled


def rule_for(rule: dict[str, Any], dtype: str, average: bool) -> dict[str, Any]:
    """Converts a rule from `as_json` to the form that C++ takes, for this process's torch and processor."""
    if "optimizer" not in rule["python"] or rule["kind"] == "python":
        return {"kind": rule["kind"], "average": average, **rule["fields"], **numbers_of(rule)}
    if dtype not in ("float32", "float64") or platform.machine() != "x86_64":
        return {"kind": "python", "average": average} | numbers_of(rule)
    return rule_for_rows(rule, average)


def rule_for_rows(rule: dict[str, Any], average: bool) -> dict[str, Any]:
    """Like `rule_for`, for a table, whose rows are always updated in C++."""
    fused = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return {"kind": rule["kind"], "average": average, **rule["fields"], "fused": fused}


def check_call(name: str, call: Function, arguments: dict[str, Any]) -> None:
    """Raises `InvalidArgument` if an update function does not take what a server calls it with."""
    try:
        inspect.signature(call).bind("value", "push", "state", "info", **arguments)
    except ValueError:
        pass  # a function in C, which does not tell
    except TypeError as error:
        named = "".join(f", {each}=" for each in arguments)
        raise InvalidArgument(
            f"function {name!r} of join() does not take (value, push, state, info{named}), as update= needs: {error}"
        ) from None


class PythonUpdates:
    """Computes the updates of a server that do not run in C++. Only the server's thread calls it."""

    def __init__(self, functions: dict[str, Function]) -> None:
        self.functions = functions
        self._blocks: dict[int, Update] = {}
        self._shapes: dict[int, tuple[torch.dtype, int]] = {}

    def add(self, block: int, key: str, begin: int, count: int, dtype: str, rule: dict[str, Any]) -> None:
        self._shapes[block] = getattr(torch, dtype), count
        python = rule["python"]
        if "function" in python:
            self._blocks[block] = self._by_function(key, begin, python["function"], python["arguments"])
        else:
            self._blocks[block] = by_optimizer(python["optimizer"], python["arguments"], numbers_of(rule))

    def __call__(self, block: int, version: int, value: int, out: int, gradient: int, *of_pushes: Any) -> None:
        """Called by C++. `of_pushes` has the fields of all pushes, and the rule's numbers."""
        dtype, count = self._shapes[block]
        tensors = _tensor_at(out, dtype, count), _tensor_at(gradient, dtype, count)
        self._blocks[block](*tensors, version, *of_pushes)

    def _by_function(self, key: str, begin: int, name: str, arguments: dict[str, Any]) -> Update:
        call, state = self.functions[name], dict[str, Any]()

        def update(value: torch.Tensor, push: torch.Tensor, version: int, pushes: Sequence[Any], _: Any) -> None:
            mine = value.clone()  # the function may keep its tensors for longer than this memory lasts
            call(mine, push.clone(), state, Info(key, begin, version, [Push(*each) for each in pushes]), **arguments)
            value.copy_(mine)

        return update


def _tensor_at(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)
