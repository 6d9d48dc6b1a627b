"""`ringreduce doctor --peers`: its schedule, its tables, and all of it between two "hosts" on this machine."""

import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from frameworks.launch import killed
from rich.console import Console

from ringreduce.cli.doctor import render
from ringreduce.doctor.peers import Host, Pair, Survey, _receive, _send, rounds

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("count", range(2, 12))
def test_every_pair_once_and_nobody_twice_in_a_round(count: int) -> None:
    plan = list(rounds(count))
    for pairs in plan:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
    assert sorted(pair for pairs in plan for pair in pairs) == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    assert len(plan) == count - 1 + count % 2


def test_bytes_go_over_all_connections() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    _send([ours for ours, _ in pairs], 100_001)
    counts = []
    for _, theirs in pairs:
        theirs.setblocking(False)
        counts.append(len(theirs.recv(1 << 20, socket.MSG_PEEK)) if _has_some(theirs) else 0)
    assert sum(counts) == 100_001
    _receive([theirs for _, theirs in pairs], 100_001)
    for both in pairs:
        for end in both:
            end.close()


def _has_some(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def drawn(found: Survey) -> str:
    console = Console(file=io.StringIO(), width=200)
    for title, table in render(found):
        console.print(title)
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


HOSTS = (Host("a", [0, 1]), Host("b", [2]), Host("c", [3]))
PAIRS = (
    Pair(0, 1, paths=("x",), missed=("10.0.1.2:5 (eth1): no answer",), latency=51e-6, there=1.25e8, back=1.25e9),
    Pair(0, 2, error="rank 0 cannot connect with rank 3"),
    Pair(1, 2, latency=0.02, there=1e7, back=1e7),
)


def test_tables() -> None:
    text = drawn(Survey(HOSTS, PAIRS))
    assert "0 a 0, 1" in text
    assert "\n0 51 failed\n" in text and "\n1 51 20000\n" in text and "\n2 failed 20000\n" in text
    assert "\n0 1 failed\n" in text and "\n1 10 0.08\n" in text
    assert "0 - 1 10.0.1.2:5 (eth1): no answer" in text and "0 - 2 rank 0 cannot connect with rank 3" in text
    assert not Survey(HOSTS, PAIRS).ok and Survey(HOSTS, PAIRS[:1]).ok


def test_many_hosts_are_a_list() -> None:
    hosts = tuple(Host(f"h{n}", [n]) for n in range(17))
    assert "\n1 0 51 10\n" in drawn(Survey(hosts, PAIRS[:1]))


def doctor(*hosts: dict[str, str], arguments: tuple[str, ...] = ()) -> list[tuple[int, str, str]]:
    """The exit code, output and errors of each rank; `hosts` says what is special about each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []
    for rank, special in enumerate(hosts):
        environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
        environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), **special}
        command = [sys.executable, "-m", "ringreduce", "doctor", "--peers", *arguments]
        started.append(
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
        )
    with killed(started):
        return [(process.returncode, *output) for process in started for output in [process.communicate(timeout=100)]]


A, B = {"RINGREDUCE_HOST_ID": "a"}, {"RINGREDUCE_HOST_ID": "b"}


@pytest.mark.slow
def test_two_hosts_of_one_machine() -> None:
    (code, out, err), *others = doctor(A, A, B)
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    name = socket.gethostname()
    assert ["0", name, "0,", "1"] in rows and ["1", name, "2"] in rows
    cells = [float(row[1]) for row in rows if len(row) == 2 and row[0] in ("0", "1") and row[1] not in ("1", name)]
    assert len(cells) == 4 and min(cells) > 0  # latency and bandwidth, both ways
    assert "does not work" not in out
    assert [(code, out) for code, out, _ in others] == [(0, ""), (0, "")]


@pytest.mark.slow
def test_hosts_that_cannot_connect() -> None:
    four, six = {"RINGREDUCE_SOCKET_IFNAME": "127.0.0.1"}, {"RINGREDUCE_SOCKET_IFNAME": "::1"}
    (code, out, err), (other, *_) = doctor(A | four, B | six)
    assert (code, other) == (1, 0), err
    assert "failed" in out
    assert "rank 0 cannot connect with rank 1" in out and "no address of a kind this host has; this host uses lo" in out
    assert "rank 1 cannot connect with rank 0" in out


def test_one_host() -> None:
    (code, out, err), _ = doctor(A, A)
    assert code == 0, err
    assert "all ranks are on one host" in out


def test_without_a_launcher() -> None:
    environ = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    done = subprocess.run(
        [sys.executable, "-m", "ringreduce", "doctor", "--peers"],
        env=environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "run on every rank of a job by a launcher, such as 'torchrun --nnodes 2" in done.stderr
    assert "Traceback" not in done.stderr
