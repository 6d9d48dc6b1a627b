#include "transport/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "transport/links.h"

namespace ringreduce {
namespace {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "shared memory needs lock-free atomics");
static_assert(sizeof(SlotHeader) == 64 && sizeof(MessageHeader) == 64);

constexpr std::size_t kPage = 4096;
constexpr std::size_t round_up(std::size_t n, std::size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

constexpr std::size_t kHeaderBytes = round_up(sizeof(AbortRecord), kPage);

[[noreturn]] void throw_system(const std::string& what) {
  throw Error(ErrorKind::system, what + ": " + std::strerror(errno));
}

}  // namespace

Layout::Layout(const Geometry& g) {
  const auto check = [](bool ok, const char* field, std::uint32_t value, const char* demand) {
    if (!ok)
      throw Error(ErrorKind::invalid_argument,
                  std::string(field) + " is " + std::to_string(value) + "; it must be " + demand);
  };
  const auto count = [&](const char* field, std::uint32_t value, std::uint32_t most) {
    check(value >= 1 && value <= most, field, value, ("from 1 to " + std::to_string(most)).c_str());
  };
  const auto depth = [&](const char* field, std::uint32_t value) {
    check(std::has_single_bit(value) && value <= 1u << 14, field, value, "a power of two up to 16384");
  };
  const auto payload = [&](const char* field, std::uint32_t value) {
    check(value > 0 && value <= 1u << 28 && value % 64 == 0, field, value, "a multiple of 64 up to 268435456");
  };
  count("ranks", g.ranks, 4096);
  count("channels", g.channels, 64);
  depth("depth", g.depth);
  payload("slot_bytes", g.slot_bytes);
  depth("mailbox_depth", g.mailbox_depth);
  payload("mailbox_slot_bytes", g.mailbox_slot_bytes);

  outbox_slot = sizeof(SlotHeader) + g.slot_bytes;
  mailbox_slot = sizeof(MessageHeader) + g.mailbox_slot_bytes;
  acknowledgements = round_up(sizeof(RankControl), kPage);
  outboxes = round_up(acknowledgements + sizeof(std::uint64_t) * g.channels * g.ranks * g.depth, kPage);
  mailboxes = outboxes + outbox_slot * g.channels * g.depth;
  region_bytes = round_up(mailboxes + mailbox_slot * g.ranks * g.mailbox_depth, kPage);
}

std::size_t Geometry::segment_bytes() const { return kHeaderBytes + Layout(*this).region_bytes * ranks; }

OwnedDescriptors::~OwnedDescriptors() {
  for (const int fd : fds)
    if (fd >= 0) close(fd);
}

Segment::Segment(int memfd, const Geometry& geometry, int rank, std::vector<int> pidfds, std::vector<RankName> names,
                 PeerMemory memory, Hosts hosts)
    : memfd_({memfd}),
      pidfds_(std::move(pidfds)),
      arenas_(map_arenas(std::move(memory.arenas))),
      geometry_(geometry),
      layout_(geometry),
      rank_(rank),
      names_(std::move(names)),
      memory_(std::move(memory)),
      bytes_(geometry.segment_bytes()),
      found_dead_(geometry.ranks) {
  void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memfd, 0);
  if (mapped == MAP_FAILED)
    throw_system("cannot map " + std::to_string(bytes_) +
                 " bytes of shared memory (RINGREDUCE_CHANNEL_BYTES lowers it)");
  base_ = static_cast<std::byte*>(mapped);
  for (std::uint32_t r = 0; r < geometry.ranks; ++r)
    regions_.push_back(base_ + kHeaderBytes + layout_.region_bytes * r);
  const auto others = std::count(hosts.elsewhere.begin(), hosts.elsewhere.end(), true);
  if (others > 0) {
    mirror_bytes_ = layout_.region_bytes * static_cast<std::size_t>(others);
    void* const mirrors =
        mmap(nullptr, mirror_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mirrors == MAP_FAILED) {
      const int reason = errno;
      unmap();
      errno = reason;
      throw_system("cannot get " + std::to_string(mirror_bytes_) + " bytes of address space for ranks on other hosts");
    }
    mirrors_ = static_cast<std::byte*>(mirrors);
    std::byte* next = mirrors_;
    for (std::size_t r = 0; r < geometry.ranks; ++r)
      if (hosts.elsewhere[r]) {
        regions_[r] = next;
        next += layout_.region_bytes;
        control(static_cast<int>(r)).waiting_for.store(-1, std::memory_order_relaxed);
        control(static_cast<int>(r)).state.store(RankState::live, std::memory_order_relaxed);
      }
    elsewhere_ = std::move(hosts.elsewhere);
    alone_ = std::count(elsewhere_.begin(), elsewhere_.end(), true) == size() - 1;
    disconnect_ = std::move(hosts.disconnect);
    try {
      links_ = std::make_unique<Links>(*this, std::move(hosts.connect));
    } catch (...) {
      unmap();
      throw;
    }
  }
  RankControl& own = control(rank_);
  own.waiting_for.store(-1, std::memory_order_relaxed);
  own.state.store(RankState::live, std::memory_order_release);
}

void Segment::leave() const {
  bool first = false;
  std::call_once(said_goodbye_, [&] { first = true; });
  if (!first) return;
  if (opens_memory()) memory_.own->close();
  control(rank_).state.store(RankState::left, std::memory_order_seq_cst);
  wake_all();
  if (!links_) return;
  links_->leave();
  // Called as a copy, since it may let go of the group, and of this object with it.
  if (const auto disconnect = disconnect_) disconnect();
}

Segment::~Segment() {
  leave();
  links_.reset();
  unmap();
}

void Segment::unmap() {
  munmap(base_, bytes_);
  if (mirrors_ != nullptr) munmap(mirrors_, mirror_bytes_);
}

RankControl& Segment::control(int rank) const { return *reinterpret_cast<RankControl*>(region(rank)); }

AbortRecord& Segment::abort_record() const { return *reinterpret_cast<AbortRecord*>(base_); }

SlotHeader& Segment::slot(int writer, int channel, std::uint64_t seq) const {
  const std::size_t index = static_cast<std::size_t>(channel) * geometry_.depth + (seq & (geometry_.depth - 1));
  return *reinterpret_cast<SlotHeader*>(region(writer) + layout_.outboxes + index * layout_.outbox_slot);
}

std::atomic<std::uint64_t>& Segment::acknowledgement(int reader, int writer, int channel, std::uint64_t seq) const {
  const std::size_t row = static_cast<std::size_t>(channel) * geometry_.ranks + static_cast<std::size_t>(writer);
  auto* first = reinterpret_cast<std::atomic<std::uint64_t>*>(region(reader) + layout_.acknowledgements);
  return first[row * geometry_.depth + (seq & (geometry_.depth - 1))];
}

MessageHeader& Segment::message(int source, int destination, std::uint64_t seq) const {
  const std::size_t index =
      static_cast<std::size_t>(destination) * geometry_.mailbox_depth + (seq & (geometry_.mailbox_depth - 1));
  return *reinterpret_cast<MessageHeader*>(region(source) + layout_.mailboxes + index * layout_.mailbox_slot);
}

void Segment::ring(Doorbell& doorbell) {
  doorbell.rings.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &doorbell.rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::byte* Segment::in_arena_of(int peer, std::uint64_t address, std::size_t bytes) const {
  const auto r = static_cast<std::size_t>(peer);
  const PeerArena* const arena = r < arenas_.size() ? arenas_[r].get() : nullptr;
  if (arena == nullptr || address > arena->bytes() || arena->bytes() - address < bytes) return nullptr;
  return arena->base() + address;
}

void Segment::read(int peer, std::byte* to, std::uint64_t from, std::size_t bytes) const {
  check_access(peer, read_memory(memory_.threads[static_cast<std::size_t>(peer)], to, from, bytes));
}

void Segment::write(int peer, std::uint64_t to, const std::byte* from, std::size_t bytes) const {
  std::atomic<std::int32_t>& writes_to = control(rank_).writes_to;
  writes_to.store(peer + 1, std::memory_order_seq_cst);  // before we and the kernel look whether the peer is open
  // A peer that closes has said so before it looks at writes_to. By now its thread's id may be another's.
  const bool open = abort_record().failed.load(std::memory_order_seq_cst) == 0;
  const int error = open ? write_memory(memory_.threads[static_cast<std::size_t>(peer)], to, from, bytes) : ESRCH;
  writes_to.store(0, std::memory_order_release);
  check_access(peer, error);
}

void Segment::check_access(int peer, int error) const {
  if (error == ESRCH) throw Error(ErrorKind::peer_lost, describe(peer) + " died or gave the call up", peer);
  if (error != 0)
    throw Error(ErrorKind::system,
                "cannot access a tensor of " + describe(peer) + ": " + std::strerror(error) +
                    " (RINGREDUCE_FETCH=0 has tensors copied instead)",
                peer);
}

void Segment::close_memory() const {
  if (!opens_memory()) return;
  memory_.own->close();
  // A write that had begun takes microseconds of its core's time. A peer that is stopped right after it cannot say that
  // it has ended; for its sake there is a limit.
  const Nanoseconds deadline = now() + kSecond / 2;
  const auto writes = [&](int peer) { return control(peer).writes_to.load(std::memory_order_seq_cst) == rank_ + 1; };
  for (int r = 0; r < size(); ++r)
    while (r != rank_ && writes(r) && now() < deadline) {
      const std::vector<int> left = gone();
      if (std::find(left.begin(), left.end(), r) != left.end()) break;
      sched_yield();
    }
}

void Segment::wake(int rank) const {
  for (Doorbell* doorbell : {&control(rank).for_calls, &control(rank).for_messages})
    if (doorbell->sleepers.load(std::memory_order_seq_cst) != 0) ring(*doorbell);
}

void Segment::wake_all() const {
  for (int r = 0; r < size(); ++r)
    if (r != rank_ && !elsewhere(r)) wake(r);
}

void Segment::slot_filled(int reader, int channel, std::uint64_t seq, const SlotValue& value) const {
  if (elsewhere(reader)) return links_->slot_filled(reader, channel, seq, value);
  notify(control(reader).for_calls);
}

void Segment::slot_read(int writer, int channel, std::uint64_t seq) const {
  if (elsewhere(writer)) return links_->slot_read(writer, channel, seq);
  notify(control(writer).for_calls);
}

void Segment::message_filled(int reader, std::uint64_t seq) const {
  if (elsewhere(reader)) return links_->message_filled(reader, seq);
  notify(control(reader).for_messages);
}

void Segment::message_read(int writer, std::uint64_t seq) const {
  if (elsewhere(writer)) return links_->message_read(writer, seq);
  notify(control(writer).for_messages);
}

void Segment::control_changed() const {
  wake_all();
  if (links_) links_->tell(true);
}

void sleep_on(const Doorbell& doorbell, std::uint32_t seen, Nanoseconds timeout) {
  timespec duration{.tv_sec = static_cast<time_t>(timeout / kSecond), .tv_nsec = static_cast<long>(timeout % kSecond)};
  syscall(SYS_futex, &doorbell.rings, FUTEX_WAIT, seen, &duration, nullptr, 0);
}

std::string Segment::describe(int rank) const { return names_[static_cast<std::size_t>(rank)].describe(rank); }

std::string Segment::way_to(int rank) const {
  const std::string path = rank >= 0 && elsewhere(rank) ? links_->path(rank) : "";
  return path.empty() ? "" : " (" + path + ")";
}

std::vector<int> Segment::gone() const {
  std::vector<pollfd> polled;
  for (int fd : pidfds_.fds)
    polled.push_back({.fd = fd, .events = POLLIN, .revents = 0});  // poll ignores negative ones
  poll(polled.data(), polled.size(), 0);
  std::vector<int> result;
  if (links_)
    for (const int r : links_->lost()) polled[static_cast<std::size_t>(r)].revents = POLLIN;
  for (int r = 0; r < size(); ++r) {
    const bool ended = polled[static_cast<std::size_t>(r)].revents != 0;
    if (r != rank_ && (ended || left(r))) result.push_back(r);
  }
  return result;
}

std::string Segment::how_gone(int rank) const {
  if (left(rank)) return "left the group";
  return elsewhere(rank) ? "is out of reach: " + links_->reason(rank) : "died";
}

void Segment::abort(const Error& error, int reporter) const {
  AbortRecord& record = abort_record();
  std::uint32_t none = 0;
  if (!record.state.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) {
    // Another rank was first. Wait for it to finish writing, so that this rank throws the same error; but not for long,
    // since it may have died in the middle.
    const Nanoseconds deadline = now() + 100 * kMillisecond;
    while (record.state.load(std::memory_order_seq_cst) != 2 && now() < deadline) sched_yield();
    return;
  }
  record.kind = static_cast<std::int32_t>(error.kind());
  record.culprit = error.culprit();
  record.reporter = reporter;
  const std::size_t length = std::min(std::strlen(error.what()), sizeof(record.message) - 1);
  std::memcpy(record.message, error.what(), length);
  record.message[length] = '\0';
  record.state.store(2, std::memory_order_seq_cst);
  wake_all();
  wake(rank_);  // its other threads
  if (links_) links_->tell_soon();
}

void Segment::fail(std::uint64_t seq) const {
  std::atomic<std::uint64_t>& failed = abort_record().failed;
  std::uint64_t before = failed.load(std::memory_order_relaxed);
  while (before < ~seq && !failed.compare_exchange_weak(before, ~seq, std::memory_order_seq_cst)) {
  }
}

void Segment::throw_if_aborted() const {
  const AbortRecord& record = abort_record();
  if (record.state.load(std::memory_order_seq_cst) != 2) return;
  // The record lies in memory that peers can write: trust neither the end of its text nor its numbers.
  std::string message(record.message, strnlen(record.message, sizeof(record.message)));
  if (record.reporter != rank_) message += " [reported by rank " + std::to_string(record.reporter) + "]";
  const std::int32_t kind = record.kind, culprit = record.culprit;
  const bool known =
      kind >= static_cast<int>(ErrorKind::invalid_argument) && kind <= static_cast<int>(ErrorKind::system);
  throw Error(known ? static_cast<ErrorKind>(kind) : ErrorKind::system, message,
              culprit >= 0 && culprit < size() ? culprit : -1);
}

void Segment::throw_if_over(std::optional<std::uint64_t> call) const {
  throw_if_aborted();
  for (const int r : gone()) {
    if (left(r)) continue;  // that is the affair of those who still want something from it
    if (call && (elsewhere(r) || control(r).completed.load(std::memory_order_acquire) >= *call)) {
      const Nanoseconds t = now();
      Nanoseconds since = 0;
      if (found_dead_[static_cast<std::size_t>(r)].compare_exchange_strong(since, t)) since = t;
      if (t - since < kGrace) continue;
    }
    const Error error(ErrorKind::peer_lost, describe(r) + " " + how_gone(r), r);
    abort(error);
    throw_if_aborted();
    throw error;
  }
}

}  // namespace ringreduce
