"""Ring attention: a sequence cut over the ranks, keys and values passed around, against attention in one process.

torch's `context_parallel` itself cannot be used on CPUs, with Gloo neither: "Operator
aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered" (torch 2.13).
So this calls the ring under it, forward and backward, with the CPU's attention kernels.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed.harness import Rank, on_ranks
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SEQUENCE = 2  # the dimension
LENGTH = 12


def tensors() -> list[Tensor]:
    """Query, key, value, and the gradient of the output: batch, heads, sequence, features."""
    torch.manual_seed(0)
    return [torch.randn(1, 2, LENGTH, 8, dtype=torch.float64) for _ in range(4)]


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("rotation", ("alltoall", "allgather"))
@on_ranks(2, 3)
def test_ring_attention(me: Rank, rotation: str, causal: bool) -> None:
    _attention.set_rotate_method(rotation)
    _attention._cp_options.enable_load_balance = False
    _attention._cp_options.convert_to_f32 = False
    with me.join():
        group = dist.group.WORLD
        query, key, value, gradient = (t.chunk(me.size, SEQUENCE)[me.rank].contiguous() for t in tensors())
        output, normalizer = _attention._templated_ring_attention(
            group, SEQUENCE, ATTENTION, query, key, value, is_causal=causal
        )
        gradients = _attention._templated_ring_attention_backward(
            group,
            SEQUENCE,
            BACKWARD.default,
            gradient,
            "grad_out",
            query,
            key,
            value,
            output,
            normalizer,
            causal,
            dropout_p=0.0,
        )

    *inputs, gradient = tensors()
    for tensor in inputs:
        tensor.requires_grad_()
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
    expected.backward(gradient)
    for actual, whole in zip((output, *gradients), (expected, *(t.grad for t in inputs)), strict=True):
        torch.testing.assert_close(actual, whole.chunk(me.size, SEQUENCE)[me.rank], rtol=0, atol=1e-12)
