"""Makes the members of a view the default group, tells its failures, and ends the groups of the view before."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeGuard

import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, Store
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ringreduce.common import system
from ringreduce.coordination.protocol import View
from ringreduce.coordination.rounds import Membership
from ringreduce.elastic.settings import Settings
from ringreduce.errors import CollectiveMismatch, Expelled, InvalidArgument, RingReduceError, SystemFailure, TooFewRanks
from ringreduce.groups.arrivals import DIED, known_beforehand
from ringreduce.groups.lookup import backend_of, found_in, links_of


def make_group(
    view: View, rank: int, settings: Settings, ended: Callable[[], list[str]], gives_up: Callable[[Exception], None]
) -> None:
    """Makes the view's members the default group. Called on all of them.

    `ended()` names the members that have ended; the making fails at once then. `gives_up(error)` is called if this
    process fails, before it closes its connections. Raises what `init_process_group` raises; `SystemFailure` if the
    store is gone.
    """
    names = view.names
    hook = sys.excepthook  # init_process_group wraps it, once more in each change
    prepared, endpoints = settings.context.prepared(view)
    try:
        with known_beforehand(
            prepared=prepared,
            endpoints=endpoints,
            ended=lambda: {names.index(name): DIED for name in ended()},
            gives_up=gives_up,
        ):
            init_group(settings.context.store_for(view.epoch), rank, len(names), settings)
    except (RuntimeError, OSError) as error:
        if isinstance(error, RingReduceError):
            raise
        raise SystemFailure(f"making the group of epoch {view.epoch}: {error}") from error
    finally:
        sys.excepthook = hook


def init_group(store: Store, rank: int, size: int, settings: Settings) -> None:
    """Makes the default group of `size` ranks, which meet in `store`."""
    # torch names a group by a counter, and the ranks meet under keys that contain the name. A failure leaves the
    # members with different counters, since torch does not take the number back.
    dist.distributed_c10d._world.group_count = 0
    timeout = timedelta(seconds=settings.timeout)
    dist.init_process_group(
        "ringreduce", store=store, rank=rank, world_size=size, timeout=timeout, pg_options=settings.options
    )


def destroy_groups(leaves: bool = False) -> None:
    """Destroys all groups of this process.

    Groups with links to other hosts are shut down in a thread, because a link waits until the other host has received
    everything. The caller does not wait for that, unless it `leaves` the world: then its process may end.
    """
    if not dist.is_initialized():
        return
    try:
        if leaves or links_of(found_in(dist.distributed_c10d._get_default_group())):
            names = dist.distributed_c10d._world.pg_names
            groups = sorted(names, key=names.__getitem__, reverse=True)
            names.clear()  # or destroy_process_group would shut each one down, and wait
            if leaves:
                _say_goodbye(groups)
            else:
                _say_goodbye_later(groups)
    finally:
        dist.destroy_process_group()


def _say_goodbye(groups: Iterable[dist.ProcessGroup]) -> None:
    for group in groups:
        with contextlib.suppress(CollectiveMismatch):  # the others may be in a call that this process does not make
            group.shutdown()


def _say_goodbye_later(groups: Iterable[dist.ProcessGroup]) -> None:
    try:
        thread = threading.Thread(target=_say_goodbye, args=(groups,), daemon=True, name="ringreduce goodbye")
        system.start(thread)
    except SystemFailure:
        _say_goodbye(groups)


def rebind(parts: Iterable[object]) -> None:
    """Binds the `DistributedDataParallel` models among these parts to the default group, with new buckets and hooks.

    It takes the steps of unpickling, so the models are as a joiner's.
    """
    modules = (module for part in parts if isinstance(part, Module) for module in part.modules())
    for model in modules:
        if isinstance(model, DistributedDataParallel):
            model.process_group = dist.distributed_c10d._get_default_group()
            model.__setstate__(model.__getstate__())  # type: ignore[no-untyped-call]
            # With static_graph=True the first backward pass of a reducer queues its own all_reduce. It has not yet.
            model._static_graph_delay_allreduce_enqueued = False


def is_of_group(error: BaseException) -> TypeGuard[Exception]:
    """Whether the error is a failure of the default group, after which the members repeat the attempt."""
    if isinstance(error, Expelled | TooFewRanks | InvalidArgument | CollectiveMismatch):
        return False
    cause: BaseException | None = error  # not what was being handled: a callback runs while a failure is
    while cause is not None:
        if isinstance(cause, RingReduceError):
            return True
        cause = cause.__cause__
    # Other libraries raise errors of their own when a group has failed, as DistributedDataParallel does.
    has_failed = dist.is_initialized() and backend_of(None).get_error() != ErrorType.SUCCESS
    return isinstance(error, Exception) and has_failed


@contextlib.contextmanager
def resigns_if_it_fails(settings: Settings, view: View) -> Iterator[None]:
    """Ends the membership of a process that cannot begin it, as without memory. The others would wait for it."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, RingReduceError):
            resign(settings, view)
        raise


def resign(settings: Settings, view: View) -> None:
    """Ends the membership of a process that has been in `view`, and destroys its groups."""
    with contextlib.suppress(RuntimeError, OSError):
        Membership(settings.context.directory(), settings.me, view, settings.patience).resign(view.step)
    settings.context.give_up()
    destroy_groups()
