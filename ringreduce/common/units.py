"""Numbers with units, and lists of numbers, as text: read and written."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Literal

from ringreduce.common.failures import InvalidArgument

UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}{end}": 1024**power for power, prefix in enumerate("KMGT", 1) for end in ("", "IB")},
}
SIZE_HELP = "160MB (1e6 bytes each), 64MiB or 64M (2^20), or bytes"


def parse_bytes(text: str) -> int:
    """ "160MB" -> 160000000, "64MiB" and "64M" -> 67108864: K, M, G and T alone are powers of 1024.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"(\d{1,300}(?:\.\d*)?)\s*([a-z]*)", text.strip(), re.IGNORECASE | re.ASCII)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no size; give {SIZE_HELP}")
    return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * int(unit)


def bytes_text(count: float, base: Literal[1000, 1024] = 1000) -> str:
    """Bytes, with units of powers of 1000, or of 1024 as knobs and tuning have them."""
    for power, name in ((3, "GB"), (2, "MB"), (1, "KB")):
        if count >= base**power:
            return f"{count / base**power:.4g} {name}"
    return f"{count:.4g} B"


def address(text: str) -> tuple[str, int]:
    """ "node0:29400" -> ("node0", 29400), "[::1]:29400" -> ("::1", 29400). Raises ValueError for anything else."""
    match = re.fullmatch(r"(?:\[([^\[\]\s]+)\]|([^:\[\]/\s]+)):(\d{1,5})", text, re.ASCII)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"{text!r} is no address; give HOST:PORT, such as node0:29400 or [::1]:29400")
    return match[1] or match[2], int(match[3])


def time_text(seconds: float) -> str:
    """Seconds, in the unit that suits them."""
    for unit, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit * 0.9995:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns"


def numbers(text: str) -> set[int]:
    """ "0-2,8" -> {0, 1, 2, 8}, as the kernel lists cores. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def duration(name: str, value: timedelta | float, positive: bool = False) -> timedelta:
    """A time that users may give in seconds. Raises `InvalidArgument` if it is negative, or 0 where that is no time."""
    try:
        found = value if isinstance(value, timedelta) else timedelta(seconds=value)
        if found < timedelta() or (positive and not found):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        least = "above 0" if positive else "not negative"
        raise InvalidArgument(f"{name} is {value!r}; it must be a timedelta or seconds, {least}") from None
    return found
