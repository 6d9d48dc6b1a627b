"""Options: a group's own over environment variables over defaults; bad ones are named."""

import pytest

from ringreduce.config import DEFAULTS, Options, resolve
from ringreduce.errors import InvalidArgument


def test_origin_and_precedence() -> None:
    options, origins = resolve(Options(channels=2), {"RINGREDUCE_CHANNELS": "3", "RINGREDUCE_CHANNEL_BYTES": "1M"})
    assert (options.channels, origins["channels"]) == (2, "option")
    assert (options.channel_bytes, origins["channel_bytes"]) == (1024**2, "RINGREDUCE_CHANNEL_BYTES")
    assert (options.slices, origins["slices"]) == (DEFAULTS["slices"], "default")


def test_default_memory_is_at_most_16_mb_per_rank() -> None:
    from ringreduce.backend import geometry_for

    options, _ = resolve(Options(arena_bytes=0), {})  # the arena is address space only
    for size in range(1, 65):
        assert geometry_for(size, options, 0).segment_bytes() / size <= 16 * 1024**2


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RINGREDUCE_CHANNELS": "many"}, "RINGREDUCE_CHANNELS is 'many'; it must be a whole number from 1 to 64"),
        ({"RINGREDUCE_CHANNELS": "0"}, "RINGREDUCE_CHANNELS is 0"),
        ({"RINGREDUCE_CHANNEL_BYTES": "1"}, "RINGREDUCE_CHANNEL_BYTES is 1"),
        ({"RINGREDUCE_ALGORITHMS": "all_reduce:star"}, "star"),
    ],
)
def test_a_bad_variable_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        resolve(None, environ)


@pytest.mark.parametrize(
    ("options", "named"), [(Options(algorithms=7), "algorithms is 7"), (Options(channels=True), "channels is True")]
)  # type: ignore[arg-type]
def test_a_bad_option_is_named(options: Options, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        resolve(options, {})


def test_switches_may_be_true_or_false() -> None:
    options, _ = resolve(Options(fetch=False, dump_when_broken=True), {})
    assert (options.fetch, options.dump_when_broken) == (0, 1)
    assert type(options.fetch) is int  # ranks compare their options as text


def test_foreign_options_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="dict"):
        resolve({"channels": 2}, {})  # type: ignore[arg-type]


def test_a_misspelt_variable_is_named_with_what_was_meant(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"RINGREDUCE_DEAD_AFER": "3", "RINGREDUCE_LIFE": "1", "RINGREDUCE_LIBNCCL": "x", "OTHER": ""}
    assert resolve(None, environ) == resolve(None, {}) == resolve(None, environ)
    (said,) = caplog.messages
    assert "RINGREDUCE_DEAD_AFER is set" in said and said.endswith("did you mean RINGREDUCE_DEAD_AFTER?")
