"""One plan, as JSON, gives the same bits on CUDA tensors and on the CPU, which has those of the other engines."""

from __future__ import annotations

import pytest
from bodies.same_bits import PLANS, bits, in_shared_memory
from distributed.cuda_ranks import MODES, options, run
from distributed.harness import Rank


def by_both(me: Rank, mode: str, text: str) -> tuple[list[bytes], list[bytes]]:
    cuda = options(mode, channels=8, gpu_bytes=2 * 1024**2, gpu_blocks=16)
    return bits(me, "cuda", cuda, text, "cuda"), in_shared_memory(me, text)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_gives_the_same_bits_on_a_gpu(name: str, mode: str) -> None:
    for rank, (by_gpu, by_cpu) in enumerate(run(by_both, PLANS[name].size, mode, PLANS[name].to_json())):
        assert len(by_gpu) == 60
        assert by_gpu == by_cpu, f"rank {rank}"
