"""What is known of a machine, and the file that keeps it.

One JSON file per machine, by default `$XDG_CACHE_HOME/ringreduce/<digest of the identity>.<format>.json`.  It is
replaced as a whole or not at all, and a file of another user is not read, since what runs would be theirs to say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ringreduce.common.files import cache_folder, read_own, write_file
from ringreduce.plan import BUILDERS
from ringreduce.plan.cost import Machine
from ringreduce.tuning.machine import Identity

FORMAT = 4


@dataclass(frozen=True)
class Cell:
    """What `ringreduce tune` found for one collective and block size: the best, and what the model would have run."""

    bytes: int
    algorithm: str
    slice_bytes: int
    seconds: float
    model_algorithm: str
    model_slice_bytes: int
    model_seconds: float


@dataclass(frozen=True)
class Measured:
    """The cells of one rank count, ascending, per collective."""

    date: str
    cells: Mapping[str, tuple[Cell, ...]]


@dataclass(frozen=True)
class Tuning:
    """All that is known of a machine."""

    identity: Identity
    machine: Machine
    probed: str
    """When, as "2026-11-21 03:17 UTC"."""
    measured: Mapping[int, Measured] = field(default_factory=dict)
    """By rank count."""
    decided: Mapping[str, str] = field(default_factory=dict)
    """What has followed from the above for groups (`decision.decide`), so that the next one need not work it out."""


def default_path(identity: Identity) -> Path:
    """Where the file of a machine is, if nobody said otherwise.  Raises OSError if there is no place for it."""
    return cache_folder() / f"{identity.digest()}.{FORMAT}.json"


def tuned_otherwise(identity: Identity) -> list[Tuning]:
    """What has been measured on this machine by jobs that could use another number of cores, as far as it is kept."""
    found = []
    for path in sorted(cache_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            known = load(path)
            same = dataclasses.replace(known.identity, cores=identity.cores, sockets=identity.sockets) == identity
            found += [known] if same and known.measured and known.identity != identity else []
    return found


def load(path: Path) -> Tuning:
    """Raises FileNotFoundError, another OSError if it may not be read, ValueError if it is not what `save` writes."""
    text = read_own(path).decode()
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}; this version reads {FORMAT}")
        identity = document["identity"]
        return Tuning(
            identity=Identity(**{**identity, "caches": tuple(identity["caches"])}),
            machine=Machine.load(document["machine"]),
            probed=str(document["probed"]),
            measured={int(ranks): _measured(entry) for ranks, entry in document["measured"].items()},
            decided={str(group): str(rules) for group, rules in document.get("decided", {}).items()},
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a tuning file: {error!r}") from None


def save(tuning: Tuning, path: Path, replace: bool) -> None:
    """Writes the file as a whole; without `replace`, one that is there already stays.  Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = json.dumps({"format": FORMAT, **asdict(tuning)}, indent=1)
    write_file(path, content.encode(), private=True, replace=replace)


def _measured(entry: Any) -> Measured:
    cells = {collective: tuple(_cell(collective, cell) for cell in row) for collective, row in entry["cells"].items()}
    for collective, row in cells.items():
        sizes = [cell.bytes for cell in row]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"the blocks of {collective} are {sizes}; expected them ascending")
    return Measured(str(entry["date"]), cells)


def _cell(collective: str, values: Any) -> Cell:
    cell = Cell(**values)
    if cell.algorithm not in BUILDERS[collective]:
        raise ValueError(f"{collective} has no algorithm {cell.algorithm!r}")
    for name, least, most in (("bytes", 1, 2**50), ("slice_bytes", 64, 2**30), ("model_slice_bytes", 64, 2**30)):
        number = getattr(cell, name)
        if type(number) is not int or not (least <= number <= most or (number == 0 and least == 64)):
            raise ValueError(f"{name} is {number!r}; expected a number of bytes")
    for name in ("seconds", "model_seconds"):
        seconds = getattr(cell, name)
        if type(seconds) not in (float, int) or not 0 < seconds < math.inf:
            raise ValueError(f"{name} is {seconds!r}; expected a positive number")
    return cell
