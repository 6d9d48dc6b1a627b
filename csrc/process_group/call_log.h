// The log of a group: its latest calls, as c10d's flight recorder keeps them, counters, and lines for debugging.
//
// torch's own FlightRecorder is not exported from its libraries, so a backend outside torch cannot write into it. This
// one writes the same format, which `torchfrtrace` reads, through torch's DebugInfoWriter (TORCH_FR_DUMP_TEMP_FILE).
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace ringreduce {

// "ringreduce:all_reduce" for OpType::ALLREDUCE: what profiles show. `as_gloo`: "gloo:all_reduce". Lives for ever.
const char* profiling_title(c10d::OpType type, bool as_gloo = false);
// "all_reduce": what stands everywhere else.
const char* name_of(c10d::OpType type);

class CallLog {
 public:
  // The group's entry in a dump.
  struct Group {
    std::string name, description;
    std::vector<std::int64_t> ranks;  // global ranks, in the order of the group's
    int rank = 0;                     // in the group
    std::string id = {};              // which no other group has, of this job or another
    std::string job = {};             // the id of the first of the groups that were made within one another
    std::int64_t made = 0;            // ns since 1970
  };

  // `entries`: how many calls are kept; 0 keeps none. `print`: whether each gives a line on standard error.
  CallLog(std::size_t entries, bool print, Group group);
  ~CallLog();
  CallLog(const CallLog&) = delete;
  CallLog& operator=(const CallLog&) = delete;

  // torch describes a group only after it is made.
  void describe(const std::string& description);

  struct Call {
    c10d::OpType type = c10d::OpType::UNKNOWN;
    std::uint64_t sequence = 0;  // among the group's collectives, or its messages
    int peer = -1;               // messages only; -1 for a receive from any rank
    std::chrono::milliseconds timeout{0};
    // What else ranks must agree on, beside their tensors.
    int root = -1;                          // in the group; -1: the call has none
    std::string_view reduce_op = {};        // of those that reduce, unless by an operator of the user's own
    std::uint64_t own_op = 0;               // its digest
    std::vector<std::int64_t> splits = {};  // all_to_all with split sizes: elements to each rank, then from each
  };

  // Each call is begun when it is made, started when its turn comes (`starts`: at once), and ended. Thread-safe.
  // `begin` returns its id.
  std::uint64_t begin(const Call& call, at::TensorList inputs, at::TensorList outputs, bool starts = false);
  void start(std::uint64_t id);
  void end(std::uint64_t id, c10d::OpType type, bool succeeded, const Tally& tally);

  struct Counters {
    std::uint64_t calls = 0, failed = 0;
    std::uint64_t bytes = 0;  // of the larger side, inputs or outputs
    Tally tally;
  };
  using Statistics = std::map<std::string, Counters>;  // by name_of()
  Statistics statistics() const;

  // Writes the records of all groups of this process, for this group's rank, where c10d's flight recorder would. Where
  // nobody has said where that is, the group's job has a folder of its own there, and the oldest jobs lose theirs. Done
  // in a thread, `after` so long: those who survive have more urgent things to do. A warning tells the place, or why it
  // failed.
  void write_dump(Nanoseconds after) const;
  // Starts that thread now and keeps it, so that no write_dump() has to.
  static void get_ready_to_dump();
  // To be called when the process ends. Dumps are written at once from now on. Returns when none is under way, after
  // `patience` at most.
  static void finish_dumps(Nanoseconds patience);
  // The same as bytes: a pickle.
  static std::string dump();
  // The statistics of all groups of this process, by group name.
  static std::map<std::string, Statistics> all_statistics();

 private:
  struct Entry {
    Call call;
    std::uint64_t id = 0;
    std::uint64_t nth = 0;                           // messages only: among those to, or from, the same peer
    c10::SmallVector<std::int64_t, 8> sizes;         // of all tensors, inputs first
    c10::SmallVector<std::int64_t, 4> dims;          // how many of them each tensor has
    c10::SmallVector<at::ScalarType, 4> dtypes;      // of each tensor
    std::size_t inputs = 0;                          // how many tensors are inputs
    std::int64_t begun = 0, started = 0, ended = 0;  // ns since 1970; 0: not yet
    bool succeeded = false;
    std::uint64_t thread = 0;
  };
  static constexpr std::size_t kTypes = 32;  // all OpTypes that we use are smaller

  // The name and group under which a dump lists an entry.
  struct Heading {
    std::string name;
    Group group;
  };
  // The content of a dump.
  struct Snapshot {
    std::vector<Group> groups;
    std::vector<std::pair<std::size_t, Entry>> entries;  // with the number of their group
  };
  class Dumper;

  static Snapshot snapshot();
  static std::string pickle(Snapshot snapshot);
  static c10::Dict<c10::IValue, c10::IValue> origin(const std::vector<Group>& groups);
  static Heading heading(const Call& call, const Group& group);
  static c10::Dict<c10::IValue, c10::IValue> to_dict(const Entry& entry, const Heading& heading,
                                                     std::size_t group_number, std::size_t number);
  static void append(Entry& entry, at::TensorList tensors);
  Entry* find(std::uint64_t id);
  std::int64_t global_rank() const { return group_.ranks[static_cast<std::size_t>(group_.rank)]; }

  const std::size_t capacity_;
  const bool print_;
  mutable std::mutex mutex_;
  Group group_;
  const bool told_where_;
  std::vector<Entry> entries_;  // by id modulo capacity
  std::uint64_t next_id_ = 0;
  std::array<Counters, kTypes> counters_{};
  std::map<std::pair<c10d::OpType, int>, std::uint64_t> messages_;  // how many, by kind and peer
};

}  // namespace ringreduce
