// The ranks of a group that live in one process and share a GPU: one of them puts the batches of all in one stream.
//
// See turns.h for why. They meet in enqueue(): whoever comes last has everybody's part and puts it there, so none
// returns before. (Most parties have a single rank, whose stream takes the batches itself.)
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "cuda/shared_memory.h"
#include "engine/engine.h"
#include "engine/gpu/meeting.h"
#include "engine/gpu/run.h"
#include "engine/gpu/turns.h"

namespace ringreduce {

class Party {
 public:
  // A rank's share of a call.
  struct Part {
    gpu::Run run;
    gpu::FlatArrays program;  // run.program where the host can read it
    const cuda::Function* kernel;
    const std::vector<Turn>* turns;
    std::uint64_t number;     // of the call
    cuda::CUdeviceptr place;  // of a word for a Place; 0 if it need not be known
  };

  // Where the stream waits for ranks of other processes, or last waited: the number of the call, the round, and the
  // index of the turn. Each number is cut to its bits in the word. The word is 0 between calls.
  struct Place {
    std::uint64_t call, round, turn;

    static constexpr unsigned kBits = 20;
    static constexpr std::uint64_t kMask = (std::uint64_t{1} << kBits) - 1;
    static Place of(std::uint64_t word) { return {word >> 2 * kBits, (word >> kBits) & kMask, (word & kMask) - 1}; }
    std::uint64_t word() const { return call << 2 * kBits | (round & kMask) << kBits | ((turn + 1) & kMask); }
    // Whether that is the place's call.
    bool is_of(std::uint64_t number) const { return (number << 2 * kBits) >> 2 * kBits == call; }
  };

  // That of `rank` in the group whose ranks have the regions `handles`: all whose region is on the same GPU and in the
  // same process.
  static std::shared_ptr<Party> of(const cuda::DevicePtr& device, const std::vector<cuda::Handle>& handles, int rank);

  Party(cuda::DevicePtr device, std::vector<int> ranks);

  // Puts a call in a stream: `stream` goes on when it has ended. All members make the same calls; a member waits here
  // for the others. Throws what `engine`, that of the calling rank, has broken with.
  void enqueue(Engine& engine, const Part& part, const cuda::Stream& stream, const Meeting::Call& call);

 private:
  void put(const cuda::Stream& stream) const;
  void put(const cuda::Stream& stream, const Part& part, std::uint32_t batch, const Place& place) const;

  Meeting meeting_;
  const cuda::DevicePtr device_;
  const cuda::Stream stream_;
  std::map<int, cuda::Event> begins_;  // per rank: where its stream came to the call
  const cuda::Event end_;
  std::map<int, Part> parts_;  // of the call that is being put together
};

}  // namespace ringreduce
