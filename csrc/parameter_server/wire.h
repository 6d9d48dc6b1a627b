// Between hosts: what workers and servers send each other as frames over Connections (transport/connections.h).
//
//   worker -> server   data      A part of what is pushed, to its place in the server's copy of the worker's window.
//                      request   A RequestSlot. It counts when all its data has come, whatever came first.
//   server -> worker   value     A part of a block that is pulled, to its place in the worker's tensor.
//                      replies   ReplySlots. A pull's counts when all of its value has come.
//
// float32 values may be packed (kernels/packing.h): the header says how, and `total` how many bytes they are here. They
// are unpacked as they come, so nothing behind these classes knows of it.
//
// The protocol is that of one host: the window's data lies at the same offsets on both sides, so what bounds the worker
// bounds the server's memory too. These classes keep what has come until the server's or the worker's thread takes it;
// what they find in a frame is checked first.
#pragma once

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

// The most that a frame carries, so that something more important need not wait longer for its turn.
inline constexpr std::size_t kFragment = 256 * 1024;

struct WireKind {
  static constexpr std::uint32_t data = 1;     // seq: offset in the window's data; tag: the request's
  static constexpr std::uint32_t request = 2;  // a RequestSlot; tag: whose data frames it belongs to
  static constexpr std::uint32_t value = 3;    // seq: offset in the block; tag: the number of the pull
  static constexpr std::uint32_t replies = 4;  // ReplySlots
};

// Bytes on the wire of so many bytes of values, which are packed in parts of kFragment.
inline std::size_t wire_bytes(Packing packing, std::size_t bytes) {
  return packing == Packing::none ? bytes : packed_bytes(packing, bytes / sizeof(float));
}
// The values, packed for the wire.
std::shared_ptr<std::byte[]> pack_for_wire(Packing packing, const std::byte* values, std::size_t bytes);
// The header of a frame with header.bytes bytes of values, when they are packed.
FrameHeader packed(FrameHeader header, Packing packing);

// A frame with a payload of its own.
Frame frame_with(std::uint32_t kind, const void* payload, std::size_t bytes);

// What both ends share: connections, and a bell that rings when something has come.
class Wire : public Connections::User {
 public:
  explicit Wire(Bell& bell) : bell_(bell), connections_(*this) {}

  Connections& connections() { return connections_; }
  // (peer, why) of those that are out of reach, each once. What they sent before has been there since before.
  std::vector<std::pair<std::uint32_t, std::string>> take_lost();

  void left(int peer) final { lost(peer, "it has left"); }
  void lost(int peer, const std::string& why) final;
  void moved() final { bell_.ring(); }
  void attend(bool) override {}

 protected:
  ~Wire() = default;

  // Throws Error(mismatch) for the peer to be given up.
  static void demand(bool holds, int peer, const char* what);
  // Bytes of the values in a frame; throws as demand() if it cannot have any.
  static std::size_t values_in(int peer, const FrameHeader& header);

  Bell& bell_;
  mutable std::mutex mutex_;  // of what follows, and what classes of this one add; taken after that of connections
  std::vector<std::pair<std::uint32_t, std::string>> lost_;
  Connections connections_;
};

// A server's end.
class ServerWire final : public Wire {
 public:
  using Wire::Wire;
  ~ServerWire() { connections_.leave(); }

  // The worker's data goes to `data`, a memory of `bytes`, which `keeper` keeps. Before its connections are added.
  void admit(WorkerId worker, std::shared_ptr<const void> keeper, std::byte* data, std::size_t bytes);
  void drop(WorkerId worker);
  // Requests whose data has come, in the order in which they were complete.
  std::vector<std::pair<WorkerId, RequestSlot>> take_requests();

  std::byte* place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) override;
  void deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) override;

 private:
  struct Incoming {
    std::uint64_t bytes = 0;  // of its data that have come
    bool asked = false;
    RequestSlot slot{};
  };
  struct Sender {
    std::shared_ptr<const void> keeper;
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::map<std::uint64_t, Incoming> incoming;  // by tag
    std::size_t untaken = 0;                     // requests
  };

  void complete(WorkerId worker, Sender& sender, const RequestSlot& slot);

  std::map<WorkerId, Sender> senders_;
  std::vector<std::pair<WorkerId, RequestSlot>> requests_;
};

// A worker's end; `attend` is called by the thread of the connections now and then, and when more can be sent.
class WorkerWire final : public Wire {
 public:
  WorkerWire(Bell& bell, std::function<void()> attend) : Wire(bell), attend_(std::move(attend)) {}
  ~WorkerWire();

  // The value that the pull of this number asks for goes to `at`.
  void expect(std::uint32_t server, std::uint64_t number, std::byte* at, std::size_t bytes);
  // From now on nothing is stored there.
  void forget(std::uint32_t server, std::uint64_t number);
  // (server, reply), those of pulls with their values in place.
  std::vector<std::pair<std::uint32_t, ReplySlot>> take_replies();

  std::byte* place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) override;
  void deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) override;
  void attend(bool) override { attend_(); }

 private:
  struct Place {
    std::byte* at;
    std::size_t bytes;
    std::size_t unclaimed;  // that no frame has begun to bring
    std::size_t missing;    // that no frame has brought
    ReplySlot reply{};      // its number is not 0 if it has come
  };
  using Number = std::pair<std::uint32_t, std::uint64_t>;  // server, number of the request

  const std::function<void()> attend_;
  std::map<Number, Place> places_;
  std::vector<std::pair<std::uint32_t, ReplySlot>> replies_;
};

}  // namespace ringreduce::parameter_server
