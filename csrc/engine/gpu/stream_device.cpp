#include "engine/gpu/stream_device.h"

#include <algorithm>
#include <bit>

#include "core/partition.h"

namespace ringreduce {
namespace {

constexpr unsigned kThreads = 256;               // of a block, see kernels/gpu/accumulate.cu
constexpr std::size_t kBytesPerThread = 4 * 16;  // of each operand, the most that a thread takes at once: 4 packs

cuda::CUdeviceptr address(const void* pointer) { return reinterpret_cast<cuda::CUdeviceptr>(pointer); }

}  // namespace

void put_accumulate(const cuda::Stream& stream, const cuda::Function& kernel, const gpu::Accumulate& job,
                    std::size_t bytes, unsigned blocks) {
  const std::size_t worth = ceil_div(bytes, kThreads * kBytesPerThread);
  if (blocks == 0)
    blocks = static_cast<unsigned>(std::min<std::size_t>(worth, resident_blocks(*stream.device(), kernel, kThreads)));
  stream.launch(kernel, {blocks, kThreads}, job);
}

StreamDevice::StreamDevice(const cuda::Stream& stream,
                           std::function<const cuda::Function&(const std::string& row)> kernel)
    : stream_(stream), kernel_(std::move(kernel)) {}

std::byte* StreamDevice::take() {
  if (free_.empty()) {
    const cuda::RelaxedCapture relaxed;
    cells_.push_back(std::make_unique<cuda::DeviceMemory>(stream_.device(), bytes_));
    free_.push_back(reinterpret_cast<std::byte*>(cells_.back()->pointer()));
  }
  std::byte* const cell = free_.back();
  free_.pop_back();
  return cell;
}

void StreamDevice::resize(std::size_t bytes) {
  if (bytes <= bytes_) return;
  bytes_ = std::bit_ceil(bytes);  // so that all smaller cells together take no more than these
  free_.clear();
}

void StreamDevice::accumulate(const Call& call, std::span<void* const> dsts, std::span<const void* const> srcs,
                              std::size_t count, const Average& average) {
  gpu::Accumulate job{};
  std::copy(dsts.begin(), dsts.end(), job.dsts);
  job.copies = static_cast<std::int32_t>(dsts.size());
  job.factor = 1;
  job.divisor = average.divisor;
  job.scaled = -1;
  job.weighs = !average.weights.empty();
  if (srcs.size() <= gpu::kMostRanks) std::copy(average.weights.begin(), average.weights.end(), job.weights);
  launch(call, job, srcs, count);
}

void StreamDevice::scale(const Call& call, void* dst, const void* src, std::size_t count) {
  gpu::Accumulate job{};
  job.dsts[0] = dst;
  job.copies = 1;
  job.factor = call.factor;
  job.divisor = 1;
  launch(call, job, {&src, 1}, count);
}

void StreamDevice::launch(const Call& call, gpu::Accumulate& job, std::span<const void* const> srcs,
                          std::size_t count) {
  if (srcs.size() > gpu::kMostRanks)
    throw Error(ErrorKind::invalid_argument, "a step of the plan combines " + std::to_string(srcs.size()) +
                                                 " operands, a GPU kernel takes " + std::to_string(gpu::kMostRanks) +
                                                 "; choose another algorithm, such as ring");
  const gpu::Kernel kernel = gpu::kernel_for(call.dtype, call.reduce_op);
  std::copy(srcs.begin(), srcs.end(), job.srcs);
  job.n = static_cast<std::int32_t>(srcs.size());
  job.count = count * kernel.parts;
  put_accumulate(stream_, kernel_(kernel.name), job, count * size_of(call.dtype));
}

void StreamDevice::copy(void* dst, const void* src, std::size_t bytes) {
  stream_.copy(address(dst), address(src), bytes);
}

}  // namespace ringreduce
