// A call bound to its tensors: for each step of a rank's program, the bytes that it reads and writes, and how what it
// sends travels to its peers. All of that is decided here, before the call runs. Execution then moves rounds through
// the steps and decides nothing.
//
// The same call on the same tensors is bound to the same bytes, so the engine keeps the latest ones (`serves`).
//
// A value that a step sends is copied to a slot, unless it lies where its receivers can read it and stays there until
// the call ends. Then it is *lent*: the slot says where it is. Values in this rank's arena are always lent. Values
// anywhere else in this process may be lent if ranks can read one another's memory; whether they are, and whether
// others go to slots through the caches or past them, the caller says (ways.h). A value stays if no later step of this
// rank writes over it, and a call that has lent something ends only after it has been read.
//
// In a call in place, a chunk that one peer combines and sends back is lent to be *returned*: the peer writes the
// result over it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/engine.h"
#include "engine/program.h"
#include "engine/ways.h"
#include "transport/team.h"

namespace ringreduce {

// Consecutive bytes of a tensor.
struct Bytes {
  std::byte* data = nullptr;
  std::size_t size = 0;

  // The part that round `round` moves, in slices of `slice_bytes`; empty past the end.
  Bytes slice(std::size_t round, std::size_t slice_bytes) const {
    const std::size_t begin = lesser(round * slice_bytes, size);
    return {data + begin, lesser(slice_bytes, size - begin)};
  }
};

// Operands from other processes go through this many bytes of scratch space, which the L2 cache holds. More of them
// mean fewer calls of the kernel: of 64, 128, 256 and 512 KiB the largest was the fastest for 8 ranks on a 2-core Xeon
// (2 MiB of L2 a core), November 2026, by up to 1.6 times for 1 MiB; for 2 and 4 ranks the last two were alike.
inline constexpr std::size_t kScratch = std::size_t{512} << 10;

// Tiles of it are multiples of this: of cache lines, and of what is packed together.
inline constexpr std::size_t kTileUnit = std::max(kCacheLine, kPackedTogether * sizeof(float));

struct BoundStep {
  enum class Lends : std::uint8_t { nothing, local, output };

  const Step* step = nullptr;
  Bytes local;                   // the chunk that it reads, if it reads one
  Bytes output;                  // the chunk that it writes, if it writes one
  Lends lends = Lends::nothing;  // which of the two is sent from where it lies
  Place place = Place::slot;     // where the receivers find what is sent
  bool returned = false;         // what is lent, or what is received, is written back to where it was lent
  bool stays = false;            // it has receivers on this host,
  bool leaves = false;           // on other hosts
  bool scaled = false;           // the local operand is multiplied by the call's factor first
  bool streams_output = false;   // past the caches
  Average average = {};
  bool rounds = false;    // its value is rounded: it leaves the host as a partial sum, or completes the sum
  std::size_t rests = 0;  // offset of its rests, in bytes
};

struct BoundChannel {
  std::size_t rounds = 1;  // at least one, so that ranks meet, and compare their calls, even over nothing
  std::vector<BoundStep> steps;
};

class BoundCall {
 public:
  // `team` and `program` must outlive this object. `slice_bytes`: the most that a slice may hold, a multiple of 64 and
  // at most a slot. `way`: how values are passed on and outputs stored, where there is a choice.
  BoundCall(const Team& team, const Program& program, const Call& call, const Buffers& buffers, std::size_t slice_bytes,
            const Engine::Options& options, Way way);

  // Whether this is what the constructor would make of that call on those tensors.
  bool serves(const Call& call, const Buffers& buffers, Way way) const;
  // Whether that depends on `way`.
  bool has_choice() const { return has_choice_; }
  // Whether anything goes through a slot.
  bool fills_slots() const;

  const Program& program() const { return *program_; }
  const std::vector<BoundChannel>& channels() const { return channels_; }
  std::size_t slice_bytes() const { return slice_bytes_; }
  std::size_t spread_bytes() const { return spread_bytes_; }
  // Of the largest value, bytes.
  std::size_t largest() const { return largest_; }
  Packing packing() const { return packing_; }
  // How many elements this rank rounds.
  std::size_t rounded() const { return rounded_; }
  // The way that was asked for, or `copy` where the call cannot go that way.
  Way way() const { return way_; }
  // Whether anything may be lent from outside of the arena.
  bool opens_memory() const { return way_ == Way::lend; }
  // Team::withdrawals() when it was bound, and whether all that was in the arena then still is.
  std::uint64_t withdrawals() const { return withdrawals_; }
  bool still_shared() const;
  // Whether all ranks' outputs together are too large for the caches.
  bool outgrows_caches() const { return outgrows_caches_; }
  // The tensor whose chunks are lent to be returned; empty if there is none.
  Bytes returned() const;
  // Whether it is in the arena, where peers write to it.
  bool returned_in_arena() const { return returned().size > 0 && in_arena_.back(); }

 private:
  struct Block {
    std::byte* data;
    std::size_t count;  // elements
  };
  static std::vector<Block> blocks_of(const Tensors& tensors);
  static bool same(const std::vector<Block>& known, const Tensors& tensors);

  BoundStep bind(const Team& team, const ChannelProgram& channel, const Step& step) const;
  static bool moves(const BoundStep& bound);  // whether it writes what it has from elsewhere
  void lend(const Team& team, BoundStep& bound) const;
  Range range(const Block& block, const ChannelProgram& channel, const Step& step) const;
  Bytes chunk(const Block& block, const ChannelProgram& channel, const Step& step) const;
  bool overlaps_output(const Bytes& bytes) const;

  std::vector<bool> in_arena() const;
  Way taken(Way asked) const;

  const Team* team_;
  const Program* program_;
  Call call_;
  std::vector<Block> inputs_, outputs_;
  std::size_t element_;  // bytes
  std::size_t slice_bytes_, spread_bytes_, largest_ = 0;
  Packing packing_;
  std::size_t rounded_ = 0;
  bool in_place_;  // the one input is the one output
  bool scaled_;    // inputs are multiplied by the call's factor
  Way way_ = Way::copy;
  bool may_lend_, may_stream_;  // whether this call may go these ways
  bool has_choice_ = false;     // the ways differ for this call, so trying them tells something
  bool offers_ = false;         // chunks are lent to be returned
  bool outgrows_caches_;
  std::uint64_t withdrawals_;
  std::vector<bool> in_arena_;  // each block, inputs first
  std::vector<BoundChannel> channels_;
};

}  // namespace ringreduce
