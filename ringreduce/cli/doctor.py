"""`ringreduce doctor`: what this machine lets ringreduce do, and what would let it do more; `--peers`: the network."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ringreduce import hosts_file
from ringreduce.cli.arguments import seconds
from ringreduce.cli.terminal import Help, console, say, table
from ringreduce.common import compiled
from ringreduce.common.failures import InvalidArgument, SystemFailure
from ringreduce.hosts_file import HostsFile

if TYPE_CHECKING:
    from rich.table import Table

    from ringreduce.doctor_peers import Survey

UNREACHABLE = 2

MOST_COLUMNS = 16


def add(commands: Any, summary: str) -> None:
    parser = commands.add_parser(
        "doctor",
        help=summary,
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
    if missing := compiled.why_not():
        raise SystemFailure(f"no ranks can be run here: {missing}")
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from ringreduce import doctor_peers
    from ringreduce.config import resolve
    from ringreduce.ready import place_of

    options, _ = resolve(None)
    place = place_of(options)
    if place.transport != "tcp":  # which says that each rank has a host of its own
        place = place._replace(transport="auto")
    try:
        wait = timedelta(seconds=doctor_peers.MEET_SECONDS)
        store, rank, size = next(iter(rendezvous("env://", timeout=wait)))
    except ValueError as error:
        raise InvalidArgument(
            "doctor --peers is run on every rank of a job by a launcher, such as 'torchrun --nnodes 2 --nproc-per-node "
            "1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m ringreduce doctor --peers', which sets RANK, "
            f"WORLD_SIZE, MASTER_ADDR and MASTER_PORT: {error}"
        ) from None
    found = doctor_peers.survey(
        PrefixStore("ringreduce doctor", store), rank, size, place, seconds, options.connections, options.dead_after
    )
    if found is None:
        return 0
    out = console()
    for title, shown in render(found):
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
