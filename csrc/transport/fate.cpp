#include "transport/fate.h"

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "core/interrupt.h"
#include "core/utf8.h"

namespace ringreduce {

Fate::Fate(AbortRecord& record, int rank, std::size_t ranks, std::function<void()> spread)
    : record_(record), rank_(rank), spread_(std::move(spread)), entries_(ranks) {}

void Fate::watch(int rank, Watched watched) {
  std::lock_guard lock(mutex_);
  entries_[static_cast<std::size_t>(rank)] = Entry{std::move(watched), false, "", 0};
}

void Fate::lost(int rank, const std::string& why) {
  if (failed_itself()) return;  // and has cut its links, which says nothing of the peer
  std::lock_guard lock(mutex_);
  Entry& entry = entries_[static_cast<std::size_t>(rank)];
  entry.lost = true;
  entry.why = why;
}

std::string Fate::number(int rank) const {
  if (rank == rank_) return at(rank).name.number(rank);
  std::lock_guard lock(mutex_);
  return at(rank).name.number(rank);
}

std::string Fate::describe(int rank) const {
  // This rank's own name never changes, and a forked child, whose lock may be held for ever, asks for it.
  if (rank == rank_) return at(rank).name.describe(rank);
  std::lock_guard lock(mutex_);
  return at(rank).name.describe(rank);
}

std::vector<int> Fate::find_gone(bool left, bool ending) const {
  std::lock_guard lock(mutex_);
  std::vector<int> result;
  std::array<pollfd, 64> polled;  // at a time, so that nobody needs memory to look
  for (std::size_t r = 0; r < entries_.size(); ++r) {
    const std::size_t at = r % polled.size();
    if (at == 0) {
      const std::size_t count = std::min(polled.size(), entries_.size() - r);
      for (std::size_t i = 0; i < count; ++i)  // poll ignores negative ones
        polled[i] = {.fd = entries_[r + i].pidfd.get(), .events = POLLIN, .revents = 0};
      poll(polled.data(), count, 0);
    }
    const Entry& entry = entries_[r];
    if (static_cast<int>(r) == rank_) continue;
    const RankControl& control = entry.region.control();
    if (polled[at].revents != 0 || entry.lost || (left && control.has_left()) || (ending && control.life.ends()))
      result.push_back(static_cast<int>(r));
  }
  return result;
}

// With the lock held.
std::string Fate::words(int rank) const {
  const Entry& entry = at(rank);
  if (entry.region.control().has_left()) return "left the group";
  return entry.elsewhere ? "is out of reach: " + entry.why : "died";
}

std::string Fate::how_gone(int rank) const {
  std::lock_guard lock(mutex_);
  return words(rank);
}

std::string Fate::condition(int rank) const {
  std::string pid, word;
  {
    std::lock_guard lock(mutex_);
    // The number that the process has in our PID namespace, which need not be that of its own.
    std::ifstream known("/proc/self/fdinfo/" + std::to_string(at(rank).pidfd.get()));
    while (known >> word && word != "Pid:") {
    }
    known >> pid;
  }
  std::ifstream file("/proc/" + pid + "/stat");
  const std::string stat{std::istreambuf_iterator<char>(file), {}};
  const std::size_t name_ends = stat.rfind(") ");  // a program may be called anything
  switch (name_ends < stat.size() - 2 ? stat[name_ends + 2] : 'X') {
    case 'T':
      return "is stopped; `kill -CONT " + pid + "` lets it go on";
    case 't':
      return "is stopped by a debugger";
    case 'R':
      return "lives; its main thread is running";
    case 'S':
    case 'D':
      return "lives; its main thread sleeps";
    default:
      return "";
  }
}

void Fate::abort(const Error& error, int reporter) {
  std::uint32_t none = 0;
  if (!record_.state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    // Another rank was first. Wait for it to finish writing, so that this rank throws the same error; but not for long,
    // since it may have died in the middle.
    const Nanoseconds deadline = now() + 100 * kMillisecond;
    while (this->error() == nullptr && now() < deadline) sched_yield();
    return;
  }
  record_.kind = static_cast<std::int32_t>(error.kind());
  record_.culprit = error.culprit();
  record_.reporter = reporter;
  const std::size_t length =
      cut(error.what(), sizeof(record_.message) - 1).copy(record_.message, sizeof(record_.message));
  record_.message[length] = '\0';
  record_.state.store(2, std::memory_order_seq_cst);
  spread_();
}

void Fate::fail(std::uint64_t seq) {
  std::atomic<std::uint64_t>& failed = record_.failed;
  std::uint64_t before = failed.load(std::memory_order_relaxed);
  while (before < ~seq && !failed.compare_exchange_weak(before, ~seq, std::memory_order_seq_cst)) {
  }
}

void Fate::throw_if_aborted() const {
  if (error() == nullptr) return;
  // The record lies in memory that peers can write: trust neither the end of its text nor its numbers.
  std::string message(record_.message, strnlen(record_.message, sizeof(record_.message)));
  const std::int32_t kind = record_.kind, culprit = record_.culprit, reporter = record_.reporter;
  if (reporter != rank_ && reporter >= 0 && reporter < static_cast<int>(entries_.size()))
    message += " [reported by " + number(reporter) + "]";
  const bool known =
      kind >= static_cast<int>(ErrorKind::invalid_argument) && kind <= static_cast<int>(ErrorKind::system);
  throw Error(known ? static_cast<ErrorKind>(kind) : ErrorKind::system, message,
              culprit >= 0 && culprit < static_cast<int>(entries_.size()) ? culprit : -1);
}

// The team's error, if this rank, which has gone, is the reason for one.
std::optional<Error> Fate::death_of(int rank, std::optional<std::uint64_t> call) {
  std::lock_guard lock(mutex_);
  Entry& entry = entries_[static_cast<std::size_t>(rank)];
  const RankControl& control = entry.region.control();
  if (control.has_left()) return std::nullopt;
  if (call && (entry.elsewhere || control.completed.load(std::memory_order_acquire) >= *call)) {
    if (entry.found_dead == 0) entry.found_dead = now();
    if (now() - entry.found_dead < kGrace) return std::nullopt;
  }
  return Error(ErrorKind::peer_lost, entry.name.describe(rank) + " " + words(rank), rank);
}

void Fate::interrupt(const std::string& what) { abort(interrupted_in(what, describe(rank_), rank_)); }

void Fate::throw_if_over(std::optional<std::uint64_t> call) {
  throw_if_aborted();
  for (const int rank : gone())
    if (const auto death = death_of(rank, call)) {
      abort(*death);
      throw_if_aborted();
      throw *death;
    }
}

}  // namespace ringreduce
