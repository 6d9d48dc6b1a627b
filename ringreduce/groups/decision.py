"""Decides, on rank 0, what all ranks of a group must do alike: rules of the tuning, plans of the topology."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ringreduce.config import MOST_FETCH, Options, slot_bytes_for
from ringreduce.errors import TopologyError

if TYPE_CHECKING:
    from ringreduce.coordination.endpoint import Endpoint
    from ringreduce.groups.between_hosts import Hosts, Wire
    from ringreduce.groups.meet import Decide
    from ringreduce.topology.group_plans import GroupTopology

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """What rank 0 of a group tells the others, as JSON: the tuning's rules, the topology's plans, or what is wrong."""

    rules: str = ""
    topology: GroupTopology | None = None
    error: str = ""
    hosts: Hosts = ()
    """The ranks of each, in the order of rings."""
    wire: Wire | None = None
    """What a file says of the network between hosts."""
    yields: int = 0
    """See `tuning.yields`."""
    most_fetch: int = MOST_FETCH
    """See `tuning.most_fetch`."""
    spread: int = 0
    """Each rank's part of `tuning.spread`."""

    @property
    def channels(self) -> int:
        return self.topology.channels if self.topology else 0

    def dump(self) -> str:
        topology = self.topology.to_json() if self.topology else None
        return json.dumps({**vars(self), "topology": topology})

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def load(text: str) -> Decision:
        fields = json.loads(text)
        topology = wire = None
        if fields["topology"]:
            from ringreduce.topology.group_plans import GroupTopology

            topology = GroupTopology.from_json(fields["topology"])
        if fields["wire"]:
            from ringreduce.groups.between_hosts import Wire

            wire = Wire(*fields["wire"])
        on_hosts = tuple(map(tuple, fields["hosts"]))
        return Decision(**{**fields, "topology": topology, "hosts": on_hosts, "wire": wire})


def decide(
    global_ranks: list[int],
    options: Options,
    cores: list[frozenset[int]],
    fetch: bool,
    on_hosts: list[list[int]],
    labels: list[str],
) -> str:
    """Called on rank 0 of a group. The others wait for the answer, so it has one whatever happens."""
    if len(on_hosts) > 1:
        if options.topo_file:
            log.warning(
                "RINGREDUCE_TOPO_FILE=%r is not read: it describes one machine, and ranks are on %d hosts",
                options.topo_file,
                len(on_hosts),
            )
        return _decide_for_hosts(options.hosts_file, tuple(map(tuple, on_hosts)), labels).dump()
    from ringreduce import tuning

    size, some = len(cores), frozenset[int]().union(*cores)
    tuned = Decision(
        tuning.decide(size, some, fetch, options=options, slot_bytes=slot_bytes_for(size, options)),
        yields=tuning.yields(some, options) if size > len(some) else 0,
        most_fetch=tuning.most_fetch(some, options) if size > 2 else MOST_FETCH,
        spread=tuning.spread(some, options) // size,
    )
    try:
        return replace(tuned, topology=group_topology(global_ranks, options, cores)).dump()
    except TopologyError as error:
        return Decision(error=str(error)).dump()
    except Exception as error:
        log.warning("cannot plan over the machine's links: %s; the tuned rules decide", error)
        return tuned.dump()


def decide_by_endpoints(
    endpoints: Sequence[Endpoint],
    otherwise: Decide,
    cores: list[frozenset[int]],
    fetch: bool,
    on_hosts: list[list[int]],
    labels: list[str],
) -> str:
    """Called on the first rank of each host, and says the same on all: on several hosts by the endpoints alone."""
    if len(on_hosts) == 1:
        return otherwise(cores, fetch, on_hosts, labels)
    from ringreduce.groups.between_hosts import Wire

    known = next((Wire(*endpoint["wire"]) for endpoint in endpoints if endpoint["wire"]), None)
    return Decision(hosts=tuple(map(tuple, on_hosts)), wire=known).dump()


def _decide_for_hosts(file: str, on_hosts: Hosts, labels: Sequence[str]) -> Decision:
    if not file:
        return Decision(hosts=on_hosts)
    from ringreduce.groups import between_hosts

    try:
        order, wire = between_hosts.by_file(file, on_hosts, labels)
        return Decision(hosts=order, wire=wire)
    except Exception as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return Decision(
            error=f"RINGREDUCE_HOSTS_FILE={file!r}: {reason}; write it with `ringreduce doctor --peers --write`, or "
            "leave the option out"
        )


def decide_over_gloo(global_ranks: list[int], options: Options) -> str:
    """The same where the ranks' cores, and what they share, say nothing: only a topology file counts."""
    try:
        return Decision(topology=group_topology(global_ranks, options, []) if options.topo_file else None).dump()
    except Exception as error:  # the others wait for the answer
        return Decision(error=str(error)).dump()


def group_topology(global_ranks: list[int], options: Options, cores: list[frozenset[int]]) -> GroupTopology | None:
    """What the topology plans for ranks on these cores; None where there is nothing to plan: one NUMA node, no file."""
    # Ranks that may use the same cores are bound to no NUMA node, and what plans for some takes long to import.
    if not options.topo_file and (options.tuning == "off" or len(set(cores)) < 2):
        return None
    from ringreduce import tuning
    from ringreduce.topology.group_plans import graph_of_cores, graph_of_file, plan_group

    if options.topo_file:
        from ringreduce.topology.read import described

        source = f"RINGREDUCE_TOPO_FILE={options.topo_file}"
        try:
            graph = described(options.topo_file)
        except TopologyError as error:
            raise TopologyError(f"{source}: {error}") from None
        return plan_group(graph_of_file(graph, source, global_ranks), source)
    bound = graph_of_cores(cores, lambda: tuning.memory_gbps(options.tuning, frozenset[int]().union(*cores)))
    return plan_group(bound, "the cores that the ranks are bound to") if bound else None
