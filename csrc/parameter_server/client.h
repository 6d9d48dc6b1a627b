// A worker's side: its window, its sessions with the servers, and its waiting.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/fork.h"
#include "parameter_server/session.h"
#include "parameter_server/shared.h"

namespace ringreduce::parameter_server {

// A server, as it introduces itself. The client takes over the descriptors.
struct ServerSpec {
  int values = -1;  // memfd, `capacity` bytes
  int bell = -1;    // memfd
  int pidfd = -1;
  std::size_t capacity = 0;
  std::string name;  // "server 1 (node7, pid 4711)"
};

// A block of a tensor: bytes [begin, begin + bytes) of it are block `block` of server `server`, at `offset` there.
struct Part {
  std::uint32_t server = 0;
  BlockId block = 0;
  std::size_t begin = 0, bytes = 0, offset = 0;
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
};

// Thread-safe. Every wait ends with an error when its time is over (timeout), when a server that it waits for has ended
// (peer_lost, `culprit` is the server) and after abort() (aborted).
class Client {
 public:
  // A window with `data` bytes for pushes to `servers` servers. Throws Error(system).
  Client(WorkerId worker, std::size_t servers, std::size_t data);
  ~Client();

  int window() const { return window_fd_.get(); }
  std::size_t window_bytes() const { return window_->bytes(); }
  void attach(std::uint32_t server, const ServerSpec& spec);

  // Memory in the window: a push of what lies there copies nothing. It lives until it is released and no push reads it
  // any more. Throws Error(system) if the window has no such room.
  std::byte* allocate(std::size_t bytes);
  void release(std::byte* piece);

  struct Options {
    std::int32_t priority = 0;
    double weight = 1;
    Nanoseconds timeout = kForever;
  };
  // Asks for `kind` (initialise or push) of all parts of a tensor. Waits for room in the window and in the sessions.
  // `tensor` may change when it returns, unless it lies in the window.
  std::shared_ptr<Call> send(RequestKind kind, const std::vector<Part>& parts, const std::byte* tensor,
                             const Options& options);
  // Asks for pull of all parts, without data; or for clock, barrier or leave of the servers.
  std::shared_ptr<Call> ask(RequestKind kind, const std::vector<Part>& parts, const Options& options);
  std::shared_ptr<Call> ask(RequestKind kind, const std::vector<std::uint32_t>& servers, const Options& options);

  // Returns whether all was answered within the time; does not throw if it was not.
  bool wait(Call& call, Nanoseconds timeout);
  // Copies the latest value of all parts to `tensor`; returns the versions. Before, it waits for this worker's own
  // pushes to them. Throws Error(timeout) as above.
  std::vector<std::uint64_t> read(const std::vector<Part>& parts, std::byte* tensor, Nanoseconds timeout);

  void abort();
  std::size_t outstanding() const;

 private:
  struct Peer;
  struct Piece {
    std::size_t bytes;
    int uses;
  };
  using Lock = std::unique_lock<std::mutex>;

  std::byte* data() const { return window_->at(lanes_bytes(servers_)); }
  std::size_t data_bytes() const { return window_->bytes() - lanes_bytes(servers_); }
  Peer& peer(std::uint32_t server) const;
  bool take_replies();
  void take_reply(std::uint32_t server, const ReplySlot& slot);
  void look_for_ended();
  void lose(std::uint32_t server);
  [[noreturn]] void throw_lost(std::uint32_t server) const;
  // Calls `ready` until it returns true, or false when the time is over.
  template <class F>
  bool wait_until(Lock& lock, Nanoseconds timeout, F&& ready);
  void put(Lock& lock, const std::shared_ptr<Call>& call, std::uint32_t server, Request request, std::size_t offset,
           std::size_t bytes, const Options& options);
  std::size_t find_room(std::size_t bytes);  // SIZE_MAX: none
  void drop(std::size_t offset);
  std::size_t piece_with(std::size_t offset) const;

  const ForkMark fork_;
  const WorkerId worker_;
  const std::size_t servers_;
  FileDescriptor window_fd_;
  std::unique_ptr<Mapping> window_;
  Bell* bell_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<std::size_t, Piece> pieces_;  // by offset in data
  Nanoseconds looked_ = 0;
  std::atomic<bool> aborted_ = false;
};

}  // namespace ringreduce::parameter_server
