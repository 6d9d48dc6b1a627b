"""What `make lint` says of descriptors: none may be numbered 0, 1 or 2, and one that might be would be noticed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("check_calls", ROOT / ".ci" / "check_calls.py")
assert SPEC is not None and SPEC.loader is not None
CHECKER = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(CHECKER)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fd = os.memfd_create('x', os.MFD_CLOEXEC)", "os.memfd_create"),
        ("with socket.socket() as s:\n    above_streams(s)", "socket.socket"),
        ("a, b = map(os.dup, fds)", "os.dup"),
        ("c, _ = self.listener.accept()", "self.listener.accept"),
        ("m = mmap.mmap(above_streams(fd), size)", "mmap.mmap"),
        ("message = connection.recvmsg(1)", "connection.recvmsg"),
        ("from socket import socketpair", "socket.socketpair, imported without its module"),
        ("fd = above_streams(os.memfd_create('x', os.MFD_CLOEXEC))", None),
        ("a, b = map(above_streams, socket.socketpair())", None),
        ("c = above_streams((await loop.sock_accept(listener))[0])", None),
        ("m = make_above_streams(lambda: mmap.mmap(fd, size))", None),
        ("with make_above_streams(selectors.DefaultSelector) as s:\n    s.select()", None),
        (
            "s: socket.socket = socket.socket(fileno=fd)\nm = mmap.mmap(-1, 8)\nassert isinstance(s, socket.socket)",
            None,
        ),
    ],
)
def test_python(text: str, name: str | None, tmp_path: Path) -> None:
    file = tmp_path / "ringreduce" / "one.py"
    file.parent.mkdir()
    file.write_text("async def f():\n" + "".join(f"    {line}\n" for line in text.splitlines()))
    if name is not None:
        name = f"ringreduce/one.py:2: {name} may make a descriptor 0, 1 or 2; pass it through above_streams"
    assert CHECKER.check(tmp_path) == ([] if name is None else [name])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('fd_ = memfd_create("x", 0);', "memfd_create"),
        (": poll_(above_streams(epoll_create1(0))), waker_(eventfd(0, 0)) {", "eventfd"),
        ("FileDescriptor s(::socket(AF_UNIX, kind, 0));", "socket"),
        ("const int fd = open(path, O_RDONLY | O_CLOEXEC);", "open"),
        ("FileDescriptor fd(fcntl(other, F_DUPFD_CLOEXEC, 0));", "fcntl"),
        ("const int fd = syscall(SYS_pidfd_open, pid, 0);", "syscall"),
        ("if (pipe2(pipe, O_CLOEXEC) != 0) return; above_streams(pipe);", "pipe2"),
        ("recvmsg(socket, &message, 0);", "recvmsg"),
        ('fd_ = above_streams(memfd_create("x", 0));', None),
        ("int fd = above_streams(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));", None),
        ("if (pipe2(pipe, O_CLOEXEC) != 0 || !above_streams(pipe)) return;", None),
        ("if (recvmsg(socket, &message, 0) > 0) fd = above_streams(of(message));", None),
        ('links.open(group, socket()); // dup(fd)\nfail("socket(AF_UNIX)"); fcntl(fd, F_SETFL, 0);', None),
    ],
)
def test_cpp(text: str, name: str | None, tmp_path: Path) -> None:
    file = tmp_path / "csrc" / "core" / "one.cpp"
    file.parent.mkdir(parents=True)
    file.write_text(f"// A file.\n{text}\n")
    if name is not None:
        name = f"csrc/core/one.cpp:2: {name} may make a descriptor 0, 1 or 2; pass it through above_streams"
    assert CHECKER.check(tmp_path) == ([] if name is None else [name])
