"""Trainings by frameworks above torch, on `backend="ringreduce"`; each ends with the comparison with one process. And a
parameter server of Ray actors.

torchrun --nproc-per-node=2 tests/frameworks/ecosystem.py fabric|accelerate
python tests/frameworks/ecosystem.py ray|actors
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from frameworks.common import batch, close, loss_of, network, sgd, trained_alone

RANKS = 2
STEPS = 4


def check(model: torch.nn.Module) -> None:
    assert dist.get_backend() == "ringreduce" and dist.get_world_size() == RANKS
    close(model, trained_alone(RANKS, STEPS))
    print(f"rank {dist.get_rank()} agrees\n", end="", flush=True)


def fabric() -> None:
    """Lightning Fabric: the strategy takes the backend's name."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=DDPStrategy(process_group_backend="ringreduce"))
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, sgd(net))
    for step in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, *batch(step, fabric.global_rank)))
        optimizer.step()
    check(model)


def accelerate() -> None:
    """Hugging Face Accelerate takes a group that is there. On CPUs it refuses any name but gloo, mpi and ccl itself:
    `InitProcessGroupKwargs(backend="ringreduce")` is a ValueError, "Your assigned backend ringreduce is not available".
    """
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    dist.init_process_group("ringreduce")
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    net = network()
    model, optimizer = accelerator.prepare(net, sgd(net))
    for step in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, *batch(step, accelerator.process_index)))
        optimizer.step()
    check(model)
    ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
    assert ranks.tolist() == list(range(RANKS))
    accelerator.end_training()  # destroys the group


def ray() -> None:
    """Ray Train: `TorchConfig` takes the backend's name."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

    with tempfile.TemporaryDirectory() as storage:

        def work() -> None:
            net = network()
            model, optimizer = prepare_model(net), sgd(net)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, *batch(step, dist.get_rank())).backward()
                optimizer.step()
            check(model)
            Path(storage, f"rank {dist.get_rank()} agrees").touch()

        ray.init(num_cpus=RANKS, include_dashboard=False)
        trainer = TorchTrainer(
            work,
            torch_config=TorchConfig(backend="ringreduce"),
            scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=storage),
        )
        trainer.fit()
        ray.shutdown()
        print(*(path.name for path in Path(storage).glob("rank*")))


def actors() -> None:
    """A parameter server of Ray actors, two servers and two workers. One server is killed, and its backup goes on."""
    import ray
    from torch.distributed import TCPStore

    import ringreduce.parameter_server as ps

    @ray.remote(num_cpus=0)
    class Server:
        def __init__(self, port: int, rank: int) -> None:
            store = TCPStore("127.0.0.1", port, is_master=False)
            self.serving = ps.serve(store, rank=rank, size=2, backups=1)

        def wait(self) -> bool:
            return self.serving.wait(60)

    @ray.remote(num_cpus=0)
    class Worker:
        def __init__(self, port: int) -> None:
            self.kv = ps.join(TCPStore("127.0.0.1", port, is_master=False), role="worker", workers=RANKS)
            self.net = network()
            update = ps.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
            self.kv.init(dict(self.net.named_parameters()), update=update, mode=ps.sync())

        def train(self, first: int, last: int) -> dict[str, torch.Tensor]:
            parameters = dict(self.net.named_parameters())
            for step in range(first, last):
                self.net.zero_grad()
                loss_of(self.net, *batch(step, self.kv.worker - 2)).backward()
                pushed = {name: each.grad for name, each in parameters.items()}
                self.kv.push_pull(pushed, out={name: each.detach() for name, each in parameters.items()}).wait()
            return {name: each.detach() for name, each in parameters.items()}

        def leave(self) -> None:
            self.kv.leave()

    ray.init(num_cpus=RANKS, include_dashboard=False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    servers = [Server.remote(store.port, rank) for rank in range(2)]
    workers = [Worker.remote(store.port) for _ in range(RANKS)]
    ray.get([worker.train.remote(0, STEPS // 2) for worker in workers])
    ray.kill(servers[0])
    for rank, parameters in enumerate(ray.get([worker.train.remote(STEPS // 2, STEPS) for worker in workers])):
        model = network()
        model.load_state_dict(parameters)
        close(model, trained_alone(RANKS, STEPS))
        print(f"rank {rank} agrees")
    ray.get([worker.leave.remote() for worker in workers])
    assert ray.get(servers[1].wait.remote())
    ray.shutdown()


if __name__ == "__main__":
    {"fabric": fabric, "accelerate": accelerate, "ray": ray, "actors": actors}[sys.argv[1]]()
