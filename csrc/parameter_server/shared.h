// The memory that workers and servers on one host share, and its layout.
//
//   A server's values   Only the server writes them. Workers map them read-only; the memfd is sealed against other
//                       mappings. A block has two buffers: an update reads one and writes the other.
//   A worker's window   For each server a lane of requests and replies; then memory for pushed data.
//   A bell              A word to sleep on, in memory of each server and at the beginning of each window.
//
// A server does not trust the contents of a window, which may change at any time: it copies a request, then checks it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "core/arithmetic.h"
#include "core/atomics.h"
#include "core/doorbell.h"
#include "core/file_descriptor.h"
#include "kernels/accumulate.h"
#include "kernels/packing.h"
#include "parameter_server/messages.h"

namespace ringreduce::parameter_server {

inline constexpr std::size_t kAlignment = 64;
constexpr std::size_t aligned(std::size_t bytes) { return round_up(bytes, kAlignment); }

struct Bell : Doorbell {
  std::atomic<std::uint32_t> over;  // in a server's bell: 1 when the server has ended and its backup serves
};

// The beginning of a server's values.
struct alignas(kAlignment) ValuesHeader {
  std::atomic<std::uint32_t> ended;   // 1: the server has been stopped, though its process may be alive
  std::atomic<std::uint32_t> serves;  // 0: it is a backup that has not taken over, or it must not serve any more
  std::atomic<std::uint32_t> backup;  // number of the backup that takes over when it ends; 0: it has none
  std::atomic<std::uint32_t> leaves;  // 1: it has left its blocks to its backup, and does nothing until that one serves
  char failure[240];                  // why it has failed, written before `ended`; empty: it has not
};

// A block in a server's values. It is followed by the two buffers of the value and by the optimizer state: one copy, or
// one for each buffer if the server was founded with backups on its host. Each part is padded to kAlignment.
struct alignas(kAlignment) BlockWords {
  std::atomic<std::uint64_t> published;  // 1 + the latest version; 0: the block has no value yet
  std::atomic<std::uint64_t> begun;      // 1 + the version that was begun last; equal to `published` between updates
  std::uint64_t steps[2];                // by buffer: the number of updates it contains
};

constexpr std::size_t block_bytes(std::size_t bytes) { return sizeof(BlockWords) + 2 * aligned(bytes); }

// Returns the buffer of version `published - 1` of a block of `bytes` bytes.
inline std::byte* buffer(BlockWords* words, std::uint64_t published, std::size_t bytes) {
  return reinterpret_cast<std::byte*>(words) + sizeof(BlockWords) + (published & 1) * aligned(bytes);
}

// Data of a call with at least this many bytes is copied past the caches, which could not hold it. Measured with 2
// workers on a 2-core Xeon (2 MiB of L2 per core), November 2026, time of a step divided by the time with ordinary
// copies: 0.76 at 64 MB, 0.6 to 0.9 at 32 MB, 1.1 at 4 MB.
inline constexpr std::size_t kStreamedBytes = std::size_t{24} << 20;

inline void copy(std::byte* to, const std::byte* from, std::size_t bytes, bool streamed) {
  if (streamed)
    kernels::stream(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
}

// Copies the latest value of a block; returns its version. If two updates begin during the copy, the second one writes
// the buffer that is being read, so the copy starts again. This needs no deadline: before the second update can begin,
// the first one must be published, so a writer that stops or dies keeps no reader. The block must have a value.
inline std::uint64_t read_block(const BlockWords& words, std::byte* to, std::size_t bytes, bool streamed = false) {
  for (;;) {
    const std::uint64_t published = words.published.load(std::memory_order_acquire);
    copy(to, buffer(const_cast<BlockWords*>(&words), published, bytes), bytes, streamed);
    fence(std::memory_order_acquire);
    if (words.begun.load(std::memory_order_relaxed) < published + 2) return published - 1;
  }
}

// The writer calls begin_version(), writes `next`, and calls publish_version().
struct Versions {
  const std::byte* latest;  // undefined if the block has no value yet
  std::byte* next;
};
inline Versions begun_version(BlockWords& words, std::size_t bytes) {
  const std::uint64_t published = words.published.load(std::memory_order_relaxed);
  return {buffer(&words, published, bytes), buffer(&words, published + 1, bytes)};
}
inline Versions begin_version(BlockWords& words, std::size_t bytes) {
  const std::uint64_t published = words.published.load(std::memory_order_relaxed);
  words.begun.store(published + 1, std::memory_order_relaxed);
  fence(std::memory_order_release);
  return begun_version(words, bytes);
}
inline void publish_version(BlockWords& words) {
  words.published.store(words.begun.load(std::memory_order_relaxed), std::memory_order_release);
}

// A request and a reply in a lane. The payload of a request is `bytes` bytes at `offset` in the window's data.
struct RequestSlot {
  RequestKind kind;
  BlockId block;
  std::uint64_t number, seen, round, pulled;
  double weight;
  std::uint64_t offset, bytes;
  std::int32_t priority;
  Packing packing;  // of a pull from another host: how the value is packed
};
// Converts a request with a payload of `bytes` bytes at `offset`.
RequestSlot slot_of(const Request& request, std::size_t offset, std::size_t bytes);
struct ReplySlot {
  std::uint64_t number, version;
  Outcome outcome;
  std::uint32_t reserved;
};

// Two rings. A worker has at most kMostOutstanding requests without a reply, so neither ring overflows.
struct alignas(kAlignment) Lane {
  alignas(kAlignment) std::atomic<std::uint64_t> asked;     // requests that the worker has written
  alignas(kAlignment) std::atomic<std::uint64_t> answered;  // replies that the server has written
  // The server that the requests are for: the servers of these blocks are numbered 0, 1, 2, ... in the order in which
  // they serve. When a backup has taken over, the worker empties both rings, writes its unanswered requests again, and
  // then sets `turn` to the number of the new server.
  alignas(kAlignment) std::atomic<std::uint32_t> turn;
  RequestSlot requests[kMostOutstanding];
  ReplySlot replies[kMostOutstanding];
};

// A window consists of the worker's bell, a lane per server, and data.
constexpr std::size_t lanes_bytes(std::size_t servers) { return sizeof(Bell) + servers * sizeof(Lane); }

// Tells a worker about a backup that counts from now on. The server sends it, and the backup once more when it has
// taken over. It comes with the descriptors of the backup's values, bell and process.
struct News {
  static constexpr std::size_t kText = 256;

  std::uint32_t lane;
  std::uint32_t turn;    // the value of Lane::turn while the backup serves
  std::uint32_t number;  // its number in ValuesHeader::backup
  std::uint32_t reserved;
  std::uint64_t capacity;
  char name[kText], address[kText];  // address: of its socket for control messages
};

// A mapping of a descriptor's memory, which the destructor unmaps. Throws Error(system), or Error(invalid_argument) if
// the memory is smaller than `bytes` or could be made smaller.
class Mapping {
 public:
  Mapping(int fd, std::size_t bytes, bool writable);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* at(std::size_t offset = 0) const { return base_ + offset; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_;
};

// A worker's window, as a process maps it.
struct Window {
  Window(FileDescriptor memory, std::size_t bytes, std::size_t servers)
      : memory_fd(std::move(memory)), memory(memory_fd.get(), bytes, true), data_begin(lanes_bytes(servers)) {}

  Bell& bell() const { return *reinterpret_cast<Bell*>(memory.at()); }
  Lane& lane(std::size_t server) const {
    return *reinterpret_cast<Lane*>(memory.at(sizeof(Bell) + server * sizeof(Lane)));
  }

  const FileDescriptor memory_fd;
  const Mapping memory;
  const std::size_t data_begin;
};

// Makes anonymous shared memory (memfd), filled with zeros, whose size is sealed. Pages are allocated when they are
// first written. Throws Error(system).
FileDescriptor make_memory(const char* name, std::size_t bytes);
// Returns the size of a descriptor's memory in bytes. Throws Error(system).
std::size_t memory_bytes(int memory);
// Seals the memory against writing, except through the mappings that exist now. Throws Error(system).
void seal_for_readers(const FileDescriptor& memory);

}  // namespace ringreduce::parameter_server
