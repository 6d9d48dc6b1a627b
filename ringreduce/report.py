"""What the groups of this process have done: counters, and the flight record that `torchfrtrace` reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ringreduce import _C
from ringreduce.hosts import LinkStats, Wire, all_links


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
    """Bytes that other ranks read in place, from shared tensors, and from others where the kernel lets them."""


class GroupStats(dict[str, CallStats]):
    """Of one group: the calls by collective ("all_reduce", "send", ...), and its links to other hosts."""

    links: dict[int, LinkStats]
    """By the rank in the group at the other end; those that there are: most are made when they are first needed."""
    refused: dict[str, int]
    """Connections that this rank refused, by reason: "garbage", "proof", "crowd", ...: see docs/hosts.md."""

    wire: Wire | None
    """What its plans between hosts are chosen by, and where that is known from; None if all ranks are on one host."""

    def __init__(
        self, calls: dict[str, CallStats], links: dict[int, LinkStats], refused: dict[str, int], wire: Wire | None
    ) -> None:
        super().__init__(calls)
        self.links, self.refused, self.wire = links, refused, wire


def stats() -> dict[str, GroupStats]:
    """By group name (`group.group_name`), for all groups that live: `stats()["0"]["all_reduce"].bytes`,
    `stats()["0"].links[3].bytes_out`."""
    on_hosts = all_links()
    return {
        name: GroupStats(
            {call: CallStats(*counters) for call, counters in calls.items()},
            on_hosts[name].stats if name in on_hosts else {},
            on_hosts[name].refused if name in on_hosts else {},
            on_hosts[name].wire if name in on_hosts else None,
        )
        for name, calls in _C.statistics().items()
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
