// What a client consists of. For the files of client.h.
#pragma once

#include <sched.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/atomics.h"
#include "core/error.h"
#include "parameter_server/client.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {

inline constexpr Nanoseconds kLookEvery = 10 * kMillisecond;  // for servers that have ended
inline constexpr Nanoseconds kLookForCtrlC = 100 * kMillisecond;
inline constexpr int kLooks = 200, kYields = 50;     // before a thread sleeps
inline constexpr std::uint32_t kNobody = INT32_MAX;  // as an address on the wire

// Where a request's data lies in the window: `bytes` go to the server. The piece is given back with the reply.
struct Client::InWindow : Payload {
  InWindow(std::size_t piece, std::size_t offset, std::size_t bytes) : piece(piece), offset(offset), bytes(bytes) {}
  std::size_t piece, offset, bytes;
};

// Whether all of a call is too large to be copied through the caches.
inline bool streams(const std::vector<Part>& parts) {
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes += part.bytes;
  return bytes >= kStreamedBytes;
}

// What is shared with a server of this host.
struct Client::Near {
  Near(const ServerSpec& spec, Lane* lane)
      : values_fd(spec.values),
        bell_fd(spec.bell),
        pidfd(spec.pidfd),
        values(spec.values, spec.capacity, false),
        bell_memory(spec.bell, sizeof(Bell), true),
        lane(lane),
        name(spec.name),
        turn(spec.turn),
        number(spec.number),
        address(spec.address) {}

  Bell& bell() const { return *reinterpret_cast<Bell*>(bell_memory.at()); }
  const BlockWords& words(const Part& part) const {
    return *reinterpret_cast<const BlockWords*>(values.at(part.offset));
  }
  const ValuesHeader& header() const { return *reinterpret_cast<const ValuesHeader*>(values.at()); }
  bool ended() const { return header().ended.load(std::memory_order_seq_cst) != 0 || has_ended(pidfd.get()); }
  bool serves() const { return header().serves.load(std::memory_order_seq_cst) != 0; }
  bool over() const { return bell().over.load(std::memory_order_seq_cst) != 0; }
  void ask(const RequestSlot& slot) {
    lane->requests[asked++ % kMostOutstanding] = slot;
    lane->asked.store(asked, std::memory_order_seq_cst);
  }

  FileDescriptor values_fd, bell_fd, pidfd;
  Mapping values, bell_memory;
  Lane* lane;
  std::string name;
  std::uint32_t turn, number;
  std::string address;
  std::uint64_t asked = 0;
  std::uint64_t taken = 0;  // replies
};

// A request that is to be sent to another host.
struct Client::Item {
  const InWindow* data() const { return static_cast<const InWindow*>(request.payload.get()); }
  // Questions are short, and what is pulled can come while something else is pushed.
  std::int32_t urgency() const { return request.kind == RequestKind::pull ? INT32_MAX : request.priority; }

  Request request;  // with a number if it has been asked of a server that has ended
  std::shared_ptr<Call> call;
  std::byte* into = nullptr;  // where the value that it asks for goes
  std::size_t bytes = 0;      // of the part
  Packing packing = Packing::none;
  std::uint64_t tag = 0;
  std::size_t sent = 0;  // of its data
};

// What is known of a request until it is answered, should its server's backup be asked.
struct Client::Sent {
  std::shared_ptr<Call> call;
  std::byte* into = nullptr;  // as in Item
  std::size_t bytes = 0;
  Packing packing = Packing::none;
};

struct Client::Peer {
  std::string name;
  Session session;
  std::shared_ptr<Near> near = nullptr;    // none: it is on another host
  std::shared_ptr<Near> backup = nullptr;  // the latest that was told of, which may take over; near afterwards
  std::uint32_t address = 0;               // on the wire: see address_of()
  // Those of backups on other hosts that are not asked yet, with their names, in the order in which they may serve.
  std::deque<std::pair<std::uint32_t, std::string>> next = {};
  std::deque<Item> queue = {};  // to another host, in the order of calls
  bool alive = true;
  std::string why = {};                      // it is not
  std::map<std::uint64_t, Sent> calls = {};  // by number
  std::map<BlockId, int> pushes = {};        // not answered
};

// A thread in a call, which has the client for itself. While it waits it moves what goes to and comes from other hosts,
// and takes the turns of its process's server.
struct Client::Hold {
  explicit Hold(Client& client)
      : wire(client.of_this_process().wire_.get()), turns(client.hosted_.get()), lock(client.mutex_) {
    if (wire != nullptr) wire->connections().take_over();
  }
  ~Hold() {
    if (wire != nullptr) wire->connections().hand_over(false);
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  WorkerWire* const wire;
  Server::Turns turns;  // given back when the lock is
  Lock lock;
};

// Lets other threads in, until its end.
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
  if (ready()) return true;
  const Nanoseconds begun = now();
  Nanoseconds looked = begun;  // for Ctrl-C
  for (int idle = 0;; ++idle) {
    const std::uint32_t seen = bell_->rings.load(std::memory_order_seq_cst);
    if (wire_ != nullptr && wire_->connections().progress()) idle = 0;
    feed();
    take_replies();
    if (ready()) return true;
    check_aborted();
    look_for_ended();
    if (ready()) return true;
    const Nanoseconds waited = now() - begun;
    if (waited >= timeout) return false;
    if (take_turns(hold)) idle = 0;
    if (idle < kLooks) {
      cpu_relax();
      continue;
    }
    const Unlocked unlocked(hold.lock);
    if (interrupt_ && begun + waited - looked >= kLookForCtrlC) {
      looked = begun + waited;
      interrupt_();
    }
    if (idle < kLooks + kYields) {
      sched_yield();
    } else {
      hold.turns.leave();
      sleep(seen, std::min(kLookEvery, timeout - waited));
    }
  }
}

}  // namespace ringreduce::parameter_server
