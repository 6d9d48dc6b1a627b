// A server: a shard, the values of its blocks, and the thread that serves them to workers.
//
// The thread takes requests from all windows in turn, and from connections to other hosts; it lets the shard decide,
// carries out what was decided, and answers. A worker of another host is also sent what it pulls: from a copy, since a
// slow connection would hold up the block's next but one update. Few copies exist at a time, whatever it asks for.
// Whoever takes the server's turns has it for itself, so nothing within is locked; what other threads want is queued.
// That is the server's thread, or a worker's thread of the same process while it waits: then no other thread has to
// wake up between a request and its reply.
//
// A server may have a backup, another server that carries out the same (journal.h), or be one.
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

#include "core/fork.h"
#include "parameter_server/journal.h"
#include "parameter_server/rules.h"
#include "parameter_server/shared.h"
#include "parameter_server/snapshot.h"
#include "parameter_server/table.h"
#include "parameter_server/wire.h"

namespace ringreduce::parameter_server {

// What a server is asked to keep.
struct BlockSpec {
  DType dtype = DType::float32;
  std::size_t count = 0;
  Mode mode;
  Rule rule;
  // This server's part of a table, if `width` is not 0: rows of so many elements, and `count` does not matter.
  std::size_t width = 0;
  FirstValues first;
  std::string note;  // whatever the server's owner wants to know of it
};

// A worker of this host, as it introduces itself. The server takes over the descriptors.
struct WorkerSpec {
  WorkerId id = 0;
  std::string group;
  int window = -1;  // memfd
  std::size_t window_bytes = 0;
  std::size_t servers = 0;  // lanes in the window
  std::size_t lane = 0;     // this server's
  int pidfd = -1;
};

// The other of a server and its backup. Who gets this takes over the descriptors.
struct PartnerSpec {
  int journal = -1;  // memfd, which the server writes and the backup reads
  int bell = -1;     // memfd
  int values = -1;   // memfd
  int pidfd = -1;
};

// An update that a function outside computes: from `value` to `out`, which holds a copy of it already.
struct PythonUpdate {
  BlockId block;
  std::uint64_t version;  // that it makes
  const void* value;
  void* out;
  const void* gradient;  // the workers' pushes, combined
  const std::vector<Contribution>& contributions;
};

class Server {
 public:
  struct Hooks {
    // Calls what it gets where `update` may be called.
    std::function<void(const std::function<void()>&)> enter = [](const auto& body) { body(); };
    // What it throws is the reply to those who pushed.
    std::function<void(const PythonUpdate&)> update;
    Roots roots = nullptr;
    // For the owner's log.
    std::function<void(const std::string&)> warn = [](const std::string&) {};
  };
  struct Statistics {
    std::uint64_t requests = 0, updates = 0, bytes = 0, workers = 0, blocks = 0, memory = 0, capacity = 0, rows = 0;
    Shard::Waiting waiting;
    std::map<WorkerId, std::uint64_t> clocks;
    bool saving = false;  // a snapshot
  };

  // Room for `capacity` bytes of values, in both their buffers. Throws Error(system).
  Server(std::size_t capacity, Hooks hooks);
  ~Server();

  int values() const { return values_fd_.get(); }
  int bell() const { return bell_fd_.get(); }
  std::size_t capacity() const { return capacity_; }

  // The following are for any thread and return when the server's thread has done it. They throw Error(aborted) after
  // stop().

  // Throws Error(invalid_argument) if the window is not what the specification says.
  void join(WorkerSpec worker);
  // A worker of another host, of which `window` bytes of pushes may be under way. Then connections to it, of which this
  // takes over the sockets.
  void join(WorkerId id, const std::string& group, std::size_t window);
  void connect(WorkerId id, int socket, std::string path);
  // The worker takes no further part, and what it has not been told about it never will be. No effect on one that is
  // not there.
  void lose(WorkerId worker);
  // Returns (id, offset of the block among the values). Throws Error(invalid_argument) if there is no room, and
  // Error(system) if the backup does not take it in time.
  std::pair<BlockId, std::size_t> create(const BlockSpec& spec);
  // Whom the block's present round, its readers or a barrier wait for.
  std::vector<WorkerId> awaited(BlockId block);
  std::vector<WorkerId> absent(const std::string& group);
  // Why the latest update of the block failed; "" if none did.
  std::string failure(BlockId block);
  Statistics statistics();

  // What all blocks are now, piece by piece: each of them once, then nothing. Blocks that have no value yet are not in
  // it. Throws Error(invalid_argument) if there is a snapshot under way, or, for a piece, none.
  std::vector<Snapshot::Entry> begin_snapshot();
  std::optional<Snapshot::Piece> next_piece();
  void end_snapshot();

  // ---- Backups (journal.h). Before any worker has joined:
  // From now on this server has a backup, which carries out all that this one does before pushes are answered. It goes
  // on alone when the backup has ended.
  void lead(const PartnerSpec& backup);
  // From now on this server is the backup of another. It takes over when that one has ended; until then workers may
  // join, and are not served.
  void follow(const PartnerSpec& server);
  bool serves();  // it is no backup, or has taken over
  bool has_backup();
  // What blocks were made, in order: their notes, and their places as create() returns them.
  std::vector<std::tuple<std::string, BlockId, std::size_t>> notes();
  // For tests: this process kills itself when it comes to this step for the so-many-th time.
  enum class Step : std::uint32_t { never, taken, journalled, carried_out, answered, taking_over, serving };
  void die_at(Step step, std::uint64_t times);

  // Ends the thread, and tells the workers. Idempotent.
  void stop();

  // Of a thread of this process that waits: it takes turns as long as it has this, unless another one does.
  class Turns {
   public:
    explicit Turns(Server* server) : server_(server) {}  // may be none
    ~Turns() { leave(); }
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    // Returns whether it did something. It may take as long as an update, but what Python computes is for the server's
    // thread: a wait must end in time.
    bool take();
    // Before the thread sleeps.
    void leave();

   private:
    Server* const server_;
    bool holds_ = false, waits_ = false;
  };

 private:
  struct Window;
  struct Lent;
  struct Partner;
  struct Held {           // a reply that waits for the backup
    std::uint64_t after;  // as Journal::written()
    WorkerId worker;
    ReplySlot reply;
  };
  // Whose reply comes with values. Of a table, `count` ids lie at `offset` of the window, and room for the rows after
  // them.
  struct Pull {
    BlockId block;
    std::size_t offset = 0, count = 0;
    Packing packing = Packing::none;  // of what is sent
  };
  struct Connection {
    WorkerSpec spec;
    std::shared_ptr<Window> window;
    Lane* lane = nullptr;  // none: it is on another host
    FileDescriptor pidfd;
    std::uint64_t taken = 0;
    bool alive = true, answered = false;
    bool attached = false;                // its lane is this server's
    std::map<std::uint64_t, Pull> pulls;  // without a reply, by number: of tables, and to another host
    // At a backup:
    bool known = false;  // to the server as well
    bool gone = false;   // its door has closed; the server's own Lose is still to come
    // To another host:
    std::vector<ReplySlot> replies;                                         // to be sent
    std::deque<std::pair<Pull, ReplySlot>> values;                          // to be copied and sent
    std::deque<std::pair<std::weak_ptr<std::byte[]>, std::size_t>> copies;  // that are being sent, with their bytes
  };
  struct Block {
    BlockSpec spec;
    BlockWords* words = nullptr;
    std::uint64_t steps = 0;
    std::vector<std::byte> state;
    std::string failure;
    std::unique_ptr<Table> table;  // instead of words and state
  };

  // How what was pushed becomes one gradient.
  struct Combination {
    DType dtype;
    ReduceOp op;
    std::vector<const std::byte*> sources;
    std::vector<double> weights;
    double divisor = 1;
    bool weighted = false;

    const std::byte* operator()(std::byte* dst, std::size_t begin, std::size_t count, std::byte* scratch) const;
  };

  static Combination combination(const BlockSpec& spec, const Operation& operation);
  void run();
  void begin_turns();
  std::uint32_t end_turns();
  bool turn(bool may_call_python);
  bool by_python(const Operation& operation) const;
  void say_ended();
  bool serve_orders();
  bool take_requests();
  bool take_request(Connection& connection);
  bool take_frames();
  void take(Connection& connection, const RequestSlot& slot);
  void send_to(Connection& connection);
  std::shared_ptr<std::byte[]> value_for(const Connection& connection, const Pull& pull, ReplySlot& reply);
  std::size_t bytes_of(const Pull& pull) const;
  void end(Connection& connection);
  void look_for_ended();
  Request request_of(const Connection& connection, const RequestSlot& slot);
  void decide(const Message& message);
  void decide(const Message& message, Nanoseconds now);
  void carry_out();
  bool takes_payload(const Connection& connection, const RequestSlot& slot) const;
  void keep_pull(Connection& connection, const RequestSlot& slot);
  std::size_t memory_left() const;
  std::pair<BlockId, std::size_t> make_block(const BlockSpec& spec);
  void create_table(Block& block);
  void update_table(Block& block, const Operation& operation);
  void gather(const Connection& connection, const Pull& pull);
  void keep_block(BlockId id);
  void keep(Snapshot::Piece piece);
  Snapshot::Piece copy_block(BlockId id) const;
  Snapshot::Piece copy_slab(BlockId id, std::size_t slab) const;
  bool holds_back() const;
  void restore(Block& block, const Operation& operation);
  void carry_out(const Operation& operation);
  void update(Block& block, const Operation& operation);
  void update_by_python(Block& block, const Operation& operation);
  void answer(const Reply& reply);
  static void put_reply(Connection& connection, const ReplySlot& slot);
  void ring_answered();
  ValuesHeader& header() const { return *reinterpret_cast<ValuesHeader*>(values_->at()); }
  Nanoseconds deadline() const { return serves_ ? shard_.deadline() : kForever; }
  bool may_take() const;
  bool may_write_down(const BlockSpec& spec) const;
  bool write_down(const Message& message, Nanoseconds now);
  bool release_held();
  bool follow_on();
  void give_up(const std::string& why);
  void repeat(const Record& record, const std::vector<std::byte>& bytes);
  void look_for_partner();
  void take_over();
  void pass(Step step);
  template <class F>
  void order(F&& body);

  const ForkMark fork_;
  const std::size_t capacity_;
  const Hooks hooks_;
  FileDescriptor values_fd_, bell_fd_;
  std::unique_ptr<Mapping> values_, bell_memory_;
  Bell* bell_;
  std::unique_ptr<ServerWire> wire_;

  std::mutex turning_;            // held by who takes turns, which has what follows for itself
  std::atomic<int> waiting_ = 0;  // threads that would like to
  std::atomic<bool> left_for_thread_ = false;
  Shard shard_;
  std::map<WorkerId, Connection> connections_;
  std::vector<Block> blocks_;
  std::size_t used_ = sizeof(ValuesHeader), state_bytes_ = 0, table_bytes_ = 0;
  Output decided_;
  bool has_far_ = false;            // workers of other hosts
  std::set<std::uint64_t> failed_;  // operations of this turn whose function threw
  std::vector<std::byte> scratch_;
  std::unique_ptr<Snapshot> snapshot_;  // under way
  Statistics statistics_;
  Nanoseconds looked_ = 0;
  bool serves_ = true;
  bool was_backup_ = false;                     // or is
  std::unique_ptr<Partner> backup_, followed_;  // of this server; whom this server is the backup of
  std::deque<Held> held_;
  Step last_step_ = Step::never;
  std::uint64_t steps_left_ = 0;

  std::mutex mutex_;  // of orders_
  std::condition_variable served_;
  std::deque<std::function<void()>> orders_;
  std::atomic<bool> has_orders_ = false;
  std::atomic<bool> stopping_ = false;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace ringreduce::parameter_server
