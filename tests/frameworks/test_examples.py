"""The examples. Each compares itself with one process, and fails if it differs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from frameworks.launch import python, ranks, torchrun
from processes import ROOT

TINY = r"by \d\.\de-1[1-9]"


@pytest.mark.parametrize("name", ("fsdp", "tensor_parallel", "pipeline"))
def test_example(name: str) -> None:
    assert re.search(rf"a single process's {TINY}", ranks(f"examples/{name}.py"))


def test_semirings() -> None:
    """Each of its four results is compared with one process's."""
    output = ranks("examples/semirings.py")
    assert output.count("differs from a single process's by 0.0e+00") == 3
    assert re.search(rf"attention .* a single process's {TINY}", output)


def program_of(page: str, folder: Path) -> Path:
    """The first one on a page, with fewer steps."""
    block = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert block
    program = folder / "program.py"
    program.write_text(block[1].replace("10_000", "200"))
    return program


def test_the_first_program(tmp_path: Path) -> None:
    """Both ranks print the sum, and the group ends without a warning."""
    output = torchrun(str(program_of("README.md", tmp_path)))
    assert output.count("tensor([3., 3., 3., 3.])") == 2
    assert "destroy_process_group" not in output


def test_the_program_that_survives(tmp_path: Path) -> None:
    program = str(program_of("docs/elastic.md", tmp_path))
    keep = ("-m", "ringreduce", "keep", "--errors", sys.executable)
    output = torchrun("--no-python", sys.executable, *keep, program)
    assert output.count("step 200, loss") == 2


@pytest.mark.slow
def test_elastic_restart() -> None:
    """Both go on where they had saved, to the same result."""
    output = torchrun("--max-restarts=1", "examples/elastic.py")
    assert "(exitcode: -9) local_rank: 1" in output
    for rank in (0, 1):
        assert f"rank {rank}, attempt 1: goes on at step 8" in output
        assert re.search(rf"rank {rank}, attempt 1: parameters differ from a single process's {TINY}", output)


SMALL = ("--params", "1e6", "--bucket-mb", "1", "--steps", "2", "--rounds", "1")


@pytest.mark.slow
@pytest.mark.parametrize(("start", "backend"), [(python, "gloo"), (ranks, "ringreduce")])
def test_overlap(start: Callable[..., str], backend: str, tmp_path: Path) -> None:
    """Every rank's trace has all parts of each step; some all_reduce begins before its backward has ended."""
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    output = start("examples/overlap.py", "--backend", backend, *SMALL, "--trace", str(trace), "--png", str(picture))
    assert re.search(r"hidden +-?\d+%", output)
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    early = []
    for rank in (0, 1):
        computed, communicated = ([e for e in events if (e["pid"], e["tid"]) == (rank, line)] for line in (0, 1))
        assert [e["name"] for e in computed] == ["forward", "backward", "wait", "optimizer"] * 2
        buckets = len(output.split("buckets of ")[1].split(" MB")[0].split(","))
        assert buckets > 1 and len(communicated) == 2 * buckets
        for backward, wait in zip(computed[1::4], computed[2::4], strict=True):
            during = [c for c in communicated if backward["ts"] <= c["ts"] <= wait["ts"] + wait["dur"]]
            assert len(during) == buckets
            early.append(during[0]["ts"] < wait["ts"])
    assert any(early)  # on a busy machine not in each step
