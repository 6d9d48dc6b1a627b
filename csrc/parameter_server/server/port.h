// A worker as its server sees it: where its requests come from, what its pushes lie in, and how replies reach it. For
// the thread that takes the server's turns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/descriptors.h"
#include "core/fork.h"
#include "parameter_server/block/blocks.h"
#include "parameter_server/wire.h"

namespace ringreduce::parameter_server {

// What a worker on this host tells a server about itself.
struct WorkerSpec {
  WorkerId id = 0;
  std::string group;
  FileDescriptor window;  // memfd
  std::size_t window_bytes = 0;
  std::size_t servers = 0;  // lanes in the window
  std::size_t lane = 0;     // this server's
  FileDescriptor pidfd;
  FileDescriptor news;  // a socket on which the server sends News; closed by the worker when it has left
  std::string name;     // for messages: "node7, pid 4711"
};
// Serialises what a backup must know, without the descriptors.
void visit(Archive& archive, WorkerSpec& spec);

// The data of a push, in the worker's window or, at a backup that is reached by TCP, in memory of its own.
struct Lent final : Data {
  Lent(std::shared_ptr<Window> its, std::size_t offset, std::size_t bytes)
      : Data(bytes), window(std::move(its)), offset(offset), memory(window, window->memory.at(offset)) {}
  Lent(std::shared_ptr<std::byte[]> memory, std::size_t bytes) : Data(bytes), memory(std::move(memory)) {}
  const std::byte* at() const override { return memory.get(); }

  const std::shared_ptr<Window> window;  // nullptr: the data is in memory of its own
  const std::size_t offset = 0;          // in the window
  const std::shared_ptr<std::byte[]> memory;
};

// A server has a turn, as in Lane::turn. A worker that has not turned to it yet gets no replies: it will repeat its
// requests here, and until then its data may be on the way a second time.
class Port {
 public:
  virtual ~Port() = default;
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  virtual bool far() const = 0;  // the worker is on another host
  // Takes the next request from a worker on this host; those of other hosts come through ServerWire.
  virtual bool next(RequestSlot&, std::uint32_t) { return false; }
  // Returns the data of a request; nullptr if it has none or describes it wrongly.
  std::shared_ptr<const Payload> payload_of(const RequestSlot& slot, const Blocks& blocks) const;
  // Remembers what the reply to a request will need.
  virtual void expect(const RequestSlot& slot, const Blocks& blocks, std::uint32_t turn);
  // Called once for each reply, with the blocks as the worker shall see them. Returns whether put() shall follow; not
  // if the worker gets no reply, or gets it after a value.
  bool prepare(const ReplySlot& slot, const Blocks& blocks, std::uint32_t turn);
  virtual void put(const ReplySlot& slot) = 0;
  // Wakes the worker if there are replies, or sends them. Returns false if it takes so few that it should be given up.
  virtual bool send(const Blocks& blocks) = 0;
  // Whether the worker has certainly ended or left.
  virtual bool ended() const { return false; }
  // Of a worker on this host: its window, its process and the socket for News, which a backup is given.
  virtual std::array<int, 3> descriptors() const { return {-1, -1, -1}; }
  void tell(News news, std::span<const int> given);

  WorkerSpec spec;                       // without the window, which is beside it
  const std::shared_ptr<Window> window;  // the worker's, or this server's copy of it if the worker is on another host
  bool alive = true;
  bool untold = false;  // the latest News could not be sent to it yet
  bool gone = false;    // its connections have closed
  bool known = false;   // at a backup reached by TCP: the log has named this worker

 protected:
  // A pull whose reply brings values. For a table, the window has `count` ids at `offset`, and room for the rows after
  // them.
  struct Pull {
    BlockId block;
    std::size_t offset = 0, count = 0;
    Packing packing = Packing::none;
  };

  Port(WorkerSpec its, std::shared_ptr<Window> window) : spec(std::move(its)), window(std::move(window)) {}
  // The pull that a request is, if it names a block and its place and packing are valid.
  std::optional<Pull> pull_of(const RequestSlot& slot, const Blocks& blocks) const;
  virtual bool listens(std::uint64_t number, std::uint32_t turn) = 0;
  virtual bool defers(const Pull&, const ReplySlot&) { return false; }  // will send the value, and then the reply

  std::map<std::uint64_t, Pull> pulls_;  // unanswered pulls of tables and from another host, by request number
  bool answered_ = false;                // there are replies to send
};

class NearPort final : public Port {
 public:
  // Throws Error(invalid_argument) if the window does not match the specification.
  explicit NearPort(WorkerSpec spec) : NearPort(window_of(spec), std::move(spec)) {}

  bool far() const override { return false; }
  bool next(RequestSlot& slot, std::uint32_t turn) override;
  void put(const ReplySlot& slot) override;
  bool send(const Blocks&) override;
  bool ended() const override { return has_gone(spec.pidfd.get(), spec.news.get()); }
  std::array<int, 3> descriptors() const override {
    return {window->memory_fd.get(), spec.pidfd.get(), spec.news.get()};
  }

 private:
  NearPort(std::shared_ptr<Window> window, WorkerSpec&& spec);
  static std::shared_ptr<Window> window_of(WorkerSpec& spec);
  bool listens(std::uint64_t, std::uint32_t) override { return attached_; }

  Lane* lane_ = nullptr;
  std::uint64_t taken_ = 0;  // requests taken from the lane
  bool attached_ = false;    // the worker has set its lane to this server's turn
};

class FarPort final : public Port {
 public:
  // Lets in the worker at `wire`; `window` is the memory for its pushes.
  FarPort(WorkerSpec spec, std::shared_ptr<Window> window, ServerWire& wire);
  ~FarPort() override;

  bool far() const override { return true; }
  void expect(const RequestSlot& slot, const Blocks& blocks, std::uint32_t turn) override;
  void put(const ReplySlot& slot) override { replies_.push_back(slot); }
  bool send(const Blocks& blocks) override;

 private:
  bool listens(std::uint64_t number, std::uint32_t turn) override { return turn == 0 || asked_.erase(number) > 0; }
  bool defers(const Pull& pull, const ReplySlot& slot) override;
  std::shared_ptr<std::byte[]> value_for(const Pull& pull, ReplySlot& reply, const Blocks& blocks) const;

  const ForkMark fork_;
  ServerWire& wire_;
  std::set<std::uint64_t> asked_;                  // unanswered requests to this server, if it was a backup before
  std::vector<ReplySlot> replies_;                 // to be sent
  std::deque<std::pair<Pull, ReplySlot>> values_;  // to be copied and sent
  std::deque<std::pair<std::weak_ptr<std::byte[]>, std::size_t>> copies_;  // being sent, with their sizes in bytes
};

using Ports = std::map<WorkerId, std::unique_ptr<Port>>;
// nullptr: there is no such worker.
inline Port* find(const Ports& ports, WorkerId worker) {
  const auto found = ports.find(worker);
  return found == ports.end() ? nullptr : found->second.get();
}
inline void ring(const Ports& ports) {
  for (const auto& [worker, port] : ports) port->window->bell().ring();
}

}  // namespace ringreduce::parameter_server
