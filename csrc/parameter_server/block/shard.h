// The protocol of a shard: the effect of every request, the order in which requests take effect, and the replies.
//
// A shard is a pure function of its messages and of the times between them. It uses no sockets, threads, clocks or
// tensors. Clocks of different hosts have nothing in common, so a backup that takes over goes on with the times between
// messages. The server and the simulator in tests/parameter_server run this same code.
//
//   Exactly once  For each worker, the shard keeps the number of the next request, and the replies that the worker may
//                 not have received. A request that arrives twice is answered twice and takes effect once.
//   Order         A request that overtook an earlier one waits for it.
//   sync          Round r of a block ends when all members of the group have contributed, or when a quorum has and the
//                 grace period is over. The contributions, ordered by worker, make version r + 1. A later contribution
//                 is dropped, and its worker is told so. A worker of another group may contribute to a round that is
//                 open, but is neither waited for nor part of the quorum. A change of the rule takes effect before the
//                 worker's next round. Changes of several workers for the same round must be equal.
//   asynchronous  Every push makes a version.
//   ssp(s)        Every push makes a version. A worker at clock c may read when the clocks of all members are at least
//                 c - s, so it sees everything that they pushed at clock c - s - 1 or before.
//   Membership    Rounds that begin after a worker has joined wait for it; its clock begins at that of the slowest
//                 member. When a worker is lost, its contributions to open rounds are dropped, and nobody waits for it.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "parameter_server/messages.h"

namespace ringreduce::parameter_server {

class Archive;

class Shard {
 public:
  // `elapsed`: the time since the message before.
  Output step(const Message& message, Nanoseconds elapsed);
  // Serialises the shard, or replaces it by one that was serialised (archive.h).
  void visit(Archive& archive);

  // How long after the latest message a Tick is due; kForever if none is.
  Nanoseconds due_in() const;

  // The workers that the present round of `block` waits for. Used in error messages.
  std::vector<WorkerId> awaited(BlockId block) const;
  // The members of `group` with the lowest clock.
  std::vector<WorkerId> slowest(const std::string& group) const;
  // The members of `group` that have not come to its barrier.
  std::vector<WorkerId> absent(const std::string& group) const;
  // The number of requests that wait for other workers, and the workers that open rounds, pulls in ssp and barriers
  // wait for.
  struct Waiting {
    std::size_t requests = 0;
    std::set<WorkerId> workers;
  };
  Waiting waiting() const;
  // Whether the worker is a member or was one.
  bool knows(WorkerId worker) const { return members_.count(worker) > 0; }
  // Whether the worker was a member and has left or been lost.
  bool gave_up(WorkerId worker) const { return knows(worker) && !members_.at(worker).live; }
  // The clocks of the present members.
  std::map<WorkerId, std::uint64_t> clocks() const;

  std::size_t blocks() const { return blocks_.size(); }
  std::uint64_t version(BlockId block) const { return blocks_.at(block).version; }
  std::uint64_t clock(WorkerId worker) const { return members_.at(worker).clock; }
  const Mode& mode(BlockId block) const { return blocks_.at(block).mode; }
  // The changes of the block's rule that have not taken effect yet, in their order: the place of a number, and the
  // number.
  std::vector<std::pair<std::uint64_t, double>> coming_changes(BlockId block) const;
  // For tests: the greatest number of replies, or of requests out of order, that are kept for one worker. At most
  // kMostOutstanding.
  std::size_t kept() const;

 private:
  struct Member {
    std::string group;
    bool live = true;
    std::uint64_t joined = 0;  // the step in which it joined; see Block::opened
    std::uint64_t clock = 0;
    std::uint64_t next = 1;                  // number of the request that takes effect next
    std::map<std::uint64_t, Reply> replies;  // replies that the worker may not have received
    std::map<std::uint64_t, Request> early;  // requests that overtook number `next`
    std::vector<std::uint64_t> barriers;     // numbers of its unanswered barrier requests
  };
  // Contributions to a round, with the number of the request that brought each.
  using Round = std::map<WorkerId, std::pair<std::uint64_t, Contribution>>;
  // Changes of a rule that take effect before a round: by the place of the number, who made it and the number.
  using Changes = std::map<std::uint64_t, std::pair<WorkerId, double>>;
  struct Block {
    Mode mode;
    bool initialised = false, grows = false;
    std::uint64_t version = 0;
    std::uint64_t logged = 0;                          // index of its latest operation
    std::uint64_t opened = 0;                          // the step in which the present round began
    std::map<std::uint64_t, Round> rounds;             // open rounds with contributions: the present one and later ones
    std::map<std::uint64_t, std::int32_t> priorities;  // by round
    Nanoseconds closes = kForever;                     // end of the grace period of the present round
    std::vector<std::pair<WorkerId, std::uint64_t>> pulls;  // worker and number of the pulls that wait
    std::map<std::uint64_t, Changes> changes;               // by round, from the present one on
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
  bool take_change(BlockId id, const Request& request);
  void change(BlockId id, WorkerId worker, std::uint64_t place, double number);
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

  std::map<WorkerId, Member> members_;  // former members included, whose requests may arrive again
  std::vector<Block> blocks_;
  std::set<BlockId> pulled_;  // blocks with a waiting pull
  std::set<BlockId> open_;    // blocks with contributions to an open round
  std::uint64_t log_ = 0;     // index of the latest operation
  std::uint64_t steps_ = 0;
  Nanoseconds now_ = 0;  // the sum of all times that step() was given
  Output output_;
};

}  // namespace ringreduce::parameter_server
