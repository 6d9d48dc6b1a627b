#include "engine/gpu/flat_program.h"

#include <cstring>

namespace ringreduce::gpu {
namespace {

template <class T>
std::uint32_t count(const std::vector<T>& of) {
  return static_cast<std::uint32_t>(of.size());
}

FlatStep flat(const Step& step, std::uint32_t first_source, std::uint32_t first_destination) {
  return {.chunk = step.chunk,
          .input_position = step.read == Read::input ? step.read_position : -1,
          .output_position = step.read == Read::output ? step.read_position : -1,
          .write_position = step.write_position,
          .local_position = static_cast<std::uint32_t>(step.local_position),
          .send_index = step.send_index,
          .first_source = first_source,
          .sources = static_cast<std::uint32_t>(step.recv.size()),
          .first_destination = first_destination,
          .destinations = static_cast<std::uint32_t>(step.send.size()),
          .completes = step.completes};
}

}  // namespace

FlatProgram::FlatProgram(const Program& program) : channels_(count(program.channels)) {
  std::vector<FlatChannel> channels;
  std::vector<FlatStep> steps;
  std::vector<FlatSource> sources;
  std::vector<std::uint32_t> destinations, sends;
  for (const ChannelProgram& channel : program.channels) {
    channels.push_back({channel.share, channel.chunks, count(steps), count(channel.steps), count(sends)});
    sends.insert(sends.end(), channel.sends.begin(), channel.sends.end());
    for (const Step& step : channel.steps) {
      steps.push_back(flat(step, count(sources), count(destinations)));
      for (const Source& from : step.recv) sources.push_back({static_cast<std::uint32_t>(from.peer), from.send_index});
      for (int to : step.send) destinations.push_back(static_cast<std::uint32_t>(to));
    }
  }
  channels_at_ = append(channels);
  steps_at_ = append(steps);
  sources_at_ = append(sources);
  destinations_at_ = append(destinations);
  sends_at_ = append(sends);
}

FlatArrays FlatProgram::at(const void* base) const {
  const auto* const from = static_cast<const std::byte*>(base);
  return {reinterpret_cast<const FlatChannel*>(from + channels_at_),
          reinterpret_cast<const FlatStep*>(from + steps_at_), reinterpret_cast<const FlatSource*>(from + sources_at_),
          reinterpret_cast<const std::uint32_t*>(from + destinations_at_),
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
