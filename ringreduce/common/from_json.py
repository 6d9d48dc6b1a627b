"""JSON of users as dataclasses, by the types of their fields, with errors that name the value at fault."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

_CALLED: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}

_hints = cache(get_type_hints)


def parsed(text: str, where: str, error: type[Exception]) -> Any:
    """What a JSON text means. Raises `error` with line and column where it means nothing."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as wrong:
        raise error(f"{where}: line {wrong.lineno}, column {wrong.colno}: not JSON: {wrong.msg}") from None
    except (RecursionError, ValueError):  # Python reads no integers of thousands of digits
        raise error(f"{where}: not JSON: it is nested too deeply, or a number in it has too many digits") from None


def load(kind: Any, value: Any, where: str, error: type[Exception], whole: bool = False) -> Any:
    """`value`, from `parsed`, as a `kind`: a dataclass, an Enum, `tuple[T, ...]`, `T | None`, or a plain type.

    Fields with defaults may be missing, unless the value must be `whole`. Raises `error` with the path to what is
    wrong, which begins with `where`.
    """
    if is_dataclass(kind):
        return _load_fields(kind, value, where, error, whole)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise error(f"{where} is {value!r:.60}; expected a list")
        (of_each, _) = get_args(kind)
        return tuple(load(of_each, each, f"{where}[{at}]", error, whole) for at, each in enumerate(value))
    if type(None) in get_args(kind):
        return None if value is None else load(get_args(kind)[0], value, where, error, whole)
    if issubclass(kind, Enum):
        known = {each.value: each for each in kind}
        if not isinstance(value, str) or value not in known:
            raise error(f"{where} is {value!r:.60}; expected one of {', '.join(known)}")
        return known[value]
    fits = isinstance(value, int | float if kind is float else kind)
    if not fits or isinstance(value, bool) != (kind is bool):
        raise error(f"{where} is {value!r:.60}; expected {_CALLED[kind]}")
    return value


def _load_fields(kind: Any, value: Any, where: str, error: type[Exception], whole: bool) -> Any:
    known = {field.name: field for field in fields(kind)}
    expected = f"expected an object with the keys {', '.join(known)}"
    if not isinstance(value, dict):
        raise error(f"{where} is {value!r:.60}; {expected}")
    for name, field in known.items():
        if name not in value and (whole or field.default is MISSING):
            raise error(f"{where}.{name} is missing; {expected}")
    for name in value:
        if name not in known:
            raise error(f"{where}.{name} is unknown (value {value[name]!r:.60}); remove it: {expected}")
    hints = _hints(kind)
    return kind(**{name: load(hints[name], each, f"{where}.{name}", error, whole) for name, each in value.items()})
