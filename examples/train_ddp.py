"""Trains a small network on scikit-learn's handwritten digits, data-parallel, and checks it against one process.

    torchrun --nproc-per-node=2 examples/train_ddp.py

The claim: SGD by all-reduce is sequential minibatch SGD. The loss of a batch is a mean over its samples. Cut the batch
into equal shards, one per rank: the mean of the shards' gradients is the gradient of the batch. All-reduce gives every
rank that mean, so every rank takes the step that one process with the whole batch would take, and so does any optimizer
that is a function of the gradients so far, such as momentum or Adam. Only the order of the additions differs, which is
why the check is done in float64 and up to rounding. Batches that do not fill are dropped, so that shards are equal.
(Goyal et al., Accurate, Large Minibatch SGD, 2017, sections 2 and 3; Goodfellow et al., Deep Learning, 2016, 12.1.3.)

Exit code: 0, 1 if the parameters differ from the single process or between the ranks, 2 if it cannot run here.
"""

import argparse
import hashlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.005),
}
TRAIN_SAMPLES = 1440  # of 1797; the others are for the test
TOLERANCE = 1e-12  # of the largest parameter; rounding is 1e-16 a step, training without all-reduce is off by 1e-1


class Digits:
    """8x8 images of the ten digits: train and test tensors, shuffled the same way in every process."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        x, y = torch.from_numpy(images)[order] / 16, torch.from_numpy(labels)[order].long()
        self.x, self.test_x = x[:TRAIN_SAMPLES], x[TRAIN_SAMPLES:]
        self.y, self.test_y = y[:TRAIN_SAMPLES], y[TRAIN_SAMPLES:]

    def shards(self, epoch: int, batch: int, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For each full batch of this epoch, the share of `rank`: the `rank`-th of `size` equal parts."""
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(1 + epoch))
        for samples in order.split(batch)[: len(order) // batch]:
            mine = samples.chunk(size)[rank]
            yield self.x[mine], self.y[mine]

    def accuracy(self, model: nn.Module) -> float:
        """Share of the test images that the model names correctly."""
        with torch.no_grad():
            hits = model(self.test_x).argmax(1) == self.test_y
            return int(hits.sum()) / len(hits)


def make_model() -> nn.Module:
    """The same initial weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    digits: Digits,
    args: argparse.Namespace,
    rank: int,
    size: int,
    after_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
) -> None:
    """Train on the shards of `rank`. With rank 0 of size 1 this is sequential minibatch SGD."""
    for epoch in range(args.epochs):
        losses = []
        for x, y in digits.shards(epoch, args.batch, rank, size):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # DistributedDataParallel all-reduces the gradients in here
            optimizer.step()
            losses.append(loss.item())
        after_epoch(epoch, sum(losses) / len(losses))


def difference(model: nn.Module, reference: nn.Module) -> float:
    """Largest absolute difference of any parameter, relative to the reference's largest parameter."""
    a, b = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, reference))
    return ((a - b).abs().max() / b.abs().max()).item()


def fingerprint(model: nn.Module) -> str:
    """A hash of all bits of all parameters."""
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def run(name: str, digits: Digits, args: argparse.Namespace) -> bool:
    """Train with the optimizer `name` on all ranks, then check, and save, on rank 0; False there if a check failed."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    def after_epoch(epoch: int, loss: float) -> None:
        mean = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(mean)
        say(f"  epoch {epoch + 1:2}   loss {mean.item() / size:.4f}   test accuracy {digits.accuracy(model):.1%}")

    say(f"{name}: {size} ranks, batches of {args.batch} = {size} x {args.batch // size} samples")
    model = make_model()
    parallel = DistributedDataParallel(model)
    start = time.perf_counter()
    train(parallel, OPTIMIZERS[name](model.parameters()), digits, args, rank, size, after_epoch)
    seconds = time.perf_counter() - start

    fingerprints = [""] * size
    dist.all_gather_object(fingerprints, fingerprint(model))
    if rank != 0:
        return True

    if args.save:
        torch.save(model.state_dict(), args.save)
    reference, alone = make_model(), make_model()
    train(reference, OPTIMIZERS[name](reference.parameters()), digits, args, 0, 1)
    train(alone, OPTIMIZERS[name](alone.parameters()), digits, args, 0, size)
    error, control = difference(model, reference), difference(alone, reference)
    same, close = len(set(fingerprints)) == 1, error <= TOLERANCE < control
    say(f"  trained in {seconds:.1f} s, final test accuracy {digits.accuracy(model):.1%}")
    say(f"  {verdict(same)}  parameters are bit-identical on all {size} ranks: {' '.join(sorted(set(fingerprints)))}")
    say(f"  {verdict(close)}  parameters match single-process {name} on the same batches: they differ by {error:.1e},")
    say(f"        at most {TOLERANCE:.0e} is rounding; without the all-reduce they differ by {control:.1e}\n")
    return same and close


def verdict(holds: bool) -> str:
    return "ok  " if holds else "FAIL"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ringreduce", help="of torch.distributed (default ringreduce)")
    parser.add_argument("--optimizer", choices=(*OPTIMIZERS, "all"), default="all")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=96, help="samples per step over all ranks (default 96)")
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters there, by torch.save")
    args = parser.parse_args()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size < 2:
        parser.error("start 2 ranks or more: torchrun --nproc-per-node=2 examples/train_ddp.py")
    if not 0 < args.batch <= TRAIN_SAMPLES or args.batch % size or args.epochs < 1:
        parser.error(f"need --epochs of 1 or more, and a --batch up to {TRAIN_SAMPLES} that {size} ranks share equally")
    if args.save and args.optimizer == "all":
        parser.error(f"--save {args.save} holds one model: say which --optimizer, one of {', '.join(OPTIMIZERS)}")
    if args.backend == "ringreduce" and importlib.util.find_spec("ringreduce") is None:
        parser.error("ringreduce is not installed: pip install -e . (or --backend gloo)")
    if importlib.util.find_spec("sklearn") is None:
        parser.error("the data is scikit-learn's: pip install scikit-learn")

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    names = tuple(OPTIMIZERS) if args.optimizer == "all" else (args.optimizer,)
    digits = Digits()
    held = [run(name, digits, args) for name in names]
    dist.destroy_process_group()
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
