"""The names of the package for type checkers; `_NAMES_OF` in `__init__.py` has the same.

The calls of `api` that may be asynchronous are here, since what they return depends on `async_op`.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, overload

from torch.distributed import (
    Work,
    all_gather_object as all_gather_object,
    batch_isend_irecv as batch_isend_irecv,
    broadcast_object_list as broadcast_object_list,
    gather_object as gather_object,
    recv_object_list as recv_object_list,
    scatter_object_list as scatter_object_list,
    send_object_list as send_object_list,
)

from ringreduce import (
    data as data,
    elastic as elastic,
    errors as errors,
    hooks as hooks,
    ops as ops,
    parameter_server as parameter_server,
)
from ringreduce._C import Feedback as Feedback
from ringreduce.api import (
    P2POp as P2POp,
    Rank,
    ReduceOp,
    irecv as irecv,
    isend as isend,
    monitored_barrier as monitored_barrier,
    recv as recv,
    register_plan as register_plan,
    send as send,
    use_nccl as use_nccl,
)
from ringreduce.config import Options as Options
from ringreduce.groups.arena import arena_stats as arena_stats, share_allocations as share_allocations
from ringreduce.groups.as_gloo import as_gloo as as_gloo
from ringreduce.groups.calling import Array, Group
from ringreduce.groups.stats import dump_flight_record as dump_flight_record, stats as stats, topology_of as topology_of
from ringreduce.groups.survivors import Agreement as Agreement, agree as agree
from ringreduce.groups.tensors import (
    empty as empty,
    empty_like as empty_like,
    share as share,
    zeros as zeros,
)
from ringreduce.operators import Op as Op, exscan as exscan, scan as scan
from ringreduce.plan import Plan as Plan, Step as Step, verify as verify
from ringreduce.topology import topology as topology

__version__: str
__all__: list[str]

@overload
def all_reduce(
    tensor: Array,
    op: ReduceOp = ...,
    group: Group = ...,
    *,
    async_op: Literal[True],
    out: Array | None = ...,
    wire_dtype: str | None = ...,
    feedback: Feedback | None = ...,
) -> Work: ...
@overload
def all_reduce(
    tensor: Array,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: bool = ...,
    out: Array | None = ...,
    wire_dtype: str | None = ...,
    feedback: Feedback | None = ...,
) -> Work | None: ...
@overload
def all_reduce_coalesced(
    tensors: Sequence[Array], op: ReduceOp = ..., group: Group = ..., *, async_op: Literal[True]
) -> Work: ...
@overload
def all_reduce_coalesced(
    tensors: Sequence[Array], op: ReduceOp = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
@overload
def broadcast(
    tensor: Array, src: Rank = ..., group: Group = ..., *, async_op: Literal[True], group_src: Rank = ...
) -> Work: ...
@overload
def broadcast(
    tensor: Array, src: Rank = ..., group: Group = ..., async_op: bool = ..., group_src: Rank = ...
) -> Work | None: ...
@overload
def reduce(
    tensor: Array,
    dst: Rank = ...,
    op: ReduceOp = ...,
    group: Group = ...,
    *,
    async_op: Literal[True],
    group_dst: Rank = ...,
    out: Array | None = ...,
) -> Work: ...
@overload
def reduce(
    tensor: Array,
    dst: Rank = ...,
    op: ReduceOp = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: Rank = ...,
    out: Array | None = ...,
) -> Work | None: ...
@overload
def all_gather(tensor_list: Sequence[Array], tensor: Array, group: Group = ..., *, async_op: Literal[True]) -> Work: ...
@overload
def all_gather(
    tensor_list: Sequence[Array], tensor: Array, group: Group = ..., async_op: bool = ...
) -> Work | None: ...
@overload
def all_gather_single(
    output_tensor: Array, input_tensor: Array, group: Group = ..., *, async_op: Literal[True]
) -> Work: ...
@overload
def all_gather_single(
    output_tensor: Array, input_tensor: Array, group: Group = ..., async_op: bool = ...
) -> Work | None: ...
@overload
def reduce_scatter(
    output: Array, input_list: Sequence[Array], op: ReduceOp = ..., group: Group = ..., *, async_op: Literal[True]
) -> Work: ...
@overload
def reduce_scatter(
    output: Array, input_list: Sequence[Array], op: ReduceOp = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
@overload
def reduce_scatter_single(
    output: Array, input: Array, op: ReduceOp = ..., group: Group = ..., *, async_op: Literal[True]
) -> Work: ...
@overload
def reduce_scatter_single(
    output: Array, input: Array, op: ReduceOp = ..., group: Group = ..., async_op: bool = ...
) -> Work | None: ...
@overload
def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = ...,
    dst: Rank = ...,
    group: Group = ...,
    *,
    async_op: Literal[True],
    group_dst: Rank = ...,
) -> Work: ...
@overload
def gather(
    tensor: Array,
    gather_list: Sequence[Array] | None = ...,
    dst: Rank = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_dst: Rank = ...,
) -> Work | None: ...
@overload
def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = ...,
    src: Rank = ...,
    group: Group = ...,
    *,
    async_op: Literal[True],
    group_src: Rank = ...,
) -> Work: ...
@overload
def scatter(
    tensor: Array,
    scatter_list: Sequence[Array] | None = ...,
    src: Rank = ...,
    group: Group = ...,
    async_op: bool = ...,
    group_src: Rank = ...,
) -> Work | None: ...
@overload
def all_to_all(
    output_tensor_list: Sequence[Array],
    input_tensor_list: Sequence[Array],
    group: Group = ...,
    *,
    async_op: Literal[True],
) -> Work: ...
@overload
def all_to_all(
    output_tensor_list: Sequence[Array], input_tensor_list: Sequence[Array], group: Group = ..., async_op: bool = ...
) -> Work | None: ...
@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    *,
    async_op: Literal[True],
) -> Work: ...
@overload
def all_to_all_single(
    output: Array,
    input: Array,
    output_split_sizes: Sequence[int] | None = ...,
    input_split_sizes: Sequence[int] | None = ...,
    group: Group = ...,
    async_op: bool = ...,
) -> Work | None: ...
@overload
def barrier(
    group: Group = ...,
    *,
    async_op: Literal[True],
    device_ids: Sequence[int] | None = ...,
    timeout: timedelta | float | None = ...,
) -> Work: ...
@overload
def barrier(
    group: Group = ...,
    async_op: bool = ...,
    device_ids: Sequence[int] | None = ...,
    timeout: timedelta | float | None = ...,
) -> Work | None: ...

all_gather_into_tensor = all_gather_single
reduce_scatter_tensor = reduce_scatter_single
