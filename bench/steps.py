"""Steps of real programs with ringreduce next to Gloo, as docs/does_it_pay.md has them; prints that page's table.

    python bench/steps.py                                     2 and 4 ranks; about half an hour on a quiet machine
    python bench/steps.py --ranks 2 --seconds 60 --json steps.json

The steps and the way of measuring are those of `ringreduce bench`, which has two of these steps. A third team runs
ringreduce with RINGREDUCE_FETCH=0, as for users who may not read other processes' memory. Exit code: 0, 1 if a library
failed or results differ.
"""

import argparse
import signal
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import harness

from ringreduce.cli.bench.compare import GLOO, OURS, Case, Comparison, Stepped

FETCHLESS = f"{OURS}-fetch0"

TRANSFORMER = Case("transformer", "DDP", batch=1, length=128, width=768, layers=12)
CASES = (
    Case("convolutional", "DDP", batch=8, length=64),
    Case("convolutional", "DDP", batch=32, length=64),
    TRANSFORMER,
    replace(TRANSFORMER, batch=4),
    replace(TRANSFORMER, by="FSDP2"),
    Case("decoder", "tensor parallel", batch=1, length=16, width=1024, layers=4),
)
HEADER = (
    "| step | ranks | Gloo | ringreduce | ordinary users | speed-up | ordinary users | communication with Gloo |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|"
)


def format_row(step: Stepped) -> str:
    """A line of the table: what a step is, images or tokens a second, and the speed-ups over Gloo."""
    rates = [f"{step.rate(name):.3g}" for name in (GLOO, OURS, FETCHLESS)]
    rates[0] += f" {step.case.unit}/s"
    gains = [f"{step.speedup(name):.2f}x" for name in (OURS, FETCHLESS)]
    return f"| {' | '.join((step.name, str(step.ranks), *rates, *gains, f'{step.communication(GLOO):.0%}'))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(default 2 4)")
    parser.add_argument("--seconds", type=float, default=120, help="about how long to run each step (default 120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write header and rows")
    args = parser.parse_args()
    if min(args.ranks) < 2:
        parser.error("--ranks must be at least 2")
    header = harness.origin("steps of real programs, ringreduce next to Gloo")
    print("\n".join((*harness.format_origin(header), HEADER)), flush=True)
    rows, failures, notes = [], [], []
    for ranks in args.ranks:
        for case in CASES:  # each with teams of its own: four copies of a net take as much memory as there may be
            with (
                tempfile.TemporaryDirectory() as folder,
                Comparison(ranks, Path(folder), lambda what: print(what, file=sys.stderr)) as teams,
            ):
                teams.start(GLOO, OURS)
                teams.start(FETCHLESS, environment={"RINGREDUCE_FETCH": "0"})
                rows += teams.steps(case, args.seconds)
            failures += teams.failures
            notes += teams.notes
            if rows and rows[-1].case == case:
                print(format_row(rows[-1]), flush=True)
    print("\n".join(f"# {line}" for line in notes + failures))
    if args.json:
        harness.save(args.json, {"header": header, "rows": [asdict(row) for row in rows], "notes": notes + failures})
    return 1 if failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as with Ctrl-C, no process stays behind
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
