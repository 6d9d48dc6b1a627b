#include "engine/execution.h"

#include <algorithm>
#include <string>

#include "core/bytes.h"
#include "core/clock.h"
#include "kernels/accumulate.h"
#include "transport/links.h"

namespace ringreduce {
namespace {

// Values that are scaled first are processed in tiles of this many bytes, which fit in the L1 cache (32 KiB or more on
// all machines we know).
constexpr std::size_t kTile = 8192;

static_assert(kTileUnit % kCacheLine == 0 && kTile % kTileUnit == 0);

// The tile of calls that outgrow the caches: what is written back is then still in the cache. Swept from 32 KiB to 1
// MiB on the same Xeon for all_reduce of 64 and 160 MiB by 2 ranks: 128 KiB took 0.94 of the time of 256 KiB.
constexpr std::size_t kStreamedTile = std::size_t{128} << 10;

// Smaller values are written over in less time than it takes to find another place.
constexpr std::size_t kLeastSpread = 4096;

}  // namespace

Execution::Execution(Team& team, const BoundCall& bound, Workspace& workspace, const Call& call,
                     std::uint64_t fingerprint, std::byte* rests, bool timed)
    : team_(team),
      bound_(bound),
      call_(call),
      work_(workspace),
      fingerprint_(fingerprint),
      element_(call.element_bytes()),
      rests_(rests),
      timed_(timed) {
  for (std::size_t c = 0; c < bound.channels().size(); ++c) {
    work_.channels[c].oldest = 0;
    work_.channels[c].rounds.fill({});
  }
}

bool Execution::advance() {
  bool moved = false;
  done_ = true;
  blocked_on_ = -1;
  awaits_ = 0;
  for (std::size_t c = 0; c < bound_.channels().size(); ++c) {
    const BoundChannel& channel = bound_.channels()[c];
    ChannelState& state = work_.channels[c];
    for (std::size_t round = state.oldest; round < std::min(channel.rounds, state.oldest + ChannelState::kWindow);
         ++round) {
      ChannelState::Round& stands = state.rounds[round % ChannelState::kWindow];
      while (stands.step < channel.steps.size() && try_step({c, round, stands.step})) {
        stands = {.step = stands.step + 1};
        moved = true;
      }
      if (round == state.oldest && stands.step == channel.steps.size()) {
        stands = {};
        ++state.oldest;
      }
    }
    if (state.oldest < channel.rounds) done_ = false;
  }
  copy_lent();
  return moved;
}

// If peers may not be able to read what this rank has lent from its process, copies it to its slots. It may still be
// read where it is, and be returned there too. To be called again, until all has been read: what follows may be lent
// before this rank knows.
void Execution::copy_lent() {
  if (lent_ == 0 || !bound_.opens_memory() || team_.opens_memory()) return;
  for (std::size_t c = 0; c < bound_.channels().size(); ++c)
    for (std::uint64_t seq = 0; seq < team_.geometry().depth; ++seq) {
      SlotHeader& slot = team_.own().slot(static_cast<int>(c), seq);
      const std::uint64_t stamp = slot.stamp.load(std::memory_order_relaxed);
      if (slot.fingerprint != fingerprint_ || slot.place != Place::process || slot.copied == stamp) continue;
      const auto* const lent = reinterpret_cast<const std::byte*>(slot.address);  // NOLINT(performance-no-int-to-ptr)
      std::copy_n(lent, slot.bytes, slot.payload());
      slot.copied.store(stamp, std::memory_order_release);
      for (const int peer : work_.channels[c].readers[seq]) team_.peer(peer).slot_filled(static_cast<int>(c), seq, {});
    }
}

bool Execution::try_step(const At& at) {
  const BoundStep& step = bound_.channels()[at.channel].steps[at.step];
  const Bytes local = step.local.slice(at.round, bound_.slice_bytes());
  const Bytes output = step.output.slice(at.round, bound_.slice_bytes());
  Value value{.bytes = std::max(local.size, output.size), .local = local.data, .output = output.data};
  value.kept = round_of(at).kept;
  value.failed = round_of(at).failed;
  if (!find_operands(at, step, value)) return false;

  SlotHeader* outgoing = nullptr;
  if (!step.step->send.empty()) {
    const std::uint64_t seq = seq_of(at, team_.rank(), step.step->send_index);
    if (const int reader = slow_reader(at.channel, seq); reader >= 0) return blocked(at, reader);
    outgoing = &team_.own().slot(static_cast<int>(at.channel), seq);
    value.room = outgoing->payload() + offset_in_slot(seq, value.bytes);
  }
  const std::byte* const lent = choose_results(step, value, outgoing);
  if (value.bytes > 0 && !work_.results.empty()) {
    const auto* const made = value.output != nullptr ? value.output : static_cast<std::byte*>(work_.results[0]);
    const Nanoseconds begin = timed_ ? now() : 0;
    if (!compute(at, step, value, value.streams_slot ? !value.slot_follows : step.streams_output)) return false;
    if (value.slot_follows) kernels::stream(value.room, made, value.bytes);
    if (timed_) moved_for_ += now() - begin;
    if (value.kept && outgoing != nullptr && lent == nullptr && made != value.room && !value.slot_follows)
      std::copy_n(made, value.bytes, value.room);
  }
  if (value.failed != 0) failed_ = value.failed;
  if (outgoing != nullptr) publish(at, step, value, lent);
  acknowledge(at, step);
  return true;
}

// Remembers the obstacles that advance() meets, the first with its place.
bool Execution::blocked(const At& at, int peer) {
  awaits_ |= awaits_rank(peer);
  if (blocked_on_ < 0) {
    blocked_on_ = peer;
    blocked_at_ = at;
  }
  return false;
}

std::uint64_t Execution::seq_of(const At& at, int rank, std::uint32_t send_index) const {
  const auto r = static_cast<std::size_t>(rank);
  return work_.channels[at.channel].tail[r] + at.round * bound_.program().channels[at.channel].sends[r] + send_index;
}

// Finds what the step combines, in rank order, the local chunk among it; false if a peer has yet to send its part.
bool Execution::find_operands(const At& at, const BoundStep& step, Value& value) {
  work_.operands.clear();
  work_.remote.clear();
  work_.results.clear();
  for (const Source& source : step.step->recv) {
    const std::uint64_t seq = seq_of(at, source.peer, source.send_index);
    const SlotHeader& slot = team_.region(source.peer).slot(static_cast<int>(at.channel), seq);
    // Acquires what the sender stored before the stamp. seq_cst, for who looks for the last time before it sleeps.
    if (slot.stamp.load(std::memory_order_seq_cst) != seq + 1) return blocked(at, source.peer);
    prefetch(&slot + 1);  // where a small value lies
    if (slot.fingerprint != fingerprint_)
      throw Error(ErrorKind::mismatch, team_.fate().describe(source.peer) + " sent data of another call", source.peer);
    take(step, source, slot, value);
    if (!team_.elsewhere(source.peer)) {
      ChannelState& state = work_.channels[at.channel];
      state.read_by[static_cast<std::size_t>(source.peer)] = state.tail[static_cast<std::size_t>(team_.rank())];
    }
  }
  if (value.local != nullptr) {
    const auto position = static_cast<std::size_t>(step.step->local_position);
    work_.operands.insert(work_.operands.begin() + static_cast<std::ptrdiff_t>(position), value.local);
    for (Remote& remote : work_.remote) remote.operand += remote.operand >= position;
  }
  return true;
}

// Adds what a slot holds, or says, to the operands. Its numbers come from another process, which could change them
// between a check and their use: each is read once, and checked before it is used.
void Execution::take(const BoundStep& step, const Source& source, const SlotHeader& slot, Value& value) {
  const volatile SlotHeader& theirs = slot;
  const std::size_t bytes = theirs.bytes;
  const Place place = theirs.place;
  const std::uint64_t address = theirs.address;
  const bool first = work_.operands.empty(),
             has_chunk = step.step->read != Read::none || step.step->write_position >= 0;
  if (first && !has_chunk) value.bytes = bytes;  // a step that only passes on takes what comes
  if (bytes != value.bytes || bytes > team_.geometry().slot_bytes)
    throw Error(ErrorKind::mismatch, team_.fate().describe(source.peer) + " sent a slice of another size", source.peer);
  const bool returned = place != Place::slot && theirs.returned == 1;
  value.returned += returned;
  value.there_already = step.returned && theirs.kept == 0;  // it receives from this peer alone
  if (const std::uint32_t failed = theirs.failed; failed != 0)
    value.failed = lesser(failed, static_cast<std::size_t>(team_.size()));
  std::byte* data = const_cast<SlotHeader&>(slot).payload();
  if (place == Place::slot) {
    if (address > team_.geometry().slot_bytes - bytes)
      throw Error(ErrorKind::mismatch, team_.fate().describe(source.peer) + " sent a slice beyond its slot",
                  source.peer);
    data += address;
  }
  if (place == Place::process) {
    if (slot.copied.load(std::memory_order_acquire) != slot.stamp.load(std::memory_order_relaxed)) {
      work_.remote.push_back({source.peer, address, returned, work_.operands.size()});
      work_.operands.push_back(nullptr);
      return;
    }
    value.kept |= returned;
  }
  if (place == Place::arena) {
    data = team_.peer(source.peer).lent(address, bytes);
    if (data == nullptr)
      throw Error(ErrorKind::mismatch, team_.fate().describe(source.peer) + " lent what is not its", source.peer);
    if (returned) work_.results.push_back(data);
  }
  work_.operands.push_back(data);
}

// Where in its slot a value goes. A core that writes what another one has just read must first take it from that one's
// cache. So one value after the other goes to another place, until those before have left the caches.
std::size_t Execution::offset_in_slot(std::uint64_t seq, std::size_t bytes) const {
  if (bytes < kLeastSpread) return 0;
  const Geometry& geometry = team_.geometry();
  const std::size_t each = round_up(bytes, kTileUnit);
  const std::size_t places = lesser(geometry.slot_bytes, bound_.spread_bytes() / geometry.depth) / each;
  return places < 2 ? 0 : seq / geometry.depth % places * each;
}

// Completes the list of places where the value goes. Returns where it is lent, or null.
const std::byte* Execution::choose_results(const BoundStep& step, Value& value, SlotHeader* outgoing) {
  const std::byte* lent = nullptr;
  // If every receiver gets the value written back to where it lent its own, nobody reads the slot. A value that is
  // written to another process must lie in this one first, though.
  const bool all_returned =
      value.returned == step.step->send.size() && (value.output != nullptr || !work_.results.empty());
  if (outgoing != nullptr && value.bytes > 0 && !all_returned) {
    if (step.lends == BoundStep::Lends::local) lent = value.local;
    if (step.lends == BoundStep::Lends::output) lent = value.output;
    // Only one place can be stored past the caches at a time. If the step writes its output, that comes first, and the
    // slot is filled from it.
    const bool writes = value.output != nullptr && !value.there_already;
    value.streams_slot = lent == nullptr && bound_.way() == Way::stream && !step.leaves &&
                         value.bytes >= kernels::kLeastStreamed && (writes || work_.results.empty());
    value.slot_follows = value.streams_slot && writes;
    if (lent == nullptr && !value.slot_follows) work_.results.push_back(value.room);
  }
  if (value.output != nullptr && !value.there_already) work_.results.push_back(value.output);
  return lent;
}

void Execution::publish(const At& at, const BoundStep& step, const Value& value, const std::byte* lent) {
  const int own = team_.rank(), channel = static_cast<int>(at.channel);
  const std::uint64_t seq = seq_of(at, own, step.step->send_index);
  SlotHeader& slot = team_.own().slot(channel, seq);
  slot.fingerprint = fingerprint_;
  slot.bytes = value.bytes;
  slot.place = lent == nullptr ? Place::slot : step.place;
  if (slot.place == Place::slot) slot.address = static_cast<std::uint64_t>(value.room - slot.payload());
  if (slot.place == Place::arena) slot.address = static_cast<std::uint64_t>(lent - team_.arena()->base());
  if (slot.place == Place::process) slot.address = reinterpret_cast<std::uint64_t>(lent);
  if (slot.place == Place::arena) check_memory();  // after all that was written to it
  slot.returned = step.returned ? 1 : 0;
  slot.kept = value.kept ? 1 : 0;
  slot.failed = value.failed;
  work_.channels[at.channel].readers[seq & (team_.geometry().depth - 1)] = step.step->send;
  slot.stamp.store(seq + 1, std::memory_order_release);
  SlotValue sent{.data = lent == nullptr ? value.room : lent, .lent = lent != nullptr};
  if (step.leaves && bound_.packing() != Packing::none)
    pack_for_others(sent, value.bytes, step.step->completes ? nullptr : rests_of(at, step));
  for (const int peer : step.step->send) team_.peer(peer).slot_filled(channel, seq, sent);
  sends_away_ |= step.leaves;
  if (lent != nullptr && step.stays) lent_ += value.bytes;
}

void Execution::acknowledge(const At& at, const BoundStep& step) {
  const int channel = static_cast<int>(at.channel);
  for (const Source& source : step.step->recv) {
    const std::uint64_t seq = seq_of(at, source.peer, source.send_index);
    team_.own().acknowledgement(source.peer, channel, seq).store(seq + 1, std::memory_order_release);
    team_.peer(source.peer).slot_read(channel, seq);
  }
}

void Execution::pack_for_others(SlotValue& value, std::size_t bytes, std::byte* rests) const {
  const std::size_t count = bytes / element_;
  value.packing = bound_.packing();
  value.packed_bytes = packed_bytes(value.packing, count);
  value.packed = unwritten_bytes(value.packed_bytes);
  pack(value.packing, value.packed.get(), value.data, count, rests);
}

// The operands, combined in order, go to all results, and back to whom they are returned. If `streams_last`, the last
// result goes past the caches. Returns false where a peer has to copy its operand to its slot first; the next call then
// goes on where this one stopped, since results may have taken the place of operands.
bool Execution::compute(const At& at, const BoundStep& step, Value& value, bool streams_last) {
  ChannelState::Round& stands = round_of(at);
  std::vector<const void*>& operands = work_.operands;
  std::vector<void*>& results = work_.results;
  const bool combined = operands.size() > 1;
  if (!combined && !work_.remote.empty()) {
    const Remote& remote = work_.remote[0];
    if (!team_.read(remote.peer, static_cast<std::byte*>(results.back()), remote.address, value.bytes))
      return blocked(at, remote.peer);
    operands[0] = results.back();
    streams_last = false;  // the kernel has done it its way
  }
  // Operands go through the scratch space on their way in, and the output on its way out.
  const bool detours = combined && (streams_last || !work_.remote.empty());
  std::byte* const rests = rests_of(at, step);
  auto* const output = static_cast<std::byte*>(results.back());
  const auto skip = [&](std::size_t bytes) {
    for (const void*& operand : operands) operand = static_cast<const std::byte*>(operand) + bytes;
    for (void*& result : results) result = static_cast<std::byte*>(result) + bytes;
  };
  if (stands.done > 0) skip(stands.done);
  if (!detours && !step.scaled) {
    combine(step, value, value.bytes - stands.done, streams_last, rests == nullptr ? nullptr : rests + stands.done);
    return true;
  }
  const std::size_t parts = work_.remote.size() + step.scaled + streams_last;
  const std::size_t share = kScratch / parts / kTileUnit * kTileUnit;
  std::size_t tile = !detours ? kTile : bound_.outgrows_caches() ? std::min(share, kStreamedTile) : share;
  if (call_.op != nullptr) tile = std::max(tile / element_, std::size_t{1}) * element_;
  work_.scratch.resize(kScratch / sizeof(CacheLine));
  for (std::size_t done = stands.done; done < value.bytes; done += tile) {
    const std::size_t some = std::min(tile, value.bytes - done);
    std::byte* scratch = work_.scratch.data()->bytes;
    for (const Remote& remote : work_.remote) {
      if (!team_.read(remote.peer, scratch, remote.address + done, some)) {
        stands.done = static_cast<std::uint32_t>(done);
        stands.kept = value.kept;
        stands.failed = value.failed;
        return blocked(at, remote.peer);
      }
      operands[remote.operand] = scratch;
      scratch += tile;
    }
    if (step.scaled) {
      // Rounded to the element type before it is combined or sent, so that every rank combines the same operands.
      kernels::scale(call_.dtype, scratch, value.local + done, some / element_, call_.factor);
      operands[static_cast<std::size_t>(step.step->local_position)] = scratch;
      scratch += tile;
    }
    if (streams_last) results.back() = scratch;
    combine(step, value, some, false, rests == nullptr ? nullptr : rests + done);
    if (streams_last) kernels::stream(output + done, scratch, some);
    for (const Remote& remote : work_.remote)
      if (remote.returned)
        value.kept |= !team_.write(remote.peer, remote.address + done, static_cast<const std::byte*>(results[0]), some);
    skip(some);
  }
  return true;
}

void Execution::combine(const BoundStep& step, Value& value, std::size_t bytes, bool streams_last, std::byte* rests) {
  const std::vector<const void*>& operands = work_.operands;
  const std::vector<void*>& results = work_.results;
  if (operands.size() > 1 && call_.op != nullptr) {
    work_.folded.resize(ceil_div(call_.op->tile_bytes(), sizeof(CacheLine)));
    if (!call_.op->fold(results, operands, bytes / element_, work_.folded.data()->bytes))
      value.failed = static_cast<std::uint32_t>(team_.rank()) + 1;
    return;
  }
  if (operands.size() > 1) {
    const bool rounds = step.step->completes && bound_.packing() != Packing::none;
    const std::span<void* const> all(results), first = all.first(rounds ? 1 : all.size());
    kernels::accumulate(call_.dtype, call_.reduce_op, first, operands, bytes / element_, step.average.divisor,
                        step.average.weights);
    if (!rounds) return;
    // This rank keeps what other hosts will get, which is rounded.
    round(bound_.packing(), static_cast<std::byte*>(results[0]), bytes / element_, rests);
    kernels::copy(all.subspan(1), results[0], bytes);
    return;
  }
  // The output comes last. It may be where the value is already.
  const bool last_apart = streams_last || results.back() == operands[0];
  const std::span copies(results.data(), results.size() - last_apart);
  if (!copies.empty()) kernels::copy(copies, operands[0], bytes);
  if (streams_last) kernels::stream(results.back(), copies.empty() ? operands[0] : copies[0], bytes);
}

void Execution::shut_out_peers() {
  if (team_.links() != nullptr) team_.links()->forget_lent();
  if (bound_.opens_memory()) team_.close_memory();
  if (bound_.returned_in_arena()) team_.arena()->withdraw(bound_.returned().data, bound_.returned().size);
}

void Execution::check_memory() const {
  if (bound_.withdrawals() == team_.withdrawals() || bound_.still_shared()) return;
  throw Error(ErrorKind::system,
              "a call of another group failed on a tensor of the same storage, so ranks no longer share that storage; "
              "give the tensors of each group a storage of their own",
              team_.rank());
}

// The rank that must act before slot `seq` may be written, or -1 if none must. It is a reader that has not read the
// slot's old content. Or it is this rank: an earlier round has not yet sent what belongs there before `seq`. In that
// case advance() has met the earlier round first and reports its obstacle.
int Execution::slow_reader(std::size_t channel, std::uint64_t seq, bool elsewhere) const {
  const std::size_t depth = team_.geometry().depth;
  const int own = team_.rank();
  const std::uint64_t before = seq < depth ? 0 : seq - depth + 1;  // the stamp of seq - depth
  if (team_.own().slot(static_cast<int>(channel), seq).stamp.load(std::memory_order_relaxed) != before) return own;
  if (before == 0) return -1;
  for (const int reader : work_.channels[channel].readers[seq & (depth - 1)]) {
    if (!elsewhere && team_.elsewhere(reader)) continue;
    if (work_.channels[channel].read_by[static_cast<std::size_t>(reader)] >= before) continue;
    // Acquires: the reader's loads of the old content come before our stores. seq_cst as in find_operands().
    const std::uint64_t read =
        team_.region(reader).acknowledgement(own, static_cast<int>(channel), seq).load(std::memory_order_seq_cst);
    if (read < before) return reader;
  }
  return -1;
}

bool Execution::all_read(bool elsewhere) {
  copy_lent();
  const auto own = static_cast<std::size_t>(team_.rank());
  const std::size_t depth = team_.geometry().depth;
  for (std::size_t c = 0; c < bound_.channels().size(); ++c) {
    const std::size_t sent = bound_.channels()[c].rounds * bound_.program().channels[c].sends[own];
    const std::uint64_t end = work_.channels[c].tail[own] + sent;
    for (std::uint64_t seq = end - std::min(sent, depth); seq < end; ++seq) {
      blocked_on_ = slow_reader(c, seq + depth, elsewhere);  // the reader of seq, as seq + depth takes its slot
      if (blocked_on_ < 0) continue;
      awaits_ = awaits_rank(blocked_on_);
      return false;
    }
  }
  return true;
}

void Execution::finish() {
  for (std::size_t c = 0; c < bound_.channels().size(); ++c) {
    std::vector<std::uint64_t>& tail = work_.channels[c].tail;
    for (std::size_t r = 0; r < tail.size(); ++r)
      tail[r] += bound_.channels()[c].rounds * bound_.program().channels[c].sends[r];
    // The next call's slot is taken back from the caches of its readers while the program does something else.
    const SlotHeader& next = team_.own().slot(static_cast<int>(c), tail[static_cast<std::size_t>(team_.rank())]);
    prefetch_to_write(&next);
    prefetch_to_write(&next + 1);
  }
}

std::string Execution::position() const {
  const auto& [channel, round, step] = blocked_at_;
  const BoundChannel& bound = bound_.channels()[channel];
  return "channel " + std::to_string(channel) + ", round " + std::to_string(round + 1) + " of " +
         std::to_string(bound.rounds) + ", step " + std::to_string(step + 1) + " of " +
         std::to_string(bound.steps.size());
}

}  // namespace ringreduce
