"""Settings that all tests share."""

import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("bodies")

# The ranks that tests start print their stacks on a crash, as pytest does for its own process.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")

# Commands that tests start can be interrupted, also where a shell runs the tests in the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where groups that break leave their flight records, of which tests make many.
os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{tempfile.mkdtemp()}/rank")

# torch's store looks up the name of each address that connects, and answers nobody meanwhile. A name server that is
# busy or cannot be reached would hold up each start of ranks for 5 s and more.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# What groups run must not depend on a probe of the machine; tests of the tuning say otherwise.
os.environ.setdefault("RINGREDUCE_TUNING", "off")

# No deadline: an example's time on a busy machine says nothing. CI draws the same examples every time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def own_variables() -> Iterator[None]:
    """Commands that a test runs in this process set variables, as `serve` does; no other test sees them."""
    with mock.patch.dict(os.environ):
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """For .ci/durations.py: how long each test took, with its fixtures."""
    if path := os.environ.get("TEST_DURATIONS"):
        seconds: dict[str, float] = defaultdict(float)
        for report in (each for some in terminalreporter.stats.values() for each in some):
            if hasattr(report, "duration"):
                seconds[report.nodeid] += report.duration
        with open(path, "a") as file:
            file.writelines(f"{spent:.2f} {test}\n" for test, spent in seconds.items())
