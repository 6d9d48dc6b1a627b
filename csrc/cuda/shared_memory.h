// Memory that the kernels of other ranks read and write: on one rank's GPU, and on the host. The ranks may have the
// same GPU or others of this host, and be in the same process or in others.
//
// The owner allocates it and tells the others its Handle, in plain bytes. How they come to the GPU's memory:
//   same process    its pointer, after access between the two devices has been enabled;
//   other process   a legacy IPC handle (cuIpcGetMemHandle), or memory of the virtual memory management API, which is a
//                   file descriptor that the owner lends (lent_descriptor.h). Which is tried first is
//                   OwnMemory::kFirst; some drivers refuse one of them (in containers, WSL, on Jetson).
// Neither needs the owner's GPU to be visible to the other process. Whether access then works, only a use of it shows.
//
// The host's memory is a memfd, which the owner lends in the same way. It stays as long as anybody has it mapped,
// whoever dies, and then it is gone.
//
// Lifetimes. Within a process, a mapping keeps the memory alive. Between processes nothing does: the owner must not
// destroy OwnMemory while a peer may still access it; that is for the owner's group to arrange (GpuCalls::stop). CUDA
// leaves undefined what a mapping is worth from then on; peers only unmap it.
// If the owner's process dies, the contents are lost, and what kernels then read is undefined, but mappings can still
// be destroyed. A Handle is good for as long as its OwnMemory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "cuda/device.h"

namespace ringreduce::cuda {

struct Handle {
  enum class Kind : std::uint32_t {
    local = 1,        // other processes cannot come to it: `number` is the driver's result that says why
    ipc,              // by `ipc`
    file_descriptor,  // by a descriptor that the owner lends
  };

  std::uint32_t format;
  Kind kind;
  std::int32_t pid;  // of the owner
  std::int32_t number;
  std::uint64_t host;     // equal only on the owner's host
  std::uint64_t process;  // drawn at random: equal only if it is this very process
  std::uint64_t pointer;  // in the owner's process
  std::uint64_t bytes;
  unsigned char device[16];  // its UUID
  unsigned char ipc[64];
};
static_assert(sizeof(Handle) == 128 && std::is_trivially_copyable_v<Handle>);

class OwnMemory {
 public:
  // The kind that is tried first if a driver has both. For neither has anyone measured what kernels see of memory whose
  // owner was killed. If they fault with one kind, change this line to the other.
  static constexpr Handle::Kind kFirst = Handle::Kind::ipc;

  // `bytes` zero bytes of the GPU, and as many of the host, which take no memory before SharedWords maps them. Throws
  // Error(system).
  OwnMemory(const DevicePtr& device, std::size_t bytes, Handle::Kind first = kFirst);

  CUdeviceptr pointer() const { return handle_.pointer; }
  std::size_t bytes() const { return handle_.bytes; }
  const Handle& handle() const { return handle_; }

 private:
  Handle handle_;
  std::shared_ptr<const void> memory_, words_;
};

class PeerMapping {
 public:
  // The memory of `handle`, for kernels of `device`. `owner` names the rank in errors. A handle is not trusted: one
  // that OwnMemory did not make, or whose memory is gone, throws Error(system) as far as that can be told.
  PeerMapping(const DevicePtr& device, const Handle& handle, const std::string& owner);

  CUdeviceptr pointer() const { return pointer_; }
  std::size_t bytes() const { return bytes_; }

 private:
  CUdeviceptr pointer_ = 0;
  std::size_t bytes_ = 0;
  std::shared_ptr<const void> mapping_;
};

// Memory of the host that the CPU and the kernels and streams of all ranks access.
class SharedWords {
 public:
  // The first `bytes` bytes of the host's memory of `handle`, for `device`. Otherwise as PeerMapping; the owner may be
  // this rank.
  SharedWords(const DevicePtr& device, const Handle& handle, std::size_t bytes, const std::string& owner);
  ~SharedWords();
  SharedWords(const SharedWords&) = delete;
  SharedWords& operator=(const SharedWords&) = delete;

  std::byte* data() const { return data_; }
  CUdeviceptr pointer() const { return pointer_; }  // for kernels and streams of `device`

 private:
  const std::size_t bytes_;
  std::byte* data_ = nullptr;
  std::unique_ptr<Resource<void*, &Driver::cuMemHostUnregister>> registered_;
  CUdeviceptr pointer_ = 0;
};

}  // namespace ringreduce::cuda
