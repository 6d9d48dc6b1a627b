#include "transport/links.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "core/threads.h"

namespace ringreduce {
namespace {

constexpr std::size_t kStaged = 16384;      // bytes read at once when the kind of what comes is not known yet
constexpr std::size_t kBatch = 16;          // frames handed to the kernel at once, as long as
constexpr std::size_t kBatchBytes = 65536;  // they are small
constexpr int kUnsent = 524288;             // bytes that the kernel holds without having sent them, about
constexpr int kReads = 8;                   // of one socket in a row
constexpr Nanoseconds kTellEvery = 100 * kMillisecond;
constexpr Nanoseconds kParked = 10 * kMillisecond;  // how long after the last look of others the thread takes over
constexpr Nanoseconds kFarewell = kSecond;          // without a byte of what was sent arriving, when the group ends
constexpr auto kCourtesy = std::chrono::milliseconds(50);
constexpr int kIdlePoll = 200;  // ms; the thread looks for the group's error so often

std::string last_error() { return std::strerror(errno); }

// The descriptors of all links of this process. A forked child closes its copies at once: a connection is only over for
// the peer when nobody holds it any more, so a DataLoader's worker would hide that its parent has died.
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

// Adds what TCP knows of a connection; nothing if it is closed.
void ask_tcp(int socket, Links::Counters& counters) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
  counters.round_trip = std::max(counters.round_trip, info.tcpi_rtt * kMicrosecond);
  counters.resent += info.tcpi_total_retrans;
}

}  // namespace

Links::Links(const Segment& segment, Connect connect)
    : segment_(segment),
      connect_(std::move(connect)),
      poll_(epoll_create1(EPOLL_CLOEXEC)),
      waker_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      links_(static_cast<std::size_t>(segment.size())) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = UINT64_MAX}};
  if (poll_ < 0 || waker_ < 0 || epoll_ctl(poll_, EPOLL_CTL_ADD, waker_, &event) != 0) {
    const std::string error = last_error();
    if (poll_ >= 0) close(poll_);
    if (waker_ >= 0) close(waker_);
    throw Error(ErrorKind::system, "links to other hosts: " + error);
  }
  Descriptors::all().add(poll_);
  Descriptors::all().add(waker_);
}

Links::~Links() {
  leave();
  Descriptors::all().close(waker_);
  Descriptors::all().close(poll_);
}

void Links::add(int peer, int socket, std::string path) {
  const int on = 1, unsent = kUnsent;
  // These are wishes: a socket that knows neither (of a test, say) serves as well.
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent);
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);  // as readv() cannot be told so for one call
  {
    std::lock_guard lock(mutex_);
    Link& l = link(peer);
    if (stopping_ || !l.broken.empty()) {
      const FrameHeader farewell{.kind = FrameKind::leave};  // for a peer that would take this rank for dead
      if (stopping_) send(socket, &farewell, sizeof farewell, MSG_NOSIGNAL | MSG_DONTWAIT);
      close(socket);
      return;
    }
    try {  // not before, as the thread asks the segment, which has these links only when they are made
      if (!driver_.joinable()) driver_ = start_thread([this] { drive(); });
    } catch (...) {
      close(socket);
      throw;
    }
    auto connection = std::make_unique<Connection>();
    connection->socket = socket;
    connection->path = std::move(path);
    connection->staged.resize(kStaged);
    epoll_event event{.events = EPOLLIN,
                      .data = {.u64 = static_cast<std::uint64_t>(peer) << 32 | l.connections.size()}};
    if (epoll_ctl(poll_, EPOLL_CTL_ADD, socket, &event) != 0) {
      const std::string error = last_error();
      close(socket);
      throw Error(ErrorKind::system, "a connection to " + segment_.describe(peer) + ": " + error, peer);
    }
    Descriptors::all().add(socket);
    l.connections.push_back(std::move(connection));
    flush(peer);
  }
  added_.notify_all();
}

bool Links::reaches(int peer) const {
  std::lock_guard lock(mutex_);
  return !link(peer).connections.empty();
}

void Links::reach(std::span<const int> peers, Nanoseconds timeout) {
  const Nanoseconds deadline = now() + timeout;
  for (const int peer : peers) {
    // Both ends may need it now: the higher rank leaves it to the lower for a moment.
    if (peer < segment_.rank()) {
      std::unique_lock lock(mutex_);
      added_.wait_for(lock, kCourtesy, [&] { return closed_ || !link(peer).connections.empty(); });
    }
    if (!reaches(peer)) connect_(peer, deadline - now());
  }
  std::unique_lock lock(mutex_);
  for (const int peer : peers) {
    const auto there = [&] { return !link(peer).connections.empty() || !link(peer).broken.empty(); };
    while (!there()) {
      if (added_.wait_for(lock, std::chrono::milliseconds(20)) == std::cv_status::no_timeout) continue;
      lock.unlock();
      segment_.throw_if_aborted();
      lock.lock();
      if (now() >= deadline)
        throw Error(ErrorKind::timeout,
                    segment_.describe(peer) + " did not connect to rank " + std::to_string(segment_.rank()) +
                        " within " + in_seconds(timeout),
                    peer);
    }
  }
}

void Links::enqueue(int peer, Outgoing frame, bool first) {
  Link& l = link(peer);
  if (closed_ || !l.broken.empty() || l.left || l.leaving) return;
  ++unsent_;
  if (first)
    l.queue.push_front(std::move(frame));
  else
    l.queue.push_back(std::move(frame));
}

void Links::slot_filled(int peer, int channel, std::uint64_t seq, const SlotValue& value) {
  const SlotHeader& slot = segment_.slot(segment_.rank(), channel, seq);
  const bool packed = value.packed != nullptr;
  std::lock_guard lock(mutex_);
  Link& l = link(peer);
  for (const FrameHeader& held : std::exchange(l.held, {})) enqueue(peer, {.header = held});
  enqueue(peer, {.header = {.kind = FrameKind::slot,
                            .bytes = static_cast<std::uint32_t>(packed ? value.packed_bytes : slot.bytes),
                            .channel = static_cast<std::uint32_t>(channel),
                            .seq = seq,
                            .tag = slot.fingerprint,
                            .total = slot.bytes,
                            .packing = packed ? value.packing : Packing::none},
                 .data = packed ? value.packed.get() : value.data,
                 .own = value.packed,
                 .lent = value.lent && !packed});
  flush(peer);
}

void Links::message_filled(int peer, std::uint64_t seq) {
  MessageHeader& slot = segment_.message(segment_.rank(), peer, seq);
  std::lock_guard lock(mutex_);
  enqueue(peer, {.header = {.kind = FrameKind::message,
                            .bytes = slot.bytes,
                            .seq = seq,
                            .tag = slot.tag,
                            .total = slot.message_bytes,
                            .dtype = slot.dtype},
                 .data = slot.payload()});
  flush(peer);
}

void Links::slot_read(int peer, int channel, std::uint64_t seq) {
  std::lock_guard lock(mutex_);
  Link& l = link(peer);
  l.held.push_back({.kind = FrameKind::slot_read, .channel = static_cast<std::uint32_t>(channel), .seq = seq});
  if (l.held.size() < std::max<std::size_t>(1, segment_.geometry().depth / 4)) return;
  for (const FrameHeader& held : std::exchange(l.held, {})) enqueue(peer, {.header = held}, true);
  flush(peer);
}

void Links::message_read(int peer, std::uint64_t seq) {
  std::lock_guard lock(mutex_);
  enqueue(peer, {.header = {.kind = FrameKind::message_read, .seq = seq}}, true);
  flush(peer);
}

void Links::settle() {
  std::lock_guard lock(mutex_);
  for (int peer = 0; peer < segment_.size(); ++peer) {
    Link& l = link(peer);
    if (l.held.empty()) continue;
    for (const FrameHeader& held : std::exchange(l.held, {})) enqueue(peer, {.header = held}, true);
    flush(peer);
  }
}

void Links::forget_lent() {
  std::lock_guard lock(mutex_);
  for (Link& l : links_) {
    const auto before = l.queue.size();
    std::erase_if(l.queue, [](const Outgoing& frame) { return frame.lent; });
    unsent_ -= before - l.queue.size();
    // Of a frame that has begun the rest must follow: the peer counts bytes. It goes from a copy.
    for (const auto& connection : l.connections)
      for (Outgoing& frame : connection->sending)
        if (frame.lent) {
          frame.own = std::make_shared_for_overwrite<std::byte[]>(frame.header.bytes);
          std::memcpy(frame.own.get(), frame.data, frame.header.bytes);
          frame.data = frame.own.get();
          frame.lent = false;
        }
  }
}

void Links::tell(bool at_once) {
  std::lock_guard lock(mutex_);
  const Nanoseconds t = now();
  if (!at_once && t < next_tell_) return;
  next_tell_ = t + kTellEvery;
  tell_now();
}

void Links::tell_now() {
  const ControlImage image = image_of(segment_.control(segment_.rank()));
  const AbortRecord& record = segment_.abort_record();
  const bool aborted = record.state.load(std::memory_order_acquire) == 2;
  const auto with_payload = [](FrameKind kind, std::size_t bytes) {
    Outgoing frame{.header = {.kind = kind, .bytes = static_cast<std::uint32_t>(bytes)},
                   .own = std::make_shared_for_overwrite<std::byte[]>(bytes)};
    frame.data = frame.own.get();
    return frame;
  };
  for (int peer = 0; peer < segment_.size(); ++peer) {
    Link& l = link(peer);
    if (l.connections.empty()) continue;
    const auto waiting = std::find_if(l.queue.begin(), l.queue.end(),
                                      [](const Outgoing& f) { return f.header.kind == FrameKind::control; });
    if (waiting != l.queue.end()) {  // no byte of it has been sent
      std::memcpy(waiting->own.get(), &image, sizeof image);
    } else {
      Outgoing frame = with_payload(FrameKind::control, sizeof image);
      std::memcpy(frame.own.get(), &image, sizeof image);
      enqueue(peer, std::move(frame), true);
    }
    if (aborted && !l.told_error) {
      l.told_error = true;
      const ErrorImage error{.kind = record.kind, .culprit = record.culprit, .reporter = record.reporter};
      const std::size_t length = strnlen(record.message, sizeof record.message - 1);
      Outgoing frame = with_payload(FrameKind::error, sizeof error + length);
      std::memcpy(frame.own.get(), &error, sizeof error);
      std::memcpy(frame.own.get() + sizeof error, record.message, length);
      enqueue(peer, std::move(frame), true);
    }
    flush(peer);
  }
}

// Has epoll tell when the socket accepts more, or no longer.
void Links::watch(int peer, std::size_t number, bool out) {
  Connection& connection = *link(peer).connections[number];
  if (connection.wants_out == out) return;
  connection.wants_out = out;
  epoll_event event{.events = EPOLLIN | (out ? EPOLLOUT : 0u),
                    .data = {.u64 = static_cast<std::uint64_t>(peer) << 32 | number}};
  epoll_ctl(poll_, EPOLL_CTL_MOD, connection.socket, &event);
}

void Links::flush(int peer) {
  Link& l = link(peer);
  for (std::size_t i = 0; i < l.connections.size() && l.broken.empty(); ++i) {
    Connection& connection = *l.connections[i];
    if (connection.socket < 0) continue;
    const auto has_more = [&] {
      return !l.queue.empty() || !connection.sending.empty() || (l.leaving && !connection.said_leave);
    };
    while (l.broken.empty() && has_more() && send_some(peer, connection)) {
    }
    if (l.broken.empty()) watch(peer, i, has_more());
  }
}

// Hands frames to the kernel; false if it does not take more now.
bool Links::send_some(int peer, Connection& connection) {
  Link& l = link(peer);
  auto& sending = connection.sending;
  if (sending.empty()) {
    std::size_t bytes = 0;
    while (!l.queue.empty() && sending.size() < kBatch && bytes < kBatchBytes) {
      bytes += l.queue.front().header.bytes;
      sending.push_back(std::move(l.queue.front()));
      l.queue.pop_front();
    }
    if (sending.empty()) {
      sending.push_back({.header = {.kind = FrameKind::leave}});
      connection.said_leave = true;
      ++unsent_;
    }
    connection.sent = 0;
  }
  std::array<iovec, 2 * kBatch> parts;
  std::size_t count = 0, before = connection.sent;
  const auto add = [&](const void* data, std::size_t bytes) {
    if (before >= bytes) {
      before -= bytes;
      return;
    }
    // sendmsg does not write there.
    parts[count++] = {const_cast<std::byte*>(static_cast<const std::byte*>(data)) + before, bytes - before};
    before = 0;
  };
  std::size_t whole = 0;
  for (const Outgoing& frame : sending) {
    add(&frame.header, sizeof frame.header);
    add(frame.data, frame.header.bytes);
    whole += sizeof frame.header + frame.header.bytes;
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = count;
  const ssize_t done = sendmsg(connection.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (done < 0) {
    // A peer that has left answers with a reset. What it sent before still lies here, and is read before the socket
    // says that it is at its end: that is for receive_some to find.
    const bool peer_is_gone = errno == ECONNRESET || errno == EPIPE;
    if (errno == EAGAIN || errno == EINTR || peer_is_gone) return false;
    break_link(peer, last_error() + " (" + connection.path + ")");
    return false;
  }
  connection.sent += static_cast<std::size_t>(done);
  l.bytes_out += static_cast<std::size_t>(done);
  if (connection.sent < whole) return false;
  l.frames_out += sending.size();
  unsent_.fetch_sub(sending.size(), std::memory_order_release);
  sending.clear();
  connection.sent = 0;
  return true;
}

bool Links::progress() {
  std::array<epoll_event, 32> events;
  const int count = epoll_wait(poll_, events.data(), static_cast<int>(events.size()), 0);
  if (count <= 0) return false;
  bool moved = false;
  {
    std::lock_guard lock(mutex_);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == UINT64_MAX) continue;  // the waker, which is for the thread
      const int peer = static_cast<int>(event.data.u64 >> 32);
      Link& l = link(peer);
      Connection& connection = *l.connections[event.data.u64 & 0xffffffffu];
      if (connection.socket < 0) continue;
      if ((event.events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0)
        for (int reads = 0; reads < kReads && connection.socket >= 0 && receive_some(peer, connection); ++reads)
          moved = true;
      if ((event.events & EPOLLOUT) != 0 && connection.socket >= 0) {
        const std::uint64_t before = l.bytes_out;
        flush(peer);
        moved |= l.bytes_out != before;
      }
    }
  }
  if (moved) segment_.wake(segment_.rank());  // the other threads of this rank
  return moved;
}

void Links::doze() const {
  if (pollers_.load(std::memory_order_relaxed) > 1) {
    sched_yield();
    return;
  }
  epoll_event event;
  epoll_wait(poll_, &event, 1, 1);
}

// Reads once; false if there was nothing.
bool Links::receive_some(int peer, Connection& connection) {
  std::array<iovec, 2> parts;
  std::size_t count = 0;
  if (connection.missing > 0) parts[count++] = {connection.into, connection.missing};
  parts[count++] = {connection.staged.data() + connection.staged_end, connection.staged.size() - connection.staged_end};
  const ssize_t read = readv(connection.socket, parts.data(), static_cast<int>(count));
  if (read == 0) {
    close_one(peer, connection);
    return false;
  }
  if (read < 0) {
    if (errno != EAGAIN && errno != EINTR) break_link(peer, last_error() + " (" + connection.path + ")");
    return false;
  }
  const auto bytes = static_cast<std::size_t>(read);
  link(peer).bytes_in += bytes;
  const std::size_t direct = std::min(bytes, connection.missing);
  connection.into += direct;
  connection.missing -= direct;
  connection.staged_end += bytes - direct;
  try {
    digest(peer, connection);
  } catch (const Error& error) {
    break_link(peer, std::string(error.what()) + " (" + connection.path + ")");
  }
  return true;
}

// Takes what is staged apart into frames. Throws mismatch for what is none.
void Links::digest(int peer, Connection& connection) {
  std::size_t& begin = connection.staged_begin;
  std::size_t& end = connection.staged_end;
  while (link(peer).broken.empty()) {
    if (!connection.receiving) {
      if (end - begin < sizeof(FrameHeader)) break;
      FrameHeader header;
      std::memcpy(&header, connection.staged.data() + begin, sizeof header);
      begin += sizeof header;
      std::string wrong = objection(header, segment_.geometry());
      if (!wrong.empty()) throw Error(ErrorKind::mismatch, "it sent a frame that is none: " + wrong, peer);
      connection.into = place_for(peer, connection, header);
      connection.missing = header.bytes;
      connection.header = header;
      connection.receiving = true;
    }
    const std::size_t some = std::min(connection.missing, end - begin);
    if (some > 0) std::memcpy(connection.into, connection.staged.data() + begin, some);
    begin += some;
    connection.into += some;
    connection.missing -= some;
    if (connection.missing > 0) break;
    connection.receiving = false;
    ++link(peer).frames_in;
    deliver(peer, connection);
  }
  if (begin > 0) {
    std::memmove(connection.staged.data(), connection.staged.data() + begin, end - begin);
    end -= begin;
    begin = 0;
  }
}

std::byte* Links::aside_for(Connection& connection, const FrameHeader& header) {
  connection.aside.resize(header.bytes);
  return connection.aside.data();
}

// Where a frame's payload goes. Throws mismatch if the peer had no right to send it: a slot may be filled when what it
// held has been given back, and given back when it has been filled.
std::byte* Links::place_for(int peer, Connection& connection, const FrameHeader& header) {
  const int own = segment_.rank(), channel = static_cast<int>(header.channel);
  const auto demand = [&](bool holds, const char* what) {
    if (!holds) throw Error(ErrorKind::mismatch, std::string("it sent ") + what, peer);
  };
  switch (header.kind) {
    case FrameKind::slot: {
      SlotHeader& slot = segment_.slot(peer, channel, header.seq);
      const std::uint64_t held = slot.stamp.load(std::memory_order_relaxed);
      demand(header.seq + 1 > held &&
                 (held == 0 || segment_.acknowledgement(own, peer, channel, header.seq).load() >= held),
             "a slot that had not been given back");
      return header.packing == Packing::none ? slot.payload() : aside_for(connection, header);
    }
    case FrameKind::message: {
      MessageHeader& slot = segment_.message(peer, own, header.seq);
      const std::uint64_t held = slot.stamp.load(std::memory_order_relaxed);
      demand(header.seq + 1 > held && slot.consumed.load() >= held, "a part of a message before there was room");
      return slot.payload();
    }
    case FrameKind::slot_read:
      demand(segment_.slot(own, channel, header.seq).stamp.load() == header.seq + 1,
             "back a slot that it did not have");
      return nullptr;
    case FrameKind::message_read:
      demand(segment_.message(own, peer, header.seq).stamp.load() == header.seq + 1, "back what it did not have");
      return nullptr;
    case FrameKind::control:
    case FrameKind::error:
      return aside_for(connection, header);
    case FrameKind::leave:
      return nullptr;
  }
  return nullptr;
}

// A frame is complete.
void Links::deliver(int peer, Connection& connection) {
  const FrameHeader& header = connection.header;
  const int own = segment_.rank(), channel = static_cast<int>(header.channel);
  switch (header.kind) {
    case FrameKind::slot: {
      SlotHeader& slot = segment_.slot(peer, channel, header.seq);
      if (header.packing != Packing::none)
        unpack(header.packing, slot.payload(), connection.aside.data(), header.total / sizeof(float));
      slot.fingerprint = header.tag;
      slot.bytes = header.total;
      slot.place = Place::slot;
      slot.returned = 0;
      slot.stamp.store(header.seq + 1, std::memory_order_seq_cst);  // releases the payload
      break;
    }
    case FrameKind::message: {
      MessageHeader& slot = segment_.message(peer, own, header.seq);
      slot.message_bytes = header.total;
      slot.bytes = header.bytes;
      slot.dtype = header.dtype;
      slot.tag = header.tag;
      slot.stamp.store(header.seq + 1, std::memory_order_seq_cst);
      break;
    }
    case FrameKind::slot_read:
      segment_.acknowledgement(peer, own, channel, header.seq).store(header.seq + 1, std::memory_order_seq_cst);
      break;
    case FrameKind::message_read:
      segment_.message(own, peer, header.seq).consumed.store(header.seq + 1, std::memory_order_seq_cst);
      break;
    case FrameKind::control: {
      ControlImage image;
      std::memcpy(&image, connection.aside.data(), sizeof image);
      store(image, segment_.control(peer));
      break;
    }
    case FrameKind::error:
      deliver_error(connection.aside);
      break;
    case FrameKind::leave:
      connection.heard_leave = true;
      believe_leave(peer);
      break;
  }
}

// A peer has left when every connection has said so, for what it sent before may still be under way on one that has
// not.
void Links::believe_leave(int peer) {
  Link& l = link(peer);
  const auto may_carry_more = [](const auto& each) { return each->socket >= 0 && !each->heard_leave; };
  if (std::any_of(l.connections.begin(), l.connections.end(), may_carry_more)) return;
  l.left = true;
  segment_.control(peer).state.store(RankState::left, std::memory_order_seq_cst);
}

void Links::deliver_error(std::span<const std::byte> payload) {
  ErrorImage image;
  std::memcpy(&image, payload.data(), sizeof image);
  const auto text = payload.subspan(sizeof image);
  const bool known =
      image.kind >= static_cast<int>(ErrorKind::invalid_argument) && image.kind <= static_cast<int>(ErrorKind::system);
  const auto rank_or_none = [&](std::int32_t rank) { return rank >= 0 && rank < segment_.size() ? rank : -1; };
  segment_.abort(
      Error(known ? static_cast<ErrorKind>(image.kind) : ErrorKind::system,
            std::string(reinterpret_cast<const char*>(text.data()), text.size()), rank_or_none(image.culprit)),
      rank_or_none(image.reporter));
}

// The peer has ended a connection. What others still hold counts.
void Links::close_one(int peer, Connection& connection) {
  Link& l = link(peer);
  Descriptors::all().close(std::exchange(connection.socket, -1));
  const auto is_open = [](const auto& other) { return other->socket >= 0; };
  const auto said_leave = [](const auto& each) { return each->heard_leave; };
  if (std::any_of(l.connections.begin(), l.connections.end(), said_leave)) believe_leave(peer);
  if (!connection.sending.empty() || !std::any_of(l.connections.begin(), l.connections.end(), is_open))
    break_link(peer, "it closed the connection (" + connection.path + ")");
}

void Links::break_link(int peer, const std::string& why) {
  Link& l = link(peer);
  if (!l.broken.empty()) return;
  l.broken = why;
  std::size_t dropped = l.queue.size();
  l.queue.clear();
  for (const auto& connection : l.connections) {
    dropped += connection->sending.size();
    connection->sending.clear();
    if (connection->socket >= 0) Descriptors::all().close(std::exchange(connection->socket, -1));
  }
  unsent_ -= dropped;
  segment_.wake(segment_.rank());
}

std::vector<int> Links::lost() const {
  std::lock_guard lock(mutex_);
  std::vector<int> result;
  for (int peer = 0; peer < segment_.size(); ++peer)
    if (!link(peer).broken.empty()) result.push_back(peer);
  return result;
}

std::string Links::reason(int peer) const {
  std::lock_guard lock(mutex_);
  return link(peer).broken;
}

std::string Links::path(int peer) const {
  std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& connection : link(peer).connections) text += (text.empty() ? "" : ", ") + connection->path;
  return text;
}

std::vector<Links::Counters> Links::counters() const {
  std::lock_guard lock(mutex_);
  std::vector<Counters> result;
  for (int peer = 0; peer < segment_.size(); ++peer) {
    const Link& l = link(peer);
    if (l.connections.empty()) continue;
    Counters counters{peer, {}, l.bytes_out, l.bytes_in, l.frames_out, l.frames_in};
    for (const auto& connection : l.connections) {
      counters.paths.push_back(connection->path);
      ask_tcp(connection->socket, counters);
    }
    result.push_back(std::move(counters));
  }
  return result;
}

void Links::hand_over(bool sleeps) {
  // Between two calls the thread need not come at once, unless something is left to do.
  const bool at_once = sleeps || !sent();
  last_polled_.store(at_once ? 0 : now(), std::memory_order_seq_cst);
  pollers_.fetch_sub(1, std::memory_order_seq_cst);
  if (!at_once) return;
  if (parked_.load(std::memory_order_seq_cst)) unpark();
}

void Links::unpark() {
  {
    std::lock_guard lock(parking_);  // or the thread could be between its look and its sleep
  }
  unpark_.notify_all();
}

void Links::tell_soon() {
  urgent_.store(true, std::memory_order_seq_cst);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(waker_, &one, sizeof one);
  unpark();
}

void Links::drive() {
  const auto others_look = [&] {
    return pollers_.load(std::memory_order_seq_cst) > 0 ||
           now() - last_polled_.load(std::memory_order_relaxed) < kParked;
  };
  while (!stopping_) {
    // Whatever woke it, and before it looks at `urgent_`: tell_soon() sets that first and writes then, so what is not
    // seen now wakes the thread again.
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(waker_, &count, sizeof count);
    if (urgent_.exchange(false)) tell(true);
    if (others_look()) {
      std::unique_lock lock(parking_);
      parked_.store(true, std::memory_order_seq_cst);
      unpark_.wait_for(lock, std::chrono::nanoseconds(kParked), [&] { return stopping_ || urgent_ || !others_look(); });
      parked_.store(false, std::memory_order_seq_cst);
      continue;
    }
    settle();
    epoll_event event;
    const int ready = epoll_wait(poll_, &event, 1, kIdlePoll);
    if (stopping_) return;
    if (others_look()) continue;
    if (ready > 0) progress();
    try {
      // It may be that no rank waits that could notice the death of this one's peer.
      segment_.throw_if_over(0);
    } catch (const Error&) {
      tell();  // it may be the error of another rank of this host, whose peers need not be this one's
    }
  }
}

void Links::leave() {
  std::call_once(left_, [this] { say_goodbye(); });
}

void Links::say_goodbye() {
  {
    std::lock_guard lock(mutex_);
    tell_now();  // which calls this rank has completed
    for (int peer = 0; peer < segment_.size(); ++peer) {
      Link& l = link(peer);
      if (l.connections.empty()) continue;
      for (const FrameHeader& held : std::exchange(l.held, {})) enqueue(peer, {.header = held});
      l.leaving = true;
      flush(peer);
    }
    stopping_ = true;  // so that add() starts no thread
  }
  tell_soon();  // wakes the thread, which ends
  if (driver_.joinable()) driver_.join();
  // A socket that is closed while bytes of the peer's lie unread, or that gets more, throws away what it has not sent:
  // wait until the peer's machine has it all, for as long as it goes on, however slow the line is.
  const auto on_the_way = [&] {
    std::lock_guard lock(mutex_);
    std::uint64_t bytes = unsent_;  // frames count as well
    for (const Link& l : links_)
      for (const auto& connection : l.connections) {
        int left = 0;
        if (connection->socket >= 0 && ioctl(connection->socket, SIOCOUTQ, &left) == 0)
          bytes += static_cast<std::uint64_t>(left);
      }
    return bytes;
  };
  std::uint64_t least = UINT64_MAX;
  for (Nanoseconds deadline = 0;;) {
    const std::uint64_t bytes = on_the_way();
    if (bytes == 0) break;
    if (bytes < least) {
      least = bytes;
      deadline = now() + kFarewell;
    }
    if (now() >= deadline) break;
    progress();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (Link& l : links_)
    for (const auto& connection : l.connections)
      if (connection->socket >= 0) Descriptors::all().close(std::exchange(connection->socket, -1));
}

}  // namespace ringreduce
