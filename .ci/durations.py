"""Names tests that have become slow: `python .ci/durations.py FOLDER FAILED`, at the end of a run of CI.

FOLDER has `durations.new`, a line for each test of this run, "SECONDS TEST" (tests/conftest.py), and `durations.txt`,
the same of the last run in which all passed. With FAILED 0 the first takes the place of the second.
"""

from __future__ import annotations

import sys
from pathlib import Path

SHARE, SECONDS = 1.2, 1.0
"""A test is slower if it takes so many times as long, and so much longer."""


def read(path: Path) -> dict[str, float]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {test: float(seconds) for seconds, test in (line.split(" ", 1) for line in lines)}


def slower(before: dict[str, float], now: dict[str, float]) -> list[str]:
    """The worst first."""
    more = {test: now[test] - before[test] for test in now.keys() & before.keys()}
    found = [test for test in more if now[test] > SHARE * before[test] and more[test] > SECONDS]
    found.sort(key=more.__getitem__, reverse=True)
    return [f"{before[test]:8.1f} s -> {now[test]:6.1f} s  {test}" for test in found]


def main(folder: str, failed: str) -> None:
    new, last = Path(folder, "durations.new"), Path(folder, "durations.txt")
    before, now = read(last), read(new)
    if found := slower(before, now):
        print(f"#### {len(found)} tests took more than {SHARE:g} times as long as in the last run that passed")
        print("\n".join(found))
    if failed == "0" and now:
        new.replace(last)


if __name__ == "__main__":
    main(*sys.argv[1:])
