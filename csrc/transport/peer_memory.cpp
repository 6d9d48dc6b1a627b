#include "transport/peer_memory.h"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <random>

#include "core/threads.h"

namespace ringreduce {
namespace {

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }  // NOLINT(performance-no-int-to-ptr)

// `transfer` is process_vm_readv or process_vm_writev. They may do less than asked for.
template <class Transfer>
int transfer_all(Transfer transfer, int thread, std::byte* local, std::uint64_t remote, std::size_t bytes) {
  while (bytes > 0) {
    const iovec here{local, bytes}, there{pointer(remote), bytes};
    const ssize_t done = transfer(thread, &here, 1, &there, 1, 0);
    if (done <= 0) return done < 0 ? errno : EFAULT;
    local += done;
    remote += static_cast<std::uint64_t>(done);
    bytes -= static_cast<std::size_t>(done);
  }
  return 0;
}

}  // namespace

OpenMemory::OpenMemory() {
  std::random_device random;
  word_ = (std::uint64_t{random()} << 32 | random()) >> 1;  // fits what every language takes for an integer
  sem_init(&end_, 0, 0);
  sleeper_ = start_thread([this] {
    id_.store(static_cast<int>(syscall(SYS_gettid)));
    id_.notify_one();
    while (sem_wait(&end_) != 0) {
    }
  });
  id_.wait(0);
  key_ = {id_.load(), reinterpret_cast<std::uint64_t>(&word_), word_};
}

void OpenMemory::close() {
  if (mark_.forked()) return;
  std::lock_guard lock(closing_);
  if (!sleeper_.joinable()) return;
  sem_post(&end_);
  sleeper_.join();
  // The kernel forgets a thread a little after others may join it.
  while (syscall(SYS_tgkill, getpid(), key_.thread, 0) == 0) sched_yield();
  sem_destroy(&end_);
}

OpenMemory::~OpenMemory() {
  close();
  // It is our parent's. Not even its handle may be touched: a thread of ours may have its place in memory.
  if (sleeper_.joinable()) new std::thread(std::move(sleeper_));
}

bool can_access(const OpenMemory::Key& key) {
  std::uint64_t word = 0;
  auto* const bytes = reinterpret_cast<std::byte*>(&word);
  return read_memory(key.thread, bytes, key.address, sizeof(word)) == 0 && word == key.word &&
         write_memory(key.thread, key.address, bytes, sizeof(word)) == 0;
}

int read_memory(int thread, std::byte* to, std::uint64_t from, std::size_t bytes) {
  return transfer_all(process_vm_readv, thread, to, from, bytes);
}

int write_memory(int thread, std::uint64_t to, const std::byte* from, std::size_t bytes) {
  return transfer_all(process_vm_writev, thread, const_cast<std::byte*>(from), to, bytes);
}

}  // namespace ringreduce
