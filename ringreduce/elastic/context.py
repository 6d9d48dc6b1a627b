"""What a world has outside its groups, as one process sees it: its queue, and the directory in which members agree.

The directory is a ledger if all members are on one machine, and else the launcher's store.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ringreduce.common.descriptors import above_streams
from ringreduce.coordination.endpoint import Endpoint, PreparedEndpoint, address_of, member_has_ended
from ringreduce.coordination.join_queue import JoinQueue
from ringreduce.coordination.ledger import Ledger
from ringreduce.coordination.process import kernel
from ringreduce.coordination.protocol import View
from ringreduce.coordination.store import Directory
from ringreduce.coordination.torch_store import KeyStore
from ringreduce.coordination.wait import every, wait_for

LEDGER_BYTES = 256 << 20
"""Of the ledger of a world on one host. Unwritten pages take no memory; a change takes some 10 KB with 8 ranks."""

LOOK_FOR_LEDGER = 0.02
"""Seconds between two looks of a joiner for a member that says where it has the ledger open."""
LOOK_IN_LEDGER, LOOK_IN_STORE = 0.2, 1.0
"""Seconds between two looks for a member that has left the view, in either kind of directory."""


class WorldContext:
    """What a world has outside its groups, and what this process has ready for the next one."""

    def __init__(self, store: KeyStore) -> None:
        """`store`: the launcher's, or one in etcd."""
        self.store, self.queue = store, JoinQueue(store)
        self.ledger: Ledger | None = None
        """The directory, if all members are on one machine; None: they agree in the store."""
        self.ready: PreparedEndpoint | None = None
        """What this process has prepared for the group of its next view."""
        self._memfd = -1
        self._kept: list[Store] = []
        """The latest two of `store_for`. torch keeps only their C++ half alive, which needs the Python half."""

    def prepared(self, view: View) -> tuple[PreparedEndpoint | None, list[Endpoint]]:
        """This process's endpoint and those of all members of the view, if all have one; else they meet in a store."""
        endpoints = [endpoint for member in view.members if (endpoint := address_of(member).endpoint)]
        if self.ready and len(endpoints) == len(view.members):
            ready, self.ready = self.ready, None
            return ready, endpoints
        self.give_up()
        return None, []

    def give_up(self) -> None:
        """Closes what was prepared for the next group, because there will be none."""
        if self.ready:
            self.ready.close()
            self.ready = None

    def ledger_address(self) -> list[Any] | None:
        """Where processes of this machine find the ledger: path, kernel and inode; None: there is no ledger.

        The kernel and the inode tell whether the file at the path is the right one.
        """
        if self.ledger is None:
            return None
        return [f"/proc/{os.getpid()}/fd/{self._memfd}", kernel(), os.fstat(self._memfd).st_ino]

    def open_ledger(self, address: list[Any] | None) -> bool:
        """Opens the ledger at a `ledger_address`. Returns whether that was possible here."""
        if address is None or address[1] != kernel():
            return False
        try:
            memfd = above_streams(os.open(address[0], os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            return False
        if os.fstat(memfd).st_ino != address[2]:
            os.close(memfd)
            return False
        self._use(memfd)
        return True

    def share_ledger(self, rank: int) -> None:
        """Shares a ledger among the ranks of the default group, if all can open rank 0's. Called on all of them.

        The ranks must be on one host. Without a ledger, they agree in the store.
        """
        if rank == 0:
            memfd = above_streams(os.memfd_create("ringreduce world", os.MFD_CLOEXEC))
            os.ftruncate(memfd, LEDGER_BYTES)
            self._use(memfd)
        told: list[Any] = [self.ledger_address()]
        dist.broadcast_object_list(told, 0)
        shared = torch.tensor([float(rank == 0 or self.open_ledger(told[0]))], device="cpu")
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        if not shared:
            self.ledger = None

    def open_a_ledger(self, me: str, view: View, seconds: float) -> bool:
        """Opens the members' ledger, if they have one. Returns False if they have one that cannot be opened here.

        If this process was slow, the members of `view` may have ended meanwhile, and others have joined. A member that
        has joined says in the next view where it has the ledger open. So this waits for that view, for `seconds`.
        """

        def opens() -> str | None:
            if self._opens_one_of(view) or self._opens_one_of(latest := self.queue.latest() or view):
                return "yes"
            others = [member for member in latest.members if member.name != me]
            return "no" if all(address_of(member).ledger or member_has_ended(member) for member in others) else None

        return wait_for(opens, every(LOOK_FOR_LEDGER), time.monotonic() + seconds) == "yes"

    def _opens_one_of(self, view: View) -> bool:
        """Opens the ledger of one of the view's members. True also if they have none."""
        ledgers = [ledger for member in view.members if (ledger := address_of(member).ledger)]
        return not ledgers or any(map(self.open_ledger, ledgers))

    def _use(self, memfd: int) -> None:
        """Takes the ledger in `memfd`. The descriptor stays open for joiners as long as this object lives."""
        weakref.finalize(self, os.close, memfd)
        self._memfd, self.ledger = memfd, Ledger(memfd, 0, LEDGER_BYTES)

    def look_every(self) -> float:
        """Seconds between two looks for a member that has left the view."""
        return LOOK_IN_LEDGER if self.ledger else LOOK_IN_STORE

    def directory(self) -> Directory:
        """Where the members agree on views."""
        return self.ledger if self.ledger else self.store.directory("members")

    def store_for(self, epoch: int) -> Store:
        """The store in which the group of an epoch is made."""
        if self.ledger:
            made = KeyStore(self.ledger, f"epoch {epoch}/")
            self._kept = [*self._kept[-1:], made]
            return made
        return PrefixStore(f"epoch {epoch}", self.store)
