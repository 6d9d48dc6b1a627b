"""What a group runs for which size on this machine: from a probe and the cost model, or measured by `ringreduce tune`.

`machine` looks at the machine, `record` keeps what is known of it in a file, `decision` turns that into rules, and
`measure` refines them.
"""

from ringreduce.tuning.decision import (
    current,
    decide,
    fetches,
    keep,
    measured_memory,
    memory_gbps,
    most_fetch,
    renew,
    rules_for,
    spread,
    yields,
)
from ringreduce.tuning.machine import Identity, identify
from ringreduce.tuning.record import Cell, Measured, Tuning
