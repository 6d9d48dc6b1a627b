#include "engine/execution.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "kernels/accumulate.h"
#include "transport/links.h"

namespace ringreduce {
namespace {

// What is scaled first goes through in tiles of this many bytes, which the L1 cache holds (32 KiB or more on all
// machines we know).
constexpr std::size_t kTile = 8192;

// What comes from other processes to be combined goes through this many bytes, which the L2 cache holds. More of them
// mean fewer calls of the kernel: of 64, 128, 256 and 512 KiB the largest was the fastest for 8 ranks on the same Xeon,
// by up to 1.6 times for 1 MiB; for 2 and 4 ranks the last two were alike.
constexpr std::size_t kScratch = std::size_t{512} << 10;

// Tiles are multiples of this: of cache lines, and of what is packed together.
constexpr std::size_t kTileUnit = std::max(kCacheLine, kPackedTogether * sizeof(float));
static_assert(kTileUnit % kCacheLine == 0 && kTile % kTileUnit == 0);

// From this many bytes of all ranks' tensors on, more than two ranks do not read and write back one another's. Measured
// for all_reduce in place on the same Xeon: with 4 and 8 ranks, 64 and 128 MiB of all took 0.7 and 0.9 of the time that
// copies took, 256 and 512 MiB 1.0 to 1.5. With 2 ranks, 128 and 320 MiB took 1.0, and 0.75 on huge pages.
constexpr std::size_t kCopied = std::size_t{192} << 20;

// Where what is read comes from memory, smaller parts are still in the cache when they are written back. Swept from 32
// KiB to 1 MiB for all_reduce of 64 and 160 MiB by 2 ranks: 128 KiB took 0.94 of the time of 256 KiB.
constexpr std::size_t kStreamedTile = std::size_t{128} << 10;

// From this many bytes of all ranks' outputs on, an output is out of the caches before anybody could read it again, and
// a store through them would first fetch what it overwrites. Swept on a 2-core Xeon (2 MiB of L2 a core), November
// 2026, for reduce_scatter, all_gather, all_to_all and broadcast by 2 and 4 ranks: with 64 MiB and more, stores past
// the caches took 0.80 to 0.99 of the time; with 32 MiB up to 1.5 times as long.
constexpr std::size_t kStreamed = std::size_t{48} << 20;

// Whether values may be packed on their way to other hosts: where one rank completes each chunk and all others get what
// it made of it, ranks that round what they send still end with equal results.
bool packs(const Call& call, const Program& program) {
  return call.operation == Operation::all_reduce && call.dtype == DType::float32 && program.completed_once;
}

}  // namespace

Execution::Execution(const Segment& segment, const Program& program, const Call& call, const Buffers& buffers,
                     Workspace& workspace, std::uint64_t fingerprint, std::size_t slice_bytes,
                     std::size_t least_fetch_bytes, Packing packing)
    : segment_(segment),
      program_(program),
      call_(call),
      buffers_(buffers),
      channels_(workspace.channels),
      operands_(workspace.operands),
      remote_(workspace.remote),
      results_(workspace.results),
      scratch_(workspace.scratch),
      fingerprint_(fingerprint),
      element_(size_of(call.dtype)),
      slice_size_(slice_bytes / element_),
      packing_(packs(call, program) ? packing : Packing::none) {
  bool large = segment.opens_memory();  // the slices
  for (std::size_t c = 0; c < program.channels.size(); ++c) {
    const ChannelProgram& channel = program.channels[c];
    const std::size_t unit = unit_of(element_);
    const std::size_t chunk = largest_chunk(stripe(call.largest, channel.share, unit), channel.chunks, unit);
    large &= std::min(chunk, slice_size_) * element_ >= least_fetch_bytes;
    // A root alone has something to give, or to take. With several rounds it can do its part while others do theirs.
    large &= !has_root(call.operation) || chunk <= slice_size_;
    // At least one round, so that ranks meet (and compare their calls) even over nothing.
    channels_[c].rounds = std::max<std::size_t>(1, ceil_div(chunk, slice_size_));
    channels_[c].oldest = 0;
    channels_[c].step.fill(0);
  }
  const Tensors &in = buffers.input, &out = buffers.output;
  in_place_ = in.data.size() == 1 && out.data.size() == 1 && in.data[0] == out.data[0];
  scaled_ = reduces(call.operation) && call.reduce_op == ReduceOp::premul_sum;
  std::size_t written = 0;
  for (std::size_t count : out.count) written += count * element_;
  written *= static_cast<std::size_t>(segment.size());
  streams_ = written >= kStreamed;
  const bool combined = reduces(call.operation) && in_place_ && !scaled_;
  // Ordinary loads and stores are faster than the kernel's where the caches do not help.
  fetched_ = large && (combined ? segment.size() == 2 || written < kCopied : !streams_);
  offers_ = combined && (fetched_ || segment.in_arena(out.data[0], out.count[0] * element_));
}

// Where the value of a step can be read by others until the call ends, or null. `output` is written already.
const std::byte* Execution::to_lend(const Step& step, const std::byte* local, const std::byte* output,
                                    std::size_t bytes) const {
  // What goes to other hosts only can be sent from anywhere.
  const bool only_leaves =
      std::all_of(step.send.begin(), step.send.end(), [&](int peer) { return segment_.elsewhere(peer); });
  // A copy in a slot pays where several read it: the kernel would copy for each of them.
  const auto can_lend = [&](const std::byte* data) {
    return only_leaves || segment_.in_arena(data, bytes) || (fetched_ && step.send.size() == 1);
  };
  if (local != nullptr && step.recv.empty() && !scales(step) && can_lend(local)) {
    if (is_returned(step)) return local;
    if (step.read == Read::input && !in_place_ && !overlaps_output(local, bytes)) return local;
    if (output == nullptr && !step.rewritten && (step.read == Read::output || in_place_)) return local;
  }
  return output != nullptr && !step.rewritten && can_lend(output) ? output : nullptr;
}

bool Execution::overlaps_output(const std::byte* data, std::size_t bytes) const {
  const Tensors& out = buffers_.output;
  for (std::size_t o = 0; o < out.data.size(); ++o)
    if (overlap(data, bytes, out.data[o], out.count[o] * element_)) return true;
  return false;
}

bool Execution::advance() {
  bool moved = false;
  done_ = true;
  blocked_on_ = -1;
  for (std::size_t c = 0; c < program_.channels.size(); ++c) {
    ChannelState& p = channels_[c];
    const std::vector<Step>& steps = program_.channels[c].steps;
    for (std::size_t round = p.oldest; round < std::min(p.rounds, p.oldest + ChannelState::kWindow); ++round) {
      std::uint32_t& at = p.step[round % ChannelState::kWindow];
      while (at < steps.size() && try_step(c, round, steps[at])) {
        ++at;
        moved = true;
      }
      if (round == p.oldest && at == steps.size()) {
        at = 0;
        ++p.oldest;
      }
    }
    if (p.oldest < p.rounds) done_ = false;
  }
  return moved;
}

// The rank that must act before slot `seq` may be written, or -1 if none must. It is a reader that has not read the
// slot's old content. Or it is this rank: an earlier round has not yet sent what belongs there before `seq`. In that
// case advance() has met the earlier round first and reports its obstacle.
int Execution::slow_reader(std::size_t channel, std::uint64_t seq, bool elsewhere) const {
  const std::size_t depth = segment_.geometry().depth;
  const int own = segment_.rank();
  const std::uint64_t before = seq < depth ? 0 : seq - depth + 1;  // the stamp of seq - depth
  if (segment_.slot(own, static_cast<int>(channel), seq).stamp.load(std::memory_order_relaxed) != before) return own;
  if (before == 0) return -1;
  for (int reader : channels_[channel].readers[seq & (depth - 1)]) {
    if (!elsewhere && segment_.elsewhere(reader)) continue;
    // Acquire, by way of seq_cst (see Segment::notify): the reader's loads of the old content come before our stores.
    const std::uint64_t read =
        segment_.acknowledgement(reader, own, static_cast<int>(channel), seq).load(std::memory_order_seq_cst);
    if (read < before) return reader;
  }
  return -1;
}

Range Execution::slice_of(std::size_t channel, const Step& step, std::size_t count, std::size_t round) const {
  const ChannelProgram& program = program_.channels[channel];
  const std::size_t unit = unit_of(element_);
  return slice(split(stripe(count, program.share, unit), program.chunks, step.chunk, unit), round, slice_size_);
}

bool Execution::try_step(std::size_t channel, std::size_t round, const Step& step) {
  const ChannelProgram& program = program_.channels[channel];
  ChannelState& state = channels_[channel];
  const int own = segment_.rank(), c = static_cast<int>(channel);
  const auto seq_of = [&](int rank, std::uint32_t send_index) {
    const auto r = static_cast<std::size_t>(rank);
    return state.tail[r] + round * program.sends[r] + send_index;
  };
  const auto blocked = [&](int peer) {
    if (blocked_on_ < 0) {
      blocked_on_ = peer, blocked_channel_ = channel, blocked_round_ = round;
      blocked_step_ = static_cast<std::size_t>(&step - program.steps.data());
    }
    return false;
  };

  // 1. Is everything there? Receives, then a slot to send from.
  operands_.clear();
  remote_.clear();
  results_.clear();
  std::size_t bytes = 0, returned = 0;
  for (const Source& source : step.recv) {
    const std::uint64_t seq = seq_of(source.peer, source.send_index);
    SlotHeader& slot = segment_.slot(source.peer, c, seq);
    // Acquire, by way of seq_cst: what the sender stored before the stamp is visible.
    if (slot.stamp.load(std::memory_order_seq_cst) != seq + 1) return blocked(source.peer);
    if (slot.fingerprint != fingerprint_)
      throw Error(ErrorKind::mismatch, segment_.describe(source.peer) + " sent data of another call", source.peer);
    // Never trust a peer's numbers. They are read once: the peer could change them between a check and their use.
    const volatile SlotHeader& theirs = slot;
    const std::uint64_t address = theirs.address, sent = theirs.bytes;
    const Place place = theirs.place;
    if (sent > segment_.geometry().slot_bytes || (&source != &step.recv.front() && sent != bytes))
      throw Error(ErrorKind::mismatch, segment_.describe(source.peer) + " sent a slice of another size", source.peer);
    bytes = sent;
    const bool is_returned = place != Place::slot && theirs.returned == 1;
    returned += is_returned;
    if (place == Place::process) {
      remote_.push_back({source.peer, address, is_returned, operands_.size()});
      operands_.push_back(nullptr);
    } else {
      std::byte* value = slot.payload();
      if (place == Place::arena) {
        const std::uint64_t arena_bytes = segment_.geometry().arena_bytes;
        if (address > arena_bytes || arena_bytes - address < bytes)
          throw Error(ErrorKind::mismatch, segment_.describe(source.peer) + " lent what is not its", source.peer);
        value = segment_.arena(source.peer) + address;
      }
      operands_.push_back(value);
      if (is_returned) results_.push_back(value);
    }
  }
  SlotHeader* outgoing = nullptr;
  std::uint64_t outgoing_seq = 0;
  if (!step.send.empty()) {
    outgoing_seq = seq_of(own, step.send_index);
    if (const int reader = slow_reader(channel, outgoing_seq); reader >= 0) return blocked(reader);
    outgoing = &segment_.slot(own, c, outgoing_seq);
  }

  // 2. Which elements? A step that only forwards takes what came.
  const std::byte* local = nullptr;
  std::byte* output = nullptr;
  const std::size_t received = bytes;
  if (step.read != Read::none) {
    const Tensors& tensors = step.read == Read::input ? buffers_.input : buffers_.output;
    const auto position = static_cast<std::size_t>(step.read_position);
    const Range range = slice_of(channel, step, tensors.count[position], round);
    local = tensors.data[position] + range.begin * element_;
    bytes = range.size() * element_;
  }
  if (step.write_position >= 0) {
    const auto position = static_cast<std::size_t>(step.write_position);
    const Range range = slice_of(channel, step, buffers_.output.count[position], round);
    output = buffers_.output.data[position] + range.begin * element_;
    bytes = range.size() * element_;
  }
  if (!step.recv.empty() && bytes != received)
    throw Error(ErrorKind::mismatch, segment_.describe(step.recv[0].peer) + " sent a slice of another size",
                step.recv[0].peer);

  // 3. Compute, publish, acknowledge.
  const bool there_already = is_returned(step) && !step.recv.empty();
  if (local != nullptr) {
    operands_.insert(operands_.begin() + step.local_position, local);
    for (Remote& remote : remote_) remote.operand += remote.operand >= static_cast<std::size_t>(step.local_position);
  }
  const std::byte* lent = nullptr;
  // If every receiver gets the result written back into its own buffer, nobody reads the slot, so nothing is put there.
  // But what goes to another process is written from here, so the result needs a place in this process too.
  const bool all_returned = returned == step.send.size() && (output != nullptr || !results_.empty());
  if (outgoing != nullptr && bytes > 0 && !all_returned) {
    lent = to_lend(step, local, output, bytes);
    if (lent == nullptr) results_.push_back(outgoing->payload());
  }
  const bool writes_output = output != nullptr && !there_already;
  if (writes_output) results_.push_back(output);
  if (bytes > 0 && !results_.empty())
    compute(step, bytes, local, streams_ && writes_output && output != local && output != lent);
  if (outgoing != nullptr) {
    outgoing->fingerprint = fingerprint_;
    outgoing->bytes = bytes;
    outgoing->place = lent == nullptr ? Place::slot : segment_.in_arena(lent, bytes) ? Place::arena : Place::process;
    outgoing->address = outgoing->place == Place::arena ? static_cast<std::uint64_t>(lent - segment_.arena(own))
                                                        : reinterpret_cast<std::uint64_t>(lent);
    outgoing->returned = is_returned(step) ? 1 : 0;
    state.readers[outgoing_seq & (segment_.geometry().depth - 1)] = step.send;
    outgoing->stamp.store(outgoing_seq + 1, std::memory_order_seq_cst);  // releases the payload
    bool leaves = false, read_here = false;
    for (int peer : step.send) (segment_.elsewhere(peer) ? leaves : read_here) = true;
    SlotValue value{.data = lent == nullptr ? outgoing->payload() : lent, .lent = lent != nullptr};
    if (leaves && packing_ != Packing::none) pack_for_others(value, bytes);
    for (int peer : step.send) segment_.slot_filled(peer, c, outgoing_seq, value);
    sends_away_ |= leaves;
    if (lent != nullptr && read_here) lent_ += bytes;
  }
  for (const Source& source : step.recv) {
    const std::uint64_t seq = seq_of(source.peer, source.send_index);
    segment_.acknowledgement(own, source.peer, c, seq).store(seq + 1, std::memory_order_seq_cst);
    segment_.slot_read(source.peer, c, seq);
  }
  return true;
}

void Execution::pack_for_others(SlotValue& value, std::size_t bytes) const {
  const std::size_t count = bytes / element_;
  value.packing = packing_;
  value.packed_bytes = packed_bytes(packing_, count);
  value.packed = std::make_shared_for_overwrite<std::byte[]>(value.packed_bytes);
  pack(packing_, value.packed.get(), value.data, count);
}

// value = operands combined in order (operands_, the local one among them) -> all of results_, and back to whom it is
// returned. If `streamed`, the last result goes past the caches.
void Execution::compute(const Step& step, std::size_t bytes, const std::byte* local, bool streamed) {
  const bool scaled = scales(step), combined = operands_.size() > 1;
  if (!combined && !remote_.empty()) {
    segment_.read(remote_[0].peer, static_cast<std::byte*>(results_.back()), remote_[0].address, bytes);
    operands_[0] = results_.back();
    streamed = false;  // the kernel has done it its way
  }
  // Through the scratch space go operands on their way in, and the output on its way out.
  const bool detours = combined && (streamed || !remote_.empty());
  if (!detours && !scaled) return combine(step, bytes, streamed);
  const std::size_t share = kScratch / (remote_.size() + scaled + streamed) / kTileUnit * kTileUnit;
  const std::size_t tile = !detours ? kTile : streams_ ? std::min(share, kStreamedTile) : share;
  auto* const output = static_cast<std::byte*>(results_.back());
  scratch_.resize(kScratch / sizeof(CacheLine));
  for (std::size_t done = 0; done < bytes; done += tile) {
    const std::size_t some = std::min(tile, bytes - done);
    std::byte* scratch = scratch_.data()->bytes;
    for (const Remote& remote : remote_) {
      segment_.read(remote.peer, scratch, remote.address + done, some);
      operands_[remote.operand] = scratch;
      scratch += tile;
    }
    if (scaled) {
      // Rounded to the element type before it is combined or sent, so that every rank combines the same operands.
      kernels::scale(call_.dtype, scratch, local + done, some / element_, call_.factor);
      operands_[static_cast<std::size_t>(step.local_position)] = scratch;
      scratch += tile;
    }
    if (streamed) results_.back() = scratch;
    combine(step, some, false);
    if (streamed) kernels::stream(output + done, scratch, some);
    for (const Remote& remote : remote_)
      if (remote.returned)
        segment_.write(remote.peer, remote.address + done, static_cast<const std::byte*>(results_[0]), some);
    for (const void*& operand : operands_) operand = static_cast<const std::byte*>(operand) + some;
    for (void*& result : results_) result = static_cast<std::byte*>(result) + some;
  }
}

void Execution::combine(const Step& step, std::size_t bytes, bool streamed) {
  const int n = static_cast<int>(operands_.size()), copies = static_cast<int>(results_.size());
  if (n > 1) {
    const bool averages = step.completes && call_.reduce_op == ReduceOp::avg;
    kernels::accumulate(call_.dtype, call_.reduce_op, results_.data(), copies, operands_.data(), n, bytes / element_,
                        averages ? segment_.size() : 1.0);
    // What other hosts get of it is rounded: so is what this one keeps.
    if (step.completes && packing_ != Packing::none)
      for (void* result : results_) round(packing_, static_cast<std::byte*>(result), bytes / element_);
    return;
  }
  // The output comes last. It may be where the value is already.
  const bool last_apart = streamed || results_.back() == operands_[0];
  if (copies > last_apart) kernels::copy(results_.data(), copies - last_apart, operands_[0], bytes);
  if (streamed) kernels::stream(results_.back(), copies > 1 ? results_[0] : operands_[0], bytes);
}

bool Execution::is_returned(const Step& step) const {
  if (!step.returned || !offers_) return false;
  return !segment_.elsewhere(step.recv.empty() ? step.send[0] : step.recv[0].peer);  // who could not write here
}

void Execution::shut_out_peers() {
  if (segment_.links() != nullptr) segment_.links()->forget_lent();
  if (fetched_) segment_.close_memory();
  if (!offers_) return;
  std::byte* const data = buffers_.output.data[0];
  const std::size_t bytes = buffers_.output.count[0] * element_;
  if (segment_.in_arena(data, bytes)) segment_.withdraw(data, bytes);
}

bool Execution::all_read(bool elsewhere) {
  const auto own = static_cast<std::size_t>(segment_.rank());
  const std::size_t depth = segment_.geometry().depth;
  for (std::size_t c = 0; c < program_.channels.size(); ++c) {
    const std::size_t sent = channels_[c].rounds * program_.channels[c].sends[own];
    const std::uint64_t end = channels_[c].tail[own] + sent;
    for (std::uint64_t seq = end - std::min(sent, depth); seq < end; ++seq) {
      blocked_on_ = slow_reader(c, seq + depth, elsewhere);  // the reader of seq, as seq + depth takes its slot
      if (blocked_on_ >= 0) return false;
    }
  }
  return true;
}

void Execution::finish() {
  for (std::size_t c = 0; c < program_.channels.size(); ++c)
    for (std::size_t r = 0; r < channels_[c].tail.size(); ++r)
      channels_[c].tail[r] += channels_[c].rounds * program_.channels[c].sends[r];
}

std::string Execution::position() const {
  const ChannelProgram& channel = program_.channels[blocked_channel_];
  return "channel " + std::to_string(blocked_channel_) + ", round " + std::to_string(blocked_round_ + 1) + " of " +
         std::to_string(channels_[blocked_channel_].rounds) + ", step " + std::to_string(blocked_step_ + 1) + " of " +
         std::to_string(channel.steps.size());
}

}  // namespace ringreduce
