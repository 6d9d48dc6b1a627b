"""What the command line does where files, streams and moments are bad: no traceback, no file read without end."""

import errno
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringreduce import cli
from ringreduce.common import files, units
from ringreduce.common.bounded import bounded

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "ringreduce")

LOG = "#  Rank  0 Group  0 on a\n#  Rank  1 Group  0 on a\n# all_reduce_perf\n#  size  count  time\n"
LOG += "".join(f"  {1 << power}  1  {10 + 2**power / 1e5:.2f}\n" for power in range(10, 28))


def shell(line: str, **environ: str) -> tuple[int, str]:
    """Exit code and all that is said of a line in which `$RR` is the command."""
    found = os.environ | {"RR": " ".join(COMMAND), "PYTHONUNBUFFERED": ""} | environ
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env=found,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in ended.stderr and "ignored" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    ["topo dgx1-v100", "topo dgx1-v100 --json", "plan dgx1-v100", "--help", "--version", "topo --help", "keep --help"],
)
def test_streams_that_are_closed_full_or_left(words: str) -> None:
    assert shell(f"$RR {words} >&-") == (0, "")
    assert shell(f"$RR {words} <&- >&- 2>&-") == (0, "")
    assert shell(f"$RR {words} >/dev/full") == (2, "error: standard output: No space left on device\n")
    assert shell(f"$RR {words} >/dev/full 2>/dev/full")[0] == 2
    assert shell(f"$RR {words} | true")[0] in (0, cli.NOBODY_READS)


def test_complaints_that_nobody_can_read() -> None:
    for where in ("2>&-", "2>/dev/full", "2> >(true)"):
        assert shell(f"$RR plan {where}") == (2, "")
        assert shell(f"$RR topo nosuch {where}") == (2, "")


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """The picture would be written between lines of the table."""
    path = tmp_path / "out.json"
    assert shell(f"$RR plan dgx1-v100 --save {path} >&-") == (0, "")
    assert json.loads(path.read_text())["collective"] == "all_reduce"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "plan dgx1-v100 --save {}",
        "plan dgx1-v100 --plot {}.png",
        "plan dgx1-v100 --plot-links {}.png",
        "topo dgx1-v100 --plot {}.png",
        "simulate dgx1-v100 --size 1MB --algorithm rings --plot {}.svg",
        "calibrate LOG dgx-a100 --gpus 0,1 --save {}",
    ],
)
def test_a_full_disk_is_told_with_the_name_of_the_file(words: str, tmp_path: Path) -> None:
    for ending in ("", ".png", ".svg"):
        (tmp_path / f"out{ending}").symlink_to("/dev/full")
    (tmp_path / "LOG").write_text(LOG)
    words = words.format(tmp_path / "out").replace("LOG", str(tmp_path / "LOG"))
    code, said = shell(f"$RR {words}")
    assert code == 2
    assert re.fullmatch(rf"error: {tmp_path}/out(\.png|\.svg)?: No space left on device\n", said)


def test_devices_stay_what_they_are(tmp_path: Path) -> None:
    """A file is replaced as a whole; a device is written to."""
    device = tmp_path / "null"
    device.symlink_to("/dev/null")
    files.write_file(device, b"text")
    assert device.is_symlink() and Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        files.write_file(Path("/dev/full"), b"text")
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none/file"))):
        files.write_file(tmp_path / "none/file", b"text")


@pytest.mark.parametrize("why", [errno.EACCES, errno.EBUSY])
def test_a_file_that_cannot_be_replaced_is_written_to(
    why: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is mounted, or in a folder that this user may not change."""

    def refuse(*_: object) -> None:
        raise OSError(why, os.strerror(why))

    file = tmp_path / "file"
    file.write_bytes(b"a longer text")
    monkeypatch.setattr(os, "replace", refuse)
    files.write_file(file, b"text")
    assert file.read_bytes() == b"text" and [*tmp_path.iterdir()] == [file]
    with pytest.raises(OSError, match=re.escape(str(file))):
        files.write_file(file, b"secret", private=True)
    with pytest.raises(OSError, match="new"):
        files.write_file(tmp_path / "new", b"text")
    assert file.read_bytes() == b"text" and [*tmp_path.iterdir()] == [file]


def test_a_private_file_is_private_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = list[int]()
    monkeypatch.setattr(os, "fsync", lambda fd: modes.append(stat.S_IMODE(os.fstat(fd).st_mode)))
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    before = os.umask(0)
    try:
        files.write_file(tmp_path / "private", b"text", private=True)
        files.write_file(tmp_path / "public", b"text")
    finally:
        os.umask(before)
    assert modes == [0o600, 0o666]


@pytest.mark.parametrize("where", ["/dev/zero", "huge"])
def test_files_without_end_are_not_read(where: str, tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(3 << 30)
    path = str(tmp_path / where)  # an absolute name stays
    for words in (f"calibrate {path}", f"plan dgx1-v100 --calibration {path}", f"topo {path}"):
        code, said = shell(f"ulimit -v 4000000; $RR {words}")
        assert code == 2
        assert path in said and "16 MiB" in said


def test_brackets_nested_too_deeply_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    assert cli.main(["plan", "dgx1-v100", "--calibration", str(path)]) == 2
    assert "nested too deeply" in capsys.readouterr().err
    with pytest.raises(ValueError, match="nested too deeply"):
        files.json_of(b'{"a":' * 100_000)


def calibrate(log: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["calibrate", str(log), "dgx-a100", "--gpus", "0,1"])
    return code, "".join(capsys.readouterr())


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_logs_in_every_encoding(encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_text(LOG, encoding=encoding)
    code, said = calibrate(path, capsys)
    assert code == 0, said
    assert "efficiency" in said


def test_logs_with_more_sizes_than_a_sweep_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log"
    path.write_text(LOG + "".join(f" {size} 1 1.0\n" for size in range(9, 99_999)))
    code, said = calibrate(path, capsys)
    assert code == 2 and "at most 1000" in said


@pytest.mark.parametrize(
    "words", ["info extra", "topo --nosuch", "plan", "keep --again x y", "--nosuch", "doctor --timeout x"]
)
def test_examples_of_complaints_are_commands_that_parse(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err
    command = words.split(maxsplit=1)[0] if not words.startswith("-") else ""
    assert said.startswith(f"usage: ringreduce {command}")
    (example,) = re.findall(r"^for example: ringreduce (.*)$", said, re.MULTILINE)
    assert "  " not in example  # no word of what it is for
    assert example.split()[0] == (command or "topo")


def test_addresses() -> None:
    assert units.address("node0:29400") == ("node0", 29400)
    assert units.address("[::1]:29400") == ("::1", 29400)
    assert units.address("10.0.0.1:0") == ("10.0.0.1", 0)
    for text in ("::1:29400", "node0", "node0:", ":1", "node0:65536", "node0:x", "[]:1", "[::1]", "a b:1", "node0:٣"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            units.address(text)


def test_calls_that_nobody_can_interrupt_have_an_end() -> None:
    assert bounded(lambda: 7, 60) == 7
    with pytest.raises(KeyError):
        bounded(lambda: {}["no"], 60)
    with pytest.raises(TimeoutError, match=r"no answer in 0\.2 s"):
        bounded(lambda: time.sleep(60), 0.2)


@pytest.mark.parametrize(("name", "text"), [("RANK", "abc"), ("RANK", "2"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "x")])
def test_wrong_variables_of_a_launcher_are_named(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | {name: text}
    assert cli.main(["doctor", "--peers"]) == 2
    assert f"error: {name} is {text!r}; it must be a number from" in capsys.readouterr().err


def test_a_store_that_does_not_answer_can_be_interrupted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(60)
        environ = {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.getsockname()[1]),
        }
        with subprocess.Popen(
            [*COMMAND, "doctor", "--peers"],
            cwd=ROOT,
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            connection, _ = store.accept()
            time.sleep(0.2)  # it waits for an answer
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
            connection.close()
    assert process.returncode in (130, -signal.SIGINT)
    assert "Traceback" not in said


def test_interrupts_while_modules_are_imported(tmp_path: Path) -> None:
    """A module that takes long to import, in the place of one of the command's, and a finalizer that is interrupted."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich/__init__.py").write_text(
        "import time\ntry:\n    print('importing', flush=True)\n    time.sleep(60)\nexcept BaseException:\n    pass\n"
        "raise ImportError('half imported')\n"
    )
    with subprocess.Popen(
        [*COMMAND, "topo", "dgx1-v100"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (cli.INTERRUPTED, "interrupted\n")


def test_json_of_every_command_that_finds_something(capsys: pytest.CaptureFixture[str]) -> None:
    for words, has in (
        (["doctor"], lambda found: {each["state"] for each in found} <= {"ok", "limited", "not used"}),
        (["info"], lambda found: found["options"]["fetch"]["from"] == "default" and found["engine"]["slices"] == 4),
        (["simulate", "dgx1-v100", "--size", "1MB"], lambda found: found["points"][-1]["seconds"]["rings"] > 0),
    ):
        assert cli.main([*words, "--json"]) == 0
        assert has(json.loads(capsys.readouterr().out))


def test_names_of_variables_are_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    from ringreduce.cli import info
    from ringreduce.config import DEFAULTS, resolve

    narrow = Console(width=80, file=io.StringIO(), markup=False)
    info._info(narrow, *resolve(None), [2])
    shown = narrow.file.getvalue()
    assert all(f" RINGREDUCE_{name.upper()} " in shown for name in DEFAULTS)
    assert "…" not in shown
