#include "nccl/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <thread>
#include <utility>

#include "core/threads.h"

namespace ringreduce::nccl {
namespace {

// How long communicators may take to be freed, which can wait for peers on this host that will never free theirs
// (NCCL's issue 863), and so for ever.
constexpr Nanoseconds kPatience = 5 * kSecond;

// Does `work` in a thread of its own, which nobody has to wait for. Throws Error(system) if none can be had.
std::future<void> start(std::function<void()> work) {
  std::packaged_task<void()> task(std::move(work));
  std::future<void> done = task.get_future();
  start_thread(std::move(task)).detach();
  return done;
}

// The same; false if it is not done in time, and then it goes on alone. What it throws is thrown here.
bool within(Nanoseconds timeout, std::function<void()> work) {
  std::future<void> done = start(std::move(work));
  if (timeout != kForever && done.wait_for(std::chrono::nanoseconds(timeout)) == std::future_status::timeout)
    return false;
  done.get();
  return true;
}

// Ends when NCCL has done what it was asked for, if it answered that this goes on: communicators that are not blocking.
ncclResult_t when_ended(const Library& nccl, ncclResult_t result, ncclComm_t communicator) {
  while (result == kInProgress) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (const ncclResult_t asked = nccl.ncclCommGetAsyncError(communicator, &result); asked != kSuccess) return asked;
  }
  return result;
}

// Splits `count` communicators off `handle`, ranks as they are.
std::vector<ncclComm_t> split(const Library& nccl, ncclComm_t handle, int count, int rank) {
  std::vector<ncclComm_t> made;
  for (int i = 0; i < count; ++i) {
    ncclComm_t one = nullptr;
    const ncclResult_t result = nccl.ncclCommSplit(handle, 0, rank, &one, nullptr);
    nccl.require(when_ended(nccl, when_ended(nccl, result, handle), one), "ncclCommSplit", rank);
    made.push_back(one);
  }
  return made;
}

// Makes them by `create`, which calls NCCL and may take long, in a thread with `device` current.
std::vector<ncclComm_t> create_within(Nanoseconds timeout, const char* what, const cuda::DevicePtr& device, int rank,
                                      std::function<std::vector<ncclComm_t>()> create) {
  const auto made = std::make_shared<std::vector<ncclComm_t>>();
  const bool ended = within(timeout, [made, device, create = std::move(create)] {
    const cuda::Device::Use use(*device);
    *made = create();
  });
  if (!ended)
    throw Error(ErrorKind::timeout, std::string(what) + " on rank " + std::to_string(rank) + " did not end within " +
                                        in_seconds(timeout) +
                                        ": NCCL waits for another rank, and does not say for which; see that all "
                                        "ranks of the group make its communicators, and NCCL_DEBUG=INFO");
  return *made;
}

// For what cannot fail usefully: nothing is done if the device is out of reach.
void with_device(const cuda::Device& device, const std::function<void()>& action) {
  try {
    const cuda::Device::Use use(device);
    action();
  } catch (const Error&) {
  }
}

// Destructors come here, so it does not throw. Without a thread the communicators stay until the process ends, since to
// wait for peers in this one may take for ever.
void destroy_handles(std::vector<ncclComm_t> handles, const cuda::DevicePtr& device) {
  try {
    within(kPatience, [handles = std::move(handles), device] {
      with_device(*device, [&] {
        for (ncclComm_t const handle : handles) (void)library().ncclCommDestroy(handle);
      });
    });
  } catch (const Error&) {
  }
}

std::vector<CommunicatorPtr> own(const std::vector<ncclComm_t>& handles, const cuda::DevicePtr& device, int rank,
                                 int size) {
  std::vector<CommunicatorPtr> communicators;
  for (ncclComm_t handle : handles)
    communicators.push_back(std::make_shared<Communicator>(handle, true, device, rank, size));
  return communicators;
}

}  // namespace

Communicator::Communicator(ncclComm_t handle, bool owned, const cuda::DevicePtr& device, int rank, int size)
    : handle_(handle), owned_(owned), device_(device), rank_(rank), size_(size) {
  if (handle == nullptr) throw Error(ErrorKind::invalid_argument, "the NCCL communicator is null: it was destroyed");
  const Library& nccl = library();
  int its_size = -1, its_rank = -1, its_device = -1;
  nccl.require(nccl.ncclCommCount(handle, &its_size), "ncclCommCount", rank);
  nccl.require(nccl.ncclCommUserRank(handle, &its_rank), "ncclCommUserRank", rank);
  nccl.require(nccl.ncclCommCuDevice(handle, &its_device), "ncclCommCuDevice", rank);
  if (its_size != size || its_rank != rank || its_device != device->ordinal())
    throw Error(ErrorKind::invalid_argument,
                "the NCCL communicator is of rank " + std::to_string(its_rank) + " of " + std::to_string(its_size) +
                    " on device " + std::to_string(its_device) + ", but the group's rank is " + std::to_string(rank) +
                    " of " + std::to_string(size) + " on device " + std::to_string(device->ordinal()) +
                    "; give one of the same ranks and devices");
}

Communicator::~Communicator() {
  if (ncclComm_t const handle = release(); handle != nullptr) destroy_handles({handle}, device_);
}

ncclComm_t Communicator::release() {
  if (!owned_ || made_.forked()) return nullptr;
  std::lock_guard lock(mutex_);
  return std::exchange(released_, true) ? nullptr : handle_;
}

void Communicator::check() const {
  std::lock_guard lock(mutex_);
  if (released_) return;
  const Library& nccl = library();
  ncclResult_t error = kSuccess;
  nccl.require(nccl.ncclCommGetAsyncError(handle_, &error), "ncclCommGetAsyncError", rank_);
  if (error != kSuccess && error != kInProgress) nccl.require(error, "NCCL's work", rank_);
}

void Communicator::require(ncclResult_t result, const char* function) const {
  const Library& nccl = library();
  while (result == kInProgress) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    std::lock_guard lock(mutex_);
    if (released_) return;  // as it was aborted
    nccl.require(nccl.ncclCommGetAsyncError(handle_, &result), "ncclCommGetAsyncError", rank_);
  }
  nccl.require(result, function, rank_);
}

int device_of(std::uint64_t handle) {
  const Library& nccl = library();
  int device = -1;
  nccl.require(nccl.ncclCommCuDevice(reinterpret_cast<ncclComm_t>(handle), &device), "ncclCommCuDevice", -1);
  return device;
}

std::vector<std::string> unique_ids(int count) {
  const Library& nccl = library();
  std::vector<std::string> ids;
  for (int i = 0; i < (nccl.ncclCommSplit != nullptr ? 1 : count); ++i) {
    ncclUniqueId id;
    nccl.require(nccl.ncclGetUniqueId(&id), "ncclGetUniqueId", 0);
    ids.emplace_back(id.internal, sizeof(id.internal));
  }
  return ids;
}

std::vector<CommunicatorPtr> make(const std::vector<std::string>& ids, int count, const cuda::DevicePtr& device,
                                  int rank, int size, Nanoseconds timeout) {
  const Library& nccl = library();
  const bool splits = nccl.ncclCommSplit != nullptr;
  const auto wanted = static_cast<std::size_t>(splits ? 1 : count);
  if (ids.size() != wanted)
    throw Error(ErrorKind::invalid_argument, "rank " + std::to_string(rank) + " got " + std::to_string(ids.size()) +
                                                 " unique ids for " + std::to_string(count) +
                                                 " communicators and needs " + std::to_string(wanted) + " with NCCL " +
                                                 nccl.describe() + "; all ranks must have the same version of NCCL");
  std::vector<ncclUniqueId> unique(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i].size() != sizeof(ncclUniqueId))
      throw Error(ErrorKind::invalid_argument, "a unique id of NCCL has " + std::to_string(sizeof(ncclUniqueId)) +
                                                   " bytes, this one has " + std::to_string(ids[i].size()));
    std::memcpy(unique[i].internal, ids[i].data(), sizeof(ncclUniqueId));
  }
  const auto create = [&nccl, unique, count, rank, size, splits] {
    std::vector<ncclComm_t> made;
    for (const ncclUniqueId& id : unique) {
      ncclComm_t one = nullptr;
      const ncclResult_t result = nccl.ncclCommInitRank(&one, size, id, rank);
      nccl.require(when_ended(nccl, result, one), "ncclCommInitRank", rank);
      made.push_back(one);
    }
    if (splits)
      for (ncclComm_t more : split(nccl, made[0], count - 1, rank)) made.push_back(more);
    return made;
  };
  return own(create_within(timeout, "making NCCL communicators", device, rank, create), device, rank, size);
}

std::vector<CommunicatorPtr> adopt(std::uint64_t handle, int count, const cuda::DevicePtr& device, int rank, int size,
                                   Nanoseconds timeout) {
  const Library& nccl = library();
  const auto theirs = std::make_shared<Communicator>(reinterpret_cast<ncclComm_t>(handle), false, device, rank, size);
  if (nccl.ncclCommSplit == nullptr) return {theirs};
  const auto create = [&nccl, theirs, count, rank] { return split(nccl, theirs->handle(), count, rank); };
  return own(create_within(timeout, "splitting the NCCL communicator", device, rank, create), device, rank, size);
}

void abort(std::span<const CommunicatorPtr> communicators) {
  std::vector<std::future<void>> aborted;
  for (const CommunicatorPtr& communicator : communicators)
    if (ncclComm_t const handle = communicator->release(); handle != nullptr) {
      const auto work = [handle, device = communicator->device()] {
        with_device(*device, [&] { (void)library().ncclCommAbort(handle); });
      };
      try {
        aborted.push_back(start(work));
      } catch (const Error&) {  // no thread can be had
        work();
      }
    }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kPatience);
  for (const std::future<void>& one : aborted) one.wait_until(deadline);
}

void destroy(std::vector<CommunicatorPtr> communicators) {
  std::vector<ncclComm_t> handles;
  cuda::DevicePtr device;
  for (const CommunicatorPtr& communicator : communicators)
    if (ncclComm_t const handle = communicator->release(); handle != nullptr) {
      handles.push_back(handle);
      device = communicator->device();
    }
  std::reverse(handles.begin(), handles.end());  // what was split off first
  if (!handles.empty()) destroy_handles(std::move(handles), device);
}

}  // namespace ringreduce::nccl
