// The other one of a server and its backup, as each of the two sees it: the log between them, whether the other one has
// ended, and how to wake it.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "core/descriptors.h"
#include "core/error.h"
#include "parameter_server/server/far_log.h"

namespace ringreduce::parameter_server {

// What a server and its backup on the same host tell each other. Each of the two is the other's partner.
struct PartnerSpec {
  FileDescriptor log;     // memfd, written by the server and read by the backup
  FileDescriptor bell;    // memfd
  FileDescriptor values;  // memfd
  FileDescriptor pidfd;
  FileDescriptor passage;  // a socket from the server to the backup, for messages with descriptors
  // Of the backup; the server passes them on to workers as News.
  std::size_t capacity = 0;
  std::string name, address;
};

struct Partner {
  Partner() = default;
  explicit Partner(PartnerSpec spec)
      : name(std::move(spec.name)),
        address(std::move(spec.address)),
        capacity(spec.capacity),
        log_fd(std::move(spec.log)),
        bell_fd(std::move(spec.bell)),
        values_fd(std::move(spec.values)),
        pidfd(std::move(spec.pidfd)),
        passage(std::move(spec.passage)) {}
  virtual ~Partner() = default;
  Partner(const Partner&) = delete;
  Partner& operator=(const Partner&) = delete;

  // ---- Called by the server. The positions in the log up to which records have been written, will outlive the
  // server, and have been carried out by the backup. ----
  virtual std::uint64_t written() const = 0;
  virtual std::uint64_t received() const = 0;
  virtual std::uint64_t carried_out() const = 0;
  virtual void write(Entry entry) = 0;
  // Sends descriptors for the next record. Returns false if the backup does not take them. No effect between hosts.
  virtual bool send(std::span<const int>) { return true; }
  std::size_t room() const {
    return NearLog::kBytes -
           std::min<std::size_t>(NearLog::kBytes, static_cast<std::size_t>(written() - carried_out()));
  }
  // ---- Called by the backup ----
  virtual bool read(Entry& entry) = 0;  // takes the next entry; returns false if there is none
  virtual void acknowledge() {}         // tells the server what has been received
  virtual void confirm() = 0;           // tells the server that all entries read so far have been carried out
  virtual void say_over() {}            // tells the workers on this host that the server has ended, and this one serves
  // ---- Called by both ----
  virtual void ring() = 0;
  // Adds a connection to a partner that is reached by TCP, and takes over the socket.
  virtual void connect(int, std::string) {
    throw Error(ErrorKind::invalid_argument, "this server has no partner on another host");
  }
  // The values of a partner on this host, as far as they are mapped.
  virtual const std::byte* values() const { return nullptr; }
  const ValuesHeader& header() const { return *reinterpret_cast<const ValuesHeader*>(values()); }

  // Whether the partner has certainly ended.
  virtual bool ended() const = 0;
  // Whether the partner is out of reach, and decided() will say which of the two goes on.
  virtual bool silent() const { return false; }
  // Whether the partner is reached by TCP. Then the log has no bound, and workers connect to the backup themselves.
  virtual bool far() const { return false; }
  bool is_there() const { return !ended() && !silent(); }
  // Drives the connections. Called in every turn; returns whether there was something to do.
  virtual bool progress() { return false; }
  virtual void begin_turns() {}
  virtual void end_turns() {}

  std::string name, address;  // of a backup: for messages, and of its socket for control messages
  std::size_t capacity = 0;
  FileDescriptor log_fd, bell_fd, values_fd, pidfd, passage;  // of a partner on this host
};

// A partner on the same host.
struct NearPartner final : Partner {
  // Maps the values of a server; of a `backup` only their header.
  NearPartner(PartnerSpec spec, bool backup)
      : Partner(std::move(spec)),
        log(log_fd.get()),
        bell_memory(bell_fd.get(), sizeof(Bell), true),
        values_memory(values_fd.get(), backup ? sizeof(ValuesHeader) : memory_bytes(values_fd.get()), false) {}

  Bell& bell() const { return *reinterpret_cast<Bell*>(bell_memory.at()); }
  std::uint64_t written() const override { return log.written(); }
  std::uint64_t received() const override { return log.written(); }
  std::uint64_t carried_out() const override { return log.carried_out(); }
  void write(Entry entry) override { log.write(entry.record, entry.bytes); }
  bool send(std::span<const int> descriptors) override;
  bool read(Entry& entry) override;
  void confirm() override {
    log.confirm();
    ring();
  }
  void say_over() override { bell().over.store(1, std::memory_order_seq_cst); }
  void ring() override { bell().ring(); }
  const std::byte* values() const override { return values_memory.at(); }
  bool ended() const override { return header().ended.load(std::memory_order_seq_cst) != 0 || has_gone(pidfd.get()); }

  NearLog log;
  Mapping bell_memory, values_memory;
};

// A partner that is reached by TCP: on another host, or on this one if the servers accept workers of other hosts.
struct FarPartner final : Partner {
  FarPartner(Bell& bell, std::function<void(const std::string&)> on_silence, std::string its_name)
      : wire(bell), on_silence(std::move(on_silence)) {
    name = std::move(its_name);
  }

  std::uint64_t written() const override { return wire.written(); }
  std::uint64_t received() const override { return wire.received(); }
  std::uint64_t carried_out() const override { return wire.carried_out(); }
  void write(Entry entry) override { wire.write(std::move(entry)); }
  bool read(Entry& entry) override { return wire.read(entry); }
  void acknowledge() override { wire.confirm(false); }
  void confirm() override { wire.confirm(true); }
  void ring() override {}
  void connect(int socket, std::string path) override {
    wire.connections().add(FarLog::kPartner, socket, std::move(path));
  }
  bool ended() const override { return false; }  // never certain: decided() drops a partner that is silent
  bool silent() const override { return is_silent; }
  bool far() const override { return true; }
  bool progress() override;
  void begin_turns() override {
    if (!std::exchange(takes_turns, true)) wire.connections().take_over();
  }
  void end_turns() override {
    if (std::exchange(takes_turns, false)) wire.connections().hand_over(true);
  }

  FarLog wire;
  // Called once, in the thread that takes its turns, when the partner can no longer be reached, with the reason. From
  // then on the server answers nothing until Server::decided() tells it which of the two goes on.
  const std::function<void(const std::string&)> on_silence;
  bool is_silent = false, takes_turns = false;
};

}  // namespace ringreduce::parameter_server
