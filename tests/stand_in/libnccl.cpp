// A stand-in for NCCL among the threads of one process, over the stand-in CUDA driver: built as libnccl.so.2, it lets
// csrc/nccl and engine/gpu/nccl_engine run, and be checked, on a machine without a GPU.
//
// As with NCCL, a group of sends and receives is a kernel in the stream, which waits for the peers' kernels; messages
// between two ranks of a communicator meet in the order of the streams. It can be captured, and replayed. Threads meet
// to make communicators, and to destroy them.
//
// It refuses what NCCL would not do well: a GPU twice in a communicator, messages to oneself, groups with several
// streams, kernels of one communicator that overlap, other types than ncclInt8, handles that were destroyed. A message
// that is received with another size than it was sent with is an asynchronous error of both ranks.
//
// With WITHOUT_NEWER defined (libnccl_2_12.cpp) it has no ncclCommSplit and no ncclGetLastError, as NCCL until 2.12.
// RINGREDUCE_STAND_IN_NCCL_HANGS (=1): group ends do not return until the communicator is aborted.

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "kernel.h"
#include "nccl/api.h"

using namespace ringreduce::nccl;
namespace cuda = ringreduce::cuda;

namespace {

constexpr ncclResult_t kUnhandledCudaError = 1, kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5;

std::mutex mutex;  // of everything here
std::condition_variable changed;
std::string last_error;

ncclResult_t refuse(ncclResult_t result, const std::string& why) {
  last_error = why;
  return result;
}

struct Message {
  void* data;
  std::size_t bytes;
  bool done = false;
};

struct Communicator;

// The ranks of a communicator.
struct Clique {
  explicit Clique(int its_size) : size(its_size), members(static_cast<std::size_t>(its_size)) {}

  int size;
  std::vector<Communicator*> members;
  int joined = 0, left = 0;
  std::map<std::pair<int, int>, std::deque<Message*>> sends, receives;  // (from, to) -> what waits for the other side
  std::map<int, std::shared_ptr<Clique>> splits;                        // by how many each member had made before
};

struct Communicator {
  std::shared_ptr<Clique> clique;
  int rank, device;
  ncclResult_t error = kSuccess;
  bool aborted = false;
  int running = 0;  // kernels
  int splits = 0;
};

// What one group does on one communicator.
struct Exchange {
  struct Part {
    bool sends;
    int peer;
    void* data;
    std::size_t bytes;
  };
  Communicator* communicator;
  cudaStream_t stream;
  std::vector<Part> parts{};
};

// Never freed: a graph may be launched again, and a kernel of an aborted communicator still has to find that out.
std::set<Communicator*> alive;
std::map<std::string, std::shared_ptr<Clique>> by_id;

thread_local int depth = 0;
thread_local bool broken = false;  // by a call of the group
thread_local std::vector<Exchange*> group;

int current_device() {
  cuda::CUcontext current = nullptr;
  cuda::driver().cuCtxPopCurrent(&current);
  cuda::driver().cuCtxPushCurrent(current);
  int devices = 0;
  cuda::driver().cuDeviceGetCount(&devices);
  for (int device = 0; device < devices; device++) {
    cuda::CUcontext context = nullptr;
    cuda::driver().cuDevicePrimaryCtxRetain(&context, device);
    cuda::driver().cuDevicePrimaryCtxRelease(device);
    if (context == current) return device;
  }
  return -1;
}

void fail(Clique& clique, int one, int other, const std::string& why) {
  std::fprintf(stderr, "stand-in libnccl: %s\n", why.c_str());
  last_error = why;
  for (const int rank : {one, other}) clique.members[static_cast<std::size_t>(rank)]->error = kInternalError;
}

void meet(Clique& clique, int from, int to) {
  auto& sends = clique.sends[{from, to}];
  auto& receives = clique.receives[{from, to}];
  while (!sends.empty() && !receives.empty()) {
    Message &out = *sends.front(), &in = *receives.front();
    sends.pop_front(), receives.pop_front();
    if (out.bytes != in.bytes) {
      fail(clique, from, to,
           "rank " + std::to_string(from) + " sends " + std::to_string(out.bytes) + " bytes, rank " +
               std::to_string(to) + " receives " + std::to_string(in.bytes));
      continue;  // neither is ever done
    }
    std::memcpy(in.data, out.data, in.bytes);
    out.done = in.done = true;
  }
}

void run(const Exchange& exchange) {
  std::unique_lock lock(mutex);
  Communicator& own = *exchange.communicator;
  Clique& clique = *own.clique;
  if (own.running++ > 0) fail(clique, own.rank, own.rank, "kernels of one communicator overlap");
  std::deque<Message> messages;
  if (!own.aborted)
    for (const Exchange::Part& part : exchange.parts) {
      messages.push_back({part.data, part.bytes});
      const auto pair = part.sends ? std::pair{own.rank, part.peer} : std::pair{part.peer, own.rank};
      (part.sends ? clique.sends : clique.receives)[pair].push_back(&messages.back());
      meet(clique, pair.first, pair.second);
    }
  changed.notify_all();
  changed.wait(lock, [&] {
    return own.aborted || std::all_of(messages.begin(), messages.end(), [](const Message& m) { return m.done; });
  });
  for (auto* const queues : {&clique.sends, &clique.receives})
    for (auto& [pair, queue] : *queues)
      std::erase_if(queue, [&](const Message* waiting) {
        return std::any_of(messages.begin(), messages.end(), [&](const Message& m) { return &m == waiting; });
      });
  own.running--;
  changed.notify_all();
}

struct Parameters {
  const Exchange* exchange;
};

// This library, as the module with its kernel.
cuda::CUfunction kernel() {
  Dl_info found;
  dladdr(reinterpret_cast<void*>(&run), &found);
  const std::string image = std::string("so:") + found.dli_fname;
  cuda::CUmodule module = nullptr;
  int mode = cuda::kStreamCaptureModeRelaxed;  // NCCL, too, may be called in a capture first
  cuda::driver().cuThreadExchangeStreamCaptureMode(&mode);
  cuda::driver().cuModuleLoadData(&module, image.c_str());
  cuda::driver().cuThreadExchangeStreamCaptureMode(&mode);
  cuda::CUfunction function = nullptr;
  cuda::driver().cuModuleGetFunction(&function, module, "nccl_exchange");
  return function;
}

Communicator* find(ncclComm_t handle) {
  const auto found = alive.find(static_cast<Communicator*>(handle));
  return found == alive.end() ? nullptr : *found;
}

// Joins `clique` as `rank`, and waits for the others.
ncclResult_t join(std::unique_lock<std::mutex>& lock, const std::shared_ptr<Clique>& clique, int rank, int device,
                  ncclComm_t* made) {
  if (clique->members[static_cast<std::size_t>(rank)] != nullptr)
    return refuse(kInvalidUsage, "rank " + std::to_string(rank) + " twice");
  for (const Communicator* member : clique->members)
    if (member != nullptr && member->device == device)
      return refuse(kInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                                       std::to_string(member->rank) + " both on device " + std::to_string(device));
  auto* const own = new Communicator{clique, rank, device};
  clique->members[static_cast<std::size_t>(rank)] = own;
  clique->joined++;
  changed.notify_all();
  changed.wait(lock, [&] { return clique->joined == clique->size; });
  alive.insert(own);
  *made = own;
  return kSuccess;
}

ncclResult_t add(bool sends, const void* data, std::size_t bytes, ncclDataType_t type, int peer, ncclComm_t handle,
                 cudaStream_t stream) {
  std::lock_guard lock(mutex);
  Communicator* const own = find(handle);
  const auto wrong = [](ncclResult_t result, const std::string& why) {
    broken = true;
    return refuse(result, why);
  };
  if (own == nullptr) return wrong(kInvalidArgument, "there is no such communicator");
  if (depth == 0) return wrong(kInvalidUsage, "not in a group");
  if (peer < 0 || peer >= own->clique->size || peer == own->rank)
    return wrong(kInvalidArgument, "peer " + std::to_string(peer) + " of rank " + std::to_string(own->rank));
  if (data == nullptr || bytes == 0 || type != kInt8) return wrong(kInvalidArgument, "not a message of bytes");
  auto at = std::find_if(group.begin(), group.end(), [&](const Exchange* e) { return e->communicator == own; });
  if (at == group.end()) at = group.insert(at, new Exchange{own, stream});
  if ((*at)->stream != stream) return wrong(kInvalidUsage, "two streams in a group");
  (*at)->parts.push_back({sends, peer, const_cast<void*>(data), bytes});
  return kSuccess;
}

}  // namespace

#define API(result) extern "C" __attribute__((visibility("default"))) result

STAND_IN_KERNEL(nccl_exchange, Parameters, 1) { run(*parameters.exchange); }

// For tests: what a network that fails would do.
API(void) stand_in_nccl_break(ncclComm_t handle) {
  std::lock_guard lock(mutex);
  static_cast<Communicator*>(handle)->error = kRemoteError;
}
// How many communicators there are.
API(int) stand_in_nccl_alive() {
  std::lock_guard lock(mutex);
  return static_cast<int>(alive.size());
}

API(ncclResult_t) ncclGetVersion(int* version) {
  *version = 22705;
  return kSuccess;
}

API(const char*) ncclGetErrorString(ncclResult_t result) {
  static constexpr const char* kTexts[] = {"no error",
                                           "unhandled cuda error",
                                           "unhandled system error",
                                           "internal error",
                                           "invalid argument",
                                           "invalid usage",
                                           "remote process exited or there was a network error",
                                           "NCCL operation in progress"};
  return kTexts[result];
}

API(ncclResult_t) ncclGetUniqueId(ncclUniqueId* id) {
  std::lock_guard lock(mutex);
  static int made = 0;
  std::memset(id->internal, 0, sizeof(id->internal));
  std::snprintf(id->internal, sizeof(id->internal), "id %d", made++);
  return kSuccess;
}

API(ncclResult_t) ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) {
  const int device = current_device();
  std::unique_lock lock(mutex);
  if (size < 1 || rank < 0 || rank >= size) return refuse(kInvalidArgument, "no such rank");
  std::shared_ptr<Clique>& clique = by_id[std::string(id.internal, sizeof(id.internal))];
  if (clique == nullptr) clique = std::make_shared<Clique>(size);
  if (clique->size != size) return refuse(kInvalidArgument, "ranks disagree about the size");
  const std::shared_ptr<Clique> kept = clique;
  return join(lock, kept, rank, device, made);
}

#if !defined(WITHOUT_NEWER)
// Only with all ranks, in their order.
API(ncclResult_t) ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, void* config) {
  std::unique_lock lock(mutex);
  Communicator* const parent = find(handle);
  if (parent == nullptr || color != 0 || key != parent->rank || config != nullptr)
    return refuse(kInvalidArgument, "a split that the stand-in does not know");
  std::shared_ptr<Clique>& clique = parent->clique->splits[parent->splits++];
  if (clique == nullptr) clique = std::make_shared<Clique>(parent->clique->size);
  const std::shared_ptr<Clique> kept = clique;
  return join(lock, kept, parent->rank, parent->device, made);
}

API(const char*) ncclGetLastError(ncclComm_t) {
  std::lock_guard lock(mutex);
  thread_local std::string text;
  text = last_error;
  return text.c_str();
}
#endif

// Waits for the other ranks to do the same.
API(ncclResult_t) ncclCommDestroy(ncclComm_t handle) {
  std::unique_lock lock(mutex);
  Communicator* const own = find(handle);
  if (own == nullptr) return refuse(kInvalidArgument, "there is no such communicator");
  changed.wait(lock, [&] { return own->running == 0; });
  own->clique->left++;
  changed.notify_all();
  changed.wait(lock, [&] { return own->clique->left == own->clique->size; });
  alive.erase(own);
  return kSuccess;
}

API(ncclResult_t) ncclCommAbort(ncclComm_t handle) {
  std::unique_lock lock(mutex);
  Communicator* const own = find(handle);
  if (own == nullptr) return refuse(kInvalidArgument, "there is no such communicator");
  own->aborted = true;
  own->clique->left++;
  changed.notify_all();
  changed.wait(lock, [&] { return own->running == 0; });
  alive.erase(own);
  return kSuccess;
}

API(ncclResult_t) ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  std::lock_guard lock(mutex);
  const Communicator* const own = find(handle);
  if (own == nullptr) return refuse(kInvalidArgument, "there is no such communicator");
  *error = own->error;
  return kSuccess;
}

#define FACT(function, value)                                                             \
  API(ncclResult_t) function(const ncclComm_t handle, int* found) {                       \
    std::lock_guard lock(mutex);                                                          \
    const Communicator* const own = find(handle);                                         \
    if (own == nullptr) return refuse(kInvalidArgument, "there is no such communicator"); \
    *found = value;                                                                       \
    return kSuccess;                                                                      \
  }
FACT(ncclCommCount, own->clique->size)
FACT(ncclCommUserRank, own->rank)
FACT(ncclCommCuDevice, own->device)

API(ncclResult_t) ncclGroupStart() {
  if (depth++ == 0) broken = false;
  return kSuccess;
}

API(ncclResult_t)
ncclSend(const void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t handle, cudaStream_t stream) {
  return add(true, data, count, type, peer, handle, stream);
}

API(ncclResult_t)
ncclRecv(void* data, std::size_t count, ncclDataType_t type, int peer, ncclComm_t handle, cudaStream_t stream) {
  return add(false, data, count, type, peer, handle, stream);
}

API(ncclResult_t) ncclGroupEnd() {
  if (depth == 0) return refuse(kInvalidUsage, "no group was started");
  if (--depth > 0) return kSuccess;
  std::vector<Exchange*> exchanges;
  exchanges.swap(group);
  if (broken) return kInvalidUsage;
  static const cuda::CUfunction function = kernel();
  for (Exchange* const exchange : exchanges) {
    if (const char* const hangs = std::getenv("RINGREDUCE_STAND_IN_NCCL_HANGS"); hangs != nullptr && *hangs == '1') {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return exchange->communicator->aborted; });
      return refuse(kInternalError, "aborted in a group");
    }
    Parameters parameters{exchange};
    void* pointers[] = {&parameters};
    if (cuda::driver().cuLaunchKernel.attempt(function, 1, 1, 1, 1, 1, 1, 0, exchange->stream, pointers, nullptr) !=
        cuda::kSuccess)
      return refuse(kUnhandledCudaError, "cuLaunchKernel");
  }
  return kSuccess;
}

// What was built must be what csrc/nccl calls.
#define DECLARED(name, result, parameters) static_assert(std::is_same_v<decltype(name), result parameters>);
RINGREDUCE_NCCL_FUNCTIONS(DECLARED)
#if !defined(WITHOUT_NEWER)
RINGREDUCE_NCCL_NEWER_FUNCTIONS(DECLARED)
#endif
