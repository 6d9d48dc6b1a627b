// What a server and its backup have alike: the shard, its blocks, and its workers.
#pragma once

#include <csignal>
#include <functional>
#include <memory>
#include <utility>

#include <unistd.h>

#include "parameter_server/server/port.h"

namespace ringreduce::parameter_server {

class StateArchive;

// For tests: where a server's process may kill itself.
enum class Step : std::uint32_t {
  never,
  taken,
  logged,
  updated,
  carried_out,
  answered,
  gives,
  takes,
  leaves,
  inherits,
  taking_over,
  serving
};

struct Replica {
  // Calls its argument with what an update by Python needs, such as the GIL.
  using Enter = std::function<void(const std::function<void()>&)>;
  // Called with each reply as soon as its operation, if it has one, has been carried out or has failed.
  using Answer = std::function<void(const Reply&, const Operation*, bool failed)>;

  Replica(std::size_t capacity, Roots roots, std::function<void(const PythonUpdate&)> update)
      : blocks(capacity, roots, std::move(update)) {}

  // Gives the shard a message. What it decides is added to `decided`.
  void decide(const Message& message, Nanoseconds elapsed);
  // Carries out `output`. Operations of a block stay in order; of several blocks, the one with the greatest priority
  // goes first, unless `in_order`. Returns false if an operation has failed. `has_partner` is for Blocks::apply.
  bool carry_out(Output output, bool in_order, bool has_partner, const Enter& enter, const Answer& answer);
  Request request_of(WorkerId worker, const RequestSlot& slot, std::shared_ptr<const Payload> payload);
  // Without the content of blocks that are updated in place.
  void visit(StateArchive& archive);

  // The workers that the block waits for: in sync those missing in the open round, in ssp those with the lowest clock.
  std::vector<WorkerId> awaited(BlockId block) const;
  // The members of the group that have not come to its barrier.
  std::vector<WorkerId> absent(const std::string& group) const { return shard.absent(group); }
  // Group and name of each worker that takes part.
  std::map<WorkerId, std::pair<std::string, std::string>> workers() const;
  // The members that have not connected.
  std::vector<WorkerId> without_port() const;
  // Why the latest update of the block failed; "" if it did not.
  std::string failure(BlockId block) const { return blocks.have(block) ? blocks[block].failure : std::string(); }
  // Note, id and offset of every block, in the order of their creation.
  std::vector<std::tuple<std::string, BlockId, std::size_t>> notes() const;

  // This process kills itself when it passes `step` for the `times`-th time.
  void die_at(Step step, std::uint64_t times) { last_step_ = step, steps_left_ = times; }
  void pass(Step step) {
    if (step == last_step_ && --steps_left_ == 0) kill(getpid(), SIGKILL);
  }

  Shard shard;
  Nanoseconds stepped = now();  // when the shard got its latest message
  Blocks blocks;
  Ports ports;
  Output decided;            // by the shard, and not carried out yet
  std::uint32_t number = 0;  // of this backup, as in ValuesHeader::backup; 0 until it has the state
  std::uint32_t turn = 0;    // the value of Lane::turn while it serves; of a backup, once it has taken over
  std::uint64_t requests = 0, updates = 0, bytes = 0;  // since the parameter server was founded

 private:
  bool carry_out(const Operation& operation, bool has_partner);

  Step last_step_ = Step::never;
  std::uint64_t steps_left_ = 0;
};

}  // namespace ringreduce::parameter_server
