// engine/gpu/turns.h for Python's ctypes.
#include "engine/gpu/turns.h"

#include <algorithm>
#include <cstring>
#include <string>

// Fills `turns` (rank, channel, step; room for `most` of them) with the order for the plan that ringreduce.plan.lower
// made `lowered` of, and returns how many there are; -1, and why in `message`, of 256 bytes, if there is none.
extern "C" int order_of_steps(int operation, const std::int32_t* lowered, std::size_t words, int size, int root,
                              int channels, std::uint32_t depth, std::uint32_t (*turns)[3], std::size_t most,
                              char* message) {
  using namespace ringreduce;
  try {
    std::vector<Program> programs;
    for (int r = 0; r < size; ++r)
      programs.push_back(bind(static_cast<Operation>(operation), {lowered, words}, 1, size, r, root, channels));
    const std::vector<Turn> order = order_of_steps(programs, depth);
    for (std::size_t i = 0; i < std::min(order.size(), most); ++i) {
      turns[i][0] = static_cast<std::uint32_t>(order[i].rank);
      turns[i][1] = order[i].channel;
      turns[i][2] = order[i].step;
    }
    return static_cast<int>(order.size());
  } catch (const Error& error) {
    const std::string text = std::string(error.what()).substr(0, 255);
    std::memcpy(message, text.c_str(), text.size() + 1);
    return -1;
  }
}
