#include "engine/monitored_barrier.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/interrupt.h"
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

class MonitoredBarrier {
 public:
  MonitoredBarrier(Team& team, Nanoseconds timeout, bool name_all)
      : team_(team),
        control_(team.control(team.rank())),
        timeout_(timeout),
        name_all_(name_all),
        number_(control_.barriers_entered.load(std::memory_order_relaxed) + 1) {}

  void pass(const Patience& patience) {
    control_.barriers_entered.store(number_, std::memory_order_seq_cst);
    team_.control_changed();
    if (team_.links() != nullptr) reach_other_hosts();
    Waiting waiting(control_.for_messages, patience, team_.links());
    while (!missing().empty())
      waiting.idle(kAwaitsAll, [this](Nanoseconds waited, bool may_call_python) { look(waited, may_call_python); });
    for (int r = 0; r < team_.size(); ++r)
      if (r != team_.rank() && differ(control_, team_.control(r))) {
        team_.fate().abort(different_calls(team_, r, "monitored_barrier"));
        team_.fate().throw_if_aborted();
      }
    const std::vector<int> gone_again = ranks_where(
        [&](const RankControl& c) { return c.barriers_given_up.load(std::memory_order_seq_cst) >= number_; });
    if (!gone_again.empty())
      give_up("ranks " + list(gone_again) + " gave up waiting before all ranks had come", gone_again[0]);
  }

 private:
  template <class F>
  std::vector<int> ranks_where(F holds) const {
    std::vector<int> ranks;
    for (int r = 0; r < team_.size(); ++r)
      if (r != team_.rank() && holds(team_.control(r))) ranks.push_back(r);
    return ranks;
  }
  std::vector<int> missing() const {
    return ranks_where(
        [&](const RankControl& c) { return c.barriers_entered.load(std::memory_order_seq_cst) < number_; });
  }

  // The words are Gloo's, for the sake of tools and tests that look for them.
  std::string passed_but(const std::string& reason) const {
    const std::string rank = "Rank " + std::to_string(team_.rank());
    return team_.rank() == 0 ? rank + " timed out in monitoredBarrier: " + reason
                             : rank + " successfully reached monitoredBarrier, but received errors while waiting for " +
                                   "send/recv from rank 0: " + reason;
  }

  [[noreturn]] void give_up(const std::string& reason, int culprit) {
    control_.barriers_given_up.store(number_, std::memory_order_seq_cst);
    team_.control_changed();
    throw Error(ErrorKind::timeout, passed_but(reason), culprit);
  }

  void reach_other_hosts() {
    std::vector<int> far;
    for (int r = 0; r < team_.size(); ++r)
      if (team_.elsewhere(r)) far.push_back(r);
    try {
      team_.links()->reach(far, timeout_);
    } catch (const Error& error) {
      throw Error(error.kind(), passed_but(error.what()), error.culprit());
    }
    team_.control_changed();
  }

  // Called while waiting: throws if it is in vain.
  void look(Nanoseconds waited, bool may_call_python) {
    if (may_call_python && ctrl_c_came()) team_.fate().interrupt("monitored_barrier");
    const std::vector<int> absent = missing();
    if (absent.empty()) return;
    for (int r : team_.fate().gone())
      if (std::find(absent.begin(), absent.end(), r) != absent.end())
        throw Error(ErrorKind::peer_lost, passed_but(team_.fate().describe(r) + " " + team_.fate().how_gone(r)), r);
    team_.fate().throw_if_over(0);
    if (waited < timeout_) {
      if (reminder_.due(waited, team_.warn_after()) && tells_the_user(absent)) warn(absent, waited);
      return;
    }
    const bool plural = name_all_ && absent.size() > 1;
    std::string reason = (plural ? "Ranks " + list(absent) : "Rank " + std::to_string(absent[0])) +
                         " failed to pass monitoredBarrier in " + std::to_string(timeout_ / kMillisecond) + " ms.";
    for (int r : absent) reason += " " + team_.fate().describe(r) + " did not come.";
    give_up(reason, absent[0]);
  }

  // Of the ranks of this host that have come, the first one tells the user.
  bool tells_the_user(const std::vector<int>& absent) const {
    for (int r = 0; r < team_.rank(); ++r)
      if (!team_.elsewhere(r) && std::find(absent.begin(), absent.end(), r) == absent.end()) return false;
    return true;
  }

  void warn(const std::vector<int>& absent, Nanoseconds waited) const {
    std::string whom, their_doings;
    for (int r : absent) {
      whom += (whom.empty() ? "" : ", ") + team_.fate().describe(r);
      if (const std::string its = doings(team_, r); !its.empty())
        their_doings += " " + begins_with(team_, r) + ":" + its;
    }
    team_.warn("monitored_barrier" + of_group(team_) + ": " + still_waits(team_, waited, whom, timeout_ - waited) +
               "." + their_doings);
  }

  Team& team_;
  RankControl& control_;
  const Nanoseconds timeout_;
  const bool name_all_;
  const std::uint64_t number_;  // of this barrier; the first is 1
  Reminder reminder_;
};

}  // namespace

void monitored_barrier(Team& team, const Patience& patience, Nanoseconds timeout, bool name_all) {
  MonitoredBarrier(team, timeout, name_all).pass(patience);
}

}  // namespace ringreduce
