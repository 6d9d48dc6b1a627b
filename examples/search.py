"""Hyperparameter search in one job: each trial trains on some of the ranks. docs/training.md explains it.

    torchrun --nproc-per-node=2 --no-python ringreduce keep python examples/search.py --png search.png
    ... examples/search.py --how halving            the worse half of the trials is pruned at 1, 2, 4, ... epochs
    ... examples/search.py --how population         the losers go on with a winner's weights
    ... examples/search.py --optuna search.journal  Optuna proposes and prunes; needs `pip install optuna`
    ... examples/search.py --group-size 2           each trial trains data-parallel on 2 ranks

What the groups know of each other is in the job's store. So a rank that dies ends the trial of its group, and no other
one. `ringreduce keep` starts it again, to note which trial was lost.
"""

import argparse
import json
import os
import random
import time
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringreduce import data
from ringreduce.errors import RingReduceError

LIFE = int(os.environ.get("RINGREDUCE_LIFE", "0"))  # how often `keep` has started this rank before


class Digits:
    """8x8 images of the ten digits; the last 357 are for the test."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        self.x, self.y = torch.from_numpy(images).float() / 16, torch.from_numpy(labels).long()
        self.test = self.x[1440:], self.y[1440:]
        self.order = data.Order(1440, batch=48, seed=1)


@dataclass
class Board:
    """What all groups know, in the store."""

    store: dist.Store

    def next_trial(self) -> int:
        return self.store.add("trials", 1) - 1

    def write(self, key: str, value: object) -> None:
        self.store.set(key, json.dumps(value))

    def read(self, key: str) -> object:
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def note(self, key: str, loss: float) -> list[float]:
        """Adds a loss to a list; returns the list."""
        self.store.append(key, f"{loss} ")
        return [float(each) for each in self.store.get(key).split()]


@dataclass
class Team:
    """A sub-group of the ranks, which trains one trial at a time."""

    number: int
    ranks: list[int]
    group: dist.ProcessGroup
    board: Board
    digits: Digits
    args: argparse.Namespace
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)

    def tell(self, value: Any) -> Any:
        """What the first rank says, on all ranks of the team: so they never decide differently."""
        told = [value]
        dist.broadcast_object_list(told, self.ranks[0], group=self.group)
        return told[0]

    def start(self, trial: int, wanted: dict[str, float]) -> None:
        torch.manual_seed(0)
        width = int(wanted["width"])
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.model = DistributedDataParallel(self.net, process_group=self.group)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=wanted["lr"], momentum=wanted["momentum"])
        self.trial = trial
        self.board.write(f"running {self.number}", trial)

    def train_epoch(self, epoch: int) -> float:
        """Returns the loss on the test images."""
        order = self.digits.order
        for step in range(order.steps(epoch), order.steps(epoch + 1)):
            ids = torch.from_numpy(order.ids(step, self.rank, len(self.ranks)).copy())
            x, y = self.digits.x[ids], self.digits.y[ids]
            if self.trial == self.args.kill and epoch == 1 and self.rank == len(self.ranks) - 1:
                os.kill(os.getpid(), 9)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.net(self.digits.test[0]), self.digits.test[1]))


def proposed(trial: int) -> dict[str, float]:
    """Random hyperparameters, the same whoever draws them."""
    draw = random.Random(trial)
    return {"lr": 10 ** draw.uniform(-3, 0), "momentum": draw.uniform(0, 0.95), "width": draw.choice([128, 256, 512])}


def search(team: Team) -> None:
    """Random search, successive halving or Optuna: takes trials until there are no more."""
    study = study_of(team) if team.args.optuna and team.rank == 0 else None
    while True:
        told, asked = None, None
        if team.rank == 0 and (trial := team.board.next_trial()) < team.args.trials:
            asked = study.ask() if study else None
            told = {"trial": trial} | (optunas(asked) if asked else proposed(trial))
        wanted = team.tell(told)
        if wanted is None:
            return
        trial = wanted.pop("trial")
        team.start(trial, wanted)
        losses: list[float] = []
        for epoch in range(team.args.epochs):
            losses.append(team.train_epoch(epoch))
            if team.tell(team.rank == 0 and prune(team, asked, epoch, losses[-1])):
                break
        finish(team, trial, wanted, losses)
        if study:
            import optuna

            pruned = len(losses) < team.args.epochs
            study.tell(asked, **({"state": optuna.trial.TrialState.PRUNED} if pruned else {"values": losses[-1]}))


def prune(team: Team, asked: Any, epoch: int, loss: float) -> bool:
    """Asynchronous successive halving (Li et al., 2020): at 1, 2, 4, ... epochs the better half so far goes on."""
    if asked is not None:
        asked.report(loss, epoch)
        return asked.should_prune()
    if team.args.how != "halving" or (epoch + 1) & epoch or epoch + 1 == team.args.epochs:
        return False
    rivals = sorted(team.board.note(f"after {epoch + 1} epochs", loss))
    return loss > rivals[(len(rivals) - 1) // 2]


def population(team: Team, pairs: dict[tuple[int, int], dist.ProcessGroup], teams: int) -> None:
    """Population-based training (Jaderberg et al., 2017), with a trial for each team.

    After each epoch the worse half takes the weights of the better half, and changed hyperparameters.
    """
    wanted, losses = proposed(team.number) | {"width": 256}, []
    team.start(team.number, wanted)
    for epoch in range(team.args.epochs):
        losses.append(team.train_epoch(epoch))
        if team.rank == 0:
            team.board.write(f"score {team.number} {epoch}", [losses[-1], wanted])
        scores = {}
        for other in range(teams):  # all teams see the same scores: who dies before it has written one is out
            key = f"score {other} {epoch}"
            while not team.board.store.check([key]) and not team.board.store.check([f"lost {other}"]):
                time.sleep(0.002)
            if (score := team.board.read(key)) is not None:
                scores[other] = score
        best_first = sorted(scores, key=lambda other: scores[other][0])
        half = len(best_first) // 2
        for winner, loser in zip(best_first[:half], best_first[::-1], strict=False):
            if team.number in (winner, loser):
                try:  # straight from the winner's memory
                    for each in team.net.state_dict().values():
                        dist.broadcast(
                            each, winner * len(team.ranks), group=pairs[min(winner, loser), max(winner, loser)]
                        )
                except RingReduceError as error:
                    print(f"team {team.number} goes on without an exchange: {error}\n", end="")
                if team.number == loser:
                    wanted = scores[winner][1] | {"lr": scores[winner][1]["lr"] * (0.8 if epoch % 2 else 1.25)}
                    for group in team.optimizer.param_groups:
                        group["lr"], group["momentum"] = wanted["lr"], wanted["momentum"]
    finish(team, team.number, wanted, losses)


def finish(team: Team, trial: int, wanted: dict[str, float], losses: list[float]) -> None:
    ended = team.board.note(f"ended {trial}", len(losses))
    assert len(set(ended)) == 1, f"ranks of trial {trial} have ended after {ended} epochs"
    if team.rank == 0:
        team.board.write(f"result {trial}", {**wanted, "losses": losses})


def study_of(team: Team) -> Any:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        study_name="digits",
        storage=JournalStorage(JournalFileBackend(team.args.optuna)),
        sampler=optuna.samplers.TPESampler(seed=team.number),
        pruner=optuna.pruners.SuccessiveHalvingPruner(),
        load_if_exists=True,
    )


def optunas(asked: Any) -> dict[str, float]:
    return {
        "lr": asked.suggest_float("lr", 1e-3, 1.0, log=True),
        "momentum": asked.suggest_float("momentum", 0, 0.95),
        "width": asked.suggest_categorical("width", [128, 256, 512]),
    }


def show(board: Board, args: argparse.Namespace, trials: int, seconds: float) -> None:
    """The table, best first, and the picture."""
    results = {trial: result for trial in range(trials) if (result := board.read(f"result {trial}")) is not None}
    for trial, each in sorted(results.items(), key=lambda item: (-len(item[1]["losses"]), item[1]["losses"][-1])):
        shown = f"lr {each['lr']:<8.3g} momentum {each['momentum']:<6.2f} width {each['width']:<4.0f}"
        print(f"trial {trial:<3} {shown} {len(each['losses']):>3} epochs, loss {each['losses'][-1]:.4f}")
    for trial in range(trials):
        if (why := board.read(f"lost {trial}")) is not None:
            print(f"trial {trial:<3} was lost: {why}")
    print(f"{len(results)} of {trials} trials in {seconds:.2f} s")
    if args.png:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        for each in results.values():
            pyplot.plot(range(1, len(each["losses"]) + 1), each["losses"], marker=".", alpha=0.6)
        pyplot.xlabel("epoch")
        pyplot.ylabel("loss on the test images")
        pyplot.yscale("log")
        pyplot.savefig(args.png, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--how", choices=("random", "halving", "population"), default="random")
    parser.add_argument("--trials", type=int, default=16, help="not for population, which has one for each group")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=1, help="ranks of a trial (default: %(default)s)")
    parser.add_argument("--optuna", metavar="FILE", help="where Optuna's JournalStorage keeps the study")
    parser.add_argument("--png", metavar="FILE", help="where the picture goes")
    parser.add_argument("--kill", type=int, default=-1, metavar="TRIAL", help="a rank of this trial dies in it")
    args = parser.parse_args()
    for module, wanted in (("sklearn", True), ("matplotlib", args.png), ("optuna", args.optuna)):
        if wanted and not find_spec(module):
            package = module.replace("sklearn", "scikit-learn")
            parser.error(f"{module} is not installed: python -m pip install {package}")
    rank, world, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args.group_size
    if world % size:
        parser.error(f"--group-size is {size}, and {world} ranks cannot be divided by it")
    teams = [list(range(first, first + size)) for first in range(0, world, size)]
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(minutes=5))
    board = Board(dist.PrefixStore("search", store))
    trials = len(teams) if args.how == "population" else args.trials
    if LIFE:  # an earlier process of this rank has died
        lose(board, rank // size, f"rank {rank} died")
    else:
        if args.how == "population":  # no team shall wait for one that dies before it starts
            board.write(f"running {rank // size}", rank // size)
        torch.set_num_threads(1)
        digits = Digits()
        dist.init_process_group("ringreduce", store=dist.PrefixStore("groups", store), rank=rank, world_size=world)
        groups = [dist.new_group(ranks) for ranks in teams]
        pairs = {
            (one, other): dist.new_group(teams[one] + teams[other])
            for one in range(len(teams))
            for other in range(one + 1, len(teams))
            if args.how == "population"
        }
        dist.barrier()
        board.store.set("began", str(time.time()))
        team = Team(rank // size, teams[rank // size], groups[rank // size], board, digits, args)
        try:
            population(team, pairs, len(teams)) if args.how == "population" else search(team)
        except RingReduceError as error:
            lose(board, team.number, f"{error}")
    seconds = time.time() - float(board.store.get("began"))
    if board.store.add("ended", 1) == world:  # whoever is the last one
        show(board, args, trials, seconds)
    if dist.is_initialized():
        dist.destroy_process_group()


def lose(board: Board, team: int, why: str) -> None:
    trial = board.read(f"running {team}")
    if trial is not None and board.read(f"result {trial}") is None:
        board.write(f"lost {trial}", why.splitlines()[0])


if __name__ == "__main__":
    main()
