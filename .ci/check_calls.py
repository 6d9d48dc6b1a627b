"""Finds calls that lack something which every such call must have: `make lint`.

**Descriptors** may not be numbered 0, 1 or 2. What makes or receives one must stand inside a call of above_streams or
make_above_streams (in Python, see ringreduce/common/descriptors.py; in C++, core/descriptors.h), or be replaced by one
of the functions beside these. Exempt are commands (ringreduce/cli), which begin by opening the standard streams that
are closed; csrc/stress; and what is open for a moment only, as files are that are read in a `with`.

**Tensors** that the package makes for itself must say on which device, since a program may call
`torch.set_default_device("cuda")`.

    python .ci/check_calls.py [FOLDER]    # which has ringreduce and csrc; prints file:line of each, exit code 1
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

MAKE_TENSORS = {f"torch.{function.__name__}" for function in _device_constructors()}
HELPERS = {"above_streams", "make_above_streams"}
MAKERS = {
    "asyncio": "run new_event_loop",
    "http.client": "HTTPConnection HTTPSConnection",
    "mmap": "mmap",
    "os": "dup eventfd memfd_create open openpty pidfd_open pipe pipe2 posix_openpt timerfd_create",
    "select": "epoll",
    "selectors": "DefaultSelector EpollSelector",
    "socket": "create_connection create_server fromfd recv_fds socket socketpair",
}
MADE_BY_MODULE = {f"{module}.{name}" for module, names in MAKERS.items() for name in names.split()}
METHODS = {"accept", "create_connection", "create_server", "dup", "recvmsg", "sock_accept"}
RECEIVES = "network/local.py"
"""Whose function `receive` is to be called instead of recvmsg."""

CPP_MAKERS = (
    r"(?:accept4?|creat|dup|epoll_create1?|eventfd|inotify_init1?|memfd_create|mkostemp|mkstemp|pidfd_open|shm_open"
    r"|signalfd|timerfd_create|userfaultfd|(?<=::)open(?:at)?|socket(?=\(\s*(?:AF|PF)_)|open(?:at)?(?=\([^;]*\bO_[A-Z]+)"
    r"|fcntl(?=\([^;]*\bF_DUPFD)|syscall(?=\(\s*SYS_(?:memfd_create|pidfd_open|openat)))\s*\("
)
CPP = re.compile(
    rf"(?<!above_streams\()(?<!above_streams\(static_cast<int>\()(?<!Arena::)\b{CPP_MAKERS}"
    r"|\b(?:socketpair|pipe2?)\s*\((?![^;]*\babove_streams\()"  # pairs are moved after that
    r"|\brecvmsg\s*\((?![\s\S]{,1200}\babove_streams\()"  # and so is what a message brings
)
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*[\s\S]*?\*/|"(?:\\.|[^"\\\n])*"')


def tensors(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the name of each maker of a tensor that is not told the device."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if (name := ast.unparse(call.func)) in MAKE_TENSORS and all(each.arg != "device" for each in call.keywords):
            yield call.lineno, name


def descriptors(tree: ast.Module, methods: set[str]) -> Iterator[tuple[int, str]]:
    """The line and the name of each maker of a descriptor that is used outside of the helpers."""
    inside: set[int] = set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        # `map(above_streams, pair)` is a call of the helper, too.
        if {ast.unparse(each) for each in (call.func, *call.args[:1])} & HELPERS:
            inside.update(map(id, ast.walk(call)))
        passed = [] if ast.unparse(call.func) in {"isinstance", "TypeVar"} else call.args  # what is passed on is called
        for used in (call.func, *passed):
            if isinstance(used, ast.Attribute) and id(used) not in inside and not _adopts(call):
                name = ast.unparse(used)
                if name in MADE_BY_MODULE or (used is call.func and used.attr in methods):
                    yield used.lineno, name
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)):
        for name in (f"{node.module}.{alias.name}" for alias in node.names):
            if name in MADE_BY_MODULE:
                yield node.lineno, f"{name}, imported without its module"


def _adopts(call: ast.Call) -> bool:
    """Whether it makes no descriptor: `socket.socket(fileno=fd)`, `mmap.mmap(-1, size)`."""
    if any(keyword.arg == "fileno" for keyword in call.keywords):
        return True
    return ast.unparse(call).startswith("mmap.mmap(-1,")


def in_cpp(path: Path) -> Iterator[tuple[int, str]]:
    text = COMMENT_OR_STRING.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), path.read_text())
    for found in CPP.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found[0].strip(" (")


def check(folder: Path) -> list[str]:
    """What is wrong in the folder, one line each."""
    numbers = "may make a descriptor 0, 1 or 2; pass it through above_streams"
    found = []
    for path in sorted((folder / "ringreduce").rglob("*.py")):
        tree = ast.parse(path.read_text())
        found += [(path, *each, "needs device=, whatever torch's default device is") for each in tensors(tree)]
        if path.relative_to(folder).parts[1] != "cli":
            methods = METHODS - {"recvmsg"} if path.as_posix().endswith(RECEIVES) else METHODS
            found += [(path, *each, numbers) for each in descriptors(tree, methods)]
    for path in sorted((folder / "csrc").rglob("*.*")):
        exempt = path.name == "descriptors.cpp" or path.relative_to(folder).parts[1] == "stress"
        if path.is_file() and not exempt:
            found += [(path, *each, numbers) for each in in_cpp(path)]
    return [f"{path.relative_to(folder)}:{line}: {name} {what}" for path, line, name, what in found]


if __name__ == "__main__":
    wrong = check(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    print("\n".join(wrong) or "descriptors: all are 3 or higher; tensors: all are told where")
    sys.exit(bool(wrong))
