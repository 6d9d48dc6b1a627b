// A server: a shard, the values of its blocks, and the thread that serves them to workers.
//
// The thread takes requests from all windows in turn, and from connections to other hosts; it lets the shard decide,
// carries out what was decided, and answers. A worker of another host is also sent what it pulls: from a copy, since a
// slow connection would hold up the block's next but one update. Few copies exist at a time, whatever it asks for.
// Whoever takes the server's turns has it for itself, so nothing within is locked; what other threads want is queued.
// That is the server's thread, or a worker's thread of the same process while it waits: then no other thread has to
// wake up between a request and its reply.
//
// A server may have a backup, another server that can go on with what this one has done (journal.h), or be one.
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
#include "parameter_server/archive.h"
#include "parameter_server/descriptors.h"
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
  // An update writes the states beside those of the published version, so a backup can adopt the block when the server
  // has ended. The server says so.
  bool two_states = false;
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
  int news = -1;     // a socket, for News; the worker has the other end as long as it takes part
  std::string name;  // for messages: "node7, pid 4711"
};

// The other of a server and its backup. Who gets this takes over the descriptors.
struct PartnerSpec {
  int journal = -1;  // memfd, which the server writes and the backup reads
  int bell = -1;     // memfd
  int values = -1;   // memfd
  int pidfd = -1;
  int passage = -1;  // a socket from the server to the backup, for what has descriptors
  // Of the backup, for workers: as in News.
  std::size_t capacity = 0;
  std::string name, address;
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
    bool saving = false;    // a snapshot
    std::string backup;     // its name; "": there is none
    std::uint64_t lag = 0;  // bytes of the journal that the backup has not carried out
  };

  // Room for `capacity` bytes of values, in both their buffers. `backed_up`: it is to have a backup on its host, or to
  // be one. Throws Error(system).
  Server(std::size_t capacity, Hooks hooks, bool backed_up = false);
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
  void join(WorkerId id, const std::string& group, std::size_t window, const std::string& name = {});
  void connect(WorkerId id, int socket, std::string path);
  // The worker takes no further part, and what it has not been told about it never will be. No effect on one that is
  // not there.
  void lose(WorkerId worker);
  // Returns (id, offset of the block among the values). Throws Error(invalid_argument) if there is no room, and
  // Error(system) if the backup does not take it in time.
  std::pair<BlockId, std::size_t> create(BlockSpec spec);
  // Whom the block's present round, its readers or a barrier wait for.
  std::vector<WorkerId> awaited(BlockId block);
  std::vector<WorkerId> absent(const std::string& group);
  // The workers that take part: the group of each, and its name.
  std::map<WorkerId, std::pair<std::string, std::string>> workers();
  // Members that have not come to this server since it took over, and are waited for.
  std::vector<WorkerId> missing();
  // Why the latest update of the block failed; "" if none did.
  std::string failure(BlockId block);
  Statistics statistics();

  // What all blocks are now, piece by piece: each of them once, then nothing. Blocks that have no value yet are not in
  // it. Throws Error(invalid_argument) if there is a snapshot under way, or, for a piece, none.
  std::vector<Snapshot::Entry> begin_snapshot();
  std::optional<Snapshot::Piece> next_piece();
  void end_snapshot();
  // Whether requests wait for pieces to be taken.
  bool holds_back() const { return snapshot_bytes_ > Snapshot::kMostKept; }

  // ---- Backups (journal.h) ----
  // From now on this server has a backup, which gets all that this one is, and what it takes (journal.h). It counts
  // when it has all; until then backup_starts(). This one goes on alone when the backup has ended; a backup that it had
  // before is none any more. Throws Error(invalid_argument) if there is a block that Python updates, or a worker of
  // another host.
  void lead(const PartnerSpec& backup);
  bool backup_starts();
  // From now on this server is the backup of another, and takes over when that one has ended. Before it has workers.
  void follow(const PartnerSpec& server);
  // The same for two servers that send each other the journal over connections (journal_wire.h), of which
  // connect_partner takes over the sockets. The server has no backup yet. When a server cannot hear its partner any
  // more, it calls `on_silence` once, from whatever thread takes its turns, and answers nothing until decided() says
  // who goes on. `name` is the backup's, for messages.
  void lead_far(std::function<void()> on_silence, std::string name = {});
  void follow_far(std::function<void()> on_silence);
  void connect_partner(int socket, std::string path);
  // Whether the backup has all that this server is; then it may be agreed that the backup counts, and said here.
  bool backup_follows();
  void count_backup();
  // Before a server gives its blocks to a backup on another host: takes no requests any more, and returns the length of
  // the journal then. When the backup has confirmed so much, it has all, and was there after this call.
  std::uint64_t freeze();
  void unfreeze();
  std::uint64_t confirmed();
  // Whether this one goes on: alone, or as the server in the other one's place. If it does not, it has ended for its
  // workers. No effect if the partner has been heard of in the meantime or there is none.
  void decided(bool goes_on);
  // A backup on another host that does not count yet is none.
  void abandon_backup();
  // Gives the blocks to the backup, its heir: one on another host has confirmed what freeze() said, and counts as the
  // server. There are two copies at each moment. The heir goes on when it has a backup of its own that counts, or by
  // serve_alone(). Until then this server has all, and goes on itself if the heir ends; afterwards it has ended.
  void leave_to_backup();
  bool leaves();
  bool is_heir();
  void serve_alone();
  bool serves();             // it is no backup, or has taken over
  bool has_ended();          // it has been stopped or replaced, or is no backup any more
  bool has_backup();         // which counts
  std::uint32_t its_turn();  // as Lane::turn
  // What blocks were made, in order: their notes, and their places as create() returns them.
  std::vector<std::tuple<std::string, BlockId, std::size_t>> notes();
  // For tests: this process kills itself when it comes to this step for the so-many-th time.
  enum class Step : std::uint32_t {
    never,
    taken,
    journalled,
    updated,
    carried_out,
    answered,
    gives,
    takes,
    leaves,
    inherits,
    taking_over,
    serving
  };
  void die_at(Step step, std::uint64_t times);

  // Ends the thread, and tells the workers. Idempotent; returns when it is so, whoever called it first.
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
  struct NearPartner;
  struct FarPartner;
  class StateWriter;
  class StateReader;
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
    FileDescriptor pidfd, news;
    std::uint64_t taken = 0;
    bool alive = true, answered = false;
    bool attached = false;                // its lane is this server's
    bool untold = false;                  // the latest news have not gone to it
    bool gone = false;                    // its connections have closed
    std::map<std::uint64_t, Pull> pulls;  // without a reply, by number: of tables, and to another host
    bool known = false;                   // at a backup on another host: the server has told of it
    // To another host:
    std::set<std::uint64_t> asked;                                          // of what was a backup, and not answered
    std::vector<ReplySlot> replies;                                         // to be sent
    std::deque<std::pair<Pull, ReplySlot>> values;                          // to be copied and sent
    std::deque<std::pair<std::weak_ptr<std::byte[]>, std::size_t>> copies;  // that are being sent, with their bytes
  };
  struct Block {
    BlockSpec spec;
    BlockWords* words = nullptr;
    std::uint64_t steps = 0;
    std::size_t state_bytes = 0;
    std::string failure;
    std::unique_ptr<Table> table;  // instead of words and state
    bool is_missing = false;       // at a backup: its content has not come yet

    std::size_t bytes() const { return spec.count * size_of(spec.dtype); }
    // A backup that starts late gets its content apart from the rest.
    bool comes_apart() const { return table == nullptr && !spec.two_states; }
    // Of version `published - 1`.
    std::byte* state(std::uint64_t published) const {
      return reinterpret_cast<std::byte*>(words) + block_bytes(bytes()) +
             (spec.two_states ? (published & 1) * aligned(state_bytes) : 0);
    }
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

  static Connection connection_of(WorkerSpec spec);
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
  void forget_gone();
  void look_for_ended();
  Request request_of(WorkerId worker, const RequestSlot& slot, std::shared_ptr<const Payload> payload);
  std::shared_ptr<const Payload> payload_of(const Connection& connection, const RequestSlot& slot) const;
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
  void restore(Block& block, const Operation& operation);
  void carry_out(const Operation& operation);
  static void publish(Block& block);
  void update(Block& block, const Operation& operation);
  void update_by_python(Block& block, const Operation& operation);
  void answer(const Reply& reply, bool waits_for_backup = true);
  static void put_reply(Connection& connection, const ReplySlot& slot);
  void ring_answered();
  ValuesHeader& header() const { return *reinterpret_cast<ValuesHeader*>(values_->at()); }
  Nanoseconds deadline() const { return serves_ && !frozen_ ? shard_.deadline() : kForever; }
  bool may_take() const;
  bool may_write_down(const BlockSpec& spec) const;
  bool write_down(const Message& message, Nanoseconds now);
  bool wait_for_room(std::size_t bytes);
  void keep_back();
  bool is_kept(std::uint64_t position) const;
  void hold(WorkerId worker, const ReplySlot& reply);
  bool release_held();
  void be_replaced();
  void go_on_alone();
  void send_away();
  void follow(std::unique_ptr<Partner> partner);
  bool partners_move();
  bool follow_on();
  void give_up(const std::string& why);
  void give_state(NearPartner& to);
  void begin_to_give();
  bool give_blocks(bool moved);
  bool give_block(BlockId id);
  void have_given_all();
  void take_block(const Record& record, const Lent* given);
  bool reads_push(BlockId id) const;
  bool become_server();
  void give_far_state();
  void become_far_server(const Record& record, const Lent& state);
  void visit(Archive& archive);
  void visit_connections(Archive& archive);
  void visit_blocks(Archive& archive);
  static void visit_content(Archive& archive, Block& block);
  void visit_rows(Archive& archive, Table& table);
  void give_worker(const Connection& connection);
  void tell(Connection& connection);
  void check_native() const;
  void drop_backup();
  void repeat(const Record& record, const std::vector<std::byte>& bytes, std::shared_ptr<const Payload> pushed);
  void repeat_join(WorkerSpec spec, Nanoseconds at);
  void repeat_lose(WorkerId worker, Nanoseconds at);
  bool repeat_all(bool all);
  const NearPartner& near_server() const;
  void keep_decided();
  void drop_published();
  const BlockWords& words_of_server(BlockId block) const;
  void adopt_values();
  void look_for_partner();
  void look_for_heir();
  void become_heir();
  void come_back();
  void settle_workers();
  std::vector<WorkerId> without_connection() const;
  void lose_missing();
  void take_over();
  void pass(Step step);
  template <class F>
  void order(F&& body);

  const ForkMark fork_;
  const std::size_t capacity_;
  const bool backed_up_;
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
  std::size_t used_ = sizeof(ValuesHeader), table_bytes_ = 0;
  Output decided_;
  bool has_far_ = false;            // workers of other hosts
  bool only_near_ = false;          // it has a backup on this host, or was one
  std::set<std::uint64_t> failed_;  // operations of this turn whose function threw
  std::vector<std::byte> scratch_;
  std::unique_ptr<Snapshot> snapshot_;           // under way
  std::atomic<std::size_t> snapshot_bytes_ = 0;  // of its copies that have not been taken
  Statistics statistics_;
  Nanoseconds looked_ = 0, missing_until_ = kForever;
  bool serves_ = true, frozen_ = false, is_heir_ = false;
  std::uint32_t turn_ = 0;                       // as Lane::turn; of a backup: when it will have taken over
  std::uint32_t backups_made_ = 0, number_ = 0;  // by this server; of this backup, when it is what its server is
  std::vector<FileDescriptor> given_;            // with the state that is on its way
  std::string name_, address_;                   // of a backup on the server's host
  std::unique_ptr<Partner> backup_, followed_;   // of this server; whom this server is the backup of
  std::deque<std::pair<std::uint64_t, Output>> kept_back_;  // what was decided, and the journal's length then
  std::uint64_t answers_up_to_ = 0;                         // the journal's length when what is carried out was decided
  std::deque<Held> held_;
  std::map<BlockId, std::deque<Operation>> kept_;  // at a backup: of blocks, which the server may not have carried out
  Step last_step_ = Step::never;
  std::uint64_t steps_left_ = 0;

  std::mutex mutex_;  // of orders_
  std::condition_variable served_;
  std::deque<std::function<void()>> orders_;
  std::atomic<bool> has_orders_ = false;
  std::atomic<bool> stopping_ = false;
  bool stopped_ = false;
  std::mutex ending_;  // several may call stop()
  std::thread thread_;
};

}  // namespace ringreduce::parameter_server
