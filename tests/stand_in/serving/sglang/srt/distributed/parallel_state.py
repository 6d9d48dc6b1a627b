"""The calls of a group on CPUs: torch.distributed, or shared memory of SGLang's own where all ranks share a host."""

import torch


def is_shm_available(dtype, world_size, local_size):
    return world_size == local_size


class GroupCoordinator:
    def all_reduce(self, input_):
        if self.world_size == 1:
            return input_
        if is_shm_available(input_.dtype, self.world_size, self.local_size):
            raise AssertionError("SGLang's shared memory is used")
        torch.distributed.all_reduce(input_, group=self.device_group)
        return input_
