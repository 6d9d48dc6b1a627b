"""An order as what torch's DataLoader takes for a batch sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler as TorchSampler

from ringreduce.common.failures import InvalidArgument
from ringreduce.data.order import Order


class Sampler(TorchSampler[list[int]]):
    """Lists of ids, one a step, for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`.

    Each iteration goes on at `step` and ends with the epoch that `step` is in. A DataLoader with workers asks for
    batches before it hands them out, so the program counts the steps that it has used, and sets `step` to resume.

    order: which ids; rank, size: whose share of each batch, of how many. Raises `InvalidArgument`.
    """

    def __init__(self, order: Order, rank: int = 0, size: int = 1, step: int = 0) -> None:
        order.span(step, rank, size)  # checks them
        self.order, self.rank, self.size, self.step = order, rank, size, step

    def __iter__(self) -> Iterator[list[int]]:
        end = self.order.steps(self.order.epoch(self.step) + 1)
        while self.step < end:
            self.step += 1
            yield self.order.ids(self.step - 1, self.rank, self.size).tolist()

    def __len__(self) -> int:
        """How many batches an iteration that starts now has."""
        return self.order.steps(self.order.epoch(self.step) + 1) - self.step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "order": self.order.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `InvalidArgument` if the state is of another order."""
        self.step = step_of(state, self.order)


def step_of(state: dict[str, Any], order: Order) -> int:
    """The step in a checkpoint's state, whose order must be this one. Raises `InvalidArgument`."""
    if state.get("order") != order.state():
        raise InvalidArgument(
            f"load_state_dict: state is of the order {state.get('order')}, and this one is {order.state()}; a step of "
            "one says nothing about the other"
        )
    return int(state["step"])
