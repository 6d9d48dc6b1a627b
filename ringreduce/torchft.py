"""A process group for torchft's Manager, which decides which replicas are in. docs/elastic.md says how to use it.

    from ringreduce.torchft import ProcessGroupRingReduce

    manager = Manager(pg=ProcessGroupRingReduce(timeout=timedelta(seconds=30)), ...)

Needs the package torchft, which ringreduce does not install.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, Store, _DistributedBackendOptions
from torchft.process_group import ProcessGroupWrapper

from ringreduce.config import Options
from ringreduce.groups.make import create


class ProcessGroupRingReduce(ProcessGroupWrapper):  # type: ignore[misc]
    """A group over ringreduce, for CPU tensors and with all collectives.

    When a replica dies, the others get an error within milliseconds. torchft's Gloo group waits until connections
    close, or for a timeout.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), options: Options | None = None) -> None:
        """`timeout`: for making a group and for each call. `options`: as for `init_process_group`."""
        super().__init__(timeout)
        self._pg: Any
        self._options = options

    def getBackendName(self) -> str:
        return "torchft-ringreduce"

    def errored(self) -> Exception | None:
        """The error of a broken group; None if the group is in order. torchft calls it before a commit."""
        backend = self._backend()
        if backend is None or backend.get_error() == ErrorType.SUCCESS:
            return None
        return RuntimeError("the process group is broken or aborted; it can be configured again")

    def shutdown(self) -> None:
        """Leaves the group. The other replicas notice at once."""
        if self._pg is not None:
            self._pg.shutdown()
        self._pg = None

    def _backend(self) -> Any:
        return None if self._pg is None else self._pg._get_backend(torch.device("cpu"))

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        wanted = _DistributedBackendOptions()
        wanted.store, wanted.group_rank, wanted.group_size = store, rank, world_size
        wanted.group_id, wanted.timeout = f"torchft_quorum_{self._quorum_id}", self._timeout
        backend = create(wanted, self._options)
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        return group
