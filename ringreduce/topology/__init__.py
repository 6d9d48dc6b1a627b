"""Topology: from a machine's real links to rings and trees, how fast they are, and how close to what is possible.

    read, live, presets  ->  graph  ->  routes  ->  bound, rings, trees  ->  decompose  ->  planner  ->  plan, verify

`graph` is what all readers make, `planner` what all users ask, `group` what a process group makes of it, `hosts` the
order of hosts by measured bandwidth, `draw` pictures of all that.  No GPU, and no CUDA, is needed anywhere.

The module can be called: ``ringreduce.topology(group)`` says what was found and planned for a group.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringreduce.topology.group import GroupTopology


def topology(group: dist.ProcessGroup | None = None) -> GroupTopology:
    """What was found out about the machine when the group was made, and what was planned over its links.

    Where ranks share one memory nothing is planned; then `served` is empty, and `machine` says what is here.  On
    several hosts `hosts` says which ranks are where, and `links` how this rank reaches those elsewhere.  `group` is a
    process group of backend ringreduce (default: the world).  Raises `InvalidArgument` if it is not one.
    """
    from ringreduce.api import backend_of
    from ringreduce.hosts import links_of
    from ringreduce.topology.group import GroupTopology, OnHost
    from ringreduce.topology.live import probe

    backend = backend_of(group)
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
    machine = probe()
    return GroupTopology("this machine; its ranks share one memory", machine.name, (), (), machine.assumed)


class _Callable(ModuleType):
    __call__ = staticmethod(topology)


sys.modules[__name__].__class__ = _Callable
