"""PyTorch's own suite, `DistributedTest._DistTestBase`, read for one backend and one world size.

torch's module decides as it is imported which tests apply: by `BACKEND`, `WORLD_SIZE` and lists of backends. It is
compiled here from the installed source with "gloo" and `dist.Backend.GLOO` meaning the backend under test, so that this
has to do all that Gloo has to do. So does "mpi", which guards all_to_all on CPU; Gloo passes half of these tests.
What torch hard-codes elsewhere is patched in `load`, and `left_out` has what is not taken as it stands.

torch starts an interpreter for every rank of every test. Here ranks are forked from the process that called `load`,
which has everything imported and no threads; all else (skips, exit codes, timeouts) is torch's.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.util
import inspect
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed as home
from left_out import ADAPTED
from torch.testing._internal.common_distributed import DistTestCases, MultiProcessTestCase

import ringreduce

AS_GLOO = "as_gloo"
NAME = f"{home.__name__}.distributed_test"
GRACE = 10.0
"""Seconds in which other ranks may end too, after one has failed or skipped."""


NAMES = re.compile(
    r"get_backend|Backend\b|init_process_group|new_(sub)?group|process_group|device_mesh|monitored_barrier"
)
"""What only tests use that ask for a backend by its name, or make groups."""


class Hung(Exception):
    """Ranks had not ended at the deadline."""


def load(backend: str, size: int) -> Any:
    """The suite as a test case; replaces the one that was loaded before. `backend`: "as_gloo" is "gloo" to the suite,
    with `ringreduce.as_gloo`."""
    ringreduce.as_gloo(backend == AS_GLOO)
    name = name_of(backend)
    os.environ.update(BACKEND=name, WORLD_SIZE=str(size), INIT_METHOD="file:///set/by/each/test")
    for backends in DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add(name)
    dist.monitored_barrier = _monitored_barrier(backend)
    spec = importlib.util.spec_from_loader(NAME, _Loader(backend))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module  # where pickle looks for its classes
    spec.loader.exec_module(module)
    return _test_case(module)


def depends_on_the_name(case: Any, test: str) -> bool:
    """Of the backend: whether the test sees another one if that is called "gloo". Profilers show the name."""
    body = inspect.getsource(getattr(case, test)).partition("def ")[2]  # decorators name what it is for
    return "profil" in test or bool(NAMES.search(body))


def name_of(backend: str) -> str:
    """What the suite calls a backend."""
    return "gloo" if backend == AS_GLOO else backend


def _monitored_barrier(backend: str) -> Any:
    """torch's function refuses all backends but Gloo by name."""
    if backend != "ringreduce":
        return dist.distributed_c10d.monitored_barrier
    return ringreduce.monitored_barrier


class _Loader(importlib.abc.SourceLoader):
    """Compiles torch's module for a backend; no bytecode is cached."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def get_filename(self, fullname: str) -> str:
        return os.path.join(home.__path__[0], "distributed_test.py")

    def get_data(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def source_to_code(self, data: Any, path: Any = "<string>") -> Any:  # type: ignore[override]
        return _compile(self.backend, data, path)


@functools.cache
def _compile(backend: str, source: bytes, path: str) -> Any:
    return compile(_Rename(backend).visit(ast.parse(source)), path, "exec", dont_inherit=True)


class _Rename(ast.NodeTransformer):
    """ "gloo", "mpi" and dist.Backend.GLOO become the backend's name; lines stay where they are."""

    def __init__(self, backend: str) -> None:
        self.name, self.adapts = name_of(backend), backend != "gloo"
        self.adapted: dict[str, str] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.adapts and node.name in ADAPTED:
            self.adapted = dict(ADAPTED[node.name])
            self.generic_visit(node)
            assert not self.adapted, f"{node.name} of this torch has no {list(self.adapted)}"
            return node
        return self.generic_visit(node)

    def visit(self, node: ast.AST) -> Any:
        if self.adapted and isinstance(node, ast.expr) and ast.unparse(node) in self.adapted:
            other = ast.parse(self.adapted.pop(ast.unparse(node)), mode="eval").body
            return ast.copy_location(other, node)
        return super().visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.copy_location(ast.Constant(self.name), node) if node.value in ("gloo", "mpi") else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "GLOO":
            return ast.copy_location(ast.Constant(self.name), node)
        return self.generic_visit(node)


def _test_case(module: Any) -> Any:
    base: Any = type("Base", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})

    class Suite(base):  # type: ignore[misc]
        deadline = 120.0  # seconds for all ranks of a test
        exit_codes: list[int]  # of the ranks, once they have ended

        def setUp(self) -> None:
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]  # a spawned rank would read it as it imports the module
            self.exit_codes = []
            self._start_processes(multiprocessing.get_context("fork").Process)

        def _test_all_reduce_helper(
            self, group: Any, group_id: Any, rank: int, op: Any, master: Any, worker: Any, expected: Any, **kwargs: Any
        ) -> None:
            """torch's is given what to expect, and does not look at it."""
            call: Any = super().call_dist_op

            def call_and_look(
                title: str, is_async: bool, function: Any, tensor: Any, *args: Any, **kwargs: Any
            ) -> None:
                call(title, is_async, function, tensor, *args, **kwargs)
                self.assertEqual(tensor, tensor.new_full(tensor.shape, expected))

            self.call_dist_op = call_and_look
            super()._test_all_reduce_helper(group, group_id, rank, op, master, worker, expected, **kwargs)

        def _join_processes(self, fn: Callable[..., Any]) -> None:
            start = time.monotonic()
            try:
                if not self._wait(start + self.deadline):
                    self._get_timedout_process_traceback()
                    waiting = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
                    raise Hung(f"ranks {waiting} had not ended after {self.deadline:.0f} s")
                self.exit_codes = [process.exitcode for process in self.processes]
                self._check_return_codes(fn, time.monotonic() - start)
            finally:
                for pipe in self.pid_to_pipe.values():
                    pipe.close()

        def _wait(self, deadline: float) -> bool:
            """Have all ranks ended by then? Stops those that outlive one that failed."""
            failed = False
            while running := [process for process in self.processes if process.exitcode is None]:
                if not failed and any(process.exitcode not in (None, 0) for process in self.processes):
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE)
                if time.monotonic() > deadline:
                    if not failed:
                        return False
                    for process in running:
                        process.kill()
                        process.join()
                connection.wait([process.sentinel for process in running], timeout=0.5)
            return True

        def _check_return_codes(self, fn: Callable[..., Any], elapsed_time: float) -> None:
            """torch looks at rank 0 only, unless a rank raised; here all ranks must have ended alike."""
            raised: dict[str, list[int]] = {}
            for rank, process in enumerate(self.processes):
                if process.exitcode == MultiProcessTestCase.TEST_ERROR_EXIT_CODE:
                    raised.setdefault(self.pid_to_pipe[process.pid].recv(), []).append(rank)
            if raised:
                raise RuntimeError("\n".join(f"ranks {ranks}:\n{text}" for text, ranks in raised.items()))
            if fn not in self.skip_return_code_checks:
                self.assertEqual(len(set(self.exit_codes)), 1, f"exit codes of the ranks: {self.exit_codes}")
            super()._check_return_codes(fn, elapsed_time)

    Suite.__name__ = Suite.__qualname__ = "DistributedTest"
    return Suite
