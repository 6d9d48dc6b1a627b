// What the tests of csrc/cuda on the stand-in driver share. main.cpp runs one of them.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <source_location>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/shared_memory.h"

using namespace ringreduce;
using namespace ringreduce::cuda;

using Tests = std::map<std::string, std::function<void()>>;
extern const Tests kOneProcess, kBetweenProcesses, kOurKernels;

inline int to_peer = -1;  // a socket to the process that started this one, or that this one has started

inline void expect(bool ok, const std::string& found = "",
                   std::source_location where = std::source_location::current()) {
  if (ok) return;
  std::fprintf(stderr, "%s:%u: not as expected %s\n", where.file_name(), where.line(), found.c_str());
  std::exit(1);
}

// `action` throws Error(system) with a text that has all `parts`.
inline void expect_error(const std::function<void()>& action, const std::vector<std::string>& parts,
                         std::source_location where = std::source_location::current()) {
  try {
    action();
  } catch (const Error& error) {
    for (const std::string& part : parts)
      expect(std::string(error.what()).find(part) != std::string::npos, "[" + part + "] in: " + error.what(), where);
    expect(error.kind() == ErrorKind::system, "kind", where);
    return;
  }
  expect(false, "no error", where);
}

// Memory that is shared in the way that DRIVER_TEST_FIRST says, if it does.
inline std::unique_ptr<OwnMemory> own_memory(const DevicePtr& device, std::size_t bytes) {
  const char* const first = std::getenv("DRIVER_TEST_FIRST");
  if (first == nullptr) return std::make_unique<OwnMemory>(device, bytes);
  const bool ipc = std::strcmp(first, "ipc") == 0;
  return std::make_unique<OwnMemory>(device, bytes, ipc ? Handle::Kind::ipc : Handle::Kind::file_descriptor);
}

inline DevicePtr open_device(int ordinal) { return std::make_shared<const Device>(ordinal); }

inline std::vector<std::uint64_t> read(const Stream& stream, CUdeviceptr from, std::size_t words) {
  std::vector<std::uint64_t> values(words);
  stream.copy(reinterpret_cast<CUdeviceptr>(values.data()), from, words * 8);
  stream.synchronize();
  return values;
}

inline std::vector<std::uint64_t> same(std::size_t words, std::uint64_t value) { return std::vector(words, value); }

inline Module module_of(const DevicePtr& device, const std::string& file) {
  return Module(device, ("so:" + std::string(std::getenv("STAND_IN_FOLDER")) + "/" + file).c_str());
}

inline Module kernels(const DevicePtr& device) { return module_of(device, "driver_test_kernels.so"); }

// What others than we call.
struct Others {
  void* const library = dlopen(std::getenv("RINGREDUCE_LIBCUDA"), RTLD_NOW);
  template <class... A>
  CUresult call(const char* name, A... arguments) const {
    return reinterpret_cast<CUresult (*)(A...)>(dlsym(library, name))(arguments...);
  }
  // How often the function was called.
  std::size_t calls(const char* name) const {
    return reinterpret_cast<std::size_t (*)(const char*)>(dlsym(library, "stand_in_calls"))(name);
  }
};
