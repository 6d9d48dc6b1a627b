#include "engine/late.h"

#include "engine/history.h"

namespace ringreduce {
namespace {

// The calls that the process of a rank is in, but for the one that this rank is in too.
std::string its_calls(const Team& team, int rank) {
  const RankControl &own = team.control(team.rank()), &its = team.control(rank);
  std::string text;
  Segment::each_of_process([&](const Segment& segment) {
    if (segment.abort_record().state != 0) return;  // nobody is in a call any more, though it may be counted as begun
    for (int r = 0; r < static_cast<int>(segment.layout().ranks); ++r) {
      const RankControl& control = segment.region(r).control();
      const std::uint64_t entered = control.entered.load(std::memory_order_acquire);
      const bool is_its = control.state.load(std::memory_order_acquire) == RankState::live && control.pid == its.pid &&
                          control.global_rank == its.global_rank;
      if (!is_its || entered <= control.completed || (&control == &its && entered == own.entered)) continue;
      text += " It is in " + describe_call(control, entered) + ", seq " +
              std::to_string(number_of_call(control, entered)) + " of group \"" + segment.name() + "\"";
      const int peer = seen_to_wait_for(control.waiting_for, control.heartbeat,
                                        static_cast<int>(segment.layout().ranks), kSecond / 2);
      if (peer >= 0) text += ", where it waits for rank " + std::to_string(segment.global_rank(peer));
      text += ".";
    }
  });
  return text;
}

}  // namespace

std::string still_waits(const Team& team, Nanoseconds waited, const std::string& whom, Nanoseconds left) {
  return team.fate().describe(team.rank()) + " has waited " + in_seconds(waited) + " for " + whom + ", and will wait " +
         in_seconds(left) + " more";
}

std::string of_group(const Team& team) {
  return " of group \"" + team.group_name() + "\" (" + std::to_string(team.size()) + " ranks)";
}

std::string doings(const Team& team, int rank) {
  if (team.elsewhere(rank)) return "";
  if (team.control(rank).pid == team.control(team.rank()).pid) return "";  // ranks of one process
  const std::string condition = team.fate().condition(rank);
  return (condition.empty() ? "" : " Its process " + condition + ".") + its_calls(team, rank);
}

}  // namespace ringreduce
