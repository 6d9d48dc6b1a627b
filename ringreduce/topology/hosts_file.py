"""What was measured between hosts, in a file: `ringreduce doctor --peers --write FILE` writes it, and groups read what
RINGREDUCE_HOSTS_FILE names.

JSON: `hosts` are labels (RINGREDUCE_HOST_ID, or else hostnames); row i of `latency` (seconds, one way) and `bandwidth`
(bytes per second) is from host i to each. A bandwidth of 0: the two cannot connect. The diagonals mean nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ringreduce.common.files import content_of, json_of, write_file

FORMAT = 1

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class HostsFile:
    """Its content."""

    date: str
    """When it was measured, as "2026-11-21 03:17 UTC"."""
    hosts: tuple[str, ...]
    latency: Matrix
    bandwidth: Matrix

    def of(self, labels: Sequence[str]) -> tuple[Matrix, Matrix]:
        """Latency and bandwidth between the hosts with these labels, in their order. Raises ValueError where one is not
        in the file, or two have the same."""
        for label in labels:
            if label not in self.hosts:
                raise ValueError(f"it does not have host {label!r}, only {', '.join(map(repr, self.hosts))}")
            if labels.count(label) > 1:
                raise ValueError(_SAME.format(label))
        places = [self.hosts.index(label) for label in labels]

        def part(matrix: Matrix) -> Matrix:
            return tuple(tuple(matrix[row][column] for column in places) for row in places)

        return part(self.latency), part(self.bandwidth)


_SAME = "several hosts of the job are called {!r}; give each a RINGREDUCE_HOST_ID of its own"


def load(path: str) -> HostsFile:
    """Raises OSError if it cannot be read, ValueError if it is not what `save` writes."""
    content = content_of(path)
    try:
        document = json_of(content)
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r}; this version reads {FORMAT}")
        hosts = document["hosts"]
        if not hosts or not all(isinstance(host, str) for host in hosts) or len(set(hosts)) < len(hosts):
            raise ValueError(f"its hosts are {hosts!r}; expected different names")
        size = len(hosts)
        latency, bandwidth = (_matrix(name, document[name], size) for name in ("latency", "bandwidth"))
        return HostsFile(str(document["date"]), tuple(hosts), latency, bandwidth)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is not what `ringreduce doctor --peers --write` writes: {error!r}") from None


def save(measured: HostsFile, path: str) -> None:
    """Writes the file as a whole. Raises OSError, or ValueError if two hosts have the same label."""
    for label in measured.hosts:
        if measured.hosts.count(label) > 1:
            raise ValueError(_SAME.format(label))
    write_file(path, json.dumps({"format": FORMAT, **asdict(measured)}, indent=1).encode())


def _matrix(name: str, rows: Any, size: int) -> Matrix:
    if len(rows) != size or any(len(row) != size for row in rows):
        raise ValueError(f"{name} does not have a row and a column for each of its {size} hosts")
    for at, row in enumerate(rows):
        for to, value in enumerate(row):
            if at != to and (type(value) not in (int, float) or not 0 <= value < math.inf):
                raise ValueError(f"{name}, row {at}, column {to} is {value!r}; it must be a number, at least 0")
    return tuple(tuple(float(value or 0) for value in row) for row in rows)
