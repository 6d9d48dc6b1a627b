// The shared memory of a group's ranks on one host: who is there, what each rank is doing, and the slots that data
// passes through.
//
// One memfd holds one region per rank. A region is written by its own rank only (but for `doorbell` and `consumed`),
// and read by all. It holds
//   - a control block: state, doorbell, progress, the latest calls;
//   - per channel an outbox: `depth` slots, written once and read by every receiver (multicast);
//   - per channel and writer the acknowledgements: which of the writer's slots this rank has consumed;
//   - per destination a mailbox of slots for point-to-point messages.
// A rank's arena, which is not in the segment, holds tensors that peers may read in place (transport/arena.h). A slot
// then holds, instead of a payload, where in the arena it is; the acknowledgement says that it has been read there.
// Other tensors may be read in place as well, where the kernel lets ranks do that (transport/peer_memory.h).
//
// Why slots can be reused without a lock: slot `seq % depth` is written for `seq` only after every reader of `seq -
// depth` has acknowledged it (Acknowledgement >= stamp), and read for `seq` only after its stamp says so. The stamp is
// stored with release order after the payload and loaded with acquire order before it; acknowledgements likewise after
// and before the reader's loads. Stamps and acknowledgements only grow, so a value seen late is only ever too small.
//
// Each rank keeps a *mirror* of the region of every rank on another host: private memory of the same layout, which its
// links to that rank keep up to date (transport/links.h). Readers treat both kinds of region alike. A writer calls
// slot_filled(), slot_read() or control_changed() after it changed one; these notify local peers by futex, others by a
// frame.
//
// Nothing here is named in a file system: when the last process closes its descriptor, the memory is gone.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/clock.h"
#include "core/error.h"
#include "kernels/packing.h"
#include "transport/peer_memory.h"

namespace ringreduce {

class Links;

// The sizes that all ranks of a group agree on.
struct Geometry {
  std::uint32_t ranks = 1;
  std::uint32_t channels = 1;
  std::uint32_t depth = 1;          // slots per outbox; a power of two
  std::uint32_t slot_bytes = 64;    // payload of an outbox slot; a multiple of 64
  std::uint32_t mailbox_depth = 1;  // slots per mailbox; a power of two
  std::uint32_t mailbox_slot_bytes = 64;

  // Bytes of the whole segment. Throws invalid_argument for sizes out of range.
  std::size_t segment_bytes() const;
};

// Byte offsets of the parts of a rank's region, and of the regions.
struct Layout {
  // Throws invalid_argument for sizes out of range.
  explicit Layout(const Geometry& geometry);

  std::size_t outbox_slot, mailbox_slot;  // bytes of a slot with its header
  std::size_t acknowledgements, outboxes, mailboxes, region_bytes;
};

enum class Place : std::uint32_t { slot, arena, process };

// A slot of an outbox; the payload follows, unless it is lent.
struct alignas(64) SlotHeader {
  std::atomic<std::uint64_t> stamp;  // seq + 1 of the content; 0 before the first
  std::uint64_t fingerprint;         // of the call that the content belongs to
  std::uint64_t bytes;               // of payload
  Place place;                       // where the payload is
  std::uint32_t returned;            // 1: the writer wants what the reader makes of it written where it is lent
  std::uint64_t address;             // where it is lent: in the writer's arena or process

  std::byte* payload() { return reinterpret_cast<std::byte*>(this + 1); }
};

// Where what was put in a slot lies, for those who have to send it. `data` stays until the slot is given back, or, if
// it is `lent` by the call, until Links::sent(). To other hosts `packed` goes instead, unless it is null.
struct SlotValue {
  const std::byte* data;
  bool lent = false;
  Packing packing = Packing::none;  // of `packed`
  std::shared_ptr<std::byte[]> packed = nullptr;
  std::size_t packed_bytes = 0;
};

// A slot of a mailbox; the payload follows.
struct alignas(64) MessageHeader {
  std::atomic<std::uint64_t> stamp;     // seq + 1 of the content; 0 before the first
  std::atomic<std::uint64_t> consumed;  // stamp of the latest content that the receiver is done with
  std::uint64_t message_bytes;          // of the whole message; its parts follow one another in the mailbox
  std::uint32_t bytes;                  // of payload in this slot
  std::uint32_t dtype;
  std::uint64_t tag;

  std::byte* payload() { return reinterpret_cast<std::byte*>(this + 1); }
};

// What a rank called, kept for the comparison when something goes wrong. Guarded by `seq` as a sequence lock.
struct alignas(64) CallRecord {
  std::atomic<std::uint64_t> seq;  // 0 while being written
  std::atomic<std::uint64_t> fingerprint;
  std::atomic<std::uint64_t> number;
  std::atomic<std::uint64_t> count;
  std::atomic<std::uint64_t> plan;
  std::atomic<std::uint32_t> operation;
  std::atomic<std::uint32_t> dtype;
  std::atomic<std::uint32_t> reduce_op;
  std::atomic<std::int32_t> root;
};

enum class RankState : std::uint32_t { absent, live, left };

inline constexpr std::size_t kCallHistory = 16;

// What a rank sleeps on (futex) while it waits for others. Peers ring it when they have changed something that a
// sleeper may wait for. To ring costs a system call, so whoever sleeps says for whom.
struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint64_t> awaits;  // bits of the ranks that the sleepers wait for (awaits_rank)
};
inline constexpr std::uint64_t kAwaitsAll = ~std::uint64_t{0};
constexpr std::uint64_t awaits_rank(int rank) { return std::uint64_t{1} << (rank & 63); }

struct alignas(64) RankControl {
  Doorbell for_calls;     // where the thread that runs a call sleeps
  Doorbell for_messages;  // where threads sleep that wait for messages

  alignas(64) std::atomic<RankState> state;
  std::atomic<std::uint64_t> entered;    // sequence number of the latest call that began; the first is 1
  std::atomic<std::uint64_t> completed;  // and of the latest that ended
  // While waiting: the peer waited for (-1: none), and when this rank last said so.
  std::atomic<std::int32_t> waiting_for;
  std::atomic<Nanoseconds> heartbeat;
  // The same for calls that run on a GPU.
  std::atomic<std::int32_t> gpu_waiting_for;
  std::atomic<Nanoseconds> gpu_heartbeat;
  // Monitored barriers: how many this rank came to, and the latest that it gave up on (the first is 1).
  std::atomic<std::uint64_t> barriers_entered;
  std::atomic<std::uint64_t> barriers_given_up;
  // 1 + the core that this rank was last seen on; 0: none yet.
  std::atomic<std::int32_t> core;
  // 1 + the peer whose process this rank writes to at this moment; 0: none.
  std::atomic<std::int32_t> writes_to;

  CallRecord calls[kCallHistory];
};

// The group's first fatal error; written once, by the rank that wins `state` (0 none, 1 being written, 2 there).
struct alignas(64) AbortRecord {
  std::atomic<std::uint32_t> state;
  std::atomic<std::uint64_t> failed;  // ~seq of the earliest call that any rank failed in; 0: none
  std::int32_t kind;
  std::int32_t culprit;
  std::int32_t reporter;
  char message[2048];
};

// How a rank is named in messages.
struct RankName {
  std::string host;
  std::int64_t pid = 0;

  // "rank 3 (node7, pid 4711)"
  std::string describe(int rank) const {
    return "rank " + std::to_string(rank) + " (" + host + ", pid " + std::to_string(pid) + ")";
  }
};

// Which ranks are on other hosts (none: all are on this one). `connect` makes a link to one of them (Links::Connect).
// `disconnect` is called once, when the group needs no more links, and must not throw.
struct Hosts {
  std::vector<bool> elsewhere = {};  // by rank
  std::function<void(int peer, Nanoseconds timeout)> connect = {};
  std::function<void()> disconnect = {};
};

// Closed with this object.
struct OwnedDescriptors {
  std::vector<int> fds;  // -1: none

  explicit OwnedDescriptors(std::vector<int> owned) : fds(std::move(owned)) {}
  ~OwnedDescriptors();
  OwnedDescriptors(const OwnedDescriptors&) = delete;
  OwnedDescriptors& operator=(const OwnedDescriptors&) = delete;
};

class Segment {
 public:
  // Maps `memfd`, of geometry.segment_bytes() zero bytes, for `rank`. `pidfds[r]` becomes readable when rank r's
  // process ends (-1: not watched). Takes ownership of all descriptors, those in `memory` too, also when it throws.
  Segment(int memfd, const Geometry& geometry, int rank, std::vector<int> pidfds, std::vector<RankName> names,
          PeerMemory memory = {}, Hosts hosts = {});
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const Geometry& geometry() const { return geometry_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(geometry_.ranks); }

  // Whether a rank is on another host.
  bool elsewhere(int rank) const { return links_ != nullptr && elsewhere_[static_cast<std::size_t>(rank)]; }
  // Whether all others are.
  bool alone() const { return alone_; }
  // The links to ranks on other hosts; null if there are no such ranks.
  Links* links() const { return links_.get(); }

  RankControl& control(int rank) const;
  AbortRecord& abort_record() const;
  SlotHeader& slot(int writer, int channel, std::uint64_t seq) const;
  std::atomic<std::uint64_t>& acknowledgement(int reader, int writer, int channel, std::uint64_t seq) const;
  MessageHeader& message(int source, int destination, std::uint64_t seq) const;

  // This rank's arena; null if it has none here.
  Arena* arena() const { return memory_.arena.get(); }
  // Whether all of [data, data + bytes) is in this rank's arena, where its peers see it.
  bool in_arena(const std::byte* data, std::size_t bytes) const { return arena() && arena()->shares(data, bytes); }
  // Counts what was withdrawn from the arena. What in_arena() said holds as long as this does not change.
  std::uint64_t withdrawals() const { return arena() ? arena()->withdrawals() : 0; }
  // What a peer has lent from its arena; null if that is not all of it in the arena.
  std::byte* in_arena_of(int peer, std::uint64_t address, std::size_t bytes) const;

  // Whether all ranks can access one another's memory outside of the segment.
  bool opens_memory() const { return !memory_.threads.empty(); }
  // Copies from, or to, the process of `peer`. Throws peer_lost if its memory is not open any more. Nothing is written
  // once any rank has failed in a call.
  void read(int peer, std::byte* to, std::uint64_t from, std::size_t bytes) const;
  void write(int peer, std::uint64_t to, const std::byte* from, std::size_t bytes) const;
  // Lets no peer into this process any more. Returns when no write is under way.
  void close_memory() const;

  // Wakes who sleeps on a peer's doorbell and waits for this rank. What it waits for must have been stored with seq_cst
  // order: with the seq_cst order of `sleepers`, `awaits` and the sleeper's last look, either this call sees the
  // sleeper or the sleeper the change.
  void notify(Doorbell& doorbell) const {
    if (doorbell.sleepers.load(std::memory_order_seq_cst) != 0 &&
        (doorbell.awaits.load(std::memory_order_seq_cst) & awaits_rank(rank_)) != 0)
      ring(doorbell);
  }
  // Wakes all that sleep in rank `rank`.
  void wake(int rank) const;
  void wake_all() const;

  // What a rank does with slots, having stored it in memory (the stamp, the acknowledgement) with seq_cst order: tells
  // the reader of a slot that it is filled, its writer that it has been read; the same for slots of mailboxes.
  void slot_filled(int reader, int channel, std::uint64_t seq, const SlotValue& value) const;
  void slot_read(int writer, int channel, std::uint64_t seq) const;
  void message_filled(int reader, std::uint64_t seq) const;
  void message_read(int writer, std::uint64_t seq) const;
  // Tells all who wait that this rank's control block has changed.
  void control_changed() const;

  // "rank 3 (node7, pid 4711)"
  std::string describe(int rank) const;
  // " (10.0.0.1:5 -> 10.0.0.2:6 via eth0)", how a rank on another host is reached; else nothing.
  std::string way_to(int rank) const;

  // Tells the others that this rank takes no further part, and lets them into its memory no more. Idempotent; the
  // destructor does it too.
  void leave() const;

  // The ranks whose process has ended, which left the group, or which are out of reach.
  std::vector<int> gone() const;
  // Which of these it is, in words: "died", "left the group", "is out of reach: Connection reset by peer (...)".
  std::string how_gone(int rank) const;

  // Makes `error` the group's fatal error, unless there is one already, and wakes everybody. `reporter`: who found it,
  // if it was not this rank.
  void abort(const Error& error) const { abort(error, rank_); }
  void abort(const Error& error, int reporter) const;
  // Tells the others that this rank fails in call `seq`, before it gives back its tensors.
  void fail(std::uint64_t seq) const;
  // Whether any rank has failed in call `seq` or an earlier one. Looks after everything that this rank read before.
  bool failed(std::uint64_t seq) const {
#if !defined(__SANITIZE_THREAD__)  // which knows no fences
    std::atomic_thread_fence(std::memory_order_acquire);
#endif
    return abort_record().failed.load(std::memory_order_seq_cst) >= ~seq;
  }
  // Throws the group's fatal error, if there is one.
  void throw_if_aborted() const;
  // The same for a rank that waits. First it makes the death of any rank the group's error, so that no wait in a group
  // that has lost a rank lasts, whomever the waiting rank waits for. `call` is the collective under way; 0 stands for
  // none, where nothing is waited for. A collective may end without a dead rank that has done its part in it, so it
  // gets kGrace to do so. A message, which passes nothing, gets none.
  void throw_if_over(std::optional<std::uint64_t> call = std::nullopt) const;

 private:
  // A rank on another host cannot be seen to have done its part: its death and the rest of the others' data may take
  // different ways here, so this must be longer than data needs from one host to another.
  static constexpr Nanoseconds kGrace = kSecond / 5;

  static void ring(Doorbell& doorbell);
  void unmap();
  bool left(int rank) const { return control(rank).state.load(std::memory_order_acquire) == RankState::left; }
  void check_access(int peer, int error) const;
  std::byte* region(int rank) const { return regions_[static_cast<std::size_t>(rank)]; }

  const OwnedDescriptors memfd_, pidfds_;                       // these and the next before all that may throw
  const std::vector<std::shared_ptr<const PeerArena>> arenas_;  // by rank; null: none
  Geometry geometry_;
  Layout layout_;
  int rank_;
  std::vector<RankName> names_;
  PeerMemory memory_;
  std::byte* base_ = nullptr;
  std::size_t bytes_;
  std::vector<std::byte*> regions_;  // by rank
  std::byte* mirrors_ = nullptr;
  std::size_t mirror_bytes_ = 0;
  std::vector<bool> elsewhere_;
  bool alone_ = false;
  mutable std::vector<std::atomic<Nanoseconds>> found_dead_;  // by rank: when; 0: not yet
  std::function<void()> disconnect_;
  mutable std::once_flag said_goodbye_;
  std::unique_ptr<Links> links_;
};

// Sleeps until the doorbell has been rung since `rings` was `seen`, or `timeout` has passed.
void sleep_on(const Doorbell& doorbell, std::uint32_t seen, Nanoseconds timeout);

}  // namespace ringreduce
