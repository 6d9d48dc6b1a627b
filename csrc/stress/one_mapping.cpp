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

#include <map>
#include <mutex>

namespace {

struct Mapping {
  ino_t file;
  int users;
};
std::mutex mutex;
std::map<void*, Mapping> mappings;
int mapping_count = 0;  // of `mappings`; atomic

void* map_once(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
  struct stat file;
  if (fstat(fd, &file) != 0) return MAP_FAILED;
  const std::lock_guard lock(mutex);
  for (auto& [start, mapping] : mappings)
    if (mapping.file == file.st_ino) {
      ++mapping.users;
      return start;
    }
  void* const start = reinterpret_cast<void*>(syscall(SYS_mmap, address, length, protection, flags, fd, offset));
  if (start == MAP_FAILED) return start;
  mappings[start] = {file.st_ino, 1};
  __atomic_add_fetch(&mapping_count, 1, __ATOMIC_SEQ_CST);
  return start;
}

// Whether it is still in use.
bool release(void* start) {
  const std::lock_guard lock(mutex);
  const auto found = mappings.find(start);
  if (found == mappings.end()) return false;
  if (--found->second.users > 0) return true;
  mappings.erase(found);
  __atomic_sub_fetch(&mapping_count, 1, __ATOMIC_SEQ_CST);
  return false;
}

}  // namespace

// Both take the place of the C library's. They are called before the sanitizer is ready too, and then, with nothing
// shared, do without it.
extern "C" __attribute__((no_sanitize("thread"))) void* mmap(void* address, size_t length, int protection, int flags,
                                                             int fd, off_t offset) noexcept {
  if ((flags & MAP_SHARED) != 0 && fd >= 0) return map_once(address, length, protection, flags, fd, offset);
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, length, protection, flags, fd, offset));
}

extern "C" __attribute__((no_sanitize("thread"))) int munmap(void* start, size_t length) noexcept {
  if (__atomic_load_n(&mapping_count, __ATOMIC_SEQ_CST) > 0 && release(start)) return 0;
  return static_cast<int>(syscall(SYS_munmap, start, length));
}
#endif
