"""Local steps (DiLoCo): workers train alone for --local steps, then a server merges how far each of them came.

    python examples/train_local_steps.py                    3 workers on the digits of examples/train_ddp.py
    python examples/train_local_steps.py --local 50 --rounds 12

A worker pulls the model, trains it by itself, and pushes the way it went: the old parameters minus the new ones,
weighted with the samples that it has seen. To the server that is a gradient, which it gives to SGD with Nesterov's
momentum (Douillard et al., arXiv 2311.08105). A round ends --grace seconds after all workers but one have pushed, so
that nobody has to wait for a straggler for ever: what comes later is dropped, and its worker goes on from the present
round.

On the way one worker is killed, and later another one joins. Beside it stands one process that steps with the gradients
of all workers every step, as all_reduce would have it. Exit code: 0, or 1 if the test accuracy is below 90%.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from train_ddp import Digits, make_model

import ringreduce.parameter_server as ps


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def batches(digits: Digits, args: argparse.Namespace, share: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One worker's, for ever."""
    for epoch in itertools.count():
        yield from digits.shards(epoch, args.batch, share, args.workers)


def work(share: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    digits, model = Digits(), make_model()
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    with ps.join(store, role="worker") as kv:
        outer = ps.optimizer(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        kv.init(parameters, update=outer, mode=ps.sync(quorum=max(1, args.workers - 1), grace=args.grace))
        optimizer, data, late = make_optimizer(model), batches(digits, args, share), 0
        while min(versions := [min(each) for each in kv.pull(parameters).values()]) < args.rounds:
            begun = {name: value.clone() for name, value in parameters.items()}
            seen = 0
            for x, y in itertools.islice(data, args.local):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                seen += len(y)
            way = {name: begun[name] - value for name, value in parameters.items()}
            late += bool(kv.wait(kv.push(way, weight=float(seen))))
        print(f"  worker {kv.worker} ends after round {min(versions)}; {late} of its pushes came late", flush=True)


def every_step(digits: Digits, args: argparse.Namespace) -> nn.Module:
    """One process that adds the workers' gradients, as many steps as all rounds have."""
    model = make_model()
    optimizer = make_optimizer(model)
    shares = zip(*(batches(digits, args, share) for share in range(args.workers)), strict=True)
    for shards in itertools.islice(shares, args.rounds * args.local):
        optimizer.zero_grad()
        for x, y in shards:
            (nn.functional.cross_entropy(model(x), y) / args.workers).backward()
        optimizer.step()
    return model


def serve(args: argparse.Namespace) -> tuple[nn.Module, int]:
    """The model that the workers made, and the bytes that they pushed for it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")

    def start(share: int) -> BaseProcess:
        process = context.Process(target=work, args=(share, store.port, args))
        process.start()
        return process

    model = make_model()
    keys = len(list(model.parameters()))
    with ps.serve(store, rank=0, size=1, memory=64 << 20) as serving:

        def wait_for(round_: int) -> None:
            while serving.stats()["updates"] < keys * round_:
                time.sleep(0.01)

        workers = [start(share) for share in range(args.workers)]
        wait_for(args.rounds // 3)
        workers.pop().kill()
        print("  a worker is killed", flush=True)
        wait_for(2 * args.rounds // 3)
        workers.append(start(args.workers - 1))
        print("  another one joins", flush=True)
        wait_for(args.rounds)
        with ps.join(store, role="reader") as kv:
            kv.pull({name: parameter.data for name, parameter in model.named_parameters()})
        for process in workers:
            process.join()
        return model, int(serving.stats()["bytes"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--local", type=int, default=20, help="steps between two merges (default 20)")
    parser.add_argument("--rounds", type=int, default=15, help="merges (default 15)")
    parser.add_argument("--grace", type=float, default=0.5, help="seconds for the last worker of a round (default 0.5)")
    parser.add_argument("--batch", type=int, default=96, help="samples per step over all workers (default 96)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    digits = Digits()
    model, pushed = serve(args)
    alone = every_step(digits, args)
    size = sum(parameter.nbytes for parameter in model.parameters())
    each = args.rounds * args.local * args.workers * size
    x, y = digits.test_x, digits.test_y
    for name, found, sent in (("local steps", model, pushed), ("every step", alone, each)):
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(found(x), y))
        accuracy = digits.accuracy(found)
        print(f"{name:12} test loss {loss:.3f}, accuracy {accuracy:.1%}, {sent / 1e6:.1f} MB pushed", flush=True)
    return 0 if digits.accuracy(model) >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
