"""What is known of a machine: the file, whose it must be, and what groups make of it."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringreduce import _C, cli, plan, tuning
from ringreduce.cli.measure import Candidate, tasks, winner
from ringreduce.config import Options, resolve
from ringreduce.errors import InvalidArgument
from ringreduce.tuning import Cell, Measured, Tuning, decision, machine
from ringreduce.tuning.machine import identify, numbers, probe
from ringreduce.tuning.record import default_path, load, save

CORES = frozenset(os.sched_getaffinity(0))
CELLS = (Cell(64, "tree", 0, 1e-6, "one_shot", 0, 2e-6), Cell(1024, "ring", 128, 3e-6, "one_shot", 0, 4e-6))


@pytest.fixture(scope="module")
def known() -> Tuning:
    measured = {3: Measured("2026-11-21 03:17 UTC", {"all_reduce": CELLS})}
    return Tuning(identify(CORES), probe(CORES), "2026-11-21 03:17 UTC", measured)


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache folder of its own for each test, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    decision.current.cache_clear()
    decision._decision.cache_clear()
    yield
    decision.current.cache_clear()
    decision._decision.cache_clear()


def decided(size: int, where: str) -> str:
    options, _ = resolve(Options(tuning=where), {})
    return tuning.decide(size, CORES, False, options=options, slot_bytes=512 * 1024)


def test_the_probe_finds_positive_figures() -> None:
    machine = probe(CORES)
    assert machine.cores == len(CORES)
    assert machine.copy_cached <= machine.copy_memory_all * 2
    alone = probe({min(CORES)})
    assert alone.cores == 1
    with pytest.raises(InvalidArgument, match="cores is empty"):
        _C.probe([])


@pytest.mark.parametrize(("turn", "wake", "yields"), [(2e-6, 3e-6, 45), (4e-3, 3e-6, 1), (1e-6, 1e-6, 30)])
def test_ranks_that_share_a_core_yield_as_long_as_it_pays(
    known: Tuning, tmp_path: Path, turn: float, wake: float, yields: int
) -> None:
    path = tmp_path / "tuning.json"
    machine = dataclasses.replace(known.machine, turn=turn, wake=wake)
    save(dataclasses.replace(known, machine=machine), path, replace=True)
    assert tuning.yields(CORES, resolve(Options(tuning=str(path)), {})[0]) == yields
    assert tuning.yields(CORES, resolve(Options(tuning="off"), {})[0]) == 0


@pytest.mark.parametrize(("fetch", "most"), [(0.18e-9, 192 << 20), (0.2e-9, 48 << 20)])
def test_where_the_kernel_copies_slowly_large_tensors_are_not_read_in_place(
    known: Tuning, tmp_path: Path, fetch: float, most: int
) -> None:
    path = tmp_path / "tuning.json"
    machine = dataclasses.replace(known.machine, copy_scratch=0.1e-9, fetch_scratch=fetch)
    save(dataclasses.replace(known, machine=machine), path, replace=True)
    assert tuning.most_fetch(CORES, resolve(Options(tuning=str(path)), {})[0]) == most
    assert tuning.most_fetch(CORES, resolve(Options(tuning="off"), {})[0]) == 192 << 20


@pytest.mark.parametrize(
    ("put", "spread"),
    [
        ((0.04e-9, 0.04e-9, 0.05e-9, 0.08e-9), 0),  # what was just read is written fast
        ((0.11e-9, 0.11e-9, 0.10e-9, 0.05e-9), 4 << 20),
        ((0.11e-9, 0.11e-9, 0.05e-9, 0.06e-9), 1 << 20),
        ((0.11e-9, 0.11e-9, 0.10e-9, 0.09e-9), 0),  # hardly faster
    ],
)
def test_values_are_spread_where_that_is_faster(
    known: Tuning, tmp_path: Path, put: tuple[float, ...], spread: int
) -> None:
    path = tmp_path / "tuning.json"
    machine = dataclasses.replace(known.machine, put=put, take=(0.03e-9,) * 4)
    save(dataclasses.replace(known, machine=machine), path, replace=True)
    assert tuning.spread(CORES, resolve(Options(tuning=str(path)), {})[0]) == spread
    assert tuning.spread(CORES, resolve(Options(tuning="off"), {})[0]) == 0


def test_a_file_comes_back_as_it_was_written(known: Tuning, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "tuning.json"
    save(known, path, replace=False)
    assert load(path) == known
    assert path.stat().st_mode & 0o777 == 0o600
    other = dataclasses.replace(known, probed="later")
    save(other, path, replace=False)
    assert load(path) == known
    save(other, path, replace=True)
    assert load(path) == other
    assert os.listdir(path.parent) == ["tuning.json"]


def test_a_writer_that_is_interrupted_leaves_the_old_file(
    known: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.json"
    save(known, path, replace=True)

    def interrupted(descriptor: int) -> None:
        assert os.fstat(descriptor).st_size > 0
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(dataclasses.replace(known, probed="later"), path, replace=True)
    assert load(path) == known
    assert os.listdir(tmp_path) == ["tuning.json"]


def test_a_file_that_others_may_write_is_not_read(known: Tuning, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    save(known, path, replace=True)
    path.chmod(0o660)
    with pytest.raises(PermissionError, match="others may write to it; chmod go-w"):
        load(path)


def test_a_tuned_machine_is_known_under_another_set_of_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, known: Tuning
) -> None:
    """The numbers of the cores say nothing, only how many there are; with another count the log says what is kept."""
    monkeypatch.setattr(machine, "_caches", lambda core: [("1", "Data", "32K", {core})])
    here, there, fewer = (identify(cores) for cores in ({0, 1}, {4, 5}, {4}))
    assert here == there and here.digest() == there.digest()
    assert default_path(fewer) != default_path(here)
    save(dataclasses.replace(known, identity=here), default_path(here), replace=True)
    monkeypatch.setattr(decision, "probe", lambda cores: known.machine)
    assert decision.current("auto", frozenset({4, 5}))[0].measured == known.measured
    assert not caplog.records
    assert not decision.current("auto", frozenset({4}))[0].measured
    assert "has measured this machine for jobs on 2 cores; this one may use 1" in caplog.text


def test_a_file_of_another_user_is_not_read(known: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tuning.json"
    save(known, path, replace=True)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=1), "format is 1"),
        (lambda d: d.pop("machine"), "not a tuning file: KeyError"),
        (lambda d: d["machine"].update(hop="fast"), "hop is 'fast'"),
        (lambda d: d["machine"].update(turn=1e308), r"turn is 1e\+308; expected a number from 1e-08 to 1"),
        (lambda d: d["machine"].update(hop=1e-320), "hop is 1e-320"),
        (lambda d: d["machine"].update(cores=1.5), "cores is 1.5"),
        (lambda d: d["machine"].update(cores=10**400), "cores is 1000"),
        (lambda d: d["machine"].update(put=[1e-10] * 3), "put is .*; expected four numbers"),
        (lambda d: d["machine"].update(staging=[4096] * 4), "staging is .*, ascending"),
        (lambda d: d.update(identity=7), "not a tuning file"),
        (lambda d: d["measured"]["3"]["cells"]["all_reduce"][0].update(algorithm="star"), "no algorithm 'star'"),
        (lambda d: d["measured"]["3"]["cells"]["all_reduce"][0].update(slice_bytes=-1), "slice_bytes is -1"),
        (lambda d: d["measured"]["3"]["cells"]["all_reduce"][0].update(seconds=-1), "seconds is -1; expected a posit"),
        (lambda d: d["measured"]["3"]["cells"]["all_reduce"][0].update(bytes=True), "bytes is True"),
        (
            lambda d: d["measured"]["3"]["cells"]["all_reduce"][0].update(bytes=4096),
            r"\[4096, 1024\]; expected them asc",
        ),
        (lambda d: d["measured"]["3"]["cells"]["all_reduce"].clear(), "expected them ascending"),
        (lambda d: d["measured"]["3"]["cells"].update(all_sum=[{}]), "not a tuning file"),
        (lambda d: d["measured"].update(many={}), "many"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(known: Tuning, tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "tuning.json"
    save(known, path, replace=True)
    document = json.loads(path.read_text())
    change(document)  # type: ignore[operator]
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 200_000])
def test_what_is_no_document_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tuning.json"
    path.write_bytes(content)
    with pytest.raises(ValueError):
        load(path)


def test_the_first_group_probes_and_later_ones_read(monkeypatch: pytest.MonkeyPatch) -> None:
    first = decided(2, "auto")
    path = default_path(identify(CORES))
    assert path.exists()
    decision.current.cache_clear()
    decision._decision.cache_clear()
    monkeypatch.setattr(decision, "probe", lambda cores: pytest.fail("probed again"))
    assert decided(2, "auto") == first
    plan.parse_algorithms(first)


def test_a_file_that_cannot_be_used_or_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, known: Tuning
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with caplog.at_level(logging.INFO, "ringreduce"):
        assert decided(2, str(broken)) == decided(2, str(broken)) != ""
        decided(4, str(broken))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(broken) in caplog.text
    assert broken.read_text() == "{"
    caplog.clear()
    with caplog.at_level(logging.INFO, "ringreduce"):
        assert decided(2, str(broken / "below" / "a" / "file.json")) != ""
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        load(tmp_path / "pipe")


def test_a_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does if there is none
    monkeypatch.setattr(decision, "save", lambda *_, **__: pytest.fail("wrote it"))
    assert "all_reduce:" in decided(2, "auto")
    with pytest.raises(FileNotFoundError, match="XDG_CACHE_HOME"):
        tuning.renew("auto", CORES)


def test_whatever_goes_wrong_the_other_ranks_get_an_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(cores: object) -> None:
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(decision, "probe", fails)
    assert decided(2, "auto") == ""
    assert "of all things" in caplog.text


def test_a_tilde_in_a_path_is_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert decision.path_of("~/tuning.json", identify(CORES)) == tmp_path / "tuning.json"


def test_what_another_process_measured_meanwhile_stays(known: Tuning, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    save(known, path, replace=True)
    (_, one), (_, other) = (tuning.renew(str(path), CORES) for _ in range(2))
    tuning.keep(one, 2, {"all_reduce": CELLS}, path)
    tuning.keep(other, 4, {"reduce": CELLS}, path)
    assert {ranks: set(measured.cells) for ranks, measured in load(path).measured.items()} == {
        2: {"all_reduce"},
        3: {"all_reduce"},
        4: {"reduce"},
    }


LITTLE_MEMORY = """
import os, resource
from ringreduce import _C
from ringreduce.errors import SystemFailure
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 24 * 2**20  # for two threads' stacks, not for their buffers
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    _C.probe([0, 0])
except SystemFailure as error:
    print(error)
"""


def test_a_probe_without_memory_is_an_error() -> None:
    done = subprocess.run([sys.executable, "-c", LITTLE_MEMORY], check=False, capture_output=True, text=True)
    assert "not enough memory" in done.stdout, done


def test_measured_decides_where_there_is_something_measured(known: Tuning, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    save(known, path, replace=True)
    rules = decided(3, str(path))
    assert rules.endswith("all_reduce:tree:0-256;all_reduce:ring:256-:128")
    assert "broadcast:" in rules
    assert "all_reduce:one_shot:0-" in decided(4, str(path))
    assert decided(1, str(path)) == decided(3, "off") == ""


def test_tuning_again_keeps_what_was_measured(known: Tuning, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    save(known, path, replace=True)
    where, renewed = tuning.renew(str(path), CORES)
    assert where == path
    assert renewed.measured == known.measured
    kept = tuning.keep(renewed, 3, {"reduce": CELLS[:1]}, path)
    assert load(path) == kept
    assert kept.measured[3].cells == {"all_reduce": CELLS, "reduce": CELLS[:1]}
    save(dataclasses.replace(known, identity=dataclasses.replace(known.identity, cpu="another")), path, replace=True)
    assert tuning.renew(str(path), CORES)[1].measured == {}


def test_machines_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = identify({0})
    others = [
        dataclasses.replace(identity, **change)
        for change in ({"cores": (0, 1)}, {"cpu": "x"}, {"caches": ()}, {"instruction_set": "x"}, {"ringreduce": "x"})
    ]
    assert len({default_path(each) for each in (identity, *others)}) == 6
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_path(identity).parent == Path("/home/someone/.cache/ringreduce")


def test_the_kernel_s_lists_of_cores_are_read() -> None:
    assert numbers("0-2,8") == {0, 1, 2, 8}
    assert numbers("") == set()


def test_a_rival_must_win_by_more_than_noise() -> None:
    model, rival = Candidate("one_shot", 0), Candidate("ring", 0)
    assert winner({model: [1.0] * 7, rival: [0.9] * 7}, model) == rival
    assert winner({model: [1.0] * 7, rival: [0.96] * 7}, model) == model
    assert winner({model: [1.0] * 7, rival: [0.9] * 6 + [5.0]}, model) == rival
    assert winner({model: [1.0] * 7, rival: [0.5] * 5 + [5.0] * 2}, model) == model


def test_every_cell_that_leaves_a_choice_is_measured_against_the_model() -> None:
    slicing = plan.Slicing(4, 16384, 512 * 1024)
    model = plan.table(4, plan.parse_algorithms("all_reduce:tree:0-1K;ring:1K-:64K"))
    work = list(tasks(4, ["all_reduce", "gather"], model, slicing))
    firsts = {(task.collective, task.block_bytes): task.candidates[0] for task in work}
    assert firsts["all_reduce", 64] == Candidate("tree", 0)
    assert firsts["all_reduce", 1024] == Candidate("ring", 64 * 1024)
    assert ("gather", 64) not in firsts
    for task in work:
        assert len(set(task.candidates)) == len(task.candidates) > 1
        for algorithm, slice_bytes in task.candidates:
            assert algorithm in plan.BUILDERS[task.collective]
            assert slice_bytes <= 512 * 1024


@pytest.mark.parametrize("value", ["", 7])
def test_a_wrong_option_is_named(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"tuning is .*'auto', 'off' or the path"):
        resolve(Options(tuning=value), {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "-5"], "'-5' seconds; it must be a number above 0"),
        (["--budget", "nan"], "'nan' seconds"),
        (["--ranks", "two"], "'two' ranks; a group to look at has 2 to 256"),
        (["--ranks", "1"], "'1' ranks"),
    ],
)
def test_wrong_arguments_of_the_command_are_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ringreduce", "tune", *arguments])
    assert cli.main() == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fetch", "user", "scope", "said"),
    [
        ("1", 1000, "0", "read where they are"),
        ("1", 1000, "1", "copied: the kernel does not let ranks"),
        ("1", 0, "1", "read where they are"),
        ("0", 0, "0", "copied, by RINGREDUCE_FETCH"),
    ],
)
def test_info_says_how_ordinary_tensors_go(
    fetch: str,
    user: int,
    scope: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "ptrace_scope").write_text(scope + "\n")
    monkeypatch.setattr(decision, "YAMA", tmp_path / "ptrace_scope")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(_C, "can_access", lambda *key: True)
    monkeypatch.setenv("RINGREDUCE_FETCH", fetch)
    monkeypatch.setenv("RINGREDUCE_TUNING", "off")
    monkeypatch.setattr(sys, "argv", ["ringreduce", "info", "--ranks", "2"])
    cli.main()
    assert f"ordinary tensors: {said}" in capsys.readouterr().out


def test_a_file_that_was_named_and_is_not_there_is_told_and_not_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nosuch" / "tuning.json"
    assert tuning.current(str(path), CORES)[1] == "probe"
    (said,) = caplog.messages
    assert f"cannot use the tuning in {path}" in said and "`ringreduce tune` writes it" in said
    assert os.listdir(tmp_path) == []
