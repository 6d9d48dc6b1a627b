// Runs one rank's program of one call: the loop at the heart of every collective.
//
// A channel's chunks are cut in slices that fit a slot. *Round* k moves slice k of every chunk through the whole
// program. Rounds are independent of one another (they touch disjoint slices), so several are in flight at once, the
// oldest first: while round k waits for a peer, round k+1 already fills slots. That is all the pipelining there is;
// plans know nothing of it. A later round never takes a slot that an earlier one needs: slots are numbered, not
// allocated, and `seq` may be written only when `seq - depth` has been read. Hence the oldest round can always do what
// it could do alone, and a plan whose single round ends (ringreduce.plan.verify) ends however many rounds it has.
//
// What a step sends is copied to a slot, unless it lies, to stay, where peers can read it: in this rank's arena, or
// anywhere if ranks can access one another's memory. Then it is *lent*, and read where it is. It stays if no later step
// of the call writes it, and if the call does not end before it has been read. In a call in place, a chunk that a peer
// combines and sends back is lent to be *returned*: the peer writes the result into it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/program.h"
#include "transport/segment.h"

namespace ringreduce {

// A channel of a group.
struct ChannelState {
  static constexpr std::size_t kWindow = 8;  // rounds in flight

  // What outlives a call: where each rank's outbox stands, and who is to read what lies in ours.
  std::vector<std::uint64_t> tail;            // per rank: the sequence number of its next slot
  std::vector<std::span<const int>> readers;  // per slot of our outbox: who must have read it before it is written

  // The call under way.
  std::size_t rounds = 0;
  std::size_t oldest = 0;                     // the first round that is not done
  std::array<std::uint32_t, kWindow> step{};  // where each round in flight stands, by round modulo kWindow
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

// What executions work with one after the other, so that a call allocates nothing.
struct Workspace {
  std::vector<ChannelState> channels;
  std::vector<const void*> operands;  // of the step at hand; null where remote
  std::vector<Remote> remote;
  std::vector<void*> results;      // all places of this rank where its value goes
  std::vector<CacheLine> scratch;  // operands on their way in, outputs on their way out
};

class Execution {
 public:
  // `slice_bytes`: the most that a slice may hold; a multiple of 64, at most a slot. `least_fetch_bytes`: smaller
  // slices are not lent from outside of the arena. `packing`: of what goes to other hosts, where the call and the plan
  // allow it. The arguments must outlive this object.
  Execution(const Segment& segment, const Program& program, const Call& call, const Buffers& buffers,
            Workspace& workspace, std::uint64_t fingerprint, std::size_t slice_bytes, std::size_t least_fetch_bytes,
            Packing packing);

  // Moves whatever can move; returns whether anything did. Throws mismatch if a peer's data belongs to another call.
  bool advance();
  bool done() const { return done_; }

  // After done(): whether every slot that this rank sent has been read, `elsewhere`: also by ranks on other hosts. Must
  // become true before the call may end if anything was lent.
  bool all_read(bool elsewhere);
  // Whether anything went to other hosts. What they are sent must have left this process before the call may end.
  bool sends_away() const { return sends_away_; }
  std::uint64_t lent() const { return lent_; }  // bytes

  // After a failure: lets no peer into this rank's tensors any more.
  void shut_out_peers();

  // After done(): moves the outboxes' tails past this call. To be called once, when no more is asked of this object.
  void finish();

  // The peer that advance() or all_read() met as the first obstacle, and where.
  int blocked_on() const { return blocked_on_; }
  std::string position() const;

 private:
  bool try_step(std::size_t channel, std::size_t round, const Step& step);
  int slow_reader(std::size_t channel, std::uint64_t seq, bool elsewhere = true) const;
  const std::byte* to_lend(const Step& step, const std::byte* local, const std::byte* output, std::size_t bytes) const;
  bool overlaps_output(const std::byte* data, std::size_t bytes) const;
  bool is_returned(const Step& step) const;
  bool scales(const Step& step) const { return scaled_ && step.read == Read::input; }
  void pack_for_others(SlotValue& value, std::size_t bytes) const;
  void compute(const Step& step, std::size_t bytes, const std::byte* local, bool streamed);
  void combine(const Step& step, std::size_t bytes, bool streamed);
  Range slice_of(std::size_t channel, const Step& step, std::size_t count, std::size_t round) const;

  const Segment& segment_;
  const Program& program_;
  const Call& call_;
  const Buffers& buffers_;
  std::vector<ChannelState>& channels_;
  std::vector<const void*>& operands_;
  std::vector<Remote>& remote_;
  std::vector<void*>& results_;
  std::vector<CacheLine>& scratch_;
  const std::uint64_t fingerprint_;
  const std::size_t element_;     // bytes
  const std::size_t slice_size_;  // elements
  const Packing packing_;         // of what goes to other hosts
  bool in_place_ = false;         // the one input is the one output
  bool fetched_ = false;          // whether what lies outside of the arena is lent too
  bool scaled_ = false;           // whether inputs are multiplied by the call's factor before they are combined
  bool offers_ = false;           // whether chunks are lent to be returned
  bool streams_ = false;          // whether what only goes to the output goes past the caches
  std::uint64_t lent_ = 0;
  bool sends_away_ = false;
  bool done_ = false;
  int blocked_on_ = -1;
  std::size_t blocked_channel_ = 0, blocked_round_ = 0, blocked_step_ = 0;
};

}  // namespace ringreduce
