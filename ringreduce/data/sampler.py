"""An order as what torch's DataLoader takes for a batch sampler."""

from __future__ import annotations

from torch.utils.data import Sampler as TorchSampler

from ringreduce.data.order import Order
from ringreduce.data.steps import Steps


class Sampler(Steps[list[int]], TorchSampler[list[int]]):
    """Lists of ids, one a step, for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`.

    Each iteration goes on at `step` and ends with the epoch that `step` is in. A DataLoader with workers asks for
    batches before it hands them out, so the program counts the steps that it has used, and sets `step` to resume.

    order: which ids; rank, size: whose share of each batch, of how many. Raises `InvalidArgument`.
    """

    def __init__(self, order: Order, rank: int = 0, size: int = 1, step: int = 0) -> None:
        order.span(step, rank, size)  # checks them
        self.order, self.rank, self.size, self.step = order, rank, size, step

    def batch_of(self, step: int) -> list[int]:
        ids: list[int] = self.order.ids(step, self.rank, self.size).tolist()
        return ids
