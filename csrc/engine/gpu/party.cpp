#include "engine/gpu/party.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringreduce {
namespace {

constexpr std::uint64_t kBytesOfBlock = 64 * 1024;  // of a batch's values, for each block that computes them

gpu::Run on_host(const Party::Part& part) {
  gpu::Run run = part.run;
  run.program = part.program;
  return run;
}

}  // namespace

std::shared_ptr<Party> Party::of(const cuda::DevicePtr& device, const std::vector<cuda::Handle>& handles, int rank) {
  const cuda::Handle& own = handles[static_cast<std::size_t>(rank)];
  const auto on_it = [&](const cuda::Handle& other) {
    return std::memcmp(other.device, own.device, sizeof(own.device)) == 0;
  };
  return in_common<Party>(handles, ranks_here(handles, rank, on_it), device);
}

Party::Party(cuda::DevicePtr device, std::vector<int> ranks)
    : meeting_(std::move(ranks)), device_(device), stream_(device), end_(device) {
  for (int rank : meeting_.ranks()) begins_.try_emplace(rank, device);
}

void Party::enqueue(Engine& engine, const Part& part, const cuda::Stream& stream, const Meeting::Call& call) {
  const auto come = [&] { parts_.insert_or_assign(engine.rank(), part); };
  if (meeting_.ranks().size() == 1) {
    come();
    return put(stream);
  }
  if (stream.capturing())
    throw Error(ErrorKind::invalid_argument,
                call.title +
                    ": ranks that share a GPU in one process cannot capture calls in graphs; start a process for "
                    "each rank");
  stream.record(begins_.at(engine.rank()));
  meeting_.meet(engine, call, come, [&] {
    engine.throw_if_aborted();
    for (const auto& [rank, begin] : begins_) stream_.wait(begin);
    put(stream_);
    stream_.record(end_);
  });
  stream.wait(end_);
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

// Puts the waits of a batch for ranks of other processes in the stream, then its launch.
void Party::put(const cuda::Stream& stream, const Part& part, std::uint32_t batch, const Place& place) const {
  using Kind = cuda::StreamValue::Kind;
  const auto round = static_cast<std::uint32_t>(place.round);
  const gpu::Run host = on_host(part);
  const gpu::LaneBatch at = gpu::lane_batch(host, 0, 0, round, batch);
  std::vector<cuda::StreamValue> values;
  gpu::for_each_wait(host, at, [&](const gpu::Wait& wait) {
    if (parts_.contains(static_cast<int>(wait.peer))) return;
    if (values.empty()) values.push_back({Kind::write, part.place, place.word()});
    const char* const word = host.words[host.rank] + wait.offset;
    values.push_back({Kind::wait, reinterpret_cast<cuda::CUdeviceptr>(word), wait.value});
  });
  // The next batch may belong to another rank.
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
