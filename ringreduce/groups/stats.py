"""What the groups of this process are and have done: counters, topology, the flight record for `torchfrtrace`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, overload

import torch.distributed as dist

from ringreduce import _C
from ringreduce.common.files import write_file
from ringreduce.groups.between_hosts import LinkStats, Wire
from ringreduce.groups.lookup import all_links, backend_of, links_of, registered
from ringreduce.topology.group_plans import GroupTopology, OnHost
from ringreduce.topology.live import probe
from ringreduce.tuning import measured_memory


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


@overload
def stats(group: None = None) -> dict[str, GroupStats]: ...
@overload
def stats(group: dist.ProcessGroup) -> GroupStats: ...
def stats(group: dist.ProcessGroup | None = None) -> GroupStats | dict[str, GroupStats]:
    """What `group` has done: `stats(group)["all_reduce"].bytes`, `stats(group).links[3].bytes_out`.

    Without a group: that of all groups that live, by `group.group_name`. Raises `InvalidArgument` for a group that has
    another backend.
    """
    if group is not None:
        backend_of(group)
        return stats()[group.group_name]
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


def topology_of(group: dist.ProcessGroup | None = None) -> GroupTopology:
    """What was found out about the machine when the group was made, and what was planned over its links.

    Where ranks share one memory nothing is planned; then `served` is empty, and `machine` says what is here.  On
    several hosts `hosts` says which ranks are where, and `links` how this rank reaches those elsewhere.  `group` is a
    process group of backend ringreduce (default: the world).  Raises `InvalidArgument` if it is not one.
    """
    found = _topology_of(backend_of(group))
    return replace(
        found, registered=tuple(registered.get(cast(dist.ProcessGroup, group or dist.group.WORLD).group_name, ()))
    )


def _topology_of(backend: _C.ProcessGroupRing) -> GroupTopology:
    if links := links_of(backend):
        return GroupTopology(
            "memory inside a host, TCP between hosts",
            f"{len(links.hosts)} hosts",
            (),
            hosts=tuple(OnHost(*host) for host in links.hosts),
            links=tuple((peer, stats.paths) for peer, stats in sorted(links.stats.items())),
            wire=str(links.wire),
        )
    if backend.topology:
        return GroupTopology.from_json(backend.topology)
    machine = probe(memory=measured_memory())
    return GroupTopology("this machine; its ranks share one memory", machine.name, (), (), machine.assumed)


def dump_flight_record(path: str | os.PathLike[str]) -> None:
    """Writes the latest calls of all groups to `path`, in the format of c10d's flight recorder.

    `torchfrtrace FOLDER -p PREFIX` reads the files of all ranks, PREFIX0, PREFIX1, ... by global rank, in one folder.
    When a group breaks, the same is written without being asked, to $TORCH_FR_DUMP_TEMP_FILE with the rank after it, or
    to a folder of the job below ~/.cache/torch/ringreduce.
    How many calls are kept is `Options.recorded_calls`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, _C.flight_record())
