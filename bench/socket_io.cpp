// Ways to drive TCP sockets, compared on the same connections. socket_io.py compiles it and starts one process a host:
//
//   socket_io SIDE ADDRESS PORT CONNECTIONS PATTERN BYTES COUNT ROUNDS WAY...
//
// SIDE 1 listens, SIDE 0 connects. Of CONNECTIONS the first carries all, the others are watched and stay silent, as
// those to other peers do. In every round each WAY has a turn: COUNT frames of BYTES in both directions. PATTERN:
//
//   pingpong  a frame there, then one back; both sides poll
//   busy      COUNT frames in both directions at once, as in a ring; both sides poll
//   asleep    the same; a side with nothing to do sleeps, so that its CPU time is that of the work
//
// Both sides print a line of JSON for each batch. Exit code 1: something failed, or a byte was wrong.
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using Bytes = std::span<std::byte>;

constexpr std::size_t kSource = 64 << 20;  // bytes that are sent again and again: more than caches hold
constexpr std::size_t kSlots = 8;          // frames that the place for what comes has room for
constexpr int kUnsent = 524288;            // as in csrc/transport/links.cpp
constexpr int kReads = 8;                  // likewise

[[noreturn]] void fail(const std::string& what, int error = errno) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

template <typename Result>
Result checked(Result result, const char* what) {
  if (result < 0) fail(what);
  return result;
}

// A read of a socket that blocks waits; io_uring, asked for one that does not block, gives up instead of waiting.
void set_blocking(const std::vector<int>& sockets, bool blocking) {
  for (const int socket : sockets) {
    const int flags = checked(fcntl(socket, F_GETFL), "F_GETFL");
    checked(fcntl(socket, F_SETFL, blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK), "F_SETFL");
  }
}

// ---- what is sent and received -------------------------------------------------------------------------------------

// Frames from one long source.
class Outbox {
 public:
  Outbox(std::size_t frame, int side) : frame_(frame), source_(kSource / frame * frame / sizeof(std::uint64_t)) {
    for (std::size_t i = 0; i < source_.size(); ++i) source_[i] = word(side, i * sizeof(std::uint64_t));
  }

  // The word that `side` sends at this place of its source.
  static std::uint64_t word(int side, std::size_t at) {
    return (at + 1) * 0x9e3779b97f4a7c15u + static_cast<unsigned>(side);
  }

  std::size_t period() const { return source_.size() * sizeof(std::uint64_t); }
  void allow(std::uint64_t frames) { allowed_ += frames * frame_; }
  bool empty() const { return sent_ == allowed_; }
  // What is left of the frame at hand.
  Bytes rest() { return std::as_writable_bytes(std::span(source_)).subspan(sent_ % period(), frame_ - sent_ % frame_); }
  void sent(std::size_t bytes) { sent_ += bytes; }

 private:
  std::size_t frame_;
  std::vector<std::uint64_t> source_;
  std::uint64_t sent_ = 0, allowed_ = 0;
};

// Slots that frames are received into, one after the other.
class Inbox {
 public:
  Inbox(std::size_t frame, int sender, std::size_t period)
      : frame_(frame), sender_(sender), period_(period), slots_(kSlots * frame / sizeof(std::uint64_t)) {}

  std::uint64_t frames() const { return received_ / frame_; }
  // What is left of the slot at hand.
  Bytes rest() {
    return std::as_writable_bytes(std::span(slots_))
        .subspan(received_ % (kSlots * frame_), frame_ - received_ % frame_);
  }
  void received(std::size_t bytes) {
    received_ += bytes;
    if (received_ % frame_ == 0) check();
  }
  // Every word of every frame is compared, or its first and last only, which takes no time.
  void check_all(bool all) { all_ = all; }

 private:
  void check() const {
    const std::uint64_t begin = received_ - frame_;
    const std::uint64_t* const slot = &slots_[begin % (kSlots * frame_) / sizeof(std::uint64_t)];
    const std::size_t words = frame_ / sizeof(std::uint64_t), step = all_ ? 1 : words - 1;
    for (std::size_t i = 0; i < words; i += step)
      if (slot[i] != Outbox::word(sender_, begin % period_ + i * sizeof(std::uint64_t)))
        throw std::runtime_error("word " + std::to_string(i) + " of frame " + std::to_string(begin / frame_) +
                                 " is wrong");
  }

  std::size_t frame_;
  int sender_;
  std::size_t period_;
  std::vector<std::uint64_t> slots_;
  std::uint64_t received_ = 0;
  bool all_ = true;
};

// ---- the ways ------------------------------------------------------------------------------------------------------

struct Counts {
  std::uint64_t calls = 0;   // of the system
  std::uint64_t zero = 0;    // sends without a copy that the kernel has reported on
  std::uint64_t copied = 0;  // of these, which it has copied after all
};

// Moves bytes between the boxes and the first connection. It is driven as links are: by looking, again and again.
class Way {
 public:
  Way(Outbox& out, Inbox& in) : out_(out), in_(in) {}
  Way(const Way&) = delete;
  virtual ~Way() = default;

  // Hands what may be sent to the kernel, as far as it takes it.
  virtual void flush() = 0;
  // Takes what has come, and goes on sending; waits until something happens if `asleep`.
  virtual void look(bool asleep) = 0;
  // Does the kernel hold nothing of the outbox any more?
  virtual bool returned() const { return true; }
  // Leaves the connections to the next way.
  virtual void stop() {}

  Counts counts;

 protected:
  Outbox& out_;
  Inbox& in_;
};

// Only reads and writes, on every connection in turn: cheap for one, and nothing to sleep on.
class Plain : public Way {
 public:
  Plain(Outbox& out, Inbox& in, const std::vector<int>& sockets) : Way(out, in), sockets_(sockets) {
    set_blocking(sockets, false);
  }

  void flush() override {
    while (!out_.empty() && send_some()) {
    }
  }

  void look(bool asleep) override {
    if (asleep) throw std::invalid_argument("plain cannot sleep: leave it out of pattern asleep");
    for (std::size_t i = 1; i < sockets_.size(); ++i) {
      std::byte none;
      ++counts.calls;
      if (recv(sockets_[i], &none, 1, MSG_DONTWAIT) >= 0) fail("a connection that should be silent", EPROTO);
    }
    receive_some();
    flush();
  }

 protected:
  // One frame, or what is left of it; false if the kernel does not take all of it now.
  bool send_some(int flags = 0) {
    const Bytes rest = out_.rest();
    iovec part{rest.data(), rest.size()};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    ++counts.calls;
    const ssize_t done = sendmsg(sockets_[0], &message, MSG_NOSIGNAL | MSG_DONTWAIT | flags);
    if (done < 0) {
      if (errno == EAGAIN || errno == ENOBUFS) return false;
      fail("sendmsg");
    }
    out_.sent(static_cast<std::size_t>(done));
    if ((flags & MSG_ZEROCOPY) != 0) ++unreported_;
    return static_cast<std::size_t>(done) == rest.size();
  }

  enum class Read { nothing, some, all };  // of what there was room for

  Read receive_some() {
    const Bytes rest = in_.rest();
    iovec part{rest.data(), rest.size()};
    ++counts.calls;
    const ssize_t done = readv(sockets_[0], &part, 1);
    if (done < 0 && errno == EAGAIN) return Read::nothing;
    if (done <= 0) fail("readv", done < 0 ? errno : ECONNRESET);
    in_.received(static_cast<std::size_t>(done));
    return static_cast<std::size_t>(done) == rest.size() ? Read::all : Read::some;
  }

  const std::vector<int>& sockets_;
  std::uint64_t unreported_ = 0;  // sends without a copy
};

// As links.cpp: epoll tells which sockets to read, and when a full one takes more.
class Epoll : public Plain {
 public:
  struct Options {
    bool zero_copy = false;
    bool trust_short = false;  // a read that finds less than it has room for is the last, else one that finds nothing
  };

  Epoll(Outbox& out, Inbox& in, const std::vector<int>& sockets, Options options)
      : Plain(out, in, sockets),
        zero_copy_(options.zero_copy),
        enough_(options.trust_short ? Read::some : Read::nothing),
        poll_(checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1")) {
    for (std::size_t i = 0; i < sockets.size(); ++i) control(EPOLL_CTL_ADD, i, EPOLLIN);
    if (!zero_copy_) return;
    const int on = 1;
    checked(setsockopt(sockets[0], SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on), "SO_ZEROCOPY");
  }
  ~Epoll() override { close(poll_); }

  void flush() override {
    while (!out_.empty() && send_some(zero_copy_ ? MSG_ZEROCOPY : 0)) {
    }
    if (out_.empty() == !wants_out_) return;
    wants_out_ = !out_.empty();
    control(EPOLL_CTL_MOD, 0, EPOLLIN | (wants_out_ ? EPOLLOUT : 0u));
  }

  void look(bool asleep) override {
    std::array<epoll_event, 32> events;
    ++counts.calls;
    const int count = checked(epoll_wait(poll_, events.data(), events.size(), asleep ? -1 : 0), "epoll_wait");
    for (const epoll_event& event : std::span(events).first(static_cast<std::size_t>(count))) {
      if (event.data.u64 != 0) fail("a connection that should be silent", EPROTO);
      if ((event.events & EPOLLERR) != 0) read_reports();
      if ((event.events & EPOLLIN) != 0)
        for (int reads = 0; reads < kReads && receive_some() > enough_; ++reads) {
        }
      if ((event.events & EPOLLOUT) != 0) flush();
    }
  }

  bool returned() const override { return unreported_ == 0; }

 private:
  void control(int operation, std::size_t number, std::uint32_t events) {
    epoll_event event{.events = events, .data = {.u64 = number}};
    ++counts.calls;
    checked(epoll_ctl(poll_, operation, sockets_[number], &event), "epoll_ctl");
  }

  // What the kernel says about sends without a copy: a range of their numbers in each message.
  void read_reports() {
    alignas(cmsghdr) std::array<char, 128> space;
    msghdr message{};
    while (true) {
      message.msg_control = space.data();
      message.msg_controllen = space.size();
      ++counts.calls;
      if (recvmsg(sockets_[0], &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) {
        if (errno == EAGAIN) return;
        fail("recvmsg, of the error queue");
      }
      const cmsghdr* const part = CMSG_FIRSTHDR(&message);
      sock_extended_err report;
      if (part == nullptr || part->cmsg_len < CMSG_LEN(sizeof report)) fail("the error queue", EPROTO);
      std::memcpy(&report, CMSG_DATA(part), sizeof report);
      if (report.ee_origin != SO_EE_ORIGIN_ZEROCOPY) fail("the connection", static_cast<int>(report.ee_errno));
      const std::uint64_t sends = report.ee_data - report.ee_info + 1u;
      unreported_ -= sends;
      counts.zero += sends;
      if ((report.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) != 0) counts.copied += sends;
    }
  }

  bool zero_copy_;
  Read enough_;  // reading ends with no more than this
  int poll_;
  bool wants_out_ = false;
};

// io_uring by its system calls: a send and a receive are under way at any time, each of a whole frame.
class Uring : public Way {
 public:
  struct Options {
    bool one_thread = true;  // the kernel works only when this thread enters it; else any thread may use the ring
    bool zero_copy = false;
    bool multishot = false;  // one receive serves for ever; the kernel picks buffers, from which bytes are copied
  };

  Uring(Outbox& out, Inbox& in, const std::vector<int>& sockets, Options options)
      : Way(out, in), options_(options), armed_(sockets.size()) {
    set_blocking(sockets, true);
    io_uring_params params{};
    if (options.one_thread)
      params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
    ring_ = static_cast<int>(checked(syscall(SYS_io_uring_setup, kEntries, &params), "io_uring_setup"));
    if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0) fail("io_uring of such an old kernel", ENOSYS);
    map_bytes_ = std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                       params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    map_ = mapped(map_bytes_, ring_, IORING_OFF_SQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe*>(mapped(kEntries * sizeof(io_uring_sqe), ring_, IORING_OFF_SQES));
    const auto at = [&](unsigned offset) { return reinterpret_cast<unsigned*>(map_ + offset); };
    sq_tail_ = at(params.sq_off.tail);
    sq_flags_ = at(params.sq_off.flags);
    cq_head_ = at(params.cq_off.head);
    cq_tail_ = at(params.cq_off.tail);
    sq_mask_ = params.sq_entries - 1;
    cq_mask_ = params.cq_entries - 1;
    completions_ = reinterpret_cast<io_uring_cqe*>(map_ + params.cq_off.cqes);
    for (unsigned i = 0; i < params.sq_entries; ++i) at(params.sq_off.array)[i] = i;
    do_register(IORING_REGISTER_FILES, sockets.data(), static_cast<unsigned>(sockets.size()));
    enter_as_ = ring_;
    if (options.one_thread) {  // such a number is of one thread
      io_uring_rsrc_update update{.offset = UINT32_MAX, .resv = 0, .data = static_cast<std::uint64_t>(ring_)};
      do_register(IORING_REGISTER_RING_FDS, &update, 1);
      enter_as_ = static_cast<int>(update.offset);
      enter_flags_ = IORING_ENTER_REGISTERED_RING;
    }
    if (options.multishot) provide_buffers();
  }

  ~Uring() override {
    munmap(entries_, kEntries * sizeof(io_uring_sqe));
    munmap(map_, map_bytes_);
    close(ring_);
    if (buffers_ != nullptr) munmap(buffers_, kBuffers * sizeof(io_uring_buf));
  }

  void flush() override {
    prepare();
    enter(0, 0);
  }

  void look(bool asleep) override {
    prepare();
    const bool nothing = !ready();
    const bool work = (std::atomic_ref(*sq_flags_).load(std::memory_order_relaxed) & IORING_SQ_TASKRUN) != 0;
    if (prepared_ > 0 || (nothing && (asleep || work))) enter(nothing && asleep ? 1 : 0, IORING_ENTER_GETEVENTS);
    while (ready()) {
      const unsigned head = *cq_head_;
      const io_uring_cqe completion = completions_[head & cq_mask_];
      std::atomic_ref(*cq_head_).store(head + 1, std::memory_order_release);
      take(completion);
    }
  }

  bool returned() const override { return unreported_ == 0; }

  // A receive that is under way would take what is meant for the next way.
  void stop() override {
    io_uring_sqe& entry = next_entry(IORING_OP_ASYNC_CANCEL, kCancel);
    entry.cancel_flags = IORING_ASYNC_CANCEL_ALL | IORING_ASYNC_CANCEL_ANY;
    stopping_ = true;
    while (std::find(armed_.begin(), armed_.end(), true) != armed_.end()) look(true);
  }

 private:
  static constexpr unsigned kEntries = 64, kBuffers = 64, kBufferBytes = 16384;
  static constexpr std::uint64_t kSend = UINT64_MAX, kCancel = UINT64_MAX - 1;  // others: a connection's number

  static std::byte* mapped(std::size_t bytes, int fd, std::uint64_t offset) {
    const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED | MAP_POPULATE;
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, static_cast<off_t>(offset));
    if (at == MAP_FAILED) fail("mmap");
    return static_cast<std::byte*>(at);
  }

  void do_register(unsigned what, const void* argument, unsigned count) {
    checked(syscall(SYS_io_uring_register, ring_, what, argument, count), "io_uring_register");
  }

  void provide_buffers() {
    buffers_ = reinterpret_cast<io_uring_buf*>(mapped(kBuffers * sizeof(io_uring_buf), -1, 0));
    buffer_space_.resize(kBuffers * kBufferBytes);
    io_uring_buf_reg registration{};
    registration.ring_addr = reinterpret_cast<std::uint64_t>(buffers_);
    registration.ring_entries = kBuffers;
    do_register(IORING_REGISTER_PBUF_RING, &registration, 1);
    for (unsigned i = 0; i < kBuffers; ++i) give(i);
  }

  // Lets the kernel fill this buffer.
  void give(unsigned buffer) {
    io_uring_buf& entry = buffers_[buffers_given_ % kBuffers];
    entry.addr = reinterpret_cast<std::uint64_t>(&buffer_space_[buffer * kBufferBytes]);
    entry.len = kBufferBytes;
    entry.bid = static_cast<std::uint16_t>(buffer);
    std::uint16_t& tail = buffers_[0].resv;  // where the tail of the ring lies
    std::atomic_ref(tail).store(++buffers_given_, std::memory_order_release);
  }

  bool ready() const { return std::atomic_ref(*cq_tail_).load(std::memory_order_acquire) != *cq_head_; }

  io_uring_sqe& next_entry(std::uint8_t operation, std::uint64_t name) {
    io_uring_sqe& entry = entries_[(*sq_tail_ + prepared_++) & sq_mask_];
    entry = {};
    entry.opcode = operation;
    entry.user_data = name;
    return entry;
  }

  // The send first: it is what the peer waits for.
  void prepare() {
    if (!sending_ && !out_.empty()) prepare_send();
    if (stopping_) return;
    for (std::size_t i = 0; i < armed_.size(); ++i)
      if (!armed_[i]) prepare_receive(i);
  }

  void prepare_send() {
    io_uring_sqe& entry = next_entry(options_.zero_copy ? IORING_OP_SEND_ZC : IORING_OP_SEND, kSend);
    if (options_.zero_copy) entry.ioprio = IORING_SEND_ZC_REPORT_USAGE;
    place(entry, 0, out_.rest());
    entry.msg_flags = MSG_WAITALL | MSG_NOSIGNAL;
    sending_ = true;
  }

  void prepare_receive(std::size_t connection) {
    io_uring_sqe& entry = next_entry(IORING_OP_RECV, connection);
    place(entry, connection, connection == 0 ? in_.rest() : Bytes(&none_, 1));
    if (!more_there_) entry.ioprio = IORING_RECVSEND_POLL_FIRST;
    if (options_.multishot) {
      entry.ioprio |= IORING_RECV_MULTISHOT;
      entry.flags |= IOSQE_BUFFER_SELECT;
      entry.addr = entry.len = entry.buf_group = 0;
    } else {
      entry.msg_flags = MSG_WAITALL;
    }
    armed_[connection] = true;
  }

  static void place(io_uring_sqe& entry, std::size_t connection, Bytes where) {
    entry.fd = static_cast<int>(connection);
    entry.flags = IOSQE_FIXED_FILE;
    entry.addr = reinterpret_cast<std::uint64_t>(where.data());
    entry.len = static_cast<std::uint32_t>(where.size());
  }

  void enter(unsigned wanted, unsigned flags) {
    std::atomic_ref(*sq_tail_).store(*sq_tail_ + prepared_, std::memory_order_release);
    ++counts.calls;
    const long taken = syscall(SYS_io_uring_enter, enter_as_, prepared_, wanted, flags | enter_flags_, nullptr, 0);
    if (checked(taken, "io_uring_enter") != static_cast<long>(prepared_)) fail("io_uring_enter", EBUSY);
    prepared_ = 0;
  }

  void take(const io_uring_cqe& completion) {
    if (completion.user_data == kCancel) return;
    if (completion.user_data == kSend) return take_send(completion);
    armed_[completion.user_data] = (completion.flags & IORING_CQE_F_MORE) != 0;
    if (stopping_ && completion.res == -ECANCELED) return;
    if (completion.user_data != 0) fail("a connection that should be silent", EPROTO);
    if (completion.res <= 0) fail("receive", completion.res < 0 ? -completion.res : ECONNRESET);
    more_there_ = (completion.flags & IORING_CQE_F_SOCK_NONEMPTY) != 0;
    const auto bytes = static_cast<std::size_t>(completion.res);
    if (!options_.multishot) return in_.received(bytes);
    const unsigned buffer = completion.flags >> IORING_CQE_BUFFER_SHIFT;
    for (Bytes left = Bytes(buffer_space_).subspan(buffer * kBufferBytes, bytes); !left.empty();) {
      const Bytes rest = in_.rest();
      const std::size_t some = std::min(left.size(), rest.size());
      std::memcpy(rest.data(), left.data(), some);
      in_.received(some);
      left = left.subspan(some);
    }
    give(buffer);
  }

  void take_send(const io_uring_cqe& completion) {
    if ((completion.flags & IORING_CQE_F_NOTIF) != 0) {
      --unreported_;
      ++counts.zero;
      if ((static_cast<std::uint32_t>(completion.res) & IORING_NOTIF_USAGE_ZC_COPIED) != 0) ++counts.copied;
      return;
    }
    if (completion.res < 0) fail("send", -completion.res);
    sending_ = false;
    out_.sent(static_cast<std::size_t>(completion.res));
    if ((completion.flags & IORING_CQE_F_MORE) != 0) ++unreported_;
  }

  Options options_;
  int ring_ = -1, enter_as_ = -1;
  unsigned enter_flags_ = 0;
  std::size_t map_bytes_ = 0;
  std::byte* map_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  io_uring_cqe* completions_ = nullptr;
  unsigned *sq_tail_ = nullptr, *sq_flags_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_mask_ = 0, cq_mask_ = 0, prepared_ = 0;
  io_uring_buf* buffers_ = nullptr;
  std::vector<std::byte> buffer_space_;
  std::uint16_t buffers_given_ = 0;
  std::vector<bool> armed_;  // is a receive under way?
  bool sending_ = false, stopping_ = false, more_there_ = false;
  std::byte none_{};  // for what does not come
  std::uint64_t unreported_ = 0;
};

using MakeWay = std::unique_ptr<Way> (*)(Outbox&, Inbox&, const std::vector<int>&);

template <typename Kind, typename Kind::Options options>
std::unique_ptr<Way> make(Outbox& out, Inbox& in, const std::vector<int>& sockets) {
  return std::make_unique<Kind>(out, in, sockets, options);
}

const std::map<std::string, MakeWay> kWays{
    {"plain",
     [](auto& out, auto& in, auto& sockets) -> std::unique_ptr<Way> {
       return std::make_unique<Plain>(out, in, sockets);
     }},
    {"epoll", make<Epoll, Epoll::Options{}>},
    {"epoll_short", make<Epoll, Epoll::Options{.trust_short = true}>},
    {"epoll_zero_copy", make<Epoll, Epoll::Options{.zero_copy = true}>},
    {"uring", make<Uring, Uring::Options{}>},
    {"uring_shared", make<Uring, Uring::Options{.one_thread = false}>},
    {"uring_multishot", make<Uring, Uring::Options{.multishot = true}>},
    {"uring_zero_copy", make<Uring, Uring::Options{.zero_copy = true}>},
};

// ---- connections ---------------------------------------------------------------------------------------------------

std::vector<int> connect_or_accept(int side, const char* address, int port, int count) {
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(static_cast<std::uint16_t>(port));
  if (inet_pton(AF_INET, address, &where.sin_addr) != 1) throw std::invalid_argument(address);
  const auto* const name = reinterpret_cast<const sockaddr*>(&where);
  const auto new_socket = [] { return checked(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "socket"); };

  std::vector<int> sockets;
  const int on = 1, unsent = kUnsent;
  if (side == 1) {
    const int listener = new_socket();
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    checked(bind(listener, name, sizeof where), "bind");
    checked(listen(listener, count), "listen");
    while (std::ssize(sockets) < count)
      sockets.push_back(checked(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC), "accept"));
    close(listener);
  }
  for (int tries = 0; std::ssize(sockets) < count;) {
    const int socket = new_socket();
    if (connect(socket, name, sizeof where) == 0) {
      sockets.push_back(socket);
      continue;
    }
    if (errno != ECONNREFUSED || ++tries == 500) fail("connect");
    close(socket);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // the other side may not listen yet
  }
  for (const int socket : sockets) {
    checked(setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on), "TCP_NODELAY");
    checked(setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent, sizeof unsent), "TCP_NOTSENT_LOWAT");
  }
  return sockets;
}

// Returns when both sides are here.
void meet(int control) {
  char byte = 0;
  checked(send(control, &byte, 1, MSG_NOSIGNAL), "send");
  if (checked(recv(control, &byte, 1, MSG_WAITALL), "recv") == 0) fail("the other side", ECONNRESET);
}

// ---- measuring -----------------------------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

double cpu_seconds() {
  rusage usage;
  checked(getrusage(RUSAGE_SELF, &usage), "getrusage");
  const auto in_seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return in_seconds(usage.ru_utime) + in_seconds(usage.ru_stime);
}

// That all cores have been idle, so that the kernel's threads are counted too; in hundredths.
double idle_seconds() {
  std::ifstream file("/proc/stat");
  std::string cpu;
  double user = 0, nice = 0, system = 0, idle = 0, waiting = 0;
  if (!(file >> cpu >> user >> nice >> system >> idle >> waiting)) fail("/proc/stat", EINVAL);
  return (idle + waiting) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

struct Request {
  int side = 0;
  std::string pattern;
  std::size_t frame = 0;
  std::uint64_t count = 0;
  int rounds = 0;
  std::vector<std::string> ways;
};

// Returns the median of the round trips, in seconds.
double exchange(Way& way, Outbox& out, Inbox& in, int side, std::uint64_t count) {
  std::vector<double> trips;
  trips.reserve(count);
  for (std::uint64_t i = 0, end = in.frames(); i < count; ++i) {
    const Clock::time_point start = Clock::now();
    ++end;
    const auto send = [&] {
      out.allow(1);
      way.flush();
    };
    if (side == 0) send();
    while (in.frames() < end) way.look(false);
    if (side == 1) send();
    while (!out.empty()) way.look(false);
    trips.push_back(seconds(Clock::now() - start));
  }
  const auto middle = trips.begin() + static_cast<std::ptrdiff_t>(trips.size() / 2);
  std::nth_element(trips.begin(), middle, trips.end());
  return *middle;
}

void stream(Way& way, Outbox& out, Inbox& in, std::uint64_t count, bool asleep) {
  const std::uint64_t end = in.frames() + count;
  out.allow(count);
  way.flush();
  while (in.frames() < end || !out.empty() || !way.returned()) way.look(asleep);
}

void run(const Request& request, const std::vector<int>& sockets, int control) {
  Outbox out(request.frame, request.side);
  Inbox in(request.frame, 1 - request.side, out.period());
  for (int round = -1; round < request.rounds; ++round) {  // the first one warms up, and checks every byte
    in.check_all(round < 0);
    std::vector<std::string> ways = request.ways;
    if (round % 2 != 0) std::reverse(ways.begin(), ways.end());
    for (const std::string& name : ways) {
      const std::unique_ptr<Way> way = kWays.at(name)(out, in, sockets);
      meet(control);
      way->counts = {};
      const double cpu = cpu_seconds(), idle = idle_seconds();
      const Clock::time_point start = Clock::now();
      double trip = 0;
      if (request.pattern == "pingpong")
        trip = exchange(*way, out, in, request.side, request.count);
      else
        stream(*way, out, in, request.count, request.pattern == "asleep");
      const double taken = seconds(Clock::now() - start), worked = cpu_seconds() - cpu;
      const Counts counts = way->counts;
      meet(control);
      const double rested = idle_seconds() - idle;
      way->stop();
      meet(control);
      if (round < 0) continue;
      std::printf(
          R"({"way": "%s", "round": %d, "seconds": %.9f, "trip": %.9f, "cpu": %.6f, "idle": %.2f, "calls": %llu, )"
          R"("zero": %llu, "copied": %llu})"
          "\n",
          name.c_str(), round, taken, trip, worked, rested, static_cast<unsigned long long>(counts.calls),
          static_cast<unsigned long long>(counts.zero), static_cast<unsigned long long>(counts.copied));
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 10) {
    std::fprintf(stderr, "usage: %s SIDE ADDRESS PORT CONNECTIONS PATTERN BYTES COUNT ROUNDS WAY...\n", argv[0]);
    return 2;
  }
  try {
    const Request request{.side = std::stoi(argv[1]),
                          .pattern = argv[5],
                          .frame = std::stoul(argv[6]),
                          .count = std::stoul(argv[7]),
                          .rounds = std::stoi(argv[8]),
                          .ways = {argv + 9, argv + argc}};
    // As every rank has: the kernel looks up a process's files faster while it has a single thread.
    std::thread([] {
      while (true) pause();
    }).detach();
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(static_cast<unsigned>(request.side) % std::max(1u, std::thread::hardware_concurrency()), &core);
    checked(sched_setaffinity(0, sizeof core, &core), "sched_setaffinity");
    std::vector<int> sockets = connect_or_accept(request.side, argv[2], std::stoi(argv[3]), std::stoi(argv[4]) + 1);
    const int control = sockets.back();
    sockets.pop_back();
    run(request, sockets, control);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: side %s: %s\n", argv[1], error.what());
    return 1;
  }
}
