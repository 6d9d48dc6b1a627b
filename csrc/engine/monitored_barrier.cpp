#include "engine/monitored_barrier.h"

#include <algorithm>
#include <string>
#include <vector>

#include "engine/history.h"
#include "engine/late.h"
#include "transport/links.h"

namespace ringreduce {
namespace {

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (int r : ranks) text += (text.empty() ? "" : ", ") + std::to_string(r);
  return text;
}

}  // namespace

void monitored_barrier(Team& team, const Patience& patience, Nanoseconds timeout, bool name_all) {
  const int own = team.rank();
  RankControl& control = team.control(own);
  const std::uint64_t turn = control.barriers_entered.load(std::memory_order_relaxed) + 1;
  control.barriers_entered.store(turn, std::memory_order_seq_cst);
  team.control_changed();

  const auto ranks_where = [&](auto&& holds) {
    std::vector<int> ranks;
    for (int r = 0; r < team.size(); ++r)
      if (r != own && holds(team.control(r))) ranks.push_back(r);
    return ranks;
  };
  const auto missing = [&] {
    return ranks_where([&](const RankControl& c) { return c.barriers_entered.load(std::memory_order_seq_cst) < turn; });
  };
  // The words are Gloo's, for the sake of tools and tests that look for them.
  const auto passed_but = [&](const std::string& reason) {
    const std::string rank = "Rank " + std::to_string(own);
    return own == 0 ? rank + " timed out in monitoredBarrier: " + reason
                    : rank + " successfully reached monitoredBarrier, but received errors while waiting for send/recv" +
                          " from rank 0: " + reason;
  };

  if (team.links() != nullptr) {
    std::vector<int> far;
    for (int r = 0; r < team.size(); ++r)
      if (team.elsewhere(r)) far.push_back(r);
    try {
      team.links()->reach(far, timeout);
    } catch (const Error& error) {
      throw Error(error.kind(), passed_but(error.what()), error.culprit());
    }
    team.control_changed();
  }
  Waiting waiting(control.for_messages, patience, team.links());
  Reminder reminder;
  // Of the ranks of this host that have come, one tells the user.
  const auto is_first = [&](const std::vector<int>& absent) {
    for (int r = 0; r < own; ++r)
      if (!team.elsewhere(r) && std::find(absent.begin(), absent.end(), r) == absent.end()) return false;
    return true;
  };
  const auto warn = [&](const std::vector<int>& absent, Nanoseconds waited) {
    std::string whom, their_doings;
    for (int r : absent) {
      whom += (whom.empty() ? "" : ", ") + team.fate().describe(r);
      if (const std::string its = doings(team, r); !its.empty()) their_doings += " " + begins_with(team, r) + ":" + its;
    }
    team.warn("monitored_barrier" + of_group(team) + ": " + still_waits(team, waited, whom, timeout - waited) + "." +
              their_doings);
  };
  const auto look = [&](Nanoseconds waited) {
    const std::vector<int> absent = missing();
    if (absent.empty()) return;
    for (int r : team.fate().gone())
      if (std::find(absent.begin(), absent.end(), r) != absent.end())
        throw Error(ErrorKind::peer_lost, passed_but(team.fate().describe(r) + " " + team.fate().how_gone(r)), r);
    team.fate().throw_if_over(0);
    if (waited < timeout) {
      if (reminder.due(waited, team.warn_after()) && is_first(absent)) warn(absent, waited);
      return;
    }
    control.barriers_given_up.store(turn, std::memory_order_seq_cst);
    team.control_changed();
    const bool plural = name_all && absent.size() > 1;
    std::string reason = (plural ? "Ranks " + list(absent) : "Rank " + std::to_string(absent[0])) +
                         " failed to pass monitoredBarrier in " + std::to_string(timeout / kMillisecond) + " ms.";
    for (int r : absent) reason += " " + team.fate().describe(r) + " did not come.";
    throw Error(ErrorKind::timeout, passed_but(reason), absent[0]);
  };
  while (!missing().empty()) waiting.idle(kAwaitsAll, look);
  for (int r = 0; r < team.size(); ++r)
    if (r != own && differ(control, team.control(r))) {
      team.fate().abort(different_calls(team, r, "monitored_barrier"));
      team.fate().throw_if_aborted();
    }

  const std::vector<int> gone_again =
      ranks_where([&](const RankControl& c) { return c.barriers_given_up.load(std::memory_order_seq_cst) >= turn; });
  if (gone_again.empty()) return;
  control.barriers_given_up.store(turn, std::memory_order_seq_cst);
  team.control_changed();
  throw Error(ErrorKind::timeout,
              passed_but("ranks " + list(gone_again) + " gave up waiting before all ranks had come"), gone_again[0]);
}

}  // namespace ringreduce
