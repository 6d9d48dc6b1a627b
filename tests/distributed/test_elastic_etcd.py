"""Worlds whose directory is in etcd, so that no single host has to live until the job ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import etcd
import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks, in_threads

from ringreduce import elastic
from ringreduce.coordination.etcd import Etcd, _Connection
from ringreduce.errors import InvalidArgument, SystemFailure

STEPS = 200


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1/job", "etcd://127.0.0.1:1", "etcd://127.0.0.1:1/", "etcd://127.0.0.1/job", "etcd://a:1,:2/job"],
)
def test_addresses(address: str) -> None:
    with pytest.raises(InvalidArgument, match="etcd://HOST:PORT"):
        Etcd(address)


def test_no_server_answers() -> None:
    with pytest.raises(ConnectionError, match=r"etcd: range failed, at last by 127\.0\.0\.1:1: "):
        Etcd("etcd://127.0.0.1:1/job").get("a")


@etcd.installed
def test_values(tmp_path: Path) -> None:
    with etcd.servers(1, tmp_path) as (address, processes):
        one, other = Etcd(address), Etcd(address)
        assert one.get("a") == "" and not other.check(["a"]) and one.value("a") is None
        assert one.compare_set("a", "", "1") == "1"
        assert other.compare_set("a", "", "2") == "1"  # too late
        assert other.compare_set("a", "1", "two, with ä and \n") == "two, with ä and \n"
        assert one.compare_set("b", "x", "y") == ""  # there is none
        assert one.get("a") == "two, with ä and \n"
        assert one.append("log", "a\n") == "a\n" and other.append("log", "b\n") == "a\nb\n" == one.get("log")
        one.set("b", b"\x00\xff")
        assert other.value("b") == b"\x00\xff" and other.check(["a", "b"]) and not other.check(["a", "c"])
        assert [one.add("n", 5), other.add("n", -2), one.add("n", 0)] == [5, 3, 3]
        assert Etcd(address + "2").value("a") is None
        for number in range(150):
            one.set(f"many/{number}", "x")
        assert one.check([f"many/{number}" for number in range(150)])
        assert not one.check([f"many/{number}" for number in range(151)])
        in_threads([lambda: [Etcd(address).add("m", 1) for _ in range(20)]] * 4)
        assert one.add("m", 0) == 80
        processes[0].kill()
        with pytest.raises(ConnectionError):
            one.add("n", 1)


@pytest.fixture
def certificates(tmp_path: Path) -> dict[str, str]:
    """Files of an authority, and of a server's and a client's certificate that it has signed, by ETCDCTL_'s names."""

    def openssl(*words: str | Path) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=tmp_path)

    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl(*new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    for name in ("server", "client"):
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1")
        openssl(*new, *signed, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/O={name}",
                "-addext", "basicConstraints=critical,CA:false")  # fmt: skip
    files = {"CACERT": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
    return {f"ETCDCTL_{name}": str(tmp_path / file) for name, file in files.items()}


@etcd.installed
def test_tls_and_a_login(tmp_path: Path, certificates: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in certificates.items():
        monkeypatch.setenv(name, file)
    jwt = f"pub-key={tmp_path}/server.pem,priv-key={tmp_path}/server.key,sign-method=ES256,ttl=2s"
    tls = [f"--cert-file={tmp_path}/server.pem", f"--key-file={tmp_path}/server.key", "--client-cert-auth"]
    tls += [f"--trusted-ca-file={tmp_path}/ca.pem", f"--auth-token=jwt,{jwt}"]
    with etcd.servers(1, tmp_path, tls) as (address, _):
        Etcd(address).set("a", "1")
        admin = _Connection(*Etcd(address)._servers[0], Etcd(address)._tls)
        for what, request in {
            "user/add": {"name": "root", "password": "secret"},
            "role/add": {"name": "root"},
            "user/grant": {"user": "root", "role": "root"},
            "enable": {},
        }.items():
            assert admin.post(f"auth/{what}", request, "")[0] == 200
        with pytest.raises(ConnectionError, match="permission denied"):
            Etcd(address).get("a")
        monkeypatch.setenv("ETCDCTL_USER", "root:wrong")
        with pytest.raises(
            InvalidArgument, match=r"ETCDCTL_USER is root:\.\.\., which the server refuses: .*authentication"
        ):
            Etcd(address).get("a")
        monkeypatch.setenv("ETCDCTL_USER", "root:secret")
        member = Etcd(address)
        assert member.get("a") == "1" and member.add("n", 2) == 2
        time.sleep(4)  # the server has forgotten the login
        assert member.add("n", 1) == 3
        assert admin.post("auth/user/add", {"name": "another", "password": "secret"}, member._token)[0] == 200
        assert member.add("n", 1) == 4  # users have changed since the login
        monkeypatch.delenv("ETCDCTL_CERT")
        with pytest.raises(ConnectionError, match="etcd: range failed"):
            Etcd(address).get("a")
        monkeypatch.delenv("ETCDCTL_CACERT")
        with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            Etcd(address).get("a")
        monkeypatch.setenv("ETCDCTL_CACERT", "nosuch.pem")
        with pytest.raises(InvalidArgument, match=r"certificates of ETCDCTL_CACERT=nosuch\.pem"):
            Etcd(address)


def trains(me: Rank, address: str) -> tuple[int, int, float]:
    """Trains until 3 members have done 5 steps together after step STEPS. Every rank counts as a host of its own."""
    os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank}"
    world = elastic.start(
        store=address, rank=me.rank % 3, world_size=3, timeout=timedelta(seconds=30), patience=20, expel_after=10
    )
    state = world.state(step=0, together=0, sum=torch.zeros(1, dtype=torch.float64))
    me.report(state.step)

    def body() -> float:
        one = torch.full((1,), float(state.step) / world.size, dtype=torch.float64)
        dist.all_reduce(one)
        time.sleep(0.002)
        return float(one)

    while state.step < STEPS or state.together < 5:
        state.sum += world.attempt(body)
        state.step += 1
        state.together = state.together + 1 if world.size == 3 and state.step > STEPS else 0
    size = world.size
    world.leave()
    return size, state.step, float(state.sum) - state.step * (state.step - 1) / 2


@pytest.mark.slow
@etcd.installed
def test_the_job_outlives_a_server_and_a_member(tmp_path: Path) -> None:
    with etcd.servers(3, tmp_path) as (address, processes), Ranks(late, 4, address) as ranks:
        ranks.reports(but=(3,))
        processes[0].kill()  # whom all have asked so far
        ranks.signal(0, signal.SIGKILL)
        results = ranks.results(but=(0,))
    assert {size for size, _, _ in results} == {3} and len({steps for _, steps, _ in results}) == 1
    assert all(abs(error) < 1e-6 for _, _, error in results)


def late(me: Rank, address: str) -> Any:
    if me.rank == 3:
        time.sleep(2)
    return trains(me, address)


def loses_quorum(me: Rank, address: str) -> str:
    os.environ["RINGREDUCE_HOST_ID"] = f"host {me.rank}"
    world = elastic.start(store=address, rank=me.rank, world_size=3, timeout=timedelta(seconds=30), patience=1)
    me.report("begins")
    with pytest.raises(SystemFailure, match=r"out of reach for \d+ s: etcd: "):
        while True:
            world.attempt(lambda: dist.all_reduce(torch.ones(1)))
    return "says so"


@pytest.mark.slow
@etcd.installed
def test_a_job_whose_servers_have_no_quorum_says_so(tmp_path: Path) -> None:
    with etcd.servers(3, tmp_path) as (address, processes), Ranks(loses_quorum, 3, address) as ranks:
        ranks.reports()
        processes[0].kill()
        processes[1].kill()
        time.sleep(0.5)
        ranks.signal(2, signal.SIGKILL)
        assert ranks.results(but=(2,)) == ["says so"] * 2
