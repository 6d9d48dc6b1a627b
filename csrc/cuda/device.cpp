#include "cuda/device.h"

#include <cstring>
#include <utility>

namespace ringreduce::cuda {
namespace {

// " on device 0"
std::string on(const Device& device) { return " on device " + std::to_string(device.ordinal()); }
std::string of_bytes_on(std::size_t bytes, const Device& device) { return " of " + in_bytes(bytes) + on(device); }

// Does what the driver reports as `result`; throws what it says, and where.
template <class... P, class... A>
void call(const Device& device, const Call<CUresult(P...)>& function, A&&... arguments) {
  if (const CUresult result = function.attempt(std::forward<A>(arguments)...); result != kSuccess)
    function.refuse(result, on(device));
}

// For destructors: gives `handle` back, unless the process has no driver any more.
template <class Handle>
void release(const Device& device, const Call<CUresult(Handle)> Driver::* function, Handle handle) noexcept {
  const Driver* const cuda = driver_in_use();
  if (cuda == nullptr || handle == Handle{}) return;
  try {
    const Device::Use use(device);
    (void)(cuda->*function).attempt(handle);
  } catch (const Error&) {  // the context is gone, and what was in it
  }
}

}  // namespace

int Device::count() {
  int count = 0;
  driver().cuDeviceGetCount(&count);
  return count;
}

Device::Device(int ordinal) : ordinal_(ordinal) {
  const Driver& cuda = driver();
  const int devices = count();
  if (ordinal < 0 || ordinal >= devices)
    throw Error(ErrorKind::system, "there is no CUDA device " + std::to_string(ordinal) + ": the driver sees " +
                                       std::to_string(devices) + ", counted from 0; see CUDA_VISIBLE_DEVICES");
  call(*this, cuda.cuDeviceGet, &device_, ordinal);
  char text[256] = "";
  call(*this, cuda.cuDeviceGetName, text, static_cast<int>(sizeof text), device_);
  name_ = text;
  call(*this, cuda.cuDeviceGetPCIBusId, text, static_cast<int>(sizeof text), device_);
  pci_bus_id_ = text;
  CUuuid uuid;
  call(*this, cuda.cuDeviceGetUuid, &uuid, device_);
  std::memcpy(uuid_.data(), uuid.bytes, uuid_.size());
  multiprocessors_ = attribute(kMultiprocessorCount);
  capability_ = 10 * attribute(kComputeCapabilityMajor) + attribute(kComputeCapabilityMinor);
  has_stream_values_ = attribute(kCanUse64BitStreamMemOps) != 0;
  call(*this, cuda.cuDevicePrimaryCtxRetain, &context_, device_);
}

Device::~Device() {
  if (const Driver* const cuda = driver_in_use()) (void)cuda->cuDevicePrimaryCtxRelease.attempt(device_);
}

int Device::attribute(int number) const {
  int value = 0;
  return driver().cuDeviceGetAttribute.attempt(&value, number, device_) == kSuccess ? value : 0;
}

bool Device::can_access(const Device& other) const {
  if (device_ == other.device_) return true;
  int can = 0;
  call(*this, driver().cuDeviceCanAccessPeer, &can, device_, other.device_);
  return can != 0;
}

void Device::enable_access(const Device& other) const {
  if (device_ == other.device_) return;
  const Use use(*this);
  const auto& enable = driver().cuCtxEnablePeerAccess;
  const CUresult result = enable.attempt(other.context_, 0);
  if (result != kSuccess && result != kPeerAccessAlreadyEnabled)
    enable.refuse(result, " of " + describe() + " to " + other.describe());
}

std::string Device::describe() const {
  return "device " + std::to_string(ordinal_) + " (" + name_ + ", " + pci_bus_id_ + ")";
}

Device::Use::Use(const Device& device) { call(device, driver().cuCtxPushCurrent, device.context_); }

Device::Use::~Use() {
  CUcontext before;
  (void)driver_in_use()->cuCtxPopCurrent.attempt(&before);
}

Event::Event(DevicePtr device, bool timed) : device_(std::move(device)) {
  const Device::Use use(*device_);
  call(*device_, driver().cuEventCreate, &event_, timed ? 0 : kEventDisableTiming);
}

Event::~Event() { release(*device_, &Driver::cuEventDestroy, event_); }

bool Event::done() const {
  const Device::Use use(*device_);
  const auto& query = driver().cuEventQuery;
  const CUresult result = query.attempt(event_);
  if (result != kSuccess && result != kNotReady) query.refuse(result, on(*device_));
  return result == kSuccess;
}

void Event::synchronize() const {
  const Device::Use use(*device_);
  call(*device_, driver().cuEventSynchronize, event_);
}

float Event::milliseconds_since(const Event& start) const {
  const Device::Use use(*device_);
  float milliseconds = 0;
  call(*device_, driver().cuEventElapsedTime, &milliseconds, start.event_, event_);
  return milliseconds;
}

DeviceMemory::DeviceMemory(DevicePtr device, std::size_t bytes) : device_(std::move(device)), bytes_(bytes) {
  const Device::Use use(*device_);
  const auto& allocate = driver().cuMemAlloc;
  if (const CUresult result = allocate.attempt(&pointer_, bytes); result != kSuccess)
    allocate.refuse(result, of_bytes_on(bytes, *device_));
  try {
    zero(device_, pointer_, bytes);
  } catch (...) {
    (void)driver().cuMemFree.attempt(pointer_);
    throw;
  }
}

DeviceMemory::~DeviceMemory() { release(*device_, &Driver::cuMemFree, pointer_); }

HostMemory::HostMemory(DevicePtr device, std::size_t bytes) : device_(std::move(device)), bytes_(bytes) {
  const Device::Use use(*device_);
  const auto& allocate = driver().cuMemHostAlloc;
  if (const CUresult result = allocate.attempt(&data_, bytes, kMemHostAllocPortable | kMemHostAllocDeviceMap);
      result != kSuccess)
    allocate.refuse(result, of_bytes_on(bytes, *device_));
  const auto& map = driver().cuMemHostGetDevicePointer;
  if (const CUresult result = map.attempt(&pointer_, data_, 0); result != kSuccess) {
    (void)driver().cuMemFreeHost.attempt(data_);
    map.refuse(result, on(*device_));
  }
  std::memset(data_, 0, bytes);
}

HostMemory::~HostMemory() { release(*device_, &Driver::cuMemFreeHost, data_); }

Module::Module(DevicePtr device, const void* image) : device_(std::move(device)) {
  const Device::Use use(*device_);
  const auto& load = driver().cuModuleLoadData;
  if (const CUresult result = load.attempt(&module_, image); result != kSuccess)
    load.refuse(result, " on " + device_->describe() + " of compute capability " +
                            std::to_string(device_->capability() / 10) + "." +
                            std::to_string(device_->capability() % 10));
}

Module::~Module() { release(*device_, &Driver::cuModuleUnload, module_); }

Function Module::function(const char* name) const {
  const Device::Use use(*device_);
  Function function{nullptr, name};
  const auto& get = driver().cuModuleGetFunction;
  if (const CUresult result = get.attempt(&function.handle, module_, name); result != kSuccess)
    get.refuse(result, " of " + function.name + on(*device_));
  return function;
}

int Module::resident_blocks(const Function& function, unsigned threads, std::size_t shared_bytes) const {
  const Device::Use use(*device_);
  int blocks = 0;
  call(*device_, driver().cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, function.handle,
       static_cast<int>(threads), shared_bytes);
  return blocks * device_->multiprocessors();
}

Stream::Stream(DevicePtr device, int priority) : device_(std::move(device)), owned_(true) {
  const Device::Use use(*device_);
  call(*device_, driver().cuStreamCreateWithPriority, &stream_, kStreamNonBlocking, priority);
}

Stream::~Stream() {
  if (owned_) release(*device_, &Driver::cuStreamDestroy, stream_);
}

void Stream::record(const Event& event) const {
  const Device::Use use(*device_);
  call(*device_, driver().cuEventRecord, event.handle(), stream_);
}

void Stream::wait(const Event& event) const {
  const Device::Use use(*device_);
  call(*device_, driver().cuStreamWaitEvent, stream_, event.handle(), 0u);
}

void Stream::fill(CUdeviceptr to, unsigned char value, std::size_t bytes) const {
  const Device::Use use(*device_);
  call(*device_, driver().cuMemsetD8Async, to, value, bytes, stream_);
}

void Stream::copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) const {
  const Device::Use use(*device_);
  call(*device_, driver().cuMemcpyAsync, to, from, bytes, stream_);
}

void Stream::wait_value(CUdeviceptr address, std::uint64_t value) const {
  const Device::Use use(*device_);
  call(*device_, driver().cuStreamWaitValue64, stream_, address, value, kStreamWaitValueGeq);
}

void Stream::write_value(CUdeviceptr address, std::uint64_t value) const {
  const Device::Use use(*device_);
  call(*device_, driver().cuStreamWriteValue64, stream_, address, value, 0u);
}

void Stream::launch_with(const Function& function, Grid grid, void** pointers) const {
  const Device::Use use(*device_);
  const auto& launch = driver().cuLaunchKernel;
  const CUresult result = launch.attempt(function.handle, grid.blocks, 1, 1, grid.threads, 1, 1, grid.shared_bytes,
                                         stream_, pointers, nullptr);
  if (result != kSuccess)
    launch.refuse(result, " of " + function.name + " with " + std::to_string(grid.blocks) + " blocks of " +
                              std::to_string(grid.threads) + " threads" + on(*device_));
}

bool Stream::done() const {
  const Device::Use use(*device_);
  const auto& query = driver().cuStreamQuery;
  const CUresult result = query.attempt(stream_);
  if (result != kSuccess && result != kNotReady) query.refuse(result, on(*device_));
  return result == kSuccess;
}

void Stream::synchronize() const {
  const Device::Use use(*device_);
  call(*device_, driver().cuStreamSynchronize, stream_);
}

bool Stream::capturing() const {
  const Device::Use use(*device_);
  int status = kStreamCaptureStatusNone;
  call(*device_, driver().cuStreamIsCapturing, stream_, &status);
  return status != kStreamCaptureStatusNone;
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
