"""Proof on a GPU, in parts: `make gpu` builds ringreduce, then runs this.

    python bench/gpu_proof.py                                     all parts, in order
    python bench/gpu_proof.py --part probe kernels --results DIR  these
    python bench/gpu_proof.py --stand-in                          on stand-ins for GPUs, which proves nothing of one

A part is a program of its own, with a time limit. DIR/<part>.json has what it found (gpu_report.py), written anew after
every row, and DIR/<part>.log what it printed; so whatever ends a part, and this program, only what was not reached is
lost. A later part may read what an earlier one found. Exit code: 0; 1 if a result was wrong, a test failed or a part
did not end; 2 if this machine cannot do it, and what it lacks. A figure below its bar is reported and is no failure.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu_device
import gpu_report

ROOT = gpu_device.ROOT


@dataclass(frozen=True)
class Part:
    """A program of this folder. `briefly` is for stand-ins, whose figures say nothing: as little as goes through all of
    the code."""

    script: str
    what: str
    arguments: tuple[str, ...] = ()
    briefly: tuple[str, ...] = ()
    limit: float = 500
    """Seconds."""


PARTS = {
    "probe": Part("gpu_probe.py", "what the driver and the GPU do, and what a call costs the host", limit=300),
    "kernels": Part("gpu_kernels.py", "every kernel against the CPU's bits", briefly=("--few",), limit=400),
    "accumulate": Part(
        "gpu_accumulate.py",
        "sums over blocks and sizes, next to copies",
        briefly=("--sizes", "64K", "--blocks", "0", "--repetitions", "2", "--batch-bytes", "128K"),
    ),
    "run-mode": Part(
        "gpu_run_mode.py",
        "one kernel a call, ranks on one GPU: threads, then processes",
        briefly=("--ranks", "2", "--calls", "200", "--sizes", "8", "64K", "--seconds", "5"),
    ),
    "tests-1": Part("gpu_tests.py", "tests/gpu, the first half", arguments=("--half", "1")),
    "tests-2": Part("gpu_tests.py", "tests/gpu, the second half", arguments=("--half", "2")),
    "steps": Part(
        "gpu_collectives.py",
        "collectives step by step, processes on one GPU; a GPU each where there are several",
        arguments=("--limit", "420"),
        briefly=(
            *("--ranks", "2", "3", "--sizes", "4K", "--collectives", "all_reduce", "broadcast"),
            *("--rounds", "1", "--min-time", "0.01", "--copy-bytes", "64K"),
        ),
    ),
    "faults": Part(
        "gpu_faults.py",
        "a rank is killed while the others are busy with the driver",
        briefly=("--modes", "steps"),
        limit=400,
    ),
    "sanitizer": Part("gpu_sanitizer.py", "compute-sanitizer over the kernels"),
}
"""In the order in which they say most about what may be wrong."""


def run(name: str, folder: Path, stand_in: bool, others: Sequence[str]) -> int:
    """The part's exit code, with its report and log in `folder`."""
    part, path = PARTS[name], folder / f"{name}.json"
    path.unlink(missing_ok=True)
    brief = ["--stand-in", *part.briefly] if stand_in else []
    command = [sys.executable, str(Path("bench", part.script)), *part.arguments, "--json", str(path), *brief, *others]
    print(f"\n== {name}: {part.what}, at most {part.limit:.0f} s ==", flush=True)
    began, stopped = time.monotonic(), threading.Event()
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
    alarm = threading.Timer(part.limit, lambda: (stopped.set(), kill(process)))
    alarm.start()
    try:
        assert process.stdout is not None
        with (folder / f"{name}.log").open("w") as log:
            for line in process.stdout:
                print(line, end="", flush=True)
                print(line, end="", file=log, flush=True)
        code = process.wait()
    finally:
        alarm.cancel()
        kill(process)
    why = f"not done after {part.limit:.0f} s" if stopped.is_set() else f"exit code {code}" if code else ""
    settle(path, why, time.monotonic() - began)
    return code and 1


def kill(process: "subprocess.Popen[str]") -> None:
    """And all processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def settle(path: Path, why: str, seconds: float) -> None:
    """Says in the report how long the part took, and how it ended if it could not say so itself."""
    found = json.loads(path.read_text()) if path.exists() else {"state": "running", "rows": [], "bars": [], "notes": []}
    report = gpu_report.Report(path, {**found, "seconds": round(seconds, 1)})
    if found["state"] == "running":
        report.end(why or "it ended without a result")


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
    option("--look", action="store_true", help="only say what is missing here, if anything is")
    option("others", nargs="*", metavar="ARGUMENT", help="after --: for the part's program")
    args = parser.parse_args()
    if reasons := gpu_device.missing(args.stand_in):
        print("make gpu cannot run here:", *(f"  {reason}" for reason in reasons), sep="\n", file=sys.stderr)
        print("Without a GPU: make gpu STAND_IN=1, which proves the script and not the GPU.", file=sys.stderr)
        return 2
    if args.look:
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):  # as for SIGINT, what runs ends with this process
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    folder = (args.results or ROOT / ("build/gpu_stand_in" if args.stand_in else "build/gpu")).resolve()
    if args.stand_in and folder.is_relative_to(ROOT / "bench/results"):
        parser.error("--results: figures of the stand-in are not for bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    codes = [run(name, folder, args.stand_in, args.others) for name in args.part]
    print(summary(folder))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
