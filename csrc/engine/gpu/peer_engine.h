// The engine of ranks whose GPUs can access one another's memory: a kernel interprets the plan (interpreter.cuh), and
// what it sends lies in a region of its GPU's memory that all ranks of the group map (region.h). For ranks of one host.
//
// The thread that looks after the engine calls no function of CUDA (lookout.h). It reads how far a call is, and what
// the call waits for, from memory of the host: `report_`, `place_`, and the words of a rank that takes steps.
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
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/shared_memory.h"
#include "engine/gpu/flat_program.h"
#include "engine/gpu/gpu_engine.h"
#include "engine/gpu/meeting.h"
#include "engine/gpu/party.h"
#include "engine/gpu/run.h"

namespace ringreduce {

class PeerEngine final : public GpuEngine {
 public:
  // The same on all ranks.
  struct Shape {
    // For all channels of a plan together. Where any rank takes steps, one, which takes the channels in turn.
    std::uint32_t lanes = 1;
    std::uint32_t depth = 8;  // slots of a lane, a power of two
    std::uint32_t slot_bytes = 128 * 1024;
  };
  static std::uint64_t region_bytes(int ranks, const Shape& shape);

  // How this rank's GPU takes a call. Ranks that share a GPU may only run if their streams differ and the lanes of all
  // of them have a multiprocessor each; ranks in different processes then still take turns by the GPU's time slices.
  enum class Mode { run, steps };
  // How many ranks, whose regions these are, have the GPU of `rank`.
  static int ranks_on_gpu(const std::vector<cuda::Handle>& handles, int rank);

  struct Setup {
    std::shared_ptr<Engine> host;
    std::shared_ptr<cuda::Kernels> kernels;
    cuda::DevicePtr device;
    std::shared_ptr<const cuda::OwnMemory> own;  // this rank's region, of zeros
    std::vector<cuda::Handle> handles;           // of the regions, by rank
    Shape shape;
    std::vector<Mode> modes;  // how ranks take calls
    Options options;
  };
  // Throws Error(system) that says why a region cannot be accessed, or Error(invalid_argument).
  explicit PeerEngine(const Setup& setup);

  void enqueue(const Call& call, const Buffers& buffers, const cuda::Stream& stream) override;
  void throw_if_aborted() const override;
  void look() noexcept override;
  bool finds_lost_peers() const override { return true; }
  bool idle() const override;
  bool quiet() override;

 private:
  // A rank's part of a plan, on the GPU and for the host.
  struct Loaded {
    Loaded(const cuda::DevicePtr& device, gpu::FlatProgram program)
        : flat(std::move(program)), image(device, flat.image().size()) {}

    const gpu::FlatProgram flat;
    const cuda::DeviceMemory image;
    std::vector<Turn> turns;  // if ranks take steps

    gpu::FlatArrays on_gpu() const { return flat.at(reinterpret_cast<const void*>(image.pointer())); }
    gpu::FlatArrays on_host() const { return flat.at(flat.image().data()); }
  };

  void put(const Call& call, std::uint64_t seq, const std::string& what, const Buffers& buffers,
           const cuda::Stream& stream);
  void map(const std::vector<cuda::Handle>& handles, const std::vector<Mode>& modes);
  std::unique_ptr<const Loaded> load(const Call& call, const Choice& choice, const Program& program) const;
  const cuda::Function& load_kernel(const std::string& row, const Loaded& loaded) const;
  void prepare(const Call& call, const Choice& choice, const std::string& row, const Meeting::Call& meeting);
  gpu::Run run_of(const Call& call, const Buffers& buffers, const Choice& choice, const Program& program) const;

  // A call that is in a stream or in a graph.
  struct Known {
    std::uint64_t number, fingerprint;
    std::string title;
    Nanoseconds timeout;
    bool captured;
    const Loaded* loaded;
  };

  gpu::Report& report() const { return *reinterpret_cast<gpu::Report*>(report_.data()); }
  std::uint64_t place() const;
  void remember(Known call);
  template <class Is>
  std::optional<Known> find(Is is) const;
  void tell() const;
  Error timed_out(const std::string& own, int peer, const std::string& where) const;
  Error gone_for_good(const std::string& own, int peer, const std::string& where) const;
  bool broken() const;
  void watch();
  void watch_kernel();
  void watch_stream(Nanoseconds time);
  bool is_lost(int peer);
  std::string said(const std::optional<Known>& call) const;
  std::uint64_t* own_word(std::uint64_t offset) const;
  void stop_waiting();

  const std::shared_ptr<cuda::Kernels> kernels_;
  const std::shared_ptr<const cuda::OwnMemory> own_;
  gpu::RegionShape shape_;
  const bool one_lane_;
  const cuda::DeviceMemory arrived_;
  std::vector<cuda::PeerMapping> mappings_;
  std::map<int, cuda::SharedWords> shared_words_;  // of ranks that take steps
  std::vector<char*> words_, regions_;             // per rank
  cuda::HostMemory report_, place_;
  std::optional<cuda::HostMemory> copied_words_;  // of a rank that runs
  const cuda::Stream urgent_;                     // for what must not wait behind calls
  const std::shared_ptr<Meeting> household_;      // the ranks of this process
  const std::shared_ptr<Party> party_;            // of ranks that take steps
  std::mutex mutex_;
  std::map<const Program*, std::unique_ptr<const Loaded>> loaded_;
  std::map<std::string, const cuda::Function*> kernels_loaded_;  // by row
  const cuda::Event last_;                                       // the end of the latest call that is in no capture

  mutable std::mutex known_mutex_, tell_mutex_;
  std::deque<Known> latest_, captured_;
  mutable bool told_ = false;
  std::atomic<int> lost_ = -1;  // for whom a kernel waited in vain, and was told to give up

  // The watcher's last look: when it was, and what it saw.
  Nanoseconds watched_ = 0, since_ = 0;
  std::uint64_t seen_ = 0;
  std::vector<int> gone_;
};

}  // namespace ringreduce
