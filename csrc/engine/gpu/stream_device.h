// The `Device` of an Exchange on a CUDA stream: what it is told to do happens there later, in order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "engine/exchange.h"
#include "kernels/gpu/accumulate.h"

namespace ringreduce {

// Puts an accumulate kernel (kernels/gpu/accumulate.cu) in `stream`, for a result of `bytes` bytes, at least 1. With as
// many blocks as are worth it and as the GPU runs at once, or `blocks`.
void put_accumulate(const cuda::Stream& stream, const cuda::Function& kernel, const gpu::Accumulate& job,
                    std::size_t bytes, unsigned blocks = 0);

class StreamDevice final : public Device {
 public:
  // `stream` must outlive this object, and be the only one whose work is given its cells. `kernel` gives the accumulate
  // kernel of a row of csrc/kernels/gpu.
  StreamDevice(const cuda::Stream& stream, std::function<const cuda::Function&(const std::string& row)> kernel);

  // Cells stay where they are as long as this object lives: graphs that were captured use them.
  std::byte* take() override;
  void give(std::byte* cell) override { free_.push_back(cell); }
  void resize(std::size_t bytes) override;

  // Throw invalid_argument for more operands than a kernel takes.
  void accumulate(const Call& call, std::span<void* const> dsts, std::span<const void* const> srcs, std::size_t count,
                  const Average& average) override;
  void scale(const Call& call, void* dst, const void* src, std::size_t count) override;
  void copy(void* dst, const void* src, std::size_t bytes) override;

 private:
  void launch(const Call& call, gpu::Accumulate& job, std::span<const void* const> srcs, std::size_t count);

  const cuda::Stream& stream_;
  const std::function<const cuda::Function&(const std::string&)> kernel_;
  std::size_t bytes_ = 0;
  std::vector<std::unique_ptr<cuda::DeviceMemory>> cells_;  // of all sizes there ever were
  std::vector<std::byte*> free_;                            // of `bytes_` bytes
};

}  // namespace ringreduce
