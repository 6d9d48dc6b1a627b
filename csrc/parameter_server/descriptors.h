// Messages with descriptors between processes of one host, over Unix sockets that keep messages apart.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "core/file_descriptor.h"

namespace ringreduce::parameter_server {

inline constexpr std::size_t kMostDescriptors = 240;  // in one message; the kernel takes 253
inline constexpr std::size_t kMostMessage = 1024;     // bytes

// Neither waits. Returns whether the message has gone: not if nobody has taken many others, or nobody can.
bool send_message(int socket, const void* data, std::size_t bytes, std::span<const int> descriptors);

struct Received {
  std::vector<std::byte> bytes;
  std::vector<FileDescriptor> descriptors;
};
// The next message, if there is one. Throws Error(system) if its descriptors have not come, as this process may have no
// more.
std::optional<Received> receive_message(int socket);

// Of this process. Throws Error(system).
FileDescriptor own_pidfd();
// Whether both are of the same memory or file.
bool same_file(int one, int other);
// Whether the process of a pidfd has ended, or nobody holds the other end of the socket (-1: none).
bool has_gone(int pidfd, int socket);

}  // namespace ringreduce::parameter_server
