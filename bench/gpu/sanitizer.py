"""The kernels under compute-sanitizer: memcheck, racecheck and synccheck over `bench.gpu.kernels --few`.

    python -m bench.gpu.sanitizer --json sanitizer.json

A row for each tool: passed, failed, or not checked where the sanitizer does not work here or takes too long.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from bench.gpu import device, reports

# What torch asks of CUDA and handles itself is no error of a kernel.
TOOLS = {"memcheck": ["--report-api-errors", "no"], "racecheck": [], "synccheck": []}
FOUND = 86  # the sanitizer's exit code if it found any error
SECONDS = 160.0  # for a tool
KILL_SECONDS = 5.0  # for which a killed tool is waited for

REFUSALS = ("Device not supported", "Unable to", "not supported", "Internal Sanitizer Error", "Insufficient")
FAULTS = re.compile(r"Invalid __|hazard|Barrier error|, [1-9]\d* wrong")


def check(sanitizer: str, tool: str) -> dict[str, Any]:
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--target-processes", "all"]
    command += ["--error-exitcode", str(FOUND), sys.executable, "-m", "bench.gpu.kernels", "--few"]
    code, output = ended(command, SECONDS)
    if code is None:
        return {"tool": tool, "state": "not checked", "why": f"not done after {SECONDS:.0f} s"}
    state, why = judged(output, code)
    last = output.splitlines()[-40:] if state != "passed" else re.findall(r"=+ (.*SUMMARY: .*)", output)
    return {"tool": tool, "state": state, "why": why, "output": last, "wrong": int(state == "failed")}


def ended(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """The exit code, None if the command was not done in time, and what it printed. What it started ends with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a pipe would be read until all its holders end
        process = subprocess.Popen(
            command,
            cwd=device.ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A group of its own can be killed here, and is still in the session that proof.py kills.
            preexec_fn=os.setpgrp,  # noqa: PLW1509 - a system call and no more; process_group= came with Python 3.11
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
        output.seek(0)
        return code, output.read()


def judged(output: str, code: int) -> tuple[str, str]:
    """Whether the sanitizer found faults, or does not work on this machine; and why."""
    if code == 0:
        return "passed", ""
    for line in output.splitlines():
        if any(refusal in line for refusal in REFUSALS) and not FAULTS.search(output):
            return "not checked", f"compute-sanitizer does not work here: {line.strip('= ')}"
    return "failed", f"exit code {code}"


def main() -> int:
    args = reports.parser(__doc__).parse_args()
    report = reports.begin(args, "the kernels under compute-sanitizer")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")
    if args.stand_in or sanitizer is None:
        report.note("the stand-in is no GPU" if args.stand_in else "no compute-sanitizer on PATH or in CUDA_HOME/bin")
        return report.end()
    for tool in TOOLS:
        row = check(sanitizer, tool)
        report.row(f"{tool:<10} {row['state']:<12} {row['why']}", **row)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
