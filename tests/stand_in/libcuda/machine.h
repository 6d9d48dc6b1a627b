// A stand-in for the CUDA driver that runs on the CPU: built as libcuda.so.1, it lets everything on the host's side of
// csrc/cuda run, and be checked by sanitizers, on a machine without a GPU, across real processes.
//
// What stands for what
//   device memory   a memfd, mapped shared, with rubbish at both ends; IPC handles name it by process and descriptor,
//                   VMM handles are descriptors of it
//   a stream        a thread that does what was queued, in order. The null stream is one of them: it does not wait for
//                   other streams, nor they for it
//   a module        a shared object: its image is the text "so:/path/to/it"
//   a kernel NAME   its function stand_in_NAME, a StandInKernel (see ../kernel.h), called once a block, in a thread of
//                   the block's own. It has one parameter, a struct. At most RINGREDUCE_STAND_IN_BLOCKS (64) blocks of
//                   a device run at once; more wait, as on a GPU. Blocks are threads on few cores: one that waits
//                   should yield
//   a graph         the calls that a capture recorded, and what each comes after; a launch does them in that order
// As the real driver does, it refuses calls without a current context, calls of a forked child, and what a capture
// forbids. It is stricter in one thing: cuMemFree does not wait for work that still uses the memory.
//
// It is built, with kernels for it, by ../build.py, and opened by processes that have RINGREDUCE_LIBCUDA=/path/to/it.
// RINGREDUCE_STAND_IN_DEVICES (2), _MEMORY (bytes of each device, 8 GB), _NO_PEER, _NO_IPC, _NO_VMM, _NO_RANGE_SIZE and
// _NO_HOST_REGISTER (=1: the driver says that it cannot) choose what machine it plays; _VISIBLE (such as 1 or 1,0: all)
// which of its devices this process sees, in which order. stand_in_calls says how often a function was called.
//
// RINGREDUCE_STAND_IN_CONTEXT_LOCK=1: calls hold their context, as the real driver's may. Every call that needs a
// context takes a lock of it. Some keep the lock while they wait: the first launch of a kernel, which loads it, until
// the context's streams are idle; an allocation, until those of all devices that may access it are; any launch, until
// its stream has room in its queue.
//
// This file is what all parts of it know; work.h has the threads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/api.h"
#include "probe_api.h"
#include "work.h"

#define API extern "C" __attribute__((visibility("default"))) CUresult

// What csrc/cuda and bench/gpu/driver.py call: the definitions must be these.
namespace ringreduce::cuda {
#define DECLARE(name, suffix, parameters) API name##suffix parameters;
RINGREDUCE_CUDA_FUNCTIONS(DECLARE)
PROBE_CUDA_FUNCTIONS(DECLARE)
#undef DECLARE
}  // namespace ringreduce::cuda

namespace stand_in {

using namespace ringreduce::cuda;

// `parameters` holds pointers to the kernel's parameters, of which there is one.
using StandInKernel = void(const void* const* parameters, unsigned block, unsigned blocks, unsigned threads);

constexpr CUresult kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidImage = 200,
                   kInvalidContext = 201, kPeerAccessUnsupported = 217, kInvalidHandle = 400, kCaptureUnsupported = 900,
                   kCaptureInvalidated = 901, kCaptureMerge = 902, kCaptureUnmatched = 903, kCaptureUnjoined = 904,
                   kCaptureIsolation = 905, kCapturedEvent = 907;
constexpr int kCaptureModeGlobal = 0;

std::size_t setting(const char* name, std::size_t otherwise);

constexpr std::size_t kBlockBytes = std::size_t{2} << 20;

struct Stream;

struct Capture {
  const Stream* origin;
  int mode;
  std::thread::id thread;
  bool invalid = false;
  Graph graph;
  std::map<Stream*, std::vector<std::size_t>> ends;  // of each stream in it: what its next node comes after
};

struct Stream {
  int device;
  int priority = 0;
  Worker worker{};
  std::shared_ptr<Capture> capture{};  // of which it is a part
};

struct Event {
  bool timed;
  std::shared_ptr<Moment> moment{};    // of the latest record
  std::shared_ptr<Capture> capture{};  // in which that was
  std::vector<std::size_t> ends{};     // and after which nodes
};

// A piece of memory: its memfd, as long as anybody has it.
struct Piece {
  int fd;
  std::size_t bytes;
  int device;
  bool counts;  // against the device's memory: made here, not imported
  ~Piece();
};

enum class Place { device, ipc, reserved, host, registered };

struct Range {
  Place place;
  std::size_t bytes;
  int device;
  std::shared_ptr<Piece> piece{};  // of reserved addresses: what is mapped there
  int opened = 1;                  // how often, for ipc
};

struct Device {
  Device(int as_seen, int of_machine) : ordinal(as_seen), number(of_machine), slots(setting("BLOCKS", 64)) {}
  int ordinal;
  int number;  // the same in all processes
  int retained = 0;
  std::size_t used = 0;
  std::set<int> peers;  // whose memory it may access
  Slots slots;
  std::unique_ptr<Stream> null_stream;
  std::mutex context;  // with CONTEXT_LOCK: held by a call under way
};

struct Function {
  StandInKernel* call;
  std::size_t parameter_bytes;
  unsigned most_threads;  // of a block
  bool loaded = false;
};

struct Module {
  void* library;
  std::map<std::string, std::unique_ptr<Function>> functions{};
};

struct Machine {
  std::mutex mutex;  // of all below
  bool initialized = false;
  std::map<std::string_view, std::size_t> calls;  // of each function
  bool locks_contexts = false;
  std::deque<Device> devices;
  std::map<CUdeviceptr, Range> ranges;
  std::map<CUmemGenericAllocationHandle, std::shared_ptr<Piece>> virtual_memory;
  CUmemGenericAllocationHandle next_handle = 1;
  std::map<Stream*, std::unique_ptr<Stream>> streams;
  std::set<Event*> events;
  std::set<Module*> modules;
  std::set<std::shared_ptr<Capture>> captures;
  std::map<const Graph*, std::shared_ptr<const Graph>> graphs;  // and those ready to be launched
};

extern std::atomic<bool> forked;
extern thread_local std::vector<Device*> contexts;  // of this thread, the current one last
extern thread_local int capture_mode;               // what captures forbid this thread

Machine& machine();

constexpr std::size_t kQueueLength = 1024;  // operations of a stream that a launch does not wait for

// The locks that every call takes; the reason why it may not go on.
class Guard {
 public:
  explicit Guard(const char* function, bool needs_context = true) : machine_lock_(machine().mutex) {
    machine().calls[function]++;
    if (forked || !machine().initialized) {
      refusal = kNotInitialized;
    } else if (needs_context && contexts.empty()) {
      refusal = kInvalidContext;
    } else if (needs_context && machine().locks_contexts) {
      machine_lock_.unlock();
      context_lock_ = std::unique_lock(contexts.back()->context);
      machine_lock_.lock();
    }
  }
  CUresult refusal = kSuccess;

  // For a call that waits without holding its context.
  void unlock() {
    machine_lock_.unlock();
    if (context_lock_) context_lock_.unlock();
  }
  // Where calls hold their contexts, waits until `ready`, which is called with the machine's lock.
  template <class Ready>
  void wait_in_context(Ready ready) {
    while (context_lock_ && !ready()) {
      machine_lock_.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      machine_lock_.lock();
    }
  }

 private:
  std::unique_lock<std::mutex> context_lock_, machine_lock_;
};

#define ENTER(...)                                  \
  Guard guard{__func__ __VA_OPT__(, ) __VA_ARGS__}; \
  if (guard.refusal != kSuccess) return guard.refusal

// Calls that could wait for work that a capture holds back make the capture invalid, unless this thread is relaxed.
CUresult forbidden_by_captures();

#define ENTER_UNLESS_CAPTURING() \
  ENTER();                       \
  if (const CUresult result = forbidden_by_captures(); result != kSuccess) return result

// All that find return null if there is none.
Device* find_device(CUdevice ordinal);
Stream* find_stream(CUstream handle);
Event* find_event(CUevent handle);
// The range that holds [pointer, pointer + bytes).
Range* find_range(CUdeviceptr pointer, std::size_t bytes, CUdeviceptr* start = nullptr);
// All of a range of reserved addresses, that has memory or not.
Range* find_reserved(CUdeviceptr pointer, std::size_t bytes, bool mapped);

bool can_access(int device, int other);  // numbers of the machine
inline bool is_of_host(const Range& range) { return range.place == Place::host || range.place == Place::registered; }

// Whether no stream of the current context has anything to do; nor any of a device that may access its memory.
bool context_is_idle();
bool peers_are_idle();

// Queues `operation`, or records it.
CUresult submit(CUstream handle, Operation operation);

inline std::byte* at(CUdeviceptr pointer) { return reinterpret_cast<std::byte*>(pointer); }

// Null if there is no room.
std::shared_ptr<Piece> make_piece(Device& device, std::size_t bytes);
void* map_piece(const Piece& piece);
// Unmaps what was mapped at `pointer` as a whole, and forgets it.
CUresult unmap(CUdeviceptr pointer, Place place);

}  // namespace stand_in
