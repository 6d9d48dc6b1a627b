#include "engine/gpu/trial.h"

#include <vector>

namespace ringreduce {

void TrialHost::fail(const Error& error) {
  std::lock_guard lock(mutex_);
  if (!error_) error_ = error;
}

void TrialHost::throw_if_aborted() const {
  {
    std::lock_guard lock(mutex_);
    if (error_) throw Error(*error_);
  }
  group_->throw_if_aborted();
}

void try_out(GpuEngine& engine, Nanoseconds timeout) {
  constexpr std::size_t kCounts[] = {1, 100'003};
  const std::size_t most = kCounts[1], bytes = most * sizeof(float);
  const cuda::HostMemory host(engine.device(), bytes);
  const cuda::DeviceMemory memory(engine.device(), bytes);
  const cuda::Stream stream(engine.device());
  auto* const values = reinterpret_cast<float*>(host.data());
  // Small whole numbers, so that sums are exact: rank r has (r + 1) * (i % 7) at place i.
  const auto at = [](std::size_t i, int factor) { return static_cast<float>(factor * static_cast<int>(i % 7)); };
  const Nanoseconds deadline = now() + timeout;
  const int all = engine.size() * (engine.size() + 1) / 2;
  for (const std::size_t count : kCounts) {
    for (std::size_t i = 0; i < count; ++i) values[i] = at(i, engine.rank() + 1);
    stream.copy(memory.pointer(), host.pointer(), bytes);
    stream.synchronize();
    Call call;
    call.operation = Operation::all_reduce;
    call.dtype = DType::float32;
    call.count = call.largest = count;
    call.timeout = deadline - now();
    auto* const data = reinterpret_cast<std::byte*>(memory.pointer());
    engine.run(call, {{{&data, 1}, {&count, 1}}, {{&data, 1}, {&count, 1}}});
    stream.copy(host.pointer(), memory.pointer(), bytes);
    stream.synchronize();
    for (std::size_t i = 0; i < count; ++i)
      if (values[i] != at(i, all))
        throw Error(ErrorKind::system,
                    "a sum over the GPUs of the group is wrong: at " + std::to_string(i) + " of " +
                        std::to_string(count) + " it is " + std::to_string(values[i]) + " instead of " +
                        std::to_string(at(i, all)) +
                        "; access between the GPUs does not work (ACS or IOMMU settings may be why)");
  }
}

}  // namespace ringreduce
