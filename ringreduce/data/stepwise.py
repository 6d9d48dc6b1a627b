"""What `Loader` and `Sampler` have alike: they go through an order step by step, and a checkpoint has the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from ringreduce.common.failures import InvalidArgument
from ringreduce.common.launcher import check_alone
from ringreduce.data.order import Order

Batch = TypeVar("Batch")


def share(call: str, rank: int | None, size: int | None) -> tuple[int, int]:
    """A rank and of how many; by default, of the default group, or of one rank where there is none.

    Raises `InvalidArgument` in the name of `call`, if there is none, and a launcher has started several processes.
    """
    if rank is not None and size is not None:
        return rank, size
    if not (in_group := dist.is_initialized()):
        check_alone(call, "give rank= and size=, or make the default group first")
    default = (dist.get_rank(), dist.get_world_size()) if in_group else (0, 1)
    return default[0] if rank is None else rank, default[1] if size is None else size


class Stepwise(Generic[Batch]):
    """Batches from step `self.step` to the end of the epoch that it is in. `self.step` counts them."""

    order: Order
    step: int

    def batch_of(self, step: int) -> Batch:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Batch]:
        end = self.step + len(self)
        while self.step < end:
            self.step += 1  # before the batch is used, so that a checkpoint in the loop's body says what comes next
            yield self.batch_of(self.step - 1)

    def __len__(self) -> int:
        """How many batches an iteration that starts now has."""
        return self.order.steps(self.order.epoch(self.step) + 1) - self.step

    def state_dict(self) -> dict[str, Any]:
        """Where an iteration goes on, for a checkpoint. The same for any number of ranks."""
        return {"step": self.step, "order": self.order.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `InvalidArgument` if the state is of another order."""
        if state.get("order") != self.order.state():
            raise InvalidArgument(
                f"load_state_dict: state is of the order {state.get('order')}, and this one is {self.order.state()}; a "
                "step of one says nothing about the other"
            )
        self.step = int(state["step"])
