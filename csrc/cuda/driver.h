// The CUDA driver: libcuda.so.1, opened at first use, so that one build serves machines with and without a GPU.
#pragma once

#include <cstddef>
#include <string>

#include "core/error.h"
#include "cuda/api.h"

namespace ringreduce::cuda {

template <class Signature>
class DriverFunction;

// One function of the driver.
template <class... Parameters>
class DriverFunction<CUresult(Parameters...)> {
 public:
  explicit DriverFunction(const char* name) : name_(name) {}

  // Throws Error(system): "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  void operator()(Parameters... parameters) const {
    if (const CUresult result = attempt(parameters...); result != kSuccess) refuse(result);
  }

  // For callers that can go on, or that have more to say.
  [[nodiscard]] CUresult attempt(Parameters... parameters) const { return function_(parameters...); }

  // Throws Error(system) for a `result` of attempt: "cuMemAlloc of 64 MB on device 0: CUDA_ERROR_...", where `about` is
  // " of 64 MB on device 0".
  [[noreturn]] void refuse(CUresult result, const std::string& about = "") const;

 private:
  friend class Driver;
  const char* name_;
  CUresult (*function_)(Parameters...) = nullptr;
};

// The functions, by their names in cuda.h. Safe to use from all threads.
class Driver {
 public:
#define RINGREDUCE_CUDA_MEMBER(name, suffix, parameters) DriverFunction<CUresult parameters> name{#name};
  RINGREDUCE_CUDA_FUNCTIONS(RINGREDUCE_CUDA_MEMBER)
#undef RINGREDUCE_CUDA_MEMBER

  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
  std::string text(CUresult result) const;

 private:
  friend const Driver& driver();
  Driver();
  void find_functions(void* library, const char* file);
};

// The driver, ready to be used; never unloaded. RINGREDUCE_LIBCUDA names another file than libcuda.so.1, for tests.
// Throws Error(system) that says why and what to do if there is none, if it is too old, if it sees no GPU, or in a
// process forked after CUDA was used: what failed once in a process fails always.
const Driver& driver();

// Why driver() would throw; empty if it would not.
std::string unavailable();

// The driver if driver() has given it in this process, otherwise null: not in a forked child, where all that the parent
// made on a GPU is out of reach. For destructors.
const Driver* driver_in_use() noexcept;

template <class... Parameters>
void DriverFunction<CUresult(Parameters...)>::refuse(CUresult result, const std::string& about) const {
  throw Error(ErrorKind::system, name_ + about + ": " + driver().text(result));
}

}  // namespace ringreduce::cuda
