"""Trainings by frameworks above torch. Each ends with the comparison with one process, or with what was sent.

A job runs on two ranks in one of three ways: "gloo" is plain Gloo, "name" asks the framework for backend="ringreduce",
and "as_gloo" asks for Gloo with RINGREDUCE_AS_GLOO=1.

python tests/frameworks/ecosystem.py --table [--rounds 3] [JOB ...]   runs them all ways and prints a table
torchrun --nproc-per-node=2 tests/frameworks/ecosystem.py JOB WAY     one of them, for jobs that torchrun starts
python tests/frameworks/ecosystem.py JOB WAY                          for those that start processes themselves
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from frameworks.common import SAMPLES, batch, close, loss_of, network, sgd, trained_alone, values, whole_batch
from frameworks.launch import python, torchrun
from processes import free_ports
from torch import Tensor, nn

RANKS = 2
STEPS = 200
SCRIPT = "tests/frameworks/ecosystem.py"
BACKENDS = {"gloo": "gloo", "name": "ringreduce", "as_gloo": "gloo"}
"""What a framework is asked for in each way."""


def check_group(way: str) -> None:
    """The default group has two ranks, says the name that was asked for, and is the one that was meant."""
    assert dist.get_world_size() == RANKS and dist.get_backend() == BACKENDS[way], (
        dist.get_world_size(),
        dist.get_backend(),
    )
    assert dist.group.WORLD is not None
    group = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
    assert group == ("ProcessGroupGloo" if way == "gloo" else "ProcessGroupRing"), group


def agrees(seconds: float) -> None:
    print(f"rank {dist.get_rank()} agrees after {seconds:.4f} s\n", end="", flush=True)


def check(way: str, model: nn.Module, seconds: float) -> None:
    check_group(way)
    close(model, trained_alone(RANKS, STEPS))
    agrees(seconds)


def train(model: nn.Module, optimizer: Any, backward: Callable[[Tensor], Any] = Tensor.backward) -> float:
    """The usual loop; returns its seconds."""
    begun = time.perf_counter()
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(loss_of(model, *batch(step, dist.get_rank())))
        optimizer.step()
    return time.perf_counter() - begun


def fabric(way: str) -> None:
    """Lightning Fabric: the strategy takes the backend's name."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=DDPStrategy(process_group_backend=BACKENDS[way]))
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, sgd(net))
    check(way, model, train(model, optimizer, fabric.backward))


def lightning(way: str) -> None:
    """Lightning's Trainer: the same."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Batches(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return (batch(step, dist.get_rank()) for step in range(STEPS))

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, xy: tuple[Tensor, Tensor]) -> Tensor:
            loss = loss_of(self.net, *xy)
            self.log("loss", loss, sync_dist=True)  # one more all_reduce
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def on_train_start(self) -> None:
            self.begun = time.perf_counter()

        def on_train_end(self) -> None:
            check(way, self.net, time.perf_counter() - self.begun)

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = DDPStrategy(process_group_backend=BACKENDS[way])
    trainer = Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))


def accelerate(way: str) -> None:
    """Hugging Face Accelerate refuses any name but gloo and mpi on CPUs, and takes a group that is there."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, InitProcessGroupKwargs

    if way == "name":
        with pytest.raises(ValueError, match="not available"):
            Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=BACKENDS[way])])
        AcceleratorState._reset_state(reset_partial_state=True)
        dist.init_process_group(BACKENDS[way])
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    net = network()
    model, optimizer = accelerator.prepare(net, sgd(net))
    seconds = train(model, optimizer, accelerator.backward)
    ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
    assert ranks.tolist() == list(range(RANKS))
    assert accelerator.gather_for_metrics([dist.get_rank()], use_gather_object=True) == list(range(RANKS))
    check(way, model, seconds)
    accelerator.end_training()  # destroys the group


def transformers(way: str) -> None:
    """transformers' Trainer, which makes its group by Accelerate. A small GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    words = torch.randint(64, (RANKS * SAMPLES * STEPS, 12), generator=torch.Generator().manual_seed(0))
    labels = words.clone()
    labels[:, 0] = -100  # nothing predicts a first word; Trainer would count it as predicted
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)

    def gpt2() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "n_positions": 12, "n_embd": 32, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, **without, bos_token_id=0, eos_token_id=0))

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(words)

    if way == "name":
        dist.init_process_group(BACKENDS[way])
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    fixed = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"per_device_train_batch_size": SAMPLES, "max_steps": STEPS, "use_cpu": True}
        arguments = TrainingArguments(folder, **settings, **fixed, **quiet)
        model = gpt2()
        data = [{"input_ids": each, "labels": label} for each, label in zip(words, labels, strict=True)]
        trainer = InOrder(model, arguments, train_dataset=data, optimizers=(sgd(model), None))
        begun = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begun
    alone = gpt2()
    optimizer = sgd(alone)
    both = RANKS * SAMPLES
    for each, label in zip(words.split(both), labels.split(both), strict=True):
        optimizer.zero_grad()
        alone(input_ids=each, labels=label).loss.backward()
        optimizer.step()
    check_group(way)
    agree_in_float32(model, alone, gpt2())
    agrees(seconds)


def agree_in_float32(actual: nn.Module, expected: nn.Module, start: nn.Module) -> None:
    ours, theirs, first = (values(m.parameters()).double() for m in (actual, expected, start))
    assert (theirs - first).abs().max() > 1e-2
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def deepspeed(way: str) -> None:
    """DeepSpeed with ZeRO, stages 1 and 2, whose partitions are reduced, scattered and gathered."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # Else DeepSpeed compiles an all_reduce of its own for inference.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(BACKENDS[way])
    seconds = 0.0
    for stage in (1, 2):
        net = network().float()
        settings = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        }
        engine, *_ = deepspeed.initialize(model=net, optimizer=sgd(net), config=settings)
        begun = time.perf_counter()
        for step in range(STEPS):
            x, y = (each.float() for each in batch(step, dist.get_rank()))
            engine.backward(loss_of(engine, x, y))
            engine.step()
        seconds += time.perf_counter() - begun
        agree_in_float32(net, trained_alone(RANKS, STEPS), network())
    check_group(way)
    agrees(seconds)


def torchtitan(way: str) -> None:
    """torchtitan's groups, meshes, clipping and sums around FSDP2. Its models need triton, and its Trainer a GPU."""
    torch._utils._get_available_device_type = lambda: "cpu"  # without an accelerator torchtitan would take CUDA
    from torch.distributed.fsdp import fully_shard
    from torchtitan.config.configs import CommConfig, ParallelismConfig
    from torchtitan.distributed import ParallelDims, utils

    dist.Backend.default_device_backend_map["cpu"] = BACKENDS[way]  # where torchtitan looks
    with tempfile.TemporaryDirectory() as folder:
        size = utils.init_distributed(CommConfig(), base_folder=folder)
    dims = ParallelDims.from_config(ParallelismConfig(data_parallel_shard_degree=RANKS), size)
    net = network()
    for layer in [each for each in net if isinstance(each, nn.Linear)] + [net]:
        fully_shard(layer, mesh=dims.get_mesh("dp_shard"))
    losses: list[float] = []

    def backward(loss: Tensor) -> None:
        loss.backward()
        utils.clip_grad_norm_(net.parameters(), 0.1)
        losses.append(utils.dist_sum(loss.detach(), dims.get_mesh("loss")) / RANKS)

    seconds = train(net, sgd(net), backward)
    alone = network()
    optimizer = sgd(alone)
    for step, ours in enumerate(losses):
        optimizer.zero_grad()
        loss = loss_of(alone, *whole_batch(step, RANKS))
        assert abs(ours - loss.item()) < 1e-6
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
    check_group(way)
    close(net, alone)
    agrees(seconds)


def torchmetrics(way: str) -> None:
    """torchmetrics gathers the states of metrics when they are computed, also lists of different lengths."""
    from torchmetrics import CatMetric, MeanSquaredError, MetricCollection
    from torchmetrics.classification import MulticlassAccuracy

    dist.init_process_group(BACKENDS[way])
    squares, accuracy = MeanSquaredError(), MulticlassAccuracy(num_classes=4)
    begun = time.perf_counter()
    for step in range(STEPS):
        x, y = batch(step, dist.get_rank())
        squares.update(x[:, :4].contiguous(), y)
        accuracy.update(x[:, :4], y.argmax(1))
        ours = squares.compute(), accuracy.compute()
    seconds = time.perf_counter() - begun
    alone = MetricCollection({"squares": MeanSquaredError(), "accuracy": MulticlassAccuracy(num_classes=4)})
    for each in alone.values():
        each.distributed_available_fn = lambda: False
    for step in range(STEPS):
        x, y = whole_batch(step, RANKS)
        alone["squares"].update(x[:, :4].contiguous(), y)
        alone["accuracy"].update(x[:, :4], y.argmax(1))
    torch.testing.assert_close(ours, (alone["squares"].compute(), alone["accuracy"].compute()))
    every = CatMetric()
    every.update(torch.full((1 + dist.get_rank(),), float(dist.get_rank())))
    assert every.compute().tolist() == [0.0, 1.0, 1.0]
    check_group(way)
    agrees(seconds)


class Torque(nn.Module):
    """A policy for torchrl's pendulum; torchrl's workers import it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, th: Tensor) -> Tensor:
        return self.weight * th.unsqueeze(-1)


def torchrl(way: str) -> None:
    """torchrl's collector: the policy's weights go to a worker by messages, and what it has seen comes back."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors.distributed import DistributedCollector
    from torchrl.envs import PendulumEnv

    policy = TensorDictModule(Torque(), in_keys=["th"], out_keys=["action"])
    (port,) = free_ports(1)
    sizes = {"frames_per_batch": 32, "total_frames": 32 * STEPS}
    collector = DistributedCollector(
        [PendulumEnv], policy, **sizes, sync=True, launcher="mp", backend=BACKENDS[way], tcp_port=port
    )
    check_group(way)
    begun = time.perf_counter()
    for step, data in enumerate(collector, 1):
        torch.testing.assert_close(data["action"], step * data["th"].unsqueeze(-1))
        with torch.no_grad():
            policy.module.weight += 1
        collector.update_policy_weights_()
    agrees(time.perf_counter() - begun)
    collector.shutdown()


def ray(way: str) -> None:
    """Ray Train: `TorchConfig` takes the backend's name."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

    with tempfile.TemporaryDirectory() as storage:

        def work() -> None:
            net = network()
            model = prepare_model(net)
            seconds = train(model, sgd(net))
            check(way, model, seconds)
            Path(storage, f"rank {dist.get_rank()} agrees after {seconds:.4f} s").touch()

        ray.init(num_cpus=RANKS, include_dashboard=False)
        trainer = TorchTrainer(
            work,
            torch_config=TorchConfig(backend=BACKENDS[way]),
            scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(storage_path=storage),
        )
        trainer.fit()
        ray.shutdown()
        print(*(path.name for path in Path(storage).glob("rank*")), sep="\n")


def tune(way: str) -> None:
    """Ray Tune: each trial is a Ray Train of two ranks, one after the other."""
    import ray
    from ray import tune
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

    rates = [0.01, 0.1]

    def optimizer(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    with tempfile.TemporaryDirectory() as storage:

        def work(config: dict[str, float]) -> None:
            net = network()
            model = prepare_model(net)
            seconds = train(model, optimizer(config["lr"])(net))
            check_group(way)
            close(model, trained_alone(RANKS, STEPS, optimizer(config["lr"])))
            end = Path(storage, f"lr {config['lr']}, rank {dist.get_rank()} agrees after {seconds:.4f} s")
            end.write_text(str(loss_of(model, *batch(STEPS, 0)).item()))

        def trial(config: dict[str, float]) -> None:
            trainer = TorchTrainer(
                work,
                train_loop_config=config,
                torch_config=TorchConfig(backend=BACKENDS[way]),
                scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
                run_config=RunConfig(storage_path=storage, name=f"lr {config['lr']}"),
            )
            trainer.fit()
            (end,) = Path(storage).glob(f"lr {config['lr']}, rank 0*")
            tune.report({"loss": float(end.read_text())})

        ray.init(num_cpus=RANKS + 1, include_dashboard=False)
        found = tune.Tuner(
            trial,
            param_space={"lr": tune.grid_search(rates)},
            tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
            run_config=tune.RunConfig(storage_path=storage),
        ).fit()
        ray.shutdown()
        losses = {result.config["lr"]: result.metrics["loss"] for result in found}
        assert sorted(losses) == rates and found.get_best_result().config["lr"] == min(losses, key=losses.__getitem__)
        ends = [path.name for path in Path(storage).glob("lr*rank*")]
        assert len(ends) == len(rates) * RANKS, ends
        print(*(end.split(", ")[1] for end in ends), sep="\n")


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


class Job(NamedTuple):
    run: Callable[[str], None]
    package: str
    launched: bool = True
    """By torchrun. Others start processes themselves."""


JOBS = {
    "accelerate": Job(accelerate, "accelerate"),
    "deepspeed": Job(deepspeed, "deepspeed"),
    "fabric": Job(fabric, "lightning"),
    "lightning": Job(lightning, "lightning"),
    "ray": Job(ray, "ray", launched=False),
    "torchmetrics": Job(torchmetrics, "torchmetrics"),
    "torchrl": Job(torchrl, "torchrl", launched=False),
    "torchtitan": Job(torchtitan, "torchtitan"),
    "transformers": Job(transformers, "transformers"),
    "tune": Job(tune, "ray", launched=False),
}


def run(name: str, way: str) -> float:
    """Runs a job in processes of its own; the seconds of its training on rank 0. An AssertionError unless it passes."""
    job = JOBS[name]
    as_gloo = "1" if way == "as_gloo" else "0"
    output = (torchrun if job.launched else python)(SCRIPT, name, way, RINGREDUCE_AS_GLOO=as_gloo)
    seconds = dict(re.findall(r"^rank (\d) agrees after ([\d.]+) s$", output, re.MULTILINE))
    assert len(seconds) == (1 if name == "torchrl" else RANKS), output
    return float(seconds["0"])


def table(names: list[str], rounds: int) -> int:
    """Prints it; returns how many runs have failed."""
    failures = 0
    print("| framework | version | Gloo | by name | as Gloo |\n|---|---|---|---|---|")
    for name in names:
        seconds: dict[str, list[float]] = {way: [] for way in BACKENDS}
        for way in [*BACKENDS] * rounds:
            try:
                seconds[way].append(run(name, way))
            except AssertionError as failure:
                failures += 1
                print(failure, file=sys.stderr)
        medians = {way: statistics.median(each) for way, each in seconds.items() if len(each) == rounds}
        gloo = medians.get("gloo")
        cells = dict.fromkeys(BACKENDS, "failed") | {way: f"passed, {each:.2f} s" for way, each in medians.items()}
        if gloo:
            cells |= {way: f"passed, {gloo / each:.1f}x" for way, each in medians.items() if way != "gloo"}
        print(f"| {name} | {version(JOBS[name].package)} | {' | '.join(cells.values())} |", flush=True)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.table:
        sys.exit(table(given.names or list(JOBS), given.rounds) and 1)
    name, way = given.names
    actors() if name == "actors" else JOBS[name].run(way)
    if dist.is_initialized():
        dist.destroy_process_group()  # a Gloo group that is left to the end of the process may abort it


if __name__ == "__main__":
    main()
