#include "engine/gpu/turns.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace ringreduce {
namespace {

// One channel of a plan while its round runs.
class Round {
 public:
  Round(const std::vector<Program>& programs, std::size_t channel, std::uint32_t depth)
      : programs_(programs), channel_(channel), depth_(depth), next_(programs.size()) {}

  // Takes all steps there are.
  void run(std::vector<Turn>& turns) {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < programs_.size(); ++rank)
        while (next_[rank] < steps(rank).size() && take(rank, steps(rank)[next_[rank]])) {
          turns.push_back({static_cast<int>(rank), static_cast<std::uint32_t>(channel_), next_[rank]++});
          moved = true;
        }
    }
    for (std::size_t rank = 0; rank < programs_.size(); ++rank)
      if (next_[rank] < steps(rank).size())
        throw Error(ErrorKind::invalid_argument, "malformed plan: with " + std::to_string(depth_) + " slots, step " +
                                                     std::to_string(next_[rank]) + " of rank " + std::to_string(rank) +
                                                     " in channel " + std::to_string(channel_) + " can never be taken");
  }

 private:
  const std::vector<Step>& steps(std::size_t rank) const { return programs_[rank].channels[channel_].steps; }

  bool take(std::size_t rank, const Step& step) {
    for (const Source& from : step.recv)
      if (!unread_.contains({from.peer, from.send_index})) return false;
    if (!step.send.empty()) {
      const int own = static_cast<int>(rank);
      if (step.send_index >= depth_ && unread_[{own, step.send_index - depth_}] > 0) return false;
      unread_[{own, step.send_index}] = step.send.size();
    }
    for (const Source& from : step.recv) --unread_[{from.peer, from.send_index}];
    return true;
  }

  const std::vector<Program>& programs_;
  const std::size_t channel_;
  const std::uint32_t depth_;
  std::vector<std::uint32_t> next_;                              // per rank: its next step
  std::map<std::pair<int, std::uint32_t>, std::size_t> unread_;  // (rank, send): who has yet to read it
};

}  // namespace

std::vector<Turn> order_of_steps(const std::vector<Program>& programs, std::uint32_t depth) {
  std::vector<Turn> turns;
  for (std::size_t channel = 0; channel < programs[0].channels.size(); ++channel)
    Round(programs, channel, depth).run(turns);
  return turns;
}

}  // namespace ringreduce
