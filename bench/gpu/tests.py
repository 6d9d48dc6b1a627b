"""tests/gpu under pytest, with a row in the report for every test as it ends.

    python -m bench.gpu.tests --half 1 --json tests-1.json

The halves take about as long as each other. A row has the test, its outcome, its seconds and, unless it passed, the
reason's first line.
"""

import importlib.util
import os
import sys
from typing import Any

from bench.gpu import device, reports

TESTS = device.ROOT / "tests/gpu"

FIRST_HALF = ("test_threads", "test_setup", "test_arrays", "test_same_bits", "test_collectives")
"""The files of the first half, in their order; all others are of the second."""


class Rows:
    """A plugin of pytest that gives the report its rows."""

    def __init__(self, report: reports.Report) -> None:
        self.report, self.passed = report, 0
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            self._tell(test, report.outcome, reason(report) if report.outcome != "passed" else "")

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self._tell(report.nodeid, "failed", reason(report))

    def _tell(self, test: str, outcome: str, why: str) -> None:
        seconds = round(self._seconds.get(test, 0), 1)
        self.passed += outcome == "passed"
        row = {"test": test, "outcome": outcome, "why": why, "seconds": seconds, "wrong": int(outcome == "failed")}
        self.report.row(f"{outcome:<8} {seconds:>6.1f} s  {test}{': ' if why else ''}{why}", **row)


def reason(report: Any) -> str:
    """Why a test failed or was skipped, in a line."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).splitlines()
    return next((line for line in lines if line.strip()), "")[:300]


def half(number: int) -> list[str]:
    first = [TESTS / f"{name}.py" for name in FIRST_HALF]
    return list(map(str, first if number == 1 else sorted({*TESTS.glob("test_*.py")} - {*first})))


def main() -> int:
    parser = reports.parser(__doc__)
    parser.add_argument("--half", type=int, choices=(1, 2), help="(default both)")
    parser.add_argument("tests", nargs="*", metavar="PATH", help="for pytest, in place of tests/gpu")
    args = parser.parse_args()
    if absent := [
        name for name in ("pytest", "pytest_timeout", "hypothesis") if importlib.util.find_spec(name) is None
    ]:
        print(f"missing: {' '.join(absent).replace('_', '-')} in {sys.executable}", file=sys.stderr)
        return 2
    report = reports.begin(args, "tests/gpu")
    sys.path.insert(0, str(device.ROOT / "tests"))
    import processes
    import pytest

    probe = args.json.with_name("probe.json") if args.json else None
    if probe and (us := processes.slowest_hand_over(probe)):
        os.environ["RINGREDUCE_TEST_HAND_OVER_US"] = str(us)
    rows = Rows(report)
    paths = args.tests or [path for number in ([args.half] if args.half else [1, 2]) for path in half(number)]
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:terminalreporter", *paths], plugins=[rows])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return report.end(f"pytest ended with {code!r}")
    return report.end("" if rows.passed else "no test passed")


if __name__ == "__main__":
    sys.exit(main())
