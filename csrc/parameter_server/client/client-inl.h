// How a call of the client waits, for the files that implement it: client*.cpp.
#pragma once

#include <algorithm>

#include "core/error.h"
#include "core/waiting.h"
#include "parameter_server/client/client.h"
#include "parameter_server/server/server.h"

namespace ringreduce::parameter_server {

// Whether a call has so many bytes that it should be copied past the caches.
inline bool streams(const std::vector<Part>& parts) {
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes += part.bytes;
  return bytes >= kStreamedBytes;
}

// Held by a thread during a call; gives it exclusive use of the client, but for the time in which it waits. Then it
// drives the connections to other hosts, and takes the turns of this process's server.
struct Client::Hold final : WaitingDuties {
  explicit Hold(Client& client) : Hold(client, client.shared()) {}
  Hold(Client& client, const Shared& shared)
      : wire(shared.wire),
        alone(!shared.has_near && shared.hosted == nullptr),
        turns(shared.hosted),
        waiting(*client.bell_, kServersPatience, this),
        lock(client.mutex_) {}
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  bool progress() override {
    const bool moved = wire != nullptr && wire->connections().progress();
    return (!sleeps && turns.take()) || moved;
  }
  void hand_over(bool its_sleep) override {
    sleeps = its_sleep;
    turns.leave();
    if (wire != nullptr) wire->connections().hand_over(its_sleep);
  }
  void take_over() override {
    sleeps = false;
    if (wire != nullptr) wire->connections().take_over();
  }
  void rest() override {
    if (wire != nullptr && alone)
      wire->connections().doze();
    else
      sched_yield();
  }
  // Where all servers are on other hosts, rest() sleeps until they send something, so this thread needs no ring.
  Patience patience(Nanoseconds left) const {
    Patience result = kServersPatience;
    if (alone) {
      result.yields = INT_MAX;
      result.yield_for = kForever;
    }
    result.most_sleep = std::min(result.most_sleep, left);
    return result;
  }

  WorkerWire* const wire;
  const bool alone;  // there are no servers on this host
  Turns::Guest turns;
  bool sleeps = false;
  Waiting waiting;
  Lock lock;
};

// Releases the lock for its own lifetime, so that other threads can use the client.
struct Client::Unlocked {
  explicit Unlocked(Lock& lock) : lock(lock) { lock.unlock(); }
  ~Unlocked() { lock.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  Lock& lock;
};

template <class F>
bool Client::wait_until(Hold& hold, Nanoseconds timeout, F&& ready) {
  const auto check_aborted = [this] {
    if (aborted_) throw Error(ErrorKind::aborted, "abort() was called");
  };
  check_aborted();
  hold.waiting.moved();
  if (ready()) return true;
  const Nanoseconds begun = now();
  if (hold.wire != nullptr) hold.wire->connections().progress();  // even if there is no time to wait
  while (true) {
    feed();
    take_replies();
    if (ready()) return true;
    check_aborted();
    look_for_ended();
    if (ready()) return true;
    const Nanoseconds waited = now() - begun;
    if (waited >= timeout) return false;
    const Unlocked unlocked(hold.lock);
    const auto check = [this](Nanoseconds, bool may_call_python) {
      if (may_call_python && interrupt_) interrupt_();
    };
    hold.waiting.idle(kAwaitsAll, check, hold.patience(timeout - waited));
  }
}

}  // namespace ringreduce::parameter_server
