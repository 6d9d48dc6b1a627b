"""Proof on a GPU: `make gpu` builds ringreduce, then runs this.

    python bench/gpu_proof.py               tests/gpu, every kernel against the CPU's, the benchmarks, compute-sanitizer
    python bench/gpu_proof.py --stand-in    the same on stand-ins for GPUs: tests this program; its figures say nothing

All is written to one JSON, whatever fails: bench/results/gpu_<device>.json, or build/gpu/stand_in.json. It has the
device, versions, commit and date; for each part how it ended (passed, failed, or not checked and why), its command and
seconds; the tests' outcomes; the figures, as the benchmarks wrote them. Exit code: 0; 1 if a part failed or the tests
were not run; 2 if this machine cannot do it, and what it lacks. Parts that would not fit the time limit are left out,
and said to be.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import gpu_device
import harness

ROOT = gpu_device.ROOT
RESERVE = 10.0  # seconds of the limit that are kept for writing the report

# Of compute-sanitizer. What torch asks of CUDA and handles itself is no error of a kernel.
TOOLS = {"memcheck": ["--report-api-errors", "no"], "racecheck": [], "synccheck": []}
SANITIZER_ERRORS = 86  # its exit code if it found any

# For the stand-in, whose figures say nothing: as little as goes through all of the code.
BRIEFLY = {
    "gpu_accumulate.py": ["--sizes", "64K", "--repetitions", "2", "--batch-bytes", "128K", "--stand-in"],
    "gpu_collectives.py": [
        *("--ranks", "2", "3", "--sizes", "4K", "64K", "--rounds", "1", "--min-time", "0.01"),
        *("--copy-bytes", "64K", "--stand-in"),
    ],
    "gpu_kernels.py": ["--few", "--stand-in"],
}


@dataclass
class Part:
    """How one part ended. `why` is for what failed or was not checked."""

    name: str
    state: Literal["passed", "failed", "not checked"]
    why: str = ""
    command: str = ""
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Proof:
    """The command line, and where the parts put what they find."""

    tests: tuple[str, ...]
    stand_in: bool
    deadline: float
    """By time.monotonic()."""
    folder: Path

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def run(self, name: str, command: list[str], most: float, log: bool = False) -> tuple[Part, str]:
        """A part that passes if the command ends with 0 within `most` seconds; and its output, if it is logged."""
        part = Part(name, "passed", command=shlex.join(command).replace(sys.executable, "python"))
        limit = min(most, self.left())
        if limit < 5:
            part.state, part.why = "not checked", "no time left"
            return part, ""
        print(f"\n== {name} ==\n{part.command}", flush=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        begin = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            start_new_session=True,  # so that what it starts ends with it
            stdout=subprocess.PIPE if log else None,
            stderr=subprocess.STDOUT if log else None,
            text=True,
            errors="replace",
        )
        try:
            output = process.communicate(timeout=limit)[0] or ""
        except subprocess.TimeoutExpired:
            part.state, part.why = "failed", f"not done after {limit:.0f} s"
            output = ""
        except BaseException:
            self._end(process)
            raise
        self._end(process)
        part.seconds = round(time.monotonic() - begin, 1)
        if process.returncode and not part.why:
            part.state, part.why = "failed", f"exit code {process.returncode}"
        return part, output

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Ends the processes that the part has left, which are of its own session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def python(self, script: str, *arguments: str) -> list[str]:
        brief = BRIEFLY[script] if self.stand_in else []
        return [sys.executable, str(Path("bench", script)), *arguments, *brief]


def run_tests(proof: Proof) -> Part:
    absent = [name for name in ("pytest", "pytest_timeout", "hypothesis") if importlib.util.find_spec(name) is None]
    if absent:
        names = " ".join(absent).replace("_", "-")
        return Part("tests", "not checked", f"no {names} in {sys.executable}: python -m pip install {names}")
    report = proof.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *proof.tests]
    part, _ = proof.run("tests", command, 300)
    if report.exists():
        part.found = outcomes(report.read_text())
    if part.state == "passed" and not part.found.get("passed"):
        part.state, part.why = "failed", "no test passed"
    return part


def outcomes(junit: str) -> dict[str, Any]:
    """How many tests ended how, and the names of those that did not pass, with the reason's first line."""
    found: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = [child for child in case if child.tag in ("failure", "error")]
        skipped = case.find("skipped")
        if bad:
            found["failed"][name] = first_line(bad[0])
        elif skipped is not None:
            found["skipped"][name] = first_line(skipped)
        else:
            found["passed"] += 1
    return found


def first_line(reason: ElementTree.Element) -> str:
    return next(iter((reason.get("message") or reason.text or "").splitlines()), "")


def run_benchmark(proof: Proof, name: str, script: str, most: float, *arguments: str) -> Part:
    path = proof.folder / f"{name}.json"
    part, _ = proof.run(name, proof.python(script, *arguments, "--json", str(path)), most)
    if path.exists():
        part.found = json.loads(path.read_text())
        del part.found["header"]["machine"], part.found["header"]["versions"], part.found["header"]["gpu"]
    return part


def run_sanitizer(proof: Proof, tool: str) -> Part:
    """The kernels under one tool of compute-sanitizer, if that works here."""
    name = f"compute-sanitizer {tool}"
    if proof.stand_in:
        return Part(name, "not checked", "the stand-in is no GPU")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")
    if sanitizer is None:
        return Part(name, "not checked", "no compute-sanitizer on PATH or in CUDA_HOME/bin")
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--target-processes", "all"]
    command += ["--error-exitcode", str(SANITIZER_ERRORS), *proof.python("gpu_kernels.py", "--few")]
    part, output = proof.run(name, command, 120, log=True)
    print("\n".join(output.splitlines()[-20:]), flush=True)
    part.found = {"summary": re.findall(r"=+ (.*SUMMARY: .*)", output)}
    if part.state != "failed":
        return part
    part.found["output"] = output.splitlines()[-40:]
    part.state, part.why = judged(output, part.why)
    return part


def judged(output: str, why: str) -> tuple[Literal["failed", "not checked"], str]:
    """Whether the sanitizer found faults, or does not work on this machine."""
    for refusal in ("Device not supported", "Unable to", "not supported", "Internal Sanitizer Error", "Insufficient"):
        if refusal in output and not re.search(r"Invalid __|hazard|Barrier error|; [1-9]\d* wrong", output):
            line = next(line for line in output.splitlines() if refusal in line)
            return "not checked", f"compute-sanitizer does not work here: {line.strip('= ')}"
    return ("not checked" if why.startswith("not done") else "failed"), why


def commit(given: str | None) -> str | None:
    """What is checked out, with "+" if files differ from it; None where that cannot be told."""
    if given:
        return given

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def prove(proof: Proof) -> list[Part]:
    """All parts: first what is wrong, then how fast it is, then what may not work everywhere."""
    gpu_device.use(proof.stand_in)
    import torch

    kernels, _ = proof.run("kernels against the CPU's", proof.python("gpu_kernels.py"), 120)
    parts = [run_tests(proof), kernels]
    parts.append(run_benchmark(proof, "accumulate", "gpu_accumulate.py", 90))
    limit = max(10.0, min(180.0, proof.left() - 120))
    parts.append(run_benchmark(proof, "collectives", "gpu_collectives.py", limit + 60, "--limit", f"{limit:.0f}"))
    parts += [run_sanitizer(proof, tool) for tool in TOOLS]
    if torch.cuda.device_count() < 2:
        parts.append(Part("several GPUs, NCCL", "not checked", "there is one GPU"))
    elif proof.stand_in:
        parts.append(Part("NCCL", "not checked", "the stand-in is no GPU"))
    return parts


def write(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--tests", nargs="+", default=["tests/gpu"], metavar="PATH", help="for pytest (default tests/gpu)")
    option("--limit", type=float, default=590, help="seconds from --since on (default 590)")
    option("--since", type=float, default=time.time(), metavar="TIME", help="by date +%%s (default now)")
    option("--commit", help="what is checked out, where git does not know")
    option("--stand-in", action="store_true", help="on stand-ins for GPUs")
    option("--look", action="store_true", help="only say what is missing here, if anything is")
    option("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if reasons := gpu_device.missing(args.stand_in):
        print("make gpu cannot run here:", *(f"  {reason}" for reason in reasons), sep="\n", file=sys.stderr)
        print("Without a GPU: make gpu STAND_IN=1, which proves the script and not the GPU.", file=sys.stderr)
        return 2
    if args.look:
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):  # as for SIGINT, what runs ends with this process
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    gpu_device.use(args.stand_in)
    facts = gpu_device.facts(args.stand_in)
    device = re.sub(r"\W+", "_", facts["devices"][0]["name"].lower())
    path = args.json or (ROOT / ("build/gpu/stand_in.json" if args.stand_in else f"bench/results/gpu_{device}.json"))
    if args.stand_in and path.resolve().is_relative_to(ROOT / "bench/results"):
        parser.error("--json: figures of the stand-in are not for bench/results")
    spent = time.time() - args.since
    report: dict[str, Any] = {
        "header": {
            **harness.origin("make gpu"),
            "commit": commit(args.commit),
            "gpu": facts,
            "build_s": round(spent, 1),
        },
        "parts": [],
    }
    if args.stand_in:
        report["header"]["note"] = "on a stand-in: no figure here is of a GPU"
    with tempfile.TemporaryDirectory() as folder:
        proof = Proof(
            tests=tuple(args.tests),
            stand_in=args.stand_in,
            deadline=time.monotonic() + args.limit - spent - RESERVE,
            folder=Path(folder),
        )
        parts = prove(proof)
    report["parts"] = [asdict(part) for part in parts]
    write(report, path)
    print("\n== summary ==")
    for part in parts:
        print(f"{part.name:<28} {part.state:<12} {part.seconds:>6.1f} s  {part.why}")
    print(f"all of it in {path}")
    failed = [part for part in parts if part.state == "failed" or (part.name == "tests" and part.state != "passed")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
