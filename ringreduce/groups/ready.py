"""Prepares, from the options, what a process needs for a group before it knows the group's other ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ringreduce import _C
from ringreduce.config import EngineParts, Options, resolve
from ringreduce.coordination.endpoint import Config, Location, PreparedEndpoint

if TYPE_CHECKING:
    from ringreduce.groups.between_hosts import Wire


def location_of(options: Options) -> Location:
    """The options that say where a rank is and how others reach it."""
    return Location(options.transport, options.host_id, options.socket_ifname, options.secret_file, options.ports)


OWN = frozenset(
    (
        *("tuning", "topo_file", "hosts_file", "recorded_calls", "dump_when_broken", "debug", "socket_ifname", "ports"),
        *("host_id", "secret_file", "share_allocations"),
    )
)
"""The options that each rank may choose for itself."""


def agreed(options: Options) -> Config:
    """The options that must be equal on all ranks."""
    engine = str(replace(options.parts, arena_keep_bytes=EngineParts.arena_keep_bytes))
    return {**{name: value for name, value in vars(options).items() if name not in OWN}, "engine": engine}


def ready_for_a_group(options: Options | None, listens: bool, wire: Wire | None = None) -> PreparedEndpoint | None:
    """Prepares this process's part of its next group; None: with these options, nothing can be prepared.

    `listens`: whether to listen for other hosts, too. `wire`: what is known of the network between hosts.
    """
    options, _ = resolve(options)
    if options.transport == "gloo" or options.hosts_file:  # rank 0 reads the file, and must tell the others
        return None
    memory = _C.OpenMemory() if options.fetch else None
    return PreparedEndpoint(location_of(options), agreed(options), memory, listens, wire)
