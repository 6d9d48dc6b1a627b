// The kernels of probe.py. tests/stand_in/probe_kernels.cpp has them for the stand-in.
#include "engine/gpu/memory.cuh"

namespace ringreduce::gpu {

// Two blocks, of one launch or of two, which hand a word to each other.
struct Probe {
  std::uint64_t *mine, *theirs;  // of the first block; the other way round for the second
  std::uint64_t rounds;
  std::uint64_t* elapsed;       // nanoseconds, by block
  std::uint32_t stage, second;  // second: 1 if block 0 is the second of the two
};

// What a step of the interpreter does for one peer, stage by stage: 0, relaxed stores and loads; 1, release and
// acquire; 2, with all threads of the block meeting between them; 3, with as many meetings as a step has. Gives up
// after ten seconds.
template <class Meet>
RINGREDUCE_BOTH void hand_over(const Probe& probe, std::uint32_t block, bool alone, Meet meet) {
  const bool second = (probe.second ^ block) != 0;
  std::uint64_t* const mine = block == 0 ? probe.mine : probe.theirs;
  std::uint64_t* const theirs = block == 0 ? probe.theirs : probe.mine;
  const std::uint64_t began = nanoseconds();
  bool over = false;
  const auto send = [&](std::uint64_t round) {
    if (probe.stage >= 2) meet();
    if (alone && probe.stage == 0) store_relaxed(theirs, round);
    if (alone && probe.stage > 0) store_release(theirs, round);
    if (probe.stage >= 3) meet();
  };
  const auto receive = [&](std::uint64_t round) {
    if (probe.stage >= 3) meet();
    for (std::uint32_t looks = 1; alone && !over; ++looks) {
      if ((probe.stage == 0 ? load_relaxed(mine) : load_acquire(mine)) >= round) break;
      pause();
      over = looks % 1024 == 0 && nanoseconds() - began > 10'000'000'000;
    }
    if (probe.stage >= 2) meet();
  };
  for (std::uint64_t round = 1; round <= probe.rounds && !over; ++round) {
    if (!second) send(round);
    receive(round);
    if (second) send(round);
  }
  if (alone) probe.elapsed[block] = over ? ~std::uint64_t{0} : nanoseconds() - began;
}

}  // namespace ringreduce::gpu

#if defined(__CUDACC__)
extern "C" __global__ void probe_hand_over(const ringreduce::gpu::Probe probe) {
  ringreduce::gpu::hand_over(probe, blockIdx.x, threadIdx.x == 0, [] { __syncthreads(); });
}

extern "C" __global__ void probe_nothing(const ringreduce::gpu::Probe) {}
#endif
