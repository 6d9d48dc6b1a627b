// The log: a ring of messages in memory that a server writes and its backup on the same host reads.
//
// A shard is a pure function of the messages it is given and of the times between them. A second server that gives its
// shard the same messages, and carries out the resulting operations, therefore has the same shard and the same values.
// The server writes each message to the log before its own shard gets it. The memory outlives the server's process,
// so the backup can redo everything whose effects anybody has seen.
//
// The log does not contain pushed data. That stays in the worker's window, which the backup maps too, until the
// push is answered.
//
//   Blocks  Values and optimizer states are in memory that the backup maps and that outlives the server. An update
//           writes only the buffers of the next version, then publishes it. While the server lives, the backup
//           therefore carries out no updates. When the server has ended, the backup copies the published values and
//           carries out the remaining updates, whose pushes have not been answered.
//   Tables  Rows are in the server's private memory and are updated in place. The backup carries out every update, and
//           the server answers a push after the backup has carried it out. Blocks of a server that was founded without
//           backups are treated the same way, since their states are updated in place (BlockSpec::two_states).
//
// Both servers belong to the same user and have proved that they know the secret, so the backup trusts what it reads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "parameter_server/shared.h"

namespace ringreduce::parameter_server {

// An entry of the log. The first five kinds are the messages of a shard (messages.h). The others are for a backup
// that is made while the server serves:
//   state    the first record. Its data is the server's state, without the content of blocks that are updated in place;
//            slot.number is the server's turn, and slot.round the number of the backup.
//   block    piece slot.offset of block slot.block. slot.round is 1 if more pieces of it follow.
//   inherit  the last record. After it the backup is the server's heir (Server::leave_to_backup).
struct Record {
  enum class Kind : std::uint32_t { request = 1, join, lose, create, tick, state, block, inherit };
  Kind kind = Kind::tick;
  WorkerId worker = 0;
  Nanoseconds elapsed = 0;        // since the message before, as the shard is given it
  RequestSlot slot{};             // of a request
  std::uint64_t bytes = 0;        // of the serialised WorkerSpec (join) or BlockSpec (create) that follows the record
  std::uint64_t descriptors = 0;  // on one host: how many the server sent before it wrote the record
};

// A record and what belongs to it.
struct Entry {
  Record record;
  std::vector<std::byte> bytes = {};  // which follow the record
  // The content of a state or a block, or what a request pushed: slot.bytes bytes. On one host that of a request is in
  // its worker's window, and not here.
  std::shared_ptr<std::byte[]> data = nullptr;
  std::vector<FileDescriptor> descriptors = {};  // on one host

  std::span<const std::byte> content() const { return {data.get(), static_cast<std::size_t>(record.slot.bytes)}; }
};

// For one writing and one reading thread, in different processes.
class NearLog {
 public:
  static constexpr std::size_t kBytes = std::size_t{1} << 20;
  static constexpr std::size_t kReserve = kBytes / 2;  // kept free of requests, for messages that cannot wait

  // Makes the memory of a log. Throws Error(system).
  static FileDescriptor make();
  // Maps the memory. The caller keeps the descriptor.
  explicit NearLog(int memory);

  // ---- Called by the server. Positions count bytes from the beginning of the log. ----
  std::uint64_t written() const { return words().written.load(std::memory_order_relaxed); }
  std::size_t room() const { return kBytes - static_cast<std::size_t>(written() - carried_out()); }
  std::uint64_t carried_out() const { return words().carried_out.load(std::memory_order_acquire); }
  // Precondition: there is room for the record and its bytes.
  void write(const Record& record, const std::vector<std::byte>& bytes);

  // ---- Called by the backup ----
  // Takes the next record and the bytes that follow it. Returns false if there is none.
  bool read(Record& record, std::vector<std::byte>& bytes);
  // Declares that all records read so far have been carried out, or need to be carried out only once the server has
  // ended.
  void confirm() { words().carried_out.store(taken_, std::memory_order_release); }

 private:
  struct Words {
    alignas(kAlignment) std::atomic<std::uint64_t> written;
    alignas(kAlignment) std::atomic<std::uint64_t> carried_out;
  };

  Words& words() const { return *reinterpret_cast<Words*>(memory_.at()); }
  void put(std::uint64_t at, const void* from, std::size_t bytes);
  void get(std::uint64_t at, void* to, std::size_t bytes) const;

  Mapping memory_;
  std::uint64_t taken_ = 0;  // position up to which the backup has read
};

}  // namespace ringreduce::parameter_server
