// A GPU and what can be made on one: streams, events, memory, kernels. Thin owners of the driver's handles; every
// function makes its device's context current for as long as it takes, and throws Error(system) that names the device.
//
// All of them keep their device open, so they may be destroyed in any order. A destructor neither throws nor waits for
// the GPU: whoever drops memory or a module has waited for what used it. In a forked child destructors do nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "cuda/driver.h"

namespace ringreduce::cuda {

// Facts about a GPU. Reading them opens nothing on it.
class DeviceInfo {
 public:
  static int count();

  // `ordinal` as torch counts. Throws Error(system).
  explicit DeviceInfo(int ordinal);

  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  const std::array<unsigned char, 16>& uuid() const { return uuid_; }
  const std::string& pci_bus_id() const { return pci_bus_id_; }  // "0000:3b:00.0"
  int multiprocessors() const { return multiprocessors_; }
  int capability() const { return capability_; }  // 90 for 9.0
  // Whether Stream::take_values works.
  bool has_stream_values() const { return has_stream_values_; }
  // A CU_DEVICE_ATTRIBUTE; 0 if the driver does not know it.
  int attribute(int number) const;

  // Whether kernels of this device can access memory of `other`.
  bool can_access(const DeviceInfo& other) const;

  // "device 0 (NVIDIA H100 80GB HBM3, 0000:3b:00.0)"
  std::string describe() const;

 private:
  friend class Device;
  int ordinal_;
  CUdevice device_ = 0;
  std::string name_, pci_bus_id_;
  std::array<unsigned char, 16> uuid_{};
  int multiprocessors_ = 0, capability_ = 0;
  bool has_stream_values_ = false;
};

// One that is open: its primary context, which torch uses too.
class Device : public DeviceInfo {
 public:
  // Throws Error(system).
  explicit Device(int ordinal);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Lets kernels of this device access all memory of cuMemAlloc on `other`. Throws Error(system) if they cannot.
  void enable_access(const Device& other) const;

  // While it lives, calls of this thread are for this device.
  class Use {
   public:
    explicit Use(const Device& device);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
  };

 private:
  CUcontext context_ = nullptr;
};

using DevicePtr = std::shared_ptr<const Device>;

// A handle that the driver gave on `device`, given back by `Release`, unless it is null or the process has no driver
// any more.
template <class Handle, DriverFunction<CUresult(Handle)> Driver::* Release>
class Resource {
 public:
  explicit Resource(DevicePtr device) : device_(std::move(device)) {}
  ~Resource() {
    const Driver* const cuda = driver_in_use();
    if (cuda == nullptr || handle_ == Handle{}) return;
    try {
      const Device::Use use(*device_);
      (void)(cuda->*Release).attempt(handle_);
    } catch (const Error&) {  // the context is gone, and what was in it
    }
  }
  Resource(const Resource&) = delete;
  Resource& operator=(const Resource&) = delete;

  const DevicePtr& device() const { return device_; }
  Handle get() const { return handle_; }
  Handle* fill() { return &handle_; }  // for the call that makes it

 private:
  DevicePtr device_;
  Handle handle_{};
};

// While it lives, this thread may allocate memory and load modules although some stream of the process is being
// captured, which would otherwise fail and make that capture invalid. What it does is no part of the capture.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int before_;
};

// A point in a stream's work.
class Event {
 public:
  explicit Event(const DevicePtr& device, bool timed = false);

  const DevicePtr& device() const { return event_.device(); }
  CUevent handle() const { return event_.get(); }
  // Whether the GPU has passed where the event was last recorded; true if it never was.
  bool done() const;
  void synchronize() const;
  // From `start` to this one; both were made `timed`, recorded and passed.
  float milliseconds_since(const Event& start) const;

 private:
  Resource<CUevent, &Driver::cuEventDestroy> event_;
};

// An event for a short while: one that an earlier owner in this process gave back, if there is any. What it says before
// it is recorded is of no use.
class PooledEvent {
 public:
  explicit PooledEvent(const DevicePtr& device, bool timed = false);
  ~PooledEvent();
  PooledEvent(const PooledEvent&) = delete;
  PooledEvent& operator=(const PooledEvent&) = delete;

  const Event& operator*() const { return *event_; }
  const Event* operator->() const { return event_.get(); }

 private:
  std::unique_ptr<const Event> event_;
  const bool timed_;
};

// Memory of the device, zeroed.
class DeviceMemory {
 public:
  DeviceMemory(const DevicePtr& device, std::size_t bytes);

  CUdeviceptr pointer() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }
  const DevicePtr& device() const { return memory_.device(); }

 private:
  Resource<CUdeviceptr, &Driver::cuMemFree> memory_;
  std::size_t bytes_;
};

// Pinned memory of the host that all devices can access, zeroed.
class HostMemory {
 public:
  HostMemory(const DevicePtr& device, std::size_t bytes);

  std::byte* data() const { return static_cast<std::byte*>(memory_.get()); }
  CUdeviceptr pointer() const { return pointer_; }  // for kernels of `device`
  std::size_t bytes() const { return bytes_; }

 private:
  Resource<void*, &Driver::cuMemFreeHost> memory_;
  std::size_t bytes_;
  CUdeviceptr pointer_ = 0;
};

// A kernel; valid as long as its module.
struct Function {
  CUfunction handle = nullptr;
  std::string name;
};

// How many blocks of `threads` threads, without dynamic shared memory, the device can run at once.
unsigned resident_blocks(const Device& device, const Function& function, unsigned threads);

class Module {
 public:
  // `image` is a cubin, a fat binary, or PTX that ends with a zero; not needed afterwards.
  Module(const DevicePtr& device, const void* image);

  // Nothing if the module has no such kernel.
  std::optional<Function> find(const char* name) const;
  Function function(const char* name) const;

 private:
  Resource<CUmodule, &Driver::cuModuleUnload> module_;
};

struct Grid {
  unsigned blocks = 1;
  unsigned threads = 1;
  unsigned shared_bytes = 0;  // dynamic shared memory of each block
};

// An operation of a stream on a 64-bit word. `wait` holds up all later work until the word is `value`; a value that
// does not stay may be missed. `write` stores `value` after all earlier work, whose writes the system then sees.
struct StreamValue {
  enum class Kind { wait, write } kind;
  CUdeviceptr address;
  std::uint64_t value;
};

class Stream {
 public:
  // Blocks of streams with lower numbers are served first. The driver takes the nearest priority that the device has.
  static constexpr int default_priority = 0, highest_priority = std::numeric_limits<int>::min();

  // A stream of our own, which no other stream holds up.
  explicit Stream(const DevicePtr& device, int priority = default_priority);
  // One that somebody else destroys, such as torch's current stream; null is the device's legacy stream.
  static Stream borrowed(const DevicePtr& device, CUstream handle) { return Stream(device, handle); }

  CUstream handle() const { return stream_; }
  const DevicePtr& device() const { return own_.device(); }

  void record(const Event& event) const;
  // Holds up later work until `event`, as last recorded on any device, has happened.
  void wait(const Event& event) const;
  void fill(CUdeviceptr to, unsigned char value, std::size_t bytes) const;
  // Between any two places, of devices or of the host.
  void copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) const;
  // In this order, with as few calls of the driver as can be.
  void take_values(std::span<const StreamValue> values) const;
  void wait_value(CUdeviceptr address, std::uint64_t value) const {
    const StreamValue one{StreamValue::Kind::wait, address, value};
    take_values({&one, 1});
  }
  void write_value(CUdeviceptr address, std::uint64_t value) const {
    const StreamValue one{StreamValue::Kind::write, address, value};
    take_values({&one, 1});
  }
  // Runs `function` with `arguments` of exactly the types that it declares.
  template <class... Arguments>
  void launch(const Function& function, Grid grid, const Arguments&... arguments) const {
    const void* pointers[] = {&arguments..., nullptr};
    launch_with(function, grid, const_cast<void**>(pointers));
  }

  // Whether all is done.
  bool done() const;
  void synchronize() const;
  // Whether what is called goes into a CUDA graph, where nothing runs yet and nothing may be waited for.
  bool capturing() const;

 private:
  Stream(const DevicePtr& device, CUstream handle) : own_(device), stream_(handle) {}
  void launch_with(const Function& function, Grid grid, void** pointers) const;

  Resource<CUstream, &Driver::cuStreamDestroy> own_;  // null if borrowed
  CUstream stream_;
};

// The same of a stream of any device; false where the driver does not tell.
bool capturing(int ordinal, CUstream stream);

// Fills [pointer, pointer + bytes) with zeros, and waits for it.
void zero(const DevicePtr& device, CUdeviceptr pointer, std::size_t bytes);

// "64 MB"; 1 MB is 1024 KB, and what is no multiple of a unit is told in a smaller one.
std::string in_bytes(std::size_t bytes);

}  // namespace ringreduce::cuda
