"""The names of the package. `__init__.py` reads this file to know which module has each."""

from ringreduce.api import (
    P2POp as P2POp,
)
from ringreduce.api import (
    all_gather as all_gather,
)
from ringreduce.api import (
    all_gather_into_tensor as all_gather_into_tensor,
)
from ringreduce.api import (
    all_gather_object as all_gather_object,
)
from ringreduce.api import (
    all_gather_single as all_gather_single,
)
from ringreduce.api import (
    all_reduce as all_reduce,
)
from ringreduce.api import (
    all_reduce_coalesced as all_reduce_coalesced,
)
from ringreduce.api import (
    all_to_all as all_to_all,
)
from ringreduce.api import (
    all_to_all_single as all_to_all_single,
)
from ringreduce.api import (
    barrier as barrier,
)
from ringreduce.api import (
    batch_isend_irecv as batch_isend_irecv,
)
from ringreduce.api import (
    broadcast as broadcast,
)
from ringreduce.api import (
    broadcast_object_list as broadcast_object_list,
)
from ringreduce.api import (
    empty as empty,
)
from ringreduce.api import (
    empty_like as empty_like,
)
from ringreduce.api import (
    gather as gather,
)
from ringreduce.api import (
    gather_object as gather_object,
)
from ringreduce.api import (
    irecv as irecv,
)
from ringreduce.api import (
    isend as isend,
)
from ringreduce.api import (
    monitored_barrier as monitored_barrier,
)
from ringreduce.api import (
    recv as recv,
)
from ringreduce.api import (
    recv_object_list as recv_object_list,
)
from ringreduce.api import (
    reduce as reduce,
)
from ringreduce.api import (
    reduce_scatter as reduce_scatter,
)
from ringreduce.api import (
    reduce_scatter_single as reduce_scatter_single,
)
from ringreduce.api import (
    reduce_scatter_tensor as reduce_scatter_tensor,
)
from ringreduce.api import (
    register_plan as register_plan,
)
from ringreduce.api import (
    scatter as scatter,
)
from ringreduce.api import (
    scatter_object_list as scatter_object_list,
)
from ringreduce.api import (
    send as send,
)
from ringreduce.api import (
    send_object_list as send_object_list,
)
from ringreduce.api import (
    share as share,
)
from ringreduce.api import (
    use_nccl as use_nccl,
)
from ringreduce.api import (
    zeros as zeros,
)
from ringreduce.config import Options as Options
from ringreduce.plan import Plan as Plan
from ringreduce.plan import Step as Step
from ringreduce.plan import verify as verify
from ringreduce.report import dump_flight_record as dump_flight_record
from ringreduce.report import stats as stats
from ringreduce.report import topology_of as topology_of
from ringreduce.topology import topology as topology

__version__: str
__all__: list[str]
