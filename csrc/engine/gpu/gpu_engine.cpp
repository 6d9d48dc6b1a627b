#include "engine/gpu/gpu_engine.h"

#include <chrono>
#include <thread>

#include "engine/gpu/lookout.h"

namespace ringreduce {

Tally GpuEngine::run(const Call& call, const Buffers& buffers) {
  const cuda::Stream stream(device_);
  const Nanoseconds began = now();
  Lookout lookout(*this, true);
  enqueue(call, buffers, stream);
  while (!stream.done() && now() - began < call.timeout + 10 * kGrace) {
    if (now() - began > call.timeout + kGrace)
      fail(Error(ErrorKind::timeout, title(call, sequence()) + " did not end on " + device_->describe() + " of " +
                                         number(rank()) + " within " + in_seconds(call.timeout) + hint()));
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  lookout.look();
  throw_if_aborted();
  return {.waited = now() - began};
}

}  // namespace ringreduce
