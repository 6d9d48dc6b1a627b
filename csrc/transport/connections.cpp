#include "transport/connections.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/descriptors.h"
#include "core/threads.h"

namespace ringreduce {
namespace {

constexpr int kReads = 8;                           // of one socket in a row
constexpr Nanoseconds kParked = 10 * kMillisecond;  // how long after the last look of others the thread takes over
constexpr Nanoseconds kFarewell = kSecond;          // without a byte of what was sent arriving, at the end
constexpr int kIdlePoll = 200;                      // ms; the thread calls attend() so often
constexpr std::uint64_t kWaker = UINT64_MAX;        // what epoll calls it

// The number under which epoll knows a connection.
std::uint64_t number_of(int peer, std::size_t connection) {
  return static_cast<std::uint64_t>(peer) << 32 | connection;
}

// Adds what TCP knows of a connection; nothing if it is closed.
void ask_tcp(int socket, Connections::Counters& counters) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return;
  counters.round_trip = std::max(counters.round_trip, info.tcpi_rtt * kMicrosecond);
  counters.resent += info.tcpi_total_retrans;
}

}  // namespace

Connections::Connections(User& user)
    : user_(user),
      poll_(above_streams(epoll_create1(EPOLL_CLOEXEC))),
      waker_(above_streams(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWaker}};
  if (poll_.get() < 0 || waker_.get() < 0 || epoll_ctl(poll_.get(), EPOLL_CTL_ADD, waker_.get(), &event) != 0)
    throw Error(ErrorKind::system, "links to other hosts: " + last_error());
}

Connections::~Connections() { leave(); }

const Connections::Link* Connections::find(int peer) const {
  const auto found = links_.find(peer);
  return found == links_.end() ? nullptr : &found->second;
}

void Connections::add(int peer, int socket, std::string path) {
  auto connection = std::make_unique<Connection>(PrivateDescriptor(socket), std::move(path));
  {
    std::lock_guard lock(mutex_);
    Link& link = links_[peer];
    if (stopping_) {  // a peer that heard nothing would take this rank for dead
      const FrameHeader farewell{.kind = FrameHeader::kLeave};
      ::send(socket, &farewell, sizeof farewell, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (stopping_ || link.broken) return;
    // Not before: the thread calls the user, who may have been told of this object only by now.
    if (!driver_.joinable()) driver_ = start_thread([this] { drive(); });
    epoll_event event{.events = EPOLLIN, .data = {.u64 = number_of(peer, link.connections.size())}};
    if (epoll_ctl(poll_.get(), EPOLL_CTL_ADD, socket, &event) != 0)
      throw Error(ErrorKind::system, "a connection to rank " + std::to_string(peer) + ": " + last_error(), peer);
    link.connections.push_back(std::move(connection));
    flush(peer, link);
  }
  added_.notify_all();
}

void Connections::drop(int peer) {
  std::lock_guard lock(mutex_);
  const auto found = links_.find(peer);
  if (found == links_.end()) return;
  discard(found->second);
  links_.erase(found);
}

bool Connections::reaches(int peer) const {
  std::lock_guard lock(mutex_);
  const Link* link = find(peer);
  return link != nullptr && !link->connections.empty();
}

bool Connections::wait_for(int peer, Nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  return added_.wait_for(lock, std::chrono::nanoseconds(timeout), [&] {
    const Link* link = find(peer);
    return link != nullptr && (!link->connections.empty() || link->broken);
  });
}

void Connections::enqueue(Link& link, Frame frame, bool first) {
  if (closed_ || link.broken || link.left || link.leaving) return;
  if (first)
    link.queue.push_front(std::move(frame));
  else
    link.queue.push_back(std::move(frame));
  ++unsent_;
}

void Connections::release_held(Link& link, bool first) {
  for (const FrameHeader& held : std::exchange(link.held, {})) enqueue(link, {.header = held}, first);
}

void Connections::send(int peer, Frame frame, When when) {
  std::lock_guard lock(mutex_);
  Link& link = links_[peer];
  if (when == When::in_turn) release_held(link, false);
  const auto same_kind = [&](const Frame& waiting) { return waiting.header.kind == frame.header.kind; };
  const auto end = link.queue.end();
  const auto waiting = when == When::latest ? std::find_if(link.queue.begin(), end, same_kind) : end;
  if (waiting != end)
    *waiting = std::move(frame);  // no byte of it has been sent
  else
    enqueue(link, std::move(frame), when != When::in_turn);
  flush(peer, link);
}

void Connections::hold(int peer, const FrameHeader& header, std::size_t most) {
  std::lock_guard lock(mutex_);
  Link& link = links_[peer];
  link.held.push_back(header);
  if (link.held.size() < most) return;
  release_held(link, true);
  flush(peer, link);
}

void Connections::send_held() {
  std::lock_guard lock(mutex_);
  for (auto& [peer, link] : links_) {
    if (link.held.empty()) continue;
    release_held(link, true);
    flush(peer, link);
  }
}

void Connections::forget_lent() {
  std::lock_guard lock(mutex_);
  for (auto& [peer, link] : links_) {
    unsent_ -= std::erase_if(link.queue, [](const Frame& frame) { return frame.lent; });
    for (const auto& connection : link.connections) connection->keep_lent();
  }
}

bool Connections::takes_next(int peer) const {
  std::lock_guard lock(mutex_);
  const Link* link = find(peer);
  return link != nullptr && link->queue.empty();
}

void Connections::turn_away(int peer, const std::byte* begin, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  if (const Link* link = find(peer))
    for (const auto& connection : link->connections) connection->turn_away(begin, bytes);
}

// Has epoll tell when the socket accepts more, or no longer.
void Connections::watch(int peer, const Link& link, std::size_t number, bool out) const {
  epoll_event event{.events = EPOLLIN | (out ? EPOLLOUT : 0u), .data = {.u64 = number_of(peer, number)}};
  epoll_ctl(poll_.get(), EPOLL_CTL_MOD, link.connections[number]->socket(), &event);
}

// Hands the kernel what it takes; returns whether it took anything.
bool Connections::flush(int peer, Link& link) {
  bool moved = false;
  for (std::size_t i = 0; i < link.connections.size() && !link.broken; ++i) {
    Connection& connection = *link.connections[i];
    if (!connection.is_open()) continue;
    const std::uint64_t before = connection.traffic().bytes_out;
    const bool was_full = connection.is_full();
    try {
      connection.send(link.queue, link.leaving, unsent_);
    } catch (const Error& error) {
      break_link(peer, link, error.what());
      return true;
    } catch (const std::bad_alloc& error) {
      run_out(peer, link, error);
      return true;
    }
    if (connection.is_full() != was_full) watch(peer, link, i, !was_full);
    moved |= connection.traffic().bytes_out != before;
  }
  return moved;
}

bool Connections::progress() {
  std::array<epoll_event, 32> events;
  const int count = epoll_wait(poll_.get(), events.data(), static_cast<int>(events.size()), 0);
  if (count <= 0) return false;
  bool moved = false;
  {
    std::lock_guard lock(mutex_);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == kWaker) continue;  // for the thread
      const int peer = static_cast<int>(event.data.u64 >> 32);
      const auto link = links_.find(peer);
      if (link != links_.end()) moved |= serve(peer, link->second, event.data.u64 & 0xffffffffu, event.events);
    }
  }
  if (moved) user_.moved();
  return moved;
}

// Does what epoll says can be done; returns whether anything moved.
bool Connections::serve(int peer, Link& link, std::size_t number, std::uint32_t events) {
  if (number >= link.connections.size()) return false;  // of a peer that was dropped meanwhile
  Connection& connection = *link.connections[number];
  bool moved = false;
  if ((events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0)
    for (int reads = 0; reads < kReads && connection.is_open(); ++reads) {
      const Connection::Received received = receive(peer, link, connection);
      moved |= received == Connection::Received::some || received == Connection::Received::drained;
      if (received != Connection::Received::some) break;
    }
  if ((events & EPOLLOUT) != 0 && connection.is_open()) moved |= flush(peer, link);
  return moved;
}

Connection::Received Connections::receive(int peer, Link& link, Connection& connection) {
  try {
    const Connection::Received received = connection.receive(peer, user_);
    if (received == Connection::Received::end) {
      // Only this connection's frames leave the count; those that other connections still hold stay in it.
      const bool cut_off = connection.unsent() > 0;
      unsent_ -= connection.unsent();
      connection.close();
      believe_leave(peer, link);
      if (cut_off || std::none_of(link.connections.begin(), link.connections.end(),
                                  [](const auto& other) { return other->is_open(); }))
        break_link(peer, link, "it closed the connection (" + connection.path() + ")");
    } else if (connection.heard_leave()) {
      believe_leave(peer, link);
    }
    return received;
  } catch (const Error& error) {
    break_link(peer, link, error.what());
  } catch (const std::bad_alloc& error) {
    run_out(peer, link, error);
  }
  return Connection::Received::drained;  // of what failed
}

// A peer has left when every connection has said so, for what it sent before may still be under way on one that has
// not. One that it has closed carries nothing more.
void Connections::believe_leave(int peer, Link& link) {
  bool said = false;
  for (const auto& connection : link.connections) {
    if (connection->is_open() && !connection->heard_leave()) return;
    said |= connection->heard_leave();
  }
  if (said && !std::exchange(link.left, true)) user_.left(peer);
}

int Connections::behind() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [peer, link] : links_)
    if (!link.queue.empty() || std::any_of(link.connections.begin(), link.connections.end(),
                                           [](const auto& connection) { return connection->unsent() > 0; }))
      return peer;
  return -1;
}

// Gives up what was to be sent, and closes.
void Connections::discard(Link& link) {
  std::size_t dropped = link.queue.size();
  link.queue.clear();
  for (const auto& connection : link.connections) {
    dropped += connection->unsent();
    connection->close();
  }
  unsent_ -= dropped;
}

void Connections::break_link(int peer, Link& link, const std::string& why) {
  if (std::exchange(link.broken, true)) return;
  discard(link);
  user_.lost(peer, why);
}

void Connections::run_out(int peer, Link& link, const std::bad_alloc& error) {
  for (const auto& connection : link.connections) connection->say_ran_out();
  user_.failed(error);
  break_link(peer, link, "this process has no memory left for the connection");
}

void Connections::doze() const {
  if (pollers_.load(std::memory_order_relaxed) > 1) {
    sched_yield();
    return;
  }
  epoll_event event;
  epoll_wait(poll_.get(), &event, 1, 1);
}

std::string Connections::path(int peer) const {
  std::lock_guard lock(mutex_);
  std::string text;
  if (const Link* link = find(peer))
    for (const auto& connection : link->connections) text += (text.empty() ? "" : ", ") + connection->path();
  return text;
}

std::vector<Connections::Counters> Connections::counters() const {
  std::lock_guard lock(mutex_);
  std::vector<Counters> result;
  for (const auto& [peer, link] : links_) {
    if (link.connections.empty()) continue;
    Counters& counters = result.emplace_back();
    counters.peer = peer;
    for (const auto& connection : link.connections) {
      counters.paths.push_back(connection->path());
      counters.bytes_out += connection->traffic().bytes_out;
      counters.bytes_in += connection->traffic().bytes_in;
      counters.frames_out += connection->traffic().frames_out;
      counters.frames_in += connection->traffic().frames_in;
      ask_tcp(connection->socket(), counters);
    }
  }
  return result;
}

void Connections::hand_over(bool sleeps) {
  // Between two calls the thread need not come at once, unless something is left to do.
  const bool at_once = sleeps || !sent();
  last_polled_.store(at_once ? 0 : now(), std::memory_order_seq_cst);
  pollers_.fetch_sub(1, std::memory_order_seq_cst);
  if (at_once) taken_over_.ring();
}

void Connections::wake() {
  woken_.store(true, std::memory_order_seq_cst);
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(waker_.get(), &one, sizeof one);
  taken_over_.ring();
}

// Sleeps on descriptors while it has something to do, and else on the doorbell, where looking and yielding would be of
// no use: so it does not wait by Waiting.
void Connections::drive() {
  const auto others_look = [&] {
    return pollers_.load(std::memory_order_seq_cst) > 0 ||
           now() - last_polled_.load(std::memory_order_relaxed) < kParked;
  };
  while (!stopping_) try {
      const std::uint32_t seen = taken_over_.rings.load(std::memory_order_seq_cst);
      // Whatever woke it, and before it looks at `woken_`: wake() sets that first and writes then, so what is not seen
      // now wakes the thread again.
      std::uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = read(waker_.get(), &count, sizeof count);
      if (woken_.exchange(false)) user_.attend(true);
      if (others_look()) {
        taken_over_.sleep(seen, kParked);
        continue;
      }
      send_held();
      epoll_event event;
      const int ready = epoll_wait(poll_.get(), &event, 1, kIdlePoll);
      if (stopping_) return;
      if (others_look()) continue;
      if (ready > 0) progress();
      user_.attend(false);
    } catch (const std::bad_alloc& error) {
      user_.failed(error);
    }
}

void Connections::leave() {
  std::call_once(left_, [this] { say_goodbye(); });
}

void Connections::say_goodbye() {
  {
    std::lock_guard lock(mutex_);
    for (auto& [peer, link] : links_) {
      if (link.connections.empty()) continue;
      try {
        release_held(link, false);
      } catch (const std::bad_alloc& error) {
        user_.failed(error);
      }
      link.leaving = true;
      flush(peer, link);
    }
    stopping_ = true;  // so that add() starts no thread
  }
  wake();  // the thread, which ends
  if (driver_.joinable()) driver_.join();
  // A socket that is closed while bytes of the peer's lie unread, or that gets more, throws away what it has not sent:
  // wait until the peer's machine has it all, for as long as it goes on, however slow the line is.
  const auto on_the_way = [&] {
    std::lock_guard lock(mutex_);
    std::uint64_t bytes = 0;
    for (const auto& [peer, link] : links_) {
      bytes += link.queue.size();  // frames count as well
      for (const auto& connection : link.connections) bytes += connection->on_the_way();
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
  // If two peers leave at once, one has the other's leave frame by now, because its own has arrived there.
  for (const Nanoseconds deadline = now() + kFarewell; now() < deadline && progress();) {
  }
  std::lock_guard lock(mutex_);
  closed_ = true;
  for (auto& [peer, link] : links_)
    for (const auto& connection : link.connections) connection->close();
}

}  // namespace ringreduce
