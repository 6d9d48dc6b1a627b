#include "transport/connection.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>
#include <set>
#include <utility>

#include "core/bytes.h"
#include "core/file_descriptor.h"

namespace ringreduce {
namespace {

constexpr std::size_t kStaged = 16384;      // bytes read at once when the kind of what comes is not known yet
constexpr std::size_t kBatch = 16;          // frames handed to the kernel at once, as long as
constexpr std::size_t kBatchBytes = 65536;  // they are small
constexpr int kPacket = 1280;               // bytes that fit a packet everywhere: IPv6's least MTU
constexpr int kUnsent = 524288;             // bytes that the kernel holds without having sent them, about

// Those of all connections of this process. A DataLoader's worker that held one would hide that its parent has died.
class Descriptors {
 public:
  static Descriptors& all() {
    static Descriptors* const descriptors = [] {
      auto* const made = new Descriptors;  // never destroyed, since groups may end later than statics
      pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); }, [] { all().close_in_child(); });
      return made;
    }();
    return *descriptors;
  }

  void add(int fd) {
    std::lock_guard lock(mutex_);
    held_.insert(fd);
  }
  void close(int fd) {
    std::lock_guard lock(mutex_);  // or a child forked in between would close what has the number next
    held_.erase(fd);
    ::close(fd);
  }

 private:
  void close_in_child() {
    for (const int fd : held_) ::close(fd);
    held_.clear();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<int> held_;
};

}  // namespace

Frame frame_of(std::uint32_t kind, std::span<const std::byte> first, std::span<const std::byte> rest) {
  const std::size_t bytes = first.size() + rest.size();
  Frame frame{.header = {.kind = kind, .bytes = static_cast<std::uint32_t>(bytes)}, .own = unwritten_bytes(bytes)};
  std::copy(rest.begin(), rest.end(), std::copy(first.begin(), first.end(), frame.own.get()));
  frame.data = frame.own.get();
  return frame;
}

PrivateDescriptor::PrivateDescriptor(int fd) {
  FileDescriptor owned(fd);
  if (fd >= 0) Descriptors::all().add(fd);
  fd_ = owned.release();
}

void PrivateDescriptor::close() {
  if (fd_ >= 0) Descriptors::all().close(std::exchange(fd_, -1));
}

Connection::Connection(PrivateDescriptor of, std::string path)
    : socket_(std::move(of)), path_(std::move(path)), staged_(kStaged) {
  const int on = 1, unsent = kUnsent;
  // These are wishes: a socket that knows neither (of a test, say) serves as well.
  setsockopt(socket(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(socket(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
  fcntl(socket(), F_SETFL, fcntl(socket(), F_GETFL) | O_NONBLOCK);  // as readv() cannot be told so for one call
}

void Connection::close() {
  socket_.close();
  sending_.clear();
}

// Throws what the latest system call failed by: bad_alloc if the kernel has no memory for it, which is no peer's fault.
void Connection::fail() const {
  if (errno == ENOBUFS || errno == ENOMEM) throw std::bad_alloc();
  std::string why = std::strerror(errno);
  if (errno == ETIMEDOUT) why += hint_of_mtu();
  throw Error(ErrorKind::peer_lost, why + " (" + path_ + ")");
}

// What to look for if all that passed was written in parts that fit a packet each, and then a larger part.
std::string Connection::hint_of_mtu() const {
  int in_kernel = 0;
  if (!before_large_ || ioctl(socket(), SIOCOUTQ, &in_kernel) != 0) return "";
  const std::uint64_t passed = traffic_.bytes_out - static_cast<std::uint64_t>(in_kernel);
  if (passed == 0 || passed > *before_large_) return "";
  return "; only small frames had passed: a switch or tunnel may have a smaller MTU than this host's interface";
}

// Takes the next frames to send; false if there are none.
bool Connection::take(std::deque<Frame>& queue, bool farewell) {
  sent_ = 0;
  std::size_t bytes = 0;
  while (!queue.empty() && sending_.size() < kBatch && bytes < kBatchBytes) {
    bytes += queue.front().header.bytes;
    sending_.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  if (sending_.empty() && farewell && !std::exchange(said_leave_, true)) sending_.emplace_back();
  return !sending_.empty();
}

void Connection::send(std::deque<Frame>& queue, bool farewell, std::atomic<std::uint64_t>& unsent) {
  while ((is_full() || take(queue, farewell)) && write_some()) {
    unsent.fetch_sub(this->unsent(), std::memory_order_release);
    traffic_.frames_out += sending_.size();
    sending_.clear();
  }
}

std::size_t Connection::unsent() const { return said_leave_ ? 0 : sending_.size(); }

// Hands what it has taken to the kernel; false if that did not take everything.
bool Connection::write_some() {
  std::array<iovec, 2 * kBatch> parts;
  std::size_t count = 0, before = sent_, whole = 0;
  const auto add = [&](const void* data, std::size_t bytes) {
    whole += bytes;
    if (before >= bytes) {
      before -= bytes;
      return;
    }
    // sendmsg does not write there.
    parts[count++] = {const_cast<std::byte*>(static_cast<const std::byte*>(data)) + before, bytes - before};
    before = 0;
  };
  for (const Frame& frame : sending_) {
    add(&frame.header, sizeof frame.header);
    add(frame.data, frame.header.bytes);
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t done = sendmsg(socket(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (done < 0) {
    // A peer that has left answers with a reset. What it sent before still lies here, and is read before the socket
    // says that it is at its end: that is for receive() to find.
    const bool peer_is_gone = errno == ECONNRESET || errno == EPIPE;
    if (errno == EAGAIN || errno == EINTR || peer_is_gone) return false;
    fail();
  }
  sent_ += static_cast<std::size_t>(done);
  if (done > kPacket && !before_large_) before_large_ = traffic_.bytes_out;
  traffic_.bytes_out += static_cast<std::size_t>(done);
  return sent_ == whole;
}

std::uint64_t Connection::on_the_way() const {
  int in_kernel = 0;
  if (!is_open() || ioctl(socket(), SIOCOUTQ, &in_kernel) != 0) in_kernel = 0;
  std::uint64_t bytes = static_cast<std::uint64_t>(in_kernel) - (sending_.empty() ? 0 : sent_);
  for (const Frame& frame : sending_) bytes += sizeof frame.header + frame.header.bytes;
  return bytes;
}

void Connection::keep_lent() {
  for (Frame& frame : sending_)
    if (std::exchange(frame.lent, false)) {
      frame.own = unwritten_bytes(frame.header.bytes);
      std::memcpy(frame.own.get(), frame.data, frame.header.bytes);
      frame.data = frame.own.get();
    }
}

void Connection::turn_away(const std::byte* begin, std::size_t bytes) {
  if (missing_ == 0 || into_ < begin || into_ >= begin + bytes) return;
  aside_.resize(header_.bytes);
  into_ = aside_.data() + (header_.bytes - missing_);
}

void Connection::say_ran_out() const {
  const FrameHeader last{.kind = FrameHeader::kRanOut};
  if (is_open() && (sending_.empty() || sent_ == 0)) ::send(socket(), &last, sizeof last, MSG_NOSIGNAL | MSG_DONTWAIT);
}

Connection::Received Connection::receive(int peer, FrameUser& user) {
  std::array<iovec, 2> parts;
  std::size_t count = 0;
  if (missing_ > 0) parts[count++] = {into_, missing_};
  parts[count++] = {staged_.data() + staged_end_, staged_.size() - staged_end_};
  const std::size_t most = missing_ + parts[count - 1].iov_len;
  const ssize_t read = readv(socket(), parts.data(), static_cast<int>(count));
  if (read == 0) return Received::end;
  if (read < 0) {
    if (errno != EAGAIN && errno != EINTR) fail();
    return Received::nothing;
  }
  const auto bytes = static_cast<std::size_t>(read);
  traffic_.bytes_in += bytes;
  const std::size_t direct = std::min(bytes, missing_);
  into_ += direct;
  missing_ -= direct;
  staged_end_ += bytes - direct;
  try {
    digest(peer, user);
  } catch (const Error& error) {
    throw Error(error.kind(), std::string(error.what()) + " (" + path_ + ")");
  }
  return bytes < most ? Received::drained : Received::some;
}

// Takes what is staged apart into frames.
void Connection::digest(int peer, FrameUser& user) {
  std::size_t begin = 0;
  while (true) {
    if (!receiving_) {
      if (staged_end_ - begin < sizeof header_) break;
      std::memcpy(&header_, staged_.data() + begin, sizeof header_);
      begin += sizeof header_;
      if (header_.magic == FrameHeader::kMagic && header_.kind == FrameHeader::kRanOut)
        throw Error(ErrorKind::peer_lost, "its process has no memory left for the connection", peer);
      into_ = user.place_for(peer, header_, aside_);
      missing_ = header_.bytes;
      receiving_ = true;
    }
    const std::size_t some = std::min(missing_, staged_end_ - begin);
    if (some > 0) std::memcpy(into_, staged_.data() + begin, some);
    begin += some;
    into_ += some;
    missing_ -= some;
    if (missing_ > 0) break;
    receiving_ = false;
    ++traffic_.frames_in;
    heard_leave_ |= header_.kind == FrameHeader::kLeave;
    user.deliver(peer, header_, aside_);
  }
  staged_end_ -= begin;
  if (begin > 0) std::memmove(staged_.data(), staged_.data() + begin, staged_end_);
}

}  // namespace ringreduce
