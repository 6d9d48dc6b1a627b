"""torchft's own tests for process groups, of the version that is installed, with ringreduce's group.

python tests/frameworks/torchft_suite.py            prints each test and how it ended

These of its tests run: every collective on 3 ranks; what happens when one of them leaves
(`test_collective_with_resiliency`);
all calls on one rank; its wrappers. Those for its Gloo group leave out alltoall_base, reduce_scatter and
reduce_scatter_tensor_coalesced, which that group cannot do. Here nothing is left out.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from parameterized import parameterized
from torchft import process_group_test as theirs
from torchft.process_group import ErrorSwallowingProcessGroupWrapper, ManagedProcessGroup

from ringreduce.torchft import ProcessGroupRingReduce

OURS = r"rank \d+ \(.*\) left the group"
"""How ringreduce says that a rank left; torchft's list of accepted errors has the words of Gloo and NCCL."""


class OnThreeRanks(theirs.MultiPgBaseTest):  # type: ignore[misc]
    BACKEND = "ringreduce"
    WORLD_SIZE = 3

    @classmethod
    def _create_pg(cls, backend: str) -> ProcessGroupRingReduce:
        return ProcessGroupRingReduce(timeout=timedelta(seconds=10))

    def assertRaisesRegex(self, kind: Any, pattern: str, *rest: Any, **named: Any) -> Any:
        # A broadcast and messages between others end well without the rank that left: torchft's words for that.
        known = pattern if "aborted" in pattern else f"{OURS}|^no error$|process group not initialized"
        return super().assertRaisesRegex(kind, known, *rest, **named)

    @parameterized.expand(theirs._ALL_COLLECTIVES)  # type: ignore[untyped-decorator]
    def test_collective(self, collective: str) -> None:
        self._run_parallel(collective)

    @parameterized.expand(theirs._ALL_COLLECTIVES)  # type: ignore[untyped-decorator]
    def test_collective_with_resiliency(self, collective: str) -> None:
        self._run_with_resiliency(collective)


class OnOneRank(unittest.TestCase):
    def configured(self, prefix: str) -> ProcessGroupRingReduce:
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        group = ProcessGroupRingReduce()
        group.configure(f"localhost:{self.store.port}/{prefix}", "0", 0, 1)
        return group

    def test_apis(self) -> None:
        """As test_gloo_apis, without anything left out."""
        self.assertIsNone(ProcessGroupRingReduce().errored())
        group = self.configured("apis")
        self.assertEqual(group.size(), 1)
        self.assertEqual(group.getBackendName(), "torchft-ringreduce")
        done = theirs._test_pg(group)
        self.assertIn("reduce_scatter", done)
        self.assertIn("reduce_scatter_tensor_coalesced", done)
        group.configure(f"localhost:{self.store.port}/again", "0", 0, 1)  # a quorum that changed
        theirs._test_pg(group)
        self.assertIsNone(group.errored())
        group.abort()
        self.assertIsNone(group.errored())

    def test_timeout(self) -> None:
        """As test_gloo_timeout: the other replica never comes."""
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        group = ProcessGroupRingReduce(timeout=timedelta(seconds=0.01))
        with self.assertRaisesRegex(RuntimeError, "did not come in time"):
            group.configure(f"localhost:{store.port}/prefix", "0", 0, 2)

    def test_error_swallowing_process_group_wrapper(self) -> None:
        wrapper = ErrorSwallowingProcessGroupWrapper(self.configured("swallowing"))
        self.assertEqual(wrapper.size(), 1)
        theirs._test_pg(wrapper)
        error = RuntimeError("injected")
        wrapper.report_error(error)
        self.assertEqual(wrapper.error(), error)

    def test_managed_process_group(self) -> None:
        manager = theirs.Mock(spec=theirs.Manager)
        manager.num_participants.return_value = 123
        manager.errored.return_value = None
        manager._pg = self.configured("managed")
        manager.allreduce = lambda tensor, *_, **__: manager._pg.allreduce([tensor], dist.AllreduceOptions())
        group = ManagedProcessGroup(manager)
        self.assertEqual(group.size(), 123)
        tensor = torch.ones(3)
        group.allreduce([tensor], dist.AllreduceOptions()).wait()
        self.assertTrue(torch.equal(tensor, torch.ones(3)))


def main() -> int:
    load: Callable[[Any], unittest.TestSuite] = unittest.defaultTestLoader.loadTestsFromTestCase
    suite = unittest.TestSuite([load(OnThreeRanks), load(OnOneRank)])
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
