// A stand-in for the CUDA driver that runs on the CPU: built as libcuda.so.1, it lets everything on the host's side of
// csrc/cuda run, and be checked by sanitizers, on a machine without a GPU, across real processes.
//
// What stands for what
//   device memory   a memfd, mapped shared, with rubbish at both ends; IPC handles name it by process and descriptor,
//                   VMM handles are descriptors of it
//   a stream        a thread that does what was queued, in order. The null stream is one of them: it does not wait for
//                   other streams, nor they for it
//   a module        a shared object: its image is the text "so:/path/to/it"
//   a kernel NAME   its function stand_in_NAME, a StandInKernel, called once a block, in a thread of the block's own.
//                   stand_in_NAME_parameters (a std::size_t) is the size of its one parameter, a struct. At most
//                   RINGREDUCE_STAND_IN_BLOCKS (64) blocks of a device run at once; more wait, as on a GPU. Blocks are
//                   threads on few cores: one that waits should yield
//   a graph         the calls that a capture recorded, and what each comes after; a launch does them in that order
// As the real driver does, it refuses calls without a current context, calls of a forked child, and what a capture
// forbids. It is stricter in one thing: cuMemFree does not wait for work that still uses the memory.
//
// RINGREDUCE_STAND_IN_DEVICES (2), _MEMORY (bytes of each device, 8 GB), _NO_PEER, _NO_IPC and _NO_VMM (=1: the driver
// says that it cannot) choose what machine it plays.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda/api.h"

using namespace ringreduce::cuda;

// `parameters` holds pointers to the kernel's parameters, of which there is one.
using StandInKernel = void(const void* const* parameters, unsigned block, unsigned blocks, unsigned threads);

namespace {

constexpr CUresult kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidImage = 200,
                   kInvalidContext = 201, kPeerAccessUnsupported = 217, kInvalidHandle = 400, kNotFound = 500,
                   kCaptureUnsupported = 900, kCaptureInvalidated = 901, kCaptureMerge = 902, kCaptureUnmatched = 903,
                   kCaptureUnjoined = 904, kCaptureIsolation = 905, kCapturedEvent = 907;

constexpr struct {
  CUresult result;
  const char *name, *text;
} kResults[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kPeerAccessUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kPeerAccessAlreadyEnabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {kCaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {kCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
};

std::size_t setting(const char* name, std::size_t otherwise) {
  const char* const text = std::getenv((std::string("RINGREDUCE_STAND_IN_") + name).c_str());
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 10);
}

constexpr std::size_t kBlockBytes = std::size_t{2} << 20;

// ---- work -----------------------------------------------------------------------------------------------------------

using Operation = std::function<void()>;
using Clock = std::chrono::steady_clock;

// Something that happens once.
class Moment {
 public:
  void happen() {
    std::lock_guard lock(mutex_);
    when_ = Clock::now();
    happened_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return happened_; });
  }
  bool happened() {
    std::lock_guard lock(mutex_);
    return happened_;
  }
  Clock::time_point when() {
    std::lock_guard lock(mutex_);
    return when_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool happened_ = false;
  Clock::time_point when_;
};

struct Node {
  Operation operation;
  std::vector<std::size_t> after;  // indices of earlier nodes
};

struct Graph {
  std::vector<Node> nodes;

  void run() const {
    std::deque<Moment> done(nodes.size());
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < nodes.size(); i++)
      threads.emplace_back([&, i] {
        for (const std::size_t earlier : nodes[i].after) done[earlier].wait();
        nodes[i].operation();
        done[i].happen();
      });
    for (std::thread& thread : threads) thread.join();
  }

  bool comes_after(const std::vector<std::size_t>& ends, std::size_t node) const {
    return std::any_of(ends.begin(), ends.end(), [&](std::size_t end) {
      return end == node || (end > node && comes_after(nodes[end].after, node));
    });
  }
};

struct Stream;

struct Capture {
  const Stream* origin;
  int mode;
  std::thread::id thread;
  bool invalid = false;
  Graph graph;
  std::map<Stream*, std::vector<std::size_t>> ends;  // of each stream in it: what its next node comes after
};

// A thread that does what is queued, until it is told to end and has done all.
class Worker {
 public:
  Worker() : queue_(std::make_shared<Queue>()) {
    std::thread([queue = queue_] {
      std::unique_lock lock(queue->mutex);
      for (;;) {
        queue->changed.wait(lock, [&] { return queue->ending || !queue->operations.empty(); });
        if (queue->operations.empty()) return;
        const Operation operation = std::move(queue->operations.front());
        lock.unlock();
        operation();
        lock.lock();
        queue->operations.pop_front();
        queue->changed.notify_all();
      }
    }).detach();
  }
  ~Worker() {
    std::lock_guard lock(queue_->mutex);
    queue_->ending = true;
    queue_->changed.notify_all();
  }
  void push(Operation operation) {
    std::lock_guard lock(queue_->mutex);
    queue_->operations.push_back(std::move(operation));
    queue_->changed.notify_all();
  }
  bool idle() {
    std::lock_guard lock(queue_->mutex);
    return queue_->operations.empty();
  }

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Operation> operations;
    bool ending = false;
  };
  std::shared_ptr<Queue> queue_;
};

struct Stream {
  int device;
  Worker worker{};
  std::shared_ptr<Capture> capture{};  // of which it is a part
};

struct Event {
  bool timed;
  std::shared_ptr<Moment> moment{};    // of the latest record
  std::shared_ptr<Capture> capture{};  // in which that was
  std::vector<std::size_t> ends{};     // and after which nodes
};

// Lets a number of blocks run at once.
class Slots {
 public:
  explicit Slots(std::size_t free) : free_(free) {}
  void take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return free_ > 0; });
    free_--;
  }
  void give_back() {
    std::lock_guard lock(mutex_);
    free_++;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t free_;
};

// ---- what there is --------------------------------------------------------------------------------------------------

// A piece of memory: its memfd, as long as anybody has it.
struct Piece {
  int fd;
  std::size_t bytes;
  int device;
  bool counts;  // against the device's memory: made here, not imported
  ~Piece();
};

enum class Place { device, ipc, reserved, host };

struct Range {
  Place place;
  std::size_t bytes;
  int device;
  std::shared_ptr<Piece> piece{};  // of reserved addresses: what is mapped there
  int opened = 1;                  // how often, for ipc
};

struct Device {
  explicit Device(int number) : ordinal(number), slots(setting("BLOCKS", 64)) {}
  int ordinal;
  int retained = 0;
  std::size_t used = 0;
  std::set<int> peers;  // whose memory it may access
  Slots slots;
  std::unique_ptr<Stream> null_stream;
};

struct Function {
  StandInKernel* call;
  std::size_t parameter_bytes;
};

struct Module {
  void* library;
  std::map<std::string, std::unique_ptr<Function>> functions{};
};

struct Machine {
  std::mutex mutex;  // of all below
  bool initialized = false;
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

std::atomic<bool> forked{false};

// Never destroyed: streams' threads may still run when the process ends.
Machine& machine() {
  static Machine& one = *new Machine;
  return one;
}

thread_local std::vector<Device*> contexts;

Piece::~Piece() {
  close(fd);
  if (counts) machine().devices[static_cast<std::size_t>(device)].used -= bytes;
}

std::byte* at(CUdeviceptr pointer) { return reinterpret_cast<std::byte*>(pointer); }

// The lock that every call takes; the reason why it may not go on.
struct Guard {
  explicit Guard(bool needs_context = true) : lock(machine().mutex) {
    if (forked || !machine().initialized)
      refusal = kNotInitialized;
    else if (needs_context && contexts.empty())
      refusal = kInvalidContext;
  }
  std::unique_lock<std::mutex> lock;
  CUresult refusal = kSuccess;
};

#define ENTER(...)          \
  Guard guard{__VA_ARGS__}; \
  if (guard.refusal != kSuccess) return guard.refusal

// Calls that could wait for work that a capture holds back make the capture invalid.
CUresult forbidden_by_captures() {
  bool any = false;
  for (const auto& capture : machine().captures) {
    constexpr int kRelaxed = 2, kGlobal = 0;
    if (capture->mode == kRelaxed) continue;
    if (capture->mode != kGlobal && capture->thread != std::this_thread::get_id()) continue;
    capture->invalid = any = true;
  }
  return any ? kCaptureUnsupported : kSuccess;
}

#define ENTER_UNLESS_CAPTURING() \
  ENTER();                       \
  if (const CUresult result = forbidden_by_captures(); result != kSuccess) return result

Stream* find_stream(CUstream handle) {
  constexpr std::uintptr_t kLegacy = 1;
  if (handle == nullptr || reinterpret_cast<std::uintptr_t>(handle) == kLegacy) {
    Device& device = *contexts.back();
    if (device.null_stream == nullptr) device.null_stream.reset(new Stream{device.ordinal});
    return device.null_stream.get();
  }
  const auto found = machine().streams.find(static_cast<Stream*>(handle));
  return found == machine().streams.end() ? nullptr : found->second.get();
}

// Queues `operation`, or records it.
CUresult submit(CUstream handle, Operation operation) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr || stream->device != contexts.back()->ordinal) return kInvalidHandle;
  if (stream->capture == nullptr) {
    stream->worker.push(std::move(operation));
    return kSuccess;
  }
  Capture& capture = *stream->capture;
  if (capture.invalid) return kCaptureInvalidated;
  std::vector<std::size_t>& ends = capture.ends[stream];
  capture.graph.nodes.push_back({std::move(operation), ends});
  ends = {capture.graph.nodes.size() - 1};
  return kSuccess;
}

// The range that holds [pointer, pointer + bytes), or null.
Range* find_range(CUdeviceptr pointer, std::size_t bytes, CUdeviceptr* start = nullptr) {
  auto next = machine().ranges.upper_bound(pointer);
  if (next == machine().ranges.begin()) return nullptr;
  auto& [first, range] = *--next;
  if (pointer - first > range.bytes || bytes > range.bytes - (pointer - first) || pointer == first + range.bytes)
    return nullptr;
  if (range.place == Place::reserved && range.piece == nullptr) return nullptr;
  if (start != nullptr) *start = first;
  return &range;
}

Device* find_device(CUdevice ordinal) {
  if (ordinal < 0 || static_cast<std::size_t>(ordinal) >= machine().devices.size()) return nullptr;
  return &machine().devices[static_cast<std::size_t>(ordinal)];
}

bool can_access(int device, int other) { return device == other || setting("NO_PEER", 0) == 0; }

std::shared_ptr<Piece> make_piece(Device& device, std::size_t bytes) {
  if (bytes > setting("MEMORY", std::size_t{8} << 30) - device.used) return nullptr;
  const int fd = memfd_create("stand-in device memory", MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  device.used += bytes;
  auto piece = std::make_shared<Piece>(fd, bytes, device.ordinal, true);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) return nullptr;
  std::vector<unsigned char> rubbish(std::min<std::size_t>(bytes, 4096), 0xA5);
  if (pwrite(fd, rubbish.data(), rubbish.size(), 0) < 0 ||
      pwrite(fd, rubbish.data(), rubbish.size(), static_cast<off_t>(bytes - rubbish.size())) < 0)
    return nullptr;
  return piece;
}

void* map_piece(const Piece& piece) {
  void* const mapped = mmap(nullptr, piece.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, piece.fd, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

struct IpcHandle {
  std::uint64_t format;
  std::int32_t pid, fd, device, reserved;
  std::uint64_t bytes, inode;
};
static_assert(sizeof(IpcHandle) <= sizeof(CUipcMemHandle));
constexpr std::uint64_t kIpcFormat = 0x6e69646e617473;

std::uint64_t inode_of(int fd) {
  struct stat facts{};
  return fstat(fd, &facts) == 0 ? facts.st_ino : 0;
}

// Bytes of a memfd; 0 if it is none.
std::size_t bytes_of(int fd) {
  struct stat facts{};
  return fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode) ? static_cast<std::size_t>(facts.st_size) : 0;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) CUresult

// ---- start, devices, contexts ---------------------------------------------------------------------------------------

API cuInit(unsigned) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked = machine().initialized; });
  (void)registered;
  if (forked) return kNotInitialized;
  Machine& all = machine();
  std::lock_guard lock(all.mutex);
  const std::size_t devices = setting("DEVICES", 2);
  if (devices == 0) return kNoDevice;
  for (std::size_t i = all.devices.size(); i < devices; i++) all.devices.emplace_back(static_cast<int>(i));
  all.initialized = true;
  return kSuccess;
}

API cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

API cuGetErrorName(CUresult result, const char** name) {
  for (const auto& known : kResults)
    if (known.result == result) return *name = known.name, kSuccess;
  return *name = nullptr, kInvalidValue;
}

API cuGetErrorString(CUresult result, const char** text) {
  for (const auto& known : kResults)
    if (known.result == result) return *text = known.text, kSuccess;
  return *text = nullptr, kInvalidValue;
}

API cuDeviceGetCount(int* count) {
  ENTER(false);
  *count = static_cast<int>(machine().devices.size());
  return kSuccess;
}

API cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER(false);
  if (find_device(ordinal) == nullptr) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

API cuDeviceGetName(char* name, int bytes, CUdevice device) {
  ENTER(false);
  if (find_device(device) == nullptr) return kInvalidDevice;
  std::snprintf(name, static_cast<std::size_t>(bytes), "Stand-in GPU");
  return kSuccess;
}

API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  ENTER(false);
  if (find_device(device) == nullptr) return kInvalidDevice;
  std::memset(uuid->bytes, 0x5A, sizeof(uuid->bytes));
  uuid->bytes[15] = static_cast<unsigned char>(device);
  return kSuccess;
}

API cuDeviceGetPCIBusId(char* id, int bytes, CUdevice device) {
  ENTER(false);
  if (find_device(device) == nullptr) return kInvalidDevice;
  std::snprintf(id, static_cast<std::size_t>(bytes), "0000:%02x:00.0", device + 1);
  return kSuccess;
}

API cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  ENTER(false);
  if (find_device(device) == nullptr) return kInvalidDevice;
  switch (attribute) {
    case kMultiprocessorCount:
      *value = static_cast<int>(std::max<std::size_t>(setting("BLOCKS", 64) / 2, 1));
      return kSuccess;
    case kComputeCapabilityMajor:
      *value = 9;
      return kSuccess;
    case kComputeCapabilityMinor:
      *value = 0;
      return kSuccess;
    case kVirtualMemoryManagementSupported:
    case kHandleTypePosixFileDescriptorSupported:
      *value = setting("NO_VMM", 0) == 0;
      return kSuccess;
    case kCanUse64BitStreamMemOps:
      *value = 1;
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  ENTER(false);
  Device* const device = find_device(ordinal);
  if (device == nullptr) return kInvalidDevice;
  device->retained++;
  *context = device;
  return kSuccess;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
  ENTER(false);
  Device* const device = find_device(ordinal);
  if (device == nullptr) return kInvalidDevice;
  if (device->retained == 0) return kInvalidContext;
  device->retained--;
  return kSuccess;
}

API cuCtxPushCurrent_v2(CUcontext context) {
  ENTER(false);
  if (context == nullptr || static_cast<Device*>(context)->retained == 0) return kInvalidContext;
  contexts.push_back(static_cast<Device*>(context));
  return kSuccess;
}

API cuCtxPopCurrent_v2(CUcontext* context) {
  ENTER();
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

API cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  ENTER(false);
  if (find_device(device) == nullptr || find_device(peer) == nullptr) return kInvalidDevice;
  *can = device != peer && can_access(device, peer);
  return kSuccess;
}

API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  ENTER();
  if (flags != 0) return kInvalidValue;
  const Device& other = *static_cast<Device*>(peer);
  if (&other == contexts.back()) return kInvalidDevice;
  if (!can_access(contexts.back()->ordinal, other.ordinal)) return kPeerAccessUnsupported;
  return contexts.back()->peers.insert(other.ordinal).second ? kSuccess : kPeerAccessAlreadyEnabled;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

API cuMemAlloc_v2(CUdeviceptr* pointer, std::size_t bytes) {
  ENTER_UNLESS_CAPTURING();
  if (bytes == 0) return kInvalidValue;
  auto piece = make_piece(*contexts.back(), bytes);
  void* const mapped = piece == nullptr ? nullptr : map_piece(*piece);
  if (mapped == nullptr) return kOutOfMemory;
  *pointer = reinterpret_cast<CUdeviceptr>(mapped);
  machine().ranges[*pointer] = {Place::device, bytes, contexts.back()->ordinal, std::move(piece)};
  return kSuccess;
}

API cuMemFree_v2(CUdeviceptr pointer) {
  ENTER_UNLESS_CAPTURING();
  const auto found = machine().ranges.find(pointer);
  if (found == machine().ranges.end() || found->second.place != Place::device) return kInvalidValue;
  munmap(at(pointer), found->second.bytes);
  machine().ranges.erase(found);
  return kSuccess;
}

API cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  ENTER_UNLESS_CAPTURING();
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return kOutOfMemory;
  std::memset(mapped, 0xA5, std::min<std::size_t>(bytes, 4096));
  *pointer = mapped;
  machine().ranges[reinterpret_cast<CUdeviceptr>(mapped)] = {Place::host, bytes, contexts.back()->ordinal};
  return kSuccess;
}

API cuMemFreeHost(void* pointer) {
  ENTER_UNLESS_CAPTURING();
  const auto found = machine().ranges.find(reinterpret_cast<CUdeviceptr>(pointer));
  if (found == machine().ranges.end() || found->second.place != Place::host) return kInvalidValue;
  munmap(pointer, found->second.bytes);
  machine().ranges.erase(found);
  return kSuccess;
}

API cuMemHostGetDevicePointer_v2(CUdeviceptr* pointer, void* host, unsigned) {
  ENTER();
  const Range* const range = find_range(reinterpret_cast<CUdeviceptr>(host), 1);
  if (range == nullptr || range->place != Place::host) return kInvalidValue;
  *pointer = reinterpret_cast<CUdeviceptr>(host);
  return kSuccess;
}

API cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t count, CUstream stream) {
  ENTER();
  if (count > 0 && find_range(to, count) == nullptr) return kInvalidValue;
  return submit(stream, [=] { std::memset(at(to), value, count); });
}

API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  ENTER();  // either may be any memory of the host
  return submit(stream, [=] { std::memcpy(at(to), at(from), bytes); });
}

API cuPointerGetAttribute(void* value, int attribute, CUdeviceptr pointer) {
  ENTER(false);
  CUdeviceptr start = 0;
  const Range* const range = find_range(pointer, 1, &start);
  if (range == nullptr) return kInvalidValue;
  switch (attribute) {
    case kPointerAttributeMemoryType:
      *static_cast<unsigned*>(value) = range->place == Place::host ? kMemoryTypeHost : kMemoryTypeDevice;
      return kSuccess;
    case kPointerAttributeDeviceOrdinal:
      *static_cast<int*>(value) = range->device;
      return kSuccess;
    case kPointerAttributeRangeStart:
      *static_cast<CUdeviceptr*>(value) = start;
      return kSuccess;
    case kPointerAttributeRangeSize:
      *static_cast<std::size_t*>(value) = range->bytes;
      return kSuccess;
    default:
      return kNotSupported;
  }
}

// ---- memory between processes ---------------------------------------------------------------------------------------

API cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  ENTER();
  if (setting("NO_IPC", 0) != 0) return kNotSupported;
  const Range* const range = find_range(pointer, 1);
  if (range == nullptr || range->place != Place::device) return kInvalidValue;
  const IpcHandle content{kIpcFormat, getpid(),     range->piece->fd,          range->device,
                          0,          range->bytes, inode_of(range->piece->fd)};
  *handle = {};
  std::memcpy(handle->reserved, &content, sizeof(content));
  return kSuccess;
}

API cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned flags) {
  ENTER();
  IpcHandle content;
  std::memcpy(&content, handle.reserved, sizeof(content));
  if (content.format != kIpcFormat || flags != kIpcMemLazyEnablePeerAccess) return kInvalidValue;
  if (content.pid == getpid()) return kInvalidContext;
  if (find_device(content.device) == nullptr) return kInvalidDevice;
  if (!can_access(contexts.back()->ordinal, content.device)) return kPeerAccessUnsupported;
  const std::string path = "/proc/" + std::to_string(content.pid) + "/fd/" + std::to_string(content.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidHandle;
  auto piece = std::make_shared<Piece>(fd, content.bytes, content.device, false);
  if (inode_of(fd) != content.inode || bytes_of(fd) != content.bytes) return kInvalidHandle;
  for (auto& [start, range] : machine().ranges)
    if (range.place == Place::ipc && inode_of(range.piece->fd) == content.inode) {
      range.opened++;
      *pointer = start;
      return kSuccess;
    }
  void* const mapped = map_piece(*piece);
  if (mapped == nullptr) return kOutOfMemory;
  *pointer = reinterpret_cast<CUdeviceptr>(mapped);
  machine().ranges[*pointer] = {Place::ipc, content.bytes, content.device, std::move(piece)};
  return kSuccess;
}

API cuIpcCloseMemHandle(CUdeviceptr pointer) {
  ENTER();
  const auto found = machine().ranges.find(pointer);
  if (found == machine().ranges.end() || found->second.place != Place::ipc) return kInvalidValue;
  if (--found->second.opened > 0) return kSuccess;
  munmap(at(pointer), found->second.bytes);
  machine().ranges.erase(found);
  return kSuccess;
}

API cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp*, int) {
  ENTER(false);
  *granularity = kBlockBytes;
  return kSuccess;
}

API cuMemCreate(CUmemGenericAllocationHandle* memory, std::size_t bytes, const CUmemAllocationProp* properties,
                unsigned long long) {
  ENTER(false);
  Device* const device = find_device(properties->location.id);
  if (device == nullptr) return kInvalidDevice;
  if (setting("NO_VMM", 0) != 0) return kNotSupported;
  if (bytes == 0 || bytes % kBlockBytes != 0 || properties->type != kMemAllocationTypePinned) return kInvalidValue;
  auto piece = make_piece(*device, bytes);
  if (piece == nullptr) return kOutOfMemory;
  *memory = machine().next_handle++;
  machine().virtual_memory[*memory] = std::move(piece);
  return kSuccess;
}

API cuMemRelease(CUmemGenericAllocationHandle memory) {
  ENTER(false);
  return machine().virtual_memory.erase(memory) == 1 ? kSuccess : kInvalidValue;
}

API cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle memory, int type, unsigned long long) {
  ENTER(false);
  const auto found = machine().virtual_memory.find(memory);
  if (found == machine().virtual_memory.end() || type != kMemHandleTypePosixFileDescriptor) return kInvalidValue;
  *static_cast<int*>(shareable) = dup(found->second->fd);
  return kSuccess;
}

API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* memory, void* shareable, int type) {
  ENTER(false);
  const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(shareable));
  const std::size_t bytes = bytes_of(fd);
  if (type != kMemHandleTypePosixFileDescriptor || bytes == 0 || bytes % kBlockBytes != 0) return kInvalidValue;
  *memory = machine().next_handle++;
  machine().virtual_memory[*memory] = std::make_shared<Piece>(fcntl(fd, F_DUPFD_CLOEXEC, 0), bytes,
                                                              contexts.empty() ? 0 : contexts.back()->ordinal, false);
  return kSuccess;
}

API cuMemAddressReserve(CUdeviceptr* pointer, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  ENTER(false);
  if (bytes == 0 || bytes % kBlockBytes != 0) return kInvalidValue;
  void* const mapped = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return kOutOfMemory;
  *pointer = reinterpret_cast<CUdeviceptr>(mapped);
  machine().ranges[*pointer] = {Place::reserved, bytes, 0};
  return kSuccess;
}

API cuMemAddressFree(CUdeviceptr pointer, std::size_t bytes) {
  ENTER(false);
  const auto found = machine().ranges.find(pointer);
  if (found == machine().ranges.end() || found->second.place != Place::reserved || found->second.bytes != bytes ||
      found->second.piece != nullptr)
    return kInvalidValue;
  munmap(at(pointer), bytes);
  machine().ranges.erase(found);
  return kSuccess;
}

API cuMemMap(CUdeviceptr pointer, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle memory,
             unsigned long long) {
  ENTER(false);
  const auto found = machine().ranges.find(pointer);
  const auto piece = machine().virtual_memory.find(memory);
  if (found == machine().ranges.end() || found->second.place != Place::reserved || found->second.bytes != bytes ||
      found->second.piece != nullptr || piece == machine().virtual_memory.end() || piece->second->bytes != bytes ||
      offset != 0)
    return kInvalidValue;
  if (mmap(at(pointer), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, piece->second->fd, 0) == MAP_FAILED)
    return kOutOfMemory;
  found->second.piece = piece->second;
  found->second.device = piece->second->device;
  return kSuccess;
}

API cuMemUnmap(CUdeviceptr pointer, std::size_t bytes) {
  ENTER(false);
  const auto found = machine().ranges.find(pointer);
  if (found == machine().ranges.end() || found->second.place != Place::reserved || found->second.bytes != bytes ||
      found->second.piece == nullptr)
    return kInvalidValue;
  mmap(at(pointer), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  found->second.piece = nullptr;
  return kSuccess;
}

API cuMemSetAccess(CUdeviceptr pointer, std::size_t bytes, const CUmemAccessDesc* access, std::size_t count) {
  ENTER(false);
  const auto found = machine().ranges.find(pointer);
  if (found == machine().ranges.end() || found->second.place != Place::reserved || found->second.bytes != bytes ||
      found->second.piece == nullptr)
    return kInvalidValue;
  for (std::size_t i = 0; i < count; i++) {
    if (find_device(access[i].location.id) == nullptr) return kInvalidDevice;
    if (access[i].flags != kMemAccessReadWrite) return kNotSupported;
  }
  return mprotect(at(pointer), bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}

// ---- streams and events ---------------------------------------------------------------------------------------------

API cuStreamCreateWithPriority(CUstream* handle, unsigned, int) {
  ENTER();
  auto stream = std::unique_ptr<Stream>(new Stream{contexts.back()->ordinal});
  *handle = stream.get();
  machine().streams[stream.get()] = std::move(stream);
  return kSuccess;
}

API cuStreamDestroy_v2(CUstream handle) {
  ENTER();
  const auto found = machine().streams.find(static_cast<Stream*>(handle));
  if (found == machine().streams.end()) return kInvalidHandle;
  if (found->second->capture != nullptr) {
    found->second->capture->invalid = true;
    found->second->capture->ends.erase(found->second.get());
  }
  machine().streams.erase(found);
  return kSuccess;
}

API cuStreamSynchronize(CUstream handle) {
  ENTER_UNLESS_CAPTURING();
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture != nullptr) return stream->capture->invalid = true, kCaptureUnsupported;
  const auto reached = std::make_shared<Moment>();
  stream->worker.push([reached] { reached->happen(); });
  guard.lock.unlock();
  reached->wait();
  return kSuccess;
}

API cuStreamQuery(CUstream handle) {
  ENTER_UNLESS_CAPTURING();
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture != nullptr) return stream->capture->invalid = true, kCaptureUnsupported;
  return stream->worker.idle() ? kSuccess : kNotReady;
}

API cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned) {
  ENTER();
  Stream* const stream = find_stream(handle);
  Event* const event = static_cast<Event*>(event_handle);
  if (stream == nullptr || !machine().events.contains(event)) return kInvalidHandle;
  const bool ended = event->capture != nullptr && !machine().captures.contains(event->capture);
  if (event->capture != nullptr && !ended) {
    if (stream->capture != nullptr && stream->capture != event->capture) return kCaptureMerge;
    stream->capture = event->capture;
    std::vector<std::size_t>& ends = stream->capture->ends[stream];
    ends.insert(ends.end(), event->ends.begin(), event->ends.end());
    return kSuccess;
  }
  if (stream->capture != nullptr) return stream->capture->invalid = true, kCaptureIsolation;
  if (ended) return kCapturedEvent;
  if (event->moment != nullptr) stream->worker.push([moment = event->moment] { moment->wait(); });
  return kSuccess;
}

API cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned flags) {
  ENTER();
  if (address % 8 != 0 || find_range(address, 8) == nullptr || flags > 1) return kInvalidValue;
  return submit(stream, [=] {
    std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(address));
    const auto there = [&] {
      const std::uint64_t now = word.load(std::memory_order_acquire);
      return flags == kStreamWaitValueGeq ? static_cast<std::int64_t>(now - value) >= 0 : now == value;
    };
    while (!there()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
}

API cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned flags) {
  ENTER();
  if (address % 8 != 0 || find_range(address, 8) == nullptr || flags != 0) return kInvalidValue;
  return submit(stream, [=] {
    std::atomic_ref(*reinterpret_cast<std::uint64_t*>(address)).store(value, std::memory_order_release);
  });
}

API cuEventCreate(CUevent* handle, unsigned flags) {
  ENTER();
  Event* const event = new Event{(flags & kEventDisableTiming) == 0};
  machine().events.insert(event);
  *handle = event;
  return kSuccess;
}

API cuEventDestroy_v2(CUevent handle) {
  ENTER();
  if (machine().events.erase(static_cast<Event*>(handle)) == 0) return kInvalidHandle;
  delete static_cast<Event*>(handle);
  return kSuccess;
}

API cuEventRecord(CUevent handle, CUstream stream_handle) {
  ENTER();
  Event* const event = static_cast<Event*>(handle);
  Stream* const stream = find_stream(stream_handle);
  if (!machine().events.contains(event) || stream == nullptr) return kInvalidHandle;
  if (stream->device != contexts.back()->ordinal) return kInvalidHandle;
  event->capture = stream->capture;
  event->moment = nullptr;
  if (stream->capture != nullptr) {
    event->ends = stream->capture->ends[stream];
    return kSuccess;
  }
  event->moment = std::make_shared<Moment>();
  stream->worker.push([moment = event->moment] { moment->happen(); });
  return kSuccess;
}

API cuEventQuery(CUevent handle) {
  ENTER_UNLESS_CAPTURING();
  Event* const event = static_cast<Event*>(handle);
  if (!machine().events.contains(event)) return kInvalidHandle;
  if (event->capture != nullptr) return kCapturedEvent;
  return event->moment == nullptr || event->moment->happened() ? kSuccess : kNotReady;
}

API cuEventSynchronize(CUevent handle) {
  ENTER_UNLESS_CAPTURING();
  Event* const event = static_cast<Event*>(handle);
  if (!machine().events.contains(event)) return kInvalidHandle;
  if (event->capture != nullptr) return kCapturedEvent;
  const std::shared_ptr<Moment> moment = event->moment;
  guard.lock.unlock();
  if (moment != nullptr) moment->wait();
  return kSuccess;
}

API cuEventElapsedTime(float* milliseconds, CUevent start_handle, CUevent end_handle) {
  ENTER();
  Event* const start = static_cast<Event*>(start_handle);
  Event* const end = static_cast<Event*>(end_handle);
  for (Event* const event : {start, end}) {
    if (!machine().events.contains(event) || !event->timed || event->moment == nullptr) return kInvalidHandle;
    if (!event->moment->happened()) return kNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(end->moment->when() - start->moment->when()).count();
  return kSuccess;
}

// ---- kernels --------------------------------------------------------------------------------------------------------

API cuModuleLoadData(CUmodule* handle, const void* image) {
  ENTER();
  const char* const text = static_cast<const char*>(image);
  if (std::strncmp(text, "so:", 3) != 0) return kInvalidImage;
  void* const library = dlopen(text + 3, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "stand-in libcuda: %s\n", dlerror());
    return kInvalidImage;
  }
  Module* const module = new Module{library};
  machine().modules.insert(module);
  *handle = module;
  return kSuccess;
}

API cuModuleUnload(CUmodule handle) {
  ENTER();
  Module* const module = static_cast<Module*>(handle);
  if (machine().modules.erase(module) == 0) return kInvalidHandle;
  dlclose(module->library);
  delete module;
  return kSuccess;
}

API cuModuleGetFunction(CUfunction* handle, CUmodule module_handle, const char* name) {
  ENTER();
  Module* const module = static_cast<Module*>(module_handle);
  if (!machine().modules.contains(module)) return kInvalidHandle;
  const std::string symbol = std::string("stand_in_") + name;
  auto* const call = reinterpret_cast<StandInKernel*>(dlsym(module->library, symbol.c_str()));
  const auto* const bytes = static_cast<const std::size_t*>(dlsym(module->library, (symbol + "_parameters").c_str()));
  if (call == nullptr || bytes == nullptr) return kNotFound;
  std::unique_ptr<Function>& function = module->functions[name];
  if (function == nullptr) function.reset(new Function{call, *bytes});
  *handle = function.get();
  return kSuccess;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, std::size_t) {
  ENTER();
  if (threads < 1 || threads > 1024) return kInvalidValue;
  *blocks = static_cast<int>(std::min<std::size_t>(setting("BLOCKS", 64), 2));
  return kSuccess;
}

API cuLaunchKernel(CUfunction handle, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                   unsigned threads_y, unsigned threads_z, unsigned, CUstream stream, void** parameters, void** extra) {
  ENTER();
  if (handle == nullptr) return kInvalidHandle;
  if (blocks == 0 || threads == 0 || threads > 1024 || blocks_y != 1 || blocks_z != 1 || threads_y != 1 ||
      threads_z != 1 || extra != nullptr)
    return kInvalidValue;
  const Function function = *static_cast<Function*>(handle);
  // Copies, aligned as any struct may ask for.
  const auto copy =
      std::make_shared<std::vector<std::max_align_t>>(function.parameter_bytes / sizeof(std::max_align_t) + 1);
  std::memcpy(copy->data(), parameters[0], function.parameter_bytes);
  Slots& slots = contexts.back()->slots;
  return submit(stream, [=, &slots] {
    const void* const pointers[] = {copy->data()};
    std::vector<std::thread> running;
    for (unsigned block = 0; block < blocks; block++) {
      slots.take();
      running.emplace_back([&, block] {
        function.call(pointers, block, blocks, threads);
        slots.give_back();
      });
    }
    for (std::thread& thread : running) thread.join();
  });
}

// ---- graphs: what torch calls, not we
// --------------------------------------------------------------------------------

API cuStreamIsCapturing(CUstream handle, int* status) {
  ENTER();
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  *status = stream->capture == nullptr ? kStreamCaptureStatusNone : stream->capture->invalid ? 2 : 1;
  return kSuccess;
}

API cuStreamBeginCapture_v2(CUstream handle, int mode) {
  ENTER();
  Stream* const stream = find_stream(handle);
  if (stream == nullptr || stream == contexts.back()->null_stream.get()) return kCaptureUnsupported;
  if (stream->capture != nullptr) return kInvalidValue;
  stream->capture = std::make_shared<Capture>(stream, mode, std::this_thread::get_id());
  stream->capture->ends[stream] = {};
  machine().captures.insert(stream->capture);
  return kSuccess;
}

API cuStreamEndCapture(CUstream handle, void** graph_handle) {
  ENTER();
  *graph_handle = nullptr;
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture == nullptr) return kInvalidValue;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture->origin != stream) return capture->invalid = true, kCaptureUnmatched;
  machine().captures.erase(capture);
  const std::vector<std::size_t> last = capture->ends[stream];
  bool joined = true;
  for (const auto& [member, ends] : capture->ends) {
    member->capture = nullptr;
    for (const std::size_t end : ends) joined = joined && capture->graph.comes_after(last, end);
  }
  if (capture->invalid) return kCaptureInvalidated;
  if (!joined) return kCaptureUnjoined;
  const auto graph = std::make_shared<const Graph>(std::move(capture->graph));
  machine().graphs[graph.get()] = graph;
  *graph_handle = const_cast<Graph*>(graph.get());
  return kSuccess;
}

API cuGraphInstantiateWithFlags(void** executable, void* graph_handle, unsigned long long) {
  ENTER();
  const auto found = machine().graphs.find(static_cast<const Graph*>(graph_handle));
  if (found == machine().graphs.end()) return kInvalidHandle;
  const auto copy = std::make_shared<const Graph>(*found->second);
  machine().graphs[copy.get()] = copy;
  *executable = const_cast<Graph*>(copy.get());
  return kSuccess;
}

API cuGraphLaunch(void* executable, CUstream stream) {
  ENTER();
  const auto found = machine().graphs.find(static_cast<const Graph*>(executable));
  if (found == machine().graphs.end()) return kInvalidHandle;
  return submit(stream, [graph = found->second] { graph->run(); });
}

API cuGraphDestroy(void* graph) {
  ENTER();
  return machine().graphs.erase(static_cast<const Graph*>(graph)) == 1 ? kSuccess : kInvalidHandle;
}

API cuGraphExecDestroy(void* executable) { return cuGraphDestroy(executable); }

// What was built must be what csrc/cuda calls.
#define DECLARED(name, suffix, parameters) static_assert(std::is_same_v<decltype(name##suffix), CUresult parameters>);
RINGREDUCE_CUDA_FUNCTIONS(DECLARED)
