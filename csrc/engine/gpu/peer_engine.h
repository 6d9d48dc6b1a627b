// The engine of ranks whose GPUs can access one another's memory: a kernel interprets the plan (interpreter.cuh), and
// what it sends lies in a region of its GPU's memory that all ranks of the group map (region.h). For ranks of one host.
//
// A rank that has its GPU to itself puts one kernel in the stream. Ranks that share a GPU put steps there (party.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/shared_memory.h"
#include "engine/gpu/flat_program.h"
#include "engine/gpu/gpu_engine.h"
#include "engine/gpu/party.h"
#include "engine/gpu/run.h"

namespace ringreduce {

class PeerEngine final : public GpuEngine {
 public:
  // The same on all ranks.
  struct Shape {
    std::uint32_t lanes = 1;  // for all channels of a plan together
    bool one_lane = false;    // a channel has only one: where any rank takes steps
    std::uint32_t depth = 8;  // slots of a lane, a power of two
    std::uint32_t slot_bytes = 128 * 1024;
  };
  static std::uint64_t region_bytes(int ranks, const Shape& shape);

  // How this rank's GPU takes a call. Ranks that share a GPU must take steps; that they run is for tests, on a GPU that
  // has room for all of them at once.
  enum class Mode { run, steps };
  // The mode for `rank`, whose regions these are.
  static Mode mode_for(const std::vector<cuda::Handle>& handles, int rank);

  // `own` is this rank's region, of zeros, handles[r] that of rank r. Throws Error(system) that says why a region
  // cannot be accessed, or Error(invalid_argument).
  PeerEngine(std::shared_ptr<Engine> host, std::shared_ptr<cuda::Kernels> kernels, cuda::DevicePtr device,
             std::shared_ptr<const cuda::OwnMemory> own, const std::vector<cuda::Handle>& handles, const Shape& shape,
             Mode mode, const Options& options);

  void enqueue(const Call& call, const Buffers& buffers, const cuda::Stream& stream) override;
  void look() noexcept override;
  bool quiet() override;

 private:
  // A rank's part of a plan, on the GPU and for the host.
  struct Loaded {
    Loaded(const cuda::DevicePtr& device, const Program& program) : flat(program), image(device, flat.image().size()) {}

    const gpu::FlatProgram flat;
    const cuda::DeviceMemory image;
    std::vector<Turn> turns;  // of ranks that take steps

    gpu::FlatArrays on_gpu() const { return flat.at(reinterpret_cast<const void*>(image.pointer())); }
    gpu::FlatArrays on_host() const { return flat.at(flat.image().data()); }
  };

  const Loaded& load(const Call& call, const Choice& choice, const Program& program);
  gpu::Run run_of(const Call& call, const Buffers& buffers, const Choice& choice, const Program& program) const;
  void remember(std::uint64_t fingerprint, std::string title);
  void tell(const gpu::Report& report);
  void stop_waiting();

  const std::shared_ptr<cuda::Kernels> kernels_;
  const std::shared_ptr<const cuda::OwnMemory> own_;
  gpu::RegionShape shape_;
  const bool one_lane_;
  std::vector<cuda::PeerMapping> mappings_;
  std::vector<char*> regions_;  // per rank
  cuda::HostMemory report_, words_;
  const cuda::Stream urgent_;           // for what must not wait behind calls
  const std::shared_ptr<Party> party_;  // of ranks that take steps
  std::mutex mutex_, titles_mutex_;
  std::map<const Program*, Loaded> loaded_;
  std::deque<std::pair<std::uint64_t, std::string>> titles_;  // of the latest calls, by fingerprint
  const cuda::Event last_;                                    // the end of the latest call that is in no capture
  cuda::CUstream last_stream_ = nullptr;
  bool told_ = false;
};

}  // namespace ringreduce
