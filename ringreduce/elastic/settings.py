"""What a process was started with, and what of it all members must have alike."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringreduce.config import Options
from ringreduce.coordination.endpoint import Address, address_of
from ringreduce.coordination.process import identity
from ringreduce.coordination.protocol import Member, View
from ringreduce.coordination.watch import Watch
from ringreduce.elastic.context import WorldContext
from ringreduce.errors import InvalidArgument
from ringreduce.groups.ready import ready_for_a_group

if TYPE_CHECKING:
    from ringreduce.groups.between_hosts import Wire


@dataclass
class Settings:
    """The arguments of `start`, and what else a process has before it is a member."""

    me: str
    """This process's name, which no other process ever has."""
    options: Options | None
    timeout: float
    least: int
    unit: int
    position: int
    """This process's position in its unit."""
    most: int
    patience: float
    expel_after: float
    context: WorldContext

    def alike(self) -> dict[str, float]:
        """Those that all members must have alike, by the names of `start`'s arguments."""
        most = self.most if self.most < sys.maxsize else 0
        return {"least": self.least, "unit": self.unit, "world_size - spares": most, "patience": self.patience}

    def member(self) -> Member:
        """This process as a member."""
        endpoint = self.context.ready.endpoint if self.context.ready else None
        settings = self.alike() | {"position": self.position}
        return Member(self.me, Address(identity(), self.context.ledger_address(), endpoint, settings).dump())

    def check(self, other: Member, who: str) -> None:
        """Raises `InvalidArgument` if another process was started differently."""
        theirs = address_of(other).settings
        for name, mine in self.alike().items():
            if theirs[name] != mine:
                raise InvalidArgument(
                    f"start: {name} is {mine:g} here and {theirs[name]:g} on {who}; give all processes the same"
                )

    def room_for(self, size: int, waiting: tuple[Member, ...]) -> tuple[Member, ...]:
        """The first of the waiting processes, in whole units, for which there is room beside `size` members."""
        position = {each: address_of(each).settings["position"] for each in waiting}
        alike = [[each for each in waiting if position[each] == wanted] for wanted in range(self.unit)]
        units = list(zip(*alike, strict=False))[: max(self.most - size, 0) // self.unit]
        return tuple(member for each in units for member in each)

    def get_ready(self, wire: Wire | None) -> None:
        """Prepares this process's part of the next group, unless it is prepared.

        `wire`: what the latest group with links to other hosts has measured of the network.
        """
        context = self.context
        context.ready = context.ready or ready_for_a_group(self.options, not context.ledger, wire)

    def watch(self, view: View) -> Watch:
        """Begins to watch the other members of a view."""
        return Watch(view, self.me, self.context.directory(), self.context.look_every())
