// Which steps of a program a GPU takes at once, as one *batch*: it waits for all that they need, computes them in one
// pass of all threads, and then publishes all that they send.
//
// A batch may not hold back a message that one of its own waits depends on, and its steps must not depend on each
// other. So a step joins a batch, or is left for a later one, by three rules. "Before" is the order of the program, and
// a step that is left does not keep later ones from joining.
//   1. A step that receives joins only if no step before it, joined or left, sends.
//   2. A step joins only if it shares data with no step before it that has joined or is left.
//   3. Where some rank sends more often in a round than its outbox has slots, every step is a batch of its own.
//
// Why no batch waits for ever. Let all ranks be at the same channel of the same round. By rule 3 the slots they send
// from were last used in an earlier one, so only messages are waited for. Plans are verified: there is an order of all
// steps of all ranks in which every message is sent before it is taken. Suppose that ranks are stuck, each at a batch
// that lacks a message. Take, of all the steps that lack one, the step v that is first in that order, and let u be the
// step that sends the message, on rank q: u comes before v. Rank q is stuck too, at a batch in which a step w lacks a
// message, and u is in that batch or left for a later one. By rule 1, w is u or comes before it, so w comes before v:
// but v was the first. The next channel and the next round begin when this one has ended, which needs nothing of them.
// What is relaxed, that ranks need not be at the same round, only lets them go on sooner.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/program.h"

namespace ringreduce {

// The batches of a channel's program: the numbers of each batch's steps, ascending.
using Batches = std::vector<std::vector<std::uint32_t>>;

// For each channel of a rank's program, where outboxes have `depth` slots.
std::vector<Batches> batches_of(const Program& program, std::uint32_t depth);

}  // namespace ringreduce
