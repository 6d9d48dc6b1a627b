// The engine of ranks whose GPUs are joined by NCCL: the same plans as everywhere, with the same bits, over ncclSend,
// ncclRecv and the accumulate kernels. Ranks may be on several hosts.
//
// Every communicator makes a lane: a stream, memory, and an Exchange (engine/exchange.h) of the channels that fall to
// it. A call forks from the caller's stream into its lanes and joins it again. The calls of an engine are in order in
// each lane, whatever streams they were made on. All of that can be captured in a CUDA graph; replays are to be ordered
// with the engine's other calls by their streams, as lanes' memory serves them all.
//
// For a call that does not end, NCCL tells neither the rank that it waits for nor that ranks made different calls. The
// thread that follows the calls breaks the group when one takes too long. The engine then aborts the communicators,
// which ends the work on the GPU.
//
// No deadlock, if NCCL's kernels of all lanes fit on the GPU together:
// 1. Every rank puts exchanges on its lanes in one order: by number, then by lane. Take the first of these that has not
//    ended on all of its ranks.
// 2. Each of its ranks has put it there: where NCCL holds up a host, as in a first message between two ranks, that host
//    waits for peers that come to the same exchange, or for earlier work.
// 3. On each GPU it has begun, since its lane has ended all earlier work. So all of its ranks are in it, and it ends.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/kernels.h"
#include "engine/exchange.h"
#include "engine/gpu/gpu_engine.h"
#include "engine/gpu/stream_device.h"
#include "nccl/communicator.h"

namespace ringreduce {

class NcclEngine final : public GpuEngine {
 public:
  // `communicators`: at least one, of the same ranks, equally many on all of them. `channels`: the most that a plan may
  // have. Only the options about slices count.
  NcclEngine(std::shared_ptr<Engine> host, std::shared_ptr<cuda::Kernels> kernels, cuda::DevicePtr device,
             std::vector<nccl::CommunicatorPtr> communicators, int channels, const Options& options);
  ~NcclEngine() override;  // leaves

  void enqueue(const Call& call, const Buffers& buffers, const cuda::Stream& stream) override;
  void fail(const Error& error) override;

  // Asks NCCL for errors. Makes no call to CUDA before it finds one, so it is allowed while somebody captures.
  void look() noexcept override;
  // Waits for the calls that were made, at most a few seconds, and ends what is left of them; frees the communicators.
  void leave() noexcept override;
  std::string hint() const override;

 private:
  struct Lane;

  void put(const Call& call, const Buffers& buffers, const Program& program, std::size_t slice_bytes,
           const cuda::Stream& stream);
  void join(std::size_t lanes, const cuda::Stream& stream);
  bool all_ended() const;
  void abort_communicators();

  const std::shared_ptr<cuda::Kernels> kernels_;
  const std::vector<nccl::CommunicatorPtr> communicators_;
  const cuda::DeviceMemory token_;  // what a barrier sums
  const cuda::Event forked_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::map<const Program*, Timetable> timetables_;
  std::timed_mutex calling_;  // while this rank calls NCCL
  std::once_flag freed_;      // the communicators
  std::atomic<bool> left_{false};
};

}  // namespace ringreduce
