"""`ringreduce serve`: a server of a parameter server, in a process of its own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import timedelta
from importlib import import_module
from typing import Any

from ringreduce.cli.terminal import Help, console
from ringreduce.common import compiled
from ringreduce.common.failures import InvalidArgument, RingReduceError
from ringreduce.common.units import bytes_text, parse_bytes

LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""The variables with a process's number and how many there are: of torchrun, of srun."""


def add(commands: Any, summary: str) -> None:
    parser = commands.add_parser(
        "serve",
        help=summary,
        description="Serves tensors by name to workers that call ringreduce.parameter_server.join(store, "
        'role="worker"), where store is torch.distributed.TCPStore(HOST, PORT). Servers and workers may be started in '
        "any order. Ends when workers have come and all have left.",
        epilog="examples:\n"
        "  ringreduce serve --store node0:29400 --memory 32G\n"
        "  torchrun --nproc-per-node 2 --no-python ringreduce serve --store node0:29400\n"
        "  srun -n 4 ringreduce serve --store node0:29400 --forever",
        formatter_class=Help,
    )
    parser.add_argument("--store", required=True, metavar="HOST:PORT", help="of the store; server 0 makes it")
    parser.add_argument("--existing-store", action="store_true", help="the store is there: server 0 makes none")
    parser.add_argument("--rank", type=int, help="this server's number (default: of torchrun or srun, or 0)")
    parser.add_argument("--size", type=int, help="the number of servers (default: of torchrun or srun, or 1)")
    parser.add_argument("--name", default="default", help="the parameter server's, as for join (default: default)")
    parser.add_argument("--memory", type=parse_bytes, help="bytes for values and states (default: its share of a half)")
    parser.add_argument("--functions", nargs="+", default=[], metavar="MODULE:NAME",
                        help="update functions that workers may name")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for all servers to come (default: 300)")
    parser.add_argument("--forever", action="store_true", help="serve on when all workers have left")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if missing := compiled.why_not():
        raise RingReduceError(f"no server can be run here: {missing}")
    from torch._C._distributed_c10d import TCPStore

    import ringreduce.parameter_server as ps

    rank, size = _place(arguments.rank, arguments.size)
    host, colon, port = arguments.store.rpartition(":")
    if not colon or not port.isdigit():
        raise InvalidArgument(f"--store is {arguments.store!r}; it must be HOST:PORT, such as node0:29400")
    sys.path.insert(0, "")  # the program's own modules, as with `python -m`
    functions = {function.rpartition(":")[2]: _function(function) for function in arguments.functions}
    makes = rank == 0 and not arguments.existing_store
    wait = timedelta(seconds=arguments.timeout)
    store = TCPStore(host, int(port), is_master=makes, wait_for_workers=False, timeout=wait)
    options = {"name": arguments.name, "memory": arguments.memory, "timeout": arguments.timeout}
    with ps.serve(store, rank=rank, size=size, functions=functions, **options) as serving:
        capacity = bytes_text(serving.stats()["capacity"])
        console().print(f"server {rank} of {size} (pid {os.getpid()}) serves with {capacity}", highlight=False)
        serving.wait()
        while arguments.forever:
            signal.pause()
    return 0


def _place(rank: int | None, size: int | None) -> tuple[int, int]:
    for number, of in LAUNCHERS:
        if rank is None and size is None and number in os.environ and of in os.environ:
            return int(os.environ[number]), int(os.environ[of])
    if rank is None and size is not None and size > 1:
        raise InvalidArgument(
            f"--size is {size} and there is no --rank; give each server its own, from 0 to {size - 1}"
        )
    return rank or 0, 1 if size is None else size


def _function(path: str) -> Any:
    module, colon, name = path.partition(":")
    if not colon or not hasattr(import_module(module), name):
        raise InvalidArgument(f"--functions has {path!r}; it must be MODULE:NAME of a function")
    return getattr(import_module(module), name)
