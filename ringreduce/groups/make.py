"""Makes a group: options, the meeting of its ranks, plans, and the C++ process group that does the rest.

What only some groups need (several hosts, GPUs, a topology) is imported when one does: many ranks start at once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from ringreduce import _C
from ringreduce.common.cores import crowded
from ringreduce.common.system import explained
from ringreduce.config import (
    LEAST_SLICE_GLOO,
    MOST_SLICE_GLOO,
    Options,
    fetch_from,
    resolve,
    slicing_for,
    slot_bytes_for,
)
from ringreduce.coordination import wait
from ringreduce.coordination.endpoint import Config
from ringreduce.coordination.ledger import Ledger, ledger_bytes
from ringreduce.coordination.process import identity
from ringreduce.coordination.store import METHODS, require, without_prefixes
from ringreduce.coordination.torch_store import KeyStore
from ringreduce.errors import CollectiveMismatch, InvalidArgument, SystemFailure, TopologyError
from ringreduce.groups.arena import open_arena, share_allocations
from ringreduce.groups.arrivals import NOTHING, WHO, beforehand, passed
from ringreduce.groups.choices import Choices, add_plans
from ringreduce.groups.decision import Decision, decide, decide_by_endpoints, decide_over_gloo
from ringreduce.groups.exchange import Exchange
from ringreduce.groups.layout import geometry_for, ledger_at, memory_for, patience_for
from ringreduce.groups.lookup import found_in, registered, remember
from ringreduce.groups.meet import Meeting, meet
from ringreduce.groups.order import Order
from ringreduce.groups.ready import agreed, location_of
from ringreduce.groups.survivors import (
    Lineage,
    Survivors,
    call_shrunk_groups_by_their_type,
    shrinking,
    survivors_of,
    use_instead,
)

if TYPE_CHECKING:
    from ringreduce.groups.between_hosts import Links
    from ringreduce.topology.group_plans import GroupTopology

Family = tuple[Lineage, list[int]]
"""What a group is shrunk from, and the ranks that its ranks had in the first group there."""

LONGEST_TIMEOUT = 7 * 24 * 3600.0
"""Seconds; longer ones are cut to this, since not all that waits can count further."""

GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd")
"""One of these is there if there is a GPU: of NVIDIA, in WSL, of Tegra (two names), of AMD."""

log = logging.getLogger(__name__)
_numbers = itertools.count()
"""Of the groups of this process."""


class _AfterAllHandlers:
    """Shuts down the groups when `atexit` has run its last handler, whenever that was registered: handlers may call.

    `atexit` lets go of its handlers' arguments then, and the interpreter is still whole. Later, callbacks of calls
    under way would meet one that is half gone.
    """

    def __del__(self) -> None:
        _C.shutdown_all()


atexit.register(id, _AfterAllHandlers())
call_shrunk_groups_by_their_type()


@functools.lru_cache(maxsize=1)
def _leave_at_the_end_of(pid: int) -> None:
    """A process that multiprocessing forked ends without `atexit`. To its groups it must not look as if it had died.

    The lowest priority comes after all finalizers of the program, which may call.
    """
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, _C.shutdown_all, exitpriority=-sys.maxsize)


def create(opts: Any, pg_options: Options | None) -> _C.ProcessGroupRing:
    """Called by torch for every new group on every rank in it. Returns when all ranks are there.

    Raises the errors of `ringreduce.errors`; see `groups.meet`.
    """
    of_world = list(opts.global_ranks_in_group)  # none for the default group itself
    world = found_in(dist.group.WORLD) if of_world and dist.group.WORLD else None
    ranks = of_world or list(range(opts.group_size))
    within = (world, of_world) if world else None
    seconds, name = seconds_of(opts.timeout), opts.group_id
    with _exchange(opts.store, opts.group_rank, ranks, seconds, within, name) as exchange:
        options, _ = resolve(pg_options)
        if "torchrec" in sys.modules:
            _warn_of_torchrec()
        if options.share_allocations:
            share_allocations()
        if options.transport != "gloo" and options.arena_bytes and not _may_have_gpus():
            # DDP then takes its gradient buckets from the group's `allocateTensor`. The variable is for all backends of
            # the process, so where NCCL may be one of them it is left to the user.
            os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
        return GroupSpec(exchange, name, seconds, options).make()


@functools.cache  # once
def _warn_of_torchrec() -> None:
    log.warning(
        "torchrec copies within a rank, instead of exchanging data, where torch calls a group's backend 'custom', as "
        "it calls every backend that it does not come with; use backend 'gloo' for the groups that torchrec gets"
    )


@contextlib.contextmanager
def _exchange(
    store: Store,
    rank: int,
    ranks: list[int],
    seconds: float,
    within: tuple[_C.ProcessGroupRing, list[int]] | None,
    name: str,
) -> Iterator[Exchange]:
    """This rank's part in making a group. If anything fails, the others are told why, however early that is.

    `ranks`: the global ones. `within`: the group whose ranks make this one, and their ranks there.
    """
    require(store, METHODS)
    before, attempt, processes, order = beforehand.get(), "", list[tuple[str, int]](), None
    if within:
        group, wanted = within
        lineage, processes = survivors_of(group).lineage, survivors_of(group).processes(wanted)
        attempt = lineage.attempt
        before = before._replace(
            ended=lambda: {wanted.index(each): how for each, how in group.ended().items() if each in wanted},
            look=group.throw_own_failure,
        )
        order = Order(without_prefixes(store), attempt, ranks[rank], name, ranks, lineage.begun)
    exchange = Exchange(store, rank, len(ranks), seconds, ranks, attempt, processes, before, order)
    exchange.job = within[0].job if within else ""
    try:
        yield exchange
    except BaseException as error:
        exchange.give_up(error)
        if order and not isinstance(error, CollectiveMismatch):  # which the other rank is to notice, too
            order.withdraw()
        raise
    finally:
        exchange.before = NOTHING  # the group may keep the exchange, and some of this holds the group


def store_of(exchange: Exchange) -> Store:
    """torch makes all groups of this module with stores of its own."""
    return cast(Store, exchange.store)


def seconds_of(timeout: timedelta) -> float:
    return min(timeout.total_seconds(), LONGEST_TIMEOUT)


def _may_have_gpus() -> bool:
    """Asks neither torch nor the driver, after which a forked child could not use CUDA."""
    built = bool(torch.version.cuda or torch.version.hip)
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use or (built and any(map(os.path.exists, GPU_DEVICES)))


@dataclass(frozen=True)
class GroupSpec:
    """A group that this rank makes with the others of `exchange`."""

    exchange: Exchange
    name: str
    seconds: float
    """The timeout of its calls."""
    options: Options
    family: Family | None = None
    """Of the group that it is shrunk from."""

    def make(self) -> _C.ProcessGroupRing:
        """Returns when all ranks are there, and those that plans need from the start are linked."""
        _leave_at_the_end_of(os.getpid())
        registered.pop(self.name, None)  # an earlier group's of that name
        exchange, options, seconds = self.exchange, self.options, self.seconds
        if options.debug and not log.isEnabledFor(logging.INFO):
            show_log()
        began = time.monotonic()
        group, decision, links = self._over_gloo() if options.transport == "gloo" else self._with_memory()
        if links:
            from ringreduce.groups import between_hosts

            remember(self.name, links)
            try:
                links.learn(seconds - (time.monotonic() - began))  # which plans are chosen by
                slot_bytes = slot_bytes_for(exchange.size, options)
                slicing = slicing_for(options, slot_bytes, fetch=False, wire=links.wire.bandwidth)
                group.set_least_slice_bytes(slicing.least_slice_bytes)
                first = between_hosts.peers_in(self._choices(decision, links).plans(), exchange.rank, links.order)
                links.connect_all(first, seconds - (time.monotonic() - began))
            except BaseException as error:
                exchange.give_up(error)
                group.shutdown()  # which lets go of the door, which holds the group
                raise
        log.info(
            "[rank %d] made a group of ranks %s in %.3f s: %s; decided: %s%s",
            exchange.ranks[exchange.rank],
            exchange.ranks,
            time.monotonic() - began,
            options,
            decision.rules or "nothing",
            f"; between hosts: {links.wire}" if links else "",
        )
        return group

    def _with_memory(self) -> tuple[_C.ProcessGroupRing, Decision, Links | None]:
        """Ranks of one host share memory; those on several have links over TCP besides."""
        exchange, options, size = self.exchange, self.options, self.exchange.size
        prepared = exchange.before.prepared
        memory = prepared.memory if prepared else _C.OpenMemory() if options.fetch and size > 1 else None
        arena = open_arena(options)
        meeting = self._meet(memory, arena)
        try:
            decision = Decision.load(meeting.decision)
            if decision.error:
                raise TopologyError(decision.error, 0)
            links = _links(exchange, options, meeting, decision) if meeting.door else None
            geometry = geometry_for(size, options, decision.channels)
            ledger = None if links else Ledger(meeting.memfd, ledger_at(geometry), ledger_bytes(size))
            of_transport = _transport(options, meeting, decision, links)
            settings = self._settings(decision, meeting.names, ledger, links, **of_transport)
        except BaseException as error:  # the others may have their groups by now
            if meeting.memfd >= 0:
                reason = explained(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                _C.cannot_take_part(meeting.memfd, exchange.rank, self._names(meeting.names), reason)
            meeting.close()
            if isinstance(error, OSError):
                raise SystemFailure(f"making the group: {explained(error)}") from error
            raise
        try:
            group = _C.ProcessGroupRing(
                memfd=meeting.memfd,
                geometry=geometry,
                pidfds=meeting.pidfds,
                names=self._names(meeting.names),
                rank=exchange.rank,
                memory=memory if meeting.threads else None,
                memory_threads=meeting.threads,
                lends_arena=arena >= 0,
                arenas=meeting.arenas,
                elsewhere=links.elsewhere if links else [],
                connect=links.connect if links else None,
                disconnect=links.close if links else None,
                warn_after=wait.WARN_AFTER,
                settings=settings,
            )
        except BaseException:  # it has taken the descriptors all the same
            if meeting.door:
                meeting.door.close()
            raise
        if links:
            try:
                links.open(group)
            except BaseException:
                group.shutdown()  # which lets go of the links, which hold the group
                raise
        passed("group: made")
        return group, decision, links

    def _meet(self, memory: _C.OpenMemory | None, arena: int) -> Meeting:
        """Returns when the ranks of this host are there, and all others known."""
        exchange, options, before = self.exchange, self.options, self.exchange.before
        decides = functools.partial(decide, exchange.ranks, options)
        meeting = meet(
            exchange,
            lambda decision: memory_for(exchange.size, options, Decision.load(decision).channels),
            agreed(options),
            functools.partial(decide_by_endpoints, before.endpoints, decides) if before.prepared else decides,
            memory,
            location_of(options),
            arena,
        )
        passed("group: met")
        here = next(host for host in meeting.hosts if exchange.rank in host)
        wrong = crowded(len(here), torch.get_num_threads(), len(meeting.cores))
        if wrong and exchange.rank == here[0] and not exchange.job:  # not for each group of the world's ranks
            log.warning("%s: they slow each other down; %s; torchrun does so, and other launchers do not", *wrong)
        return meeting

    def _over_gloo(self) -> tuple[_C.ProcessGroupRing, Decision, None]:
        exchange, options = self.exchange, self.options
        if options.wire_dtype != "float32":
            raise InvalidArgument(
                f"wire_dtype is {options.wire_dtype!r} and transport is 'gloo', which sends float32 as it is; leave "
                "wire_dtype (RINGREDUCE_WIRE_DTYPE) out, or make the group with transport='auto' or 'tcp'"
            )
        decides = functools.partial(decide_over_gloo, exchange.ranks, options)
        names, decided = _call_roll(exchange, agreed(options), decides)
        decision = Decision.load(decided)
        if decision.error:
            raise TopologyError(decision.error, 0)
        try:
            store = PrefixStore(exchange.prefix, store_of(exchange))  # of this attempt alone
            timeout = timedelta(seconds=self.seconds)
            gloo = ProcessGroupGloo(PrefixStore("gloo", store), exchange.rank, exchange.size, timeout)
        except RuntimeError as error:
            raise SystemFailure(f"making the group: Gloo cannot connect its ranks: {error}") from None
        slices = {
            "least_slice_bytes": options.parts.least_slice_bytes or LEAST_SLICE_GLOO,
            "most_slice_bytes": MOST_SLICE_GLOO,
        }
        group = _C.ProcessGroupRing.over(
            backend=gloo,
            store=store,
            names=self._names(names),
            channels=max(options.parts.channels, decision.channels),
            settings=self._settings(decision, names, None, None, **slices),
        )
        return group, decision, None

    def _names(self, processes: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
        """What messages of the engine call the ranks by: host, pid and global rank; -1 for the last where it says no
        more than the rank in the group."""
        ranks = self.exchange.ranks
        whole = ranks == list(range(self.exchange.size))
        return [(*process, -1 if whole else rank) for process, rank in zip(processes, ranks, strict=True)]

    def _choices(self, decision: Decision, links: Links | None) -> Choices:
        return Choices(self.exchange.rank, self.exchange.size, self.options, decision, links)

    def _settings(
        self,
        decision: Decision,
        processes: list[tuple[str, int]],
        ledger: Ledger | None,
        links: Links | None,
        **of_transport: Any,
    ) -> _C.Settings:
        """`processes`: host and pid of each rank. `ledger`: where survivors meet; None: in the store."""
        exchange, options, store = self.exchange, self.options, store_of(self.exchange)
        survive = f"{exchange.prefix}/survivors", exchange.attempt, exchange.ranks
        lineage = Lineage(exchange.rank, processes, ledger or store, *survive)
        number = next(_numbers)
        survivors = Survivors(number, *(self.family or (lineage, list(range(exchange.size)))))
        between_gpus = decision.topology if options.topo_file else None  # else it is about cores
        return _C.Settings(
            name=self.name,
            global_ranks=exchange.ranks,
            timeout=self.seconds,
            number=number,
            id=exchange.attempt[:16],
            job=exchange.job or exchange.attempt[:16],
            regroup=functools.partial(_regroup, store, self.name, exchange.rank, exchange.ranks, options, survivors),
            join_gpus=functools.partial(_join_gpus, exchange.size, options, self.seconds, between_gpus),
            ask=self._choices(decision, links).ask,
            slices=options.parts.slices,
            recorded_calls=options.recorded_calls,
            dump_when_broken=bool(options.dump_when_broken),
            print_calls=options.debug > 1,
            topology=decision.topology.to_json() if decision.topology else "",
            **of_transport,
        )


def _links(exchange: Exchange, options: Options, meeting: Meeting, decision: Decision) -> Links:
    """What makes the links to other hosts."""
    from ringreduce.groups import between_hosts

    name = "/".join(map(str, exchange.ranks))
    order, wire = decision.hosts, decision.wire
    return between_hosts.Links(meeting, name, exchange.rank, order, wire, options.connections, options.dead_after)


def _transport(options: Options, meeting: Meeting, decision: Decision, links: Links | None) -> dict[str, Any]:
    """The settings of a group whose ranks share memory, as far as they depend on that."""
    size, fetch = len(meeting.names), bool(meeting.threads)
    ranks_here = size - sum(links.elsewhere) if links else size
    slicing = slicing_for(options, slot_bytes_for(size, options), fetch)
    # Ranks of the world that are not in this group may be on this host as well.
    threads = max(size, dist.get_world_size() if dist.is_initialized() else 0) * torch.get_num_threads()
    return {
        "patience": patience_for(options, decision, ranks_here, threads, len(meeting.cores), bool(links)),
        "least_slice_bytes": slicing.least_slice_bytes,
        "most_slice_bytes": slicing.most_slice_bytes,
        "least_fetch_bytes": fetch_from(options, size, meeting.cores, fetch) or 0,
        "most_fetch_bytes": options.parts.most_fetch_bytes or decision.most_fetch,
        "stream_bytes": options.parts.stream_bytes,
        "spread_bytes": options.parts.spread_bytes or decision.spread,
        "wire_dtype": options.wire_dtype,
    }


def _call_roll(exchange: Exchange, config: Config, decide: Callable[[], str]) -> tuple[list[tuple[str, int]], str]:
    """Joins this rank with the others by the store alone, where another backend joins them, on one host or on several.

    Returns host and pid of each rank, and what rank 0's `decide` said, when rank 0 has seen all. Raises as `meet`.
    """

    def answer(ranks: list[Any]) -> dict[str, Any]:
        exchange.check_configs(ranks)
        return {"who": [each["who"] for each in ranks], "ids": [each["id"] for each in ranks], "decision": decide()}

    exchange.arrive({"who": identity(), "config": config})
    if exchange.rank == 0:
        roster = exchange.publish(WHO, exchange.decide(answer, exchange.collect(WHO)))
    else:
        roster = exchange.come_to_roster(WHO)
    return [(str(host), int(pid)) for host, pid, *_ in roster["who"]], str(roster["decision"])


def _join_gpus(
    size: int,
    options: Options,
    seconds: float,
    between: GroupTopology | None,
    group: _C.ProcessGroupRing,
    ordinal: int,
    communicator: int,
) -> None:
    """`between`: what a file says of the links between the GPUs, if there is one."""
    from ringreduce.gpu import joining

    plans = functools.partial(add_plans, size, options)
    joining.join(joining.Wanted(options, seconds, between, plans), group, ordinal, communicator)


def _regroup(
    store: Store,
    name: str,
    rank: int,
    global_ranks: list[int],
    options: Options,
    survivors: Survivors,
    group: _C.ProcessGroupRing,
    ranks: list[int],
    why: str,
    timeout: timedelta,
) -> _C.ProcessGroupRing:
    """Makes the group of some ranks of `group`, given by their ranks in it. Called by `split` and `shrink` in C++."""
    part = f"{why}/{'_'.join(map(str, ranks))}"  # the same ranks may meet there again and again
    members, seconds = [global_ranks[r] for r in ranks], seconds_of(timeout)

    def make(there: Store, family: Family | None = None) -> _C.ProcessGroupRing:
        with _exchange(there, ranks.index(rank), members, seconds, (group, ranks), f"{name}/{part}") as exchange:
            return GroupSpec(exchange, f"{name}/{part}", seconds, options, family).make()

    if why == "split":
        return make(PrefixStore(part, store))
    family = (survivors.lineage, [survivors.first_ranks[r] for r in ranks])
    with shrinking(group, survivors, ranks, timeout.total_seconds()) as there:
        smaller = make(there, family)
    if isinstance(there, KeyStore):
        use_instead(there, group)
    return smaller


def show_log() -> None:
    """Lets the package's log through to standard error, unless the program has seen to its logging itself."""
    package = logging.getLogger("ringreduce")
    package.setLevel(logging.INFO)
    if not package.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[ringreduce] %(message)s"))
        package.addHandler(handler)
