// The arena: memory of this process that the other processes of its host map, so that they can read its tensors where
// they are. There is one arena per process. All groups use it, and it outlives them.
//
// The arena is a memfd that can neither grow nor shrink, mapped once. It is address space: a page takes memory when it
// is first written. A freed piece keeps its pages for the next allocation, up to a bound, since a page that is new
// costs a fault in this process and one in each reader (about 10 ms for 64 MB). Beyond the bound the oldest freed pages
// are given back. Pieces of 2 MB and more begin at a multiple of 2 MB, so that the kernel can use huge pages, where
// /sys/kernel/mm/transparent_hugepage/shmem_enabled lets it ("advise" or more).
//
// **Withdrawing.** When a call fails, a peer that was stopped may still write to a tensor of the call, and a mapping
// cannot be revoked from a stopped process. So this process puts private memory under the tensor. From then on the
// piece that the tensor is part of is not shared any more. When it is released, its address range is not handed out
// again: whatever the late peer writes goes where nobody looks.
//
// **Forks.** A child inherits the mapping, so it sees what its parent writes, and the other way round, as with
// torch.Tensor.share_memory_(). It neither allocates from its parent's arena nor frees into it. What the parent frees
// is not used again while a child lives that was forked when the piece was in use.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/file_descriptor.h"
#include "core/fork.h"

namespace ringreduce {

// Thread-safe.
class Arena {
 public:
  struct Options {
    std::size_t bytes = 0;       // address space, a multiple of a page
    std::size_t keep_bytes = 0;  // of freed pieces that keep their pages
  };
  struct Statistics {
    std::size_t in_use = 0;      // bytes of pieces
    std::size_t kept = 0;        // bytes of freed pieces that have kept their pages
    std::size_t held = 0;        // bytes of freed pieces that forked children may still read
    std::size_t lost = 0;        // bytes of address space that are not used again, as calls failed on them
    std::uint64_t refusals = 0;  // allocations for which there was no room
  };

  // Throws Error(system) where the kernel refuses.
  explicit Arena(const Options& options);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The arena of this process; made at the first call, to whose options it keeps, and never destroyed. A forked child
  // makes one of its own.
  static std::shared_ptr<Arena> open(const Options& options);
  // The same, but null if there is none yet.
  static std::shared_ptr<Arena> of_process();
  // The process's arena, or one inherited from its parents, that an address is in; null if none.
  static Arena* around(const void* data);

  int descriptor() const { return memfd_; }
  std::byte* base() const { return base_; }
  std::size_t bytes() const { return options_.bytes; }

  // At least `bytes` bytes, aligned to a page; zero unless they were used before. Throws Error(system) if no gap is
  // large enough.
  std::byte* allocate(std::size_t bytes);
  // The same, but null if no gap is large enough, and in a forked child.
  std::byte* try_allocate(std::size_t bytes);
  // Takes back what was allocated. In a forked child it does nothing: the memory is the parent's.
  void release(std::byte* piece) noexcept;

  // Whether peers see what this process writes to [data, data + bytes): it is in the arena, and no part of its piece
  // was withdrawn.
  bool shares(const std::byte* data, std::size_t bytes) const;
  // Puts memory of its own in the place of [data, data + bytes), which is a part of one piece: what peers still write
  // there is lost. Its content is undefined afterwards. All memory around it keeps its content, whatever other threads
  // write there meanwhile.
  void withdraw(std::byte* data, std::size_t bytes);
  // Counts them. What shares() said holds as long as this does not change. It changes before the memory does.
  std::uint64_t withdrawals() const { return withdrawals_.load(std::memory_order_seq_cst); }

  Statistics statistics() const;

 private:
  struct Piece {
    std::size_t bytes;
    std::uint64_t forks;  // as many had been forked when it was allocated
    bool withdrawn = false;
  };
  struct Kept {
    std::size_t bytes;
    std::uint64_t age;  // the smaller the older
  };
  struct Held {
    std::size_t offset, bytes;
    std::uint64_t after, until;  // children after this one, up to that one, may read it
  };
  struct Children;
  friend struct Children;

  bool contains(const void* data) const;
  bool is_private(std::size_t page) const;
  std::vector<std::pair<std::size_t, std::size_t>> cold() const;
  std::size_t find(std::size_t wanted) const;
  void take(std::size_t offset, std::size_t bytes);
  void recycle(std::size_t offset, std::size_t bytes);
  void add_gap(std::size_t offset, std::size_t bytes);
  void keep(std::size_t offset, std::size_t bytes);
  void recycle_what_no_child_reads();
  void give_up(std::size_t offset, std::size_t bytes);
  void punch(std::size_t offset, std::size_t bytes) const;
  void withdraw_page(std::byte* page) const;

  const Options options_;
  const ForkMark fork_;
  int memfd_ = -1;
  std::byte* base_ = nullptr;
  Arena* older_ = nullptr;  // of the process's arenas

  mutable std::mutex mutex_;
  std::map<std::size_t, std::size_t> gaps_;  // offset -> bytes
  std::map<std::size_t, Kept> kept_;         // parts of the gaps
  std::map<std::size_t, Piece> used_;        // by offset
  std::vector<Held> held_;
  std::vector<std::pair<std::size_t, std::size_t>> private_;  // pages of withdrawn pieces, by [first, last) byte
  std::uint64_t ages_ = 0;
  Statistics statistics_;
  std::atomic<std::uint64_t> withdrawals_{0};
};

// Another rank's arena, as this process maps it.
class PeerArena {
 public:
  PeerArena(int memfd, std::size_t bytes);
  ~PeerArena();
  PeerArena(const PeerArena&) = delete;
  PeerArena& operator=(const PeerArena&) = delete;

  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_;
};

// Maps the arena behind this descriptor. All groups of a process share one mapping of an arena. Throws Error(system)
// for one whose owner could shrink it.
std::shared_ptr<const PeerArena> map_arena(const FileDescriptor& descriptor);

}  // namespace ringreduce
