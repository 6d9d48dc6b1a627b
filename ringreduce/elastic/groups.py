"""Makes the members of a view the default group, and ends the groups of the view before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringreduce.config import Options
from ringreduce.coordination.protocol import View
from ringreduce.elastic.context import WorldContext
from ringreduce.errors import RingReduceError, SystemFailure
from ringreduce.groups.exchange import known_beforehand
from ringreduce.groups.links import links_of
from ringreduce.groups.lookup import found_in


def make_group(
    view: View,
    rank: int,
    context: WorldContext,
    timeout: float,
    options: Options | None,
    ended: Callable[[], list[str]],
    gives_up: Callable[[Exception], None],
) -> None:
    """Makes the view's members the default group. Called on all of them.

    `ended()` names the members that have ended; the making fails at once then. `gives_up(error)` is called if this
    process fails, before it closes its connections. Raises what `init_process_group` raises; `SystemFailure` if the
    store is gone.
    """
    names = view.names
    hook = sys.excepthook  # init_process_group wraps it, once more in each change
    prepared, endpoints = context.prepared(view)
    # torch names a group by a counter, and the ranks meet under keys that contain the name. A failure leaves the
    # members with different counters, since torch does not take the number back.
    dist.distributed_c10d._world.group_count = 0
    try:
        with known_beforehand(
            prepared=prepared,
            endpoints=endpoints,
            ended=lambda: [names.index(name) for name in ended()],
            gives_up=gives_up,
        ):
            dist.init_process_group(
                "ringreduce",
                store=context.place(view.epoch),
                rank=rank,
                world_size=len(names),
                timeout=timedelta(seconds=timeout),
                pg_options=options,
            )
    except (RuntimeError, OSError) as error:
        if isinstance(error, RingReduceError):
            raise
        raise SystemFailure(f"making the group of epoch {view.epoch}: {error}") from error
    finally:
        sys.excepthook = hook


def destroy_groups() -> None:
    """Destroys all groups of this process.

    Groups with links to other hosts are shut down in a thread, because a link waits until the other host has received
    everything. The caller does not wait for that.
    """
    if not dist.is_initialized():
        return
    if links_of(found_in(dist.distributed_c10d._get_default_group())):
        names = dist.distributed_c10d._world.pg_names
        groups = sorted(names, key=names.__getitem__, reverse=True)
        names.clear()  # or destroy_process_group would shut each one down, and wait

        def say_goodbye() -> None:
            for group in groups:
                group.shutdown()

        threading.Thread(target=say_goodbye, daemon=True, name="ringreduce goodbye").start()
    dist.destroy_process_group()


def rebind(model: DistributedDataParallel) -> None:
    """Binds `model` to the default group, with new buckets and hooks like a joiner's, by the steps of unpickling."""
    group = dist.group.WORLD
    assert group is not None
    model.process_group = group
    model.__setstate__(model.__getstate__())  # type: ignore[no-untyped-call]
    # With static_graph=True the first backward pass of a reducer queues its own all_reduce. This says it has not yet.
    model._static_graph_delay_allreduce_enqueued = False
