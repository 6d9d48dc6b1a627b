#include "engine/exchange.h"

#include <algorithm>
#include <utility>

namespace ringreduce {
namespace {

bool touches(const Step& step, const Step& other) {
  return step.block == other.block && step.chunk == other.chunk &&
         (step.read != Read::none || step.write_position >= 0);
}

// Whether what `step` takes, which is sent in `phase`, can be received where it is to be written: nothing else happens
// to it, and what lies there has been read, and sent, in earlier phases.
bool can_land(const ChannelProgram& program, std::size_t step, std::uint32_t phase) {
  const Step& s = program.steps[step];
  if (s.recv.size() != 1 || s.read != Read::none || s.write_position < 0) return false;
  return std::none_of(program.steps.begin(), program.steps.begin() + static_cast<std::ptrdiff_t>(step),
                      [&](const Step& earlier) { return earlier.phase >= phase && touches(earlier, s); });
}

// The part of a list ordered by phase that has this phase.
template <class T>
std::span<const T> in_phase(const std::vector<T>& list, std::size_t phase) {
  const auto from = std::partition_point(list.begin(), list.end(), [&](const T& item) { return item.phase < phase; });
  const auto to = std::partition_point(from, list.end(), [&](const T& item) { return item.phase == phase; });
  return {from, to};
}

}  // namespace

Timetable::Timetable(const Program& program) {
  for (const ChannelProgram& p : program.channels) {
    Channel channel;
    for (std::size_t s = 0; s < p.steps.size(); ++s) {
      const Step& step = p.steps[s];
      for (std::size_t i = 0; i < step.recv.size(); ++i) {
        const std::uint32_t phase = step.recv[i].phase;
        channel.arrivals.push_back(
            {phase, static_cast<std::uint32_t>(s), static_cast<std::uint32_t>(i), can_land(p, s, phase)});
      }
      channel.moves.push_back(
          std::any_of(p.steps.begin() + static_cast<std::ptrdiff_t>(s) + 1, p.steps.end(), [&](const Step& later) {
            return later.phase == step.phase && later.write_position >= 0 && later.block == step.block &&
                   later.chunk == step.chunk;
          }));
    }
    std::stable_sort(channel.arrivals.begin(), channel.arrivals.end(),
                     [](const Arrival& a, const Arrival& b) { return a.phase < b.phase; });
    phases = std::max<std::size_t>(phases, p.phases);
    channels.push_back(std::move(channel));
  }
}

Exchange::Exchange(PointToPoint& wire, Device& device, const BoundProgram& part, Channels channels)
    : wire_(wire),
      device_(device),
      program_(part.program),
      timetable_(part.timetable),
      call_(part.call),
      buffers_(part.buffers),
      element_(size_of(call_.dtype)),
      slice_size_(part.slice_bytes / element_),
      scaled_(reduces(call_.operation) && call_.reduce_op == ReduceOp::premul_sum) {
  rounds_.resize(program_.channels.size());
  for (std::size_t c = channels.first; c < rounds_.size(); c += channels.every) {
    const ChannelProgram& channel = program_.channels[c];
    const std::size_t unit = unit_of(element_);
    const std::size_t chunk = largest_chunk(stripe(call_.largest, channel.share, unit), channel.chunks, unit);
    rounds_[c] = ceil_div(chunk, slice_size_);
    if (rounds_[c] > 0) last_ = std::max(last_, rounds_[c] + channel.phases - 1);
  }
  arrived_.resize(timetable_.phases * program_.sources.size());
  device_.resize(part.slice_bytes);
}

Exchange::~Exchange() {
  give_back();
  for (std::byte* cell : arrived_)
    if (cell != nullptr) device_.give(cell);
}

void Exchange::give_back() {
  for (std::byte* cell : spent_) device_.give(cell);
  spent_.clear();
}

template <class Visit>
void Exchange::each_round(Visit&& visit) const {
  for (std::size_t c = 0; c < rounds_.size(); ++c) {
    const std::size_t phases = program_.channels[c].phases;
    const std::size_t first = at_ < phases ? 0 : at_ - phases + 1;
    for (std::size_t round = first; round <= at_ && round < rounds_[c]; ++round) visit(c, round, at_ - round);
  }
}

bool Exchange::advance(Nanoseconds deadline) {
  if (at_ == last_) return false;
  outgoing_.clear();
  incoming_.clear();
  each_round([&](std::size_t channel, std::size_t round, std::size_t phase) {
    const std::vector<Step>& steps = program_.channels[channel].steps;
    for (const Step& step : in_phase(steps, phase))
      run_step(channel, round, step,
               timetable_.channels[channel].moves[static_cast<std::size_t>(&step - steps.data())] != 0);
  });
  each_round([&](std::size_t channel, std::size_t round, std::size_t phase) {
    for (const Timetable::Arrival& arrival : in_phase(timetable_.channels[channel].arrivals, phase))
      receive(channel, round, arrival);
  });
  if (!outgoing_.empty() || !incoming_.empty()) {
    const Nanoseconds before = now();
    wire_.exchange(outgoing_, incoming_, deadline - before);
    waited_ += now() - before;
  }
  give_back();
  return ++at_ < last_;
}

std::size_t Exchange::elements_of(int block) const {
  const auto b = static_cast<std::size_t>(block);
  switch (call_.operation) {
    case Operation::all_gather:
      return buffers_.output.count[b];
    case Operation::reduce_scatter:
      return buffers_.input.count[b];
    case Operation::all_to_all:
      return buffers_.splits.empty() ? call_.count : buffers_.splits[b];
    default:
      return call_.count;
  }
}

Exchange::Slice Exchange::slice_of(std::size_t channel, std::size_t round, const Step& step) const {
  const ChannelProgram& program = program_.channels[channel];
  const std::size_t unit = unit_of(element_);
  const Range range =
      slice(split(stripe(elements_of(step.block), program.share, unit), program.chunks, step.chunk, unit), round,
            slice_size_);
  const auto in = [&](const Tensors& tensors, int position) {
    return tensors.data[static_cast<std::size_t>(position)] + range.begin * element_;
  };
  Slice found{.bytes = range.size() * element_};
  if (found.bytes == 0) return found;
  if (step.read != Read::none)
    found.local = in(step.read == Read::input ? buffers_.input : buffers_.output, step.read_position);
  if (step.write_position >= 0) found.output = in(buffers_.output, step.write_position);
  return found;
}

std::byte*& Exchange::arrived(std::size_t round, const Source& source) {
  const auto number = static_cast<std::size_t>(&source - program_.sources.data());
  return arrived_[round % timetable_.phases * program_.sources.size() + number];
}

void Exchange::receive(std::size_t channel, std::size_t round, const Timetable::Arrival& arrival) {
  const Step& step = program_.channels[channel].steps[arrival.step];
  const Source& source = step.recv[arrival.source];
  const Slice slice = slice_of(channel, round, step);
  if (slice.bytes == 0) return;
  std::byte* to = slice.output;
  if (!arrival.lands) to = arrived(round, source) = device_.take();
  incoming_.push_back({source.peer, to, slice.bytes});
}

// value = what arrived and the local chunk, combined in rank order -> the output, and all of `send`. The value is sent
// from where it is, which must be the same until the exchange is over: an operand's place, the output, or a cell.
void Exchange::run_step(std::size_t channel, std::size_t round, const Step& step, bool moves) {
  const Slice slice = slice_of(channel, round, step);
  if (slice.bytes == 0) return;  // as for the peers: nothing is sent
  const std::size_t count = slice.bytes / element_;
  std::byte* cell = nullptr;  // one of this step's
  const auto take = [&] { return spent_.emplace_back(device_.take()); };

  operands_.clear();
  results_.clear();
  for (const Source& source : step.recv) {
    std::byte*& from = arrived(round, source);
    operands_.push_back(from != nullptr ? from : slice.output);  // where it landed
    if (from != nullptr) spent_.push_back(cell = std::exchange(from, nullptr));
  }
  if (slice.local != nullptr) {
    const void* local = slice.local;
    if (scaled_ && step.read == Read::input) {
      // Rounded to the element type before it is combined or sent, so that every rank combines the same operands.
      device_.scale(call_, cell = take(), local, count);
      local = cell;
    }
    operands_.insert(operands_.begin() + step.local_position, local);
  }

  const bool sends_copy = !step.send.empty() && (slice.output == nullptr || moves);
  const void* value = operands_[0];
  if (operands_.size() > 1) {
    if (slice.output != nullptr) results_.push_back(slice.output);
    if (sends_copy) results_.push_back(cell);  // some operand came in one
    device_.accumulate(call_, results_, operands_, count, average_of(call_, step, wire_.size()));
    value = results_.back();
  } else {
    if (slice.output != nullptr && slice.output != value) device_.copy(slice.output, value, slice.bytes);
    if (moves && cell == nullptr && !step.send.empty()) {
      device_.copy(cell = take(), value, slice.bytes);
      value = cell;
    }
  }
  for (int peer : step.send) outgoing_.push_back({peer, static_cast<const std::byte*>(value), slice.bytes});
}

}  // namespace ringreduce
