// Requests for resources that this process and those forked from it make, of which one can be made to fail or to be
// slow.
//
// The calls that ringreduce's module makes to others go through its table of addresses, which `requests_install`
// changes in memory: the module itself is the one that users have. Python's binding is requests.py.
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <string_view>
#include <system_error>

namespace {

// The bits of `kinds`. Python's names are in requests.py, in this order.
enum Kind : unsigned {
  allocation = 1,
  mapping = 2,
  thread = 4,
  descriptor = 8,
  socket_call = 16,
  wait = 32,
  tensor = 64,
  process = 128,
  disk = 256
};

constexpr std::uint64_t kAnew = ~0ull;

// In memory that forked processes share.
struct State {
  std::atomic<unsigned> armed;
  std::atomic<std::uint64_t> asked, failing;
  std::atomic<std::uintptr_t> failed_at;
  std::atomic<std::int64_t> delay;        // nanoseconds that the request takes instead of failing; 0: it fails
  std::atomic<std::int64_t> failed_when;  // nanoseconds of CLOCK_MONOTONIC
  std::atomic<std::uintptr_t> failed_before[1 << 13];  // a hash table of places, for kAnew
  char line[200];                                      // of Python, where a request failed
};
State* const state =
    static_cast<State*>(mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));

std::uintptr_t module_begin = 0, module_end = 0;

// Parts of the module that may not fail, as offsets.
struct LeftOut {
  std::uint64_t begin, end;
};
const LeftOut* left_out = nullptr;
std::size_t left_out_count = 0;  // sorted

// Whether no request made at `place` has failed before this one.
bool is_new(std::uintptr_t place) {
  for (auto i = place * 0x9E3779B97F4A7C15 >> 51;; i = (i + 1) % std::size(state->failed_before)) {
    std::uintptr_t there = 0;
    if (state->failed_before[i].compare_exchange_strong(there, place)) return true;
    if (there == place) return false;
  }
}

// Whether this request, made from `place`, is the one that fails.
bool fails(Kind kind, std::uintptr_t place) {
  if ((state->armed.load(std::memory_order_acquire) & kind) == 0) return false;
  const auto at = place - module_begin;
  const auto* const after = std::upper_bound(left_out, left_out + left_out_count, at,
                                             [](std::uintptr_t a, const LeftOut& each) { return a < each.begin; });
  if (after != left_out && at <= (after - 1)->end) return false;
  const bool is_next = state->asked.fetch_add(1) + 1 == state->failing.load();
  if (std::uintptr_t none = 0; state->failing.load() == kAnew) {
    if (!state->failed_at.compare_exchange_strong(none, place)) return false;
    if (!is_new(place)) return state->failed_at = 0, false;
  } else if (is_next) {
    state->failed_at = place;
  } else {
    return false;
  }
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  state->failed_when = now.tv_sec * 1'000'000'000 + now.tv_nsec;
  if (const std::int64_t most = state->delay.load(); most > 0) {
    const timespec pause{most / 1'000'000'000, most % 1'000'000'000};
    nanosleep(&pause, nullptr);
    return false;
  }
  return true;
}

#define FAILS(kind) fails(kind, reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)))
#define OR_FAIL(kind, error, value) \
  if (FAILS(kind)) return errno = (error), (value)

void* new_(std::size_t bytes) {
  if (FAILS(allocation)) throw std::bad_alloc();
  return operator new(bytes);
}
void* new_array(std::size_t bytes) {
  if (FAILS(allocation)) throw std::bad_alloc();
  return operator new[](bytes);
}
void* new_aligned(std::size_t bytes, std::align_val_t alignment) {
  if (FAILS(allocation)) throw std::bad_alloc();
  return operator new(bytes, alignment);
}
void* new_array_aligned(std::size_t bytes, std::align_val_t alignment) {
  if (FAILS(allocation)) throw std::bad_alloc();
  return operator new[](bytes, alignment);
}
void* new_or_null(std::size_t bytes, const std::nothrow_t& nothrow) {
  return FAILS(allocation) ? nullptr : operator new(bytes, nothrow);
}
void* aligned_alloc_(std::size_t alignment, std::size_t bytes) {
  OR_FAIL(allocation, ENOMEM, nullptr);
  return aligned_alloc(alignment, bytes);
}
int posix_memalign_(void** memory, std::size_t alignment, std::size_t bytes) {  // of c10: a tensor's values
  return FAILS(tensor) ? ENOMEM : posix_memalign(memory, alignment, bytes);
}

void* mmap_(void* at, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  OR_FAIL(mapping, ENOMEM, MAP_FAILED);
  return mmap(at, bytes, protection, flags, fd, offset);
}
int fallocate_(int fd, int mode, off_t begin, off_t bytes) {
  OR_FAIL(mapping, ENOSPC, -1);
  return fallocate(fd, mode, begin, bytes);
}
ssize_t pwrite_(int fd, const void* from, std::size_t bytes, off_t at) {
  OR_FAIL(disk, ENOSPC, -1);
  return pwrite(fd, from, bytes, at);
}
// Of Python, and of libstdc++'s files: to a file, or to memory, which has no name.
#define OR_FAIL_TO_WRITE(fd)                              \
  struct stat status;                                     \
  if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) \
  OR_FAIL(status.st_nlink == 0 ? mapping : disk, status.st_nlink == 0 ? ENOMEM : ENOSPC, -1)
ssize_t write_(int fd, const void* from, std::size_t bytes) {
  OR_FAIL_TO_WRITE(fd);
  return write(fd, from, bytes);
}
ssize_t writev_(int fd, const iovec* from, int count) {
  OR_FAIL_TO_WRITE(fd);
  return writev(fd, from, count);
}
int ftruncate_(int fd, off_t bytes) {
  OR_FAIL(mapping, ENOSPC, -1);
  return ftruncate(fd, bytes);
}

constexpr char kStartThread[] = "_ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE";

// Stands for std::thread's private member that starts one; `state` is passed as the reference that the ABI makes of it.
void start_thread(void* self, void* state, void (*depend)()) {
  if (FAILS(thread)) throw std::system_error(EAGAIN, std::generic_category());
  static const auto start = reinterpret_cast<decltype(&start_thread)>(dlsym(RTLD_DEFAULT, kStartThread));
  start(self, state, depend);
}

int memfd_create_(const char* name, unsigned flags) {
  OR_FAIL(descriptor, EMFILE, -1);
  return memfd_create(name, flags);
}
int socket_(int domain, int type, int protocol) {
  OR_FAIL(descriptor, EMFILE, -1);
  return socket(domain, type, protocol);
}
int socketpair_(int domain, int type, int protocol, int* ends) {
  OR_FAIL(descriptor, EMFILE, -1);
  return socketpair(domain, type, protocol, ends);
}
int accept4_(int fd, sockaddr* address, socklen_t* length, int flags) {
  OR_FAIL(descriptor, EMFILE, -1);
  return accept4(fd, address, length, flags);
}
int eventfd_(unsigned value, int flags) {
  OR_FAIL(descriptor, EMFILE, -1);
  return eventfd(value, flags);
}
int epoll_create1_(int flags) {
  OR_FAIL(descriptor, EMFILE, -1);
  return epoll_create1(flags);
}
int epoll_ctl_(int epoll, int operation, int fd, epoll_event* event) {
  if (operation == EPOLL_CTL_ADD) OR_FAIL(descriptor, ENOSPC, -1);
  return epoll_ctl(epoll, operation, fd, event);
}
int pipe2_(int* ends, int flags) {
  OR_FAIL(descriptor, EMFILE, -1);
  return pipe2(ends, flags);
}
int fcntl_(int fd, int command, ...) {
  va_list rest;
  va_start(rest, command);
  const long argument = va_arg(rest, long);
  va_end(rest);
  if (command == F_DUPFD_CLOEXEC) OR_FAIL(descriptor, EMFILE, -1);
  return fcntl(fd, command, argument);
}
long syscall_(long number, ...) {
  va_list rest;
  va_start(rest, number);
  long arguments[6];
  for (long& each : arguments) each = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_pidfd_open) OR_FAIL(descriptor, EMFILE, -1);
  if (number == SYS_futex) static_cast<void>(FAILS(wait));
  return syscall(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}

int connect_(int fd, const sockaddr* address, socklen_t length) {
  OR_FAIL(socket_call, ENOBUFS, -1);
  return connect(fd, address, length);
}
ssize_t send_(int fd, const void* bytes, std::size_t count, int flags) {
  OR_FAIL(socket_call, ENOBUFS, -1);
  return send(fd, bytes, count, flags);
}
ssize_t sendmsg_(int fd, const msghdr* message, int flags) {
  OR_FAIL(socket_call, ENOBUFS, -1);
  return sendmsg(fd, message, flags);
}
ssize_t readv_(int fd, const iovec* to, int count) {
  OR_FAIL(socket_call, ENOBUFS, -1);
  return readv(fd, to, count);
}
// Of descriptors that come, as the kernel does where a process has no room for them: none, and MSG_CTRUNC.
ssize_t recvmsg_(int fd, msghdr* message, int flags) {
  OR_FAIL(socket_call, ENOBUFS, -1);
  const ssize_t got = recvmsg(fd, message, flags);
  if (got < 0 || message->msg_controllen == 0 || !FAILS(descriptor)) return got;
  for (cmsghdr* each = CMSG_FIRSTHDR(message); each != nullptr; each = CMSG_NXTHDR(message, each))
    if (each->cmsg_level == SOL_SOCKET && each->cmsg_type == SCM_RIGHTS)
      for (auto at = CMSG_DATA(each), end = reinterpret_cast<unsigned char*>(each) + each->cmsg_len; at < end;
           at += sizeof(int)) {
        int received;
        std::memcpy(&received, at, sizeof received);
        close(received);
      }
  message->msg_controllen = 0;
  message->msg_flags |= MSG_CTRUNC;
  return got;
}

int poll_(pollfd* polled, nfds_t count, int timeout) {
  static_cast<void>(FAILS(wait));
  return poll(polled, count, timeout);
}
int epoll_wait_(int epoll, epoll_event* events, int most, int timeout) {
  static_cast<void>(FAILS(wait));
  return epoll_wait(epoll, events, most, timeout);
}

template <class F>
void* address(F* function) {
  return reinterpret_cast<void*>(function);
}

const struct Replaced {
  std::string_view object, symbol;
  void* by;
} kReplaced[] = {
    {"ringreduce/_C", "_Znwm", address(new_)},
    {"ringreduce/_C", "_Znam", address(new_array)},
    {"ringreduce/_C", "_ZnwmSt11align_val_t", address(new_aligned)},
    {"ringreduce/_C", "_ZnamSt11align_val_t", address(new_array_aligned)},
    {"ringreduce/_C", "_ZnwmRKSt9nothrow_t", address(new_or_null)},
    {"ringreduce/_C", "aligned_alloc", address(aligned_alloc_)},
    {"ringreduce/_C", "mmap", address(mmap_)},
    {"ringreduce/_C", "ftruncate", address(ftruncate_)},
    {"ringreduce/_C", "fallocate", address(fallocate_)},
    {"ringreduce/_C", "pwrite", address(pwrite_)},
    {"ringreduce/_C", kStartThread, address(start_thread)},
    {"ringreduce/_C", "memfd_create", address(memfd_create_)},
    {"ringreduce/_C", "socket", address(socket_)},
    {"ringreduce/_C", "socketpair", address(socketpair_)},
    {"ringreduce/_C", "accept4", address(accept4_)},
    {"ringreduce/_C", "eventfd", address(eventfd_)},
    {"ringreduce/_C", "epoll_create1", address(epoll_create1_)},
    {"ringreduce/_C", "epoll_ctl", address(epoll_ctl_)},
    {"ringreduce/_C", "pipe2", address(pipe2_)},
    {"ringreduce/_C", "fcntl", address(fcntl_)},
    {"ringreduce/_C", "syscall", address(syscall_)},
    {"ringreduce/_C", "connect", address(connect_)},
    {"ringreduce/_C", "send", address(send_)},
    {"ringreduce/_C", "sendmsg", address(sendmsg_)},
    {"ringreduce/_C", "readv", address(readv_)},
    {"ringreduce/_C", "recvmsg", address(recvmsg_)},
    {"ringreduce/_C", "poll", address(poll_)},
    {"ringreduce/_C", "epoll_wait", address(epoll_wait_)},
    {"libc10.so", "posix_memalign", address(posix_memalign_)},
    {"libpython", "write", address(write_)},
    {"libstdc++", "write", address(write_)},
    {"libstdc++", "writev", address(writev_)},
};

// Of an object that is loaded: its relocations of calls, whose addresses it replaces.
int visit(dl_phdr_info* info, std::size_t, void* count) {
  const std::string_view name = info->dlpi_name;
  const bool ours = name.find("ringreduce/_C") != name.npos;
  if (std::none_of(std::begin(kReplaced), std::end(kReplaced),
                   [&](const Replaced& each) { return name.find(each.object) != name.npos; }))
    return 0;
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + header.p_vaddr);
    if (ours && header.p_type == PT_LOAD && (header.p_flags & PF_X) != 0) {
      module_begin = info->dlpi_addr;
      module_end = info->dlpi_addr + header.p_vaddr + header.p_memsz;
    }
  }
  const ElfW(Rela) * tables[2] = {nullptr, nullptr};
  std::size_t bytes[2] = {0, 0};
  const ElfW(Sym)* symbols = nullptr;
  const char* strings = nullptr;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    if (dynamic->d_tag == DT_JMPREL) tables[0] = reinterpret_cast<const ElfW(Rela)*>(dynamic->d_un.d_ptr);
    if (dynamic->d_tag == DT_PLTRELSZ) bytes[0] = dynamic->d_un.d_val;
    if (dynamic->d_tag == DT_RELA) tables[1] = reinterpret_cast<const ElfW(Rela)*>(dynamic->d_un.d_ptr);
    if (dynamic->d_tag == DT_RELASZ) bytes[1] = dynamic->d_un.d_val;
    if (dynamic->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(dynamic->d_un.d_ptr);
    if (dynamic->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(dynamic->d_un.d_ptr);
  }
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  for (int table : {0, 1})
    for (std::size_t i = 0; i < bytes[table] / sizeof(ElfW(Rela)); ++i) {
      const ElfW(Rela) & each = tables[table][i];
      const std::string_view symbol = strings + symbols[ELF64_R_SYM(each.r_info)].st_name;
      for (const Replaced& replaced : kReplaced) {
        if (symbol != replaced.symbol || name.find(replaced.object) == name.npos) continue;
        auto* const slot = reinterpret_cast<void**>(info->dlpi_addr + each.r_offset);
        void* const start = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(slot) & ~(page - 1));
        if (mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return -1;
        *slot = replaced.by;
        ++*static_cast<int*>(count);
      }
    }
  return 0;
}

}  // namespace

extern "C" {

// The number of addresses that were replaced, -1 where that failed. Requests made in `parts`, which are sorted and stay
// where they are, neither count nor fail.
int requests_install(const LeftOut* parts, std::size_t parts_count) {
  left_out = parts;
  left_out_count = parts_count;
  int count = 0;
  return dl_iterate_phdr(visit, &count) == 0 ? count : -1;
}

// The `number`-th request of `kinds` from now on fails, or takes `nanoseconds`; 0: none does, all are counted; kAnew:
// the first that is made where none has failed before.
void requests_arm(unsigned kinds, std::uint64_t number, std::int64_t nanoseconds) {
  state->asked = 0;
  state->failing = number;
  state->delay = nanoseconds;
  state->failed_at = 0;
  state->failed_when = 0;
  state->armed.store(kinds, std::memory_order_release);
}

// How many requests there were. `place`: of the one that failed; an offset, if it was made in ringreduce's module; 0 if
// none failed. `line`: if it was made in Python. `when`: in nanoseconds of CLOCK_MONOTONIC.
std::uint64_t requests_disarm(std::uint64_t* place, const char** line, std::int64_t* when) {
  state->armed = 0;
  const std::uintptr_t at = state->failed_at.load();
  *place = at >= module_begin && at < module_end ? at - module_begin : at;
  *line = state->line;
  *when = state->failed_when;
  return state->asked.load();
}

// Counts one of Python's requests, and says whether it fails. `place`: a number for `line`, where it is made.
int requests_ask(unsigned kind, std::uintptr_t place, const char* line) {
  const bool is_armed = state->armed.load() != 0, fail = fails(static_cast<Kind>(kind), place);
  if (is_armed && state->failed_at.load() == place) snprintf(state->line, sizeof state->line, "%s", line);
  return fail;
}
}
