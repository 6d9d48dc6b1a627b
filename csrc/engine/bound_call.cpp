#include "engine/bound_call.h"

#include <algorithm>

#include "kernels/accumulate.h"

namespace ringreduce {
namespace {

// Values may be packed on their way to other hosts if one rank completes each chunk and all others get what it made of
// it: that rank rounds its own result as well, so all end with equal values.
bool packs(const Call& call, const Program& program) {
  return call.operation == Operation::all_reduce && call.dtype == DType::float32 && program.completed_once;
}

}  // namespace

std::vector<BoundCall::Block> BoundCall::blocks_of(const Tensors& tensors) {
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < tensors.data.size(); ++i) blocks.push_back({tensors.data[i], tensors.count[i]});
  return blocks;
}

bool BoundCall::same(const std::vector<Block>& known, const Tensors& tensors) {
  if (known.size() != tensors.data.size()) return false;
  for (std::size_t i = 0; i < known.size(); ++i)
    if (known[i].data != tensors.data[i] || known[i].count != tensors.count[i]) return false;
  return true;
}

BoundCall::BoundCall(const Team& team, const Program& program, const Call& call, const Buffers& buffers,
                     std::size_t slice_bytes, const Engine::Options& options, Way way)
    : team_(&team),
      program_(&program),
      call_(call),
      inputs_(blocks_of(buffers.input)),
      outputs_(blocks_of(buffers.output)),
      element_(call.element_bytes()),
      slice_bytes_(slice_bytes),
      spread_bytes_(options.spread_bytes),
      packing_(packs(call, program) ? call.packing : Packing::none),
      in_place_(inputs_.size() == 1 && outputs_.size() == 1 && inputs_[0].data == outputs_[0].data),
      scaled_(reduces(call.operation) && call.reduce_op == ReduceOp::premul_sum),
      withdrawals_(team.withdrawals()),  // before anybody asks what is in the arena
      in_arena_(in_arena()) {
  std::size_t written = 0;
  for (const Block& block : outputs_) written += block.count * element_;
  written *= static_cast<std::size_t>(team.size());
  // The scratch space has room for an element of each operand, and of the output.
  const bool fits_scratch = element_ + kTileUnit <= kScratch / (static_cast<std::size_t>(team.size()) + 1);
  outgrows_caches_ = written >= options.stream_bytes && fits_scratch;

  bool worth_fetching = team.opens_memory() && fits_scratch;
  may_stream_ = team.size() > 1 && fits_scratch;  // what is combined goes through the scratch space on its way
  for (const ChannelProgram& channel : program.channels) {
    const std::size_t unit = unit_of(element_);
    const std::size_t largest =
        largest_chunk(stripe(call.largest, channel.share, unit), channel.chunks, unit) * element_;
    worth_fetching &= lesser(largest, slice_bytes_) >= options.least_fetch_bytes;
    // Only the root has something to give, or to take, and it does so while the others copy or read.
    worth_fetching &= !has_root(call.operation);
    may_stream_ &= lesser(largest, slice_bytes_) >= kernels::kLeastStreamed;
    largest_ = std::max(largest_, lesser(largest, slice_bytes_));
    channels_.push_back({std::max<std::size_t>(1, ceil_div(largest, slice_bytes_)), {}});
  }
  const bool combined = reduces(call.operation) && in_place_ && !scaled_;
  // Beyond the caches, ordinary loads and stores are faster than the kernel's.
  const bool kernel_is_faster = combined ? team.size() == 2 || written <= options.most_fetch_bytes : !outgrows_caches_;
  may_lend_ = worth_fetching && kernel_is_faster;
  way_ = taken(way);
  offers_ = combined && (opens_memory() || team.in_arena(outputs_[0].data, outputs_[0].count * element_));

  for (std::size_t c = 0; c < channels_.size(); ++c)
    for (const Step& step : program.channels[c].steps) {
      BoundStep& bound = channels_[c].steps.emplace_back(bind(team, program.channels[c], step));
      if (!bound.rounds) continue;
      bound.rests = rounded_ * element_;
      rounded_ += range(outputs_[0], program.channels[c], step).size();
    }
  for (const BoundChannel& channel : channels_)
    for (const BoundStep& step : channel.steps)
      has_choice_ |= (step.stays && step.place != Place::arena) || (moves(step) && !reduces(call.operation));
  has_choice_ &= may_lend_ || may_stream_;
}

Way BoundCall::taken(Way asked) const {
  if (asked == Way::lend && may_lend_) return Way::lend;
  if (asked == Way::stream && may_stream_) return Way::stream;
  if (asked == Way::stream_out && may_stream_ && !reduces(call_.operation)) return Way::stream_out;
  return Way::copy;
}

bool BoundCall::serves(const Call& call, const Buffers& buffers, Way way) const {
  return call_.operation == call.operation && call_.dtype == call.dtype && call_.reduce_op == call.reduce_op &&
         call_.root == call.root && call_.packing == call.packing && call_.count == call.count &&
         call_.largest == call.largest && call_.shape == call.shape && withdrawals_ == team_->withdrawals() &&
         (!has_choice_ || taken(way) == way_) && (!may_lend_ || team_->opens_memory()) &&
         same(inputs_, buffers.input) && same(outputs_, buffers.output);
}

bool BoundCall::fills_slots() const {
  return std::any_of(channels_.begin(), channels_.end(), [](const BoundChannel& channel) {
    return std::any_of(channel.steps.begin(), channel.steps.end(),
                       [](const BoundStep& step) { return step.stays && step.place == Place::slot; });
  });
}

std::vector<bool> BoundCall::in_arena() const {
  std::vector<bool> result;
  for (const std::vector<Block>* side : {&inputs_, &outputs_})
    for (const Block& block : *side) result.push_back(team_->in_arena(block.data, block.count * element_));
  return result;
}

bool BoundCall::still_shared() const { return in_arena() == in_arena_; }

Bytes BoundCall::returned() const { return offers_ ? Bytes{outputs_[0].data, outputs_[0].count * element_} : Bytes{}; }

// The step's chunk of a block, as elements of it.
Range BoundCall::range(const Block& block, const ChannelProgram& channel, const Step& step) const {
  const std::size_t unit = unit_of(element_);
  return split(stripe(block.count, channel.share, unit), channel.chunks, step.chunk, unit);
}

Bytes BoundCall::chunk(const Block& block, const ChannelProgram& channel, const Step& step) const {
  const Range elements = range(block, channel, step);
  return {block.data + elements.begin * element_, elements.size() * element_};
}

BoundStep BoundCall::bind(const Team& team, const ChannelProgram& channel, const Step& step) const {
  BoundStep bound;
  bound.step = &step;
  if (step.read != Read::none) {
    const std::vector<Block>& blocks = step.read == Read::input ? inputs_ : outputs_;
    bound.local = chunk(blocks[static_cast<std::size_t>(step.read_position)], channel, step);
  }
  if (step.write_position >= 0)
    bound.output = chunk(outputs_[static_cast<std::size_t>(step.write_position)], channel, step);
  for (const int peer : step.send) (team.elsewhere(peer) ? bound.leaves : bound.stays) = true;
  bound.scaled = scaled_ && step.read == Read::input;
  bound.rounds = packing_ != Packing::none && (step.completes || (step.partial && bound.leaves));
  bound.average = average_of(call_, step, team.size());
  if (step.returned && offers_)  // a peer on another host cannot write here
    bound.returned = !team.elsewhere(step.recv.empty() ? step.send[0] : step.recv[0].peer);
  if (!step.send.empty()) lend(team, bound);
  bound.streams_output =
      (outgrows_caches_ || way_ == Way::stream_out) && moves(bound) && bound.lends != BoundStep::Lends::output;
  return bound;
}

bool BoundCall::moves(const BoundStep& bound) {
  return bound.step->write_position >= 0 && bound.output.data != bound.local.data;
}

// Decides whether what the step sends is lent, and where its receivers find it.
void BoundCall::lend(const Team& team, BoundStep& bound) const {
  const Step& step = *bound.step;
  const auto can_lend = [&](const Bytes& bytes) {
    // A value that only leaves this host is sent from where it lies. For several readers of this host the kernel
    // would copy several times, so they read one copy in a slot instead.
    return !bound.stays || team.in_arena(bytes.data, bytes.size) || (opens_memory() && step.send.size() == 1);
  };
  const bool writes = step.write_position >= 0;
  const bool unchanged = step.recv.empty() && !bound.scaled;  // what is sent is what was read
  if (unchanged && step.read != Read::none && can_lend(bound.local)) {
    const bool kept_input = step.read == Read::input && !in_place_ && !overlaps_output(bound.local);
    const bool kept_output = !writes && !step.rewritten && (step.read == Read::output || in_place_);
    if (bound.returned || kept_input || kept_output) bound.lends = BoundStep::Lends::local;
  }
  if (bound.lends == BoundStep::Lends::nothing && writes && !step.rewritten && can_lend(bound.output))
    bound.lends = BoundStep::Lends::output;
  if (bound.lends == BoundStep::Lends::nothing) return;
  const Bytes& lent = bound.lends == BoundStep::Lends::local ? bound.local : bound.output;
  bound.place = team.in_arena(lent.data, lent.size) ? Place::arena : Place::process;
}

bool BoundCall::overlaps_output(const Bytes& bytes) const {
  return std::any_of(outputs_.begin(), outputs_.end(), [&](const Block& block) {
    return overlap(bytes.data, bytes.size, block.data, block.count * element_);
  });
}

}  // namespace ringreduce
