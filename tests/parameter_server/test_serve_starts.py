"""`ringreduce serve` before it serves: what it is given, and the store that it looks for."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest
from frameworks.launch import killed
from processes import deadline, free_ports
from test_serve import start

from ringreduce import cli
from ringreduce.cli import serve
from ringreduce.errors import InvalidArgument


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--store", "node0"), "--store is 'node0'; it must be HOST:PORT"),
        (("--store", "node0:0"), "--store is 'node0:0'; it must be HOST:PORT"),
        (("--store", "::1:29400"), r"it must be HOST:PORT, such as node0:29400 or [fd00::1]:29400"),
        (("--rank", "3"), "--rank is 3 and there is no --size; give the number of servers"),
        (("--rank", "-1", "--size", "2"), "--rank is -1 and --size 2; servers are numbered from 0"),
        (("--rank", "2", "--size", "2"), "--rank is 2 and --size 2; servers are numbered from 0"),
        (("--size", "0"), "--size is 0; it must be 1 or more"),
        (("--size", "2"), "--size is 2 and there is no --rank"),
        (("--functions", "nosuch:f"), "--functions has 'nosuch:f', and importing nosuch fails: ModuleNotFoundError"),
        (("--functions", "math:pi"), "--functions has 'math:pi'; it must be MODULE:NAME of a function"),
    ],
)
def test_wrong_arguments_are_named(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(serve, "_store", side_effect=AssertionError("the store was asked first")):
        assert cli.main(["serve", "--store", "127.0.0.1:1", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_size_that_is_none_says_which_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--store", "127.0.0.1:1", "--memory", "12Q"]) == 2
    assert "argument --memory: '12Q' is no size; give 160MB" in capsys.readouterr().err


def test_a_launcher_that_gives_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "abc")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match="RANK is 'abc'; it must be a whole number"):
        serve._place(None, None)


def test_stores_have_addresses_of_both_kinds() -> None:
    assert serve._address("[::1]:29400") == ("::1", 29400)
    assert serve._address("node0.cluster:29400") == ("node0.cluster", 29400)


@pytest.fixture
def stranger() -> str:
    """The address of something that lets everybody in and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_that_speaks_something_else_is_waited_for_no_longer_than_the_timeout(
    stranger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--store", stranger, "--existing-store", "--timeout", "1"]) == 2
    said = f"--store {stranger} does not speak as a torch.distributed.TCPStore does (no answer in 1 s)"
    assert said in capsys.readouterr().err


def test_who_waits_long_says_what_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "_QUIET", 0.0)
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    assert cli.main(["serve", "--store", nobody, "--rank", "1", "--size", "2", "--timeout", "0.5"]) == 2
    assert f"ringreduce serve: waits for the store of --store {nobody}, 0 s more (" in capsys.readouterr().err
    assert cli.main(["serve", "--store", nobody, "--size", "2", "--rank", "0", "--timeout", "1"]) == 2
    assert "waits for all servers of the parameter server 'default', up to 1 s in all" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("listens", [True, False])
def test_waiting_for_the_store_can_be_interrupted(listens: bool, stranger: str, tmp_path: Path) -> None:
    address = stranger if listens else f"127.0.0.1:{free_ports(1)[0]}"
    server = start("--store", address, "--rank", "1", "--size", "2", stderr=subprocess.PIPE)
    with killed([server]):
        waits_for_the_store(server.pid)
        server.send_signal(signal.SIGINT)
        said = server.communicate(timeout=deadline())[1].decode()
    assert server.returncode == 130 and said.endswith("interrupted\n")


def waits_for_the_store(pid: int) -> None:
    """Returns when a process waits in `_store`, which it does once it has no more to import."""
    end, still = time.monotonic() + deadline(), 0
    while still < 5:
        assert time.monotonic() < end
        ran = Path(f"/proc/{pid}/stat").read_text().split()[13]
        time.sleep(0.2)
        maps = Path(f"/proc/{pid}/maps").read_text()
        idle = "ringreduce/_C_torch" in maps and int(Path(f"/proc/{pid}/stat").read_text().split()[13]) - int(ran) < 3
        still = still + 1 if idle else 0


def test_servers_of_one_host_listen_at_no_other_address() -> None:
    (port,) = free_ports(1)
    server = start("--store", f"127.0.0.1:{port}", "--forever", stdout=subprocess.PIPE)
    with killed([server]):
        assert server.stdout is not None
        while "server listens at" not in server.stdout.readline().decode():
            assert server.poll() is None
        inodes = {Path(link).readlink().name for link in Path(f"/proc/{server.pid}/fd").iterdir()}
        at = [
            line.split()[1]
            for name in ("tcp", "tcp6")
            for line in Path("/proc/net", name).read_text().splitlines()[1:]
            if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes
        ]
    assert len(at) >= 2  # the store and the server
    assert {address.partition(":")[0] for address in at} <= {"0100007F", "00000000000000000000000001000000"}
