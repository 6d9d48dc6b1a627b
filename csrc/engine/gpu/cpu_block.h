// A thread block of which one CPU thread plays all the threads, one after the other: for tests of the interpreter.
#pragma once

#include "kernels/gpu/job.h"

namespace ringreduce::gpu {

class CpuBlock {
 public:
  CpuBlock(std::uint32_t index, std::uint32_t blocks, std::uint32_t threads)
      : index_(index), blocks_(blocks), threads_(threads) {}

  std::uint32_t index() const { return index_; }
  std::uint32_t blocks() const { return blocks_; }
  Accumulate& job() { return job_; }
  void meet() const {}

  template <class F>
  bool every(std::uint32_t n, F f) const {
    bool all = true;
    for (std::uint32_t i = 0; i < n; ++i) all = f(i) && all;
    return all;
  }
  template <class F>
  void each(std::uint32_t n, F f) const {
    for (std::uint32_t i = 0; i < n; ++i) f(i);
  }
  template <class F>
  void work(F f) const {
    for (std::uint32_t thread = 0; thread < threads_; ++thread) f(thread, threads_);
  }
  template <class F>
  void alone(F f) const {
    f();
  }

 private:
  std::uint32_t index_, blocks_, threads_;
  Accumulate job_;
};

}  // namespace ringreduce::gpu
