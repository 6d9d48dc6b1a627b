#include "stress/plans.h"

#include <algorithm>
#include <utility>

namespace ringreduce::stress {
namespace {

struct PlanStep {
  int chunk = 0;
  bool reads = false;  // the input
  bool writes = false;
  int inputs = 1;  // of how many ranks the value has the input
  bool returned = false;
  std::vector<std::pair<int, int>> receives = {};  // peer, send index
  std::vector<int> sends = {};                     // peers
};
using Steps = std::vector<PlanStep>;

struct Channel {
  int share;
  int chunks;
  std::vector<Steps> programs;  // per rank
};

void lower_program(Lowered& words, int rank, const Steps& steps, const std::vector<int>& phases) {
  const auto count = [](auto n) { return static_cast<std::int32_t>(n); };
  const auto sends = [](const PlanStep& step) { return !step.sends.empty(); };
  words.insert(words.end(), {count(steps.size()), count(std::count_if(steps.begin(), steps.end(), sends))});
  for (std::size_t at = 0; at < steps.size(); ++at) {
    const PlanStep& step = steps[at];
    auto receives = step.receives;
    std::sort(receives.begin(), receives.end());
    const auto before = [&](const auto& receive) { return receive.first < rank; };
    const auto local = step.reads ? std::count_if(receives.begin(), receives.end(), before) : -1;
    words.insert(words.end(),
                 {step.chunk, step.reads, step.writes, step.inputs, step.returned, phases[at], count(local)});
    words.push_back(count(receives.size()));
    for (const auto& [peer, send_index] : receives) words.insert(words.end(), {peer, send_index});
    words.push_back(count(step.sends.size()));
    words.insert(words.end(), step.sends.begin(), step.sends.end());
  }
}

// Per rank and step, the first phase after all that the step takes was sent, and not before the step before it.
std::vector<std::vector<int>> phases_of(const std::vector<Steps>& programs) {
  std::vector<std::vector<int>> phases, sent(programs.size());
  for (const Steps& steps : programs) phases.emplace_back(steps.size());
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t rank = 0; rank < programs.size(); ++rank) {
      std::vector<int> sends;
      int phase = 0;
      for (std::size_t at = 0; at < programs[rank].size(); ++at) {
        for (const auto& [peer, index] : programs[rank][at].receives) {
          const auto& theirs = sent[static_cast<std::size_t>(peer)];
          if (static_cast<std::size_t>(index) < theirs.size())
            phase = std::max(phase, theirs[static_cast<std::size_t>(index)] + 1);
        }
        phases[rank][at] = phase;
        if (!programs[rank][at].sends.empty()) sends.push_back(phase);
      }
      changed |= sends != sent[rank];
      sent[rank] = sends;
    }
  }
  return phases;
}

Lowered lower(int size, const std::vector<Channel>& channels) {
  int total = 0, begin = 0;
  for (const Channel& channel : channels) total += channel.share;
  Lowered words{size, static_cast<std::int32_t>(channels.size())};
  for (const Channel& channel : channels) {
    words.insert(words.end(), {begin, begin + channel.share, total, channel.chunks});
    begin += channel.share;
    const auto phases = phases_of(channel.programs);
    for (int rank = 0; rank < size; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      lower_program(words, rank, channel.programs[r], phases[r]);
    }
  }
  return words;
}

// The other ranks, the next one first.
std::vector<int> others(int rank, int size) {
  std::vector<int> result;
  for (int hop = 1; hop < size; ++hop) result.push_back((rank + hop) % size);
  return result;
}

template <class Program>
std::vector<Steps> each_rank(int size, Program&& program) {
  std::vector<Steps> programs;
  for (int rank = 0; rank < size; ++rank) programs.push_back(program(rank));
  return programs;
}

// The first size - 1 steps and the one after them reduce chunk by chunk, that one and the rest hand the results round.
Channel ring_channel(int size, int share, bool reversed) {
  const auto at = [=](int position) {  // the rank there
    const int p = (position + 2 * size) % size;
    return reversed ? size - 1 - p : p;
  };
  return {share, size, each_rank(size, [&](int rank) {
            const int position = at(rank);  // `at` is its own inverse
            const int hops = 2 * size - 1;
            Steps steps;
            for (int hop = 0; hop < hops; ++hop) {
              const bool reduces = hop < size;
              PlanStep step{.chunk = at(position - hop - 1), .reads = reduces, .writes = hop >= size - 1};
              step.inputs = std::min(hop + 1, size);
              if (hop > 0) step.receives = {{at(position - 1), hop - 1}};
              if (hop < hops - 1) step.sends = {at(position + 1)};
              steps.push_back(step);
            }
            return steps;
          })};
}

}  // namespace

Lowered one_shot(int size) {
  return lower(size, {{1, 1, each_rank(size, [&](int rank) {
                         const std::vector<int> peers = others(rank, size);
                         PlanStep publish{.reads = true, .sends = peers};
                         PlanStep combine{.reads = true, .writes = true, .inputs = size};
                         for (int peer : peers) combine.receives.emplace_back(peer, 0);
                         return Steps{publish, combine};
                       })}});
}

Lowered two_shot(int size) {
  return lower(
      size,
      {{1, size, each_rank(size, [&](int rank) {
          const std::vector<int> peers = others(rank, size);
          Steps steps;
          for (int owner : peers) steps.push_back({.chunk = owner, .reads = true, .returned = true, .sends = {owner}});
          PlanStep combine{.chunk = rank, .reads = true, .writes = true, .inputs = size};
          for (int peer : peers) combine.receives.emplace_back(peer, (rank - peer + size) % size - 1);
          combine.sends = peers;
          steps.push_back(combine);
          for (int owner : peers)
            steps.push_back(
                {.chunk = owner, .writes = true, .inputs = size, .returned = true, .receives = {{owner, size - 1}}});
          return steps;
        })}});
}

Lowered ring(int size) { return lower(size, {ring_channel(size, 1, false)}); }

Lowered two_rings(int size) { return lower(size, {ring_channel(size, 2, false), ring_channel(size, 1, true)}); }

Lowered broadcast(int size) {
  return lower(size, {{1, 1, each_rank(size, [&](int rank) {
                         if (rank == 0) return Steps{{.reads = true, .writes = true, .sends = others(0, size)}};
                         return Steps{{.writes = true, .receives = {{0, 0}}}};
                       })}});
}

}  // namespace ringreduce::stress
