// A rank's engine: the plans of a group, the choice among them, and the life of a call. How data moves between ranks is
// for those who implement it: slot_engine.h, point_to_point_engine.h.
//
// Calls of one engine must come one at a time (the process group's queue sees to it) and in the same order on every
// rank. There is no process-wide state: several ranks may live in one process, each with an engine of its own.
//
// After an error that breaks the group (every kind but invalid_argument) all ranks' calls throw the first such error;
// tensors of the call under way hold undefined values, except that inputs that are not outputs too are untouched.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/waiting.h"
#include "engine/call.h"
#include "engine/program.h"

namespace ringreduce {

// A rank's tensors, block by block in the order of their positions: data[i] points to count[i] elements.
struct Tensors {
  std::span<std::byte* const> data;
  std::span<const std::size_t> count;
};

struct Buffers {
  Tensors input;  // may share memory with `output` block for block (in-place), as c10d's collectives do
  Tensors output;
  // all_to_all with split sizes: how much rank `source` has for rank `target`, at source * size + target. Otherwise
  // empty: all have the call's count.
  std::span<const std::size_t> splits = {};
};

// Figures of one call for its statistics.
struct Tally {
  Nanoseconds waited = 0;  // see Waiting::waited
  std::uint64_t lent = 0;  // bytes that peers read where they were, instead of a copy

  Tally& operator+=(const Tally& other) {
    waited += other.waited;
    lent += other.lent;
    return *this;
  }
};

class Engine {
 public:
  // `patience`: how long a waiting rank keeps its core. `keeps_core`: where its caller does nothing else, it does so
  // until it sleeps. `looks_by_mates`: in small calls it looks as often as Placement says. `slices`: into how many
  // slices a chunk is cut, as long as they have at least `least_slice_bytes`, at most `most_slice_bytes`, and fit a
  // slot. `least_fetch_bytes`: from this size on slices are read by peers where they are, if they may.
  // `most_fetch_bytes`: but not by more than two ranks in a call in place whose tensors have more bytes in all.
  // `stream_bytes`: outputs that have so many bytes in all are stored past the caches. `spread_bytes`: over so much
  // memory of a channel's slots a rank's values go in turn; 0: each begins where its slot does.
  struct Options {
    Patience patience = {};
    bool keeps_core = false, looks_by_mates = false;
    int slices = 4;
    std::size_t least_slice_bytes = 16384, most_slice_bytes = std::size_t{1} << 30;
    std::size_t least_fetch_bytes = 4096, most_fetch_bytes = std::size_t{192} << 20;
    std::size_t stream_bytes = std::size_t{48} << 20;
    std::size_t spread_bytes = 0;
  };

  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Adds a plan and returns its number: the old one, if the engine has it already. It must be the same on all ranks.
  int add_plan(LoweredPlan plan);

  // From now on calls of `operation` over up to `most_bytes` (of a block) use plan number `plan`; what was chosen for
  // larger ones stays. `slice_bytes`: how large their slices are, down to a multiple of 64 and at most a slot; 0: by
  // the options' rule.
  void choose(Operation operation, std::uint64_t most_bytes, int plan, std::size_t slice_bytes = 0);

  // Throws invalid_argument for a root that a group of this size does not have, or for a reduction that is not defined
  // for the call's dtype.
  static void check(const Call& call, int size);

  // A plan for calls up to a size, as for choose().
  struct PlanFor {
    LoweredPlan plan;
    std::uint64_t most_bytes;
    std::size_t slice_bytes = 0;
    std::uint64_t least_bytes = 0;  // of an answer to Ask: it serves no smaller calls
  };
  void add(const PlanFor& each) { choose(each.plan.operation, each.most_bytes, add_plan(each.plan), each.slice_bytes); }

  // What a call wants of its plan: that it combines in the order of ranks; that values go through few steps which
  // combine, as each of them rounds.
  struct Needs {
    bool in_order = false, few_roundings = false;
    auto operator<=>(const Needs&) const = default;
  };
  // The plan for calls of `operation` with `root` (0 where there is none) over `bytes` of a block.
  using Ask = std::function<PlanFor(Operation operation, int root, std::uint64_t bytes, const Needs& needs)>;
  // From now on the first call that choose() has chosen nothing for asks for a plan, and so does each by an operator of
  // the user's own. To be called before any call.
  void ask_for_plans(Ask ask) { ask_ = std::move(ask); }

  // Of `options`, where it is known only later. To be called before any call, with the same on all ranks.
  void set_least_slice_bytes(std::size_t bytes) { options_.least_slice_bytes = bytes; }

  // Runs the call to its end in the calling thread. Throws Error.
  virtual Tally run(const Call& call, const Buffers& buffers) = 0;

  // Makes `error` the group's, unless it has one: ends all calls of all ranks, now and later. Thread-safe.
  virtual void fail(const Error& error) = 0;
  // The same with ErrorKind::aborted.
  void abort(const std::string& reason) { fail(Error(ErrorKind::aborted, reason)); }
  // Throws the error that broke the group, if one did and this rank knows of it. Thread-safe.
  virtual void throw_if_aborted() const = 0;
  // The rank that broke the group; -1 while nobody has.
  virtual int reporter() const = 0;
  // "rank 3 (rank 1 of the group)": see RankName. And the same with host and pid.
  virtual std::string number(int rank) const = 0;
  virtual std::string describe(int rank) const = 0;
  // The peers whose process has ended, or which have left the group, as far as this rank can see. Thread-safe.
  virtual std::vector<int> gone() const { return {}; }

  // Tells the peers that this rank waits for `peer` now, for engines whose calls run elsewhere than in run(). The note
  // holds for half a second. Thread-safe, like kept_waiting_by().
  virtual void waits_for(int /*peer*/) {}
  // The end of the chain of waiting ranks that begins with `peer`: `peer` itself if it waits for nobody.
  virtual int kept_waiting_by(int peer) const { return peer; }

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::uint64_t sequence() const { return sequence_; }

 protected:
  struct Choice {
    int plan;
    std::size_t slice_bytes;        // 0: by the options' rule
    std::uint64_t least_bytes = 0;  // it serves no smaller calls
  };

  // `channels`: the most that a plan may have. `most_slice_bytes`: what the transport allows.
  Engine(int rank, int size, int channels, const Options& options, std::size_t most_slice_bytes);

  const Choice& choice_for(const Call& call);
  // This rank's part of a plan. The reference stays valid.
  const Program& program_for(const Call& call, int plan);
  // The part of any rank.
  Program program_of(int rank, const Call& call, int plan) const;
  std::size_t slice_bytes(const Call& call, const Program& program, std::size_t chosen) const;
  // This rank's part of the plan for a call, which stays valid, and how large its slices are.
  struct Planned {
    const Program* program;
    std::size_t slice_bytes;
  };
  Planned plan_of(const Call& call);
  std::uint64_t next_call() { return ++sequence_; }

  // Calls f(), which prepares this rank's next call. If it throws anything but invalid_argument, the group breaks with
  // that error, so that no peer waits for this rank.
  template <class F>
  decltype(auto) or_tell_the_others(const Call& call, F f) {
    const auto tell = [&](ErrorKind kind, const std::string& why, int culprit) {
      fail(Error(kind, title(call, sequence_ + 1) + ": " + why, culprit >= 0 ? culprit : rank_));
    };
    try {
      return f();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::invalid_argument) tell(error.kind(), error.what(), error.culprit());
      throw;
    } catch (const std::exception& error) {  // out of memory
      tell(ErrorKind::system, reason(error), rank_);
      throw;
    }
  }
  const Options& options() const { return options_; }
  // How often choose() was called: what was chosen before may have changed since.
  int choices_made() const { return choices_made_; }

 private:
  using Choices = std::map<std::uint64_t, Choice>;  // by most_bytes
  static const Choice* find(const Choices& choices, std::uint64_t bytes);

  const int rank_, size_, channels_;
  Options options_;
  const std::size_t most_slice_bytes_;
  std::vector<LoweredPlan> plans_;
  std::vector<Choices> choices_;                                // per operation
  std::map<std::tuple<Operation, int, Needs>, Choices> asked_;  // by operation and root: what was asked for
  Ask ask_;
  std::map<std::pair<int, int>, Program> programs_;  // (plan, root) -> this rank's part
  std::uint64_t sequence_ = 0;
  int choices_made_ = 0;
};

}  // namespace ringreduce
