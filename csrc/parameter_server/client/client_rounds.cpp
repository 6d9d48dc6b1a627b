// Reading whole rounds: many blocks, all as they were after the same update. Possible because each block keeps its two
// latest versions.
#include <cstring>

#include "parameter_server/client/client-inl.h"

namespace ringreduce::parameter_server {

std::uint64_t Client::round_of(const std::vector<Part>& parts) {
  const Lock lock(mutex_);
  take_replies();
  look_for_ended();
  std::uint64_t round = UINT64_MAX;
  for (const Part& part : parts) {
    if (!peer(part.server).alive) throw_lost(part.server);
    round = std::min(round, words_of(part).published.load(std::memory_order_acquire));
  }
  return round == 0 || parts.empty() ? 0 : round - 1;
}

std::uint64_t Client::read_round(const std::vector<Part>& parts, const std::vector<std::byte*>& places,
                                 Nanoseconds timeout) {
  if (places.size() != parts.size()) throw Error(ErrorKind::invalid_argument, "there must be a place for each part");
  std::uint64_t round = 0;  // as BlockWords::published
  const auto overtaken = [&](const Part& part) {
    return words_of(part).begun.load(std::memory_order_relaxed) >= round + 2;  // this update writes the same buffer
  };
  // `round` is the latest version that all blocks have. A block with one more update still keeps it, until the update
  // after that begins.
  const auto copied = [&] {
    take_replies();
    look_for_ended();
    round = UINT64_MAX;
    for (const Part& part : parts) {
      if (!peer(part.server).alive) throw_lost(part.server);
      round = std::min(round, words_of(part).published.load(std::memory_order_acquire));
    }
    if (round == 0 || std::any_of(parts.begin(), parts.end(), overtaken)) return false;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      std::memcpy(places[i], buffer(const_cast<BlockWords*>(&words_of(parts[i])), round, parts[i].bytes),
                  parts[i].bytes);
      fence(std::memory_order_acquire);
      if (overtaken(parts[i])) return false;
    }
    return true;
  };
  Hold hold(*this);
  if (!wait_until(hold, timeout, copied))
    throw Error(ErrorKind::timeout, round == 0 ? "a key has no value yet"
                                               : "no whole round could be copied in time: updates always overtook it");
  return round - 1;
}

}  // namespace ringreduce::parameter_server
