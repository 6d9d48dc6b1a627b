// File descriptors that processes of one host give each other, in messages over Unix sockets of type SOCK_SEQPACKET.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/file_descriptor.h"

namespace ringreduce {

inline constexpr std::size_t kMostDescriptors = 240;  // in one message; the kernel's limit is 253
inline constexpr std::size_t kMostMessage = 1024;     // bytes

// What errno says, and what to do where something has run out.
std::string last_error();

// Takes what a call has made and returns it under a number of 3 or higher; -1, with errno, if the call or this has
// failed. A process may run with descriptors 0, 1 and 2 closed, and the next one that it makes gets such a number: what
// a library prints would go into shared memory or a connection.
int above_streams(int made);
// The same for both descriptors of a pair. If it returns false, neither is open, and both are -1.
bool above_streams(int (&made)[2]);

// Sends a message without waiting. Returns false if the socket's buffer is full, if its other end is closed, or if too
// many descriptors have been sent that nobody has received.
bool send_message(int socket, const void* data, std::size_t bytes, std::span<const int> descriptors);
// What may be wrong after send_message() has returned false.
const char* why_not_sent();

struct Received {
  std::vector<std::byte> bytes;
  std::vector<FileDescriptor> descriptors;
};
// Returns the next message, or nothing if none has arrived; does not wait. Throws Error(system) if the message came
// without all of its descriptors, which happens when this process has reached its limit of open files.
std::optional<Received> receive_message(int socket);

// Returns a pidfd of this process. Throws Error(system).
FileDescriptor own_pidfd();
// Whether both descriptors refer to the same file or shared memory.
bool same_file(int one, int other);
// Whether the process of the pidfd has ended or the other end of the socket is closed. `socket` may be -1.
bool has_gone(int pidfd, int socket = -1);

}  // namespace ringreduce
