"""Pictures worth printing: a machine with its rings or trees, what each link carries, time over size and over ranks.
And a page that plays a plan.

The pictures are A4 landscape and readable in print, for the colour-blind too.  The ending of the file's name says the
format: png, pdf or svg.  matplotlib is loaded at the first picture, and draws without a display.
"""

from ringreduce.topology.draw.curves import time_over_ranks, time_over_size
from ringreduce.topology.draw.loads import loads
from ringreduce.topology.draw.machine import machine
from ringreduce.topology.draw.page import page

__all__ = ["loads", "machine", "page", "time_over_ranks", "time_over_size"]
