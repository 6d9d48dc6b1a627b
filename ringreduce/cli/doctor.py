"""`ringreduce doctor`: what this machine lets ringreduce do, and what would let it do more; `--peers`: the network."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ringreduce.cli.arguments import seconds
from ringreduce.cli.terminal import console, put, say, table
from ringreduce.common import compiled
from ringreduce.common.bounded import bounded
from ringreduce.common.failures import InvalidArgument, SystemFailure
from ringreduce.topology import hosts_file
from ringreduce.topology.hosts_file import HostsFile

if TYPE_CHECKING:
    from rich.table import Table

    from ringreduce.doctor.peers import Survey

NOT_WELL = 1
"""The exit code where something is missing, or two hosts cannot connect."""

MOST_COLUMNS = 16

MOST_RANKS = 1_000_000


def add(command: Any) -> None:
    parser = command(
        description="Looks at what ringreduce needs and could use here: torch, a compiler, shared memory, GPUs and "
        "their links, NCCL, the network, limits. Says why each matters and what to do where something is missing. "
        "With --peers, run by a launcher on every rank of a job: which hosts reach each other, how long a small "
        "message takes, and how fast bytes go. Rank 0 prints it. Exits with 1 where something is "
        "missing, or if two hosts cannot connect.",
        epilog="examples:\n  ringreduce doctor\n  torchrun --nnodes 2 ... -m ringreduce doctor --peers\n"
        "  torchrun --nnodes 4 ... -m ringreduce doctor --peers --write hosts.json",
    )
    parser.add_argument("--peers", action="store_true", help="probe the network between the hosts of this job")
    parser.add_argument("--timeout", type=seconds, default=10.0, metavar="SECONDS",
                        help="for two hosts to connect (default: 10)")  # fmt: skip
    parser.add_argument("--write", metavar="FILE",
                        help="with --peers: where rank 0 writes what groups read by RINGREDUCE_HOSTS_FILE")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    if arguments.peers:
        return _peers(arguments)
    if arguments.write:
        raise InvalidArgument(f"--write {arguments.write} is for --peers, which measures what is written")
    from ringreduce.doctor import machine

    findings = machine.examine()
    if arguments.json:
        put(json.dumps([asdict(each) for each in findings], indent=1))
    else:
        shown = machine.render(findings)
        for column in shown.columns:
            column.overflow = "fold"
        console().print(shown)
    return NOT_WELL if any(each.state == "missing" for each in findings) else 0


def _peers(arguments: argparse.Namespace) -> int:
    compiled.require("no ranks can be run here")
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from ringreduce.config import resolve
    from ringreduce.doctor import peers
    from ringreduce.groups.ready import location_of

    options, _ = resolve(None)
    place = location_of(options)
    if place.transport != "tcp":  # which says that each rank has a host of its own
        place = place._replace(transport="auto")
    rank, size = _rank_and_size()
    most = peers.MEET_SECONDS
    where = f"the store of the job at {os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
    try:
        # torch's own timeout comes later, since torch would try again and log stacks.
        wait = timedelta(seconds=2 * most)
        store, _, _ = bounded(lambda: next(iter(rendezvous("env://", timeout=wait))), most)
    except (TimeoutError, RuntimeError, ValueError) as error:
        why = str(error).split("\n", 1)[0]
        raise SystemFailure(f"{where}: {why}; start rank 0, or correct MASTER_ADDR and MASTER_PORT") from None
    found = peers.survey(
        PrefixStore("ringreduce doctor", store),
        rank,
        size,
        place,
        arguments.timeout,
        options.connections,
        options.dead_after,
    )
    if found is None:
        return 0
    if arguments.write:
        _write(found.for_file(), arguments.write)
    if arguments.json:
        put(json.dumps(asdict(found), indent=1))
        return 0 if found.ok else NOT_WELL
    out = console()
    for title, shown in render(found):
        say(out, title, style="bold")
        out.print(shown)
    if len(found.hosts) == 1:
        say(out, "all ranks are on one host (RINGREDUCE_HOST_ID or RINGREDUCE_TRANSPORT=tcp can say otherwise)")
    if file := arguments.write:
        say(out, f"written to {file}: RINGREDUCE_HOSTS_FILE={file} has groups of these hosts read it")
    return 0 if found.ok else NOT_WELL


def _rank_and_size() -> tuple[int, int]:
    """What the launcher says. Raises InvalidArgument that names the variable which is missing or wrong."""
    how = (
        "doctor --peers is run on every rank of a job by a launcher, such as 'torchrun --nnodes 2 --nproc-per-node 1 "
        "--rdzv-backend c10d --rdzv-endpoint HOST:PORT -m ringreduce doctor --peers', which sets RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT"
    )
    size = _number("WORLD_SIZE", 1, MOST_RANKS, how)
    rank = _number("RANK", 0, size - 1, how)
    _number("MASTER_PORT", 0, 65535, how)
    if not os.environ.get("MASTER_ADDR"):
        raise InvalidArgument(f"MASTER_ADDR is ''; it must be the host of rank 0. {how}")
    return rank, size


def _number(variable: str, least: int, most: int, how: str) -> int:
    text = os.environ.get(variable, "")
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not least <= int(text) <= most:
        raise InvalidArgument(f"{variable} is {text!r}; it must be a number from {least} to {most}. {how}")
    return int(text)


def _write(measured: HostsFile, file: str) -> None:
    try:
        hosts_file.save(measured, file)
    except ValueError as error:
        raise InvalidArgument(f"--write {file}: {error}") from None


def render(found: Survey) -> list[tuple[str, Table]]:
    """Titles, and tables for a rich console: the hosts, latency and bandwidth from row to column, and what failed."""
    hosts = table("host", "name", "ranks", right=("host",))
    for number, host in enumerate(found.hosts):
        hosts.add_row(str(number), host.name, ", ".join(map(str, host.ranks)))
    tables = [("hosts", hosts)]
    latency = {(p.lower, p.higher): p.latency * 1e6 for p in found.pairs if not p.error}
    latency |= {(higher, lower): value for (lower, higher), value in latency.items()}
    rate = {(p.lower, p.higher): p.there * 8e-9 for p in found.pairs if not p.error}
    rate |= {(p.higher, p.lower): p.back * 8e-9 for p in found.pairs if not p.error}
    if len(found.hosts) <= MOST_COLUMNS and found.pairs:
        for title, values in (("latency, us: half a round trip", latency), ("Gbit/s, from row to column", rate)):
            numbers = [str(number) for number in range(len(found.hosts))]
            matrix = table("", *numbers, right=tuple(numbers))
            for row, name in enumerate(numbers):
                cells = [_cell(values.get((row, column)), row == column) for column in range(len(numbers))]
                matrix.add_row(name, *cells)
            tables.append((title, matrix))
    elif found.pairs:
        listed = table("from", "to", "latency, us", "Gbit/s", right=("from", "to", "latency, us", "Gbit/s"))
        for pair in found.pairs:
            for ends in ((pair.lower, pair.higher), (pair.higher, pair.lower)):
                listed.add_row(*map(str, ends), _cell(latency.get(ends)), _cell(rate.get(ends)))
        tables.append(("between hosts", listed))
    if any(pair.error or pair.missed for pair in found.pairs):
        failed = table("hosts", "what")
        for pair in found.pairs:
            for what in (*filter(None, [pair.error]), *pair.missed):
                failed.add_row(f"{pair.lower} - {pair.higher}", what)
        tables.append(("what does not work", failed))
    return tables


def _cell(value: float | None, same: bool = False) -> str:
    return "" if same else "failed" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"
