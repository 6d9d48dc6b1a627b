// A region: the memory that a rank shows to its peers. The rank writes it, except doorbells, `consumed` and `taken`;
// peers read it. It holds
//   - a control block: state, doorbells, progress, the latest calls;
//   - per channel an outbox: `depth` slots, written once and read by every receiver (multicast);
//   - per channel and writer the acknowledgements: which of the writer's slots this rank has consumed;
//   - per destination a mailbox of slots for point-to-point messages.
// A slot may hold, instead of a payload, where in the writer's arena or process it is; the acknowledgement says that it
// has been read there (transport/arena.h, transport/peer_memory.h).
//
// Why slots can be reused without a lock: slot `seq % depth` is written for `seq` only after every reader of `seq -
// depth` has acknowledged it (Acknowledgement >= stamp), and read for `seq` only after its stamp says so. The stamp is
// stored with release order after the payload and loaded with acquire order before it; acknowledgements likewise after
// and before the reader's loads. Stamps and acknowledgements only grow, so a value seen late is only ever too small.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "core/arithmetic.h"
#include "core/call_header.h"
#include "core/clock.h"
#include "core/doorbell.h"
#include "core/error.h"
#include "kernels/packing.h"
#include "transport/life_mark.h"

namespace ringreduce {

// The sizes that all ranks of a team agree on.
struct Geometry {
  std::uint32_t ranks = 1;  // that there is room for
  std::uint32_t channels = 1;
  std::uint32_t depth = 1;          // slots per outbox; a power of two
  std::uint32_t slot_bytes = 64;    // payload of an outbox slot; a multiple of 64
  std::uint32_t mailbox_depth = 1;  // slots per mailbox; a power of two
  std::uint32_t mailbox_slot_bytes = 64;

  // Bytes of a segment with a region for every rank. Throws invalid_argument for sizes out of range.
  std::size_t segment_bytes() const;
};

// Byte offsets of the parts of a region.
struct Layout : Geometry {
  // Throws invalid_argument for sizes out of range.
  explicit Layout(const Geometry& geometry);

  std::size_t outbox_slot, mailbox_slot;  // bytes of a slot with its header
  std::size_t acknowledgements, outboxes, mailboxes, region_bytes;
};

inline constexpr std::size_t kPage = 4096;

enum class Place : std::uint32_t { slot, arena, process };

// A slot of an outbox; the payload follows, unless it is lent.
struct alignas(64) SlotHeader {
  std::atomic<std::uint64_t> stamp;   // seq + 1 of the content; 0 before the first
  std::uint64_t fingerprint;          // of the call that the content belongs to
  std::uint64_t bytes;                // of payload
  Place place;                        // where the payload is
  std::uint32_t returned;             // 1: the writer wants what the reader makes of it written where it is lent
  std::uint64_t address;              // where it begins: in this slot's payload, or the writer's arena or process
  std::atomic<std::uint64_t> copied;  // the stamp of what was lent from a process and then copied to the payload too
  std::uint32_t kept;    // 1: the reader lent its tensor for the result, which is in this slot instead: it must copy it
  std::uint32_t failed;  // 1 + the rank whose operator of the user's own failed on what this was made of; 0: none

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
  std::uint32_t timed;  // 1: the sender wants to know how long the receiver takes for this slot
  std::uint32_t taken;  // so long, in nanoseconds; kNotTimed if the receiver does not say

  static constexpr std::uint32_t kNotTimed = UINT32_MAX;

  std::byte* payload() { return reinterpret_cast<std::byte*>(this + 1); }
};

// A rank's latest calls, kept for the comparison when something goes wrong. One thread adds, any may look.
class CallHistory {
 public:
  static constexpr std::size_t kKept = 16, kNameBytes = 128;

  // Unless a newer one has its place. `op`: the name of its operator, if that is the user's own, of kNameBytes.
  void add(const CallHeader& call, std::string_view op = {});
  // Call number `seq`, if it is still, or already, known.
  std::optional<CallHeader> find(std::uint64_t seq) const;
  // The name that was added with it; empty if the call is not known. On other hosts nobody knows it.
  std::string op_of(std::uint64_t seq) const;

 private:
  // A CallHeader in words. The first, its seq, guards the others as a sequence lock: 0 while they are written.
  struct alignas(64) Entry {
    std::array<std::atomic<std::uint64_t>, 8> words;
  };
  Entry entries_[kKept];
  // Guarded by the entry's first word as well.
  std::array<std::atomic<std::uint64_t>, kNameBytes / sizeof(std::uint64_t)> ops_[kKept];
};

enum class RankState : std::uint32_t { absent, live, left };

// Where a rank sleeps while it waits for others. Peers notify it when they have changed something that it may wait for.
struct alignas(64) RankControl {
  Doorbell for_calls;     // where the thread that runs a call sleeps
  Doorbell for_messages;  // where threads sleep that wait for messages

  alignas(64) LifeWord life;  // of its process, for peers of its host
  std::atomic<RankState> state;
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
  // For who looks from outside of the team.
  std::atomic<std::int32_t> global_rank;
  std::atomic<std::int64_t> pid;

  CallHistory calls;

  // Wakes all that sleep.
  void wake();
  bool has_left() const { return state.load(std::memory_order_acquire) == RankState::left; }
};

// A plain view of a rank's region, wherever that lies: in memory that ranks of a host share, or in a mirror. It has all
// that it takes to find a slot, in a cache line.
class Region {
 public:
  Region() = default;
  Region(std::byte* base, const Layout& layout)
      : base_(base),
        acknowledgements_(reinterpret_cast<std::atomic<std::uint64_t>*>(base + layout.acknowledgements)),
        outboxes_(base + layout.outboxes),
        mailboxes_(base + layout.mailboxes),
        ranks_(layout.ranks),
        depth_(layout.depth),
        outbox_slot_(static_cast<std::uint32_t>(layout.outbox_slot)),
        mailbox_depth_(layout.mailbox_depth),
        mailbox_slot_(static_cast<std::uint32_t>(layout.mailbox_slot)) {}
  explicit operator bool() const { return base_ != nullptr; }

  RankControl& control() const { return *reinterpret_cast<RankControl*>(base_); }
  // Has the kernel provide memory for so many bytes of a slot's payload, if it does that at all.
  void populate(int channel, std::uint64_t seq, std::size_t bytes) const;
  // A slot of this rank's outbox.
  SlotHeader& slot(int channel, std::uint64_t seq) const {
    const std::size_t index = static_cast<std::size_t>(channel) * depth_ + (seq & (depth_ - 1));
    return *reinterpret_cast<SlotHeader*>(outboxes_ + index * outbox_slot_);
  }
  // This rank's, for a slot of `writer`.
  std::atomic<std::uint64_t>& acknowledgement(int writer, int channel, std::uint64_t seq) const {
    const std::size_t row = static_cast<std::size_t>(channel) * ranks_ + static_cast<std::size_t>(writer);
    return acknowledgements_[row * depth_ + (seq & (depth_ - 1))];
  }
  // A slot of this rank's mailbox for `destination`.
  MessageHeader& message(int destination, std::uint64_t seq) const {
    const std::size_t index = static_cast<std::size_t>(destination) * mailbox_depth_ + (seq & (mailbox_depth_ - 1));
    return *reinterpret_cast<MessageHeader*>(mailboxes_ + index * mailbox_slot_);
  }

 private:
  std::byte* base_ = nullptr;
  std::atomic<std::uint64_t>* acknowledgements_ = nullptr;
  std::byte *outboxes_ = nullptr, *mailboxes_ = nullptr;
  std::uint32_t ranks_ = 0, depth_ = 0, outbox_slot_ = 0, mailbox_depth_ = 0, mailbox_slot_ = 0;
};

}  // namespace ringreduce
