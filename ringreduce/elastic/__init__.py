"""Training that goes on when ranks die, and that lets fresh processes join. docs/elastic.md has the promises.

    world = elastic.start(least=2)            # instead of init_process_group
    model = DDP(net, init_sync=False)
    state = world.state(model=model, optimizer=optimizer, step=0)    # what a joiner receives
    while state.step < 10_000:
        loss = world.attempt(backward)        # returns on all members, or runs it again on all
        optimizer.step()
        state.step += 1
    world.leave()

`backward` may run again with other ranks. So it must not change `state`, and its data must depend only on `world.rank`,
`world.size` and `state.step`.
"""

from ringreduce.elastic.lateness import Late as Late
from ringreduce.elastic.starting import Over as Over
from ringreduce.elastic.starting import start as start
from ringreduce.elastic.state import State as State
from ringreduce.elastic.world import World as World
