#include "parameter_server/wire.h"

#include <algorithm>
#include <cstring>

#include "core/bytes.h"
#include "core/error.h"

namespace ringreduce::parameter_server {

std::shared_ptr<std::byte[]> pack_for_wire(Packing packing, const std::byte* values, std::size_t bytes) {
  auto packed = unwritten_bytes(wire_bytes(packing, bytes));
  for (std::size_t begin = 0; begin < bytes; begin += kFragment)
    pack(packing, packed.get() + wire_bytes(packing, begin), values + begin,
         std::min(kFragment, bytes - begin) / sizeof(float));
  return packed;
}

FrameHeader packed(FrameHeader header, Packing packing) {
  if (packing == Packing::none) return header;
  header.packing = packing;
  header.total = header.bytes;
  header.bytes = static_cast<std::uint32_t>(wire_bytes(packing, header.bytes));
  return header;
}

std::vector<std::pair<std::uint32_t, std::string>> Wire::take_lost() {
  const std::lock_guard lock(mutex_);
  return std::exchange(lost_, {});
}

void Wire::lost(int peer, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    lost_.emplace_back(static_cast<std::uint32_t>(peer), why);
  }
  bell_.ring();
}

void Wire::demand(bool holds, int peer, const char* what) {
  if (!holds) throw Error(ErrorKind::mismatch, std::string("it sent ") + what, peer);
}

bool Wire::is_farewell(int peer, const FrameHeader& header) {
  demand(header.magic == FrameHeader::kMagic, peer, "what does not begin like a frame");
  const bool leaves = header.kind == FrameHeader::kLeave;
  demand(!leaves || header.bytes == 0, peer, "a farewell with a payload");
  return leaves;
}

std::size_t Wire::values_in(int peer, const FrameHeader& header) {
  demand(header.bytes > 0 && header.bytes <= kFragment, peer, "values of a size that no frame has");
  if (header.packing == Packing::none) return header.bytes;
  demand(static_cast<std::uint32_t>(header.packing) < kPackings && header.total <= kFragment &&
             header.total % sizeof(float) == 0 && header.bytes == wire_bytes(header.packing, header.total),
         peer, "packed values of another size");
  return header.total;
}

// ---- The server's end ---------------------------------------------------------------------------------------------

void ServerWire::admit(WorkerId worker, std::shared_ptr<const void> keeper, std::byte* data, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  senders_[worker] = {std::move(keeper), data, bytes, {}, 0};
}

void ServerWire::drop(WorkerId worker) {
  decltype(senders_)::node_type dropped;  // keeps the memory until connections_.drop() has ended all stores to it
  {
    const std::lock_guard lock(mutex_);
    dropped = senders_.extract(worker);
  }
  connections_.drop(static_cast<int>(worker));
  const std::lock_guard lock(mutex_);
  std::erase_if(requests_, [&](const auto& each) { return each.first == worker; });
  std::erase_if(lost_, [&](const auto& each) { return each.first == worker; });
}

std::vector<std::pair<WorkerId, RequestSlot>> ServerWire::take_requests() {
  const std::lock_guard lock(mutex_);
  for (auto& [worker, sender] : senders_) sender.untaken = 0;
  return std::exchange(requests_, {});
}

std::byte* ServerWire::place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) {
  if (is_farewell(peer, header)) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = senders_.find(static_cast<WorkerId>(peer));
  demand(found != senders_.end(), peer, "a frame before it was known");
  Sender& sender = found->second;
  if (header.kind == WireKind::request) {
    demand(header.bytes == sizeof(RequestSlot), peer, "a request of another size");
    aside.resize(sizeof(RequestSlot));
    return aside.data();
  }
  demand(header.kind == WireKind::data, peer, "a frame of an unknown kind");
  const std::size_t bytes = values_in(peer, header);
  demand(header.seq <= sender.bytes && bytes <= sender.bytes - header.seq, peer, "data beyond its window");
  demand(sender.incoming.size() < kMostOutstanding || sender.incoming.count(header.tag) > 0, peer,
         "data of more requests than may be under way");
  if (header.packing == Packing::none) return sender.data + header.seq;
  aside.resize(header.bytes);
  return aside.data();
}

void ServerWire::deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) {
  if (header.kind == FrameHeader::kLeave) return;
  const std::lock_guard lock(mutex_);
  const auto worker = static_cast<WorkerId>(peer);
  const auto found = senders_.find(worker);
  if (found == senders_.end()) return;  // it is being dropped
  Sender& sender = found->second;
  if (header.kind == WireKind::request) {
    RequestSlot slot;
    std::memcpy(&slot, aside.data(), sizeof slot);
    if (slot.bytes == 0) return complete(worker, sender, slot);
    demand(sender.incoming.size() < kMostOutstanding || sender.incoming.count(header.tag) > 0, peer,
           "more requests than may be under way");
    Incoming& incoming = sender.incoming[header.tag];
    demand(!incoming.asked, peer, "two requests for the same data");
    incoming.asked = true;
    incoming.slot = slot;
  } else {
    const std::size_t bytes = values_in(peer, header);
    if (header.packing != Packing::none)
      unpack(header.packing, sender.data + header.seq, aside.data(), bytes / sizeof(float));
    sender.incoming[header.tag].bytes += bytes;
  }
  const Incoming& incoming = sender.incoming.at(header.tag);
  if (!incoming.asked || incoming.bytes < incoming.slot.bytes) return;
  const RequestSlot slot = incoming.slot;
  sender.incoming.erase(header.tag);
  complete(worker, sender, slot);
}

void ServerWire::complete(WorkerId worker, Sender& sender, const RequestSlot& slot) {
  demand(++sender.untaken <= 2 * kMostOutstanding, static_cast<int>(worker), "more requests than may be under way");
  requests_.emplace_back(worker, slot);
}

// ---- The worker's end ---------------------------------------------------------------------------------------------

WorkerWire::~WorkerWire() {
  std::vector<Number> expected;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [number, place] : places_) expected.push_back(number);
  }
  for (const auto& [server, number] : expected) forget(server, number);  // their tensors may be freed after this
  connections_.leave();
}

void WorkerWire::expect(std::uint32_t server, std::uint64_t number, std::byte* at, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  places_[{server, number}] = {at, bytes, bytes, bytes, {}};
}

void WorkerWire::forget(std::uint32_t server, std::uint64_t number) {
  std::byte* at = nullptr;
  std::size_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = places_.find({server, number});
    if (found == places_.end()) return;
    at = found->second.at;
    bytes = found->second.bytes;
    if (found->second.reply.number != 0) replies_.emplace_back(server, found->second.reply);
    places_.erase(found);
  }
  connections_.turn_away(static_cast<int>(server), at, bytes);
}

std::vector<std::pair<std::uint32_t, ReplySlot>> WorkerWire::take_replies() {
  const std::lock_guard lock(mutex_);
  return std::exchange(replies_, {});
}

void WorkerWire::lost(int peer, const std::string& why) {
  std::unique_lock lock(mutex_);
  const auto failure = failures_.extract(static_cast<std::uint32_t>(peer));
  lock.unlock();
  Wire::lost(peer, failure ? "it has failed: " + failure.mapped() : why);
}

std::byte* WorkerWire::place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) {
  if (is_farewell(peer, header)) return nullptr;
  const std::size_t bytes = values_in(peer, header);
  if (header.kind == WireKind::value) {
    const std::lock_guard lock(mutex_);
    const auto found = places_.find({static_cast<std::uint32_t>(peer), header.tag});
    if (found != places_.end()) {
      Place& place = found->second;
      demand(header.seq <= place.bytes && bytes <= place.bytes - header.seq && bytes <= place.unclaimed, peer,
             "more of a value than was asked for");
      place.unclaimed -= bytes;
      if (header.packing == Packing::none) return place.at + header.seq;
    }
  } else if (header.kind == WireKind::failure) {
    demand(bytes <= kMostFailure, peer, "a text that is too long");
  } else {
    demand(header.kind == WireKind::replies, peer, "a frame of an unknown kind");
    demand(header.bytes % sizeof(ReplySlot) == 0 && header.bytes <= kMostOutstanding * sizeof(ReplySlot), peer,
           "replies of another size");
  }
  aside.resize(header.bytes);  // replies, packed values, or the value of a pull that has been given up
  return aside.data();
}

void WorkerWire::deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) {
  const auto server = static_cast<std::uint32_t>(peer);
  const std::lock_guard lock(mutex_);
  if (header.kind == WireKind::value) {
    const auto found = places_.find({server, header.tag});
    if (found == places_.end()) return;
    Place& place = found->second;
    const std::size_t bytes = values_in(peer, header);
    if (header.packing != Packing::none) {
      demand(header.seq <= place.bytes && bytes <= place.bytes - header.seq, peer, "a value before it was asked for");
      unpack(header.packing, place.at + header.seq, aside.data(), bytes / sizeof(float));
    }
    place.missing -= bytes;
    if (place.missing > 0 || place.reply.number == 0) return;
    replies_.emplace_back(server, place.reply);
    places_.erase(found);
  } else if (header.kind == WireKind::failure) {
    failures_[server].assign(reinterpret_cast<const char*>(aside.data()), header.bytes);
  } else if (header.kind == WireKind::replies) {
    for (std::size_t i = 0; i < header.bytes / sizeof(ReplySlot); ++i) {
      ReplySlot slot;
      std::memcpy(&slot, aside.data() + i * sizeof slot, sizeof slot);
      const auto found = places_.find({server, slot.number});
      if (found != places_.end() && slot.outcome == Outcome::ready && found->second.missing > 0) {
        found->second.reply = slot;
        continue;
      }
      if (found != places_.end()) {
        demand(found->second.missing == found->second.unclaimed, peer, "a refusal while a value was under way");
        places_.erase(found);
      }
      replies_.emplace_back(server, slot);
    }
  }
}

}  // namespace ringreduce::parameter_server
