"""What a member's address says about it, as JSON: who it is, where its ledger is, its card, and its settings."""

from __future__ import annotations

import functools
import json
from typing import Any

from ringreduce.membership.protocol import Member
from ringreduce.rendezvous import store as rendezvous
from ringreduce.rendezvous.store import Card


def address(ledger: list[Any] | None, card: Card | None, settings: dict[str, float]) -> str:
    """This process's address. `ledger`: see `Home.ledger_place`. `card`: of its part of the next group, if prepared.

    `settings`: those that it was started with.
    """
    who = rendezvous.identity()._asdict()
    return json.dumps({**who, "ledger": ledger, "card": card, "settings": settings})


@functools.lru_cache(maxsize=256)
def _facts(text: str) -> dict[str, Any]:
    """An address's content. Callers must not change it. Kept, since each change asks several times."""
    facts: dict[str, Any] = json.loads(text)
    return facts


def ledger_of(member: Member) -> list[Any] | None:
    """Where the member has its ledger open; None: it has none."""
    ledger: list[Any] | None = _facts(member.address)["ledger"]
    return ledger


def card_of(member: Member) -> Card | None:
    """The member's card for the next group; None: it has prepared nothing."""
    card: Card | None = _facts(member.address)["card"]
    return card


def settings_of(member: Member) -> dict[str, float]:
    """What the member was started with."""
    settings: dict[str, float] = _facts(member.address)["settings"]
    return settings


def who_here(member: Member) -> rendezvous.Who | None:
    """The member's identity, if it is in this process's PID namespace."""
    facts = _facts(member.address)
    who = rendezvous.Who(*(facts[name] for name in rendezvous.Who._fields))
    return who if who.pids == rendezvous.identity().pids else None


def has_ended(member: Member) -> bool:
    """Whether the member's process has ended, as far as this process can see."""
    who = who_here(member)
    return who is not None and rendezvous.has_ended(who)
