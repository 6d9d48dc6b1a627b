// The servers as one worker sees them: its window, what is under way to each server, and who has taken over from whom.
//
// Servers on this host read the worker's requests and pushed data in the window, and the worker copies values out of
// the servers' memory. Requests to a server on another host wait in a queue until the connection can take more
// (wire.h). The queue sends the request with the greatest priority first, in fragments. A request gets its number only
// when all its data has been handed to the connection, because the server's shard takes requests in the order of their
// numbers.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/descriptors.h"
#include "core/fork.h"
#include "parameter_server/client/session.h"
#include "parameter_server/client/window.h"
#include "parameter_server/shared.h"
#include "parameter_server/wire.h"

namespace ringreduce::parameter_server {

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

inline constexpr std::uint32_t kNobody = INT32_MAX;  // the wire address of a server that no replica serves yet

// The public functions are thread-safe.
class KnownServers {
 public:
  int window() const { return window_->memory_fd.get(); }
  std::size_t window_bytes() const { return window_->memory.bytes(); }
  // Attaches a server on this host.
  void attach(std::uint32_t server, ServerSpec spec);
  // The socket on which servers on this host tell this worker about their backups. When a backup has taken over, the
  // client repeats the unanswered requests to it. Closing the socket tells the servers that this worker has ended.
  int news() const { return news_for_servers_.get(); }
  void close_news();
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
  // Whether the blocks are served on this host, where values are copied from shared memory.
  bool is_near(std::uint32_t server) const;
  // The number of requests that have not been answered.
  std::size_t outstanding() const;
  // Server and block of one unanswered push, if there is any.
  std::optional<std::pair<std::uint32_t, BlockId>> unanswered_push() const;

 protected:
  // The data of a request, `bytes` bytes at `offset` in the window's data. Holds the piece that it is in.
  struct InWindow : Payload {
    InWindow(const OwnWindow& window, OwnWindow::Piece its, const std::byte* at, std::size_t bytes)
        : piece(std::move(its)), offset(static_cast<std::size_t>(at - window.data())), bytes(bytes) {}
    const OwnWindow::Piece piece;
    const std::size_t offset, bytes;
  };

  // The memory shared with a server on this host.
  struct Near {
    Near(ServerSpec spec, Lane* lane)
        : values_fd(std::move(spec.values)),
          bell_fd(std::move(spec.bell)),
          pidfd(std::move(spec.pidfd)),
          values(values_fd.get(), spec.capacity, false),
          bell_memory(bell_fd.get(), sizeof(Bell), true),
          lane(lane),
          name(spec.name),
          turn(spec.turn),
          number(spec.number),
          address(spec.address) {}

    Bell& bell() const { return *reinterpret_cast<Bell*>(bell_memory.at()); }
    const BlockWords& words(const Part& part) const {
      return *reinterpret_cast<const BlockWords*>(values.at(part.offset));
    }
    const ValuesHeader& header() const { return *reinterpret_cast<const ValuesHeader*>(values.at()); }
    bool ended() const { return header().ended.load(std::memory_order_seq_cst) != 0 || has_gone(pidfd.get()); }
    bool serves() const { return header().serves.load(std::memory_order_seq_cst) != 0; }
    // Why it has failed; "" if it has not.
    std::string failure() const { return {header().failure, strnlen(header().failure, sizeof(header().failure))}; }
    bool over() const { return bell().over.load(std::memory_order_seq_cst) != 0; }
    void ask(const RequestSlot& slot) {
      lane->requests[asked++ % kMostOutstanding] = slot;
      lane->asked.store(asked, std::memory_order_seq_cst);
    }

    FileDescriptor values_fd, bell_fd, pidfd;
    Mapping values, bell_memory;
    Lane* lane;
    std::string name;
    std::uint32_t turn, number;
    std::string address;
    std::uint64_t asked = 0;
    std::uint64_t taken = 0;  // replies
  };

  // What is kept of an unanswered request, so that it can be repeated to a backup.
  struct Sent {
    std::shared_ptr<Call> call;
    std::byte* into = nullptr;  // where a pulled value goes
    std::size_t bytes = 0;      // of the pulled value
    Packing packing = Packing::none;
  };

  // A request in the queue to another host.
  struct Item : Sent {
    Item(std::shared_ptr<Call> call, RequestKind kind, BlockId block = 0) : Sent{std::move(call)} {
      request.kind = kind;
      request.block = block;
    }
    Item(Sent sent, Request again) : Sent(std::move(sent)), request(std::move(again)) {}

    const InWindow* data() const { return static_cast<const InWindow*>(request.payload.get()); }
    // Pulls go first: they are short, and the values can come back while other data is being pushed.
    std::int32_t urgency() const { return request.kind == RequestKind::pull ? INT32_MAX : request.priority; }

    Request request;        // has a number already if it was sent to a server that has ended, and is now repeated
    std::uint64_t tag = 0;  // connects the request with the frames that carry its data
    std::size_t sent = 0;   // bytes of its data that have been handed to the connection
  };

  struct Peer {
    std::string name;
    Session session;
    std::shared_ptr<Near> near = nullptr;    // nullptr: the server is reached by TCP
    std::shared_ptr<Near> backup = nullptr;  // the latest backup that this worker was told of; becomes `near`
    std::uint32_t address = 0;               // of the replica that is asked, on the wire: see address_of()
    // Wire addresses and names of attached backups that are not asked yet, in the order in which they may take over.
    std::deque<std::pair<std::uint32_t, std::string>> next = {};
    std::deque<Item> queue = {};               // requests to another host, in the order of calls
    bool alive = true;                         // false: the server is lost
    std::string why = {};                      // why the server was lost last, for messages
    std::map<std::uint64_t, Sent> calls = {};  // unanswered requests, by number
    std::map<BlockId, int> pushes = {};        // unanswered pushes, by block
  };

  // Makes a window with `data` bytes for pushes. Throws Error(system).
  KnownServers(WorkerId worker, std::size_t servers, std::size_t data);
  void close_wire();  // to be called before anything else of a worker goes, as its thread calls feed()

  // With the lock held.
  Peer& peer(std::uint32_t server) const;    // throws invalid_argument if there is none
  bool take_replies();                       // returns whether there were any
  void feed();                               // hands queued requests to the connections, as long as these take more
  void look_for_ended();                     // turns from servers that have ended to their backups, or gives them up
  void turn_if_ended(std::uint32_t server);  // the same at once, from a server on this host to a backup on another
  // Sends a request, for which the session must have room. If this throws, the request is not under way.
  void send_now(std::uint32_t server, Item item);
  void forget(Call& call);  // stores nothing more in its tensors
  [[noreturn]] void throw_lost(std::uint32_t server) const;
  // Whether the part's value can be read in the server's memory, with this worker's own pushes.
  bool is_readable(const Peer& from, const Part& part) const;
  const BlockWords& words_of(const Part& part) const;  // throws invalid_argument if the server is on another host

  const ForkMark fork_;
  const WorkerId worker_;
  const std::shared_ptr<OwnWindow> window_;
  Bell* const bell_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  bool has_near_ = false;
  // Set if a server is on another host. Its thread calls feed().
  std::unique_ptr<WorkerWire> wire_;

 private:
  using Lock = std::unique_lock<std::mutex>;

  bool take_replies(std::uint32_t server);
  void take_reply(std::uint32_t server, const ReplySlot& slot);
  bool take_news();
  void look_for_next(std::uint32_t server);
  static std::string why_ended(const Peer& of);
  bool is_lost(const Peer& of) const;
  void turn_to_backup(std::uint32_t server);
  void turn_to_far_backup(std::uint32_t server, std::string why);
  bool may_turn(const Peer& of) const;
  static void take_next(Peer& of);
  std::uint32_t address_of(std::uint32_t server, std::uint32_t replica) const;
  void take_lost();
  void open_wire();
  void lose(std::uint32_t server, std::string why);
  const Request& number(std::uint32_t server, Item& item);
  static RequestSlot slot_of(const Request& made);
  void feed(std::uint32_t server);
  void try_to_feed(std::uint32_t server);
  template <class Queue>
  static typename Queue::iterator next_of(Queue& queue);

  FileDescriptor news_, news_for_servers_;
  Nanoseconds looked_ = 0;
  bool seeks_ = false;
  bool ran_out_ = false;  // of memory, for what came or went over a connection
  std::uint64_t tags_ = 0;
};

}  // namespace ringreduce::parameter_server
