#include "engine/gpu/batches.h"

#include <algorithm>
#include <numeric>

#include "engine/gpu/run.h"

namespace ringreduce {
namespace {

// Whether one of two steps may write what the other one reads or writes. In place a chunk of the input is the same
// chunk of the output, and a caller may give any block of the output as the input; but not in an all_to_all.
bool share_data(const Step& a, const Step& b, Operation operation) {
  const bool a_writes = a.write_position >= 0, b_writes = b.write_position >= 0;
  if (a.chunk != b.chunk || (!a_writes && !b_writes)) return false;
  if (a.block == b.block) return true;
  if (operation == Operation::all_to_all) return false;
  return (a.read == Read::input && b_writes) || (b.read == Read::input && a_writes);
}

Batches batches_of(const ChannelProgram& channel, Operation operation, std::uint32_t depth) {
  const bool reuses_slots = std::any_of(channel.sends.begin(), channel.sends.end(), [&](auto n) { return n > depth; });
  const std::size_t most = reuses_slots ? 1 : gpu::kMostSteps;
  std::vector<std::uint32_t> rest(channel.steps.size());
  std::iota(rest.begin(), rest.end(), 0u);
  Batches batches;
  while (!rest.empty()) {
    std::vector<std::uint32_t> joined, left;
    bool sends = false;
    for (const std::uint32_t number : rest) {
      const Step& step = channel.steps[number];
      const auto shares = [&](std::uint32_t other) { return share_data(channel.steps[other], step, operation); };
      const bool joins = joined.size() < most && (!sends || step.recv.empty()) &&
                         std::none_of(joined.begin(), joined.end(), shares) &&
                         std::none_of(left.begin(), left.end(), shares);
      (joins ? joined : left).push_back(number);
      sends |= !step.send.empty();
    }
    batches.push_back(std::move(joined));
    rest = std::move(left);
  }
  return batches;
}

}  // namespace

std::vector<Batches> batches_of(const Program& program, std::uint32_t depth) {
  std::vector<Batches> batches;
  for (const ChannelProgram& channel : program.channels)
    batches.push_back(batches_of(channel, program.operation, depth));
  return batches;
}

}  // namespace ringreduce
