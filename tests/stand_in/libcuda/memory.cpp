// Memory of a device or of the host, in one process.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "machine.h"

using namespace stand_in;

API cuMemAlloc_v2(CUdeviceptr* pointer, std::size_t bytes) {
  ENTER_UNLESS_CAPTURING();
  if (bytes == 0) return kInvalidValue;
  guard.wait_in_context(peers_are_idle);
  auto piece = make_piece(*contexts.back(), bytes);
  void* const mapped = piece == nullptr ? nullptr : map_piece(*piece);
  if (mapped == nullptr) return kOutOfMemory;
  *pointer = reinterpret_cast<CUdeviceptr>(mapped);
  machine().ranges[*pointer] = {Place::device, bytes, contexts.back()->ordinal, std::move(piece)};
  return kSuccess;
}

API cuMemFree_v2(CUdeviceptr pointer) {
  ENTER_UNLESS_CAPTURING();
  return unmap(pointer, Place::device);
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
  return unmap(reinterpret_cast<CUdeviceptr>(pointer), Place::host);
}

API cuMemHostRegister_v2(void* pointer, std::size_t bytes, unsigned) {
  ENTER_UNLESS_CAPTURING();
  if (setting("NO_HOST_REGISTER", 0) != 0) return kNotSupported;
  const auto start = reinterpret_cast<CUdeviceptr>(pointer);
  if (bytes == 0 || find_range(start, 1) != nullptr) return kInvalidValue;
  machine().ranges[start] = {Place::registered, bytes, contexts.back()->ordinal};
  return kSuccess;
}

API cuMemHostUnregister(void* pointer) {
  ENTER_UNLESS_CAPTURING();
  const auto found = machine().ranges.find(reinterpret_cast<CUdeviceptr>(pointer));
  if (found == machine().ranges.end() || found->second.place != Place::registered) return kInvalidValue;
  machine().ranges.erase(found);
  return kSuccess;
}

API cuMemHostGetDevicePointer_v2(CUdeviceptr* pointer, void* host, unsigned) {
  ENTER();
  const Range* const range = find_range(reinterpret_cast<CUdeviceptr>(host), 1);
  if (range == nullptr || !is_of_host(*range)) return kInvalidValue;
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
      *static_cast<unsigned*>(value) = is_of_host(*range) ? kMemoryTypeHost : kMemoryTypeDevice;
      return kSuccess;
    case kPointerAttributeDeviceOrdinal:
      *static_cast<int*>(value) = range->device;
      return kSuccess;
    case kPointerAttributeRangeStart:
      *static_cast<CUdeviceptr*>(value) = start;
      return kSuccess;
    case kPointerAttributeRangeSize:
      if (range->place == Place::ipc && setting("NO_RANGE_SIZE", 0) != 0) return kNotSupported;
      *static_cast<std::size_t*>(value) = range->bytes;
      return kSuccess;
    default:
      return kNotSupported;
  }
}
