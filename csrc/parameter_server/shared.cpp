#include "parameter_server/shared.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "core/descriptors.h"
#include "core/error.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace ringreduce::parameter_server {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorKind::system, what + ": " + last_error()); }

}  // namespace

Mapping::Mapping(int fd, std::size_t bytes, bool writable) : bytes_(bytes) {
  struct stat status;
  if (fstat(fd, &status) != 0) refuse("fstat of shared memory");
  // If its owner could shrink the memory, an access beyond the new end would kill this process by SIGBUS.
  const int seals = fcntl(fd, F_GET_SEALS);
  if (static_cast<std::size_t>(status.st_size) < bytes || seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw Error(ErrorKind::invalid_argument, "shared memory has " + std::to_string(status.st_size) + " bytes, or may " +
                                                 "shrink; " + std::to_string(bytes) + " lasting ones are needed");
  void* const base =
      mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) refuse("mapping " + std::to_string(bytes) + " bytes of shared memory");
  base_ = static_cast<std::byte*>(base);
}

Mapping::~Mapping() { munmap(base_, bytes_); }

RequestSlot slot_of(const Request& request, std::size_t offset, std::size_t bytes) {
  return {request.kind,   request.block, request.number, request.seen,     request.round, request.pulled,
          request.weight, offset,        bytes,          request.priority, Packing::none};
}

FileDescriptor make_memory(const char* name, std::size_t bytes) {
  FileDescriptor memory(above_streams(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING)));
  if (memory.get() < 0) refuse("memfd_create");
  if (ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) refuse("ftruncate to " + std::to_string(bytes));
  if (fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) refuse("sealing shared memory");
  return memory;
}

std::size_t memory_bytes(int memory) {
  struct stat status;
  if (fstat(memory, &status) != 0) refuse("fstat of shared memory");
  return static_cast<std::size_t>(status.st_size);
}

void seal_for_readers(const FileDescriptor& memory) {
  if (fcntl(memory.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) != 0)
    refuse("sealing shared memory against writers (Linux 5.1 or newer is needed)");
}

}  // namespace ringreduce::parameter_server
