// What workers and servers of one host share: memory and the words in it.
//
//   A server's values   Written by the server alone; workers map them read-only, and the memfd is sealed against any
//                       other mapping. A block has two buffers: an update reads one and writes the other.
//   A worker's window   A lane of requests and replies per server, and the memory in which its pushes lie.
//   A bell              A word to sleep on.
//
// What a server finds in a window is somebody else's word, which may change at any time: it is copied, then checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "core/atomics.h"
#include "core/clock.h"
#include "core/file_descriptor.h"
#include "kernels/accumulate.h"
#include "kernels/packing.h"
#include "parameter_server/shard.h"

namespace ringreduce::parameter_server {

inline constexpr std::size_t kAlignment = 64;
constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Who sleeps says so first and looks once more; who changes something rings. Either the sleeper sees the change, or the
// other sees the sleeper.
struct alignas(kAlignment) Bell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint32_t> over;  // of a server's: 1 when it has ended and its backup serves

  void ring() {
    rings.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake_all_on(rings);
  }
  // Returns at a ring after `seen` was read, or when the time is over.
  void sleep(std::uint32_t seen, Nanoseconds most) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    sleep_on(rings, seen, most);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
};

// What a server's values begin with.
struct alignas(kAlignment) ValuesHeader {
  std::atomic<std::uint32_t> ended;   // 1: the server has been stopped, though its process may live
  std::atomic<std::uint32_t> serves;  // 0: it is a backup, and has not taken over
  std::atomic<std::uint32_t> backup;  // the number of its backup that takes over when it ends; 0: it has none
  std::atomic<std::uint32_t> leaves;  // 1: it waits for its backup to go on, and does nothing meanwhile
};

// A block among a server's values. Its two buffers follow, then its optimizer's state: once, or, if the server has a
// backup, once for each buffer. Each is a multiple of kAlignment long.
struct alignas(kAlignment) BlockWords {
  std::atomic<std::uint64_t> published;  // 1 + the latest version; 0: it has no value yet
  std::atomic<std::uint64_t> begun;      // as `published`, of the version that is being written or was last
  std::uint64_t steps[2];                // updates that each buffer has had
};

constexpr std::size_t block_bytes(std::size_t bytes) { return sizeof(BlockWords) + 2 * aligned(bytes); }

// Where version `published - 1` of a block of `bytes` bytes lies.
inline std::byte* buffer(BlockWords* words, std::uint64_t published, std::size_t bytes) {
  return reinterpret_cast<std::byte*>(words) + sizeof(BlockWords) + (published & 1) * aligned(bytes);
}

// A call of so many bytes is copied past the caches, which could not keep it. Measured with 2 workers on a 2-core Xeon
// (2 MiB of L2 a core), November 2026: steps of 64 MB took 0.76 of the time that they took without, of 32 MB 0.6 to
// 0.9, of 4 MB 1.1.
inline constexpr std::size_t kStreamedBytes = std::size_t{24} << 20;

inline void copy(std::byte* to, const std::byte* from, std::size_t bytes, bool streamed) {
  if (streamed)
    kernels::stream(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
}

// Copies the block's latest value, whole; returns its version. Begins again if two updates overtook it, since the
// second writes where it reads. The block must have a value.
inline std::uint64_t read_block(const BlockWords& words, std::byte* to, std::size_t bytes, bool streamed = false) {
  for (;;) {
    const std::uint64_t published = words.published.load(std::memory_order_acquire);
    copy(to, buffer(const_cast<BlockWords*>(&words), published, bytes), bytes, streamed);
    fence(std::memory_order_acquire);
    if (words.begun.load(std::memory_order_relaxed) < published + 2) return published - 1;
  }
}

// The writer's half: where the latest version is and the next one is to be written, then that it is there.
struct Versions {
  const std::byte* latest;  // undefined if the block has no value yet
  std::byte* next;
};
inline Versions begin_version(BlockWords& words, std::size_t bytes) {
  const std::uint64_t published = words.published.load(std::memory_order_relaxed);
  words.begun.store(published + 1, std::memory_order_relaxed);
  fence(std::memory_order_release);
  return {buffer(&words, published, bytes), buffer(&words, published + 1, bytes)};
}
inline void publish_version(BlockWords& words) {
  words.published.store(words.begun.load(std::memory_order_relaxed), std::memory_order_release);
}

// A request and a reply as they lie in a lane. `offset` and `bytes`: the payload, in the window's data.
struct RequestSlot {
  RequestKind kind;
  BlockId block;
  std::uint64_t number, seen, round, pulled;
  double weight;
  std::uint64_t offset, bytes;
  std::int32_t priority;
  Packing packing;  // pull from another host: how the value comes
};
// Of a request whose payload, if it has any, lies at `offset`.
RequestSlot slot_of(const Request& request, std::size_t offset, std::size_t bytes);
struct ReplySlot {
  std::uint64_t number, version;
  Outcome outcome;
  std::uint32_t reserved;
};

// Two rings. The worker has at most kMostOutstanding requests without a reply, so neither can run over.
struct alignas(kAlignment) Lane {
  alignas(kAlignment) std::atomic<std::uint64_t> asked;     // requests that the worker has written
  alignas(kAlignment) std::atomic<std::uint64_t> answered;  // replies that the server has written
  // Whose requests these are: servers of these blocks are numbered 0, 1, 2, ... in the order in which they serve. A
  // worker changes it when it turns to the next one, after it has emptied both rings and written what has not been
  // answered.
  alignas(kAlignment) std::atomic<std::uint32_t> turn;
  RequestSlot requests[kMostOutstanding];
  ReplySlot replies[kMostOutstanding];
};

// A window: the worker's bell, a lane per server, then data.
constexpr std::size_t lanes_bytes(std::size_t servers) { return sizeof(Bell) + servers * sizeof(Lane); }

// What a worker is told of a server's backup that counts from now on, or of itself by a backup that has taken over:
// with descriptors of its values, its bell and its process.
struct News {
  static constexpr std::size_t kText = 256;

  std::uint32_t lane;
  std::uint32_t turn;    // as Lane::turn, when it serves
  std::uint32_t number;  // as ValuesHeader::backup
  std::uint32_t reserved;
  std::uint64_t capacity;
  char name[kText], address[kText];  // the latter: of its door, as its owner knows it
};

// Memory of a descriptor, unmapped in the end. Throws Error(system), or Error(invalid_argument) if the descriptor's
// memory is smaller than `bytes` or could become so.
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

// Memory without a name, of this size for ever, zero, which takes room only where it is written. Throws Error(system).
FileDescriptor make_memory(const char* name, std::size_t bytes);
// How many bytes a descriptor's memory has. Throws Error(system).
std::size_t memory_bytes(int memory);
// From now on only this process writes it, through mappings that it has. Throws Error(system).
void seal_for_readers(const FileDescriptor& memory);

// Whether the process of a pidfd has ended.
bool has_ended(int pidfd);

}  // namespace ringreduce::parameter_server
