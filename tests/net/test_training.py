"""Training across hosts gives the parameters that it gives on one: DDP and FSDP2, 2 hosts x 2 ranks against 4 ranks.

Bit for bit if gradients are added up in the same order, by a plan that is named; else, as each placement has plans of
its own, up to rounding. All ranks have the same bits in any case. The examples are started as docs/hosts.md says.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.common import ROUNDING, batch, loss_of, sgd, sharded, values
from frameworks.common import network as model
from frameworks.launch import DEADLINE, ROOT, environment
from net.network import Network
from net.ranks import Rank, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringreduce

STEPS = 5
SAME_ORDER = ringreduce.Options(algorithms="all_reduce:one_shot;reduce_scatter:direct;all_gather:direct")


def ddp(me: Rank, **keywords: Any) -> nn.Module:
    return DistributedDataParallel(model(), bucket_cap_mb=0.001, **keywords)  # several buckets


WAYS: dict[str, Callable[[Rank], nn.Module]] = {
    "DDP": ddp,
    "DDP, gradients in buckets": lambda me: ddp(me, gradient_as_bucket_view=True),
    "FSDP2": sharded,
}


def trained(me: Rank, way: str, options: ringreduce.Options | None) -> list[float]:
    """All parameters after some steps on this rank's part of the data."""
    with me.join(options=options):
        wrapped = WAYS[way](me)
        optimizer = sgd(wrapped)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(wrapped, *batch(step, me.rank)).backward()
            optimizer.step()
        return values(wrapped.parameters()).tolist()


@pytest.mark.parametrize("order", ("same order", "own order"))
@pytest.mark.parametrize("way", WAYS)
def test_two_hosts_train_as_one_does(network: Network, way: str, order: str) -> None:
    options = SAME_ORDER if order == "same order" else None
    on_one = run(network, [0, 0, 0, 0], trained, way, options)
    on_two = run(network, [0, 0, 1, 1], trained, way, options)
    for parameters in (on_one, on_two):
        assert all(other == parameters[0] for other in parameters)
    start = values(model().parameters())
    one, two = torch.tensor(on_one[0], dtype=torch.float64), torch.tensor(on_two[0], dtype=torch.float64)
    assert (one - start).abs().max() > 1e-3  # they have been trained
    tolerance = 0 if order == "same order" else ROUNDING
    torch.testing.assert_close(two, one, rtol=0, atol=tolerance)


EXAMPLES = {
    "DDP": ("examples/train_ddp.py", "--optimizer=momentum", "--epochs=2"),
    "FSDP2": ("examples/fsdp.py",),
}


def launched(network: Network, hosts: int, *script: str) -> str:
    """Runs a script on 4 ranks, with a torchrun on each of so many hosts. Returns what it says on the first."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={4 // hosts}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={network.address(0)}:29400"]
    runs = []
    for host in range(hosts):
        # By default torchrun looks up its machine's name for its address, and these hosts have that name in common.
        own = [*command, f"--rdzv-conf=is_host={host == 0}", f"--local-addr={network.address(host)}", *script]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs.append(network.popen(host, own, cwd=ROOT, env=environment(), **pipes))
    outputs = [run.communicate(timeout=DEADLINE)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * hosts, "\n".join(outputs)
    return outputs[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_give_what_they_give_on_one_host(network: Network, name: str, tmp_path: Path) -> None:
    """Up to rounding of float64, since each placement has its own plans; and neither is what untrained models have."""
    saved = {}
    for hosts in (1, 2):
        before = network.bytes_out(1)
        launched(network, hosts, *EXAMPLES[name], f"--save={tmp_path / str(hosts)}")
        saved[hosts] = torch.load(tmp_path / str(hosts))
        assert (network.bytes_out(1) - before > 1e5) == (hosts == 2)  # on two hosts, tensors went from the second
    assert saved[1].keys() == saved[2].keys()
    for key, expected in saved[1].items():
        assert expected.dtype == torch.float64
        torch.testing.assert_close(saved[2][key], expected, rtol=0, atol=ROUNDING)
