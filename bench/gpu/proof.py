"""Proof on a GPU, in parts: `make gpu` builds ringreduce, then runs this.

    python -m bench.gpu.proof                                     all parts, in order
    python -m bench.gpu.proof --part probe kernels --results DIR  these
    python -m bench.gpu.proof --stand-in                          on stand-ins for GPUs, which proves nothing of one

A part is a program of its own, with a time limit. DIR/<part>.json has what it found (reports.py), written anew after
every row, and DIR/<part>.log what it printed; so whatever ends a part, and this program, only what was not reached is
lost. A later part may read what an earlier one found. Exit code: 0; 1 if a result was wrong, a test failed or a part
ended without a result; else 2 if this machine cannot do it, and what it lacks, or if the arguments are wrong. A figure
below its bar is reported and is no failure.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.gpu import device, reports

ROOT = device.ROOT
KILL_SECONDS = 5.0  # for which a killed part, and the last of its output, are waited for


@dataclass(frozen=True)
class Part:
    """A program of this folder. `briefly` is for stand-ins, whose figures say nothing: as little as goes through all of
    the code."""

    module: str
    what: str
    arguments: tuple[str, ...] = ()
    briefly: tuple[str, ...] = ()
    limit: float = 500
    """Seconds."""


PARTS = {
    "probe": Part("bench.gpu.probe", "what the driver and the GPU do, and what a call costs the host", limit=300),
    "kernels": Part("bench.gpu.kernels", "every kernel against the CPU's bits", briefly=("--few",), limit=400),
    "accumulate": Part(
        "bench.gpu.accumulate",
        "sums over blocks and sizes, next to copies",
        briefly=("--sizes", "64K", "--blocks", "0", "--repetitions", "2", "--batch-bytes", "128K"),
    ),
    "run-mode": Part(
        "bench.gpu.run_mode",
        "one kernel a call, ranks on one GPU: threads, then processes",
        briefly=("--ranks", "2", "--calls", "200", "--sizes", "8", "64K", "--seconds", "5"),
    ),
    "tests-1": Part("bench.gpu.tests", "tests/gpu, the first half", arguments=("--half", "1")),
    "tests-2": Part("bench.gpu.tests", "tests/gpu, the second half", arguments=("--half", "2")),
    "steps": Part(
        "bench.gpu.collectives",
        "collectives step by step, processes on one GPU; a GPU each where there are several",
        arguments=("--limit", "420"),
        briefly=(
            *("--ranks", "2", "3", "--sizes", "4K", "--collectives", "all_reduce", "broadcast"),
            *("--rounds", "1", "--min-time", "0.01", "--copy-bytes", "64K"),
        ),
    ),
    "faults": Part(
        "bench.gpu.faults",
        "a rank is killed while the others are busy with the driver",
        briefly=("--modes", "steps"),
        limit=400,
    ),
    "sanitizer": Part("bench.gpu.sanitizer", "compute-sanitizer over the kernels"),
}
"""In the order in which they say most about what may be wrong."""


def run(name: str, folder: Path, stand_in: bool, others: Sequence[str]) -> int:
    """The part's exit code, with its report and log in `folder`."""
    part, path = PARTS[name], folder / f"{name}.json"
    path.unlink(missing_ok=True)
    brief = ["--stand-in", *part.briefly] if stand_in else []
    command = [sys.executable, "-m", part.module, *part.arguments, "--json", str(path), *brief, *others]
    print(f"\n== {name}: {part.what}, at most {part.limit:.0f} s ==", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        start_new_session=True,  # so that what it starts ends with it
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    reader = threading.Thread(target=copy, args=(process.stdout, folder / f"{name}.log"), daemon=True)
    reader.start()
    code = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(part.limit)
    finally:
        kill(process)
    reader.join(KILL_SECONDS)  # a process that has left the session, or cannot be killed, may hold the pipe for ever
    why = f"not done after {part.limit:.0f} s" if code is None else f"exit code {code}" if code else ""
    state = settle(path, why, time.monotonic() - began)
    return 2 if code == 2 else int(state == "failed")


def copy(lines: IO[str], path: Path) -> None:
    """To the terminal and to a log. If one cannot be written to, the part's next line fails instead of waiting."""
    with lines, path.open("w") as log:
        for line in lines:
            print(line, end="", flush=True)
            print(line, end="", file=log, flush=True)


def kill(process: "subprocess.Popen[str]") -> None:
    """And all processes of its session, also those that have a group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == process.pid:
                os.kill(int(entry.name), signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)


def settle(path: Path, why: str, seconds: float) -> str:
    """Says in the report how long the part took, and how it ended if it could not say so itself. Returns its state."""
    found = json.loads(path.read_text()) if path.exists() else {"state": "running", "rows": [], "bars": [], "notes": []}
    report = reports.Report(path, {**found, "seconds": round(seconds, 1)})
    if found["state"] == "running" or (why and found["state"] == "passed"):
        report.end(why or "it ended without a result")
    return str(report.found["state"])


def summary(folder: Path) -> str:
    """A line a part, and one for each bar."""
    lines = [f"\n== summary: {folder} =="]
    for name in PARTS:
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        lines.append(f"{name:<12} {found['state']:<12} {found.get('seconds', 0):>6.1f} s  {found['why']}")
        for bar in found["bars"]:
            asked = f"at least {bar['at_least']}" if "at_least" in bar else f"at most {bar['at_most']}"
            lines.append(f"  {'met    ' if bar['holds'] else 'NOT met'} {bar['what']}: {bar['figure']:.4g}, {asked}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--part", nargs="+", choices=PARTS, default=[*PARTS], metavar="NAME", help=f"of {', '.join(PARTS)}")
    option("--results", type=Path, metavar="DIR", help="(default build/gpu, for stand-ins build/gpu_stand_in)")
    option("--stand-in", action="store_true", help="on stand-ins for GPUs")
    option("--look", action="store_true", help="only look whether it can run here with these arguments")
    option("others", nargs="*", metavar="ARGUMENT", help="after --: for the part's program")
    args = parser.parse_args()
    if reasons := device.missing(args.stand_in):
        print("make gpu cannot run here:", *(f"  {reason}" for reason in reasons), sep="\n", file=sys.stderr)
        print("Without a GPU: make gpu STAND_IN=1, which proves the script and not the GPU.", file=sys.stderr)
        return 2
    folder = (args.results or ROOT / ("build/gpu_stand_in" if args.stand_in else "build/gpu")).resolve()
    if args.stand_in and folder.is_relative_to(ROOT / "bench/results"):
        parser.error("--results: figures of the stand-in are not for bench/results")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        print(f"error: --results {folder}: {error.strerror}; name a folder that can be written to", file=sys.stderr)
        return 2
    if args.look:
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):  # as for SIGINT, what runs ends with this process
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    codes = [run(name, folder, args.stand_in, args.others) for name in args.part]
    print(summary(folder))
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
