"""How ranks tell each other things while a group is made, by any store: torch's, or one without torch.

    exchange = Exchange(store, rank, size, timeout)
    exchange.arrive(endpoint)                                          # on all ranks
    answer = exchange("doors", ["10.0.0.1:5"], lambda values: ...)     # on all ranks; `values` are theirs, on rank 0

Every rank tells the store its value; rank 0 alone collects them, and what it makes of them all get. So a rank asks the
store a number of times that does not grow with the ranks. A wait ends early when a rank has said that it cannot go on
(`give_up`), or when a process of this machine that is waited for has ended.

Waits look less and less often, after a quarter of the time that has passed. They do not block in the store: torch's
keeps its lock meanwhile, and ranks may be threads that share one; and it writes a warning for each wait that times out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringreduce.common.failures import InvalidArgument, RingReduceError
from ringreduce.coordination.endpoint import Config, Endpoint
from ringreduce.coordination.store import value_of
from ringreduce.coordination.wait import CHECK_PROCESSES
from ringreduce.groups.arrivals import WHO, Arrivals, ignore, passed
from ringreduce.groups.waiting import Wait


class Exchange(Arrivals):
    """A rank's part in making one group."""

    def arrive(self, endpoint: Endpoint) -> None:
        """Tells the others that this rank is here, with what it has to tell in the first phase."""
        if self.endpoints:
            return
        self._endpoint: Endpoint = endpoint | {"id": self.id}
        self._set_arrival()
        if self.rank == 0:
            self.attempt = self.id
            self.tell(WHO, self._endpoint)

    def follow(self) -> bool:
        """Takes part in what rank 0 makes; False: rank 0 is not here yet."""
        if self._counted_in or (self.attempt and time.monotonic() < self._looked + CHECK_PROCESSES):
            return True
        self._looked = time.monotonic()
        first = self._arrival(0)
        if first and first.id != self.attempt and self._is_coming(0, first):
            self.attempt = first.id
            self.know(0, first.who)
            if not self._within:  # later ones of this process do not take part in it
                ignore((self.rank, first.id))
            self.tell(WHO, self._endpoint)
        return bool(self.attempt)

    def wait_for_rank_0(self) -> None:
        """Returns when this rank takes part in what rank 0 makes."""
        self._find(self.follow)

    def counts_in(self, roster: Mapping[str, Any]) -> bool:
        """Whether what rank 0 has told of all ranks has the arrival of this one in it, and not one of an earlier
        attempt."""
        self._counted_in = self._counted_in or roster["ids"][self.rank] == self.id
        return self._counted_in

    def roster(self, phase: str) -> Any:
        """What rank 0 has published of all ranks; None: nothing yet."""
        text = value_of(self.store, f"{self.prefix}/{phase}") if self.follow() else None
        roster = json.loads(text) if text else None
        if not roster or not self.counts_in(roster):
            return None
        passed(f"{phase}: answered")
        return roster

    def come_to_roster(self, phase: str) -> Any:
        """The same, once it is there."""
        self.wait_for_rank_0()
        return self._find(lambda: self.roster(phase))

    def __call__(self, phase: str, value: Any, answer: Callable[[list[Any]], Any] = list) -> Any:
        """What rank 0's `answer` makes of the values of all ranks, as JSON has it. To be called on all ranks that have
        been counted in.

        Raises `CollectiveTimeout` naming the ranks that did not come in time; what `answer` raises; `PeerLost` if
        another rank has given up, or is on this machine and has ended.
        """
        self.tell(phase, value)
        if self.rank == 0:
            return self.publish(phase, self.decide(answer, self.collect(phase)))
        return self.answer(phase)

    def check_configs(self, ranks: Sequence[Endpoint]) -> None:
        """Raises `InvalidArgument` if two ranks have different `config`s."""
        first: Config = ranks[0]["config"]
        for r, other in enumerate(ranks):
            config: Config = other["config"]
            differ = [name for name in {**first, **config} if first.get(name) != config.get(name)]
            if differ:
                ours, its = (", ".join(f"{name}={each.get(name)!r}" for name in differ) for each in (first, config))
                raise InvalidArgument(
                    f"options differ between ranks: {self.describe(0)} has {ours}; {self.describe(r)} has {its}; "
                    "give all ranks the same ringreduce.Options and RINGREDUCE_* variables",
                    r,
                )

    def decide(self, answer: Callable[[list[Any]], Any], values: list[Any]) -> Any:
        try:
            return answer(values)
        except RingReduceError as error:  # what rank 0 finds wrong with the ranks' values is everybody's error
            self._tell_error(type(error).__name__, str(error), error.culprit)
            raise

    def tell(self, phase: str, value: Any) -> None:
        self.store.set(f"{self.prefix}/{phase}/{self.rank}", json.dumps(value))
        passed(f"{phase}: told")

    def told(self, phase: str, rank: int, deadline: float | None = None) -> Any:
        """What a rank has told; waits for it until then."""
        if phase == WHO and self.endpoints:
            return self.endpoints[rank]
        key = f"{self.prefix}/{phase}/{rank}"
        if deadline:
            return json.loads(self._find(lambda: value_of(self.store, key), lambda: [rank], deadline))
        return json.loads(self.store.get(key))

    def publish(self, phase: str, answer: Any) -> Any:
        self.store.set(f"{self.prefix}/{phase}", json.dumps(answer))
        passed(f"{phase}: published")
        return answer

    def answer(self, phase: str, deadline: float | None = None) -> Any:
        """What rank 0 has published, or will."""
        text = self._find(lambda: value_of(self.store, f"{self.prefix}/{phase}"), None, deadline)
        passed(f"{phase}: answered")
        return json.loads(text)

    def _find(
        self, look: Callable[[], Any], whom: Callable[[], list[int]] | None = None, deadline: float | None = None
    ) -> Any:
        """What `look` returns, once that is true. There is nothing to wait at but time. Arguments as of `wait`."""
        found: Any = None

        def ready(pause: float) -> bool:
            nonlocal found
            time.sleep(pause)
            found = look()
            return bool(found)

        self.wait(ready, whom, deadline)
        return found

    def collect(self, phase: str) -> list[Any]:
        """What all ranks have told."""
        if phase == WHO and self.endpoints:
            return list(self.endpoints)
        keys = [f"{self.prefix}/{phase}/{rank}" for rank in range(self.size)]
        came: dict[int, Any] = {}

        def late() -> list[int]:
            """Those who have not come; meanwhile, who those are that have."""
            look = phase == WHO and time.monotonic() > self._looked + CHECK_PROCESSES
            for rank in [rank for rank in range(self.size) if rank not in came]:
                if self.store.check([keys[rank]]):
                    came[rank] = self.told(phase, rank)
                    if phase == WHO:
                        self.know(rank, came[rank]["who"])
                elif look and (arrival := self._arrival(rank)):
                    self._is_coming(rank, arrival)
            self._looked = time.monotonic() if look else self._looked
            return [rank for rank in range(self.size) if rank not in came]

        self._find(lambda: self.store.check(keys), late)
        multi_get = getattr(self.store, "multi_get", None)
        texts = multi_get(keys) if multi_get else map(self.store.get, keys)
        passed(f"{phase}: collected")
        told = [json.loads(text) for text in texts]
        if phase == WHO and not self._within:  # a later attempt of this process ignores these arrivals
            ignore(*((self.rank, endpoint["id"]) for endpoint in told))
        return told

    def wait(
        self,
        ready: Callable[[float], bool],
        whom: Callable[[], list[int]] | None = None,
        deadline: float | None = None,
        first: float = 0.0,
    ) -> None:
        """See `Wait`."""
        Wait(self, whom, deadline).until(ready, first)
