"""What a part of `make gpu` finds, in a JSON that is written anew after every row.

    args = reports.parser(__doc__).parse_args()
    report = reports.begin(args, "what is measured")
    report.row(size=8, us=3.2)
    report.bar("latency of 8 B, us", 3.2, at_most=15)
    return report.end()

The file is replaced as a whole, so a part that is killed leaves what it had found: {"header", "state", "why", "bars",
"rows", "notes"}. The state is "running" until the end. A bar that is not met is reported and is no failure; `wrong`
results are.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import harness
from bench.gpu import device


class Report:
    """The findings of one part. Without a path they are only printed."""

    def __init__(self, path: Path | None, found: dict[str, Any]) -> None:
        self.path, self.found = path, found
        self._save()

    @classmethod
    def again(cls, path: Path) -> "Report":
        """What another process has begun, to go on with."""
        return cls(path, json.loads(path.read_text()))

    def row(self, line: str = "", /, **cells: Any) -> None:
        """A result, and how it is printed if not cell by cell. `cells["wrong"]` counts elements that are wrong."""
        self.found["rows"].append(cells)
        self._save()
        print(line or harness.words({**cells, **cells.get("median_us", {})}), flush=True)

    def note(self, text: str) -> None:
        """What could not be checked, and why."""
        self.found["notes"].append(text)
        self._save()
        print(f"# left out: {text}", flush=True)

    def bar(self, what: str, figure: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """What the project asks of a figure."""
        holds = figure >= at_least if at_least is not None else at_most is not None and figure <= at_most
        limits = {"at_least": at_least} if at_least is not None else {"at_most": at_most}
        self.found["bars"].append({"what": what, **limits, "figure": figure, "holds": holds})
        self._save()
        (side, limit), *_ = limits.items()
        print(
            f"# bar: {what}: {figure:.4g}, {side.replace('_', ' ')} {limit}: {'met' if holds else 'NOT met'}",
            flush=True,
        )

    def end(self, why: str = "") -> int:
        """The exit code: 1 if a result was wrong or there is a reason `why` the part failed."""
        wrong = sum(row.get("wrong", 0) for row in self.found["rows"])
        if wrong and not why:
            why = f"{wrong} wrong"
        self.found["state"], self.found["why"] = ("failed" if why else "passed"), why
        self._save()
        print(f"# {wrong} wrong; {self.found['state']}", flush=True)
        return 1 if why else 0

    def _save(self) -> None:
        if self.path is not None:
            unfinished = self.path.with_suffix(".unfinished")
            harness.save(unfinished, self.found)
            unfinished.replace(self.path)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """With the options that every part has."""
    codes = "Exit code: 0, 1 if a result was wrong or the part failed, 2 if there is no GPU. --json: see reports.py."
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=doc, epilog=codes, formatter_class=form)
    made.add_argument("--stand-in", action="store_true", help="on the stand-in for a GPU: for tests of this program")
    made.add_argument("--json", type=Path, metavar="FILE")
    return made


def begin(args: argparse.Namespace, title: str, **header: Any) -> Report:
    """An empty report, whose header is printed. Exits with 2 where there is no GPU, and says what is missing."""
    if reasons := device.missing(args.stand_in):
        print(*(f"missing: {reason}" for reason in reasons), sep="\n", file=sys.stderr)
        sys.exit(2)
    device.use(args.stand_in)
    found = {"header": {**harness.origin(title), "commit": commit(), "gpu": device.facts(args.stand_in), **header}}
    if args.stand_in:
        found["header"]["note"] = "on a stand-in: no figure here is of a GPU"
    print(*harness.format_origin(found["header"]), f"# gpu       {found['header']['gpu']}", sep="\n")
    print(*(f"# {text}" for text in header.get("method", ())), sep="\n", flush=True)
    return Report(args.json, {**found, "state": "running", "why": "", "bars": [], "rows": [], "notes": []})


def commit() -> str | None:
    """What is checked out, with "+" if files differ from it; $COMMIT where git does not know."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=device.ROOT, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    try:
        return os.environ.get("COMMIT") or (
            git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
        )
    except (OSError, subprocess.CalledProcessError):
        return None
