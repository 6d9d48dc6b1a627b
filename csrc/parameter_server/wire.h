// Workers and servers on different hosts: the frames they send each other over Connections (transport/connections.h).
//
//   worker -> server   data      A fragment of pushed data, stored in the server's copy of the worker's window.
//                      request   A RequestSlot. It is delivered when all its data has arrived, in whatever order.
//   server -> worker   value     A fragment of a pulled value, stored in the worker's tensor.
//                      replies   ReplySlots. The reply to a pull is delivered when all of its value has arrived.
//                      failure   A text: why the server leaves.
//
// float32 values may be packed (kernels/packing.h): the header says how, and `total` is their size when unpacked. They
// are unpacked on arrival, so only these classes know about packing.
//
// The protocol is the same as on one host. Data has the same offsets in the window and in the server's copy of it, so
// the size of the window bounds the server's memory too. These classes check every frame, and keep what has arrived
// until the server's or the worker's thread takes it.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "parameter_server/shared.h"
#include "transport/connections.h"

namespace ringreduce::parameter_server {

// The most bytes of values in a frame. A more urgent frame waits at most for one of this size.
inline constexpr std::size_t kFragment = 256 * 1024;

inline constexpr std::size_t kMostFailure = sizeof(ValuesHeader::failure);

struct WireKind {
  static constexpr std::uint32_t data = 1;     // seq: offset in the window's data; tag: that of the request
  static constexpr std::uint32_t request = 2;  // a RequestSlot; tag: that of its data frames
  static constexpr std::uint32_t value = 3;    // seq: offset in the block; tag: the number of the pull
  static constexpr std::uint32_t replies = 4;  // ReplySlots
  static constexpr std::uint32_t failure = 5;  // at most kMostFailure bytes of text
};

// The size on the wire of `bytes` bytes of values, which are packed in fragments of kFragment.
inline std::size_t wire_bytes(Packing packing, std::size_t bytes) {
  return packing == Packing::none ? bytes : packed_bytes(packing, bytes / sizeof(float));
}
// Packs values for the wire.
std::shared_ptr<std::byte[]> pack_for_wire(Packing packing, const std::byte* values, std::size_t bytes);
// Converts the header of a frame with header.bytes bytes of values to that of the same values packed.
FrameHeader packed(FrameHeader header, Packing packing);

// The base of both ends: connections, and a bell that rings when something has arrived.
class Wire : public Connections::User {
 public:
  explicit Wire(Bell& bell) : bell_(bell), connections_(*this) {}

  Connections& connections() { return connections_; }
  // Returns the peers that went out of reach since the last call, and why. Everything that they sent has been
  // delivered.
  std::vector<std::pair<std::uint32_t, std::string>> take_lost();

  // Whether memory has run out for what was sent or received, since the last call.
  bool has_run_out() { return ran_out_.exchange(false); }

  void left(int peer) final { lost(peer, "it has left"); }
  void lost(int peer, const std::string& why) override;
  void failed(const std::bad_alloc&) final { ran_out_ = true; }
  void moved() final { bell_.ring(); }
  void attend(bool) override {}

 protected:
  ~Wire() = default;

  // Throws Error(mismatch), which drops the peer, unless `holds`.
  static void demand(bool holds, int peer, const char* what);
  // Whether the frame says that the peer leaves; throws as demand() if it is none.
  static bool is_farewell(int peer, const FrameHeader& header);
  // Returns the unpacked size of the values in a frame; throws as demand() if the header is invalid.
  static std::size_t values_in(int peer, const FrameHeader& header);

  Bell& bell_;
  std::atomic<bool> ran_out_ = false;
  mutable std::mutex mutex_;  // guards lost_ and the members of derived classes; locked after that of connections_
  std::vector<std::pair<std::uint32_t, std::string>> lost_;
  Connections connections_;
};

// The server's end.
class ServerWire final : public Wire {
 public:
  using Wire::Wire;
  ~ServerWire() { connections_.leave(); }

  // Lets in a worker, whose pushed data is stored in the `bytes` bytes at `data`; `keeper` owns that memory. Called
  // before connections to the worker are added.
  void admit(WorkerId worker, std::shared_ptr<const void> keeper, std::byte* data, std::size_t bytes);
  void drop(WorkerId worker);
  // Takes the requests that have arrived with all their data, in the order in which they became complete.
  std::vector<std::pair<WorkerId, RequestSlot>> take_requests();

  std::byte* place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) override;
  void deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) override;

 private:
  struct Incoming {
    std::uint64_t bytes = 0;  // of its data that have arrived
    bool asked = false;       // the request itself has arrived
    RequestSlot slot{};
  };
  struct Sender {
    std::shared_ptr<const void> keeper;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::map<std::uint64_t, Incoming> incoming;  // by tag
    std::size_t untaken = 0;                     // number of its requests in requests_
  };

  void complete(WorkerId worker, Sender& sender, const RequestSlot& slot);

  std::map<WorkerId, Sender> senders_;
  std::vector<std::pair<WorkerId, RequestSlot>> requests_;
};

// The worker's end. The thread of the connections calls `attend` from time to time, and when more can be sent.
class WorkerWire final : public Wire {
 public:
  WorkerWire(Bell& bell, std::function<void()> attend) : Wire(bell), attend_(std::move(attend)) {}
  ~WorkerWire();

  // Declares that the value for pull `number` is to be stored at `at`.
  void expect(std::uint32_t server, std::uint64_t number, std::byte* at, std::size_t bytes);
  // Gives up a pull: after this returns, nothing is stored there.
  void forget(std::uint32_t server, std::uint64_t number);
  // Takes (server, reply) for the replies that have arrived. The values of pulls are in place.
  std::vector<std::pair<std::uint32_t, ReplySlot>> take_replies();

  void lost(int peer, const std::string& why) override;
  std::byte* place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) override;
  void deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) override;
  void attend(bool) override { attend_(); }

 private:
  struct Place {
    std::byte* at;
    std::size_t bytes;
    std::size_t unclaimed;  // bytes of which no frame has begun to arrive
    std::size_t missing;    // bytes that have not arrived
    ReplySlot reply{};      // number 0: it has not arrived
  };
  using Number = std::pair<std::uint32_t, std::uint64_t>;  // server and number of the request

  const std::function<void()> attend_;
  std::map<Number, Place> places_;
  std::vector<std::pair<std::uint32_t, ReplySlot>> replies_;
  std::map<std::uint32_t, std::string> failures_;  // by server
};

}  // namespace ringreduce::parameter_server
