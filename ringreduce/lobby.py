"""What a changing group has outside itself: a store that all can reach, such as the launcher's, the lobby in it, where
processes wait to be let in, and the ledger in which the members agree, if all are on one machine.

    joiner/N       who came as the Nth; empty: it no longer waits
    invited/NAME   the view in which it is a member
    looked         when a member has looked last who waits
    members now    the latest view
    left/NAME      this member has left

Calls raise what the store does, if that is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ringreduce.common.failures import CollectiveTimeout
from ringreduce.group_links import links_of
from ringreduce.membership.directory import Directory
from ringreduce.membership.ledger import Ledger
from ringreduce.membership.protocol import Member, View
from ringreduce.rendezvous import store as rendezvous
from ringreduce.rendezvous.card import Prepared, Ready
from ringreduce.survivors import KeyStore, found_in
from ringreduce.watch import has_ended

OVER_AFTER = 1.0
"""Seconds between the two looks after which a process that waits believes that all members have gone."""
PAUSE = 0.005
"""Seconds between two looks of a process that waits."""

LEDGER_BYTES = 256 << 20
"""Of a world on one host; what was never written takes no memory. A change takes some 10 KB with 8 ranks."""

LOOK_IN_LEDGER, LOOK_IN_STORE = 0.2, 1.0
"""Seconds between two looks whether a member has left the view."""

log = logging.getLogger(__name__)


def destroy_groups() -> None:
    """All groups of this process. Links wait until other hosts have their last words, beside what follows."""
    if not dist.is_initialized():
        return
    if links_of(found_in(dist.distributed_c10d._get_default_group())):
        names = dist.distributed_c10d._world.pg_names
        groups = sorted(names, key=names.__getitem__, reverse=True)
        names.clear()  # torch would wait for each

        def say_goodbye() -> None:
            for group in groups:
                group.shutdown()

        threading.Thread(target=say_goodbye, daemon=True, name="ringreduce goodbye").start()
    dist.destroy_process_group()


class Lobby:
    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._waiting: dict[int, Member | None] = {}
        """Who waits, by its number; None: it has a number, and has not said who it is."""
        self._seen = 0
        """The latest number."""

    # for members

    def waiting(self, but: Container[str]) -> tuple[Member, ...]:
        """Those who wait, whose process has not ended, and whose names are not among these."""
        self._store.set("looked", str(time.time_ns()))
        latest = self._store.add("waiting", 0)
        self._waiting.update(dict.fromkeys(range(self._seen + 1, latest + 1)))
        self._seen = latest
        for number in list(self._waiting):
            member = self._waiting[number] or self._told(number)
            if member and (member.name in but or has_ended(member)):
                self._store.set(f"joiner/{number}", "")
                del self._waiting[number]
            elif member:
                self._waiting[number] = member
        return tuple(member for member in self._waiting.values() if member)

    def _told(self, number: int) -> Member | None:
        """Who has this number; None: it has not said so yet, or no longer waits."""
        said = self._store.value(f"joiner/{number}")
        if said == b"":
            del self._waiting[number]
        return Member(*json.loads(said)) if said else None

    def invite(self, member: Member, view: View) -> None:
        """Tells one who waits that it is let in. Every member does, since any may die before it has."""
        self._store.set(f"invited/{member.name}", view.dump())

    def members_are(self, view: View) -> None:
        """So that a process that is started again knows whether anybody is left who could let it in. Nobody waits until
        the store knows."""
        threading.Thread(target=self._tell, args=(view,), daemon=True, name="ringreduce lobby").start()

    def _tell(self, view: View) -> None:
        with contextlib.suppress(RuntimeError, OSError):
            now = None
            while now != view.dump():
                now = (self._store.value("members now") or b"").decode()
                if now and View.load(now).epoch >= view.epoch:  # this process was slow
                    return
                now = self._store.compare_set("members now", now, view.dump()).decode()

    def leave(self, name: str) -> None:
        self._store.set(f"left/{name}", "")

    # for those who wait

    def wait(self, me: Member, timeout: float) -> View | None:
        """Until this process is let in; None: all members have left or ended.

        Raises `CollectiveTimeout` when no member has looked who waits for `timeout` seconds.
        """
        store, invited = self._store, f"invited/{me.name}"
        number = store.add("waiting", 1)
        store.set(f"joiner/{number}", json.dumps([me.name, me.address]))
        looked = check = time.monotonic()
        look, over = store.value("looked"), False
        while (text := store.value(invited)) is None:
            now = time.monotonic()
            if now > check + OVER_AFTER:
                check = now
                before, over = over, self.all_gone()
                if over and before:
                    return None
                if (latest := store.value("looked")) != look:
                    look, looked = latest, now
            if now > looked + timeout:
                store.set(f"joiner/{number}", "")
                raise CollectiveTimeout(f"start: no member has looked who waits to be let in for {timeout:.0f} s")
            time.sleep(PAUSE)
        return View.load(text.decode())

    def latest(self) -> View | None:
        """The latest view that the store knows of."""
        said = self._store.value("members now")
        return View.load(said.decode()) if said else None

    def all_gone(self) -> bool:
        """Whether every member that the store knows of has left, or has ended on this machine."""
        view = self.latest()
        return view is not None and all(
            self._store.check([f"left/{member.name}"]) or has_ended(member) for member in view.members
        )


class Home:
    """Of one world, as this process sees it."""

    def __init__(self, store: KeyStore) -> None:
        """`store`: the launcher's, or one in etcd."""
        self.store, self.lobby = store, Lobby(store)
        self.ledger: Ledger | None = None
        """In memory that the members share, if all are on one machine. Then they agree there, and not in the store."""
        self.ready: Ready | None = None
        """For the group of the next view that this process is in."""
        self._memfd = -1
        self._kept: list[Store] = []
        """The latest two that are implemented in Python: torch keeps their C++ half alone."""

    def address(self) -> str:
        """Whatever others need to reach this process, and to make a group with what it has ready."""
        who = rendezvous.identity()._asdict()
        return json.dumps({**who, "ledger": self.ledger_place(), "card": self.ready.card if self.ready else None})

    def prepared(self, view: View) -> Prepared | None:
        """For the group of this view; None: its members have to ask a store for what they need."""
        ready, self.ready = self.ready, None
        cards = [json.loads(member.address)["card"] for member in view.members]
        if ready and None not in cards:
            return Prepared(ready, cards)
        if ready:
            ready.close()
        return None

    def give_up(self) -> None:
        """There will be no next group."""
        if self.ready:
            self.ready.close()
            self.ready = None

    def ledger_place(self) -> list[Any] | None:
        """Where processes of this machine find the ledger: a path, and what the file there must be."""
        if self.ledger is None:
            return None
        return [f"/proc/{os.getpid()}/fd/{self._memfd}", rendezvous.kernel(), os.fstat(self._memfd).st_ino]

    def open_ledger(self, place: list[Any] | None) -> bool:
        """Whether it could be opened here."""
        if place is None or place[1] != rendezvous.kernel():
            return False
        try:
            memfd = os.open(place[0], os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        if os.fstat(memfd).st_ino != place[2]:
            os.close(memfd)
            return False
        self._memfd, self.ledger = memfd, Ledger(memfd, 0, LEDGER_BYTES)
        return True

    def share_ledger(self, rank: int) -> None:
        """Among the ranks of the default group, which are on one host, if they see each other's descriptors."""
        if rank == 0:
            self._make_ledger()
        told: list[Any] = [self.ledger_place()]
        dist.broadcast_object_list(told, 0)
        shared = torch.tensor([float(rank == 0 or self.open_ledger(told[0]))])
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        if not shared:
            self.ledger = None

    def open_a_ledger(self, me: str, view: View, seconds: float) -> bool:
        """If the members share one; False: it cannot be opened here. Those of the view may have ended while this
        process was slow; others joined since. These tell where they have it open when the next view begins, which this
        process waits for."""
        until = time.monotonic() + seconds
        while True:
            if self._opens_one_of(view) or self._opens_one_of(latest := self.lobby.latest() or view):
                return True
            others = [member for member in latest.members if member.name != me]
            told = [json.loads(member.address)["ledger"] or has_ended(member) for member in others]
            if all(told) or time.monotonic() > until:
                return False
            time.sleep(0.02)

    def _opens_one_of(self, view: View) -> bool:
        """Also if there is none."""
        ledgers = [ledger for member in view.members if (ledger := json.loads(member.address)["ledger"])]
        return not ledgers or any(map(self.open_ledger, ledgers))

    def _make_ledger(self) -> None:
        self._memfd = os.memfd_create("ringreduce world", os.MFD_CLOEXEC)
        os.ftruncate(self._memfd, LEDGER_BYTES)
        self.ledger = Ledger(self._memfd, 0, LEDGER_BYTES)

    def look_every(self) -> float:
        """Seconds between two looks whether a member has left."""
        return LOOK_IN_LEDGER if self.ledger else LOOK_IN_STORE

    def directory(self) -> Directory:
        return self.ledger if self.ledger else self.store.directory("members")

    def place(self, epoch: int) -> Store:
        """Where the group of an epoch is made."""
        if self.ledger:
            made = KeyStore(self.ledger, f"epoch {epoch}/")
            self._kept = [*self._kept[-1:], made]
            return made
        return PrefixStore(f"epoch {epoch}", self.store)
