"""What the groups of this process have done: counters, and the flight record that `torchfrtrace` reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ringreduce import _C


@dataclass(frozen=True)
class CallStats:
    """Of the calls of one collective in one group, since the group was made."""

    calls: int
    failed: int
    bytes: int
    """Of the larger side of each call, inputs or outputs."""
    waited: float
    """Seconds without anything to do, for want of other ranks. Waits of a few microseconds are not counted."""
    lent: int
    """Bytes that other ranks read in place, from tensors made by `empty`."""


def stats() -> dict[str, dict[str, CallStats]]:
    """By group name (`group.group_name`) and collective ("all_reduce", "send", ...), for all groups that live."""
    return {
        group: {call: CallStats(*counters) for call, counters in calls.items()}
        for group, calls in _C.statistics().items()
    }


def dump_flight_record(path: str | os.PathLike[str]) -> None:
    """Writes the latest calls of all groups to `path`, in the format of c10d's flight recorder.

    `torchfrtrace FOLDER -p PREFIX` reads the files of all ranks, PREFIX0, PREFIX1, ... by global rank, in one folder.
    When a group breaks, the same is written without being asked, to $TORCH_FR_DUMP_TEMP_FILE with the rank after it.
    How many calls are kept is `Options.recorded_calls`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_C.flight_record())
