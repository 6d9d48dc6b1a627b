#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "core/fork.h"

namespace ringreduce::cuda {
namespace {

constexpr const char* kForked =
    "CUDA cannot be used in a process that was forked after CUDA was used; start processes with "
    "multiprocessing's spawn or with torchrun";

// This process's state of the driver. A forked child begins with a new one.
struct Loaded {
  std::atomic<const Driver*> driver = nullptr;
  std::mutex loading;
  std::string refusal;
};

// Whether this process, or one it was forked from, has initialized the driver.
std::atomic<bool> initialized{false};

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

void Driver::find_functions(void* library, const char* file) {
  std::string missing;
#define RINGREDUCE_CUDA_FIND(name, suffix, parameters)                                      \
  name.function_ = reinterpret_cast<CUresult(*) parameters>(dlsym(library, #name #suffix)); \
  if (name.function_ == nullptr) missing += missing.empty() ? #name #suffix : ", " #name #suffix;
  RINGREDUCE_CUDA_FUNCTIONS(RINGREDUCE_CUDA_FIND)
#undef RINGREDUCE_CUDA_FIND
  if (missing.empty()) return;
  int version = 0;
  const bool known = cuDriverGetVersion.function_ != nullptr && cuDriverGetVersion.attempt(&version) == kSuccess;
  throw Error(ErrorKind::system, "the CUDA driver (" + std::string(file) + ") is too old: it is for CUDA " +
                                     (known ? version_text(version) : "?") + " and has no " + missing +
                                     "; install an NVIDIA driver for CUDA 11.7 or later");
}

Driver::Driver() {
  const char* file = std::getenv("RINGREDUCE_LIBCUDA");
  if (file == nullptr || *file == '\0') file = "libcuda.so.1";
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw Error(ErrorKind::system, "no CUDA driver: " + std::string(dlerror()) +
                                       "; install the NVIDIA driver, or let the container have the GPUs");
  find_functions(library, file);
  const CUresult result = cuInit.attempt(0);
  if (result == kSuccess) return;
  int version = 0;
  // Also what the driver says in the child of a process where others than us used it.
  if (result == kNotInitialized) throw Error(ErrorKind::system, kForked);
  const std::string of = cuDriverGetVersion.attempt(&version) == kSuccess ? " for CUDA " + version_text(version) : "";
  if (result == kNoDevice)
    throw Error(ErrorKind::system, "the CUDA driver" + of + " sees no GPU: " + text(result) +
                                       "; see nvidia-smi, and CUDA_VISIBLE_DEVICES");
  throw Error(ErrorKind::system,
              "the CUDA driver" + of + " does not start: cuInit: " + text(result) + "; see whether nvidia-smi works");
}

std::string Driver::text(CUresult result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName.attempt(result, &name) != kSuccess || name == nullptr)
    return "CUDA error " + std::to_string(result);
  if (cuGetErrorString.attempt(result, &text) != kSuccess || text == nullptr) return name;
  return std::string(name) + " (" + text + ")";
}

const Driver& driver() {
  Loaded& loaded = process_wide<Loaded>();
  if (const Driver* const ready = loaded.driver.load(std::memory_order_acquire)) return *ready;
  std::lock_guard lock(loaded.loading);
  if (loaded.driver.load(std::memory_order_relaxed) == nullptr && loaded.refusal.empty()) {
    try {
      if (initialized.load()) throw Error(ErrorKind::system, kForked);
      loaded.driver.store(new Driver, std::memory_order_release);
      initialized.store(true);
    } catch (const Error& error) {
      loaded.refusal = error.what();
    }
  }
  if (!loaded.refusal.empty()) throw Error(ErrorKind::system, loaded.refusal);
  return *loaded.driver.load(std::memory_order_relaxed);
}

std::string unavailable() {
  try {
    driver();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

const Driver* driver_in_use() noexcept { return process_wide<Loaded>().driver.load(std::memory_order_acquire); }

}  // namespace ringreduce::cuda
