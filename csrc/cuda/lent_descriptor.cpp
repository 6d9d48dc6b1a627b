#include "cuda/lent_descriptor.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "core/descriptors.h"
#include "core/error.h"
#include "core/threads.h"

namespace ringreduce::cuda {
namespace {

constexpr int kBacklog = 128;
constexpr std::chrono::milliseconds kPause{10};  // after a failure that will pass

struct Address {
  explicit Address(const std::string& name) {
    where.sun_family = AF_UNIX;  // and a zero before the name makes it abstract
    const std::size_t length = std::min(name.size(), sizeof(where.sun_path) - 1);
    std::memcpy(where.sun_path + 1, name.data(), length);
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&where); }
  sockaddr_un where{};
  socklen_t bytes;
};

// A message of one byte with room for a descriptor.
struct Message {
  Message() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
};

const char* remedy(int error) {
  switch (error) {
    case ECONNREFUSED:
    case ECONNRESET:
      return "keep the owner alive, and run all ranks in one network namespace (Docker: --network=host)";
    case EAGAIN:
      return "the owner does not answer; see whether it is stopped, or has no file descriptors left (ulimit -n)";
    case EMFILE:
    case ENFILE:
      return "raise the limit of open files (ulimit -n)";
    case EPERM:
    case EACCES:
      return "seccomp, AppArmor or SELinux forbids it; run all ranks in one container, or under another profile";
    default:
      return "see unix(7)";
  }
}

[[noreturn]] void fail(const std::string& call, int error) {
  throw Error(ErrorKind::system, call + ": " + std::strerror(error) + "; " + remedy(error));
}

// Whether a process of this user is at the other end.
bool is_of_this_user(const FileDescriptor& connection) {
  ucred other{};
  socklen_t bytes = sizeof(other);
  return getsockopt(connection.get(), SOL_SOCKET, SO_PEERCRED, &other, &bytes) == 0 && other.uid == geteuid();
}

FileDescriptor listen_at(const std::string& name) {
  FileDescriptor listener(above_streams(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)));
  if (listener.get() < 0) fail("socket", errno);
  const Address address(name);
  if (bind(listener.get(), address.get(), address.bytes) != 0) fail("bind", errno);
  if (listen(listener.get(), kBacklog) != 0) fail("listen", errno);
  return listener;
}

}  // namespace

LentDescriptor::LentDescriptor(const std::string& name, FileDescriptor lent)
    : lent_(std::move(lent)), listener_(listen_at(name)), thread_(new std::thread(start_thread([this] { serve(); }))) {}

LentDescriptor::~LentDescriptor() {
  if (made_.forked()) return;
  shutdown(listener_.get(), SHUT_RDWR);  // ends accept4
  thread_->join();
  delete thread_;
}

void LentDescriptor::serve() const {
  for (;;) {
    const FileDescriptor connection(above_streams(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)));
    if (connection.get() < 0) {
      if (errno == EINVAL) return;  // it was shut down
      std::this_thread::sleep_for(kPause);
      continue;
    }
    if (!is_of_this_user(connection)) continue;
    const char byte = 0;
    (void)send_message(connection.get(), &byte, sizeof(byte), std::array{lent_.get()});
  }
}

FileDescriptor borrow_descriptor(const std::string& name, Nanoseconds timeout) {
  const FileDescriptor connection(above_streams(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)));
  if (connection.get() < 0) fail("socket", errno);
  const timeval patience{static_cast<time_t>(timeout / kSecond),
                         static_cast<suseconds_t>(timeout % kSecond / kMicrosecond)};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO})
    setsockopt(connection.get(), SOL_SOCKET, option, &patience, sizeof(patience));
  const Address address(name);
  if (connect(connection.get(), address.get(), address.bytes) != 0) fail("connect", errno);
  if (!is_of_this_user(connection)) throw Error(ErrorKind::system, "another user has it; run all ranks as one user");
  Message message;
  const ssize_t bytes = recvmsg(connection.get(), &message.header, MSG_CMSG_CLOEXEC);
  if (bytes < 0) fail("recvmsg", errno);
  if (bytes == 0) throw Error(ErrorKind::system, "its owner refuses, or has ended; run all ranks as one user");
  const cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
  if (control == nullptr || control->cmsg_type != SCM_RIGHTS) {  // the kernel could not, or would not, pass it on
    const FileDescriptor another(above_streams(fcntl(connection.get(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1)));
    fail("recvmsg", another.get() < 0 ? errno : EPERM);
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(control), sizeof(fd));
  FileDescriptor borrowed(above_streams(fd));
  if (borrowed.get() < 0) fail("fcntl", errno);
  return borrowed;
}

}  // namespace ringreduce::cuda
