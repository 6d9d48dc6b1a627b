"""Where the examples come from: their order, servers that prepare them, and exchange between epochs.

    order = data.Order(n=len(dataset), batch=256, seed=7)
    ids = order.ids(step, rank, size)       # the same batch of 256 ids, however many ranks share it

docs/data.md says which of them to take.
"""

from ringreduce.data.exchange_rows import exchange as exchange
from ringreduce.data.loader import Loader as Loader
from ringreduce.data.order import Order as Order
from ringreduce.data.sampler import Sampler as Sampler
