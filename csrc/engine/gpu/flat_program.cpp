#include "engine/gpu/flat_program.h"

#include <cstring>

namespace ringreduce::gpu {
namespace {

template <class T>
std::uint32_t count(const std::vector<T>& of) {
  return static_cast<std::uint32_t>(of.size());
}

struct Arrays {
  std::vector<FlatChannel> channels;
  std::vector<FlatStripe> stripes;
  std::vector<FlatBatch> batches;
  std::vector<FlatStep> steps;
  std::vector<FlatSource> sources;
  std::vector<std::uint32_t> sends;

  FlatChannel& begin_channel(std::size_t ranks) {
    channels.push_back({count(stripes), 0, count(batches), 0, count(sends)});
    sends.resize(sends.size() + ranks);
    return channels.back();
  }

  // Puts a channel of the plan behind what the last FlatChannel has.
  void add(const ChannelProgram& channel, std::uint32_t number, const Batches& of_channel, std::uint32_t rank) {
    FlatChannel& to = channels.back();
    std::uint32_t* const sent = sends.data() + to.first_sends;
    stripes.push_back({channel.share, channel.chunks, number});
    for (const std::vector<std::uint32_t>& batch : of_channel) {
      const std::uint32_t first_source = count(sources);
      batches.push_back({count(steps), count(batch), first_source, 0});
      for (std::size_t i = 0; i < batch.size(); ++i) {
        const Step& step = channel.steps[batch[i]];
        FlatStep flat{.stripe = to.stripes,
                      .number = batch[i],
                      .chunk = step.chunk,
                      .input_position = step.read == Read::input ? step.read_position : -1,
                      .output_position = step.read == Read::output ? step.read_position : -1,
                      .write_position = step.write_position,
                      .local_position = static_cast<std::uint32_t>(step.local_position),
                      .send_index = sent[rank] + step.send_index,
                      .first_source = count(sources),
                      .sources = static_cast<std::uint32_t>(step.recv.size()),
                      .destinations = 0,
                      .readers = 0,
                      .local_weight = 1,
                      .mean_divisor = static_cast<float>(step.mean_divisor()),
                      .completes = step.completes};
        const auto weight = [&](std::size_t operand) { return step.weights.empty() ? 1 : step.weights[operand]; };
        if (step.read != Read::none) flat.local_weight = weight(flat.local_position);
        for (std::size_t s = 0; s < step.recv.size(); ++s) {
          const Source& from = step.recv[s];
          const bool after_local = step.read != Read::none && s >= flat.local_position;
          sources.push_back({static_cast<std::uint32_t>(from.peer), sent[from.peer] + from.send_index,
                             static_cast<std::uint32_t>(i), weight(s + after_local)});
        }
        for (const int reader : step.send) flat.destinations |= Ranks{1} << reader;
        steps.push_back(flat);
      }
      batches.back().sources = count(sources) - first_source;
    }
    to.batches += count(of_channel);
    ++to.stripes;
    for (std::size_t r = 0; r < channel.sends.size(); ++r) sent[r] += channel.sends[r];
  }

  // The slot of send k was that of send k - depth of the same round, or of an earlier one.
  void find_readers(const FlatChannel& channel, std::uint32_t rank, std::uint32_t depth) {
    const std::uint32_t sent = sends[channel.first_sends + rank];
    std::vector<Ranks> readers(sent);
    const auto each_sending = [&](auto f) {
      for (std::uint32_t b = 0; b < channel.batches; ++b) {
        const FlatBatch& batch = batches[channel.first_batch + b];
        for (std::uint32_t i = 0; i < batch.steps; ++i)
          if (FlatStep& step = steps[batch.first_step + i]; step.sends()) f(step);
      }
    };
    each_sending([&](const FlatStep& step) { readers[step.send_index] = step.destinations; });
    each_sending([&](FlatStep& step) { step.readers = readers[(step.send_index + sent * depth - depth) % sent]; });
  }
};

}  // namespace

FlatProgram::FlatProgram(const Program& program, const std::vector<Batches>& batches, const Options& options) {
  const auto rank = static_cast<std::uint32_t>(options.rank);
  Arrays arrays;
  for (std::size_t c = 0; c < program.channels.size(); ++c) {
    const ChannelProgram& channel = program.channels[c];
    if (c == 0 || !options.one_lane) arrays.begin_channel(channel.sends.size());
    arrays.add(channel, static_cast<std::uint32_t>(c), batches[c], rank);
  }
  for (const FlatChannel& channel : arrays.channels) arrays.find_readers(channel, rank, options.depth);
  channels_ = count(arrays.channels);
  channels_at_ = append(arrays.channels);
  stripes_at_ = append(arrays.stripes);
  batches_at_ = append(arrays.batches);
  steps_at_ = append(arrays.steps);
  sources_at_ = append(arrays.sources);
  sends_at_ = append(arrays.sends);
}

FlatArrays FlatProgram::at(const void* base) const {
  const auto* const from = static_cast<const std::byte*>(base);
  return {reinterpret_cast<const FlatChannel*>(from + channels_at_),
          reinterpret_cast<const FlatStripe*>(from + stripes_at_),
          reinterpret_cast<const FlatBatch*>(from + batches_at_),
          reinterpret_cast<const FlatStep*>(from + steps_at_),
          reinterpret_cast<const FlatSource*>(from + sources_at_),
          reinterpret_cast<const std::uint32_t*>(from + sends_at_)};
}

// Returns where the part begins.
template <class T>
std::size_t FlatProgram::append(const std::vector<T>& part) {
  const std::size_t begin = ceil_div(image_.size(), 8) * 8;
  image_.resize(begin + part.size() * sizeof(T));
  if (!part.empty()) std::memcpy(image_.data() + begin, part.data(), part.size() * sizeof(T));
  return begin;
}

}  // namespace ringreduce::gpu
