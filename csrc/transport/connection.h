// One stream socket to a peer, and the frames that go over it in both directions. A frame is a header and a payload.
//
// Connections (connections.h) has several and decides which of them takes a frame. The users know what frames mean:
// FrameUser is told of each. The links of a group's ranks (links.h) are one such user.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "kernels/packing.h"

namespace ringreduce {

static_assert(std::endian::native == std::endian::little);  // as on all machines that this library is built for

// The header before a payload. Connections look at `kind` and `bytes` only; the other numbers belong to the user.
struct FrameHeader {
  static constexpr std::uint32_t kMagic = 0x31465252;  // "RRF1"
  // Nothing comes after these two on a connection: the sender takes no further part, or has no memory for it any more.
  static constexpr std::uint32_t kLeave = 7, kRanOut = 8;

  std::uint32_t magic = kMagic;
  std::uint32_t kind = kLeave;
  std::uint32_t bytes = 0;  // of payload
  std::uint32_t channel = 0;
  std::uint64_t seq = 0;
  std::uint64_t tag = 0;
  std::uint64_t total = 0;  // bytes of the whole message, or of the value when it is unpacked
  std::uint32_t dtype = 0;
  Packing packing = Packing::none;
};
static_assert(sizeof(FrameHeader) == 48 && std::is_trivially_copyable_v<FrameHeader>);

// A frame to be sent.
struct Frame {
  FrameHeader header;
  const std::byte* data = nullptr;             // header.bytes of payload, which stay until the frame is sent
  std::shared_ptr<std::byte[]> own = nullptr;  // the payload, if nobody else keeps it
  bool lent = false;                           // the payload is a call's: Connections::forget_lent()
};

// A frame with a copy of its payload: `first`, then `rest`.
Frame frame_of(std::uint32_t kind, std::span<const std::byte> first, std::span<const std::byte> rest = {});
template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

// Is told what comes over connections, by one thread at a time. It must not call them back.
class FrameUser {
 public:
  // Where the payload of a frame goes: to memory of the user's, or to `aside`, once that is as large as the payload.
  // Throws Error for a frame that the peer had no right to send; then the link to it is broken.
  virtual std::byte* place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) = 0;
  // The frame is complete.
  virtual void deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) = 0;

 protected:
  ~FrameUser() = default;
};

struct Traffic {
  std::uint64_t bytes_out = 0, bytes_in = 0, frames_out = 0, frames_in = 0;
};

// Closed with this object, and at once in forked children, to whom it is of no use. -1: none.
class PrivateDescriptor {
 public:
  // Takes the descriptor, also if it throws.
  explicit PrivateDescriptor(int fd);
  PrivateDescriptor(PrivateDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~PrivateDescriptor() { close(); }
  int get() const { return fd_; }
  void close();

 private:
  int fd_;
};

class Connection {
 public:
  enum class Received { nothing, some, drained, end };  // `drained`: some, and the socket had no more

  // Takes over the socket, and makes it one that does not block. `path` is how errors name it. Forked children close
  // their copies: a connection is only over for the peer when nobody holds it any more.
  Connection(PrivateDescriptor socket, std::string path);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int socket() const { return socket_.get(); }  // -1: closed
  bool is_open() const { return socket() >= 0; }
  const std::string& path() const { return path_; }
  void close();

  // Hands frames to the kernel until it accepts no more: first the frames that this connection has taken before, then
  // those of `queue`. With `farewell`, a leave frame follows the last one. Subtracts the frames of the queue that went
  // out as a whole from `unsent`.
  void send(std::deque<Frame>& queue, bool farewell, std::atomic<std::uint64_t>& unsent);
  // Whether it holds frames that the kernel has not accepted yet.
  bool is_full() const { return !sending_.empty(); }
  // The number of frames that it took from the queue and has not sent.
  std::size_t unsent() const;
  // Bytes that it took and that, as far as known, have not reached the peer's machine.
  std::uint64_t on_the_way() const;
  // Frames that are lent: the rest of one that has begun must follow, as the peer counts bytes. It goes from a copy.
  void keep_lent();
  // Nothing more is stored in [begin, begin + bytes): the rest of a payload that goes there is put aside.
  void turn_away(const std::byte* begin, std::size_t bytes);

  // Reads once, and gives `user` the frames that are complete.
  Received receive(int peer, FrameUser& user);
  bool heard_leave() const { return heard_leave_; }
  // Tells the peer, which need not be in the middle of a frame, that there is no memory for this connection any more.
  // Needs none.
  void say_ran_out() const;

  const Traffic& traffic() const { return traffic_; }

 private:
  bool take(std::deque<Frame>& queue, bool farewell);
  bool write_some();
  void digest(int peer, FrameUser& user);
  [[noreturn]] void fail() const;
  std::string hint_of_mtu() const;

  PrivateDescriptor socket_;
  const std::string path_;
  Traffic traffic_;
  std::vector<Frame> sending_;                 // frames it has taken
  std::size_t sent_ = 0;                       // bytes of them
  std::optional<std::uint64_t> before_large_;  // bytes sent before the first write of more than fits a packet
  bool said_leave_ = false, heard_leave_ = false;

  // The receiving side: a frame whose payload is under way, and bytes that have not been looked at.
  bool receiving_ = false;
  FrameHeader header_;
  std::byte* into_ = nullptr;
  std::size_t missing_ = 0;
  std::vector<std::byte> staged_;
  std::size_t staged_end_ = 0;
  std::vector<std::byte> aside_;  // a payload that is not stored as it comes
};

}  // namespace ringreduce
