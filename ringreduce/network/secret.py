"""The secret by which the ranks of a group know each other."""

from __future__ import annotations

import hmac
import os
import stat

from ringreduce.common.failures import InvalidArgument

VARIABLE = "RINGREDUCE_SECRET_FILE"
LEAST_BYTES = 16


def group_secret(of_store: bytes, file: str = "") -> bytes:
    """32 bytes from the group's secret in the store and, if a file is given, from what it holds.

    With a file, whoever can read the store still cannot join. Raises `InvalidArgument` if the file cannot be read, or
    can be by other users, or holds less than `LEAST_BYTES` bytes; spaces and line ends around its content do not count.
    """
    return hmac.digest(_content(file) if file else b"", b"ringreduce group secret 1" + of_store, "sha256")


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or status.st_uid not in (0, os.geteuid()):
                raise InvalidArgument(
                    f"{VARIABLE}={path!r} belongs to user {status.st_uid} with mode "
                    f"{stat.S_IMODE(status.st_mode):03o}: others can read or change it; make it this user's, with "
                    f"'chmod 600 {path}', and change what it holds"
                )
            content = file.read().strip()
    except OSError as error:
        raise InvalidArgument(f"{VARIABLE}={path!r}: {error.strerror}") from None
    if len(content) < LEAST_BYTES:
        raise InvalidArgument(
            f"{VARIABLE}={path!r} holds {len(content)} bytes; {LEAST_BYTES} or more are needed, such as those of "
            "'openssl rand -hex 32'"
        )
    return content
