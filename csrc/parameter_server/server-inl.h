// What a server consists of. For the files of server.h.
#pragma once

#include <algorithm>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/error.h"
#include "parameter_server/journal_wire.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {

// As a server's state and its journal have them, but for their descriptors.
void visit(Archive& archive, WorkerSpec& spec);
void visit(Archive& archive, BlockSpec& spec);

// A worker's memory, or what it has sent of it from another host; mapped as long as something in it may be read.
struct Server::Window {
  Window(const WorkerSpec& spec)
      : memory_fd(spec.window), memory(spec.window, spec.window_bytes, true), data(lanes_bytes(spec.servers)) {}
  // Of a worker that has gone, with pushes that count.
  explicit Window(FileDescriptor all)
      : memory_fd(std::move(all)), memory(memory_fd.get(), memory_bytes(memory_fd.get()), true), data(0) {}

  Bell& bell() const { return *reinterpret_cast<Bell*>(memory.at()); }
  Lane& lane(std::size_t index) const {
    return *reinterpret_cast<Lane*>(memory.at(sizeof(Bell) + index * sizeof(Lane)));
  }

  FileDescriptor memory_fd;
  Mapping memory;
  std::size_t data;
};

// What a worker pushed, where it lies: in its window, or in memory of a backup on another host.
struct Server::Lent : Payload {
  Lent(std::shared_ptr<Window> window, std::size_t offset, std::size_t bytes)
      : window(std::move(window)), offset(offset), bytes(bytes) {}
  Lent(std::shared_ptr<std::byte[]> memory, std::size_t bytes) : memory(std::move(memory)), bytes(bytes) {}
  const std::byte* at() const { return window == nullptr ? memory.get() : window->memory.at(offset); }

  std::shared_ptr<Window> window;
  std::shared_ptr<std::byte[]> memory;  // without a window
  std::size_t offset = 0, bytes;
};

// A server and its backup see of each other: the journal, whether the other one has ended, and how to wake it.
struct Server::Partner {
  Partner() = default;
  virtual ~Partner() = default;
  Partner(const Partner&) = delete;
  Partner& operator=(const Partner&) = delete;

  // The server's half of the journal: what it has written, what of it will outlive the server, and what the backup has
  // carried out.
  virtual std::uint64_t written() const = 0;
  virtual std::uint64_t received() const = 0;
  virtual std::uint64_t carried_out() const = 0;
  virtual void write(const Record& record, const std::vector<std::byte>& bytes, const Lent* pushed) = 0;
  std::size_t room() const {
    return Journal::kBytes -
           std::min<std::size_t>(Journal::kBytes, static_cast<std::size_t>(written() - carried_out()));
  }
  // The backup's: the next record, its bytes, and what was pushed, unless that lies where the worker pushed it.
  virtual bool read(Record& record, std::vector<std::byte>& bytes, std::shared_ptr<const Lent>& pushed) = 0;
  virtual void acknowledge() {}  // what is here will outlive the server
  virtual void confirm() = 0;    // all that has been read is carried out
  virtual void ring() = 0;

  // The other one takes no further part, and that is certain, or has been decided.
  virtual bool ended() const = 0;
  // It cannot be heard; decided() is to say who goes on.
  virtual bool silent() const { return false; }
  // The journal takes any number of messages, and those of workers come without the workers.
  virtual bool far() const { return false; }
  // The other one would go on if this one ended.
  bool counts() const { return is_counted; }
  // Called in every turn; returns whether anything moved.
  virtual bool progress() { return false; }
  virtual void begin_turns() {}
  virtual void end_turns() {}

  std::string name, address;  // of a backup: for messages, and of its door on this host
  bool is_counted = false;
  // Of a backup that starts: blocks [next, end) are still to be given, if they are given one by one; where the journal
  // was after those that it has not taken; when the latest was given, and from when on one may be beside requests;
  // where the journal was when it had been given all.
  BlockId next = 0, end = 0;
  std::deque<std::uint64_t> under_way;
  Nanoseconds gave = 0, rests_until = 0;
  std::uint64_t given_at = 0;
};

// Of the same host.
struct Server::NearPartner final : Partner {
  // Of its values, the first so many bytes are mapped.
  NearPartner(const PartnerSpec& spec, std::size_t bytes)
      : journal_fd(spec.journal),
        bell_fd(spec.bell),
        values_fd(spec.values),
        pidfd(spec.pidfd),
        passage(spec.passage),
        journal(spec.journal),
        bell_memory(spec.bell, sizeof(Bell), true),
        values(spec.values, bytes, false),
        capacity(spec.capacity) {
    name = spec.name, address = spec.address;
  }

  Bell& bell() const { return *reinterpret_cast<Bell*>(bell_memory.at()); }
  const ValuesHeader& header() const { return *reinterpret_cast<const ValuesHeader*>(values.at()); }
  std::uint64_t written() const override { return journal.written(); }
  std::uint64_t received() const override { return journal.written(); }
  std::uint64_t carried_out() const override { return journal.carried_out(); }
  void write(const Record& record, const std::vector<std::byte>& bytes, const Lent*) override {
    journal.write(record, bytes);
  }
  bool read(Record& record, std::vector<std::byte>& bytes, std::shared_ptr<const Lent>&) override {
    return journal.read(record, bytes);
  }
  void confirm() override {
    journal.confirm();
    ring();
  }
  void ring() override { bell().ring(); }
  bool ended() const override {
    return header().ended.load(std::memory_order_seq_cst) != 0 || parameter_server::has_ended(pidfd.get());
  }

  FileDescriptor journal_fd, bell_fd, values_fd, pidfd, passage;
  Journal journal;
  Mapping bell_memory, values;
  std::size_t capacity;
  std::uint32_t number = 0;  // of a backup: as ValuesHeader::backup
};

// Of another host, or of this one where workers of other hosts may come.
struct Server::FarPartner final : Partner {
  FarPartner(Bell& bell, std::function<void()> on_silence, std::string its_name)
      : wire(bell), on_silence(std::move(on_silence)) {
    name = std::move(its_name);
  }

  std::uint64_t written() const override { return wire.written(); }
  std::uint64_t received() const override { return wire.received(); }
  std::uint64_t carried_out() const override { return wire.carried_out(); }
  void write(const Record& record, const std::vector<std::byte>& bytes, const Lent* pushed) override;
  bool read(Record& record, std::vector<std::byte>& bytes, std::shared_ptr<const Lent>& pushed) override;
  void acknowledge() override { wire.confirm(false); }
  void confirm() override { wire.confirm(true); }
  void ring() override {}
  bool ended() const override { return false; }  // decided() makes an end of it
  bool silent() const override { return is_silent; }
  bool far() const override { return true; }
  bool progress() override;
  void begin_turns() override {
    if (!std::exchange(takes_turns, true)) wire.connections().take_over();
  }
  void end_turns() override {
    if (std::exchange(takes_turns, false)) wire.connections().hand_over(true);
  }

  JournalWire wire;
  const std::function<void()> on_silence;  // called once
  bool is_silent = false, takes_turns = false;
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
