// Modules, and launches of their kernels.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "machine.h"

using namespace stand_in;

API cuModuleLoadData(CUmodule* handle, const void* image) {
  ENTER_UNLESS_CAPTURING();
  const char* const text = static_cast<const char*>(image);
  if (std::strncmp(text, "so:", 3) != 0) return kInvalidImage;
  void* const library = dlopen(text + 3, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "stand-in libcuda: %s\n", dlerror());
    return kInvalidImage;
  }
  Module* const module = new Module{library};
  machine().modules.insert(module);
  *handle = module;
  return kSuccess;
}

API cuModuleUnload(CUmodule handle) {
  ENTER_UNLESS_CAPTURING();
  Module* const module = static_cast<Module*>(handle);
  if (machine().modules.erase(module) == 0) return kInvalidHandle;
  dlclose(module->library);
  delete module;
  return kSuccess;
}

API cuModuleGetFunction(CUfunction* handle, CUmodule module_handle, const char* name) {
  ENTER();
  Module* const module = static_cast<Module*>(module_handle);
  if (!machine().modules.contains(module)) return kInvalidHandle;
  const std::string symbol = std::string("stand_in_") + name;
  auto* const call = reinterpret_cast<StandInKernel*>(dlsym(module->library, symbol.c_str()));
  const auto* const bytes = static_cast<const std::size_t*>(dlsym(module->library, (symbol + "_parameters").c_str()));
  const auto* const threads = static_cast<const unsigned*>(dlsym(module->library, (symbol + "_threads").c_str()));
  if (call == nullptr || bytes == nullptr || threads == nullptr) return kNotFound;
  std::unique_ptr<Function>& function = module->functions[name];
  if (function == nullptr) function.reset(new Function{call, *bytes, *threads});
  *handle = function.get();
  return kSuccess;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction handle, int threads, std::size_t) {
  ENTER();
  if (handle == nullptr) return kInvalidHandle;
  if (threads < 1 || static_cast<unsigned>(threads) > static_cast<Function*>(handle)->most_threads)
    return kInvalidValue;
  *blocks = static_cast<int>(std::min<std::size_t>(setting("BLOCKS", 64), 2));
  return kSuccess;
}

API cuLaunchKernel(CUfunction handle, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                   unsigned threads_y, unsigned threads_z, unsigned, CUstream stream, void** parameters, void** extra) {
  ENTER();
  if (handle == nullptr) return kInvalidHandle;
  const Function function = *static_cast<Function*>(handle);
  if (blocks == 0 || threads == 0 || threads > function.most_threads || blocks_y != 1 || blocks_z != 1 ||
      threads_y != 1 || threads_z != 1 || extra != nullptr)
    return kInvalidValue;
  Stream* const queue = find_stream(stream);
  if (queue == nullptr) return kInvalidHandle;
  if (!std::exchange(static_cast<Function*>(handle)->loaded, true)) guard.wait_in_context(context_is_idle);
  guard.wait_in_context([&] { return queue->worker.pending() < kQueueLength; });
  // Copies, aligned as any struct may ask for.
  const auto copy =
      std::make_shared<std::vector<std::max_align_t>>(function.parameter_bytes / sizeof(std::max_align_t) + 1);
  std::memcpy(copy->data(), parameters[0], function.parameter_bytes);
  Slots& slots = contexts.back()->slots;
  return submit(stream, [=, &slots] {
    const void* const pointers[] = {copy->data()};
    std::vector<std::thread> running;
    for (unsigned block = 0; block < blocks; block++) {
      slots.take();
      running.emplace_back([&, block] {
        function.call(pointers, block, blocks, threads);
        slots.give_back();
      });
    }
    for (std::thread& thread : running) thread.join();
  });
}
