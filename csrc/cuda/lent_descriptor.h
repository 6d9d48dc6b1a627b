// Lends a file descriptor: processes of the same user get copies of it over an abstract Unix socket. Ranks of one host
// can reach each other's sockets (ringreduce/groups/meet.py). pidfd_getfd(2) would need the right to trace the
// owner, which containers do not have.
#pragma once

#include <string>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "core/file_descriptor.h"
#include "core/fork.h"

namespace ringreduce::cuda {

// The owner's side: a thread gives copies to whoever asks, until this object is destroyed. A forked child leaves it
// to its parent.
class LentDescriptor {
 public:
  // `name` must be new on this host. Throws Error(system).
  LentDescriptor(const std::string& name, FileDescriptor lent);
  ~LentDescriptor();
  LentDescriptor(const LentDescriptor&) = delete;
  LentDescriptor& operator=(const LentDescriptor&) = delete;

 private:
  void serve() const;

  const FileDescriptor lent_, listener_;
  const ForkMark made_;
  std::thread* const thread_;  // not destroyed in a forked child, which does not have it
};

// A copy of what some process lends by `name`. Throws Error(system) that says why there is none, and what to do.
FileDescriptor borrow_descriptor(const std::string& name, Nanoseconds timeout = 10 * kSecond);

}  // namespace ringreduce::cuda
