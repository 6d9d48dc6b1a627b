"""Files: users' files, read up to a limit and written with errors that name them; small files of the kernel; and this
user's own files that are kept between runs."""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringreduce.common.descriptors import above_streams, open_above_streams
from ringreduce.common.system import WANTS, explained

LARGEST = 16 << 20
"""Bytes that `content_of` reads unless its caller says otherwise."""

_OF_A_PROCESS = ("/dev/fd/", "/dev/std", "/proc/")
"""How names of descriptors begin."""
_STAYS = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)
"""What the system says where a file cannot be replaced, though it may be possible to write to it."""

_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as UTF-16 does
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Every OSError within names this file: a read or write that fails, as on a full disk, would name none."""
    try:
        yield
    except OSError as error:
        why = explained(error) if error.errno in WANTS else error.strerror or str(error)
        raise OSError(error.errno, why, str(path)) from None
    except ValueError as error:  # a name with a null character
        raise OSError(errno.EINVAL, str(error), str(path)) from None


def content_of(path: str | Path, most: int = LARGEST) -> bytes:
    """The bytes of a file that a user names. Raises OSError that names it, also if there are more than `most`: a device
    has no end."""
    with naming(path), open(path, "rb") as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB, the most that is read")
    return content


def encoding_of(content: bytes) -> str:
    """The encoding of a text, by its byte order mark: UTF-8 without one. PowerShell writes UTF-16."""
    return next((name for mark, name in _BYTE_ORDER_MARKS if content.startswith(mark)), "utf-8")


def json_of(content: bytes) -> Any:
    """What a JSON text means. Raises ValueError that says why it means nothing, also for one nested too deeply."""
    try:
        return json.loads(content.decode(encoding_of(content)))
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def write_file(path: str | Path, content: bytes, *, private: bool = False, replace: bool = True) -> None:
    """Writes a file as a whole. If that fails, as on a full disk, an earlier one stays as it was, and nothing is left
    of the new one. Raises OSError that names the file.

    `private`: other users may neither read nor write it. Without `replace`, a file that is there already stays. Where
    nothing can be put in the place of what is there, that is written to: a device, such as /dev/null, what a process
    has open, such as /dev/stdout, a file that is mounted, or one in a folder that this user may not change.
    """
    with naming(path):
        there = Path(path)
        stays = there.exists() and (not there.is_file() or str(there).startswith(_OF_A_PROCESS))
        if not stays:
            try:
                return _write_whole(Path(os.path.realpath(there)), content, private, replace)
            except OSError as error:
                if error.errno not in _STAYS or private or not replace or not there.is_file():
                    raise
        with open(there, "wb", opener=open_above_streams) as file:
            file.write(content)


def _write_whole(path: Path, content: bytes, private: bool, replace: bool) -> None:
    temporary = path.with_name(f".{path.name[:64]}.{secrets.token_hex(4)}")

    def opener(name: str, flags: int) -> int:
        return above_streams(os.open(name, flags, 0o600 if private else 0o666))

    try:
        with open(temporary, "xb", opener=opener) as file:
            if path.exists() and not private:
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def text_of(path: Path) -> str:
    """What is in it, without white space at its ends; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def cache_folder() -> Path:
    """Where this user's files of ringreduce are, if any. Raises OSError if there is no place for them."""
    root = os.environ.get("XDG_CACHE_HOME", "")  # to be ignored if it is not absolute, says its specification
    base = Path(root if os.path.isabs(root) else os.path.expanduser("~/.cache"))
    if not base.is_absolute():
        raise FileNotFoundError("this user has no home directory; set XDG_CACHE_HOME")
    return base / "ringreduce"


def require_own(status: os.stat_result) -> None:
    """Raises PermissionError if someone else could have written the file or folder."""
    if status.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to user {status.st_uid}; this process runs as user {os.geteuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError("others may write to it; chmod go-w")


def read_own(path: Path) -> bytes:
    """The content of a file that nobody else could have written. Raises OSError."""
    # Does not wait for who writes to a pipe.
    with open(path, "rb", opener=lambda name, flags: open_above_streams(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        require_own(status)
        return file.read()
