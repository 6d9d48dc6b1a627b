"""`ringreduce serve`: a server of a parameter server, in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from ringreduce.cli.arguments import count, seconds, size_bytes
from ringreduce.cli.terminal import console
from ringreduce.common import compiled
from ringreduce.common.bounded import bounded
from ringreduce.common.failures import CollectiveTimeout, InvalidArgument, RingReduceError, SystemFailure
from ringreduce.common.launcher import check_alone
from ringreduce.common.system import explained, start
from ringreduce.common.units import address, bytes_text

if TYPE_CHECKING:
    from pathlib import Path

    from ringreduce.parameter_server import Serving

_LOOK = 0.1
"""Seconds between looks for snapshots that were asked for."""
_QUIET = 5.0
"""Seconds after which a wait says what it waits for."""
LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""The variables with a process's number and how many there are: of torchrun, of srun."""


def add(command: Any) -> None:
    parser = command(
        description="Serves tensors by name to workers that call ringreduce.parameter_server.join(store, "
        'role="worker"), where store is torch.distributed.TCPStore(HOST, PORT). Servers and workers may be started in '
        "any order. Ends when workers have come and all have left.",
        epilog="examples:\n"
        "  ringreduce serve --store node0:29600 --memory 32G\n"
        "  torchrun --nproc-per-node 2 --no-python ringreduce serve --store node0:29600\n"
        "  srun -n 4 ringreduce serve --store node0:29600 --forever",
    )
    parser.add_argument("--store", required=True, metavar="HOST:PORT", help="of the store; server 0 makes it")
    parser.add_argument("--existing-store", action="store_true", help="the store is there: server 0 makes none")
    parser.add_argument("--rank", type=int, help="this server's number (default: of torchrun or srun, or 0)")
    parser.add_argument("--size", type=int, help="the number of servers (default: of torchrun or srun, or 1)")
    parser.add_argument("--name", default="default", help="the parameter server's, as for join (default: default)")
    parser.add_argument("--memory", type=size_bytes, help="bytes for values and states (default: a share of half)")
    parser.add_argument("--backups", type=int, default=0, choices=(0, 1),
                        help="1: each server has a backup, on another host if any")  # fmt: skip
    parser.add_argument("--listen", action="store_true", help="with --backups 1: let in workers of other hosts")
    parser.add_argument("--servers", type=int, default=0,
                        help="how many, more than processes if others come later (default: one a process)")  # fmt: skip
    parser.add_argument(
        "--join",
        action="store_true",
        help="take a share of what others serve already: on this host, or with backups on any",
    )
    parser.add_argument("--functions", nargs="+", default=[], metavar="MODULE:NAME",
                        help="update functions that workers may name")  # fmt: skip
    parser.add_argument("--timeout", type=seconds, help="seconds to wait for servers (300; --status: 10)")
    parser.add_argument("--snapshots", metavar="FOLDER", help="write a snapshot there before the end, on SIGTERM too")
    parser.add_argument("--every", type=seconds, metavar="SECONDS", help="also write one so often; needs --snapshots")
    parser.add_argument("--keep", type=count, default=2, help="how many snapshots of this run to keep (default: 2)")
    parser.add_argument("--status", action="store_true", help="serve nothing; print what the servers do and wait for")
    parser.add_argument("--forever", action="store_true", help="go on serving when all workers have left")


def run(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # errors say the same without traces of C++
    compiled.require("no server can be run here")
    import ringreduce.parameter_server as ps

    host, port = _address(arguments.store)
    if _is_loopback(host):  # all are on this host, so nothing has to be reached from others
        os.environ.setdefault("RINGREDUCE_SOCKET_IFNAME", "=lo")
    if arguments.every is not None and arguments.snapshots is None:
        raise InvalidArgument(f"--every {arguments.every:g} has no folder to write to; add --snapshots FOLDER")
    if arguments.timeout is None:
        arguments.timeout = 10.0 if arguments.status else 300.0
    if arguments.status:
        return _status(host, port, arguments)
    if arguments.join:
        rank, size = None, None
    else:
        rank, size = _place(arguments.rank, arguments.size)
    sys.path.insert(0, "")  # the program's own modules, as with `python -m`
    functions = {function.rpartition(":")[2]: _function(function) for function in arguments.functions}
    makes_store = rank == 0 and not arguments.existing_store
    store = _store(host, port, arguments, makes_store)
    options = {"name": arguments.name, "memory": arguments.memory, "timeout": arguments.timeout}
    options |= {"backups": arguments.backups, "listen": arguments.listen or None}
    options |= {"servers": arguments.servers, "joins": arguments.join}
    out = console()  # what it takes may not be installed: better before workers come
    terminated = threading.Event()
    if arguments.backups or arguments.servers or arguments.join or arguments.snapshots is not None:
        # Before serve() returns, since servers may come while it waits.
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    with _told("for all servers" if rank is not None else "to be let in by the servers", arguments):
        serving = ps.serve(store, rank=rank, size=size, functions=functions, **options)
    with serving:
        capacity = bytes_text(serving.stats()["capacity"])
        joined = serving.number != rank
        more = f"; processes have {arguments.servers} servers in all" if arguments.servers else ""
        what = "takes its share" if joined else f"{rank} of {size} serves with {capacity}{more}"
        out.print(f"server {what} (pid {os.getpid()})", highlight=False)
        if makes_store and not _is_loopback(host):
            out.print(f"the store listens at port {port} of all addresses of this host", highlight=False)
        if serving.addresses:
            out.print(f"the server listens at {', '.join(serving.addresses)}", highlight=False)
        if arguments.snapshots is not None:
            return _serve_with_snapshots(serving, arguments, terminated)
        return _serve(serving, arguments, terminated)


def _serve(serving: Serving, arguments: argparse.Namespace, terminated: threading.Event) -> int:
    """Serves until workers have come and left, or SIGTERM, if others can serve what this process does."""
    while not terminated.is_set() and (arguments.forever or not serving.wait(_LOOK)):
        if arguments.forever:
            terminated.wait(_LOOK)
    if terminated.is_set() and not serving.give_away(arguments.timeout):
        _say("there is no other process to serve what this one did")
        return 1
    return 0


def _address(store: str) -> tuple[str, int]:
    """The host and the port of --store."""
    try:
        host, port = address(store)
    except ValueError:
        host, port = "", 0
    if port == 0:
        raise InvalidArgument(f"--store is {store!r}; it must be HOST:PORT, such as node0:29400 or [fd00::1]:29400")
    return host, port


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _store(host: str, port: int, arguments: argparse.Namespace, makes: bool) -> Any:
    """Makes the store or connects to it, within --timeout."""
    from torch._C._distributed_c10d import TCPStore

    until = time.monotonic() + arguments.timeout
    timeout = timedelta(seconds=arguments.timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def made() -> TCPStore:
        options: dict[str, Any] = {"is_master": makes, "wait_for_workers": False}
        if makes and _is_loopback(host):
            options["master_listen_fd"] = socket.create_server((host, port), family=family).detach()
        return TCPStore(host, port, timeout=timeout, **options)

    try:
        if not makes:
            _wait_for_store(host, port, until, arguments)
        else:
            socket.getaddrinfo(host, port)  # torch would try for the whole timeout
    except OSError as error:
        what = "cannot be made" if makes else f"was not found in {arguments.timeout:g} s; does server 0 run there?"
        raise SystemFailure(f"the store of --store {arguments.store} {what} ({explained(error)})") from None
    # Torch's code cannot be interrupted, and has no timeout for what does not answer.
    try:
        return bounded(made, max(_LOOK, until - time.monotonic()))
    except TimeoutError:
        why = f"no answer in {arguments.timeout:g} s" + "; that address must lead to this host" * makes
    except OSError as error:
        why = explained(error)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
    what = "cannot be made" if makes else "does not speak as a torch.distributed.TCPStore does"
    raise SystemFailure(f"the store of --store {arguments.store} {what} ({why})")


def _wait_for_store(host: str, port: int, until: float, arguments: argparse.Namespace) -> None:
    """Returns when something listens. After `until`, raises the `OSError` of the last attempt."""
    tell = time.monotonic() + _QUIET
    while True:
        try:
            socket.create_connection((host, port), timeout=max(_LOOK, until - time.monotonic())).close()
            return
        except OSError as error:
            now = time.monotonic()
            if now > until:
                raise
            if now > tell:
                tell = until
                _say(f"waits for the store of --store {arguments.store}, {until - now:.0f} s more ({error})")
            time.sleep(_LOOK)


@contextlib.contextmanager
def _told(what: str, arguments: argparse.Namespace) -> Iterator[None]:
    """Says what is waited for, if that takes long."""
    words = f"waits {what} of the parameter server {arguments.name!r}, up to {arguments.timeout:g} s in all"
    timer = threading.Timer(_QUIET, _say, [words])
    timer.daemon = True
    start(timer)
    try:
        yield
    finally:
        timer.cancel()


def _serve_with_snapshots(serving: Serving, arguments: argparse.Namespace, terminated: threading.Event) -> int:
    """Serves until workers have come and left, or SIGTERM: then until the last snapshot is complete. Nothing is last as
    long as a backup goes on, so a server that leaves its blocks to one ends at SIGTERM without a snapshot."""
    next_one = time.monotonic() + (arguments.every or 0)
    while not terminated.is_set() and (not serving.wait(_LOOK) or arguments.forever):
        try:
            if arguments.every and serving.serves(0) and time.monotonic() >= next_one and serving.may_ask():
                serving.ask_for_snapshot()
                next_one = time.monotonic() + arguments.every
            written = serving.take_snapshots(arguments.snapshots)
            if serving.serves(0):
                _drop_old(serving, arguments.snapshots, written, arguments.keep)
        except RingReduceError as error:  # the next one may succeed
            _say(error)
        except RuntimeError as error:  # of torch's store
            return _serve_without_store(serving, terminated, arguments.forever, error)
        if arguments.forever:
            terminated.wait(_LOOK)  # serving.wait() returns at once when workers have left
    has_store = serving.number == 0 and not arguments.existing_store  # no snapshot becomes whole after its end
    try:
        elastic = arguments.backups or arguments.servers or arguments.join
        if terminated.is_set() and elastic and not has_store and serving.give_away(arguments.timeout):
            console().print(f"server {serving.number} ends; others serve what it did", highlight=False)
            return 0
        last = serving.ask_for_snapshot(last=True)
        path = serving.snapshot_path(arguments.snapshots, last)
    except RuntimeError as error:
        return _serve_without_store(serving, terminated, False, error)
    _write_last(serving, arguments, last, path)
    console().print(f"server {serving.number} ends; snapshot {path}", highlight=False)
    if serving.serves(0):
        _drop_old(serving, arguments.snapshots, last, arguments.keep)
    return 0


def _serve_without_store(serving: Serving, terminated: threading.Event, forever: bool, error: RuntimeError) -> int:
    """Another server had the store, and has ended: so no snapshot can be whole any more."""
    _say(f"the store has ended, so there will be no more snapshots: {str(error).splitlines()[0]}")
    while not terminated.wait(_LOOK):
        if serving.wait(0) and not forever:
            break
    return 1


def _write_last(serving: Serving, arguments: argparse.Namespace, last: int, path: Path) -> None:
    """Returns when all servers have written their parts. However long this one's takes, it is waited for."""
    begun = written = time.monotonic()
    failure: RingReduceError | None = None
    while not path.exists():
        serving.wait(0)  # raises if the server here has failed, which can write no more
        try:
            done, failure = serving.take_snapshots(arguments.snapshots, last=last) >= last, None
        except RingReduceError as error:  # there may be room later
            if str(error) != str(failure):
                _say(f"the last snapshot, tried again for {arguments.timeout:.0f} s: {error}")
            done, failure = False, error
        now = time.monotonic()
        if failure is not None and now - begun > arguments.timeout:
            shutil.rmtree(serving.unfinished(arguments.snapshots, last), ignore_errors=True)  # it lacks a part for good
            raise failure
        if not done:
            written = now
        elif now - written > max(arguments.timeout, 10 * (written - begun)):
            raise CollectiveTimeout(f"other servers have not written their parts of {path} in time")
        time.sleep(_LOOK)


def _drop_old(serving: Serving, folder: str, written: int, keep: int) -> None:
    """Those before the latest complete ones of this run."""
    paths = [serving.snapshot_path(folder, number) for number in range(max(1, written - 8 - keep), written + 1)]
    for path in [path for path in paths if path.exists()][:-keep]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            _say(f"an old snapshot stays: {error}")


def _say(what: object) -> None:
    print(f"ringreduce serve: {what}", file=sys.stderr, flush=True)


def _status(host: str, port: int, arguments: argparse.Namespace) -> int:
    import ringreduce.parameter_server as ps

    store = _store(host, port, arguments, False)
    with _told("for the servers", arguments):
        kv = ps.join(store, role="reader", name=arguments.name, timeout=arguments.timeout)
    with kv:
        before = kv.stats()["servers"]
        time.sleep(1.0)
        for name, now in kv.stats()["servers"].items():
            console().print("\n".join(_described(name, before.get(name), now)), highlight=False)
    return 0


def _described(name: str, before: dict[str, Any] | None, now: dict[str, Any] | None) -> list[str]:
    if before is None or now is None:
        return [f"{name}: has ended"]
    passed = max(1e-3, now["seconds"] - before["seconds"])
    rates = {key: (now[key] - before[key]) / passed for key in ("bytes", "updates", "requests")}
    pushed = bytes_text(int(rates["bytes"]))
    memory = f"{bytes_text(now['memory'])} of {bytes_text(now['capacity'])}"
    lines = [
        f"{name}: {memory}, {now['blocks']} blocks, {now['rows']} rows" + (", writes a snapshot" * now["saving"]),
        f"  {pushed}/s pushed, {rates['updates']:.0f} updates/s, {rates['requests']:.0f} requests/s",
        f"  {now['waiting']} requests wait" + (f" for {', '.join(now['waits_for'])}" if now["waits_for"] else ""),
    ]
    if now["backup"]:
        lines.append(f"  {now['backup']} lags by {bytes_text(now['lag'])} of requests")
    return lines + [f"  {worker}: clock {clock}" for worker, clock in now["clocks"].items()]


def _place(rank: int | None, size: int | None) -> tuple[int, int]:
    """This server's number, and how many there are."""
    names = ("--rank", "--size")
    if rank is None and size is None:
        for variables in LAUNCHERS:
            if all(os.environ.get(variable) for variable in variables):
                names = variables
                rank, size = (_whole(variable) for variable in variables)
                break
        else:
            check_alone("serve", "give each --rank and --size")
    if rank is None and size is not None and size > 1:
        raise InvalidArgument(
            f"--size is {size} and there is no --rank; give each server its own, from 0 to {size - 1}"
        )
    if size is not None and size < 1:
        raise InvalidArgument(f"{names[1]} is {size}; it must be 1 or more")
    if size is None and rank:
        raise InvalidArgument(f"--rank is {rank} and there is no --size; give the number of servers, too")
    rank, size = rank or 0, 1 if size is None else size
    if not 0 <= rank < size:
        raise InvalidArgument(
            f"{names[0]} is {rank} and {names[1]} {size}; servers are numbered from 0 to one less than their number"
        )
    return rank, size


def _whole(variable: str) -> int:
    try:
        return int(os.environ[variable])
    except ValueError:
        raise InvalidArgument(f"{variable} is {os.environ[variable]!r}; it must be a whole number") from None


def _function(path: str) -> Any:
    module, colon, name = path.partition(":")
    try:
        found = getattr(import_module(module), name, None) if module and colon else None
    except Exception as error:  # whatever that module raises
        raise InvalidArgument(f"--functions has {path!r}, and importing {module} fails: {error!r}") from None
    if not callable(found):
        raise InvalidArgument(f"--functions has {path!r}; it must be MODULE:NAME of a function")
    return found
