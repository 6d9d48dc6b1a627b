// A rank's TCP links to ranks on other hosts.
//
// A rank cannot read the region of a peer on another host (region.h), so it has a mirror of it: memory of its own, of
// the same layout. What the peer puts in its region for this rank comes over a link and is stored in the mirror,
// payload before stamp, by the rules that hold for a region that is shared. Everything above (execution.h, mailbox.h)
// reads mirrors and regions alike. A slot is given back by a frame instead of a store; until then its writer does not
// fill it again, so what arrives always has a place to go, and no frame ever waits for another.
//
// How frames travel, and who moves them, is in connections.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/waiting.h"
#include "transport/connections.h"
#include "transport/fate.h"
#include "transport/frame.h"

namespace ringreduce {

class Links final : public WaitingDuties, private Connections::User {
 public:
  // Makes a link to `peer`; called when one is needed and not there. The sockets come by add(), possibly later, and
  // from any thread. Throws Error.
  using Connect = std::function<void(int peer, Nanoseconds timeout)>;
  using Counters = Connections::Counters;

  // Links of the rank that has the region `own`. `fate` must outlive this object, which tells it of the group's error
  // and of peers that are lost.
  Links(int rank, const Layout& layout, Region own, Fate& fate, Connect connect);
  ~Links() { leave(); }

  // From now on a peer may be connected; what it shows is kept in `mirror`.
  void admit(int peer, Region mirror);

  // See Connections, which has these.
  void add(int peer, int socket, std::string path) { connections_.add(peer, socket, std::move(path)); }
  void send_held() { connections_.send_held(); }
  bool sent() const { return connections_.sent(); }
  int behind() const { return connections_.behind(); }
  void forget_lent() { connections_.forget_lent(); }
  std::string path(int peer) const { return connections_.path(peer); }
  std::vector<Counters> counters() const { return connections_.counters(); }

  // WaitingDuties: a thread that waits moves the bytes.
  bool progress() override { return connections_.progress(); }
  void hand_over(bool sleeps) override { connections_.hand_over(sleeps); }
  void take_over() override { connections_.take_over(); }
  // Gives slots back as well. Where all other ranks are on other hosts, only progress() can end the wait.
  void rest() override {
    send_held();
    if (alone_)
      connections_.doze();
    else
      sched_yield();
  }

  // Returns when there is a link to each of these ranks. Throws what Connect throws, or timeout.
  void reach(std::span<const int> peers, Nanoseconds timeout);

  // This rank has filled a slot of its outbox, or of its mailbox for `peer`.
  void slot_filled(int peer, int channel, std::uint64_t seq, const SlotValue& value);
  void message_filled(int peer, std::uint64_t seq);
  // This rank gives a slot of the peer's back. It may be told a little later, by send_held() at the latest.
  void slot_read(int peer, int channel, std::uint64_t seq);
  void message_read(int peer, std::uint64_t seq);

  // Tells the peers what this rank's control block says, and, once, the group's error if there is one. Unless
  // `at_once`, not more often than ten times a second.
  void tell(bool at_once = false);
  // Has the thread do so. For callers that may be anywhere.
  void tell_soon() { connections_.wake(); }

  // Says goodbye to all peers and ends. Idempotent; from any thread, each of which returns when it is done.
  void leave();

 private:
  std::byte* place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) override;
  void deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) override;
  void left(int peer) override;
  void lost(int peer, const std::string& why) override;
  void failed(const std::bad_alloc& error) override;
  void moved() override;
  void attend(bool woken) override;

  void deliver_error(std::span<const std::byte> payload);

  const Region& mirror(int peer) const { return mirrors_[static_cast<std::size_t>(peer)]; }

  const int rank_;
  const Layout& layout_;
  const Region own_;
  Fate& fate_;
  const Connect connect_;
  std::vector<Region> mirrors_;   // by rank
  bool alone_ = false;            // on this host
  std::mutex telling_;            // so that the latest control block is told last
  std::vector<char> told_error_;  // by rank
  Nanoseconds next_tell_ = 0;
  std::atomic<std::uint64_t> told_calls_ = 0;  // how many calls of this rank the peers have been told of
  Connections connections_;                    // last: its thread uses the rest
};

}  // namespace ringreduce
