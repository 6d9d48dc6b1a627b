"""Checks of arguments that users give, and how errors show values."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from ringreduce.common.failures import InvalidArgument

WHOLE, _REAL = (int, Integral), (int, float, Real)
"""Types of numbers. The usual types come first, which makes `isinstance` fast."""


def shown(value: Any) -> str:
    """Returns a value as errors show it."""
    try:
        return f"{value!r:.60}"
    except Exception:  # its repr raises, as that of a whole number with more than 4300 digits does
        return f"of type {type(value).__name__}"


def number(value: Any) -> float:
    """Returns a real number as a float, which is infinite if the number is too large. Returns nan for other values."""
    try:
        return float(value) if isinstance(value, _REAL) else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def whole(name: str, value: Any, least: int, what: str, most: int = 2**63 - 1) -> int:
    """Returns a whole number from `least` to `most`. `what` says what it must be."""
    if isinstance(value, bool) or not isinstance(value, WHOLE) or not least <= int(value) <= most:
        raise InvalidArgument(f"{name} is {shown(value)}; it must be {what}")
    return int(value)


def is_text(text: str) -> bool:
    """Whether a string can be encoded. One with lone surrogates cannot, so no store takes it."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not is_text(text):
        raise InvalidArgument(f"{name} is {shown(text)}; it must be a string")


def check_is(name: str, value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} is {shown(value)}; it must be {what}")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} is {shown(value)}; it must be True or False")
