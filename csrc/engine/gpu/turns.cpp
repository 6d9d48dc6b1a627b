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
  Round(const std::vector<Program>& programs, const std::vector<std::vector<Batches>>& batches, std::size_t channel,
        std::uint32_t depth)
      : programs_(programs), batches_(batches), channel_(channel), depth_(depth), next_(programs.size()) {}

  // Takes all batches there are. `before`: per rank, how many it has in earlier channels.
  void run(const std::vector<std::uint32_t>& before, std::vector<Turn>& turns) {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < programs_.size(); ++rank)
        while (next_[rank] < batches(rank).size() && take(rank, batches(rank)[next_[rank]])) {
          turns.push_back({static_cast<int>(rank), before[rank] + next_[rank]++});
          moved = true;
        }
    }
    for (std::size_t rank = 0; rank < programs_.size(); ++rank)
      if (next_[rank] < batches(rank).size())
        throw Error(ErrorKind::invalid_argument, "malformed plan: with " + std::to_string(depth_) + " slots, step " +
                                                     std::to_string(batches(rank)[next_[rank]].front()) + " of rank " +
                                                     std::to_string(rank) + " in channel " + std::to_string(channel_) +
                                                     " can never be taken");
  }

 private:
  const Batches& batches(std::size_t rank) const { return batches_[rank][channel_]; }

  bool take(std::size_t rank, const std::vector<std::uint32_t>& batch) {
    const int own = static_cast<int>(rank);
    const auto each_step = [&](auto f) {
      return std::all_of(batch.begin(), batch.end(),
                         [&](std::uint32_t number) { return f(programs_[rank].channels[channel_].steps[number]); });
    };
    const bool ready = each_step([&](const Step& step) {
      for (const Source& from : step.recv)
        if (!unread_.contains({from.peer, from.send_index})) return false;
      return step.send.empty() || step.send_index < depth_ || read({own, step.send_index - depth_});
    });
    if (!ready) return false;
    each_step([&](const Step& step) {
      if (!step.send.empty()) unread_[{own, step.send_index}] = step.send.size();
      for (const Source& from : step.recv) --unread_[{from.peer, from.send_index}];
      return true;
    });
    return true;
  }

  using Send = std::pair<int, std::uint32_t>;  // rank, number of the send

  bool read(const Send& send) const {
    const auto found = unread_.find(send);
    return found != unread_.end() && found->second == 0;
  }

  const std::vector<Program>& programs_;
  const std::vector<std::vector<Batches>>& batches_;
  const std::size_t channel_;
  const std::uint32_t depth_;
  std::vector<std::uint32_t> next_;     // per rank: its next batch
  std::map<Send, std::size_t> unread_;  // who has yet to read it
};

}  // namespace

std::vector<Turn> order_of_turns(const std::vector<Program>& programs, const std::vector<std::vector<Batches>>& batches,
                                 std::uint32_t depth) {
  std::vector<Turn> turns;
  std::vector<std::uint32_t> before(programs.size());
  for (std::size_t channel = 0; channel < programs[0].channels.size(); ++channel) {
    Round(programs, batches, channel, depth).run(before, turns);
    for (std::size_t rank = 0; rank < programs.size(); ++rank)
      before[rank] += static_cast<std::uint32_t>(batches[rank][channel].size());
  }
  return turns;
}

}  // namespace ringreduce
