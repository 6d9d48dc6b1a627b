// The private parts of Client, for the files that implement it: client*.cpp.
#pragma once

#include <sched.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/atomics.h"
#include "core/descriptors.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "parameter_server/client/client.h"
#include "parameter_server/server/server.h"

namespace ringreduce::parameter_server {

inline constexpr Nanoseconds kLookEvery = 10 * kMillisecond;  // between checks for servers that have ended
inline constexpr int kLooks = 200, kYields = 50;     // a waiting thread polls, then yields so often before it sleeps
inline constexpr std::uint32_t kNobody = INT32_MAX;  // the wire address of a server that no replica serves yet

// The data of a request, `bytes` bytes at `offset` in the window's data. Holds the piece that it is in.
struct Client::InWindow : Payload {
  InWindow(const OwnWindow& window, OwnWindow::Piece its, const std::byte* at, std::size_t bytes)
      : piece(std::move(its)), offset(static_cast<std::size_t>(at - window.data())), bytes(bytes) {}
  const OwnWindow::Piece piece;
  const std::size_t offset, bytes;
};

// Makes room for so many elements, so that to add them needs no memory.
template <class T>
void make_room(std::vector<T>& in, std::size_t count) {
  if (in.capacity() < count) in.reserve(std::max(count, 2 * in.capacity()));
}

// Whether a call has so many bytes that it should be copied past the caches.
inline bool streams(const std::vector<Part>& parts) {
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes += part.bytes;
  return bytes >= kStreamedBytes;
}

// The memory shared with a server on this host.
struct Client::Near {
  Near(ServerSpec spec, Lane* lane)
      : values_fd(std::move(spec.values)),
        bell_fd(std::move(spec.bell)),
        pidfd(std::move(spec.pidfd)),
        values(values_fd.get(), spec.capacity, false),
        bell_memory(bell_fd.get(), sizeof(Bell), true),
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
  bool ended() const { return header().ended.load(std::memory_order_seq_cst) != 0 || has_gone(pidfd.get()); }
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

// What is kept of an unanswered request, so that it can be repeated to a backup.
struct Client::Sent {
  std::shared_ptr<Call> call;
  std::byte* into = nullptr;  // where a pulled value goes
  std::size_t bytes = 0;      // of the pulled value
  Packing packing = Packing::none;
};

// A request in the queue to another host.
struct Client::Item : Sent {
  Item(std::shared_ptr<Call> call, RequestKind kind, BlockId block = 0) : Sent{std::move(call)} {
    request.kind = kind;
    request.block = block;
  }
  Item(Sent sent, Request again) : Sent(std::move(sent)), request(std::move(again)) {}

  const InWindow* data() const { return static_cast<const InWindow*>(request.payload.get()); }
  // Pulls go first: they are short, and the values can come back while other data is being pushed.
  std::int32_t urgency() const { return request.kind == RequestKind::pull ? INT32_MAX : request.priority; }

  Request request;        // has a number already if it was sent to a server that has ended, and is now repeated
  std::uint64_t tag = 0;  // connects the request with the frames that carry its data
  std::size_t sent = 0;   // bytes of its data that have been handed to the connection
};

struct Client::Peer {
  std::string name;
  Session session;
  std::shared_ptr<Near> near = nullptr;    // nullptr: the server is reached by TCP
  std::shared_ptr<Near> backup = nullptr;  // the latest backup that this worker was told of; becomes `near`
  std::uint32_t address = 0;               // of the replica that is asked, on the wire: see address_of()
  // Wire addresses and names of attached backups that are not asked yet, in the order in which they may take over.
  std::deque<std::pair<std::uint32_t, std::string>> next = {};
  std::deque<Item> queue = {};               // requests to another host, in the order of calls
  bool alive = true;                         // false: the server is lost
  std::string why = {};                      // the reason, for messages
  std::map<std::uint64_t, Sent> calls = {};  // unanswered requests, by number
  std::map<BlockId, int> pushes = {};        // unanswered pushes, by block
};

// Held by a thread during a call; gives it exclusive use of the client. A thread that waits also drives the connections
// to other hosts, and takes the turns of this process's server.
struct Client::Hold {
  explicit Hold(Client& client) : Hold(client, client.shared()) {}
  Hold(Client& client, const std::pair<WorkerWire*, Server*>& shared)
      : wire(shared.first), turns(shared.second), lock(client.mutex_) {
    if (wire != nullptr) wire->connections().take_over();
  }
  ~Hold() {
    if (wire != nullptr) wire->connections().hand_over(false);
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  WorkerWire* const wire;
  Turns::Guest turns;
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

// Has the thread of the connections to other hosts serve them for its own lifetime.
struct Client::HandedOver {
  explicit HandedOver(WorkerWire* wire) : wire(wire) {
    if (wire != nullptr) wire->connections().hand_over(true);
  }
  ~HandedOver() {
    if (wire != nullptr) wire->connections().take_over();
  }
  HandedOver(const HandedOver&) = delete;
  HandedOver& operator=(const HandedOver&) = delete;

  WorkerWire* const wire;
};

template <class F>
bool Client::wait_until(Hold& hold, Nanoseconds timeout, F&& ready) {
  const auto check_aborted = [this] {
    if (aborted_) throw Error(ErrorKind::aborted, "abort() was called");
  };
  check_aborted();
  if (ready()) return true;
  const Nanoseconds begun = now();
  Nanoseconds looked = begun;  // when interrupt_ was called last
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
      call_python(hold);
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
