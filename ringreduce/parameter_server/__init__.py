"""A parameter server: named tensors on several servers, which workers push to and pull from.

    import ringreduce.parameter_server as ps
    kv = ps.join()                     # under torchrun every rank is a worker and a server
    kv.init("w", w, update=ps.optimizer(torch.optim.SGD, lr=0.1), mode=ps.sync())
    kv.push_pull("w", w.grad, out=w).wait()
    kv.leave()

docs/parameter_server.md says when to use it. Synchronous training of dense models is faster with all_reduce.
"""

from ringreduce.parameter_server.client.embedding import Embedding, EmbeddingBag
from ringreduce.parameter_server.client.key_value import KeyValue
from ringreduce.parameter_server.client.pending import Pending
from ringreduce.parameter_server.client.readers import Follower
from ringreduce.parameter_server.client.restoring import Snapshot
from ringreduce.parameter_server.client.training import Attached, attach
from ringreduce.parameter_server.join import join, serve
from ringreduce.parameter_server.modes import Mode, asynchronous, ssp, sync
from ringreduce.parameter_server.server.serving import Serving
from ringreduce.parameter_server.server.updates import Info, Push
from ringreduce.parameter_server.updates import UpdateRule, assign, function, optimizer, reduce, rowwise_adagrad

__all__ = [
    "Attached",
    "Embedding",
    "EmbeddingBag",
    "Follower",
    "Info",
    "KeyValue",
    "Mode",
    "Pending",
    "Push",
    "Serving",
    "Snapshot",
    "UpdateRule",
    "assign",
    "asynchronous",
    "attach",
    "function",
    "join",
    "optimizer",
    "reduce",
    "rowwise_adagrad",
    "serve",
    "ssp",
    "sync",
]
