"""Files: small ones of the kernel, this user's own that are kept between runs, and such as are replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


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
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:  # not for a pipe
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        require_own(status)
        return file.read()


def replace_file(path: Path, content: bytes, replace: bool = True) -> None:
    """Writes the file as a whole; without `replace`, one that is there already stays. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
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
