// The messages of the parameter server's protocol: requests and replies between workers and shards, and the operations
// that a shard decides on.
//
// A tensor is cut into blocks; a shard is the set of blocks of one server. These structures contain no pointers but the
// payload, so the same ones are used in shared memory, on connections and in the simulator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "core/clock.h"

namespace ringreduce::parameter_server {

using WorkerId = std::uint32_t;
using BlockId = std::uint32_t;

// A worker may send at most this many requests before it has the reply to the first of them. This bounds the memory of
// a shard.
inline constexpr std::uint64_t kMostOutstanding = 1024;

// The data of a push. The protocol passes it on without looking inside; a driver (server, client, simulator) derives
// its own kind. It is released after the push was applied or dropped, or turned out to be a duplicate.
struct Payload {
  virtual ~Payload() = default;
};

enum class Consistency : std::uint32_t { sync, asynchronous, ssp };

// How the pushes to a key become updates.
struct Mode {
  Consistency consistency = Consistency::sync;
  std::uint32_t quorum = 0;       // sync: contributions after which a round may end early; 0: wait for all members
  Nanoseconds grace = 0;          // sync: how long a round stays open after its quorum
  std::uint64_t staleness = 0;    // ssp: by how many clocks a pull may miss the pushes of others
  std::string group = "workers";  // sync and ssp: whose members count

  bool operator==(const Mode&) const = default;
};

// ---- Requests of a worker -----------------------------------------------------------------------------------------

enum class RequestKind : std::uint32_t {
  initialise = 1,  // sets the first value of a block, unless it has a value
  push,            // contributes to an update
  pull,            // is answered when the worker may read the block
  clock,           // ends the worker's current clock
  barrier,         // is answered when all members of the worker's group have sent one
  leave,           // the worker takes no further part
  restore,         // sets a block's first value and states from a snapshot; adds rows to a table without updates
  change,          // changes a number of the block's rule, such as the learning rate
};

// A worker numbers its requests to a shard 1, 2, 3, ...; they take effect in this order, each exactly once.
struct Request {
  RequestKind kind = RequestKind::pull;
  WorkerId worker = 0;
  std::uint64_t number = 0;
  std::uint64_t seen = 0;  // the worker has received the replies to all requests up to this number
  BlockId block = 0;
  std::int32_t priority = 0;  // push: of the updates ready at the same time, the greatest goes first
  std::uint64_t round = 0;  // push in sync: the round it belongs to, which makes version round + 1; change in sync: the
                            // first round with the new number
  std::uint64_t pulled = 0;  // push: the version that it was computed from, for update functions; change: which number
  double weight = 1;         // push; change: the new number
  // initialise, push, restore. A push to a dense block may have none: the worker takes part in the round, and its
  // contribution counts as zeros. An update without any payload leaves the value and the states as they are.
  std::shared_ptr<const Payload> payload;
};

enum class Outcome : std::uint32_t {
  applied = 1,  // push: it is in the value
  late,         // push: its round had ended without it, so it was dropped
  initialised,  // initialise: this is now the first value
  kept,         // initialise: the block had a value already and keeps it
  ready,        // pull: the block may be read
  done,         // clock, barrier, leave
  failed,       // push: the update raised an error and the value is unchanged; set by the driver, not by the shard
  refused,      // the worker is no member any more, the block does not exist or has no value, a round's second push, or
                // a change that differs from another worker's for the same round
};

struct Reply {
  WorkerId worker = 0;
  std::uint64_t number = 0;
  Outcome outcome = Outcome::done;
  std::uint64_t version = 0;  // of the block
  // The reply may be sent after this operation of the log has been carried out; a reply `done`, after this one and all
  // before it.
  std::uint64_t after = 0;
};

// ---- Other messages to a shard ------------------------------------------------------------------------------------

struct Join {
  WorkerId worker;
  std::string group;
};
// The worker's process has ended, or is treated as if it had.
struct Lose {
  WorkerId worker;
};
// Makes a block, which gets the next free id.
struct Create {
  Mode mode;
  bool grows = false;  // the block belongs to a table: it needs no first value, as rows are added later
};
// Time has passed. Sent when Shard::due_in() is over.
struct Tick {};

using Message = std::variant<Request, Join, Lose, Create, Tick>;

// ---- Output of a shard --------------------------------------------------------------------------------------------

struct Contribution {
  WorkerId worker = 0;
  double weight = 1;
  std::uint64_t clock = 0;   // the worker's clock when it pushed
  std::uint64_t pulled = 0;  // the version that it was computed from
  std::shared_ptr<const Payload> payload;
};

// An entry of the shard's log. Two servers that carry out the same operations in the same order have the same values.
struct Operation {
  std::uint64_t index = 0;  // 1, 2, 3, ...
  BlockId block = 0;
  std::uint64_t version = 0;  // the version that it makes; 0: the first value
  bool restores = false;      // the first value comes from a snapshot, with optimizer states
  std::int32_t priority = 0;
  std::vector<Contribution> contributions;  // ordered by worker
  // It changes a number of the block's rule, as its only contribution says, and makes no version: `version` is the one
  // before.
  bool changes = false;
};

struct Output {
  std::vector<Operation> operations;
  std::vector<Reply> replies;

  bool empty() const { return operations.empty() && replies.empty(); }
  void add(Output more) {
    std::move(more.operations.begin(), more.operations.end(), std::back_inserter(operations));
    std::move(more.replies.begin(), more.replies.end(), std::back_inserter(replies));
  }
};

}  // namespace ringreduce::parameter_server
