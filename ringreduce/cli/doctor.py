"""`ringreduce doctor`: what this machine lets ringreduce do, and what would let it do more; `--peers`: the network."""

from __future__ import annotations

import argparse
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ringreduce import hosts_file
from ringreduce.cli.arguments import seconds
from ringreduce.cli.terminal import Help, console, say
from ringreduce.errors import InvalidArgument
from ringreduce.hosts_file import HostsFile

UNREACHABLE = 2


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine, or the network between hosts, can and cannot do",
        description="Looks at what ringreduce needs and could use here: torch, a compiler, shared memory, GPUs and "
        "their links, NCCL, the network, limits. Says why each matters and what to do where something is missing. "
        "With --peers, run by a launcher on every rank of a job: which hosts reach each other, how long a small "
        "message takes, and how fast bytes go. Rank 0 prints it, and exits with 2 if two hosts cannot connect.",
        epilog="examples:\n  ringreduce doctor\n  torchrun --nnodes 2 ... -m ringreduce doctor --peers\n"
        "  torchrun --nnodes 4 ... -m ringreduce doctor --peers --write hosts.json",
        formatter_class=Help,
    )
    parser.add_argument("--peers", action="store_true", help="probe the network between the hosts of this job")
    parser.add_argument("--timeout", type=seconds, default=10.0, metavar="SECONDS",
                        help="for two hosts to connect (default: 10)")  # fmt: skip
    parser.add_argument("--write", metavar="FILE",
                        help="with --peers: where rank 0 writes what groups read by RINGREDUCE_HOSTS_FILE")  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.peers:
        return _peers(arguments.timeout, arguments.write)
    if arguments.write:
        raise InvalidArgument(f"--write {arguments.write} is for --peers, which measures what is written")
    from ringreduce import doctor

    shown = doctor.render(doctor.examine())
    for column in shown.columns:
        column.overflow = "fold"
    console().print(shown)
    return 0


def _peers(seconds: float, file: str | None) -> int:
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from ringreduce import doctor_peers
    from ringreduce.backend import place_of
    from ringreduce.config import resolve

    options, _ = resolve(None)
    place = place_of(options)
    if place.transport != "tcp":  # which says that each rank has a host of its own
        place = replace(place, transport="auto")
    try:
        wait = timedelta(seconds=doctor_peers.MEET_SECONDS)
        store, rank, size = next(iter(rendezvous("env://", timeout=wait)))
    except ValueError as error:
        raise InvalidArgument(
            "doctor --peers is run on every rank of a job by a launcher, such as 'torchrun --nnodes 2 --nproc-per-node "
            "1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m ringreduce doctor --peers', which sets RANK, "
            f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT: {error}"
        ) from None
    assert options.connections is not None and options.dead_after is not None  # resolved
    found = doctor_peers.survey(
        PrefixStore("ringreduce doctor", store),
        rank,
        size,
        place,
        seconds,
        options.connections,
        options.dead_after,
    )
    if found is None:
        return 0
    out = console()
    for title, shown in doctor_peers.render(found):
        say(out, title, style="bold")
        out.print(shown)
    if len(found.hosts) == 1:
        say(out, "all ranks are on one host (RINGREDUCE_HOST_ID or RINGREDUCE_TRANSPORT=tcp can say otherwise)")
    if file:
        _write(found.for_file(), file)
        say(out, f"written to {file}: RINGREDUCE_HOSTS_FILE={file} has groups of these hosts read it")
    return 0 if found.ok else UNREACHABLE


def _write(measured: HostsFile, file: str) -> None:
    try:
        hosts_file.save(measured, file)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--write {file}: {error}") from None
