// The protocol of a shard: what every request does, in which order, and what is answered.
//
// A pure function of the messages it gets and of the time they come with: no sockets, threads, clocks or tensors. The
// server's thread and the simulator in tests/parameter_server run this same code.
//
//   Exactly once  The shard keeps, per worker, the number of the next request and the replies that the worker may not
//                 have. A request that comes again is answered again, and has no second effect.
//   Order         Requests that overtook others wait for them.
//   sync          Round r of a block ends when all members of the group have contributed, or a quorum has and the grace
//                 is over. The contributions, in the order of workers, make version r + 1. What comes later is dropped,
//                 and its worker is told.
//   asynchronous  Every push makes a version.
//   ssp(s)        The same; a worker at clock c reads when all others' clocks are at least c - s, so that all they
//                 pushed at clock c - s - 1 and before is included.
//   Membership    Who joins is waited for from a block's next round on, and begins with the slowest member's clock. Of
//                 a worker that is lost, what has not been applied yet is dropped, and nobody waits for it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "parameter_server/messages.h"

namespace ringreduce::parameter_server {

// Requests that a worker may have sent without the reply to the first of them: what bounds a shard's memory.
inline constexpr std::uint64_t kMostOutstanding = 1024;

class Archive;

class Shard {
 public:
  Output step(const Message& message, Nanoseconds now);
  // All that it is: writes it, or becomes what was written (archive.h).
  void visit(Archive& archive);

  // When a Tick is due; kForever if nothing depends on time.
  Nanoseconds deadline() const;

  // The members of `group` that the oldest open round of `block` has no contribution of. For errors.
  std::vector<WorkerId> awaited(BlockId block) const;
  // The members of `group` whose clock is the lowest, and those that are not at its barrier.
  std::vector<WorkerId> slowest(const std::string& group) const;
  std::vector<WorkerId> absent(const std::string& group) const;
  // Requests that wait for somebody, and whom for: members that an open round, a pull in ssp or a barrier needs.
  struct Waiting {
    std::size_t requests = 0;
    std::set<WorkerId> workers;
  };
  Waiting waiting() const;
  // Whether there is such a member, or was one that has left or been lost.
  bool knows(WorkerId worker) const { return members_.count(worker) > 0; }
  bool gave_up(WorkerId worker) const { return knows(worker) && !members_.at(worker).live; }
  // The clocks of the members that there are.
  std::map<WorkerId, std::uint64_t> clocks() const;

  std::size_t blocks() const { return blocks_.size(); }
  std::uint64_t version(BlockId block) const { return blocks_.at(block).version; }
  std::uint64_t clock(WorkerId worker) const { return members_.at(worker).clock; }
  const Mode& mode(BlockId block) const { return blocks_.at(block).mode; }
  // How many replies and requests out of order are kept: at most kMostOutstanding of each per worker.
  std::size_t kept() const;

 private:
  struct Member {
    std::string group;
    bool live = true;
    std::uint64_t joined = 0;  // as Block::opened
    std::uint64_t clock = 0;
    std::uint64_t next = 1;                  // the request that takes effect next
    std::map<std::uint64_t, Reply> replies;  // that the worker may not have yet
    std::map<std::uint64_t, Request> early;  // that overtook the next one
    std::deque<std::uint64_t> barriers;      // the numbers of requests that wait in one
  };
  using Round = std::map<WorkerId, std::pair<std::uint64_t, Contribution>>;  // with the number of the request
  struct Block {
    Mode mode;
    bool initialised = false, grows = false;
    std::uint64_t version = 0;
    std::uint64_t logged = 0;  // index of its latest operation
    std::uint64_t opened = 0;  // the step in which the present round began
    std::map<std::uint64_t, Round> rounds;
    std::map<std::uint64_t, std::int32_t> priorities;       // of rounds
    Nanoseconds closes = kForever;                          // when the grace of the present round is over
    std::vector<std::pair<WorkerId, std::uint64_t>> pulls;  // that wait: worker, number
  };

  friend void visit(Archive& archive, Member& member);
  friend void visit(Archive& archive, Block& block);

  void on(const Request& request);
  void on(const Join& join);
  void on(const Lose& lose);
  void on(const Create& create);
  void on(const Tick& tick);

  void take(const Request& request);
  void take_push(Block& block, const Request& request);
  void apply(BlockId id, std::vector<Contribution> contributions, std::int32_t priority);
  void close_rounds(BlockId id);
  bool complete(Block& block, const Round& round);
  void answer_pulls(BlockId id);
  void answer_barrier(const std::string& group);
  void remove(WorkerId worker);
  bool readable(const Block& block, WorkerId worker, std::uint64_t number) const;
  bool expects(const Block& block, const Member& member) const;
  std::uint64_t least_clock(const std::string& group) const;
  void reply(WorkerId worker, std::uint64_t number, Outcome outcome);
  void reply(WorkerId worker, std::uint64_t number, Outcome outcome, const Block& block);
  void reply(const Reply& reply);

  std::map<WorkerId, Member> members_;  // with those that left, whose requests may come again
  std::vector<Block> blocks_;
  std::set<BlockId> pulled_;  // blocks that a pull waits for
  std::set<BlockId> open_;    // blocks with contributions to a round
  std::uint64_t log_ = 0;     // index of the latest operation
  std::uint64_t steps_ = 0;
  Nanoseconds now_ = 0;
  Output output_;
};

}  // namespace ringreduce::parameter_server
