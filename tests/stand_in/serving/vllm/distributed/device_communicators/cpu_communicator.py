"""The communicator of CPUs: torch.distributed, or shared memory of vLLM's own where all ranks share a host."""

import torch
import torch.distributed as dist


class CpuCommunicator:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name="", use_all2all=False):
        self.cpu_group, self.device_group, self.unique_name = cpu_group, device_group, unique_name
        self.world_size, self.rank_in_group = dist.get_world_size(cpu_group), dist.get_rank(cpu_group)
        self.ranks = dist.get_process_group_ranks(cpu_group)
        self.dist_module = dist
        if unique_name.startswith(("tp", "pp")) and self._all_group_ranks_share_shm_group_name():
            raise AssertionError("vLLM's shared memory is set up")

    def _all_group_ranks_share_shm_group_name(self):
        return True

    def all_reduce(self, input_):
        self.dist_module.all_reduce(input_, group=self.device_group)
        return input_

    def gather(self, input_, dst=0, dim=-1):
        parts = [torch.empty_like(input_) for _ in self.ranks] if self.rank_in_group == dst else None
        self.dist_module.gather(input_, parts, dst=self.ranks[dst], group=self.device_group)
        return None if parts is None else torch.cat(parts, dim=dim)

    def all_gather(self, input_, dim=-1):
        output = torch.empty((self.world_size * input_.shape[0], *input_.shape[1:]), dtype=input_.dtype)
        self.dist_module.all_gather_into_tensor(output, input_, group=self.device_group)
        return torch.cat(output.chunk(self.world_size), dim=dim)
