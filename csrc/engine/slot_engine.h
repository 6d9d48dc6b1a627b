// The engine that moves data through slots: those of regions that ranks of a host share, and those of mirrors that
// links to other hosts fill. See execution.h for how data moves, and team.h for where.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/execution.h"
#include "engine/late.h"
#include "engine/placement.h"
#include "engine/ways.h"

namespace ringreduce {

class SlotEngine final : public Engine {
 public:
  SlotEngine(std::shared_ptr<Team> team, const Options& options);

  Tally run(const Call& call, const Buffers& buffers) override;
  void fail(const Error& error) override { team_->fate().abort(error); }
  void throw_if_aborted() const override { team_->fate().throw_if_aborted(); }
  int reporter() const override;
  std::string number(int rank) const override { return team_->fate().number(rank); }
  std::string describe(int rank) const override { return team_->fate().describe(rank); }
  std::vector<int> gone() const override { return team_->fate().silent(); }
  void waits_for(int peer) override;
  int kept_waiting_by(int peer) const override;

 private:
  static constexpr std::size_t kBound = 24;

  // A call bound to its tensors, and what goes with it.
  struct Prepared {
    const BoundCall& bound;
    bool timed;                                    // whether its time tells how fast its way is
    std::uint64_t rounding = 0;                    // the key of its rests
    std::optional<std::vector<float>> rests = {};  // of its feedback, if it rounds
  };

  Prepared prepare(const Call& call, const Buffers& buffers);
  void carry_out(const Call& call, std::uint64_t seq, const Prepared& prepared, Execution& execution, Waiting& waiting);
  template <class Check>
  void move(const Call& call, std::uint64_t seq, Execution& execution, Waiting& waiting, const Check& check_on_peers);
  const BoundCall& bind(const Call& call, const Buffers& buffers, Way way);
  void populate(const BoundCall& bound);
  void reach(const Call& call, const Program& program, const std::string& what);
  void look(const Call& call, std::uint64_t seq, const Execution& execution, Nanoseconds waited);
  void warn_if_long(const Call& call, std::uint64_t seq, const Execution& execution, int blocked_on,
                    Nanoseconds waited);
  int waits_in(const Call& call, std::uint64_t seq, int rank) const;
  int gpu_waiting_for(int rank) const;
  template <class F>
  int end_of_chain(int peer, F waiting_for) const;
  [[noreturn]] void throw_mismatch(const Call& call, std::uint64_t seq, int peer, Waiting& waiting) const;
  struct Late {
    int culprit;
    std::string text;
  };
  Late who_is_late(const Call& call, std::uint64_t seq, int blocked_on) const;

  const std::shared_ptr<Team> team_;
  Workspace workspace_;
  std::uint64_t history_ = 0;           // the fingerprint of the latest call
  std::deque<BoundCall> bound_;         // the latest kBound calls that differ, the newest first
  int choices_bound_ = 0;               // what choices_made() was when they were bound
  const std::uint64_t number_;          // among the engines of this process
  std::vector<std::size_t> populated_;  // by channel: bytes of each slot that are there
  Ways ways_;                           // in which values are passed on, and outputs stored
  std::set<const Program*> linked_;     // whose peers on other hosts have been reached
  Placement placement_;
  // What the present call waits at, and at which time of the call it began to.
  struct {
    std::uint64_t obstacle = 0;
    Nanoseconds since = 0;
    Reminder reminder;
  } stuck_;
};

}  // namespace ringreduce
