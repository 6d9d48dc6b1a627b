"""Trains examples/train_ddp.py's network on the same digits by a parameter server: the loop stays as it is.

    torchrun --nproc-per-node=2 examples/train_push_pull.py                        synchronously
    torchrun --nproc-per-node=2 examples/train_push_pull.py --mode asynchronous    the last worker is slow
    torchrun --nproc-per-node=2 examples/train_push_pull.py --mode ssp

Gradients are pushed by hooks while backward runs, servers update, and step() returns when the new parameters are there.
Synchronously, workers have the bits of one process that adds the workers' gradients in order, divides by their number
and calls the same optimizer. Otherwise a slow worker holds up nobody, or only by --staleness steps.

Exit code: 0, 1 if bits differ or the test accuracy is below 90%.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from train_ddp import Digits, make_model

import ringreduce.parameter_server as ps


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def train(kv: ps.KeyValue, mode: ps.Mode, digits: Digits, args: argparse.Namespace, size: int) -> nn.Module:
    model = make_model()
    optimizer = ps.attach(kv, model, make_optimizer(model), mode=mode)
    for epoch in range(args.epochs):
        for x, y in digits.shards(epoch, args.batch, kv.worker, size):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if mode.mode != "sync" and kv.worker == size - 1:
                time.sleep(args.delay)
        if kv.worker == 0:
            print(f"  epoch {epoch + 1:2}   test accuracy {digits.accuracy(model):.1%}", flush=True)
    optimizer.detach()
    return model


def alone(digits: Digits, args: argparse.Namespace, size: int) -> nn.Module:
    """One process with the gradients of all workers, in order."""
    model = make_model()
    optimizer = make_optimizer(model)
    for epoch in range(args.epochs):
        for shards in zip(*(digits.shards(epoch, args.batch, rank, size) for rank in range(size)), strict=True):
            sums: list[torch.Tensor] = []
            for x, y in shards:
                gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
                sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else list(gradients)
            for parameter, total in zip(model.parameters(), sums, strict=True):
                parameter.grad = total / size
            optimizer.step()
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("sync", "asynchronous", "ssp"), default="sync")
    parser.add_argument("--staleness", type=int, default=3, help="of ssp (default 3)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=96, help="samples per step over all workers (default 96)")
    parser.add_argument("--delay", type=float, default=0.01, help="seconds a step of the slow worker (default 0.01)")
    args = parser.parse_args()
    modes = {"sync": ps.sync(), "asynchronous": ps.asynchronous(), "ssp": ps.ssp(args.staleness)}
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    size = dist.get_world_size() if dist.is_initialized() else 1
    digits = Digits()
    with ps.join() as kv:
        model = train(kv, modes[args.mode], digits, args, size)
        kv.barrier()
        if args.mode != "sync":
            kv.pull({name: parameter.data for name, parameter in model.named_parameters()})
        held = digits.accuracy(model) >= 0.9
        print(f"worker {kv.worker}: test accuracy {digits.accuracy(model):.1%}", flush=True)
        if args.mode == "sync":
            reference = alone(digits, args, size)
            same = all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
            print(f"worker {kv.worker}: " + ("the bits of one process" if same else "OTHER BITS"), flush=True)
            held &= same
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
