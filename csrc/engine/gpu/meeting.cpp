#include "engine/gpu/meeting.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace ringreduce {

void Meeting::compare(Engine& engine, const Call& call) {
  if (ranks_.size() == 1) return;
  std::lock_guard lock(mutex_);
  Made& made = made_.try_emplace(call.number, Made{call.fingerprint, engine.rank(), 0}).first->second;
  if (made.fingerprint != call.fingerprint) {
    engine.fail(Error(ErrorKind::mismatch,
                      call.title + ": ranks of the group made different calls: " + engine.describe(made.rank) +
                          " did not call what " + engine.number(engine.rank()) +
                          " did. All ranks of a group must make the same calls in the same order",
                      made.rank));
    engine.throw_if_aborted();
  }
  if (++made.ranks == ranks_.size()) made_.erase(call.number);
}

void Meeting::meet(Engine& engine, const Call& call, const Action& part, const Action& last) {
  std::unique_lock lock(mutex_);
  parts_.emplace(engine.rank(), &part);
  if (parts_.size() < ranks_.size()) return wait_for_others(engine, lock, call);
  for (const auto& [rank, its] : std::exchange(parts_, {})) (*its)();
  last();
  ++meetings_;
  met_.notify_all();
}

void Meeting::wait_for_others(Engine& engine, std::unique_lock<std::mutex>& lock, const Call& call) {
  const std::uint64_t meeting = meetings_;
  const Nanoseconds deadline = now() + call.timeout;
  const std::string waited = call.title + ": " + engine.number(engine.rank()) + " waited ";
  while (meetings_ == meeting) {
    met_.wait_for(lock, std::chrono::milliseconds(5));
    if (meetings_ != meeting) return;
    const std::vector<int> gone = engine.gone();
    const auto find_absent = [&](auto is) {
      return std::find_if(ranks_.begin(), ranks_.end(), [&](int r) { return !parts_.contains(r) && is(r); });
    };
    if (const auto lost = find_absent([&](int r) { return std::find(gone.begin(), gone.end(), r) != gone.end(); });
        lost != ranks_.end()) {
      engine.fail(
          Error(ErrorKind::peer_lost,
                waited + "for " + engine.describe(*lost) + ", which shares its process and is gone, to make the call",
                *lost));
    } else if (now() >= deadline) {
      const int absent = *find_absent([](int) { return true; });
      engine.fail(Error(ErrorKind::timeout,
                        waited + std::to_string(call.timeout / kSecond) + " s for " + engine.describe(absent) +
                            ", which shares its process, to make the call",
                        absent));
    }
    try {
      engine.throw_if_aborted();
    } catch (...) {
      parts_.erase(engine.rank());
      throw;
    }
  }
}

}  // namespace ringreduce
