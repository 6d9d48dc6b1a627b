"""What is known of a machine, and the file that keeps it.

One JSON file per machine, by default `$XDG_CACHE_HOME/ringreduce/<digest of the identity>.<format>.json`.  It is
replaced as a whole or not at all, and a file of another user is not read, since what runs would be theirs to say.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ringreduce.config import cache_folder
from ringreduce.plan import BUILDERS, Machine
from ringreduce.tuning.machine import Identity

FORMAT = 2


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


def default_path(identity: Identity) -> Path:
    """Where the file of a machine is, if nobody said otherwise.  Raises OSError if there is no place for it."""
    return cache_folder() / f"{identity.digest()}.{FORMAT}.json"


def load(path: Path) -> Tuning:
    """Raises FileNotFoundError, another OSError if it may not be read, ValueError if it is not what `save` writes."""
    with open(path, encoding="utf-8", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        owner = status.st_uid
        if owner != os.geteuid():
            raise PermissionError(f"it belongs to user {owner}; this process runs as user {os.geteuid()}")
        text = file.read()
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}; this version reads {FORMAT}")
        identity = document["identity"]
        return Tuning(
            identity=Identity(**{**identity, "cores": tuple(identity["cores"]), "caches": tuple(identity["caches"])}),
            machine=Machine.load(document["machine"]),
            probed=str(document["probed"]),
            measured={int(ranks): _measured(entry) for ranks, entry in document["measured"].items()},
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a tuning file: {error!r}") from None


def save(tuning: Tuning, path: Path, replace: bool) -> None:
    """Writes the file as a whole; without `replace`, one that is there already stays.  Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(tuning)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _open_at_once(path: str, flags: int) -> int:
    """Does not wait for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


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
