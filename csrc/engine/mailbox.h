// Point-to-point messages with tags: send, receive, receive from any source.
//
// Each ordered pair of ranks has a mailbox, a queue of slots in the sender's region. A message travels as one or more
// slots in a row, which are filled through the caches or past them, whichever has just been faster. A send is complete
// when its last slot is filled, so small sends do not wait for the receiver. A message that no posted receive asks for
// stays in its mailbox, unless a receive wants one behind it: then it is set aside in memory of our own. Messages
// between two ranks with the same tag are received in the order they were sent.
//
// Thread-safe. A thread that waits drives the progress of all messages. Messages that nobody waits for are driven by a
// thread of the mailbox, which the first message starts.
//
// A message that times out breaks the group, since part of it may be under way. One that meets a receive of another
// size or dtype does not: it is dropped, and the receive throws mismatch. A receive from any source ends with peer_lost
// when all possible sources are gone.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/fastest.h"
#include "core/types.h"
#include "core/waiting.h"
#include "engine/late.h"
#include "transport/team.h"

namespace ringreduce {

inline constexpr int kAnySource = -1;

// A message on its way. The memory it names must stay valid until it is done.
struct Message {
  bool sends = false;
  int peer = kAnySource;  // whom it goes to or comes from; a receive from any source learns it on arrival
  std::uint64_t tag = 0;
  DType dtype = DType::uint8;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  Nanoseconds timeout = 0;                          // from the moment it was posted
  std::function<void(std::exception_ptr)> on_done;  // called once, without any lock held; must not throw

  // Written under the mailbox's lock.
  Nanoseconds posted = 0;
  std::size_t moved = 0;  // bytes
  bool done = false;
  std::optional<Error> error;
};

class Mailbox {
 public:
  Mailbox(std::shared_ptr<Team> team, const Patience& patience);
  ~Mailbox();

  // Starts a message; it moves as far as it can at once. If this throws, nothing of it has moved.
  void post(const std::shared_ptr<Message>& message);
  // Ends when the message is done; throws its error. Throws timeout when `patience` is over; the message lives on then.
  void wait(const std::shared_ptr<Message>& message, Nanoseconds patience = kForever);
  // Ends all pending messages, and the thread. Idempotent. Needs no memory.
  void stop();

 private:
  // How a slot is filled, if the receiver is on this host.
  enum Copy : std::size_t { cached, streamed };
  // How a slot was filled, and how long that took, until the receiver has said how long it took there.
  struct Put {
    bool timed = false;
    std::size_t copy = cached;
    int size_class = 0;
    Nanoseconds spent = 0;
  };
  // A message that arrives: its remaining slots belong to it.
  struct Arrival {
    std::uint64_t tag = 0;
    DType dtype = DType::uint8;
    std::size_t bytes = 0, moved = 0;
    std::vector<std::byte> aside;      // where it goes while no receive wants it
    std::shared_ptr<Message> receive;  // or the receive it goes to
  };
  // The messages between this rank and one peer.
  struct Pair {
    std::uint64_t sent = 0, received = 0;  // slots
    std::deque<std::shared_ptr<Message>> sends;
    std::map<int, Fastest<2>> ways;   // Copy, by the bytes in a slot up to a factor of two
    std::vector<Put> puts;            // by slot: what is in it
    std::deque<Arrival> arrived;      // set aside, in order; the last may still be arriving
    std::optional<Arrival> arriving;  // into a receive
  };

  using Messages = std::list<std::shared_ptr<Message>>;

  bool progress();
  void finish(Messages finished);
  bool send_some(int rank, Pair& pair);
  void fill(Pair& pair, MessageHeader& slot, const std::byte* from, std::size_t bytes) const;
  bool receive_some(int rank, Pair& pair);
  bool deliver_set_aside(const std::shared_ptr<Message>& receive);
  std::shared_ptr<Message> take_receive(int source, std::uint64_t tag);
  bool wanted_from(int source) const;
  void begin(Arrival& arrival, int source);
  void complete(Message& message, std::optional<Error> error = std::nullopt);
  std::string check();
  void look();
  std::string whom(const Message& message) const;
  std::string warning(Nanoseconds t);
  void withdraw(const std::shared_ptr<Message>& message, const Error& error);
  template <class Ends, class Check>
  void move_until(std::unique_lock<std::mutex>& lock, Ends ends, Check check);
  void drive();

  const std::shared_ptr<Team> team_;
  const Patience patience_;
  std::mutex mutex_;
  std::condition_variable work_;
  Standstill standstill_;    // time that no message's timeout counts
  std::vector<Pair> pairs_;  // by peer
  Messages receives_;        // posted, not matched, oldest first
  Messages finished_;        // done; on_done still to be called, without the lock
  Messages all_;             // every message that is not done, oldest first
  // The oldest message at the latest look: how much of it had moved, and since when.
  struct {
    std::weak_ptr<Message> message;
    std::size_t moved = 0;
    Nanoseconds since = 0;
    Reminder reminder;
  } stuck_;
  const Error stopped_{ErrorKind::aborted, "the group was destroyed before the message was done"};
  bool stopping_ = false;
  std::thread driver_;
};

}  // namespace ringreduce
