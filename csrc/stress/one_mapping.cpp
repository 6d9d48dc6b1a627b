// ThreadSanitizer tells locations apart by their address, so it would see nothing of what ranks do to each other
// through mappings of their own. Under it, all mappings of a memfd in this program are therefore one; without, this
// file is empty.
#if defined(__SANITIZE_THREAD__)
#define ONE_MAPPING
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define ONE_MAPPING
#endif
#endif

#ifdef ONE_MAPPING
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define UNSEEN __attribute__((no_sanitize("thread")))

// The sanitizer's own, which forget what was seen at these addresses before.
extern "C" void* __interceptor_mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset);
extern "C" int __interceptor_munmap(void* start, size_t length);

namespace {

// The sanitizer itself calls the functions below, also in the midst of a report, so nothing here may be one of its
// events: no instrumented code, no lock that it knows.
struct Mapping {
  void* start;
  ino_t file;
  int users;  // 0: this entry is free
};
Mapping mappings[256];
bool locked = false;

UNSEEN void lock() {
  while (__atomic_exchange_n(&locked, true, __ATOMIC_ACQUIRE)) syscall(SYS_sched_yield);
}
UNSEEN void unlock() { __atomic_store_n(&locked, false, __ATOMIC_RELEASE); }

UNSEEN void* map_once(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  struct stat file;
  if (syscall(SYS_fstat, fd, &file) != 0) return MAP_FAILED;
  void* start = MAP_FAILED;
  Mapping* free_entry = nullptr;
  lock();
  for (Mapping& mapping : mappings) {
    if (mapping.users == 0) {
      free_entry = &mapping;
    } else if (mapping.file == file.st_ino) {
      ++mapping.users;
      start = mapping.start;
      break;
    }
  }
  if (start == MAP_FAILED && free_entry != nullptr) {
    start = __interceptor_mmap(address, length, protection, flags, fd, offset);
    if (start != MAP_FAILED) {
      free_entry->start = start;
      free_entry->file = file.st_ino;
      free_entry->users = 1;
    }
  }
  unlock();
  return start;
}

// Whether it is one of ours; the last user unmaps it.
UNSEEN bool release(void* start, size_t length) {
  bool found = false;
  lock();
  for (Mapping& mapping : mappings) {
    if (mapping.users == 0 || mapping.start != start) continue;
    found = true;
    if (--mapping.users == 0) __interceptor_munmap(start, length);
  }
  unlock();
  return found;
}

}  // namespace

// Both take the place of the C library's. They are called before the sanitizer is ready too.
extern "C" UNSEEN void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) noexcept {
  if ((flags & MAP_SHARED) != 0 && fd >= 0) return map_once(address, length, protection, flags, fd, offset);
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, length, protection, flags, fd, offset));
}

extern "C" UNSEEN int munmap(void* start, size_t length) noexcept {
  if (release(start, length)) return 0;
  return static_cast<int>(syscall(SYS_munmap, start, length));
}
#endif
