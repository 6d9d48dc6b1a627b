// A worker's side: its window, its sessions with the servers, and its waiting.
//
// A server of this host reads requests and what is pushed in the window, and the worker reads the server's values. To
// one of another host requests wait in a queue until the connection takes them (wire.h): those with the greatest
// priority go first, in parts, and a request has its number, and so its place in the order, only when all its data has
// gone.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "core/fork.h"
#include "parameter_server/row_ids.h"
#include "parameter_server/session.h"
#include "parameter_server/shared.h"
#include "parameter_server/wire.h"

namespace ringreduce::parameter_server {

class Server;

// A server of this host, as it introduces itself. The client takes over the descriptors.
struct ServerSpec {
  int values = -1;  // memfd, `capacity` bytes
  int bell = -1;    // memfd
  int pidfd = -1;
  std::size_t capacity = 0;
  std::string name;  // "server 1 (node7, pid 4711)"
  // Of a backup, or one that took over:
  std::uint32_t turn = 0;    // as Lane::turn, when it serves
  std::uint32_t number = 0;  // as ValuesHeader::backup
  std::string address;       // of its door
};

// A block of a tensor: bytes [begin, begin + bytes) of it are block `block` of server `server`, at `offset` there.
struct Part {
  std::uint32_t server = 0;
  BlockId block = 0;
  std::size_t begin = 0, bytes = 0, offset = 0;
};

// A table: its block on each server, and what its rows are.
struct TablePlace {
  std::vector<BlockId> blocks;
  DType dtype = DType::float32;
  std::size_t width = 0;  // elements of a row

  std::size_t row_bytes() const { return width * size_of(dtype); }
};

// The values after a push, of blocks of this host, which the worker copies to where it wants them.
struct NewValues {
  std::vector<Part> parts;
  std::byte* to = nullptr;              // nullptr: nothing is copied any more
  std::vector<std::uint64_t> versions;  // of the parts that have been copied, which are the first ones
  bool streamed = false;                // they are too many for the caches

  bool complete() const { return versions.size() == parts.size(); }
};

// Requests that are waited for together.
struct Call {
  struct Answer {
    std::uint32_t server;
    BlockId block;
    Outcome outcome;
    std::uint64_t version;
  };
  std::size_t unanswered = 0;
  std::vector<Answer> answers;
  std::vector<std::pair<std::uint32_t, BlockId>> asked;  // of every request: server and block
  int lost = -1;                                         // a server that ended before it answered
  // Pulls that were sent to servers of other hosts: server and number.
  std::vector<std::pair<std::uint32_t, std::uint64_t>> pulls;
  NewValues new_values;  // of a push that brings some back
  // Of a pull of rows, by server: where ids, then rows lie in the window; SIZE_MAX: nowhere.
  std::vector<std::size_t> pieces;
};

// Thread-safe. Every wait ends with an error when its time is over (timeout), when a server that it waits for has ended
// (server_lost, `culprit` is the server) and after abort() (aborted). In a forked child all that waits throws
// Error(invalid_argument).
class Client {
 public:
  // A window with `data` bytes for pushes to `servers` servers. Throws Error(system).
  // `interrupt` is called now and then by who waits, and ends the wait by what it throws.
  Client(WorkerId worker, std::size_t servers, std::size_t data, std::function<void()> interrupt = nullptr);
  ~Client();

  int window() const { return window_fd_.get(); }
  std::size_t window_bytes() const { return window_->bytes(); }
  void attach(std::uint32_t server, const ServerSpec& spec);
  // For servers of this host: where they tell this worker of their backups. When one has taken over, what has not been
  // answered is asked of it. Once closed, servers take this worker for ended.
  int news() const { return news_for_servers_.get(); }
  void close_news();
  // Who serves these blocks now: its turn, name and address. Waits until it is another one than that of turn `known`,
  // unless that has neither ended nor a backup; then, when the time is over or if it is lost, it is still the same.
  std::tuple<std::uint32_t, std::string, std::string> served_by(std::uint32_t server, std::uint32_t known,
                                                                Nanoseconds timeout);
  // A server of another host: then connections to it, of which this takes over the sockets. Those that serve the same
  // blocks, and their backups, have numbers: the first server is 0.
  void attach(std::uint32_t server, const std::string& name, std::uint32_t replica = 0);
  // The backup of a server, reached over connections as well: when the server has ended, or cannot be reached any more,
  // what has not been answered is asked of it. It answers when it has taken over.
  void attach_far_backup(std::uint32_t server, const std::string& name, std::uint32_t replica = 1);
  void connect(std::uint32_t server, int socket, std::string path, std::uint32_t replica = 0);
  // From now on a server without a backup that is known here is not lost when it has ended: calls wait until
  // attach_far_backup() says who may serve its blocks, or give_up() that nobody does.
  void seek();
  void give_up(std::uint32_t server, const std::string& why);
  // The numbers of the one that is asked, -1 for nobody, and of those that will be, one after the other. No numbers:
  // the server is lost.
  std::vector<std::int64_t> asks(std::uint32_t server);
  bool is_near(std::uint32_t server) const;
  // A server of this process, whose turns are taken by who waits here.
  void host(std::shared_ptr<Server> server);

  // Memory in the window: a push of what lies there copies nothing. It lives until it is released and no push reads it
  // any more. Throws Error(system) if the window has no such room.
  std::byte* allocate(std::size_t bytes);
  void release(std::byte* piece);

  struct Options {
    std::int32_t priority = 0;
    double weight = 1;
    Nanoseconds timeout = kForever;
    Packing packing = Packing::none;  // of pulls from other hosts
  };
  // A push of all parts of a tensor.
  struct Pushed {
    const std::vector<Part>* parts;
    const std::byte* values;
    Packing packing = Packing::none;  // to other hosts
    // Where the new values go, if they are wanted: in this call, and while the result is waited for. All parts must be
    // of this host. Nothing comes if one tensor's new values would go where another one's `values` lie.
    std::byte* out = nullptr;
  };
  // Waits for room in the window and in the sessions. `values` may change when it returns, unless they lie in the
  // window. A packed push has what was rounded off the earlier ones to the same block added to it (error feedback).
  std::vector<std::shared_ptr<Call>> push(const std::vector<Pushed>& tensors, const Options& options);
  // The same of one tensor, and another kind of request, with nothing packed.
  std::shared_ptr<Call> send(RequestKind kind, const std::vector<Part>& parts, const std::byte* tensor,
                             const Options& options);
  // Asks for all parts: those of other hosts go to their places in `tensor`, which must stay until the call is over or
  // cancelled; of those of this host only whether they may be read.
  std::shared_ptr<Call> pull(const std::vector<Part>& parts, std::byte* tensor, const Options& options);
  // The same of rows of a table. `values` has a row for each id of the batch, of which those of the same id are added
  // in order; or, if `distinct`, one for each of rows.ids(). Every server is asked, so that all count the same updates.
  // Throws Error(invalid_argument), and has sent nothing, if a server's rows are more than the window holds.
  std::shared_ptr<Call> push_rows(const TablePlace& table, const RowSet& rows, const std::byte* values, bool distinct,
                                  const Options& options);
  // Asks for rows, which come to the window.
  std::shared_ptr<Call> pull_rows(const TablePlace& table, const RowSet& rows, const Options& options);
  // Copies them from there when the call is over, as `values` of push_rows, and frees their room.
  void take_rows(const TablePlace& table, const RowSet& rows, Call& call, std::byte* out, bool distinct);
  // Nothing of a pull is stored any more.
  void cancel(Call& call);
  // Asks for clock, barrier or leave of the servers.
  std::shared_ptr<Call> ask(RequestKind kind, const std::vector<std::uint32_t>& servers, const Options& options);

  // Returns whether all that was pushed has been answered within the time.
  bool drain(Nanoseconds timeout);
  // Returns whether all was answered within the time; does not throw if it was not. Copies new values that are there.
  bool wait(Call& call, Nanoseconds timeout);
  // Copies the latest value of parts of this host to `tensor`; returns the versions, none if the backup on another host
  // of one of these servers is asked now: pull the parts. Before, it waits for this worker's own pushes to them;
  // returns nothing if they were not applied within the time.
  std::optional<std::vector<std::uint64_t>> read(const std::vector<Part>& parts, std::byte* tensor,
                                                 Nanoseconds timeout);

  // Copies all parts, of servers of this host, as they were after one and the same update, the latest that all of them
  // have: part i to places[i]. Returns its version. Throws as read(), Error(timeout) also if updates always overtook
  // it.
  std::uint64_t read_round(const std::vector<Part>& parts, const std::vector<std::byte*>& places, Nanoseconds timeout);
  // The latest version that all parts have; 0 if one has no value.
  std::uint64_t round_of(const std::vector<Part>& parts);

  void abort();
  std::size_t outstanding() const;
  // A block, with its server, of which some push has not been answered.
  std::optional<std::pair<std::uint32_t, BlockId>> unanswered_push() const;

 private:
  struct Near;
  struct InWindow;
  struct Item;
  struct Sent;
  struct Hold;
  struct Unlocked;
  struct Peer;
  struct Piece {
    std::size_t bytes;
    int uses;
  };
  using Lock = std::unique_lock<std::mutex>;

  std::byte* data() const { return window_->at(lanes_bytes(servers_)); }
  std::size_t data_bytes() const { return window_->bytes() - lanes_bytes(servers_); }
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
  // Calls `ready` until it returns true, or false when the time is over.
  template <class F>
  bool wait_until(Hold& hold, Nanoseconds timeout, F&& ready);
  bool take_turns(Hold& hold);
  void sleep(std::uint32_t seen, Nanoseconds most);
  void put(Hold& hold, std::uint32_t server, Item item, Nanoseconds timeout);
  const Request& number(std::uint32_t server, Item& item);
  static RequestSlot slot_of(const Request& made);
  void send_part(Hold& hold, RequestKind kind, const std::shared_ptr<Call>& call, const Pushed& tensor,
                 const Part& part, const Options& options, bool streamed);
  bool is_readable(const Peer& from, const Part& part) const;
  std::size_t copy_new_values(Call& call);  // returns how many bytes
  void feed();
  void feed(std::uint32_t server);
  template <class Queue>
  static typename Queue::iterator next_of(Queue& queue);
  void forget(Call& call);
  std::size_t find_room(std::size_t bytes);  // SIZE_MAX: none
  void drop(std::size_t offset);
  std::size_t piece_with(std::size_t offset) const;
  std::size_t take_room(Hold& hold, std::size_t bytes, Nanoseconds timeout);
  void pack_push(const Part& part, Packing packing, std::byte* to, const std::byte* from);
  void fit_rows(const TablePlace& table, const RowSet& rows) const;
  void fill_rows(const TablePlace& table, const RowSet& rows, std::uint32_t server, const std::byte* values,
                 std::byte* to) const;

  Client& of_this_process();  // throws Error(invalid_argument) in a forked child

  const ForkMark fork_;
  const std::function<void()> interrupt_;
  const WorkerId worker_;
  const std::size_t servers_;
  FileDescriptor window_fd_, news_, news_for_servers_;
  std::unique_ptr<Mapping> window_;
  Bell* bell_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<std::size_t, Piece> pieces_;  // by offset in data
  // What packed pushes have not told a block on another host yet.
  std::map<std::pair<std::uint32_t, BlockId>, std::vector<float>> residuals_;
  Nanoseconds looked_ = 0;
  std::atomic<bool> aborted_ = false;
  bool has_near_ = false, seeks_ = false;
  std::shared_ptr<Server> hosted_;
  std::uint64_t tags_ = 0;
  std::unique_ptr<WorkerWire> wire_;  // if a server is on another host; the first to go, as its thread calls feed()
};

}  // namespace ringreduce::parameter_server
