#include "cuda/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "core/arithmetic.h"
#include "core/boot_id.h"
#include "core/descriptors.h"
#include "cuda/lent_descriptor.h"

namespace ringreduce::cuda {
namespace {

constexpr std::uint32_t kFormat = 0x52520002;  // of this version of Handle
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 44;

// Allocations that share one of the driver's 2 MB blocks would be opened together.
constexpr std::size_t kBlock = std::size_t{2} << 20;

constexpr const char *kGpu = "gpu", *kWords = "words";  // descriptors that are lent

// This host since it was started: its boot id.
std::uint64_t this_host() {
  std::string text = boot_id();
  std::erase(text, '-');
  return std::strtoull(text.substr(0, 16).c_str(), nullptr, 16);
}

// This process. Forked children cannot use CUDA, so none needs one of its own.
struct Process {
  std::uint64_t id = [] {
    std::random_device random;
    return std::uint64_t{random()} << 32 | random();
  }();
  std::uint64_t host = this_host();
};

const Process& this_process() {
  static const Process process;
  return process;
}

// Memory with a handle, for those in this process that are told of it.
struct Owned {
  DevicePtr device;
  std::size_t bytes = 0;
  virtual ~Owned() = default;
  virtual CUdeviceptr pointer() const = 0;
  // Lets kernels of `other` access it.
  virtual void enable_access(const Device& other) const = 0;
};

struct OwnedMemory {
  std::mutex mutex;
  std::map<CUdeviceptr, std::weak_ptr<const Owned>> by_pointer;
};

OwnedMemory& owned_memory() {
  static OwnedMemory& all = *new OwnedMemory;  // never destroyed: groups may end later than statics
  return all;
}

struct Allocated : Owned {
  std::optional<DeviceMemory> memory;
  CUdeviceptr pointer() const override { return memory->pointer(); }
  void enable_access(const Device& other) const override { other.enable_access(*device); }
};

CUmemAccessDesc access_of(const Device& device) {
  return {{kMemLocationTypeDevice, device.ordinal()}, kMemAccessReadWrite};
}

// Memory of the virtual memory management API, mapped for a device.
class VirtualMapping {
 public:
  // Takes over `memory`.
  VirtualMapping(DevicePtr device, CUmemGenericAllocationHandle memory, std::size_t bytes)
      : device_(std::move(device)), memory_(memory), bytes_(bytes) {
    try {
      const Device::Use use(*device_);
      const Driver& cuda = driver();
      cuda.cuMemAddressReserve(&reserved_, bytes, 0, 0, 0);
      cuda.cuMemMap(reserved_, bytes, 0, memory_, 0);
      mapped_ = true;
      allow(*device_);
    } catch (...) {
      release();
      throw;
    }
  }
  ~VirtualMapping() { release(); }
  VirtualMapping(const VirtualMapping&) = delete;
  VirtualMapping& operator=(const VirtualMapping&) = delete;

  CUdeviceptr pointer() const { return reserved_; }
  void allow(const Device& device) const {
    const CUmemAccessDesc access = access_of(device);
    driver().cuMemSetAccess(reserved_, bytes_, &access, 1);
  }

 private:
  void release() {
    const Driver* const cuda = driver_in_use();
    if (cuda == nullptr) return;
    if (mapped_) (void)cuda->cuMemUnmap.attempt(reserved_, bytes_);
    if (reserved_ != 0) (void)cuda->cuMemAddressFree.attempt(reserved_, bytes_);
    (void)cuda->cuMemRelease.attempt(memory_);
  }

  DevicePtr device_;
  CUmemGenericAllocationHandle memory_;
  std::size_t bytes_;
  CUdeviceptr reserved_ = 0;
  bool mapped_ = false;
};

struct Virtual : Owned {
  std::optional<VirtualMapping> mapping;
  std::optional<LentDescriptor> lent;
  CUdeviceptr pointer() const override { return mapping->pointer(); }
  void enable_access(const Device& other) const override { mapping->allow(other); }
};

bool can_export(const Device& device) {
  return device.attribute(kVirtualMemoryManagementSupported) != 0 &&
         device.attribute(kHandleTypePosixFileDescriptorSupported) != 0;
}

// The name under which a descriptor is lent: that of the GPU's memory at `pointer`, or of the host's memory with it.
std::string name_of(const char* kind, std::uint64_t process, CUdeviceptr pointer) {
  return "ringreduce-" + std::string(kind) + "-" + std::to_string(process) + "-" + std::to_string(pointer);
}

std::shared_ptr<Virtual> allocate_virtual(const DevicePtr& device, std::size_t bytes) {
  const Device::Use use(*device);
  const Driver& cuda = driver();
  CUmemAllocationProp properties{};
  properties.type = kMemAllocationTypePinned;
  properties.requestedHandleTypes = kMemHandleTypePosixFileDescriptor;
  properties.location = {kMemLocationTypeDevice, device->ordinal()};
  std::size_t granularity = kBlock;
  cuda.cuMemGetAllocationGranularity(&granularity, &properties, kMemAllocGranularityRecommended);
  auto owned = std::make_shared<Virtual>();
  owned->device = device;
  owned->bytes = round_up(bytes, granularity);
  CUmemGenericAllocationHandle memory = 0;
  if (const CUresult result = cuda.cuMemCreate.attempt(&memory, owned->bytes, &properties, 0); result != kSuccess)
    cuda.cuMemCreate.refuse(result,
                            " of " + in_bytes(owned->bytes) + " on device " + std::to_string(device->ordinal()));
  owned->mapping.emplace(device, memory, owned->bytes);
  int fd = -1;
  cuda.cuMemExportToShareableHandle(&fd, memory, kMemHandleTypePosixFileDescriptor, 0);
  FileDescriptor exported(above_streams(fd));
  if (exported.get() < 0) throw Error(ErrorKind::system, "fcntl: " + last_error());
  fcntl(exported.get(), F_SETFD, FD_CLOEXEC);
  zero(device, owned->pointer(), owned->bytes);
  owned->lent.emplace(name_of(kGpu, this_process().id, owned->pointer()), std::move(exported));
  return owned;
}

std::shared_ptr<Allocated> allocate(const DevicePtr& device, std::size_t bytes) {
  auto owned = std::make_shared<Allocated>();
  owned->device = device;
  owned->bytes = round_up(bytes, kBlock);
  owned->memory.emplace(device, owned->bytes);
  return owned;
}

// `bytes` bytes of the host, which take no memory before they are written, for whoever has the handle of `pointer`.
std::shared_ptr<const LentDescriptor> lend_words(std::size_t bytes, CUdeviceptr pointer) {
  FileDescriptor words(above_streams(memfd_create("ringreduce words", MFD_CLOEXEC)));
  if (words.get() < 0 || ftruncate(words.get(), static_cast<off_t>(bytes)) != 0)
    throw Error(ErrorKind::system, "memfd_create of " + in_bytes(bytes) + ": " + last_error());
  return std::make_shared<const LentDescriptor>(name_of(kWords, this_process().id, pointer), std::move(words));
}

// Throws the errors of one mapping, which all begin with the same text.
class Refusal {
 public:
  Refusal(const Device& device, const Handle& handle, const std::string& owner, const std::string& what = "GPU memory")
      : intro_(device.describe() + " cannot use " + what + " of " + owner + ", process " + std::to_string(handle.pid) +
               ": ") {}
  [[noreturn]] void because(const std::string& why) const { throw Error(ErrorKind::system, intro_ + why); }
  [[noreturn]] void because(const std::string& call, CUresult result, const std::string& fix) const {
    because(call + ": " + driver().text(result) + "; " + fix);
  }

 private:
  std::string intro_;
};

void check_fields(const Handle& handle, const Refusal& refusal) {
  if (handle.format != kFormat)
    refusal.because("its handle has format " + std::to_string(handle.format) + ", this process reads " +
                    std::to_string(kFormat) + "; run the same version of ringreduce in all ranks");
  const auto check = [&](bool ok, const char* field, std::uint64_t value) {
    if (!ok) refusal.because(std::string("its handle is damaged: ") + field + " is " + std::to_string(value));
  };
  check(handle.kind >= Handle::Kind::local && handle.kind <= Handle::Kind::file_descriptor, "kind",
        static_cast<std::uint32_t>(handle.kind));
  check(handle.pid > 0, "pid", static_cast<std::uint32_t>(handle.pid));
  check(handle.bytes > 0 && handle.bytes <= kMostBytes, "bytes", handle.bytes);
  check(handle.pointer != 0, "pointer", handle.pointer);
  if (handle.host != this_process().host)
    refusal.because("it is on another host; GPUs of several hosts share no memory (gpu_transport='nccl' joins them)");
}

bool is_on(const DeviceInfo& device, const Handle& handle) {
  return std::memcmp(device.uuid().data(), handle.device, sizeof(handle.device)) == 0;
}

// The owner's device, as this process counts; nothing if it does not see it (CUDA_VISIBLE_DEVICES, containers), which
// does not keep it from mapping the memory.
std::optional<DeviceInfo> device_of(const Handle& handle) {
  for (int ordinal = 0, devices = DeviceInfo::count(); ordinal < devices; ordinal++)
    if (const DeviceInfo device(ordinal); is_on(device, handle)) return device;
  return std::nullopt;
}

void check_access(const Device& device, const Handle& handle, const Refusal& refusal) {
  const std::optional<DeviceInfo> theirs = device_of(handle);
  if (theirs && !device.can_access(*theirs))
    refusal.because("it is on " + theirs->describe() +
                    ", which this one cannot access: no NVLink between them, and no peer-to-peer over PCIe (see "
                    "nvidia-smi topo -p2p rw; virtual machines, ACS and IOMMU turn it off)");
}

FileDescriptor borrow(const char* kind, const Handle& handle, const Refusal& refusal) {
  try {
    return borrow_descriptor(name_of(kind, handle.process, handle.pointer));
  } catch (const Error& error) {
    refusal.because(error.what());
  }
}

// Opened with cuIpcOpenMemHandle.
class IpcMapping {
 public:
  IpcMapping(const DevicePtr& device, const Handle& handle, const Refusal& refusal) : memory_(device) {
    const Device::Use use(*device);
    const Driver& cuda = driver();
    CUipcMemHandle ipc;
    std::memcpy(ipc.reserved, handle.ipc, sizeof(ipc.reserved));
    const CUresult result = cuda.cuIpcOpenMemHandle.attempt(memory_.fill(), ipc, kIpcMemLazyEnablePeerAccess);
    if (result != kSuccess)
      refusal.because("cuIpcOpenMemHandle", result,
                      "run all ranks in one IPC namespace (Docker: --ipc=host), keep the owner alive, and see whether "
                      "these GPUs have peer access (nvidia-smi topo -p2p rw)");
    std::size_t mapped = 0;
    const CUresult told = cuda.cuPointerGetAttribute.attempt(&mapped, kPointerAttributeRangeSize, memory_.get());
    if (told == kSuccess && handle.bytes > mapped)
      refusal.because("its handle is damaged: bytes is " + std::to_string(handle.bytes) + ", of memory that has " +
                      std::to_string(mapped));
  }

  CUdeviceptr pointer() const { return memory_.get(); }

 private:
  Resource<CUdeviceptr, &Driver::cuIpcCloseMemHandle> memory_;
};

std::shared_ptr<const VirtualMapping> import_descriptor(const DevicePtr& device, const Handle& handle,
                                                        const Refusal& refusal) {
  const FileDescriptor fd = borrow(kGpu, handle, refusal);
  CUmemGenericAllocationHandle memory = 0;
  const CUresult result = driver().cuMemImportFromShareableHandle.attempt(
      &memory, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd.get())), kMemHandleTypePosixFileDescriptor);
  if (result != kSuccess)
    refusal.because("cuMemImportFromShareableHandle", result, "see whether the owner still has the memory");
  try {
    return std::make_shared<const VirtualMapping>(device, memory, handle.bytes);
  } catch (const Error& error) {
    refusal.because(error.what());
  }
}

std::shared_ptr<const Owned> find_owned(const Handle& handle, const Refusal& refusal) {
  OwnedMemory& all = owned_memory();
  std::lock_guard lock(all.mutex);
  const auto found = all.by_pointer.find(handle.pointer);
  std::shared_ptr<const Owned> owned = found == all.by_pointer.end() ? nullptr : found->second.lock();
  if (owned == nullptr || owned->bytes != handle.bytes || !is_on(*owned->device, handle))
    refusal.because("it has been freed");
  return owned;
}

}  // namespace

OwnMemory::OwnMemory(const DevicePtr& device, std::size_t bytes, Handle::Kind first) {
  if (bytes == 0 || bytes > kMostBytes)
    throw Error(ErrorKind::invalid_argument, "bytes is " + std::to_string(bytes) + "; it must be from 1 to 2^44");
  const Process& process = this_process();
  handle_ = {};
  handle_.format = kFormat;
  handle_.pid = getpid();
  handle_.host = process.host;
  handle_.process = process.id;
  std::memcpy(handle_.device, device->uuid().data(), sizeof(handle_.device));

  const bool can = can_export(*device);
  std::shared_ptr<const Owned> owned;
  if (first == Handle::Kind::ipc || !can) {
    owned = allocate(device, bytes);
    CUipcMemHandle ipc;
    const Device::Use use(*device);
    handle_.number = driver().cuIpcGetMemHandle.attempt(&ipc, owned->pointer());
    handle_.kind = handle_.number == kSuccess ? Handle::Kind::ipc : Handle::Kind::local;
    if (handle_.number == kSuccess) std::memcpy(handle_.ipc, ipc.reserved, sizeof(handle_.ipc));
  }
  if (handle_.kind != Handle::Kind::ipc && can) {
    owned = nullptr;
    owned = allocate_virtual(device, bytes);
    handle_.kind = Handle::Kind::file_descriptor;
  }
  handle_.pointer = owned->pointer();
  handle_.bytes = owned->bytes;
  words_ = lend_words(bytes, owned->pointer());

  OwnedMemory& all = owned_memory();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.by_pointer, [](const auto& entry) { return entry.second.expired(); });
  all.by_pointer[owned->pointer()] = owned;
  memory_ = owned;
}

PeerMapping::PeerMapping(const DevicePtr& device, const Handle& handle, const std::string& owner) {
  const Refusal refusal(*device, handle, owner);
  check_fields(handle, refusal);
  check_access(*device, handle, refusal);
  bytes_ = handle.bytes;
  if (handle.process == this_process().id) {
    const std::shared_ptr<const Owned> owned = find_owned(handle, refusal);
    if (!is_on(*device, handle)) owned->enable_access(*device);
    pointer_ = owned->pointer();
    mapping_ = owned;
    return;
  }
  switch (handle.kind) {
    case Handle::Kind::ipc: {
      const auto mapping = std::make_shared<const IpcMapping>(device, handle, refusal);
      pointer_ = mapping->pointer();
      mapping_ = mapping;
      return;
    }
    case Handle::Kind::file_descriptor: {
      const auto mapping = import_descriptor(device, handle, refusal);
      pointer_ = mapping->pointer();
      mapping_ = mapping;
      return;
    }
    case Handle::Kind::local:
      refusal.because("cuIpcGetMemHandle", handle.number,
                      "the driver shares no memory between processes here, so all ranks of this GPU's host must be "
                      "threads of one process");
  }
}

SharedWords::SharedWords(const DevicePtr& device, const Handle& handle, std::size_t bytes, const std::string& owner)
    : bytes_(round_up(bytes, static_cast<std::size_t>(sysconf(_SC_PAGESIZE)))) {
  const Refusal refusal(*device, handle, owner, "memory of the host that is");
  check_fields(handle, refusal);
  const FileDescriptor words = borrow(kWords, handle, refusal);
  struct stat facts{};
  if (fstat(words.get(), &facts) != 0 || static_cast<std::size_t>(facts.st_size) < bytes)
    refusal.because("it has not " + in_bytes(bytes));
  void* const mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, words.get(), 0);
  if (mapped == MAP_FAILED) refusal.because("mmap of " + in_bytes(bytes_) + ": " + last_error());
  try {
    const Device::Use use(*device);
    const CUresult result =
        driver().cuMemHostRegister.attempt(mapped, bytes_, kMemHostRegisterPortable | kMemHostRegisterDeviceMap);
    if (result != kSuccess)
      refusal.because("cuMemHostRegister of " + in_bytes(bytes_), result,
                      "ranks that share a GPU need it; give each rank a GPU of its own");
    registered_ = std::make_unique<Resource<void*, &Driver::cuMemHostUnregister>>(device);
    *registered_->fill() = mapped;
    driver().cuMemHostGetDevicePointer(&pointer_, mapped, 0u);
  } catch (...) {
    registered_ = nullptr;
    munmap(mapped, bytes_);
    throw;
  }
  data_ = static_cast<std::byte*>(mapped);
}

SharedWords::~SharedWords() {
  registered_ = nullptr;
  munmap(data_, bytes_);
}

}  // namespace ringreduce::cuda
