// Memory between processes: legacy IPC handles, and virtual memory management.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "machine.h"

using namespace stand_in;

namespace {

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

API cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  ENTER();
  if (setting("NO_IPC", 0) != 0) return kNotSupported;
  const Range* const range = find_range(pointer, 1);
  if (range == nullptr || range->place != Place::device) return kInvalidValue;
  const int number = find_device(range->device)->number;
  const IpcHandle content{kIpcFormat, getpid(), range->piece->fd, number, 0, range->bytes, inode_of(range->piece->fd)};
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
  if (!can_access(contexts.back()->number, content.device)) return kPeerAccessUnsupported;
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
  int ordinal = contexts.back()->ordinal;  // unless this process sees the owner's
  for (const Device& device : machine().devices)
    if (device.number == content.device) ordinal = device.ordinal;
  machine().ranges[*pointer] = {Place::ipc, content.bytes, ordinal, std::move(piece)};
  return kSuccess;
}

API cuIpcCloseMemHandle(CUdeviceptr pointer) {
  ENTER();
  const auto found = machine().ranges.find(pointer);
  if (found == machine().ranges.end() || found->second.place != Place::ipc) return kInvalidValue;
  return --found->second.opened > 0 ? kSuccess : unmap(pointer, Place::ipc);
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
  return find_reserved(pointer, bytes, false) == nullptr ? kInvalidValue : unmap(pointer, Place::reserved);
}

API cuMemMap(CUdeviceptr pointer, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle memory,
             unsigned long long) {
  ENTER(false);
  Range* const range = find_reserved(pointer, bytes, false);
  const auto piece = machine().virtual_memory.find(memory);
  if (range == nullptr || piece == machine().virtual_memory.end() || piece->second->bytes != bytes || offset != 0)
    return kInvalidValue;
  if (mmap(at(pointer), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, piece->second->fd, 0) == MAP_FAILED)
    return kOutOfMemory;
  range->piece = piece->second;
  range->device = piece->second->device;
  return kSuccess;
}

API cuMemUnmap(CUdeviceptr pointer, std::size_t bytes) {
  ENTER(false);
  Range* const range = find_reserved(pointer, bytes, true);
  if (range == nullptr) return kInvalidValue;
  mmap(at(pointer), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  range->piece = nullptr;
  return kSuccess;
}

API cuMemSetAccess(CUdeviceptr pointer, std::size_t bytes, const CUmemAccessDesc* access, std::size_t count) {
  ENTER(false);
  if (find_reserved(pointer, bytes, true) == nullptr) return kInvalidValue;
  for (std::size_t i = 0; i < count; i++) {
    if (find_device(access[i].location.id) == nullptr) return kInvalidDevice;
    if (access[i].flags != kMemAccessReadWrite) return kNotSupported;
  }
  return mprotect(at(pointer), bytes, PROT_READ | PROT_WRITE) == 0 ? kSuccess : kInvalidValue;
}
