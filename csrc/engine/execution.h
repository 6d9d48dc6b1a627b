// Runs one rank's part of one call: the loop at the heart of every collective.
//
// A channel's chunks are cut in slices that fit a slot. *Round* k moves slice k of every chunk through the whole
// program. Rounds are independent of one another (they touch disjoint slices), so several are in flight at once, the
// oldest first: while round k waits for a peer, round k+1 already fills slots. That is all the pipelining there is;
// plans know nothing of it. A later round never takes a slot that an earlier one needs: slots are numbered, not
// allocated, and `seq` may be written only when `seq - depth` has been read. Hence the oldest round can always do what
// it could do alone, and a plan whose single round ends (ringreduce.plan.verify) ends however many rounds it has.
//
// What a step reads and writes, and how its value travels, is decided before: see bound_call.h. A step runs in three
// parts: is all of it there; combine; publish and acknowledge.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/bound_call.h"
#include "transport/team.h"

namespace ringreduce {

// A channel of a group.
struct ChannelState {
  static constexpr std::size_t kWindow = 8;  // rounds in flight

  // State that outlives a call: the position of each rank's outbox, and the readers of the slots of ours.
  std::vector<std::uint64_t> tail;            // per rank: the sequence number of its next slot
  std::vector<std::span<const int>> readers;  // per slot of our outbox: who must have read it before it is written
  // Per rank of this host: it has read all slots of ours before this number, since it has begun a later call. That
  // saves a look at its acknowledgements, which would take their cache line from it.
  std::vector<std::uint64_t> read_by;

  // Where a round stands.
  struct Round {
    std::uint32_t step = 0;
    std::uint32_t done = 0;    // bytes of the step's value, if it could not be computed in one go
    bool kept = false;         // a part of that value was not written where a peer had lent its own to be returned
    std::uint32_t failed = 0;  // 1 + the rank whose operator failed on a part of that value
  };

  // The call under way.
  std::size_t oldest = 0;               // the first round that is not done
  std::array<Round, kWindow> rounds{};  // those in flight, by round modulo kWindow
};

// An operand that lies in a peer's process.
struct Remote {
  int peer;
  std::uint64_t address;
  bool returned;
  std::size_t operand;  // its number among the operands
};

struct alignas(kCacheLine) CacheLine {
  std::byte bytes[kCacheLine];
};

// Buffers that one execution after the other uses, so that a call allocates nothing.
struct Workspace {
  std::vector<ChannelState> channels;
  std::vector<const void*> operands;  // of the step at hand; null where remote
  std::vector<Remote> remote;
  std::vector<void*> results;      // all places of this rank where its value goes, the output last
  std::vector<CacheLine> scratch;  // operands on their way in, outputs on their way out
  std::vector<CacheLine> folded;   // by the user's operator, while there are more operands
};

class Execution {
 public:
  // `fingerprint` is that of this call. `rests`: see Feedback; null without. `timed`: moved_for() will be asked for.
  // The other arguments must outlive this object.
  Execution(Team& team, const BoundCall& bound, Workspace& workspace, const Call& call, std::uint64_t fingerprint,
            std::byte* rests, bool timed);

  // Moves whatever can move; returns whether anything did. Throws mismatch if a peer's data belongs to another call.
  bool advance();
  bool done() const { return done_; }

  // After done(): whether every slot that this rank sent has been read, `elsewhere`: also by ranks on other hosts. Must
  // become true before the call may end if anything was lent. Copies what could be read only in this process.
  bool all_read(bool elsewhere);
  // Whether anything went to other hosts. What they are sent must have left this process before the call may end.
  bool sends_away() const { return sends_away_; }
  std::uint64_t lent() const { return lent_; }  // bytes
  // For how long this rank has moved data, apart from waiting.
  Nanoseconds moved_for() const { return moved_for_; }
  // After done(): a rank whose operator of the user's own failed on what this rank got or sent; -1: none.
  int failed_on() const { return static_cast<int>(failed_) - 1; }

  // After a failure: lets no peer into this rank's tensors any more.
  void shut_out_peers();
  // Throws if a call in another group failed and withdrew from the arena what this one lends, or has lent. Peers and
  // this rank then see different memory there.
  void check_memory() const;

  // After done(): moves the outboxes' tails past this call. To be called once, when no more is asked of this object.
  void finish();

  // The peer that advance() or all_read() met as the first obstacle, and where.
  int blocked_on() const { return blocked_on_; }
  // All peers that they met as obstacles, as awaits_rank() has them.
  std::uint64_t awaits() const { return awaits_; }
  std::string position() const;
  // Equal as long as advance() meets the same obstacle.
  std::uint64_t obstacle() const {
    return mix(mix(mix(mix(blocked_at_.channel, blocked_at_.round), blocked_at_.step),
                   static_cast<std::uint64_t>(blocked_on_)),
               fingerprint_);
  }

 private:
  // Where a step stands.
  struct At {
    std::size_t channel = 0, round = 0, step = 0;
  };
  // The value of a step in a round.
  struct Value {
    std::size_t bytes;
    std::byte *local, *output;   // null where the step reads or writes none
    std::byte* room = nullptr;   // in the slot of a step that sends
    std::size_t returned = 0;    // to how many peers it is written back
    bool there_already = false;  // a peer has written it where this rank had lent the chunk
    bool streams_slot = false;   // it goes to `room` past the caches,
    bool slot_follows = false;   // from the output, after that
    bool kept = false;           // it could not be written back to all of them
    std::uint32_t failed = 0;    // see SlotHeader
  };

  bool try_step(const At& at);
  bool blocked(const At& at, int peer);
  bool find_operands(const At& at, const BoundStep& step, Value& value);
  void take(const BoundStep& step, const Source& source, const SlotHeader& slot, Value& value);
  std::size_t offset_in_slot(std::uint64_t seq, std::size_t bytes) const;
  const std::byte* choose_results(const BoundStep& step, Value& value, SlotHeader* outgoing);
  void publish(const At& at, const BoundStep& step, const Value& value, const std::byte* lent);
  void acknowledge(const At& at, const BoundStep& step);

  bool compute(const At& at, const BoundStep& step, Value& value, bool streams_last);
  void copy_lent();
  void combine(const BoundStep& step, Value& value, std::size_t bytes, bool streams_last, std::byte* rests);
  void pack_for_others(SlotValue& value, std::size_t bytes, std::byte* rests) const;
  // The rests of what the step makes in this round.
  std::byte* rests_of(const At& at, const BoundStep& step) const {
    return rests_ == nullptr || !step.rounds ? nullptr : rests_ + step.rests + at.round * bound_.slice_bytes();
  }

  ChannelState::Round& round_of(const At& at) const {
    return work_.channels[at.channel].rounds[at.round % ChannelState::kWindow];
  }
  std::uint64_t seq_of(const At& at, int rank, std::uint32_t send_index) const;
  int slow_reader(std::size_t channel, std::uint64_t seq, bool elsewhere = true) const;

  Team& team_;
  const BoundCall& bound_;
  const Call& call_;
  Workspace& work_;
  const std::uint64_t fingerprint_;
  const std::size_t element_;  // bytes
  std::byte* const rests_;
  const bool timed_;
  std::uint64_t lent_ = 0;
  Nanoseconds moved_for_ = 0;
  std::uint32_t failed_ = 0;  // 1 + failed_on()
  bool sends_away_ = false;
  bool done_ = false;
  int blocked_on_ = -1;
  std::uint64_t awaits_ = 0;
  At blocked_at_;
};

}  // namespace ringreduce
