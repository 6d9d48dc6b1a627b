// What workers and shards of the parameter server say to each other, and what a shard decides.
//
// A tensor is cut in blocks; a shard is the blocks of one server. These are plain values without addresses of their
// own, so the same structures go through shared memory, over a connection, and through the simulator.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "core/clock.h"

namespace ringreduce::parameter_server {

using WorkerId = std::uint32_t;
using BlockId = std::uint32_t;

// What a push carries. The protocol passes it on and never looks inside; a driver derives from it. It is released when
// nobody needs it any more: applied, dropped, or a duplicate.
struct Payload {
  virtual ~Payload() = default;
};

enum class Consistency : std::uint32_t { sync, asynchronous, ssp };

// How the pushes to a key become updates.
struct Mode {
  Consistency consistency = Consistency::sync;
  std::uint32_t quorum = 0;       // sync: contributions that let a round end early; 0: none do
  Nanoseconds grace = 0;          // sync: how long a round stays open after its quorum
  std::uint64_t staleness = 0;    // ssp: by how many clocks a pull may miss the pushes of others
  std::string group = "workers";  // sync and ssp: whose members count

  bool operator==(const Mode&) const = default;
};

// ---- What a worker asks -------------------------------------------------------------------------------------------

enum class RequestKind : std::uint32_t {
  initialise = 1,  // the block's first value, unless it has one
  push,            // a contribution
  pull,            // tell me when the block may be read
  clock,           // all my pushes of this clock have been sent
  barrier,         // tell me when all members of my group are here
  leave,           // I take no further part
  restore,  // what a snapshot has of the block, of a table's perhaps some of its rows, unless it has been updated
};

// The requests of one worker to one shard are numbered 1, 2, 3, ... and take effect in that order, each once.
struct Request {
  RequestKind kind = RequestKind::pull;
  WorkerId worker = 0;
  std::uint64_t number = 0;
  std::uint64_t seen = 0;  // the worker has the replies to all requests up to this one
  BlockId block = 0;
  std::int32_t priority = 0;               // push: among the updates that are ready at once, the greatest goes first
  std::uint64_t round = 0;                 // push in sync: the round it is for, which makes version round + 1
  std::uint64_t pulled = 0;                // push: the version that it was computed from, for update functions
  double weight = 1;                       // push
  std::shared_ptr<const Payload> payload;  // initialise, push, restore
};

enum class Outcome : std::uint32_t {
  applied = 1,  // push: in the value
  late,         // push: its round had ended without it; dropped
  initialised,  // initialise: this is the first value
  kept,         // initialise: the block had a value, and keeps it
  ready,        // pull: the block may be read
  done,         // clock, barrier, leave
  failed,       // push: the update function raised an error, and the value is what it was; decided by the driver
  refused,      // the worker is not a member any more, or there is no such block
};

struct Reply {
  WorkerId worker = 0;
  std::uint64_t number = 0;
  Outcome outcome = Outcome::done;
  std::uint64_t version = 0;  // of the block
  // The reply may leave when this operation of the log has been carried out; `done`, when those before it have, too.
  std::uint64_t after = 0;
};

// ---- What else happens to a shard ---------------------------------------------------------------------------------

struct Join {
  WorkerId worker;
  std::string group;
};
// The worker's process has ended, or is given up.
struct Lose {
  WorkerId worker;
};
// A block, with the next free id.
struct Create {
  Mode mode;
  bool grows = false;  // a table's: it has no first value, as its rows come later
};
// Time has passed: see Shard::deadline().
struct Tick {};

using Message = std::variant<Request, Join, Lose, Create, Tick>;

// ---- What a shard decides -----------------------------------------------------------------------------------------

struct Contribution {
  WorkerId worker = 0;
  double weight = 1;
  std::uint64_t clock = 0;   // the worker's when it pushed
  std::uint64_t pulled = 0;  // the version that it was computed from
  std::shared_ptr<const Payload> payload;
};

// An entry of the shard's log: whoever carries out the same operations in the same order has the same values.
struct Operation {
  std::uint64_t index = 0;  // 1, 2, 3, ...
  BlockId block = 0;
  std::uint64_t version = 0;  // that it makes; 0: the first value
  bool restores = false;      // the first value is what a snapshot had, with its states
  std::int32_t priority = 0;
  std::vector<Contribution> contributions;  // in the order of workers
};

struct Output {
  std::vector<Operation> operations;
  std::vector<Reply> replies;
};

}  // namespace ringreduce::parameter_server
