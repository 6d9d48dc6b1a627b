// NCCL communicators for the channels of a group.
//
// NCCL runs what is called on one communicator one after the other, so channels overlap only if each has its own. They
// are made by ncclCommSplit, where the library has it, or else each from a unique id.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/fork.h"
#include "cuda/device.h"
#include "nccl/library.h"

namespace ringreduce::nccl {

// One rank's communicator. Thread-safe, but for what its user does with the handle.
class Communicator {
 public:
  // Takes over `handle`, or, if it is somebody else's, borrows it: it must then outlive this object, and is neither
  // destroyed nor aborted here. Throws invalid_argument unless it is of `rank` of `size` on `device`.
  Communicator(ncclComm_t handle, bool owned, const cuda::DevicePtr& device, int rank, int size);
  // As destroy().
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  ncclComm_t handle() const { return handle_; }
  bool owned() const { return owned_; }
  const cuda::DevicePtr& device() const { return device_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Throws Error(peer_lost, or system) if NCCL has met an error since: a peer that is gone, a network that failed.
  void check() const;
  // The same for what `function` of NCCL returned for it; of a communicator that is not blocking, waits for what it
  // does.
  void require(ncclResult_t result, const char* function) const;

 private:
  friend void abort(std::span<const std::shared_ptr<Communicator>> communicators);
  friend void destroy(std::vector<std::shared_ptr<Communicator>> communicators);
  // Gives the handle up, to be aborted or destroyed by the caller; null if somebody has had it, or it is borrowed.
  ncclComm_t release();

  const ncclComm_t handle_;
  const bool owned_;
  const cuda::DevicePtr device_;
  const int rank_, size_;
  const ForkMark made_;
  mutable std::mutex mutex_;
  bool released_ = false;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

// The device of a communicator, an ncclComm_t as a number. Throws Error(system).
int device_of(std::uint64_t handle);

// Ids from which the ranks of a group make `count` communicators together, of 128 bytes each: as many as NCCL needs for
// that. To be called on rank 0, which tells the others. Throws Error(system).
std::vector<std::string> unique_ids(int count);

// Makes this rank's `count` communicators of a group: all ranks must, at the same time, with the same ids.
// Throws invalid_argument for ids that are none; system; timeout, after which NCCL still waits, in a thread of its own.
std::vector<CommunicatorPtr> make(const std::vector<std::string>& ids, int count, const cuda::DevicePtr& device,
                                  int rank, int size, Nanoseconds timeout);

// The same from a communicator of somebody else (an ncclComm_t as a number), which stays theirs: communicators of our
// own split off it, so that it is free for others afterwards and survives our errors. From a library without
// ncclCommSplit it is only that one itself, borrowed.
// Throws invalid_argument unless it is of `rank` of `size` on `device`.
std::vector<CommunicatorPtr> adopt(std::uint64_t handle, int count, const cuda::DevicePtr& device, int rank, int size,
                                   Nanoseconds timeout);

// Ends what they do on the GPU, now and later, and frees them, but for borrowed ones. All at a time: freeing one may
// wait for the GPU, and so for what another does (NCCL's issue 1013). What is queued in streams ends with undefined
// results. Leaves those that cannot be freed within a few seconds to threads of their own.
void abort(std::span<const CommunicatorPtr> communicators);

// Frees them when the GPU is done with them; leaves them to a thread after a few seconds, as peers on this host that do
// not do the same hold NCCL up.
void destroy(std::vector<CommunicatorPtr> communicators);

}  // namespace ringreduce::nccl
