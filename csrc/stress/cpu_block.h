// Thread blocks on a CPU, for tests of the interpreter: one thread that plays all of a block's, or a thread for each.
#pragma once

#include <atomic>
#include <barrier>

#include "engine/gpu/interpreter.cuh"

namespace ringreduce::gpu {

// One CPU thread plays all threads, one after the other.
class CpuBlock {
 public:
  CpuBlock(std::uint32_t index, std::uint32_t blocks, std::uint32_t threads)
      : index_(index), blocks_(blocks), threads_(threads) {}

  std::uint32_t index() const { return index_; }
  std::uint32_t blocks() const { return blocks_; }
  BatchJob& job() { return job_; }
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
  BatchJob job_;
};

// A CPU thread for each thread, meeting where a GPU's would: each has a ThreadedBlock of its own over one Shared.
class ThreadedBlock {
 public:
  struct Shared {
    explicit Shared(std::uint32_t threads) : threads(threads), barrier(static_cast<std::ptrdiff_t>(threads)) {}

    const std::uint32_t threads;
    std::barrier<> barrier;
    std::atomic<bool> all[2] = {true, true};  // taken in turns: one is set back while the next one is in use
    BatchJob job;
  };

  ThreadedBlock(std::uint32_t index, std::uint32_t blocks, std::uint32_t thread, Shared& shared)
      : index_(index), blocks_(blocks), thread_(thread), shared_(shared) {}

  std::uint32_t index() const { return index_; }
  std::uint32_t blocks() const { return blocks_; }
  BatchJob& job() { return shared_.job; }
  void meet() const { shared_.barrier.arrive_and_wait(); }

  template <class F>
  bool every(std::uint32_t n, F f) {
    std::atomic<bool>& all = shared_.all[turn_];
    turn_ = 1 - turn_;
    each(n, [&](std::uint32_t i) {
      if (!f(i)) all = false;
    });
    meet();
    const bool result = all;
    meet();
    all = true;
    return result;
  }
  template <class F>
  void each(std::uint32_t n, F f) const {
    for (std::uint32_t i = thread_; i < n; i += shared_.threads) f(i);
  }
  template <class F>
  void work(F f) const {
    f(thread_, shared_.threads);
  }
  template <class F>
  void alone(F f) const {
    if (thread_ == 0) f();
    meet();
  }

 private:
  std::uint32_t index_, blocks_, thread_, turn_ = 0;
  Shared& shared_;
};

}  // namespace ringreduce::gpu
