"""CuPy's arrays in collectives, without a copy: torchrun --nproc-per-node 2 examples/cupy_arrays.py

Needs a GPU and `pip install nvidia-ml-py cupy-cuda13x`. Arrays may lie on any CuPy stream: a call waits for what that
stream is doing with them, and what the stream does next waits for the call.
"""

import os
import sys

try:
    import cupy
except ModuleNotFoundError:
    sys.exit("this example needs a GPU and CuPy: pip install 'cupy-cuda13x' (-cuda12x for drivers of CUDA 12)")
import torch
import torch.distributed as dist

import ringreduce

COUNT = 1_000_000


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(device)  # for ringreduce
    cupy.cuda.Device(device).use()
    dist.init_process_group("ringreduce")

    with cupy.cuda.Stream(non_blocking=True):
        gradients = cupy.full(COUNT, rank + 1, dtype=cupy.float32)
        ringreduce.all_reduce(gradients)  # in place
        means = cupy.empty(ranks, dtype=cupy.float32)
        ringreduce.all_gather_into_tensor(means, gradients.mean(keepdims=True))
        expected = ranks * (ranks + 1) / 2
        assert means.get().tolist() == [expected] * ranks
    if rank == 0:
        print(f"{ranks} ranks summed {COUNT:,} elements of a {type(gradients).__module__} array: each is {expected:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
