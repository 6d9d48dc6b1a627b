// A server: a shard, the values of its blocks, and the thread that serves them to workers.
//
// A turn takes requests from the windows and from connections to other hosts, passes them to the shard, carries out the
// resulting operations and sends the replies.
//
// One thread at a time takes turns, and has the server for itself, so there are no locks inside. This is the server's
// thread or, while it waits, a worker's thread of the same process: then no other thread has to wake up between a
// request and its reply. Calls of all other threads are queued until the next turn (order()).
//
// A server may have a backup, which is another server that can take over from it (journal.h), or may be a backup
// itself.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "core/descriptors.h"
#include "core/fork.h"
#include "parameter_server/follower.h"

namespace ringreduce::parameter_server {

class Server {
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
    std::uint64_t lag = 0;  // bytes of the journal that the backup has not carried out
  };

  // `capacity` bounds the bytes of values, both buffers and the optimizer states included. `backed_up`: this server is
  // to have a backup on its own host, or to be one. Throws Error(system).
  Server(std::size_t capacity, Hooks hooks, bool backed_up = false);
  ~Server();

  int values() const { return replica_.blocks.values().get(); }
  int bell() const { return bell_fd_.get(); }
  std::size_t capacity() const { return replica_.blocks.capacity(); }

  // The following functions may be called by any thread. They return after a turn has carried them out, and throw
  // Error(aborted) after stop().

  // Lets in a worker on this host. Throws Error(invalid_argument) if the window does not match the specification.
  void join(const WorkerSpec& worker);
  // Lets in a worker on another host, of which at most `window` bytes of pushes may be under way. connect() then adds
  // connections to it, and takes over the sockets.
  void join_far(WorkerId id, const std::string& group, std::size_t window, const std::string& name = {});
  void connect(WorkerId id, int socket, std::string path);
  // Removes a worker, which gets no more replies. No effect if it is not there.
  void lose(WorkerId worker);
  // Makes a block; returns its id and its offset in the values. Throws Error(invalid_argument) if there is no room or
  // no such update of the dtype, and Error(system) if the backup does not confirm it in time.
  std::pair<BlockId, std::size_t> create(const BlockSpec& wanted);
  // The workers that the block waits for: in sync those missing in the open round, in ssp those with the lowest clock.
  std::vector<WorkerId> awaited(BlockId block);
  // The members of the group that have not come to its barrier.
  std::vector<WorkerId> absent(const std::string& group);
  // Group and name of each worker that takes part.
  std::map<WorkerId, std::pair<std::string, std::string>> workers();
  // After a takeover: the members that have not connected to this server yet, and for which it still waits.
  std::vector<WorkerId> missing();
  // Why the latest update of the block failed; "" if it did not.
  std::string failure(BlockId block);
  Statistics statistics();

  // ---- Snapshots (snapshot.h) ----
  // As the functions of Blocks.
  std::vector<Snapshot::Entry> begin_snapshot();
  std::optional<Snapshot::Piece> next_piece();
  void end_snapshot();
  // Whether the server takes no requests until pieces have been taken.
  bool holds_back() const { return replica_.blocks.hold_back(); }

  // ---- Backups (journal.h) ----
  // A backup can take over only when it *counts*: it has the whole state of its server and, if it is reached by TCP, is
  // recorded in the store as the backup.

  // Gives this server a backup on its own host, which is sent the state and then the journal. An earlier backup counts
  // no longer. If the backup ends, this server goes on alone. Throws Error(invalid_argument) if a block is updated by
  // Python or a worker is on another host.
  void lead(const PartnerSpec& backup);
  // Makes this server the backup of another one on its host; it takes over when that one has ended. It must not have
  // workers or blocks yet.
  void follow(const PartnerSpec& server);
  // The same for a server and a backup that exchange the journal by TCP (journal_wire.h); connect_partner() adds a
  // connection and takes over its socket. The server must have no backup. When one of the two can no longer reach the
  // other, it calls `on_silence` once, in the thread that takes its turns, and answers nothing until decided() tells it
  // which of them goes on. `name` is the backup's, for messages.
  void lead_far(std::function<void()> on_silence, std::string name = {});
  void follow_far(std::function<void()> on_silence);
  void connect_partner(int socket, std::string path);
  // Called after the backup follows and the store has recorded that it counts.
  void count_backup();
  // Before the server leaves its blocks to a backup on another host: takes no requests any more, writes one more
  // record, and returns the length of the journal. A backup that has confirmed this position has everything, and was
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
  bool has_ended();  // it has been stopped or replaced, or was a backup and has been dropped
  struct Standing {
    std::uint32_t turn = 0;  // the value of Lane::turn while it serves
    bool is_heir = false;
    // Of a backup that is not out of reach:
    bool has_backup = false;      // it counts
    bool backup_starts = false;   // it does not count yet
    bool backup_follows = false;  // it has received the whole state
    std::uint64_t confirmed = 0;  // the position in the journal that it has confirmed
  };
  Standing standing();
  // Note, id and offset of every block, in the order of their creation.
  std::vector<std::tuple<std::string, BlockId, std::size_t>> notes();
  // For tests, as Replica::die_at().
  void die_at(Step step, std::uint64_t times);

  // Ends the thread and tells the workers. Idempotent; every caller returns after the thread has ended.
  void stop();

  // Lets a waiting thread of this process take the server's turns, as long as no other thread does.
  class Turns {
   public:
    explicit Turns(Server* server) : server_(server) {}  // nullptr: there is no server in this process
    ~Turns() { leave(); }
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    // Takes a turn if it can; returns whether there was something to do. Updates that Python computes are left to the
    // server's thread, since they may outlast the timeout of the wait.
    bool take();
    // Lets others take turns. Called before the thread sleeps.
    void leave();

   private:
    Server* const server_;
    bool holds_ = false, waits_ = false;
  };

 private:
  // A reply that is sent when the backup has carried out the journal up to position `after`.
  struct Held {
    std::uint64_t after;
    WorkerId worker;
    ReplySlot reply;
  };
  void run();
  void begin_turns();
  std::uint32_t end_turns();
  bool turn(bool may_call_python);
  bool serve(bool may_call_python);
  void say_ended();
  bool serve_orders();
  bool take_requests();
  bool take_request(Port& port);
  bool take_frames();
  void take(Port& port, const RequestSlot& slot);
  void end(Port& port);
  void forget_gone();
  void look_for_ended();
  void decide(const Message& message);
  void carry_out();
  void answer(const Reply& reply, const Operation* operation, bool has_failed);
  void send_replies();
  ValuesHeader& header() const { return replica_.blocks.header(); }
  Nanoseconds due_in() const;
  bool may_take() const;
  bool may_write_down(const BlockSpec& spec) const;
  bool write_down(const Message& message, Nanoseconds elapsed);
  bool wait_for_room(std::size_t bytes);
  void keep_back();
  bool is_kept(std::uint64_t position) const;
  void hold(WorkerId worker, const ReplySlot& reply);
  bool release_held();
  void fall(const std::exception& error);
  void be_replaced();
  void go_on_alone();
  void send_away();
  void follow(std::unique_ptr<Partner> partner);
  bool partners_move();
  bool follow_on();
  void give_up(const std::string& why);
  void lead(std::unique_ptr<Partner> partner);
  void give_state(Partner& to);
  void begin_to_give();
  bool give_blocks(bool moved);
  bool give_piece(BlockId id, std::size_t piece);
  void have_given_all();
  bool reads_push(BlockId id) const;
  void give_worker(const Port& port);
  void tell(Port& port);
  void check_native() const;
  void drop_backup();
  bool repeat_all(bool all);
  void look_for_partner();
  void look_for_heir();
  void become_heir();
  void come_back();
  void settle_workers();
  std::vector<WorkerId> without_connection() const;
  void lose_missing();
  void take_over();
  template <class F>
  auto order(F&& body);

  const ForkMark fork_;
  const bool backed_up_;
  const Hooks hooks_;
  FileDescriptor bell_fd_;
  std::unique_ptr<Mapping> bell_memory_;
  Bell* bell_;
  std::unique_ptr<ServerWire> wire_;

  std::mutex turning_;                         // held by the thread that takes turns; guards the members below
  std::atomic<int> waiting_ = 0;               // threads that would like to take turns
  std::atomic<bool> left_for_thread_ = false;  // operations wait for the server's thread, since they need Python
  Replica replica_;
  bool has_far_ = false;    // there are workers on other hosts
  bool only_near_ = false;  // it has a backup on this host or was one, so it takes no workers of other hosts
  Nanoseconds looked_ = 0, missing_until_ = kForever;
  bool serves_ = true, frozen_ = false, is_heir_ = false;
  std::uint32_t backups_made_ = 0;  // by this server
  std::string name_, address_;      // of this server, if it is or was a backup on its server's host
  std::unique_ptr<Partner> backup_;
  std::unique_ptr<Follower> followed_;                      // of this backup
  std::deque<std::pair<std::uint64_t, Output>> kept_back_;  // decided, and waiting for the backup to confirm a position
  std::uint64_t answers_up_to_ = 0;                         // position in the journal of what is being carried out
  std::deque<Held> held_;

  std::mutex mutex_;  // guards orders_ and stopped_
  std::condition_variable served_;
  std::deque<std::function<void()>> orders_;
  std::atomic<bool> has_orders_ = false;
  std::atomic<bool> stopping_ = false;
  bool stopped_ = false;
  std::mutex ending_;  // held in stop(), which several threads may call
  std::thread thread_;
};

// Queues `body` for the next turn, and waits until it has been called. Returns what it returns, and throws what it
// throws.
template <class F>
auto Server::order(F&& body) {
  if constexpr (!std::is_void_v<std::invoke_result_t<F>>) {
    std::optional<std::invoke_result_t<F>> result;
    order([&] { result.emplace(body()); });
    return std::move(*result);
  }
  std::exception_ptr failed;
  bool done = false;
  std::unique_lock lock(mutex_);
  if (stopping_) throw Error(ErrorKind::aborted, "the server has been stopped");
  orders_.push_back([&] {
    try {
      body();
    } catch (...) {
      failed = std::current_exception();
    }
    const std::lock_guard relock(mutex_);
    done = true;
    served_.notify_all();
  });
  has_orders_ = true;
  bell_->ring();
  served_.wait(lock, [&] { return done || stopped_; });
  if (!done) throw Error(ErrorKind::aborted, "the server has been stopped");
  if (failed) std::rethrow_exception(failed);
}

}  // namespace ringreduce::parameter_server
