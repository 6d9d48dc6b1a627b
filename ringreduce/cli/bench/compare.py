"""ringreduce next to Gloo, and to MPI where it is there: all_reduce, and steps of real programs.  Does it pay?"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ringreduce.cli.bench.team import BackendFailed, Team
from ringreduce.cli.bench.turns import Answers, AnyTally, Tally, free_memory, take_turns
from ringreduce.cli.bench.worker import write_inputs
from ringreduce.common.units import bytes_text

GLOO, OURS, MPI = "gloo", "ringreduce-dist", "mpi"
ALONE = "alone"
"""Gloo's team, when its ranks make their steps without communication."""

ROUNDS = 9
LEAST_ROUNDS = 3
"""However slow the machine is."""

BYTES_OF_PARAMETER, BYTES_OF_RANK = 8, 300 << 20
"""Memory: a parameter and its gradient; torch and a step's activations."""

LEAST_GAIN = 1.03
"""A step that gains less is within the noise of most machines."""

PAYS, PAYS_NOT, UNCLEAR = "pays", "does not pay here", "cannot be told, since the rounds differ too much"

ALIKE = 0.02
"""How far the checksums of two libraries may differ: sums are rounded in another order, in bfloat16 too."""


@dataclass(frozen=True)
class Case:
    """What a step is of.  The defaults of `width` and `layers` are ResNet-18's."""

    net: str  # convolutional, transformer or decoder
    by: str  # DDP, FSDP2 or tensor parallel
    batch: int  # images or sequences of a rank
    length: int  # pixels of an image's side, or tokens of a sequence
    width: int = 64
    layers: int = 2  # of a stage of the convolutional net

    @property
    def unit(self) -> str:
        return "images" if self.net == "convolutional" else "tokens"

    def units(self, ranks: int) -> int:
        """Images or tokens of a step of all ranks; those that decode work on the same tokens."""
        if self.net == "decoder":
            return self.length
        return ranks * self.batch * (1 if self.net == "convolutional" else self.length)


@dataclass(frozen=True)
class Reduced:
    """all_reduce of so many bytes: microseconds by team, medians of the rounds."""

    ranks: int
    bytes: int
    us: dict[str, float]


@dataclass(frozen=True)
class Stepped:
    """Steps of a case: microseconds by team and round."""

    case: Case
    ranks: int
    parameters: int
    times_us: dict[str, list[float]]

    @property
    def name(self) -> str:
        case, size = self.case, f"{self.parameters / 1e6:.1f} M parameters"
        batch = {
            "convolutional": f"{case.batch} images of {case.length} px a rank",
            "transformer": f"{case.batch * case.length} tokens a rank",
            "decoder": "a token at a time",
        }[case.net]
        return f"{case.net}, {size}, {case.by}, {batch}"

    def rate(self, team: str) -> float:
        """Images or tokens a second."""
        return self.case.units(self.ranks) / statistics.median(self.times_us[team]) * 1e6

    def ratios(self, team: str = OURS) -> list[float]:
        """How many times as fast as with Gloo a step was, round by round, ascending."""
        return sorted(a / b for a, b in zip(self.times_us[GLOO], self.times_us[team], strict=True))

    def speedup(self, team: str) -> float:
        return statistics.median(self.ratios(team))

    def communication(self, team: str) -> float:
        """The share of a step by which it is longer than without communication."""
        alone = statistics.median(self.times_us[ALONE])
        return max(0.0, 1 - alone / statistics.median(self.times_us[team]))

    @property
    def verdict(self) -> str:
        """Whether a step is faster by more than noise. Of five rounds one may say otherwise, of fewer none."""
        ratios = self.ratios()
        otherwise = len(ratios) // 5
        if statistics.median(ratios) >= LEAST_GAIN and ratios[otherwise] > 1:
            return PAYS
        return PAYS_NOT if ratios[-1 - otherwise] < LEAST_GAIN else UNCLEAR


def verdict(stepped: Sequence[Stepped]) -> list[str]:
    """In plain words, on each step and on all."""
    lines = []
    for step in stepped:
        ratios = step.ratios()
        lines.append(
            f"{step.ranks} ranks, {step.name}: {step.communication(GLOO):.0%} of a step with Gloo was communication. "
            f"With ringreduce a step was {step.speedup(OURS):.2f}x as fast ({ratios[0]:.2f}x to {ratios[-1]:.2f}x in "
            f"{len(ratios)} rounds): {step.verdict}."
        )
    if stepped:
        paid = sum(step.verdict == PAYS for step in stepped)
        lines.append(f"ringreduce pays here for {paid} of {len(stepped)} kinds of steps.")
    if any(step.verdict == UNCLEAR for step in stepped):
        lines.append("Where it cannot be told, try again on a quiet machine, or with more --seconds.")
    return lines


@dataclass
class Comparison:
    """Teams of `ranks` ranks, which are ended at its end, and what they found out."""

    ranks: int
    folder: Path
    tick: Callable[[str], None]  # is told what is done now
    timeout: float = 300  # seconds, for a batch or a start
    teams: list[Team] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for team in self.teams:
                stack.callback(team.close)

    def start(self, *names: str, launcher: Sequence[str | Path] = (), environment: Mapping[str, str] = {}) -> None:
        for name in names:
            self.tick(f"{self.ranks} ranks: start of {name}")
            try:
                self.teams.append(Team(name, self.ranks, self.folder, self.timeout, launcher, environment))
            except BackendFailed as error:
                self._give_up(error)

    def start_mpi(self) -> None:
        """By the mpi4py and the launcher that are there, or a note says why not."""
        known = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        launcher = shutil.which("mpiexec", path=known)
        if find_spec("mpi4py") is None:
            self.notes.append("MPI was left out: mpi4py is not installed")
        elif launcher is None:
            self.notes.append("MPI was left out: there is no mpiexec on PATH")
        else:
            self.start(MPI, launcher=(launcher, "-n", str(self.ranks), sys.executable), environment=OPEN_MPI)

    def _give_up(self, error: BackendFailed) -> None:
        self.failures.append(f"left out: {error}")

    def all_reduces(self, sizes: Sequence[int], seconds: float) -> list[Reduced]:
        """By all teams, for about so many seconds."""
        inputs, calls = write_inputs(self.folder, "float32", self.ranks), itertools.count(1)

        def order(tally: OfSize, _: Team) -> dict[str, Any]:
            sized = {"bytes": tally.bytes, "call": next(calls), "inputs": str(inputs)}
            return {"collective": "all_reduce", "dtype": "float32", **sized}

        tallies = [OfSize(bytes=size) for size in sizes]
        self._take_turns(tallies, self.teams, order, "all_reduce", seconds, batch_time=0.1, least=3)
        for tally in tallies:
            self.failures += [
                f"{name}: {wrong} wrong elements in all_reduce of {bytes_text(tally.bytes, 1024)}"
                for name, wrong in tally.wrong.items()
                if wrong
            ]
        return [Reduced(self.ranks, tally.bytes, tally.median_us) for tally in tallies if tally.times_us]

    def steps(self, case: Case, seconds: float) -> list[Stepped]:
        """By all teams but MPI's, for about so many seconds; nothing, if one failed or there is not enough memory."""
        from ringreduce.cli.bench.steps import parameters

        teams = [team for team in self.teams if team.name != MPI]
        if not {GLOO, OURS} <= {team.name for team in teams}:
            return []  # one has failed, and has been told of
        size = parameters(case)
        needed = len(teams) * self.ranks * (size * BYTES_OF_PARAMETER + BYTES_OF_RANK)
        if needed > free_memory():
            self.notes.append(
                f"{self.ranks} ranks, {case.net}: left out, since it needs {needed / 1e9:.0f} GB of memory"
            )
            return []

        def order(_: OfSteps, team: Team | Alone) -> dict[str, Any]:
            return {"step": asdict(case), "alone": team.name == ALONE}

        tally, failures = OfSteps(), len(self.failures)
        turns: list[Any] = [*teams, *(Alone(team) for team in teams if team.name == GLOO)]
        self._take_turns(
            [tally], turns, order, f"{case.net} by {case.by}", seconds, batch_time=min(1, seconds / 12), least=1
        )
        self.teams = [team for team in self.teams if not team.ended]
        if len(self.failures) > failures or not {GLOO, OURS} <= set(tally.times_us):
            return []
        right = tally.checksums[GLOO]
        self.failures += [
            f"{name}: {case.net} by {case.by} comes to {found:g} on all ranks, and with Gloo to {right:g}"
            for name, found in tally.checksums.items()
            if not abs(found - right) <= ALIKE * abs(right)
        ]
        return [Stepped(case, self.ranks, size, tally.times_us)]

    def _take_turns(
        self,
        tallies: Sequence[AnyTally],
        teams: list[Any],
        order: Callable[[AnyTally, Any], dict[str, Any]],
        what: str,
        seconds: float,
        **batch: Any,
    ) -> None:
        until = time.monotonic() + seconds
        self.tick(f"{self.ranks} ranks: {what}, first calls")
        for turn in take_turns(tallies, teams, order, self._give_up, rounds=ROUNDS, **batch):
            self.tick(f"{self.ranks} ranks: {what}, round {turn + 1}")
            if turn >= LEAST_ROUNDS and time.monotonic() > until:
                break


@dataclass(frozen=True)
class Alone:
    """A team whose steps are without communication."""

    team: Team
    name: str = ALONE

    @property
    def ended(self) -> bool:
        return self.team.ended

    def run(self, **order: Any) -> list[dict[str, Any]]:
        return self.team.run(**order)

    def kill(self) -> None:
        self.team.kill()


@dataclass
class OfSize(Tally):
    """Of all_reduce."""

    bytes: int = field(kw_only=True)


@dataclass
class OfSteps(Tally):
    """Of a case."""

    checksums: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, answers: Answers, counted: bool) -> None:
        super().add(name, answers, counted)
        self.checksums[name] = answers[0]["checksum"]


# What Open MPI must find set to start more ranks than cores, bound to none, and for root; others do not look at it.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


def most_ranks(cores: int) -> int:
    """A power of two from 2 to 8 for which there are cores."""
    return max(2, 1 << min(cores, 8).bit_length() - 1)
