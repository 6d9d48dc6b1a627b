// A server: a shard, the values of its blocks, and the thread that serves them to workers.
//
// A turn takes requests from the windows and from connections to other hosts, passes them to the shard, carries out the
// resulting operations and sends the replies.
//
// A server may have a backup, which is another server that can take over from it (near_log.h), or may be a backup
// itself.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "parameter_server/server/follower.h"
#include "parameter_server/server/leader.h"
#include "parameter_server/server/turns.h"
#include "parameter_server/server/unconfirmed.h"

namespace ringreduce::parameter_server {

class Server : public Turns {
 public:
  struct Hooks {
    // Calls `body` with what `update` needs, such as the GIL.
    std::function<void(const std::function<void()>&)> enter = [](const auto& body) { body(); };
    // Computes an update. If it throws, the pushes are answered with Outcome::failed.
    std::function<void(const PythonUpdate&)> update;
    Roots roots = nullptr;
    // Writes a line to the owner's log.
    std::function<void(const std::string&)> warn = [](const std::string&) {};
  };
  struct Statistics {
    std::uint64_t requests = 0, updates = 0, bytes = 0, workers = 0, blocks = 0, memory = 0, capacity = 0, rows = 0;
    Shard::Waiting waiting;
    std::map<WorkerId, std::uint64_t> clocks;
    bool saving = false;    // a snapshot is being written
    std::string backup;     // the backup's name; "": there is none
    std::uint64_t lag = 0;  // bytes of the log that the backup has not carried out
  };

  // `capacity` bounds the bytes of values, both buffers and the optimizer states included. `backed_up`: this server is
  // to have a backup on its own host, or to be one. Throws Error(system).
  Server(std::size_t capacity, Hooks hooks, bool backed_up = false);
  ~Server() override;

  int values() const { return replica_.blocks.values().get(); }
  std::size_t capacity() const { return replica_.blocks.capacity(); }

  // The following functions may be called by any thread. They return after a turn has carried them out, and throw
  // Error(aborted) after stop().

  // Lets in a worker on this host. Throws Error(invalid_argument) if the window does not match the specification.
  void join(WorkerSpec worker);
  // Lets in a worker on another host, of which at most `window` bytes of pushes may be under way. connect() then adds
  // connections to it, and takes over the sockets.
  void join_far(WorkerId id, const std::string& group, std::size_t window, const std::string& name = {});
  void connect(WorkerId id, int socket, std::string path);
  // Removes a worker, which gets no more replies. No effect if it is not there.
  void lose(WorkerId worker);
  // Makes a block; returns its id and its offset in the values. Throws Error(invalid_argument) if there is no room or
  // no such update of the dtype, and Error(system) if the backup does not confirm it in time.
  std::pair<BlockId, std::size_t> create(const BlockSpec& wanted);
  // Calls `question` with the replica.
  template <class F>
  auto ask(F&& question) {
    return order([&] { return question(replica_); });
  }
  // After a takeover: the members that have not connected to this server yet, and for which it still waits.
  std::vector<WorkerId> missing();
  Statistics statistics();

  // Begins a snapshot, as Blocks::begin_snapshot().
  std::vector<Snapshot::Entry> begin_snapshot();
  // Whether the server takes no requests until pieces have been taken.
  bool holds_back() const { return replica_.blocks.too_many_copied(); }

  // ---- Backups (near_log.h) ----
  // A backup can take over only when it *counts*: it has the whole state of its server and, if it is reached by TCP, is
  // recorded in the store as the backup.

  // Gives this server a backup, which is sent the state and then the log. Throws Error(invalid_argument) if a block
  // is updated by Python. On its own host, an earlier backup counts no longer; if the backup ends, this server goes on
  // alone; and no worker may be on another host. On another host, the server must have no backup.
  void lead(std::unique_ptr<Partner> backup);
  // Makes this server the backup of another one. It takes over when that one has ended. It must not have workers or
  // blocks yet.
  void follow(std::unique_ptr<Partner> server);
  // Adds a connection to a partner that is reached by TCP (far_log.h), and takes over the socket.
  void connect_partner(int socket, std::string path);
  // Called after the backup follows and the store has recorded that it counts.
  void count_backup();
  // Before the server leaves its blocks to a backup on another host: takes no requests any more, writes one more
  // record, and returns the length of the log. A backup that has confirmed this position has everything, and was
  // reachable after the call.
  std::uint64_t freeze();
  void unfreeze();
  // Tells a server whose partner is out of reach whether it goes on. If it does, a server goes on alone, and a backup
  // takes over; if not, it has ended for its workers. No effect if there is no partner that is out of reach.
  void decided(bool goes_on);
  // Drops a backup that does not count yet.
  void abandon_backup();
  // Leaves the blocks to the backup, which becomes the heir. A backup on another host must have confirmed the position
  // that freeze() returned, and be recorded in the store as the server. There are two copies at every moment: the heir
  // serves once it has a backup of its own that counts, or after serve_alone(). Until then this server keeps everything
  // and goes on if the heir ends; afterwards it has ended.
  void leave_to_backup();
  bool leaves();
  void serve_alone();
  bool serves();     // it is not a backup, or has taken over
  bool has_ended();  // it has been stopped or replaced, has failed, or was a backup and has been dropped
  bool failed_alone() const { return failed_alone_; }  // it served and has failed, and has no backup
  struct Standing {
    std::uint32_t turn = 0;  // the value of Lane::turn while it serves
    bool is_heir = false;
    // Of a backup that is not out of reach:
    bool has_backup = false;      // it counts
    bool backup_starts = false;   // it does not count yet
    bool backup_follows = false;  // it has received the whole state
    std::uint64_t confirmed = 0;  // the position in the log that it has confirmed
  };
  Standing standing();
  // For tests, as Replica::die_at().
  void die_at(Step step, std::uint64_t times) {
    order([&] { replica_.die_at(step, times); });
  }

 private:
  // A primary takes requests. Before it leaves its blocks to its backup it is frozen: it takes no more, and carries out
  // those that it has. A backup repeats the log of its server. The heir of a server that leaves, or has left, has all
  // of its log, and becomes the primary once it has a backup of its own or serve_alone() is called.
  enum class Role { primary, frozen, leaving, backup, heir, ended };
  bool in_charge() const { return role_ != Role::backup && role_ != Role::ended; }  // carries out what it decides

  void begin_turns() override;
  void end_turns() override;
  bool turn(bool may_call_python) override;
  Nanoseconds due_in() const override;
  bool polls() const override;
  Nanoseconds most_sleep() const override;
  void show() override;
  void close() override;
  bool serve(bool may_call_python);
  bool take_requests();
  bool take_request(Port& port);
  bool take_frames();
  void take(Port& port, const RequestSlot& slot);
  void end(Port& port);
  void forget_gone();
  void look_for_ended();
  void decide(const Message& message);
  void write_down_and_decide(const Message& message);
  void carry_out();
  void answer(const Reply& reply, const Operation* operation, bool has_failed);
  void send_replies();
  ValuesHeader& header() const { return replica_.blocks.header(); }
  bool may_take() const;
  bool release_held();
  void note_failure(std::string_view why);
  void tell_failure();
  void fall(const std::exception& error);
  void cease();
  bool partners_move();
  bool follow_on();
  void retire(std::string_view why);
  bool give_blocks(bool moved);
  void backup_counts();
  void tell(Port& port);
  bool repeat_all(bool all);
  void look_for_partner();
  bool tell_heir(bool late);
  void look_for_heir();
  void come_back();
  void settle_workers();
  void lose_missing();
  void take_over();

  const bool backed_up_;
  const Hooks hooks_;
  std::unique_ptr<ServerWire> wire_;

  Replica replica_;
  bool has_far_ = false;    // there are workers on other hosts
  bool only_near_ = false;  // it has a backup on this host or was one, so it takes no workers of other hosts
  Nanoseconds looked_ = 0, missing_until_ = kForever;
  Role role_ = Role::primary;
  std::atomic<bool> failed_alone_ = false;
  std::uint32_t backups_made_ = 0;      // by this server
  std::string name_, address_;          // of this server, if it is or was a backup on its server's host
  FileDescriptor pidfd_;                // of this process, if so: to take over must need none
  std::unique_ptr<Leader> leader_;      // there is a backup
  std::unique_ptr<Follower> follower_;  // this is a backup
  Unconfirmed unconfirmed_;
};

}  // namespace ringreduce::parameter_server
