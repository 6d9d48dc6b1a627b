// A rank's engine: the plans of a group, the choice among them, and the life of a call.
//
// Calls of one engine must come one at a time (the process group's queue sees to it) and in the same order on every
// rank. There is no process-wide state: several ranks may live in one process, each with an engine of its own.
//
// After an error that breaks the group (every kind but invalid_argument) all ranks' calls throw the first such error;
// tensors of the call under way hold undefined values, except that inputs that are not outputs too are untouched.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/execution.h"
#include "engine/placement.h"

namespace ringreduce {

// What a call took, apart from its work.
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
  // `spins`: how often a waiting rank looks before it yields its core. `slices`: into how many slices a chunk is cut,
  // as long as they have at least `least_slice_bytes`, at most `most_slice_bytes`, and fit a slot. `least_fetch_bytes`:
  // from this size on slices are read by peers where they are, if they may.
  struct Options {
    int spins = 50;
    int slices = 4;
    std::size_t least_slice_bytes = 16384, most_slice_bytes = std::size_t{1} << 30;
    std::size_t least_fetch_bytes = 4096;
  };

  Engine(std::shared_ptr<const Segment> segment, const Options& options);

  // Adds a plan for `operation`, as ringreduce.plan.lower gives it, and returns its number: the old one, if the engine
  // has it already. It must be the same on all ranks.
  int add_plan(Operation operation, std::vector<std::int32_t> lowered, std::uint64_t digest);

  // From now on calls of `operation` over up to `most_bytes` (of a block) use plan number `plan`; what was chosen for
  // larger ones stays. `slice_bytes`: how large their slices are, down to a multiple of 64 and at most a slot; 0: by
  // the options' rule.
  void choose(Operation operation, std::uint64_t most_bytes, int plan, std::size_t slice_bytes = 0);

  // Throws invalid_argument, naming both, if the call's reduction is not defined for its dtype.
  static void check_reduction(const Call& call);

  // Runs the call to its end in the calling thread. Throws Error.
  Tally run(const Call& call, const Buffers& buffers);

  // Ends all calls of all ranks, now and later, with ErrorKind::aborted and `reason`.
  void abort(const std::string& reason);

  const Segment& segment() const { return *segment_; }
  int spins() const { return options_.spins; }
  std::uint64_t sequence() const { return sequence_; }

 private:
  struct Plan {
    Operation operation;
    std::vector<std::int32_t> lowered;
    std::uint64_t digest;
  };

  struct Choice {
    int plan;
    std::size_t slice_bytes;  // 0: by the options' rule
  };

  const Choice& choice_for(const Call& call) const;
  const Program& program_for(const Call& call, int plan);
  std::size_t slice_bytes(const Call& call, const Program& program, std::size_t chosen) const;
  void check(const Call& call, std::uint64_t seq, std::uint64_t fingerprint, const Execution& execution,
             Nanoseconds waited) const;
  [[noreturn]] void throw_mismatch(const Call& call, std::uint64_t seq, int peer) const;
  [[noreturn]] void throw_timeout(const Call& call, std::uint64_t seq, const Execution& execution,
                                  Nanoseconds waited) const;

  const std::shared_ptr<const Segment> segment_;
  const Options options_;
  std::vector<Plan> plans_;
  std::vector<std::map<std::uint64_t, Choice>> choices_;  // per operation: by most_bytes
  std::map<std::pair<int, int>, Program> programs_;       // (plan, root) -> this rank's part
  Workspace workspace_;
  Placement placement_;
  std::uint64_t sequence_ = 0;
};

}  // namespace ringreduce
