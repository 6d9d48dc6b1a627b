"""An order as what torch's DataLoader takes for a batch sampler."""

from __future__ import annotations

from torch.utils.data import Sampler as TorchSampler

from ringreduce.data.order import Order
from ringreduce.data.stepwise import Stepwise, share


class Sampler(Stepwise[list[int]], TorchSampler[list[int]]):
    """Lists of ids, one a step, for `torch.utils.data.DataLoader(dataset, batch_sampler=...)`.

    Each iteration goes on at `step` and ends with the epoch that `step` is in. A DataLoader with workers asks for
    batches before it hands them out, so the program counts the steps that it has used, and sets `step` to resume.

    order: which ids; rank, size: whose share of each batch, of how many; by default, of the default group when a batch
    is drawn. Raises `InvalidArgument`.
    """

    def __init__(self, order: Order, rank: int | None = None, size: int | None = None, step: int = 0) -> None:
        if rank is not None and size is not None:
            order.span(step, rank, size)
        else:  # they are looked up, and checked, when a batch is drawn
            order.span(step, 0, 1)
        self.order, self.rank, self.size, self.step = order, rank, size, step

    def batch_of(self, step: int) -> list[int]:
        ids: list[int] = self.order.ids(step, *share("Sampler", self.rank, self.size)).tolist()
        return ids
