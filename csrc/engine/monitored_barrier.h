// A barrier that tells who did not come.
//
// It stands apart from the collectives and their order: it has state of its own in shared memory, moves no data, and
// its failure does not break the group, so that it can be used to find out why another call hangs.
#pragma once

#include "core/waiting.h"
#include "transport/team.h"

namespace ringreduce {

// Returns when every rank has called it as often as this one. Otherwise every rank that came throws timeout, naming the
// ranks that did not; one that comes later throws too, naming those that gave up on it. Throws peer_lost for a rank
// that died. `name_all`: whether the message puts all missing ranks first, or the first only (as Gloo words it).
// One call at a time.
void monitored_barrier(Team& team, const Patience& patience, Nanoseconds timeout, bool name_all);

}  // namespace ringreduce
