// A process's connections to its peers: the order of sending, one epoll for all of them, and the thread that serves
// them while nobody else does. The users of this class, such as links.h, know what frames mean.
//
// A peer has one or more connections, over one or more network interfaces. Each takes the next frame when its socket
// accepts more, so a faster path carries more, without anybody measuring (TCP_NOTSENT_LOWAT keeps the kernel from
// accepting much more than it can send).
//
// A thread that waits moves the bytes (progress()), so arriving data is found where it is needed, without another
// thread in between. When no thread waits, or all of them sleep, a thread of this object moves the bytes.
//
// Peers come by add() and go by drop(), at any time, and one that breaks changes nothing for the others.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.h"
#include "core/doorbell.h"
#include "transport/connection.h"

namespace ringreduce {

class Connections {
 public:
  // Unless it says otherwise, what is called here may not call back but for wake().
  class User : public FrameUser {
   public:
    // The peer has said over every connection that it takes no further part.
    virtual void left(int peer) = 0;
    // The peer is out of reach: "connection reset by peer (10.0.0.1:5 -> 10.0.0.2:6)".
    virtual void lost(int peer, const std::string& why) = 0;
    // This process has no memory for its connections. If a peer's are lost by that, lost() follows.
    virtual void failed(const std::bad_alloc&) {}
    // Something has arrived, or more can be sent, for threads other than the one that found it.
    virtual void moved() = 0;
    // Called by the thread, which may call back: soon after wake() with `woken`, otherwise now and then while nobody
    // else moves bytes.
    virtual void attend(bool woken) = 0;

   protected:
    ~User() = default;
  };

  struct Counters : Traffic {
    int peer;
    std::vector<std::string> paths;  // of the connections
    Nanoseconds round_trip = 0;      // as TCP finds it, of the slowest connection
    std::uint64_t resent = 0;        // segments of TCP, of all connections
  };

  // `user` must outlive leave().
  explicit Connections(User& user);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Takes over a connected socket, of which nothing has been read that the peer sent as a frame. Closes it if this
  // object is at its end, or the peer is lost.
  void add(int peer, int socket, std::string path);
  // Closes what there is to a peer and forgets it. It may be added again.
  void drop(int peer);
  bool reaches(int peer) const;
  // Returns whether the peer is reached or lost, at the latest after `timeout`.
  bool wait_for(int peer, Nanoseconds timeout);

  // Sends a frame: in its turn, after those that are held for the peer; before all that wait; or before all, in the
  // place of one of its kind that waits.
  enum class When { in_turn, first, latest };
  void send(int peer, Frame frame, When when = When::in_turn);
  // Sends a frame without a payload, perhaps a little later: with the next one that has its turn, when `most` are held,
  // or at send_held().
  void hold(int peer, const FrameHeader& header, std::size_t most);
  void send_held();

  // Whether all that was to be sent has been handed to the kernel.
  bool sent() const { return unsent_.load(std::memory_order_acquire) == 0; }
  // A peer that something is still to be sent to; -1 if there is none.
  int behind() const;
  // Whether a connection would take a frame to the peer next. A user with much to send asks this first, so that a more
  // important frame can still go before it.
  bool takes_next(int peer) const;
  // Nothing is sent from memory that was lent any more.
  void forget_lent();
  // Nothing that comes from the peer is stored in [begin, begin + bytes) any more.
  void turn_away(int peer, const std::byte* begin, std::size_t bytes);

  // Moves what can be moved; returns whether anything did. Never blocks.
  bool progress();
  // Returns when there may be something to move, or after a millisecond. For the one thread of a rank that waits, as
  // what another one moves does not wake it.
  void doze() const;
  // A thread calls these when it begins to call progress() frequently, and when it stops.
  void take_over() { pollers_.fetch_add(1, std::memory_order_seq_cst); }
  void hand_over(bool sleeps);
  // Has the thread call attend() at once. For callers that may be anywhere.
  void wake();

  // How a peer is reached: "10.0.0.1:5 -> 10.0.0.2:6 via eth0"; empty if it is not.
  std::string path(int peer) const;
  std::vector<Counters> counters() const;

  // Says goodbye to all peers and ends. Idempotent; from any thread, each of which returns when it is done.
  void leave();

 private:
  // All there is to one peer.
  struct Link {
    std::vector<std::unique_ptr<Connection>> connections;
    std::deque<Frame> queue;
    std::vector<FrameHeader> held;
    bool broken = false;
    bool leaving = false;  // every connection is to say so, after all that it has to send
    bool left = false;     // the peer said so over every connection
  };

  const Link* find(int peer) const;
  void enqueue(Link& link, Frame frame, bool first);
  void release_held(Link& link, bool first);
  bool flush(int peer, Link& link);
  void watch(int peer, const Link& link, std::size_t number, bool out) const;
  bool serve(int peer, Link& link, std::size_t number, std::uint32_t events);
  Connection::Received receive(int peer, Link& link, Connection& connection);
  void believe_leave(int peer, Link& link);
  void discard(Link& link);
  void break_link(int peer, Link& link, const std::string& why);
  void run_out(int peer, Link& link, const std::bad_alloc& error);
  void drive();
  void say_goodbye();

  User& user_;
  const PrivateDescriptor poll_;   // epoll
  const PrivateDescriptor waker_;  // eventfd: ends the thread's sleep
  mutable std::mutex mutex_;
  std::condition_variable added_;
  std::map<int, Link> links_;
  std::atomic<std::uint64_t> unsent_ = 0;  // frames
  std::atomic<int> pollers_ = 0;
  std::atomic<Nanoseconds> last_polled_ = 0;
  bool closed_ = false;

  Doorbell taken_over_{};  // where the thread sleeps while others poll
  std::atomic<bool> woken_ = false, stopping_ = false;
  std::thread driver_;
  std::once_flag left_;
};

}  // namespace ringreduce
