// Reading and writing another process's memory where it lies: Linux's cross-memory attach (process_vm_readv(2)).
//
// A rank opens its memory under the id of a thread that only sleeps. The kernel looks that id up when an access begins:
// once the thread has ended no access begins any more, not even that of a peer which was stopped just before. So a call
// that failed can hand its tensors back to the program. Ids are used again, after some tens of thousands of threads or
// more; therefore a peer also looks, right before it writes, whether a call has failed (Team::write).
//
// The kernel decides which process may access which (same user, same pid namespace, kernel.yama.ptrace_scope, seccomp).
// Ranks find out by trying when their group is made.
#pragma once

#include <semaphore.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

#include "core/fork.h"

namespace ringreduce {

class OpenMemory {
 public:
  // A word of ours and its value, with which peers try whether they have access.
  struct Key {
    int thread;
    std::uint64_t address;
    std::uint64_t word;
  };

  // Throws Error if no thread can be started.
  OpenMemory();
  ~OpenMemory();
  OpenMemory(const OpenMemory&) = delete;
  OpenMemory& operator=(const OpenMemory&) = delete;

  const Key& key() const { return key_; }

  // No access begins from now on. Idempotent, from any thread.
  void close();

 private:
  ForkMark mark_;
  std::mutex closing_;
  sem_t end_;
  std::atomic<int> id_ = 0;  // of sleeper_
  std::uint64_t word_;
  Key key_;
  std::thread sleeper_;
};

// Whether this process may read and write what was opened: it reads the word and writes it back.
bool can_access(const OpenMemory::Key& key);

// Copies `bytes` from, or to, memory opened under the id `thread`. Returns 0, or the error's number: ESRCH if it is not
// open any more.
int read_memory(int thread, std::byte* to, std::uint64_t from, std::size_t bytes);
int write_memory(int thread, std::uint64_t to, const std::byte* from, std::size_t bytes);

}  // namespace ringreduce
