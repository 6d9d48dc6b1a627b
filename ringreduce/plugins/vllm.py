"""The collectives of vLLM's groups on CPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from ringreduce import ops
from ringreduce.groups.lookup import backend_of


class Communicator(CpuCommunicator):  # type: ignore[misc]
    """vLLM's own, over ringreduce, also where vLLM has shared memory of its own. Its calls may be compiled."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        backend_of(self.device_group)
        self.dist_module = _Calls(self.device_group.group_name)

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        """False: then vLLM's constructor does not set up its shared memory."""
        return False


class _Calls:
    """torch.distributed as `CpuCommunicator` calls it, for one group."""

    def __init__(self, name: str) -> None:
        self.name = name

    def all_reduce(self, input: torch.Tensor, group: dist.ProcessGroup) -> None:
        ops.all_reduce_(input, self.name)

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
        ops.all_gather_into(output, input, self.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)
