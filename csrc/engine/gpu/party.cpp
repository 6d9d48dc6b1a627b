#include "engine/gpu/party.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringreduce {
namespace {

constexpr std::uint64_t kBytesOfBlock = 64 * 1024;  // of a value, for each block that computes it

struct Parties {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Party>> by_regions;
};

Parties& parties() {
  static Parties& all = *new Parties;  // never destroyed: groups may end later than statics
  return all;
}

std::uint32_t rounds_of(const Party::Part& part) {
  std::uint32_t most = 0;
  for (const Turn& turn : *part.turns)
    most = std::max(most, gpu::rounds_of(part.run, part.program.channels[turn.channel]));
  return most;
}

}  // namespace

std::shared_ptr<Party> Party::of(const cuda::DevicePtr& device, const std::vector<cuda::Handle>& handles, int rank) {
  const cuda::Handle& own = handles[static_cast<std::size_t>(rank)];
  std::vector<int> ranks;
  std::string key;
  for (std::size_t r = 0; r < handles.size(); ++r) {
    if (handles[r].process != own.process || std::memcmp(handles[r].device, own.device, sizeof(own.device)) != 0)
      continue;
    ranks.push_back(static_cast<int>(r));
    key += std::to_string(r) + ":" + std::to_string(handles[r].pointer) + " ";
  }
  if (ranks.size() == 1) return std::make_shared<Party>(device, std::move(ranks));
  std::lock_guard lock(parties().mutex);
  std::erase_if(parties().by_regions, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<Party>& known = parties().by_regions[key];
  auto party = known.lock();
  if (party == nullptr) known = party = std::make_shared<Party>(device, std::move(ranks));
  return party;
}

Party::Party(cuda::DevicePtr device, std::vector<int> ranks)
    : ranks_(std::move(ranks)), device_(device), stream_(device), end_(device) {
  for (int rank : ranks_) begins_.try_emplace(rank, device);
}

void Party::enqueue(Engine& engine, const Part& part, const cuda::Stream& stream, const std::string& title,
                    Nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  parts_.emplace(engine.rank(), part);
  if (ranks_.size() == 1) {
    put(stream);
    parts_.clear();
    return;
  }
  if (stream.capturing()) {
    parts_.erase(engine.rank());
    throw Error(ErrorKind::invalid_argument,
                title +
                    ": ranks that share a GPU in one process cannot capture calls in graphs; start a process for "
                    "each rank");
  }
  stream.record(begins_.at(engine.rank()));
  if (parts_.size() < ranks_.size()) {
    wait_for_others(engine, lock, title, timeout);
  } else {
    for (const auto& [rank, other] : parts_)
      if (other.run.fingerprint != part.run.fingerprint)
        engine.fail(Error(ErrorKind::mismatch,
                          title + ": ranks of the group made different calls: " + engine.describe(rank) +
                              " did not call what rank " + std::to_string(engine.rank()) +
                              " did. All ranks of a group must make the same calls in the same order",
                          rank));
    engine.throw_if_aborted();
    for (const auto& [rank, begin] : begins_) stream_.wait(begin);
    put(stream_);
    stream_.record(end_);
    parts_.clear();
    ++calls_;
    put_.notify_all();
  }
  stream.wait(end_);
}

void Party::wait_for_others(Engine& engine, std::unique_lock<std::mutex>& lock, const std::string& title,
                            Nanoseconds timeout) {
  const std::uint64_t call = calls_;
  const Nanoseconds deadline = now() + timeout;
  while (calls_ == call) {
    put_.wait_for(lock, std::chrono::milliseconds(5));
    if (calls_ != call) return;
    const std::vector<int> gone = engine.gone();
    const auto find_absent = [&](auto is) {
      return std::find_if(ranks_.begin(), ranks_.end(), [&](int r) { return !parts_.contains(r) && is(r); });
    };
    if (const auto lost = find_absent([&](int r) { return std::find(gone.begin(), gone.end(), r) != gone.end(); });
        lost != ranks_.end()) {
      engine.fail(Error(ErrorKind::peer_lost,
                        title + ": rank " + std::to_string(engine.rank()) + " waited for " + engine.describe(*lost) +
                            ", which shares its process and GPU and is gone, to make the call",
                        *lost));
    } else if (now() >= deadline) {
      const int absent = *find_absent([](int) { return true; });
      engine.fail(Error(ErrorKind::timeout,
                        title + ": rank " + std::to_string(engine.rank()) + " waited " +
                            std::to_string(timeout / kSecond) + " s for " + engine.describe(absent) +
                            ", which shares its process and GPU, to make the call",
                        absent));
    }
    try {
      engine.throw_if_aborted();
    } catch (...) {
      parts_.erase(engine.rank());
      throw;
    }
  }
}

// The steps of the ranks whose parts there are, in the order of turns.h.
void Party::put(const cuda::Stream& stream) const {
  const Part& any = parts_.begin()->second;
  const std::uint32_t rounds = rounds_of(any);
  for (std::uint32_t round = 0; round < rounds; ++round)
    for (std::size_t i = 0; i < any.turns->size(); ++i) {
      const Turn& turn = (*any.turns)[i];
      const auto found = parts_.find(turn.rank);
      if (found == parts_.end()) continue;
      const Part& part = found->second;
      gpu::Run run = part.run;
      run.program = part.program;
      if (round >= gpu::rounds_of(run, part.program.channels[turn.channel])) continue;
      bool waits = false;  // for ranks of other processes
      char* const region = run.regions[run.rank];
      gpu::for_each_wait(run, turn.channel, round, turn.step, [&](const gpu::Wait& wait) {
        if (parts_.contains(static_cast<int>(wait.peer))) return;
        if (!std::exchange(waits, true)) stream.write_value(part.place, Place{part.number, round, i}.word());
        stream.wait_value(reinterpret_cast<cuda::CUdeviceptr>(region + wait.offset), wait.value);
      });
      if (waits && parts_.size() > 1) stream.write_value(part.place, 0);  // what comes next may be another's turn
      run.program = part.run.program;
      run.channel = turn.channel;
      run.round = round;
      run.step = turn.step;
      run.mode = gpu::Mode::compute;
      const std::uint64_t bytes = std::min(run.largest, run.slice) * run.element;
      const std::uint64_t most = resident_blocks(*device_, *part.kernel, gpu::kBlockThreads);
      const auto blocks = static_cast<unsigned>(std::clamp<std::uint64_t>(bytes / kBytesOfBlock, 1, most));
      stream.launch(*part.kernel, {blocks, gpu::kBlockThreads}, run);
      run.mode = gpu::Mode::publish;
      stream.launch(*part.kernel, {1, gpu::kBlockThreads}, run);
    }
  for (const auto& [rank, part] : parts_)
    if (part.place != 0) stream.write_value(part.place, 0);
}

}  // namespace ringreduce
