#include "core/descriptors.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.h"

namespace ringreduce {
namespace {

union Control {
  cmsghdr head;
  char bytes[CMSG_SPACE(kMostDescriptors * sizeof(int))];
};

}  // namespace

std::string last_error() {
  const char* const fix = errno == EMFILE                       ? "; raise `ulimit -n`"
                          : errno == ENFILE                     ? "; raise fs.file-max"
                          : errno == EFBIG                      ? "; raise `ulimit -f`"
                          : errno == ENOMEM || errno == ENOBUFS ? "; free memory, or raise `ulimit -v`"
                                                                : "";
  return std::string(std::strerror(errno)) + fix;
}

int above_streams(int made) {
  if (made < 0 || made > STDERR_FILENO) return made;
  const int moved = fcntl(made, F_DUPFD_CLOEXEC, STDERR_FILENO + 1), error = errno;
  close(made);
  errno = error;
  return moved;
}

bool above_streams(int (&made)[2]) {
  for (int& each : made) each = above_streams(each);
  if (made[0] >= 0 && made[1] >= 0) return true;
  const int error = errno;
  for (int& each : made) FileDescriptor(std::exchange(each, -1));
  errno = error;
  return false;
}

bool send_message(int socket, const void* data, std::size_t bytes, std::span<const int> descriptors) {
  Control control;
  iovec part{const_cast<void*>(data), bytes};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = &control;
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* const head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(head), descriptors.data(), descriptors.size_bytes());
  }
  return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

const char* why_not_sent() {
  if (errno != ETOOMANYREFS) return "has its process been stopped?";
  return "too many descriptors were sent between this user's processes and have not been received: raise `ulimit -n`";
}

std::optional<Received> receive_message(int socket) {
  Control control;
  Received received;
  received.bytes.resize(kMostMessage);
  received.descriptors.reserve(kMostDescriptors);  // now: what has come is not lost for want of memory
  iovec part{received.bytes.data(), received.bytes.size()};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = &control;
  message.msg_controllen = sizeof control;
  const ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got <= 0) return std::nullopt;
  received.bytes.resize(static_cast<std::size_t>(got));
  bool cut = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head != nullptr; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; at < head->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int given;
      std::memcpy(&given, CMSG_DATA(head) + at, sizeof given);
      received.descriptors.emplace_back(above_streams(given));
      cut |= received.descriptors.back().get() < 0;
    }
  }
  if (cut)
    throw Error(ErrorKind::system,
                "a message came without all of its descriptors: this process may have no more (see `ulimit -n`)");
  return received;
}

FileDescriptor own_pidfd() {
  FileDescriptor made(above_streams(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0))));
  if (made.get() < 0) {
    const char* fix = "";
    if (errno == EPERM) fix = "; let the container's or service's seccomp filter allow pidfd_open";
    if (errno == ENOSYS) fix = "; ringreduce needs Linux 5.3 or newer";
    throw Error(ErrorKind::system, "pidfd_open: " + last_error() + fix);
  }
  return made;
}

bool same_file(int one, int other) {
  struct stat first, second;
  return fstat(one, &first) == 0 && fstat(other, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

bool has_gone(int pidfd, int socket) {
  pollfd ends[2] = {{pidfd, POLLIN, 0}, {socket, 0, 0}};
  if (poll(ends, 2, 0) < 1) return false;
  return (ends[0].revents & POLLIN) != 0 || (ends[1].revents & (POLLHUP | POLLERR)) != 0;
}

}  // namespace ringreduce
