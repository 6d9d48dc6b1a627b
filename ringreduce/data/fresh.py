"""Servers that begin as new programs: libraries have their threads there, as they have in no forked process."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import socket
import sys
from multiprocessing import process, spawn
from typing import Any, NoReturn

import torch

from ringreduce.common.descriptors import above_streams, make_above_streams
from ringreduce.common.failures import InvalidArgument
from ringreduce.common.system import WANTS
from ringreduce.data.server import Recipe, Server

PR_SET_NAME = 15


def start_method(context: Any) -> str:
    """The name of a `multiprocessing_context` that a Loader was given."""
    method = getattr(context, "get_start_method", lambda: context)() or "fork"
    if method not in ("fork", "spawn"):
        raise InvalidArgument(f"Loader: multiprocessing_context is {context!r:.60}; give 'fork' or 'spawn'")
    if method == "spawn":
        prepared()  # so that a server which imports this program waits for no server
    return str(method)


def prepared() -> dict[str, Any]:
    """What `multiprocessing` tells a new process of this program. Raises `RuntimeError` in one that is just told it."""
    data: dict[str, Any] = spawn.get_preparation_data("data server")
    del data["authkey"]
    return data


def packed(recipe: Recipe) -> int:
    """A descriptor of memory that `serve` reads. Raises `InvalidArgument` if the recipe cannot be pickled."""
    fd = above_streams(os.memfd_create("ringreduce data recipe"))
    try:
        with open(fd, "wb", closefd=False) as file:
            pickle.dump((recipe.order, prepared()), file)
            pickle.dump((recipe.dataset, recipe.collate, recipe.seeded), file, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the dataset's own code raises
        os.close(fd)
        if isinstance(error, OSError) and error.errno in WANTS:
            raise
        raise InvalidArgument(
            f"Loader: dataset, collate or seeded cannot be pickled, as multiprocessing_context='spawn' needs: {error}; "
            "give what can be pickled, or multiprocessing_context='fork'"
        ) from error
    return fd


def become_server(number: int, recipe: int, listener: int, starter: int, current: int) -> NoReturn:
    """Makes this process a new program, which serves. All but `number` are descriptors."""
    for fd in (recipe, listener, starter, current):
        os.set_inheritable(fd, True)
    serves = f"fresh.serve({number}, {recipe}, {listener}, {starter}, {current})"
    program = f"import sys; sys.path[:] = {sys.path!r}; from ringreduce.data import fresh; {serves}"
    python = os.fsdecode(spawn.get_executable())
    os.execv(python, [python, "-c", program])


def serve(number: int, recipe: int, listener: int, starter: int, current: int) -> None:
    name_process(f"data server {number}")
    torch.set_num_threads(1)
    here: Any = process.current_process()
    with open(f"/proc/self/fd/{recipe}", "rb") as file:  # with a place of its own, unlike the descriptor
        order, program = pickle.load(file)
        here._inheriting = True  # so that the program, which is imported again, starts no servers itself
        try:
            spawn.prepare(program)
            dataset, collate, seeded = pickle.load(file)
        except BaseException as error:  # a program may exit
            dataset, collate, seeded = _Unreadable(error), None, False
        finally:
            del here._inheriting
    os.close(recipe)
    noted = memoryview(make_above_streams(lambda: mmap.mmap(current, 0))).cast("q")[number : number + 1]
    Server(Recipe(dataset, order, collate, seeded), socket.socket(fileno=listener), starter, noted).run()


def name_process(title: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, title.encode(), 0, 0, 0)


class _Unreadable:
    """In place of a dataset that could not be unpickled."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getitems__(self, ids: list[int]) -> Any:
        raise self._error
