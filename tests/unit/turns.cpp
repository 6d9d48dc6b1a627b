// engine/gpu/batches.h and turns.h for Python's ctypes.
#include "engine/gpu/turns.h"

#include <algorithm>
#include <cstring>
#include <string>

using namespace ringreduce;

namespace {

std::vector<Program> bind_all(int operation, const std::int32_t* lowered, std::size_t words, int size, int root,
                              int channels) {
  std::vector<Program> programs;
  for (int r = 0; r < size; ++r)
    programs.push_back(
        program_of({static_cast<Operation>(operation), {lowered, lowered + words}, 1}, {r, size, root, channels}));
  return programs;
}

}  // namespace

#pragma GCC visibility push(default)  // for ctypes

// Fills `batches` with the number of every step's batch: for each rank, channel and step of the plan that
// ringreduce.plan.lower made `lowered` of.
extern "C" void batches_of_steps(int operation, const std::int32_t* lowered, std::size_t words, int size, int root,
                                 int channels, std::uint32_t depth, std::uint32_t* batches) {
  for (const Program& program : bind_all(operation, lowered, words, size, root, channels)) {
    const std::vector<Batches> of_rank = batches_of(program, depth);
    for (std::size_t c = 0; c < of_rank.size(); ++c) {
      for (std::uint32_t number = 0; number < of_rank[c].size(); ++number)
        for (const std::uint32_t step : of_rank[c][number]) batches[step] = number;
      batches += program.channels[c].steps.size();
    }
  }
}

// Fills `turns` (rank, batch; room for `most` of them) with the order in which those `batches` can be taken, and
// returns how many there are; -1, and why in `message`, of 256 bytes, if there is none.
extern "C" int order_of_batches(int operation, const std::int32_t* lowered, std::size_t words, int size, int root,
                                int channels, std::uint32_t depth, const std::uint32_t* batches,
                                std::uint32_t (*turns)[2], std::size_t most, char* message) {
  const std::vector<Program> programs = bind_all(operation, lowered, words, size, root, channels);
  std::vector<std::vector<Batches>> given;
  for (const Program& program : programs) {
    std::vector<Batches>& of_rank = given.emplace_back();
    for (const ChannelProgram& channel : program.channels) {
      Batches& of_channel = of_rank.emplace_back();
      for (std::uint32_t step = 0; step < channel.steps.size(); ++step, ++batches) {
        if (of_channel.size() <= *batches) of_channel.resize(*batches + 1);
        of_channel[*batches].push_back(step);
      }
    }
  }
  try {
    const std::vector<Turn> order = order_of_turns(programs, given, depth);
    for (std::size_t i = 0; i < std::min(order.size(), most); ++i) {
      turns[i][0] = static_cast<std::uint32_t>(order[i].rank);
      turns[i][1] = order[i].batch;
    }
    return static_cast<int>(order.size());
  } catch (const Error& error) {
    const std::string text = std::string(error.what()).substr(0, 255);
    std::memcpy(message, text.c_str(), text.size() + 1);
    return -1;
  }
}

#pragma GCC visibility pop
