"""The names of the package for type checkers; `_NAMES_OF` in `__init__.py` has the same."""

from torch.distributed import (
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
    all_gather as all_gather,
    all_gather_into_tensor as all_gather_into_tensor,
    all_gather_single as all_gather_single,
    all_reduce as all_reduce,
    all_reduce_coalesced as all_reduce_coalesced,
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    barrier as barrier,
    broadcast as broadcast,
    gather as gather,
    irecv as irecv,
    isend as isend,
    monitored_barrier as monitored_barrier,
    recv as recv,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    reduce_scatter_single as reduce_scatter_single,
    reduce_scatter_tensor as reduce_scatter_tensor,
    register_plan as register_plan,
    scatter as scatter,
    send as send,
    use_nccl as use_nccl,
)
from ringreduce.config import Options as Options
from ringreduce.groups.arena import arena_stats as arena_stats, share_allocations as share_allocations
from ringreduce.groups.as_gloo import as_gloo as as_gloo
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
