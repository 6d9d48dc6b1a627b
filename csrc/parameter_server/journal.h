// What a server has taken, in order, for its backup.
//
// A shard is a pure function of the messages that it is given and of the times that come with them. So another server
// that gives its shard the same messages, and carries out what that decides, has the same shard and the same values.
// The journal is these messages, in memory that both servers map. The server writes a message there before its own
// shard gets it. What has been written outlives the server's process, so no effect of it that anybody saw can be lost.
//
// What a worker pushed is not in the journal: it lies in the worker's window, which the backup maps too, until the push
// is answered.
//
//   Blocks  Their values and states lie in memory that the backup maps as well, and that outlives the server. An update
//           writes the buffers of the next version only, then publishes it. So the backup leaves updates alone until
//           the server has ended. Then it copies what was published and carries out the rest, whose pushes have not
//           been answered.
//   Tables  Their rows lie in the server's own memory, and are updated in place. The backup carries out every update,
//           and the server answers a push when the backup has. The same is done with blocks of servers that were not
//           made to have backups, whose states are updated in place as well (BlockSpec::two_states).
//
// Both servers are of the same user and have proved that they know the secret, so the backup believes what it reads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "parameter_server/shared.h"

namespace ringreduce::parameter_server {

struct Record {
  // `block`: the content of slot.block, which a backup that starts late did not have. Between hosts only: `state`, the
  // first record, is what the server is but for that, as what was pushed; slot.number: its turn. After `inherit`, the
  // last one, the backup is the server's heir.
  enum class Kind : std::uint32_t { request = 1, join, lose, create, tick, state, block, inherit };
  Kind kind = Kind::tick;
  WorkerId worker = 0;
  Nanoseconds at = 0;       // the time that the shard is given
  RequestSlot slot{};       // of a request
  std::uint64_t bytes = 0;  // that follow: what is said of a worker that joins, or of a block
};

// One thread writes and another reads; the processes differ.
class Journal {
 public:
  static constexpr std::size_t kBytes = std::size_t{1} << 20;
  static constexpr std::size_t kReserve = kBytes / 2;  // for messages that cannot wait, unlike requests

  // Memory for a journal. Throws Error(system).
  static FileDescriptor make();
  // The descriptor remains the caller's.
  explicit Journal(int memory);

  // The server's half. Positions are in bytes since the beginning.
  std::uint64_t written() const { return words().written.load(std::memory_order_relaxed); }
  std::size_t room() const { return kBytes - static_cast<std::size_t>(written() - carried_out()); }
  std::uint64_t carried_out() const { return words().carried_out.load(std::memory_order_acquire); }
  // Precondition: there is room for the record and its bytes.
  void write(const Record& record, const std::vector<std::byte>& bytes);

  // The backup's half: the next record, with its bytes. Returns whether there is one.
  bool read(Record& record, std::vector<std::byte>& bytes);
  // All that has been read has been carried out, or needs to be only when the server has ended.
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
  std::uint64_t taken_ = 0;
};

}  // namespace ringreduce::parameter_server
