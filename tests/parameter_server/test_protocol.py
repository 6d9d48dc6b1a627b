"""The protocol under random schedules, by a simulator whose values are their own history; and that it notices mistakes.

RINGREDUCE_TEST_OPERATIONS sets how many operations are simulated (100,000).
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
import tempfile
from pathlib import Path

import pytest
from stand_in.build import WARNINGS

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = int(os.environ.get("RINGREDUCE_TEST_OPERATIONS", "100000"))
SHARD, SESSION, STATE = (
    f"parameter_server/{name}" for name in ("block/shard.cpp", "client/session.h", "block/shard_state.cpp")
)

MUTANTS = {
    "a request that comes again is taken again": (
        SHARD,
        "  if (request.number < member.next) {",
        "  if (request.number < member.next && request.kind == RequestKind::push &&\n"
        "      blocks_[request.block].mode.consistency != Consistency::sync) take(request);\n"
        "  if (request.number < member.next) {",
        "twice",
    ),
    "requests take effect as they come": (
        SHARD,
        "    member.early.emplace(request.number, request);\n    return;",
        "    take(request);\n    return;",
        "own pushes",
    ),
    "requests that overtook others are taken from the last": (
        SHARD,
        "member.early.extract(member.early.begin()).mapped()",
        "member.early.extract(std::prev(member.early.end())).mapped()",
        "order",
    ),
    "a reply that was lost is not sent again": (
        SHARD,
        "if (kept != member.replies.end()) output_.replies.push_back(kept->second);",
        "(void)kept;",
        "answered",
    ),
    "replies are forgotten before the worker has them": (
        SHARD,
        "member.replies.upper_bound(request.seen)",
        "member.replies.upper_bound(request.seen + 1)",
        "answered",
    ),
    "replies are never forgotten": (
        SHARD,
        "  member.replies.erase(member.replies.begin(), member.replies.upper_bound(request.seen));\n",
        "",
        "memory",
    ),
    "a push is acknowledged before it is applied": (
        SHARD,
        "  open_.insert(request.block);\n",
        "  open_.insert(request.block);\n  reply(request.worker, request.number, Outcome::applied, block);\n",
        "acknowledged",
    ),
    "a late push is applied and said to be late": (
        SHARD,
        "if (request.round < block.version) return reply",
        "if (request.round < block.version) return apply(request.block, {contribution}, 0), reply",
        "grace",
    ),
    "a round does not wait for the last member": (
        SHARD,
        "return !expects(block, each.second) || round.count(each.first) > 0;",
        "return !expects(block, each.second) || round.count(each.first) > 0 || round.size() > 1;",
        "round",
    ),
    "a worker of another group counts towards a quorum": (
        SHARD,
        "return members_.at(each.first).group == block.mode.group;",
        "return true;",
        "round",
    ),
    "a round ends at its quorum": (
        SHARD,
        "block.closes = now_ + std::min(block.mode.grace, kForever - now_);",
        "block.closes = now_;",
        "grace",
    ),
    "a round that lost its contributions keeps its end": (
        SHARD,
        "        if (round->first == block.version) block.closes = kForever;\n",
        "",
        "grace",
    ),
    "the end of a round is forgotten": (
        SHARD,
        "void Shard::on(const Tick&) {",
        "void Shard::on(const Tick&) {\n  if (now_ % 2 == 0) return;",
        "grace",
    ),
    "contributions are combined as they came": (
        SHARD,
        "contributions.push_back(numbered.second);",
        "contributions.insert(numbered.first % 2 ? contributions.end() : contributions.begin(), numbered.second);",
        "worker order",
    ),
    "a pull does not wait for the worker's own pushes": (
        SHARD,
        "if (own != round.end() && own->second.first < number) return false;",
        "(void)own, (void)number;",
        "own pushes",
    ),
    "a pull waits for pushes that were made after it": (
        SHARD,
        "own->second.first < number",
        "number > 0",
        "exact version",
    ),
    "ssp is off by one": (
        SHARD,
        "clock <= block.mode.staleness || least_clock(block.mode.group) >= clock - block.mode.staleness",
        "clock <= block.mode.staleness || least_clock(block.mode.group) + 1 >= clock - block.mode.staleness",
        "ssp",
    ),
    "a barrier does not wait for all": (
        SHARD,
        "  if (!absent(group).empty()) return;\n"
        "  for (auto& [worker, member] : members_) {\n"
        "    if (!member.live || member.group != group) continue;",
        "  if (absent(group).size() > 1) return;\n"
        "  for (auto& [worker, member] : members_) {\n"
        "    if (!member.live || member.group != group || member.barriers.empty()) continue;",
        "barrier",
    ),
    "a lost worker is waited for": (
        SHARD,
        "  member.live = false;\n",
        "  member.live = member.barriers.empty();\n",
        "answered",
    ),
    "nothing is looked at again when a worker leaves": (
        SHARD,
        "  for (const BlockId id : std::set(open_)) close_rounds(id);\n  for (const BlockId id : std::set(pulled_))",
        "  for (const BlockId id : std::set(pulled_))",
        "answered",
    ),
    "a worker does not go on with the present round": (
        SESSION,
        "if (request.kind <= RequestKind::pull) raise_round",
        "if (request.kind > RequestKind::leave) raise_round",
        "present round",
    ),
    "a late backup does not know what was answered": (
        STATE,
        "archive(member.replies, member.early, member.barriers);",
        "archive(member.early, member.barriers);",
        "same log",
    ),
    "a late backup does not know what is early": (
        STATE,
        "archive(member.replies, member.early, member.barriers);",
        "archive(member.replies, member.barriers);",
        "same log",
    ),
    "a late backup does not know open rounds": (
        STATE,
        "archive(block.rounds, block.priorities, block.closes, block.pulls, block.changes);",
        "archive(block.closes, block.pulls, block.changes);",
        "same log",
    ),
    "a late backup does not know the end of a grace": (
        STATE,
        "archive(block.rounds, block.priorities, block.closes, block.pulls, block.changes);",
        "archive(block.rounds, block.priorities, block.pulls, block.changes);",
        "same log",
    ),
    "a late backup does not know changes that are coming": (
        STATE,
        "archive(block.rounds, block.priorities, block.closes, block.pulls, block.changes);",
        "archive(block.rounds, block.priorities, block.closes, block.pulls);",
        "same log",
    ),
    "a change takes effect before its round": (SHARD, "if (round == block.version) change(", "change(", "change"),
    "a change takes effect after its round": (
        SHARD,
        "lower_bound(block.version));\n    if (const auto next = block.changes.find(block.version);",
        "lower_bound(block.version));\n    if (const auto next = block.changes.find(block.version - 1);",
        "change",
    ),
    "a change makes a version": (
        SHARD,
        "  block.logged = ++log_;\n  constexpr std::int32_t kNoPriority",
        "  block.logged = ++log_, ++block.version;\n  constexpr std::int32_t kNoPriority",
        "version",
    ),
    "a late backup does not know when workers joined": (
        STATE,
        "archive(member.group, member.live, member.joined, member.clock, member.next);",
        "archive(member.group, member.live, member.clock, member.next);",
        "same log",
    ),
    "a late backup forgets the weight of a push": (
        STATE,
        "archive(contribution.worker, contribution.weight, contribution.clock, contribution.pulled);",
        "archive(contribution.worker, contribution.clock, contribution.pulled);",
        "same log",
    ),
    "a late backup counts from the beginning": (STATE, "log_, steps_, now_);", "steps_, now_);", "same log"),
    "a late backup does not know how long rounds are open": (STATE, "steps_, now_);", "steps_);", "same log"),
    "a shard takes the time between messages for a clock": (SHARD, "now_ += elapsed;", "now_ = elapsed;", "grace"),
    "a round is due later than its grace": (SHARD, "first - now_);", "first);", "grace"),
    "a worker sends again what was answered": (
        SESSION,
        "    outstanding_.erase(found);\n",
        "    if (request.kind != RequestKind::clock) outstanding_.erase(found);\n",
        "answered",
    ),
}


UNUSED = ["-Wno-unused", "-Wno-unused-parameter"]  # a mutant may leave anything unused
FLAGS = ["-std=c++20", "-O1", *WARNINGS, *UNUSED]


@functools.cache
def standard_headers() -> tempfile.TemporaryDirectory[str]:
    """A folder with standard.h, compiled once: what all include of the standard library, more than their own text."""
    names = ("algorithm", "chrono", "deque", "map", "optional", "queue", "random", "set", "string", "variant", "vector")
    folder = tempfile.TemporaryDirectory()
    header = Path(folder.name, "standard.h")
    header.write_text("".join(f"#include <{name}>\n" for name in names))
    subprocess.run(["c++", *FLAGS, "-x", "c++-header", str(header), "-o", f"{header}.gch"], check=True)
    return folder


def compile_object(source: Path, folder: Path, headers: Path = ROOT / "csrc") -> Path:
    made = folder / f"{source.stem}.o"
    flags = [*FLAGS, f"-I{headers}", "-Icsrc", "-include", f"{standard_headers().name}/standard.h"]
    subprocess.run(["c++", *flags, "-c", str(source), "-o", str(made)], cwd=ROOT, check=True)
    return made


def link(folder: Path, *objects: Path) -> Path:
    program = folder / "simulator"
    subprocess.run(["c++", *map(str, objects), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of the simulator, the shard, and its state."""
    folder = tmp_path_factory.mktemp("objects")
    sources = {"simulator": ROOT / "tests/parameter_server/simulator.cpp", "shard": ROOT / "csrc" / SHARD}
    sources["shard_state"] = ROOT / "csrc" / STATE
    return {name: compile_object(source, folder) for name, source in sources.items()}


def simulate(program: Path, seed: int, operations: int) -> tuple[int, str]:
    done = subprocess.run(
        [program, str(seed), str(operations)], capture_output=True, text=True, timeout=170, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_no_schedule_breaks_an_invariant(objects: dict[str, Path], tmp_path: Path) -> None:
    seed = 1 if os.environ.get("CI") else random.randrange(10**9)
    code, said = simulate(link(tmp_path, *objects.values()), seed, OPERATIONS)
    assert code == 0, said
    assert said.startswith("ok: ")


@pytest.mark.slow  # each mutant is compiled
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_noticed(mutant: str, objects: dict[str, Path], tmp_path: Path) -> None:
    file, right, wrong, invariant = MUTANTS[mutant]
    source = (ROOT / "csrc" / file).read_text()
    assert source.count(right) == 1, f"{file} has changed: change the mutant too"
    changed = tmp_path / "csrc" / file
    for header in (ROOT / "csrc/parameter_server").rglob("*.h"):  # which include each other by their folder
        copied = tmp_path / "csrc" / header.relative_to(ROOT / "csrc")
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(header.read_text())
    changed.write_text(source.replace(right, wrong))
    if file != SESSION:
        made = {changed.stem: compile_object(changed, tmp_path)}
    else:
        simulator = ROOT / "tests/parameter_server/simulator.cpp"
        made = {"simulator": compile_object(simulator, tmp_path, tmp_path / "csrc")}
    program = link(tmp_path, *(objects | made).values())
    first = [simulate(program, seed, 100000) for seed in range(1, 6)]
    assert [code for code, _ in first] == [1] * len(first)
    assert any(said.startswith(f"broken: {invariant}: ") for _, said in first), first
