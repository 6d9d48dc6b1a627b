"""Where processes wait to be let into a changing group: in a store that all of them can reach, such as the launcher's.

    joiner/N       who came as the Nth; empty: it no longer waits
    invited/NAME   the view in which it is a member
    ledger/NAME    where a member has the ledger open, if the members share one
    members now    the latest view
    left/NAME      this member has left

Its calls raise what the store does, if that is gone.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Container
from typing import Any

from torch._C._distributed_c10d import Store

from ringreduce.common.failures import CollectiveTimeout
from ringreduce.membership.protocol import Member, View
from ringreduce.watch import has_ended

OVER_AFTER = 1.0
"""Seconds between the two looks after which a process that waits believes that all members have gone."""
PAUSE = 0.005
"""Seconds between two looks of a process that waits."""

log = logging.getLogger(__name__)


class Lobby:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[int, Member | None] = {}
        """Who waits, by its number; None: it has a number, and has not said who it is."""
        self._seen = 0
        """The latest number."""

    # for members

    def waiting(self, but: Container[str]) -> tuple[Member, ...]:
        """Those who wait, whose process has not ended, and whose names are not among these."""
        self._store.add("looks", 1)
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
        if not self._store.check([f"joiner/{number}"]):
            return None
        if said := self._store.get(f"joiner/{number}"):
            return Member(*json.loads(said))
        del self._waiting[number]
        return None

    def invite(self, member: Member, view: View) -> None:
        """Tells one who waits that it is let in. Every member does, since any may die before it has."""
        self._store.set(f"invited/{member.name}", view.dump())

    def members_are(self, view: View) -> None:
        """So that a process that is started again knows whether anybody is left who could let it in."""
        self._store.set("members now", view.dump())

    def ledger_is(self, name: str, place: list[Any]) -> None:
        self._store.set(f"ledger/{name}", json.dumps(place))

    def leave(self, name: str) -> None:
        self._store.set(f"left/{name}", "")

    # for those who wait

    def ledgers(self, view: View) -> list[list[Any]]:
        """Where members have the ledger open that they share. None: they share none."""
        keys = [f"ledger/{name}" for name in view.names]
        return [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]

    def wait(self, me: Member, timeout: float) -> View | None:
        """Until this process is let in; None: all members have left or ended.

        Raises `CollectiveTimeout` when no member has looked who waits for `timeout` seconds.
        """
        store, invited = self._store, f"invited/{me.name}"
        number = store.add("waiting", 1)
        store.set(f"joiner/{number}", json.dumps([me.name, me.address]))
        looked = check = time.monotonic()
        looks, over = store.add("looks", 0), False
        while not store.check([invited]):
            now = time.monotonic()
            if now > check + OVER_AFTER:
                check = now
                before, over = over, self._all_gone()
                if over and before:
                    return None
                if (latest := store.add("looks", 0)) != looks:
                    looks, looked = latest, now
            if now > looked + timeout:
                store.set(f"joiner/{number}", "")
                raise CollectiveTimeout(f"start: no member has looked who waits to be let in for {timeout:.0f} s")
            time.sleep(PAUSE)
        return View.load(store.get(invited).decode())

    def _all_gone(self) -> bool:
        """Whether every member that the store knows of has left, or has ended on this machine."""
        if not self._store.check(["members now"]):
            return False
        members = View.load(self._store.get("members now").decode()).members
        return all(self._store.check([f"left/{member.name}"]) or has_ended(member) for member in members)
