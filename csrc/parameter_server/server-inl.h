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
