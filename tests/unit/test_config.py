"""Options: a group's own over environment variables over defaults; bad ones are named."""

import copy
import pickle
import re
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

import ringreduce
from ringreduce.config import DEFAULTS, OTHER_VARIABLES, PARTS, PREFIX, EngineParts, Options, resolve, slicing_for
from ringreduce.errors import InvalidArgument


def test_origin_and_precedence() -> None:
    options, origins = resolve(Options(connections=2), {"RINGREDUCE_CONNECTIONS": "3", "RINGREDUCE_ARENA_BYTES": "1M"})
    assert (options.connections, origins["connections"]) == (2, "option")
    assert (options.arena_bytes, origins["arena_bytes"]) == (1024**2, "RINGREDUCE_ARENA_BYTES")
    assert (options.fetch, origins["fetch"]) == (DEFAULTS["fetch"], "default")


def test_engine_has_parts() -> None:
    parts = resolve(None, {"RINGREDUCE_ENGINE": " slices=2 , channel_bytes=64K,gpu_mode=run"})[0].parts
    assert (parts.slices, parts.channel_bytes, parts.gpu_mode) == (2, 64 * 1024, "run")
    assert str(parts) == "channel_bytes=65536,slices=2,gpu_mode=run" and parts == Options(engine=str(parts)).parts
    assert Options().parts == EngineParts()


def test_what_has_become_a_part_of_engine_says_so() -> None:
    for part in PARTS:
        with pytest.raises(
            InvalidArgument, match=f"^RINGREDUCE_{part.upper()} is a part of .*RINGREDUCE_ENGINE.*'{part}="
        ):
            resolve(None, {f"RINGREDUCE_{part.upper()}": "1"})
        with pytest.raises(InvalidArgument, match=f"^{part} is a part of engine; .*engine=.*'{part}="):
            Options(**{part: 1})


def test_default_memory_is_at_most_16_mb_per_rank() -> None:
    from ringreduce.groups.layout import geometry_for

    options, _ = resolve(Options(arena_bytes=0), {})  # the arena is address space only
    for size in range(1, 65):
        assert geometry_for(size, options, 0).segment_bytes() / size <= 16 * 1024**2


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (
            {"RINGREDUCE_CONNECTIONS": "many"},
            "RINGREDUCE_CONNECTIONS is 'many'; it must be a whole number from 1 to 64",
        ),
        ({"RINGREDUCE_CONNECTIONS": "0"}, "RINGREDUCE_CONNECTIONS is 0"),
        ({"RINGREDUCE_ARENA_BYTES": "much"}, "RINGREDUCE_ARENA_BYTES is 'much'"),
        (
            {"RINGREDUCE_ENGINE": "slices=many"},
            "slices in RINGREDUCE_ENGINE is 'many'; it must be a whole number from 1",
        ),
        (
            {"RINGREDUCE_ENGINE": "slice=2"},
            "RINGREDUCE_ENGINE has 'slice=2'; it must be NAME=VALUE, NAME one of channels",
        ),
        ({"RINGREDUCE_ALGORITHMS": "all_reduce:star"}, "star"),
    ],
)
def test_a_bad_variable_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        resolve(None, environ)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"algorithms": 7}, "algorithms is 7"),
        ({"connections": True}, "connections is True"),
        ({"connections": "x"}, "connections is 'x'; it must be a whole number from 1 to 64"),
        ({"engine": 3}, "engine is 3; it must be text"),
        ({"engine": "channels=65"}, "channels in engine is 65; it must be a whole number from 1 to 64"),
        ({"transport": "ipc"}, "transport is 'ipc'"),
        ({"tuning": ""}, "tuning is ''"),
    ],
)
def test_a_bad_option_is_named_where_it_is_given(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        Options(**given)


def test_switches_may_be_true_or_false() -> None:
    options, _ = resolve(Options(fetch=False, dump_when_broken=True), {})
    assert (options.fetch, options.dump_when_broken) == (0, 1)
    assert type(options.fetch) is int  # ranks compare their options as text


def test_what_are_no_options_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="dict"):
        resolve({"fetch": 1}, {})


def test_options_of_another_backend_are_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ringreduce")
    others = [dist.ProcessGroupGloo._Options(), Backend.Options("nccl")]
    assert all(resolve(other, {}) == resolve(None, {}) for other in others)
    assert len(caplog.messages) == 2 and all("is for another backend" in text for text in caplog.messages)


def test_options_are_torchs_too_and_can_be_copied() -> None:
    options = Options(engine="channels=2")
    assert isinstance(options, Backend.Options) and options._timeout == timedelta(minutes=30)
    for copied in (copy.deepcopy(options), pickle.loads(pickle.dumps(options)), replace(options)):
        assert copied == options and copied._timeout == options._timeout
    assert replace(options, fetch=1) != options and "channels=2" in repr(options)
    assert hash(options) == hash(Options(engine="channels=2"))


def test_an_empty_variable_counts_as_unset() -> None:
    empty = {f"RINGREDUCE_{name.upper()}": " " * (len(name) % 2) for name in DEFAULTS}
    assert resolve(None, empty) == resolve(None, {})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("RINGREDUCE_DEAD_AFER", "RINGREDUCE_DEAD_AFTER"),
        ("RINGREDUCE_ALGO", "RINGREDUCE_ALGORITHMS"),
        ("RINGREDUCE_LIBNCLL", "RINGREDUCE_LIBNCCL"),
    ],
)
def test_an_unknown_variable_is_named_once_with_the_nearest(
    caplog: pytest.LogCaptureFixture, wrong: str, meant: str
) -> None:
    environ = {wrong: "3", **dict.fromkeys(OTHER_VARIABLES, "1"), "RINGREDUCE_STAND_IN_MEMORY": "1", "OTHER": "1"}
    assert resolve(None, environ) == resolve(None, {}) == resolve(None, environ)
    (said,) = caplog.messages
    assert f"{wrong} is set" in said and f"the nearest is {meant};" in said


def test_every_variable_that_is_read_has_a_line_in_info() -> None:
    package, root = Path(ringreduce.__file__).parent, Path(__file__).resolve().parents[2]
    sources = [*package.rglob("*.py"), *(root / "csrc").rglob("*.cpp"), *root.glob("build_*.py")]
    options = {PREFIX + each.name.upper() for each in fields(Options)}
    read = {
        name
        for each in sources
        for name in re.findall(r"(?:getenv\(|environ\S*[(\[])\"(RINGREDUCE_\w+)", each.read_text())
    }
    assert read - options == set(OTHER_VARIABLES) - {
        "RINGREDUCE_LIFE",
        "RINGREDUCE_AS_GLOO",
    }  # these names are constants


@pytest.mark.parametrize(
    ("gbits", "size"), [(0, 16), (1, 16), (5, 32), (10, 64), (25, 128), (400, 128)], ids="{}".format
)
def test_slices_between_hosts_are_as_large_as_the_wire_wants_them(gbits: float, size: int) -> None:
    """In KiB; 0: all ranks are on one host."""
    options = Options(engine="slices=4")
    assert slicing_for(options, 1 << 20, fetch=False, wire=gbits * 125e6) == (4, size << 10, 1 << 20)
    chosen = Options(engine="least_slice_bytes=4K")
    assert slicing_for(chosen, 1 << 20, fetch=False, wire=gbits * 125e6).least_slice_bytes == 4 << 10
