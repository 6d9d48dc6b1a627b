// A rank's TCP links to ranks on other hosts.
//
// A rank cannot read the region of a peer on another host (segment.h), so it has a mirror of it: memory of its own, of
// the same layout. What the peer puts in its region for this rank comes over a link and is stored in the mirror,
// payload before stamp, by the rules that hold for a region that is shared. Everything above (execution.h, mailbox.h)
// reads mirrors and regions alike. A slot is given back by a frame instead of a store; until then its writer does not
// fill it again, so what arrives always has a place to go, and no frame ever waits for another.
//
// A link is one or more connections, over one or more network interfaces. Each takes the next frame when its socket
// accepts more, so a faster path carries more, without anybody measuring (TCP_NOTSENT_LOWAT keeps the kernel from
// accepting much more than it can send).
//
// Who moves the bytes: whoever waits (progress()), so that what arrives is found where it is needed, without a thread
// in between. When nobody waits, or all who do sleep, a thread of this object does.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "transport/frame.h"

namespace ringreduce {

class Links {
 public:
  // Has a link to `peer` made; called when one is needed and not there. What it makes comes by add(), also later, and
  // from any thread. Throws Error.
  using Connect = std::function<void(int peer, Nanoseconds timeout)>;

  struct Counters {
    int peer;
    std::vector<std::string> paths;  // of the connections
    std::uint64_t bytes_out, bytes_in, frames_out, frames_in;
    Nanoseconds round_trip = 0;  // as TCP finds it, of the slowest connection
    std::uint64_t resent = 0;    // segments of TCP, of all connections
  };

  // `segment`, which must outlive this object, holds the mirrors.
  Links(const Segment& segment, Connect connect);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  // Takes over a connected socket, of which nothing has been read that the peer sent as a frame. `path` is how messages
  // name it. Closes it if the group is over.
  void add(int peer, int socket, std::string path);
  // Returns when there is a link to each of these ranks. Throws what Connect throws, or timeout.
  void reach(std::span<const int> peers, Nanoseconds timeout);
  bool reaches(int peer) const;

  // This rank has filled a slot of its outbox, or of its mailbox for `peer`.
  void slot_filled(int peer, int channel, std::uint64_t seq, const SlotValue& value);
  void message_filled(int peer, std::uint64_t seq);
  // This rank gives a slot of the peer's back. It may be told a little later, by settle() at the latest.
  void slot_read(int peer, int channel, std::uint64_t seq);
  void message_read(int peer, std::uint64_t seq);
  void settle();

  // Whether all that was to be sent has been handed to the kernel.
  bool sent() const { return unsent_.load(std::memory_order_acquire) == 0; }
  // After a failure: nothing is sent from memory that was lent any more.
  void forget_lent();

  // Tells the peers what this rank's control block says, and, once, the group's error if there is one. Unless
  // `at_once`, not more often than ten times a second.
  void tell(bool at_once = false);
  // Has the thread do so. For callers that may be anywhere.
  void tell_soon();

  // Moves what can be moved; returns whether anything did. Never blocks.
  bool progress();

  // Returns when there may be something to move, or after a millisecond. For the one thread of a rank that waits, as
  // what another one moves does not wake it.
  void doze() const;

  // A thread calls these when it begins to call progress() frequently, and when it stops.
  void take_over() { pollers_.fetch_add(1, std::memory_order_seq_cst); }
  void hand_over(bool sleeps);

  // The peers whose link broke, and why the link to one did: "connection reset by peer (10.0.0.1:5 -> 10.0.0.2:6)".
  std::vector<int> lost() const;
  std::string reason(int peer) const;
  // How a peer is reached: "10.0.0.1:5 -> 10.0.0.2:6 via eth0"; empty if there is no link.
  std::string path(int peer) const;
  std::vector<Counters> counters() const;

  // Says goodbye to all peers and ends. Idempotent; from any thread, each of which returns when it is done.
  void leave();

 private:
  struct Outgoing {
    FrameHeader header;
    const std::byte* data = nullptr;
    std::shared_ptr<std::byte[]> own = nullptr;  // the payload, if nobody else keeps it
    bool lent = false;
  };
  struct Connection {
    int socket = -1;
    std::string path;
    bool wants_out = false;   // whether epoll tells when it accepts more
    bool said_leave = false;  // which is the last frame that it takes
    bool heard_leave = false;
    std::vector<Outgoing> sending;  // frames it has taken
    std::size_t sent = 0;           // bytes of them
    // What arrives: a frame whose payload is under way, and bytes that have not been looked at.
    FrameHeader header;
    std::byte* into = nullptr;
    std::size_t missing = 0;
    std::vector<std::byte> staged;
    std::size_t staged_begin = 0, staged_end = 0;
    std::vector<std::byte> aside;  // a payload that is not stored as it comes
    bool receiving = false;
  };
  struct Link {
    std::vector<std::unique_ptr<Connection>> connections;
    std::deque<Outgoing> queue;
    std::vector<FrameHeader> held;  // slots to be given back
    std::string broken;             // why; empty: it is not
    bool leaving = false;           // every connection is to say so, after all that it has to send
    bool left = false;              // the peer said so over every connection
    bool told_error = false;
    std::uint64_t bytes_out = 0, bytes_in = 0, frames_out = 0, frames_in = 0;
  };

  Link& link(int peer) { return links_[static_cast<std::size_t>(peer)]; }
  const Link& link(int peer) const { return links_[static_cast<std::size_t>(peer)]; }
  void enqueue(int peer, Outgoing frame, bool first = false);
  void flush(int peer);
  bool send_some(int peer, Connection& connection);
  bool receive_some(int peer, Connection& connection);
  void digest(int peer, Connection& connection);
  static std::byte* aside_for(Connection& connection, const FrameHeader& header);
  std::byte* place_for(int peer, Connection& connection, const FrameHeader& header);
  void deliver(int peer, Connection& connection);
  void believe_leave(int peer);
  void deliver_error(std::span<const std::byte> payload);
  void close_one(int peer, Connection& connection);
  void break_link(int peer, const std::string& why);
  void watch(int peer, std::size_t number, bool out);
  void tell_now();
  void unpark();
  void drive();
  void say_goodbye();

  const Segment& segment_;
  const Connect connect_;
  const int poll_;   // epoll
  const int waker_;  // eventfd: ends the thread's sleep
  mutable std::mutex mutex_;
  std::condition_variable added_;
  std::vector<Link> links_;
  std::atomic<std::uint64_t> unsent_ = 0;  // frames
  std::atomic<int> pollers_ = 0;
  std::atomic<Nanoseconds> last_polled_ = 0;
  Nanoseconds next_tell_ = 0;
  bool closed_ = false;

  std::mutex parking_;
  std::condition_variable unpark_;
  std::atomic<bool> parked_ = false, urgent_ = false, stopping_ = false;
  std::thread driver_;
  std::once_flag left_;
};

}  // namespace ringreduce
