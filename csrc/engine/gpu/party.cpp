#include "engine/gpu/party.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringreduce {
namespace {

constexpr std::uint64_t kBytesOfBlock = 64 * 1024;  // of a batch's values, for each block that computes them

struct Parties {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Party>> by_regions;
};

Parties& parties() {
  static Parties& all = *new Parties;  // never destroyed: groups may end later than statics
  return all;
}

gpu::Run on_host(const Party::Part& part) {
  gpu::Run run = part.run;
  run.program = part.program;
  return run;
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

// The batches of the ranks whose parts there are, in the order of turns.h.
void Party::put(const cuda::Stream& stream) const {
  const Part& any = parts_.begin()->second;
  const std::uint32_t rounds = gpu::rounds_of(on_host(any), any.program.channels[0]);
  for (std::uint32_t round = 0; round < rounds; ++round)
    for (std::size_t i = 0; i < any.turns->size(); ++i) {
      const Turn& turn = (*any.turns)[i];
      const auto found = parts_.find(turn.rank);
      if (found != parts_.end()) put(stream, found->second, turn.batch, {found->second.number, round, i});
    }
  for (const auto& [rank, part] : parts_)
    if (part.place != 0) stream.write_value(part.place, 0);
}

// What a batch waits for of ranks of other processes, then its launch.
void Party::put(const cuda::Stream& stream, const Part& part, std::uint32_t batch, const Place& place) const {
  using Kind = cuda::StreamValue::Kind;
  const auto round = static_cast<std::uint32_t>(place.round);
  const gpu::Run host = on_host(part);
  const gpu::LaneBatch at = gpu::lane_batch(host, 0, 0, round, batch);
  std::vector<cuda::StreamValue> values;
  gpu::for_each_wait(host, at, [&](const gpu::Wait& wait) {
    if (parts_.contains(static_cast<int>(wait.peer))) return;
    if (values.empty()) values.push_back({Kind::write, part.place, place.word()});
    const char* const word = host.regions[host.rank] + wait.offset;
    values.push_back({Kind::wait, reinterpret_cast<cuda::CUdeviceptr>(word), wait.value});
  });
  // What comes next may be another's turn.
  if (!values.empty() && parts_.size() > 1) values.push_back({Kind::write, part.place, 0});
  stream.take_values(values);
  gpu::Run run = part.run;
  run.round = round;
  run.batch = batch;
  run.mode = gpu::Mode::step;
  const std::uint64_t bytes = at.batch.steps * std::min(run.largest, run.slice) * run.element;
  const std::uint64_t most = resident_blocks(*device_, *part.kernel, gpu::kBlockThreads);
  const auto blocks = static_cast<unsigned>(std::clamp<std::uint64_t>(bytes / kBytesOfBlock, 1, most));
  stream.launch(*part.kernel, {blocks, gpu::kBlockThreads}, run);
}

}  // namespace ringreduce
