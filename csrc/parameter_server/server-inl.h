// What a server consists of. For the files of server.h.
#pragma once

#include <exception>
#include <memory>
#include <mutex>

#include "core/error.h"

#include "parameter_server/server.h"

namespace ringreduce::parameter_server {

// A worker's memory, or what it has sent of it from another host; mapped as long as something in it may be read.
struct Server::Window {
  Window(const WorkerSpec& spec)
      : memory_fd(spec.window), memory(spec.window, spec.window_bytes, true), data(lanes_bytes(spec.servers)) {}

  Bell& bell() const { return *reinterpret_cast<Bell*>(memory.at()); }
  Lane& lane(std::size_t index) const {
    return *reinterpret_cast<Lane*>(memory.at(sizeof(Bell) + index * sizeof(Lane)));
  }

  FileDescriptor memory_fd;
  Mapping memory;
  std::size_t data;
};

// What a worker pushed, where it lies.
struct Server::Lent : Payload {
  Lent(std::shared_ptr<Window> window, std::size_t offset, std::size_t bytes)
      : window(std::move(window)), offset(offset), bytes(bytes) {}
  const std::byte* at() const { return window->memory.at(offset); }

  std::shared_ptr<Window> window;
  std::size_t offset, bytes;
};

// A server and its backup see of each other: the journal, whether the other one has ended, and how to wake it.
struct Server::Partner {
  explicit Partner(const PartnerSpec& spec)
      : journal_fd(spec.journal),
        bell_fd(spec.bell),
        values_fd(spec.values),
        pidfd(spec.pidfd),
        journal(spec.journal),
        bell_memory(spec.bell, sizeof(Bell), true),
        values(spec.values, sizeof(ValuesHeader), false) {}

  Bell& bell() const { return *reinterpret_cast<Bell*>(bell_memory.at()); }
  bool ended() const {
    return reinterpret_cast<const ValuesHeader*>(values.at())->ended.load(std::memory_order_seq_cst) != 0 ||
           has_ended(pidfd.get());
  }

  FileDescriptor journal_fd, bell_fd, values_fd, pidfd;
  Journal journal;
  Mapping bell_memory, values;
};

// Has the server's thread call `body`, and waits for that.
template <class F>
void Server::order(F&& body) {
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
