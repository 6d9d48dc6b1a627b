"""Optimizers that communicate: ZeroRedundancyOptimizer and post-local SGD, against one process.

torch.distributed.optim is imported by the ranks only, since that alone gives tens of deprecation warnings.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks
from frameworks.common import batch, close, loss_of, network, trained_alone
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


@on_ranks(3)
def test_zero_redundancy_optimizer(me: Rank) -> None:
    """Each rank has Adam's moments of its share only; together they are those of one process."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with me.join():
        model = DistributedDataParallel(network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, *batch(step, me.rank)).backward()
            optimizer.step()

        def adam(parameters: object) -> torch.optim.Optimizer:
            return torch.optim.Adam(parameters, lr=0.01)

        reference = trained_alone(me.size, STEPS, lambda model: adam(model.parameters()))
        close(model, reference)
        held = [state["exp_avg"].numel() for state in optimizer.optim.state.values()]
        assert 0 < sum(held) < sum(p.numel() for p in model.parameters())

        optimizer.consolidate_state_dict(to=1)
        if me.rank == 1:
            assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


WARM_UP = 2  # steps in which all gradients are averaged
PERIOD = 2  # steps from one averaging of all models to the next


@on_ranks(4)
def test_post_local_sgd(me: Rank) -> None:
    """After the warm-up, pairs average gradients in every step, and all ranks their models in every second one."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    with me.join():
        pair, _ = dist.new_subgroups(2)
        model = DistributedDataParallel(network())
        model.register_comm_hook(PostLocalSGDState(None, pair, WARM_UP), post_localSGD_hook)
        averager = PeriodicModelAverager(PERIOD, warmup_steps=WARM_UP)
        optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)

        replicas = [network() for _ in range(me.size // 2)]  # one for each pair
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, *batch(step, me.rank)).backward()
            optimizer.step()

            for index, replica in enumerate(replicas):
                replica.zero_grad()
                sources = range(me.size) if step < WARM_UP else (2 * index, 2 * index + 1)
                for rank in sources:
                    (loss_of(replica, *batch(step, rank)) / len(sources)).backward()
                torch.optim.SGD(replica.parameters(), lr=0.1).step()
            if step >= WARM_UP and (step - WARM_UP) % PERIOD == 0:
                for copies in zip(*(replica.parameters() for replica in replicas), strict=True):
                    mean = torch.stack([copy.data for copy in copies]).mean(0)
                    for copy in copies:
                        copy.data.copy_(mean)
            close(model, replicas[me.rank // 2])
