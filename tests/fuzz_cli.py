"""The command line under random arguments, files, variables, streams and signals.

    python tests/fuzz_cli.py --runs 10000              # seeds 0 to 9999, as many at once as there are cores
    python tests/fuzz_cli.py --only 4711               # one of them again, with all that it prints
    python tests/fuzz_cli.py --kept                    # the cases that failed once

Arguments come from the commands' own parsers. Each run must end in time, with an exit code that ringreduce/cli says,
without a traceback, and within `MOST_MEMORY`. Most runs are children of a process that has imported everything, since
a start takes a second; `PROCESSES` of them are processes of their own, which are interrupted while they import.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

PROCESSES = 0.03
"""The share of runs in processes of their own."""
MOST_MEMORY = 1 << 30
"""Bytes that a command may have; torch takes 300 MB of them."""
SECONDS = 60.0
"""For a run, whose timeout and budget are 2 s at most; the machine may be used by others too."""

COMMANDS = {"topo": 18, "plan": 18, "simulate": 10, "calibrate": 14, "doctor": 8, "info": 7, "keep": 5, "serve": 4,
            "top": 3, "trace": 6, "completion": 1, "tune": 1, "": 5}  # fmt: skip
"""How often each is drawn, of 100."""

GARBAGE = ("", "-", "--", "-1", "0", "1", "7", "abc", "nan", "inf", "1e309", "1e20", "1,2", "3-1", "0-99999",
           "٣", "9" * 400, "\udcff", "\x1b[31m", "a\nb", "%s", "{}", "[/b]", "../..", "/", "off",
           "--help", "é")  # fmt: skip
PRESETS = ("dgx1-v100", "dgx1-p100", "dgx2", "dgx-a100", "pcie-4", "gb200-nvl72")

LOG = "#  Rank  0 Group  0 Pid 1 on host device  0\n#  Rank  1 Group  0 Pid 2 on host device  1\n# all_reduce_perf\n"
LOG += "#       size         count      type   redop    root     time\n"
LOG += "".join(
    f"  {1 << power}  {1 << power >> 2}  float  sum  -1  {10 + 2**power / 1e5:.2f}\n" for power in range(3, 28)
)

RECORD = pickle.dumps(
    {
        "ringreduce": {
            "host": "a",
            "pid": 7,
            "boot": "",
            "groups": [{"name": "0", "ranks": [0, 1, 2], "id": "1", "job": "1", "made_ns": 1}],
        },
        "entries": [
            {
                "pg_id": 0,
                "process_group": ("0", "default_pg"),
                "profiling_name": "ringreduce:all_reduce",
                "is_p2p": False,
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "state": "completed",
                "time_created_ns": number * 10**9,
                "time_discovered_started_ns": number * 10**9 + 1000,
                "time_discovered_completed_ns": number * 10**9 + 2000,
                "input_sizes": [[1000]],
                "output_sizes": [[1000]],
                "input_dtypes": ["Float"],
                "output_dtypes": ["Float"],
            }
            for number in range(1, 4)
        ],
    }
)
"""A flight record."""

FABRIC = json.dumps({"nvlink": {"efficiency": 0.8, "base": 1e-5, "fill": 1e-6, "half": 1e6}})


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


def fixture(random: random.Random) -> bytes:
    """A description of a machine, or one with a few bytes changed."""
    found = sorted(
        path for path in (ROOT / "tests/fixtures").rglob("*") if path.is_file() and path.stat().st_size < 1 << 18
    )
    content = bytearray(random.choice(found).read_bytes() if random.random() < 0.8 else LOG.encode())
    return changed(content, random)


def changed(content: bytearray, random: random.Random) -> bytes:
    for _ in range(random.choice((0, 0, 1, 3, 30))):
        at = random.randrange(len(content) + 1)
        match random.randrange(3):
            case 0:
                content[at : at + 1] = bytes([random.randrange(256)])
            case 1:
                del content[at : at + random.randrange(200)]
            case 2:
                content[at:at] = content[at : at + random.randrange(200)]
    return bytes(content)


FILES: dict[str, Callable[[Path, random.Random], object]] = {
    "empty": lambda path, _: path.touch(),
    "noise": lambda path, random: path.write_bytes(random.randbytes(1 << 16)),
    "zeros": lambda path, _: path.write_bytes(bytes(1 << 12)),
    "huge": lambda path, _: sparse(path),
    "lines": lambda path, _: path.write_bytes(b"\n" * (15 << 20)),
    "deep.json": lambda path, _: path.write_text("[" * 100_000),
    "deeper.json": lambda path, _: path.write_text('{"machine":' * 50_000 + "1" + "}" * 50_000),
    "digits.json": lambda path, _: path.write_text('{"nodes": ' + "9" * 10_000 + "}"),
    "utf16": lambda path, _: path.write_text(LOG, encoding="utf-16"),
    "utf32": lambda path, _: path.write_text(LOG, encoding="utf-32"),
    "torn": lambda path, _: path.write_bytes(LOG.encode("utf-16")[:-1]),
    "log": lambda path, _: path.write_text(LOG),
    "long.log": lambda path, _: path.write_text(LOG + "".join(f" {n} 1 float sum -1 1.0\n" for n in range(9, 99_999))),
    "fabric.json": lambda path, _: path.write_text(FABRIC),
    "cluster.json": lambda path, _: path.write_text('{"machine": "dgx-a100", "hosts": 2, "network_gbps": 25}'),
    "folder": lambda path, _: path.mkdir(),
    "fifo": lambda path, _: os.mkfifo(path),
    "gone": lambda path, _: path.symlink_to("nowhere"),
    "loop": lambda path, _: path.symlink_to(path.name),
    "machine": lambda path, random: path.write_bytes(fixture(random)),
    "rank0": lambda path, _: path.write_bytes(RECORD),
    "rank3": lambda path, _: path.write_bytes(RECORD),
    "rank1": lambda path, random: path.write_bytes(changed(bytearray(RECORD), random)),
    "record_of_2": lambda path, random: path.write_bytes(RECORD[: random.randrange(len(RECORD))]),
}
DEVICES = ("/dev/zero", "/dev/full", "/dev/null", "/dev/stdin", "/proc/self/mem", "/proc/self/environ")
OUTPUTS = ("out.json", "out.html", "out.png", "out.svg", "none/out.json", "none/out.png", "/dev/full", "/dev/null",
           "/dev/stdout", "folder", ".", "x" * 300, "x" * 300 + ".png", "full.png")  # fmt: skip


@dataclass
class Case:
    """One run. `streams` are those of `Streams`; `signals` are (seconds after the start, number)."""

    words: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # by name, the kind
    streams: tuple[str, str, str] = ("null", "read", "read")
    signals: list[tuple[float, int]] = field(default_factory=list)
    process: bool = False
    seed: int = 0
    limit: float = SECONDS


KEPT = (
    Case(["doctor"], {"CXX": " "}),
    Case(["doctor"], {"CXX": "'"}),
    Case(
        ["tune", "--ranks", "2", "--collectives", "broadcast", "--budget", "1"],
        {"RINGREDUCE_TOPO_FILE": "nan"},
        process=True,
    ),
    Case(["simulate", "--pcie-gbps", "2", "--link-gbps", "1"], streams=("null", "full", "read")),
    Case(["top", "--once", "--interval", "1e20"]),
)
"""What failed once."""


# Drawing a case.


def parsers() -> dict[str, argparse.ArgumentParser]:
    from ringreduce import cli

    commands = cli.Parser(prog="ringreduce").add_subparsers()
    for name in cli.COMMANDS:
        cli.add_command(commands, name)
    return dict(commands.choices)


class Draw:
    """Draws the parts of a case."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.files: dict[str, str] = {}

    def file(self) -> str:
        if self.random.random() < 0.2:
            return self.random.choice(DEVICES)
        kind = self.random.choice(list(FILES))
        self.files[kind] = kind
        return kind

    def value(self, action: argparse.Action) -> str:
        """Mostly one that the option takes."""
        choose = self.random.choice
        if self.random.random() < 0.15:
            return choose(GARBAGE)
        name = action.dest
        if action.choices:
            return str(choose(list(action.choices)))
        if name in ("file", "log", "calibration"):
            return choose(PRESETS) if name == "file" and self.random.random() < 0.5 else self.file()
        if name == "records":
            kind = choose(("rank0", "rank0", "rank3", "rank3", "rank1", "record_of_2"))
            if self.random.random() < 0.2:
                return self.file()
            self.files[kind] = kind
            return kind
        if name in ("save", "plot", "plot_links", "html", "write"):
            found = choose(OUTPUTS)
            if found == "full.png":
                self.files[found] = "full link"
            if found == "folder":
                self.files[found] = "folder"
            return found
        known: dict[str, tuple[str, ...]] = {
            "gpus": ("0-3", "0,1", "0", "1,0,2", "0-7"),
            "size": ("160MB", "1", "64K", "1TB", "7"),
            "collective": ("allreduce", "broadcast", "all_to_all", "gather", "ncclReduceScatter"),
            "collectives": ("all_reduce", "broadcast"),
            "algorithm": ("auto", "rings", "trees", "ring", "nvls", "ring,tree"),
            "gpu": ("v100", "h100", "b200", "mi300x"),
            "ranks": ("2", "4", "8", "64"),
            "budget": ("0.5", "1"),
            "parameter_server": ("8,2", "64,8"),
            "store": ("127.0.0.1:0", "127.0.0.1:1", "[::1]:29871", "127.0.0.1:29872", "nosuch.invalid:1", "::1"),
            "functions": ("nosuch:f", "os:getcwd", "os", "json:nosuch"),
            "memory": ("1M", "12Q", "1G"),
            "timeout": ("0.2", "1", "2"),
            "snapshots": (".", "none", "folder"),
            "every": ("0.1", "1"),
            "interval": ("0.01", "0.3"),
        }
        return choose(known.get(name, ("1", "2", "0.5", "10")))

    def words(self, parser: argparse.ArgumentParser) -> list[str]:
        words: list[str] = []
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction):
                share = 0.01
            elif action.option_strings:
                share = 0.9 if action.required else 0.2
            else:
                share = 0.9
            while self.random.random() < share:
                takes = {None: 1, "?": 1, "+": self.random.choice((0, 1, 2, 3)), 0: 0}.get(action.nargs, 1)
                words += [self.random.choice(action.option_strings)] if action.option_strings else []
                words += [self.value(action) for _ in range(takes)]
                share *= 0.1
        if self.random.random() < 0.05:
            words.insert(self.random.randrange(len(words) + 1), self.random.choice((*GARBAGE, "--nosuch", "extra")))
        return words

    def environ(self) -> dict[str, str]:
        from ringreduce.config import DEFAULTS, PREFIX

        choose = self.random.choice
        values: dict[str, Callable[[], str]] = {
            "COLUMNS": lambda: choose(("80", "1", "0", "-5", "abc", "100000")),
            "TERM": lambda: choose(("dumb", "xterm", "")),
            "FORCE_COLOR": lambda: "1",
            "LC_ALL": lambda: choose(("C", "C.UTF-8", "nosuch")),
            "PYTHONIOENCODING": lambda: "ascii",
            "PYTHONUNBUFFERED": lambda: "1",
            "HOME": lambda: choose(("", "/nosuch", "/dev/null")),
            "XDG_CACHE_HOME": lambda: choose(("", "relative", "/dev/full", "none")),
            "CXX": lambda: choose(("'", "", "nosuch -x", " ")),
            "MPLCONFIGDIR": lambda: "/dev/null",
            "MPLBACKEND": lambda: choose(("agg", "nosuch")),
            "PATH": lambda: "",
            "RANK": lambda: choose(("abc", "0", "1", "-1", "")),
            "WORLD_SIZE": lambda: choose(("abc", "1", "2", "0", "")),
            "MASTER_ADDR": lambda: choose(("127.0.0.1", "nosuch.invalid", "::1", "")),
            "MASTER_PORT": lambda: choose(("1", "29873", "abc", "99999", "")),
            "SLURM_PROCID": lambda: choose(("abc", "0")),
            "SLURM_NTASKS": lambda: choose(("abc", "1")),
        }
        found = {name: make() for name, make in values.items() if self.random.random() < 0.04}
        for name in DEFAULTS:
            if self.random.random() < 0.01:
                found[PREFIX + name.upper()] = choose((*GARBAGE, self.file()))
        return {name: value.replace("\0", "") for name, value in found.items()}

    def signals(self, soon: bool) -> list[tuple[float, int]]:
        kinds = (signal.SIGINT, signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP)
        if not soon:
            count = self.random.choice((0, 0, 0, 0, 1, 1, 2))
            return sorted((10 ** self.random.uniform(-3, 0.3), self.random.choice(kinds)) for _ in range(count))
        first = self.random.uniform(0.2, 2.5)
        return [(first, self.random.choice((signal.SIGINT, signal.SIGTERM))), (first + 3, signal.SIGTERM)]


def draw(seed: int, known: dict[str, argparse.ArgumentParser]) -> Case:
    some = Draw(seed)
    name = some.random.choices(list(COMMANDS), list(COMMANDS.values()))[0]
    words = (
        [name, *some.words(known[name])]
        if name
        else [some.random.choice(GARBAGE) for _ in range(some.random.randrange(3))]
    )
    environ = some.environ()
    process = some.random.random() < PROCESSES
    limit = SECONDS
    if name == "keep":
        program = some.random.choice(("true", "false", "nosuch", "sh -c 'kill -9 $$'", "sleep 0.1", ""))
        words = [word for word in words if word not in GARBAGE] + (["sh", "-c", program] if program else [])
    if name == "tune":
        process = True
        words = ["tune", "--ranks", "2", "--collectives", "broadcast", "--budget", "1", *words[1:]]
    if some.random.random() < 0.02:
        words = words[: some.random.randrange(len(words) + 1)]
    waits = name in ("serve", "keep", "top") or "--peers" in words or "fifo" in some.files or "/dev/stdin" in words
    streams = (
        some.random.choice(("null", "null", "null", "closed", "zero", "full", "broken")),
        some.random.choice(("read", "read", "read", "read", "closed", "full", "broken", "some", "unwritable")),
        some.random.choice(("read", "read", "read", "read", "read", "closed", "full", "broken", "unwritable")),
    )
    words = [word.replace("\0", "") for word in words]
    return Case(words, environ, some.files, streams, some.signals(waits), process, seed, limit)


# Running it.

ENDED: Counter[str] = Counter()
"""How often each command ended with each exit code."""


def make_files(case: Case, folder: Path) -> None:
    for name, kind in case.files.items():
        if kind == "full link":
            (folder / name).symlink_to("/dev/full")
        else:
            FILES[kind](folder / name, random.Random(case.seed))


@dataclass
class Streams:
    """The standard streams of a run: what it gets, and what of it is read here."""

    given: list[int | None]
    read: dict[int, int]  # our end by its number

    @classmethod
    def open(cls, kinds: Sequence[str]) -> Streams:
        made = cls([], {})
        for number, kind in enumerate(kinds):
            match kind:
                case "closed":
                    made.given.append(None)
                case "null" | "zero" | "full":
                    made.given.append(os.open(f"/dev/{kind}", os.O_RDWR))
                case "unwritable":
                    made.given.append(os.open("/dev/null", os.O_RDONLY))
                case _:
                    reads, writes = os.pipe()
                    ours, theirs = (writes, reads) if number == 0 else (reads, writes)
                    made.given.append(theirs)
                    if kind == "broken":
                        os.close(ours)
                    else:
                        made.read[number] = ours
        return made

    def close_given(self) -> None:
        for each in self.given:
            if each is not None:
                os.close(each)


def command_in_child(case: Case, folder: str, streams: Streams) -> None:
    """Becomes the command, after fork. Does not return."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.update(case.environ)
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `ringreduce.__main__` has it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        given = [each if each is None else os.dup(each) for each in streams.given]
        for number, each in enumerate(given):
            os.close(number) if each is None else os.dup2(each, number)
        os.closerange(3, 1024)
        for number, name in enumerate(("stdin", "stdout", "stderr")):  # as Python opens them
            mode = "r" if number == 0 else "w"
            errors = "surrogateescape" if number == 0 else "strict" if number == 1 else "backslashreplace"
            encoding = case.environ.get("PYTHONIOENCODING", "utf-8")
            made = {"encoding": encoding, "errors": errors, "closefd": False, "buffering": 1}
            stream = None if given[number] is None else open(number, mode, **made)  # noqa: SIM115 (it stays open)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        sys.argv = ["ringreduce", *case.words]
        from ringreduce import cli

        code = cli.run()
        for stream in (sys.stdout, sys.stderr):  # as Python's end does
            try:
                stream.flush()
            except OSError:
                code = 120
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def start(case: Case, folder: str, streams: Streams) -> int:
    """The pid of the command."""
    if not case.process:
        pid = os.fork()
        if not pid:
            command_in_child(case, folder, streams)
        return pid

    def streams_in_child() -> None:
        given = [each if each is None else os.dup(each) for each in streams.given]
        for number, each in enumerate(given):
            os.close(number) if each is None else os.dup2(each, number)

    environ = os.environ | {"PYTHONPATH": str(ROOT)} | case.environ
    words = [word.encode(errors="surrogateescape") for word in (sys.executable, "-m", "ringreduce", *case.words)]
    options: dict[str, Any] = {"preexec_fn": streams_in_child}  # which is safe, since this process has one thread
    started = subprocess.Popen(words, cwd=folder, env=environ, start_new_session=True, **options)
    started.returncode = 0  # waited for below
    return started.pid


def run(case: Case, loud: bool = False) -> str:
    """What is wrong; "" if nothing."""
    with tempfile.TemporaryDirectory(prefix="fuzz_cli.") as folder:
        make_files(case, Path(folder))
        streams = Streams.open(case.streams)
        began = time.monotonic()
        pid = start(case, folder, streams)
        streams.close_given()
        heard = {number: bytearray() for number in streams.read}
        signals, sent = list(case.signals), set()
        late = False
        pidfd = os.pidfd_open(pid)
        reading = {fd: number for number, fd in streams.read.items()}
        most = {number: 100 if case.streams[number] == "some" else 1 << 24 for number in heard}
        while True:
            now = time.monotonic() - began
            while signals and signals[0][0] <= now:
                _, which = signals.pop(0)
                sent.add(which)
                signal.pidfd_send_signal(pidfd, which)
            if now > case.limit:
                late = True
                os.killpg(pid, signal.SIGKILL)
                break
            wait = min([case.limit - now, *(at - now for at, _ in signals[:1])])
            ready, _, _ = select.select([pidfd, *reading], [], [], max(wait, 0))
            for fd in (fd for fd in ready if fd in reading):
                data = os.read(fd, 65536)
                heard[reading[fd]] += data
                if not data or len(heard[reading[fd]]) >= most[reading[fd]]:
                    os.close(fd)
                    del reading[fd]
            if pidfd in ready and not (set(ready) & set(reading)):
                break
        _, status, usage = os.wait4(pid, 0)
        for fd in (*reading, pidfd):
            os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it left behind, as workers of `tune` that have yet to see its end
    code = os.waitstatus_to_exitcode(status)
    said = b"".join(heard.values()).decode(errors="replace")
    ENDED[f"{(case.words or ['none'])[0]:.10} {code}"] += 1
    if loud:
        print(said, f"exit code {code}, {time.monotonic() - began:.1f} s, {usage.ru_maxrss >> 10} MB", sep="\n")
    if late:
        return f"did not end within {case.limit:g} s"
    return _wrong(case, code, said, usage.ru_maxrss * 1024, sent)


def _wrong(case: Case, code: int, said: str, memory: int, sent: set[int]) -> str:
    allowed = {0, 2, 130, 141, *(-each for each in sent)}
    if case.words[:1] in (["doctor"], ["serve"]):
        allowed.add(1)
    if "Traceback" in said or "Exception ignored" in said or "Fatal Python error" in said:
        # Python's own start, before it comes to the command, is not ours.
        begun = "ringreduce/cli" in said or "__main__.py" in said
        if not (case.process and signal.SIGINT in sent and not begun):
            return said[-1500:]
    elif code == 1 and case.process and signal.SIGINT in sent and case.streams[2] != "read":
        pass  # Python's own start
    elif code not in allowed and case.words[:1] != ["keep"]:
        return f"exit code {code}: {said[-600:]}"
    if memory > MOST_MEMORY or "not enough memory" in said:
        return f"took {memory >> 20} MB"
    return ""


# All of them.


def warm_up() -> None:
    """Imports what the commands import, so that children of this process need not."""
    from ringreduce import _C, cli, parameter_server  # noqa: F401
    from ringreduce.cli import measure  # noqa: F401
    from ringreduce.doctor import machine  # noqa: F401
    from ringreduce.topology import draw, expected, planner, presets  # noqa: F401

    for name in (
        *(f"ringreduce.cli.{each}" for each in cli.COMMANDS),
        "matplotlib.figure",
        "scipy.optimize",
        "rich.table",
    ):
        import_module(name)


def work(seeds: Sequence[int], kept: bool) -> int:
    """Runs them, one after the other, and prints a line of JSON for each that fails."""
    warm_up()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # for children, until they have a handler of their own
    known = parsers()
    cases = [*(KEPT if kept else ()), *(draw(seed, known) for seed in seeds)]
    for number, case in enumerate(cases):
        if wrong := run(case):
            print(json.dumps({"case": asdict(case), "wrong": wrong}), flush=True)
        if number % 100 == 99:
            print(json.dumps({"done": number + 1}), flush=True)
    print(json.dumps({"ended": ENDED}), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="this seed alone, with all that it prints")
    parser.add_argument("--kept", action="store_true", help="the cases that failed once, too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the failures there")
    parser.add_argument("--worker", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    with tempfile.TemporaryDirectory(prefix="fuzz_cli_home.") as home:
        os.environ.setdefault("XDG_CACHE_HOME", home)  # one for all: this machine is probed once
        if given.worker is not None:
            return work(range(*given.worker), given.kept)
        if given.only is not None:
            warm_up()
            case = draw(given.only, parsers())
            print(case)
            print(run(case, loud=True) or "all is well")
            return 0
        seeds = range(given.first, given.first + given.runs)
        began = time.monotonic()

        def worker(at: int) -> list[dict[str, Any]]:
            words = [sys.executable, __file__, "--worker", str(given.first + at), str(seeds.stop), str(given.jobs)]
            words += ["--kept"] * (given.kept and at == 0)
            found = []
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    said = json.loads(line)
                    if "wrong" in said:
                        found.append(said)
                        case = said["case"]
                        print(f"seed {case['seed']}: {case['words']}\n  {said['wrong']}", flush=True)
                    elif "ended" in said:
                        ENDED.update(said["ended"])
                    elif at == 0:
                        print(f"{said['done'] * given.jobs} runs, {time.monotonic() - began:.0f} s", flush=True)
            if process.returncode:
                raise SystemExit(f"a worker ended with {process.returncode}")
            return found

        with ThreadPoolExecutor(given.jobs) as pool:
            failures = [each for some in pool.map(worker, range(given.jobs)) for each in some]
    if given.json:
        given.json.write_text(json.dumps(failures, indent=1))
    kept = len(KEPT) * given.kept
    print(", ".join(f"{what}: {times}" for what, times in ENDED.most_common(60)))
    print(f"{given.runs + kept} runs in {time.monotonic() - began:.0f} s, {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
