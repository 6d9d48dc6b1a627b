// The fate of a team: its first fatal error, the peers that have gone, and the rank that is to blame.
//
// The end of a peer's process is the error of the whole team. Leaving is no failure: a call that still waits for a rank
// that left finds it in gone().
//
// Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/atomics.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/file_descriptor.h"
#include "transport/region.h"

namespace ringreduce {

// A team's first fatal error, in memory that its ranks on a host share; written once, by the rank that wins `state` (0
// none, 1 being written, 2 there).
struct alignas(64) AbortRecord {
  std::atomic<std::uint32_t> state;
  std::atomic<std::uint64_t> failed;  // ~seq of the earliest call that any rank failed in; 0: none
  std::int32_t kind;
  std::int32_t culprit;
  std::int32_t reporter;
  char message[2048];
};

// How a rank is named in messages.
struct RankName {
  std::string host;
  std::int64_t pid = 0;
  int global = -1;  // its global rank, where the group has not all ranks in their order; else -1

  // "rank 3", or "rank 3 (rank 1 of the group)"
  std::string number(int rank) const { return global < 0 ? text(rank) : text(global) + " (" + part(rank) + ")"; }
  // "rank 3 (node7, pid 4711)", or "rank 3 (rank 1 of the group, node7, pid 4711)"
  std::string describe(int rank) const {
    const std::string process = host + ", pid " + std::to_string(pid) + ")";
    return global < 0 ? text(rank) + " (" + process : text(global) + " (" + part(rank) + ", " + process;
  }

 private:
  static std::string text(int rank) { return "rank " + std::to_string(rank); }
  static std::string part(int rank) { return text(rank) + " of the group"; }
};

class Fate {
 public:
  // `spread` is called when there is a fatal error: it wakes all who wait, and has other hosts told. It may be called
  // while connections are locked.
  Fate(AbortRecord& record, int rank, std::size_t ranks, std::function<void()> spread);

  struct Watched {
    RankName name;
    Region region;
    FileDescriptor pidfd = FileDescriptor();  // becomes readable when its process ends; none: not watched
    bool elsewhere = false;                   // its end is told by lost()
  };
  void watch(int rank, Watched watched);
  // A peer on another host is out of reach. No effect once this rank has failed_itself().
  void lost(int rank, const std::string& why);

  // "rank 3 (rank 1 of the group)": see RankName.
  std::string number(int rank) const;
  // The same with its process: "rank 3 (rank 1 of the group, node7, pid 4711)"
  std::string describe(int rank) const;
  // The ranks whose process ends or has ended, which left the team, or which are out of reach.
  std::vector<int> gone() const { return find_gone(true, true); }
  // The same without those that left and whose process lives.
  std::vector<int> ended() const { return find_gone(false, true); }
  // The same as gone() without those whose process has not ended yet: nothing that these ranks do is under way any
  // more.
  std::vector<int> silent() const { return find_gone(true, false); }
  // Which of these it is, in words: "died", "left the group", "is out of reach: Connection reset by peer (...)".
  std::string how_gone(int rank) const;
  // How the process of a rank on this host fares: "is stopped; `kill -CONT 812` lets it go on", "lives; its main thread
  // sleeps". Empty if that cannot be seen.
  std::string condition(int rank) const;

  // Makes `error` the team's fatal error, unless there is one already, and wakes everybody. `reporter`: who found it,
  // if it was not this rank.
  void abort(const Error& error) { abort(error, rank_); }
  void abort(const Error& error, int reporter);
  // The user has interrupted this rank's wait in `what`.
  void interrupt(const std::string& what);
  // Tells the others that this rank fails in call `seq`, before it gives back its tensors.
  void fail(std::uint64_t seq);
  // Whether any rank has failed in call `seq` or an earlier one. Looks after everything that this rank read before.
  bool failed(std::uint64_t seq) const {
    fence(std::memory_order_acquire);
    return record_.failed.load(std::memory_order_seq_cst) >= ~seq;
  }
  bool anybody_failed() const { return record_.failed.load(std::memory_order_seq_cst) != 0; }
  // The fatal error, once it is written; null: there is none.
  const AbortRecord* error() const { return record_.state.load(std::memory_order_seq_cst) == 2 ? &record_ : nullptr; }
  AbortRecord& record() { return record_; }
  // The rank that reported the fatal error; -1 if there is none.
  int reporter() const { return error() != nullptr ? record_.reporter : -1; }
  // Whether the fatal error is that the system has refused this rank something.
  bool failed_itself() const { return reporter() == rank_ && record_.kind == static_cast<int>(ErrorKind::system); }
  // Throws the fatal error, if there is one.
  void throw_if_aborted() const;
  // The same for a rank that waits. First it makes the death of any rank the team's error, so that no wait lasts in a
  // team that has lost a rank, whomever the waiting rank waits for. `call` is the collective under way;
  // 0 stands for none, where nothing is waited for. A collective may end without a dead rank that has done its part in
  // it, so it gets kGrace to do so. A message, which passes nothing, gets none.
  void throw_if_over(std::optional<std::uint64_t> call = std::nullopt);

 private:
  // A rank on another host cannot be seen to have done its part: its death and the rest of the others' data may take
  // different ways here, so this must be longer than data needs from one host to another.
  static constexpr Nanoseconds kGrace = kSecond / 5;

  struct Entry : Watched {
    bool lost = false;
    std::string why;
    Nanoseconds found_dead = 0;  // when; 0: not yet
  };
  const Entry& at(int rank) const { return entries_[static_cast<std::size_t>(rank)]; }
  std::vector<int> find_gone(bool left, bool ending) const;
  std::optional<Error> death_of(int rank, std::optional<std::uint64_t> call);
  std::string words(int rank) const;

  AbortRecord& record_;
  const int rank_;
  const std::function<void()> spread_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;  // by rank
};

}  // namespace ringreduce
