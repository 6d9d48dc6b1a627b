"""A linear model, trained through a parameter server: workers push gradients, servers update, workers pull.

python examples/push_pull.py
torchrun --nproc-per-node=4 examples/push_pull.py --mode ssp

Every rank is a worker with its own part of the data, and a server with its part of the parameters. With one server all
gradients go to one process; with n servers each gets 1/n of every gradient, so that m workers cost O(m/n). In mode sync
the result has the bits of one process that adds the workers' gradients in order: the example checks it.
"""

import argparse

import torch

import ringreduce.parameter_server as ps

WIDTH, SAMPLES, STEPS, RATE = 2000, 64, 30, 0.05
MODES = {"sync": ps.sync(), "asynchronous": ps.asynchronous(), "ssp": ps.ssp(2)}


def part_of(worker: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of a worker."""
    generator = torch.Generator().manual_seed(worker)
    x = torch.randn(SAMPLES, WIDTH, generator=generator) / WIDTH**0.5
    return x, x.sum(1)


def gradient(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of the sum of squared errors."""
    return x.T @ (x @ w - y)


def in_one_process(workers: int) -> torch.Tensor:
    w = torch.nn.Parameter(torch.zeros(WIDTH))
    optimizer = torch.optim.SGD([w], lr=RATE, momentum=0.9)
    for _ in range(STEPS):
        gradients = [gradient(w.detach(), *part_of(worker)) for worker in range(workers)]
        w.grad = sum(gradients[1:], gradients[0]) / workers
        optimizer.step()
    return w.detach()


parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=MODES, default="sync")
mode = parser.parse_args().mode

torch.set_num_threads(1)  # the same sums in one process and in several
kv = ps.join(block_bytes=2048)  # small blocks, so that this small model has some for every server
x, y = part_of(kv.worker)
w = torch.zeros(WIDTH)
kv.init("w", w, update=ps.optimizer(torch.optim.SGD, lr=RATE, momentum=0.9), mode=MODES[mode])
first = float((x @ w - y).square().mean())

for _ in range(STEPS):
    kv.push_pull("w", gradient(w, x, y), out=w).wait()
    kv.clock()  # counts in mode ssp alone

kv.barrier()
kv.pull("w", w)
loss = float((x @ w - y).square().mean())
print(f"worker {kv.worker} of {kv.servers} servers: loss {first:.3f} -> {loss:.3f}\n", end="")
if mode == "sync":
    assert torch.equal(w, in_one_process(kv.servers)), "not the bits of one process"
    print(f"worker {kv.worker}: the bits of one process\n", end="")
kv.leave()
