// The calls that the ranks of a team know of each other, and the errors for ranks whose calls differ.
//
// A call's fingerprint covers all calls before it (call.h), so the latest call that two ranks have both made says
// whether their whole histories are equal. A rank that only sends in a call, as a root does, waits for nobody and may
// learn only later that a peer made another call: at the next call or message in which it waits, or when it leaves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/call_header.h"
#include "core/error.h"
#include "engine/operator.h"
#include "transport/team.h"

namespace ringreduce {

// Writes the call to this rank's history, where peers look. `op`: the user's operator, if it has one.
void record(RankControl& own, const CallHeader& call, const Operator* op = nullptr);

// Whether two ranks are known to have made different calls.
bool differ(const RankControl& one, const RankControl& other);

// The error for a peer whose calls differ from this rank's. `what` is what this rank does: "all_reduce seq 7".
Error different_calls(const Team& team, int peer, const std::string& what);

// For a rank that has left: the error if a peer's calls are known to differ from its own, or if a peer has left after
// more or fewer calls. If two ranks share memory, or are linked, and differ, the one that leaves last finds out.
std::optional<Error> difference_at_the_end(const Team& team);

// The number of call `seq` of a rank for the user; `seq` if the call is not known.
std::uint64_t number_of_call(const RankControl& rank, std::uint64_t seq);

// "all_reduce(count=1024, dtype=float32, op=sum, plan=1f0c22d1)", as far as the call is known.
std::string describe_call(const RankControl& rank, std::uint64_t seq);

}  // namespace ringreduce
