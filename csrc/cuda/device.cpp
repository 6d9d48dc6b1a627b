#include "cuda/device.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "core/fork.h"

namespace ringreduce::cuda {
namespace {

// " on device 0"
std::string on(const DeviceInfo& device) { return " on device " + std::to_string(device.ordinal()); }
std::string of_bytes_on(std::size_t bytes, const Device& device) { return " of " + in_bytes(bytes) + on(device); }

// For calls that need no context. Throws what the driver says, and where.
template <class... P, class... A>
void ask(const DeviceInfo& device, const DriverFunction<CUresult(P...)>& function, A&&... arguments) {
  if (const CUresult result = function.attempt(std::forward<A>(arguments)...); result != kSuccess)
    function.refuse(result, on(device));
}

// For all others.
template <class... P, class... A>
void call(const Device& device, const DriverFunction<CUresult(P...)>& function, A&&... arguments) {
  const Device::Use use(device);
  ask(device, function, std::forward<A>(arguments)...);
}

// Whether the GPU has passed what `query` asks about.
template <class Handle>
bool passed(const Device& device, const DriverFunction<CUresult(Handle)>& query, Handle handle) {
  const Device::Use use(device);
  const CUresult result = query.attempt(handle);
  if (result != kSuccess && result != kNotReady) query.refuse(result, on(device));
  return result == kSuccess;
}

// The events that are free, by device and whether they are timed.
struct FreeEvents {
  static constexpr std::size_t kMost = 1024;  // of a kind; what a burst of calls took beyond that is destroyed
  std::mutex mutex;
  std::map<std::pair<int, bool>, std::vector<std::unique_ptr<const Event>>> by_kind;
};

}  // namespace

int DeviceInfo::count() {
  int count = 0;
  driver().cuDeviceGetCount(&count);
  return count;
}

DeviceInfo::DeviceInfo(int ordinal) : ordinal_(ordinal) {
  const Driver& cuda = driver();
  const int devices = count();
  if (ordinal < 0 || ordinal >= devices)
    throw Error(ErrorKind::system, "there is no CUDA device " + std::to_string(ordinal) + ": the driver sees " +
                                       std::to_string(devices) + ", counted from 0; see CUDA_VISIBLE_DEVICES");
  ask(*this, cuda.cuDeviceGet, &device_, ordinal);
  char text[256] = "";
  ask(*this, cuda.cuDeviceGetName, text, static_cast<int>(sizeof text), device_);
  name_ = text;
  ask(*this, cuda.cuDeviceGetPCIBusId, text, static_cast<int>(sizeof text), device_);
  pci_bus_id_ = text;
  CUuuid uuid;
  ask(*this, cuda.cuDeviceGetUuid, &uuid, device_);
  std::memcpy(uuid_.data(), uuid.bytes, uuid_.size());
  multiprocessors_ = attribute(kMultiprocessorCount);
  capability_ = 10 * attribute(kComputeCapabilityMajor) + attribute(kComputeCapabilityMinor);
  has_stream_values_ = attribute(kCanUse64BitStreamMemOps) != 0;
}

int DeviceInfo::attribute(int number) const {
  int value = 0;
  return driver().cuDeviceGetAttribute.attempt(&value, number, device_) == kSuccess ? value : 0;
}

bool DeviceInfo::can_access(const DeviceInfo& other) const {
  if (device_ == other.device_) return true;
  int can = 0;
  ask(*this, driver().cuDeviceCanAccessPeer, &can, device_, other.device_);
  return can != 0;
}

std::string DeviceInfo::describe() const {
  return "device " + std::to_string(ordinal_) + " (" + name_ + ", " + pci_bus_id_ + ")";
}

Device::Device(int ordinal) : DeviceInfo(ordinal) { ask(*this, driver().cuDevicePrimaryCtxRetain, &context_, device_); }

Device::~Device() {
  if (const Driver* const cuda = driver_in_use()) (void)cuda->cuDevicePrimaryCtxRelease.attempt(device_);
}

void Device::enable_access(const Device& other) const {
  if (device_ == other.device_) return;
  const Use use(*this);
  const auto& enable = driver().cuCtxEnablePeerAccess;
  const CUresult result = enable.attempt(other.context_, 0);
  if (result != kSuccess && result != kPeerAccessAlreadyEnabled)
    enable.refuse(result, " of " + describe() + " to " + other.describe());
}

Device::Use::Use(const Device& device) { ask(device, driver().cuCtxPushCurrent, device.context_); }

Device::Use::~Use() {
  CUcontext before;
  (void)driver_in_use()->cuCtxPopCurrent.attempt(&before);
}

RelaxedCapture::RelaxedCapture() : before_(kStreamCaptureModeRelaxed) {
  driver().cuThreadExchangeStreamCaptureMode(&before_);
}

RelaxedCapture::~RelaxedCapture() {
  if (const Driver* const cuda = driver_in_use()) (void)cuda->cuThreadExchangeStreamCaptureMode.attempt(&before_);
}

Event::Event(const DevicePtr& device, bool timed) : event_(device) {
  call(*device, driver().cuEventCreate, event_.fill(), timed ? 0 : kEventDisableTiming);
}

bool Event::done() const { return passed(*event_.device(), driver().cuEventQuery, event_.get()); }

void Event::synchronize() const { call(*event_.device(), driver().cuEventSynchronize, event_.get()); }

float Event::milliseconds_since(const Event& start) const {
  float milliseconds = 0;
  call(*event_.device(), driver().cuEventElapsedTime, &milliseconds, start.event_.get(), event_.get());
  return milliseconds;
}

PooledEvent::PooledEvent(const DevicePtr& device, bool timed) : timed_(timed) {
  FreeEvents& free = process_wide<FreeEvents>();
  std::unique_lock lock(free.mutex);
  auto& events = free.by_kind[{device->ordinal(), timed}];
  if (events.empty()) {
    lock.unlock();
    event_ = std::make_unique<const Event>(device, timed);
    return;
  }
  event_ = std::move(events.back());
  events.pop_back();
}

PooledEvent::~PooledEvent() {
  if (driver_in_use() == nullptr) return;  // in a forked child, whose events are its parent's
  FreeEvents& free = process_wide<FreeEvents>();
  std::lock_guard lock(free.mutex);
  auto& events = free.by_kind[{event_->device()->ordinal(), timed_}];
  if (events.size() < FreeEvents::kMost) events.push_back(std::move(event_));
}

DeviceMemory::DeviceMemory(const DevicePtr& device, std::size_t bytes) : memory_(device), bytes_(bytes) {
  const Device::Use use(*device);
  const auto& allocate = driver().cuMemAlloc;
  if (const CUresult result = allocate.attempt(memory_.fill(), bytes); result != kSuccess)
    allocate.refuse(result, of_bytes_on(bytes, *device));
  zero(device, memory_.get(), bytes);
}

HostMemory::HostMemory(const DevicePtr& device, std::size_t bytes) : memory_(device), bytes_(bytes) {
  const Device::Use use(*device);
  const auto& allocate = driver().cuMemHostAlloc;
  if (const CUresult result = allocate.attempt(memory_.fill(), bytes, kMemHostAllocPortable | kMemHostAllocDeviceMap);
      result != kSuccess)
    allocate.refuse(result, of_bytes_on(bytes, *device));
  ask(*device, driver().cuMemHostGetDevicePointer, &pointer_, memory_.get(), 0u);
  std::memset(memory_.get(), 0, bytes);
}

Module::Module(const DevicePtr& device, const void* image) : module_(device) {
  const Device::Use use(*device);
  const auto& load = driver().cuModuleLoadData;
  if (const CUresult result = load.attempt(module_.fill(), image); result != kSuccess)
    load.refuse(result, " on " + device->describe() + " of compute capability " +
                            std::to_string(device->capability() / 10) + "." +
                            std::to_string(device->capability() % 10));
}

std::optional<Function> Module::find(const char* name) const {
  const Device& device = *module_.device();
  const Device::Use use(device);
  Function function{nullptr, name};
  const auto& get = driver().cuModuleGetFunction;
  const CUresult result = get.attempt(&function.handle, module_.get(), name);
  if (result == kNotFound) return std::nullopt;
  if (result != kSuccess) get.refuse(result, " of " + function.name + on(device));
  return function;
}

Function Module::function(const char* name) const {
  if (const auto found = find(name)) return *found;
  driver().cuModuleGetFunction.refuse(kNotFound, " of " + std::string(name) + on(*module_.device()));
}

unsigned resident_blocks(const Device& device, const Function& function, unsigned threads) {
  int blocks = 0;
  call(device, driver().cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, function.handle,
       static_cast<int>(threads), std::size_t{0});
  return static_cast<unsigned>(blocks * device.multiprocessors());
}

Stream::Stream(const DevicePtr& device, int priority) : own_(device) {
  call(*device, driver().cuStreamCreateWithPriority, own_.fill(), kStreamNonBlocking, priority);
  stream_ = own_.get();
}

void Stream::record(const Event& event) const { call(*device(), driver().cuEventRecord, event.handle(), stream_); }

void Stream::wait(const Event& event) const {
  call(*device(), driver().cuStreamWaitEvent, stream_, event.handle(), 0u);
}

void Stream::fill(CUdeviceptr to, unsigned char value, std::size_t bytes) const {
  call(*device(), driver().cuMemsetD8Async, to, value, bytes, stream_);
}

void Stream::copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) const {
  call(*device(), driver().cuMemcpyAsync, to, from, bytes, stream_);
}

void Stream::take_values(std::span<const StreamValue> values) const {
  std::vector<CUstreamBatchMemOpParams> operations;
  for (const StreamValue& each : values) {
    const bool waits = each.kind == StreamValue::Kind::wait;
    operations.push_back({.operation = waits ? kStreamMemOpWaitValue64 : kStreamMemOpWriteValue64,
                          .address = each.address,
                          .value64 = each.value,
                          .flags = waits ? kStreamWaitValueEq : 0,
                          .alias = 0,
                          .unused = 0});
  }
  for (std::size_t done = 0; done < operations.size(); done += kMostStreamMemOps) {
    const std::size_t now = std::min<std::size_t>(operations.size() - done, kMostStreamMemOps);
    call(*device(), driver().cuStreamBatchMemOp, stream_, static_cast<unsigned>(now), operations.data() + done, 0u);
  }
}

void Stream::launch_with(const Function& function, Grid grid, void** pointers) const {
  const Device::Use use(*device());
  const auto& launch = driver().cuLaunchKernel;
  const CUresult result = launch.attempt(function.handle, grid.blocks, 1, 1, grid.threads, 1, 1, grid.shared_bytes,
                                         stream_, pointers, nullptr);
  if (result != kSuccess)
    launch.refuse(result, " of " + function.name + " with " + std::to_string(grid.blocks) + " blocks of " +
                              std::to_string(grid.threads) + " threads" + on(*device()));
}

bool Stream::done() const { return passed(*device(), driver().cuStreamQuery, stream_); }

void Stream::synchronize() const { call(*device(), driver().cuStreamSynchronize, stream_); }

bool Stream::capturing() const {
  int status = kStreamCaptureStatusNone;
  call(*device(), driver().cuStreamIsCapturing, stream_, &status);
  return status != kStreamCaptureStatusNone;
}

bool capturing(int ordinal, CUstream stream) {
  try {
    return Stream::borrowed(std::make_shared<Device>(ordinal), stream).capturing();
  } catch (const Error&) {
    return false;
  }
}

void zero(const DevicePtr& device, CUdeviceptr pointer, std::size_t bytes) {
  const Stream stream(device);
  stream.fill(pointer, 0, bytes);
  stream.synchronize();
}

std::string in_bytes(std::size_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  while (unit < 4 && bytes >= 1024 && bytes % 1024 == 0) bytes /= 1024, ++unit;
  return std::to_string(bytes) + " " + kUnits[unit];
}

}  // namespace ringreduce::cuda
