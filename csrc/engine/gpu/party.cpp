#include "engine/gpu/party.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringreduce {
namespace {

constexpr std::uint64_t kBytesOfBlock = 64 * 1024;  // of a value, for each block that computes it

std::uint32_t rounds_of(const Party::Part& part) {
  std::uint32_t most = 0;
  for (const Turn& turn : *part.turns)
    most = std::max(most, gpu::rounds_of(part.run, part.program.channels[turn.channel]));
  return most;
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
      char* const words = run.words[run.rank];
      gpu::for_each_wait(run, turn.channel, round, turn.step, [&](const gpu::Wait& wait) {
        if (parts_.contains(static_cast<int>(wait.peer))) return;
        if (!std::exchange(waits, true)) stream.write_value(part.place, Place{part.number, round, i}.word());
        stream.wait_value(reinterpret_cast<cuda::CUdeviceptr>(words + wait.offset), wait.value);
      });
      if (waits && parts_.size() > 1) stream.write_value(part.place, 0);  // what comes next may be another's turn
      run.program = part.run.program;
      run.channel = turn.channel;
      run.round = round;
      run.step = turn.step;
      run.mode = gpu::Mode::compute;
      const std::uint64_t bytes = std::min(run.largest, run.slice) * run.element;
      const auto most = static_cast<std::uint64_t>(2 * device_->multiprocessors());
      const auto blocks = static_cast<unsigned>(std::clamp<std::uint64_t>(bytes / kBytesOfBlock, 1, most));
      stream.launch(*part.kernel, {blocks, gpu::kBlockThreads}, run);
      run.mode = gpu::Mode::publish;
      stream.launch(*part.kernel, {1, gpu::kBlockThreads}, run);
    }
  for (const auto& [rank, part] : parts_)
    if (part.place != 0) stream.write_value(part.place, 0);
}

}  // namespace ringreduce
