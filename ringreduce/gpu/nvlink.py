"""Plans over the links between a group's GPUs, as far as this machine tells of them. On rank 0 alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ringreduce.common.failures import TopologyError
from ringreduce.topology.group_plans import GroupTopology, graph_of_gpus, plan_group
from ringreduce.topology.live import probe_all

log = logging.getLogger(__name__)

SOURCE = "NVML: the links between the ranks' GPUs"


def plans_for(buses: Sequence[str]) -> GroupTopology | None:
    """For ranks on the GPUs with these bus ids; None if there is nothing to plan over, and the log says why."""
    machine = probe_all()
    if machine is None:
        log.info("NVLink is not looked at: pip install nvidia-ml-py for plans over the links between GPUs")
        return None
    graph = graph_of_gpus(machine, buses)
    if graph is None:
        log.info("no plans over links: the GPUs %s are not all different ones of %s", list(buses), machine.name)
        return None
    try:
        return plan_group(graph, SOURCE)
    except TopologyError as error:
        log.warning("cannot plan over the links between GPUs: %s; the built-in rules decide", error)
        return None
