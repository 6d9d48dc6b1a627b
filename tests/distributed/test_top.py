"""`ringreduce top`: groups as another process sees them."""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, Ranks
from processes import deadline

from ringreduce import cli
from ringreduce.cli import top
from ringreduce.groups.lookup import backend_of


def waits_and_calls(me: Rank) -> None:
    with me.join():
        dist.all_reduce(torch.ones(1000))
        me.report(os.getpid())
        me.store.wait(["looked"])
        if me.rank == 1:
            me.store.wait(["rank 1 may go on"])
        dist.all_reduce(torch.ones(2000))
        me.store.wait(["the end"])


def of(pids: list[int], groups: dict[int, top.Group]) -> list[top.Rank]:
    """The ranks of the one group that these processes have. Other tests may have groups at the same time."""
    found = [group.ranks for group in groups.values() if {rank.pid for rank in group.ranks} & set(pids)]
    return found[0] if found else []


def seen_until(pids: list[int], watch: top.Watch, said: str) -> list[top.Rank]:
    """What is seen once the verdict has these words."""
    until = time.monotonic() + deadline()
    while said not in top.verdict(ranks := of(pids, watch.look())):
        assert time.monotonic() < until, ranks
        time.sleep(0.1)
    return ranks


def test_the_rank_that_is_waited_for_is_named() -> None:
    watch = top.Watch()
    with Ranks(waits_and_calls, 3) as ranks:
        pids = ranks.reports()
        idle = of(pids, watch.look())
        assert [each.rank for each in idle] == [0, 1, 2] and [each.pid for each in idle] == pids
        assert {each.state for each in idle} == {"between calls"} and top.verdict(idle) == ""
        assert {each.call for each in idle} == {"all_reduce(count=1000, dtype=float32, op=sum) #1"}
        ranks.store.set("looked", "")
        waiting = seen_until(pids, watch, "ranks 0, 2 wait for rank 1")
        assert f"(pid {pids[1]}), which has been between calls" in top.verdict(waiting)
        assert waiting[0].state == waiting[2].state == "waits" and waiting[0].waits_for == waiting[2].waits_for == 1
        assert waiting[0].call == "all_reduce(count=2000, dtype=float32, op=sum) #2"
        ranks.signal(1, signal.SIGSTOP)
        stopped = seen_until(pids, watch, "which has been stopped")
        assert stopped[1].state == "stopped"
        text = top.prometheus({7: top.Group('a "name"', "job", 3, "me", "program", stopped)})
        labels = r'group="7",name="a \"name\"",job="job",user="me"'
        assert f'ringreduce_stopped{{{labels},rank="1",pid="{pids[1]}"}} 1' in text
        assert f'ringreduce_waits{{{labels},rank="0",pid="{pids[0]}"}} 1' in text
        assert all(re.fullmatch(r"# (HELP|TYPE) .+|ringreduce_\w+\{.+\} \S+", line) for line in text.splitlines())
        ranks.signal(1, signal.SIGCONT)
        ranks.store.set("rank 1 may go on", "")
        gone_on = waiting
        while any(each.state != "between calls" for each in gone_on):
            time.sleep(0.1)
            gone_on = of(pids, watch.look())
        assert all(each.call.endswith("#2") for each in gone_on)
        ranks.store.set("the end", "")
        ranks.results()
    assert of(pids, watch.look()) == []


def calls_all_the_time(me: Rank) -> None:
    with me.join():
        group = backend_of(None)
        me.report((os.getpid(), dist.group.WORLD.group_name, group.job))  # type: ignore[union-attr]
        ended = torch.zeros(1)
        while not ended:
            dist.all_reduce(torch.ones(1000))
            ended.fill_(float(me.rank == 0 and me.store.check(["the end"])))
            dist.all_reduce(ended)
            time.sleep(0.01)  # the commands need a core


def test_rates_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["top", "--interval", "0.5"]
    with Ranks(calls_all_the_time, 2) as ranks:
        pids, (name, _), (job, _) = zip(*ranks.reports(), strict=True)
        assert cli.main([*words, "--once", "--json"]) == 0
        (group,) = [each for each in json.loads(capsys.readouterr().out) if each["ranks"][0]["pid"] == pids[0]]
        user = pwd.getpwuid(os.getuid()).pw_name
        program = Path(f"/proc/{pids[0]}/cmdline").read_text().rstrip("\0").replace("\0", " ")
        assert {key: group[key] for key in ("name", "job", "size", "user", "program")} == {
            "name": name,
            "job": job,
            "size": 2,
            "user": user,
            "program": program,
        }
        for each in group["ranks"]:
            assert each["calls_per_s"] > 0 and 0 < each["bytes_per_s"] <= each["calls_per_s"] * 4000
        assert cli.main([*words, "--once"]) == 0
        shown = capsys.readouterr().out
        assert all(str(pid) in shown for pid in pids) and "\x1b" not in shown
        assert f"group {name} of 2 ranks, job {job}, {user}: {program[: top.LONGEST_PROGRAM]}" in shown
        watching = subprocess.Popen([sys.executable, "-m", "ringreduce", "top", "--json"], stdout=subprocess.PIPE)
        assert watching.stdout is not None and json.loads(watching.stdout.readline())
        watching.send_signal(signal.SIGINT)
        assert watching.wait(deadline()) == 0
        watching.stdout.close()
        ranks.store.set("the end", "")
        ranks.results()


@pytest.mark.parametrize("content", [b"", b"no group", bytes(4096), b"\1" * 10_000])
def test_memory_that_is_no_groups_is_passed_over(content: bytes) -> None:
    memfd = os.memfd_create("ringreduce")
    try:
        os.write(memfd, content)
        assert os.fstat(memfd).st_ino not in top.Watch().look()
    finally:
        os.close(memfd)
