// The worker's side of the parameter server: its window, its sessions with the servers, and its waits.
//
// Servers on this host read the worker's requests and pushed data in the window, and the worker copies values out of
// the servers' memory. Requests to a server on another host wait in a queue until the connection can take more
// (wire.h). The queue sends the request with the greatest priority first, in fragments. A request gets its number only
// when all its data has been handed to the connection, because the server's shard takes requests in the order of their
// numbers.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/fork.h"
#include "parameter_server/client/session.h"
#include "parameter_server/client/window.h"
#include "parameter_server/row_ids.h"
#include "parameter_server/shared.h"
#include "parameter_server/wire.h"

namespace ringreduce::parameter_server {

class Server;

// What a server on this host tells a worker about itself.
struct ServerSpec {
  FileDescriptor values;  // memfd, `capacity` bytes
  FileDescriptor bell;    // memfd
  FileDescriptor pidfd;
  std::size_t capacity = 0;
  std::string name;  // "server 1 (node7, pid 4711)"
  // The following are set for a backup and for a server that was one:
  std::uint32_t turn = 0;    // the value of Lane::turn while it serves
  std::uint32_t number = 0;  // its number in ValuesHeader::backup
  std::string address;       // of the Unix socket for control messages
};

// A block of a tensor. Bytes [begin, begin + bytes) of the tensor are block `block` of server `server`, which keeps
// them at `offset` in its values.
struct Part {
  std::uint32_t server = 0;
  BlockId block = 0;
  std::size_t begin = 0, bytes = 0, offset = 0;
};

// A table: its block on each server, and the type and size of its rows.
struct TablePlace {
  std::vector<BlockId> blocks;
  DType dtype = DType::float32;
  std::size_t width = 0;  // elements of a row

  std::size_t row_bytes() const { return width * size_of(dtype); }
};

// The new values that a push_pull copies to the caller's tensor. Only for blocks on this host.
struct NewValues {
  std::vector<Part> parts;
  std::byte* to = nullptr;              // the tensor; nullptr: copy nothing more
  std::vector<std::uint64_t> versions;  // of the parts copied so far; parts are copied in order
  bool streamed = false;                // copy past the caches, which are too small for all parts

  bool complete() const { return versions.size() == parts.size(); }
};

// A group of requests that the caller waits for together.
struct Call {
  struct Answer {
    std::uint32_t server;
    BlockId block;
    Outcome outcome;
    std::uint64_t version;
  };
  std::size_t unanswered = 0;
  std::vector<Answer> answers;
  std::vector<std::pair<std::uint32_t, BlockId>> asked;  // server and block of every request
  int lost = -1;                                         // a server that ended before it answered; -1: none
  // Server and request number of every pull that was sent to another host.
  std::vector<std::pair<std::uint32_t, std::uint64_t>> pulls;
  NewValues new_values;  // used by push_pull
  // For a pull of rows: by server, the piece of the window with the ids, which the rows follow; nullptr: none.
  std::vector<OwnWindow::Piece> pieces;
};

// Thread-safe. Every wait is bounded. It throws Error(timeout) after its timeout unless the function says that it
// returns something instead, Error(server_lost) with `culprit` set when a server that it needs has ended, and
// Error(aborted) after abort(), and what of_this_process() throws.
class Client {
 public:
  // Makes a window with `data` bytes for pushes to `servers` servers. Throws Error(system). A waiting thread calls
  // `interrupt` several times a second; an exception thrown by it ends the wait.
  Client(WorkerId worker, std::size_t servers, std::size_t data, std::function<void()> interrupt = nullptr);
  ~Client();

  int window() const { return window_->memory_fd.get(); }
  std::size_t window_bytes() const { return window_->memory.bytes(); }
  // Attaches a server on this host.
  void attach(std::uint32_t server, ServerSpec spec);
  // The socket on which servers on this host tell this worker about their backups. When a backup has taken over, the
  // client repeats the unanswered requests to it. Closing the socket tells the servers that this worker has ended.
  int news() const { return news_for_servers_.get(); }
  void close_news();
  // Returns turn, name and address of whoever serves these blocks now. Waits until that is no longer the server with
  // turn `known`. Returns `known` if that server is alive and has no backup, if it is lost, and after the timeout; if
  // it has a backup by then, the name returned is the backup's.
  std::tuple<std::uint32_t, std::string, std::string> served_by(std::uint32_t server, std::uint32_t known,
                                                                Nanoseconds timeout);
  // Attaches a server on another host; connect() then adds connections to it. A replica is a server or a backup of
  // these blocks; replicas are numbered from 0, the first server.
  void attach_far(std::uint32_t server, const std::string& name, std::uint32_t replica = 0);
  // Attaches a backup that is reached by TCP. When the server has ended or is out of reach, the client repeats the
  // unanswered requests to the backup, which answers them once it has taken over.
  void attach_far_backup(std::uint32_t server, const std::string& name, std::uint32_t replica = 1);
  // Adds a connection to a replica, and takes over the socket.
  void connect(std::uint32_t server, int socket, std::string path, std::uint32_t replica = 0);
  // From now on, a server that ends is not lost at once even if no backup of it is attached: calls wait until
  // attach_far_backup() names one, or give_up() says that there is none.
  void seek();
  void give_up(std::uint32_t server, const std::string& why);
  // Returns the number of the replica that requests go to now (-1: none yet), then the numbers of the attached backups,
  // in the order in which they may take over. Returns nothing if the server is lost.
  std::vector<std::int64_t> asks(std::uint32_t server);
  // Whether the blocks are served on this host, where values are copied from shared memory.
  bool is_near(std::uint32_t server) const;
  // Sets the server of this process. Threads that wait here take its turns.
  void host(std::shared_ptr<Server> server);

  // Allocates memory in the window; a push from there needs no copy. It lives until nobody holds it and no push reads
  // it any more. Throws Error(system) if the window has no room.
  OwnWindow::Piece allocate(std::size_t bytes);

  struct Options {
    std::int32_t priority = 0;
    double weight = 1;
    Nanoseconds timeout = kForever;
  };
  // A tensor to push, with all its parts.
  struct Pushed {
    const std::vector<Part>* parts;
    const std::byte* values;          // nullptr: the push has no data (Request::payload)
    Packing packing = Packing::none;  // used for parts on other hosts
    // Where the new values go; nullptr: they are not wanted. They are copied there during push() and wait(). All parts
    // must be on this host. If the new values of one tensor would overwrite `values` of another, none are copied.
    std::byte* out = nullptr;
  };
  // Pushes tensors; returns a call for each. Waits for room in the window and in the sessions. The caller may change
  // `values` after it returns, unless they lie in the window. To a packed push, the client adds what was rounded off
  // earlier pushes to the same block (error feedback).
  std::vector<std::shared_ptr<Call>> push(const std::vector<Pushed>& tensors, const Options& options);
  // Sends a request of any kind that carries the values of one tensor, which are not packed.
  std::shared_ptr<Call> send(RequestKind kind, const std::vector<Part>& parts, const std::byte* tensor,
                             const Options& options);
  // Sends a pull for each part. Values of parts on other hosts are packed as `packing` says, and stored in `tensor`,
  // which must stay valid until the call is over or cancelled. For parts on this host the reply only says that they may
  // be read: see read().
  std::shared_ptr<Call> pull(const std::vector<Part>& parts, std::byte* tensor, Nanoseconds timeout = kForever,
                             Packing packing = Packing::none);
  // Changes a number of the rule of each part (Rule::change).
  std::shared_ptr<Call> change(const std::vector<Part>& parts, std::uint64_t place, double number, Nanoseconds timeout);
  // Pushes rows of a table. `values` has a row for each id of the batch, and rows of the same id are added in order;
  // with `distinct` it has a row for each of rows.ids(). Every server gets a request, even without rows, so that all
  // count the same updates. Throws Error(invalid_argument), and sends nothing, if the window is too small for a
  // server's rows.
  std::shared_ptr<Call> push_rows(const TablePlace& table, const RowSet& rows, const std::byte* values, bool distinct,
                                  const Options& options);
  // Asks for rows, which the servers put in the window.
  std::shared_ptr<Call> pull_rows(const TablePlace& table, const RowSet& rows, Nanoseconds timeout = kForever);
  // Copies these rows to `out`, which is laid out as `values` of push_rows(), and frees their room in the window. The
  // call must be over.
  void take_rows(const TablePlace& table, const RowSet& rows, Call& call, std::byte* out, bool distinct);
  // Gives up a call: when this returns, nothing more is stored in the caller's tensors.
  void cancel(Call& call);
  // Sends clock, barrier or leave to the servers.
  std::shared_ptr<Call> ask(RequestKind kind, const std::vector<std::uint32_t>& servers,
                            Nanoseconds timeout = kForever);

  // Waits until all pushes have been answered; returns false after the timeout.
  bool drain(Nanoseconds timeout);
  // Waits until the call is over, and copies new values as they come; returns false after the timeout.
  bool wait(Call& call, Nanoseconds timeout);
  // Copies the latest value of parts on this host to `tensor`, after this worker's own pushes to them were applied;
  // returns their versions. Returns std::nullopt after the timeout. Returns an empty vector if one of the servers has
  // been replaced by a backup that is reached by TCP: then the parts must be pulled.
  std::optional<std::vector<std::uint64_t>> read(const std::vector<Part>& parts, std::byte* tensor,
                                                 Nanoseconds timeout);

  // Copies all parts as they were after the same update, the latest that all of them have; part i goes to places[i].
  // Returns the version. All servers must be on this host. Throws Error(timeout) also if updates kept overtaking it.
  std::uint64_t read_round(const std::vector<Part>& parts, const std::vector<std::byte*>& places, Nanoseconds timeout);
  // The latest version that all parts have; 0 if one of them has no value.
  std::uint64_t round_of(const std::vector<Part>& parts);

  // Throws Error(invalid_argument) in a forked child, and in a function that a server calls (turns.h).
  Client& of_this_process();
  // Makes every wait, now and later, throw Error(aborted).
  void abort();
  // The number of requests that have not been answered.
  std::size_t outstanding() const;
  // Server and block of one unanswered push, if there is any.
  std::optional<std::pair<std::uint32_t, BlockId>> unanswered_push() const;

 private:
  struct Near;
  struct InWindow;
  struct Item;
  struct Sent;
  struct Hold;
  struct Unlocked;
  struct HandedOver;
  struct Peer;
  using Lock = std::unique_lock<std::mutex>;

  Peer& peer(std::uint32_t server) const;
  const BlockWords& words_of(const Part& part) const;
  bool take_replies();
  bool take_replies(std::uint32_t server);
  bool take_news();
  void look_for_next(std::uint32_t server);
  bool is_lost(const Peer& of) const;
  void turn_to_backup(std::uint32_t server);
  void turn_to_far_backup(std::uint32_t server);
  bool may_turn(const Peer& of) const;
  static void take_next(Peer& of);
  std::uint32_t address_of(std::uint32_t server, std::uint32_t replica) const;
  void take_lost();
  void open_wire();
  void take_reply(std::uint32_t server, const ReplySlot& slot);
  void look_for_ended();
  void lose(std::uint32_t server, const std::string& why);
  [[noreturn]] void throw_lost(std::uint32_t server) const;
  // Calls `ready` until it returns true; returns false after the timeout.
  template <class F>
  bool wait_until(Hold& hold, Nanoseconds timeout, F&& ready);
  void call_python(Hold& hold);
  bool take_turns(Hold& hold);
  void sleep(std::uint32_t seen, Nanoseconds most);
  void put(Hold& hold, std::uint32_t server, Item item, Nanoseconds timeout);
  const Request& number(std::uint32_t server, Item& item);
  static RequestSlot slot_of(const Request& made);
  void send_part(Hold& hold, RequestKind kind, const std::shared_ptr<Call>& call, const Pushed& tensor,
                 const Part& part, const Options& options, bool streamed);
  bool is_readable(const Peer& from, const Part& part) const;
  std::size_t copy_new_values(Call& call);  // returns the number of bytes copied
  void feed();
  void feed(std::uint32_t server);
  void try_to_feed(std::uint32_t server);
  template <class Queue>
  static typename Queue::iterator next_of(Queue& queue);
  void forget(Call& call);
  OwnWindow::Piece take_room(Hold& hold, std::size_t bytes, Nanoseconds timeout);
  void pack_push(const Part& part, Packing packing, std::byte* to, const std::byte* from);
  void fit_rows(const TablePlace& table, const RowSet& rows) const;
  void fill_rows(const TablePlace& table, const RowSet& rows, std::uint32_t server, const std::byte* values,
                 std::byte* to) const;

  std::pair<WorkerWire*, Server*> shared();  // the wire and the hosted server, or nullptr; throws as of_this_process()

  const ForkMark fork_;
  const std::function<void()> interrupt_;
  const WorkerId worker_;
  const std::size_t servers_;
  FileDescriptor news_, news_for_servers_;
  const std::shared_ptr<OwnWindow> window_;
  Bell* const bell_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  // By server and block: what has been rounded off packed pushes and is still to be pushed.
  std::map<std::pair<std::uint32_t, BlockId>, std::vector<float>> residuals_;
  Nanoseconds looked_ = 0;
  std::atomic<bool> aborted_ = false;
  bool has_near_ = false, seeks_ = false;
  bool ran_out_ = false;  // of memory, for what came or went over a connection
  std::shared_ptr<Server> hosted_;
  std::uint64_t tags_ = 0;
  // Set if a server is on another host. Destroyed before all other members, because its thread calls feed().
  std::unique_ptr<WorkerWire> wire_;
};

}  // namespace ringreduce::parameter_server
