#include "transport/links.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringreduce {
namespace {

constexpr Nanoseconds kTellEvery = 100 * kMillisecond;
constexpr Nanoseconds kCourtesy = 50 * kMillisecond;
constexpr Nanoseconds kLook = 20 * kMillisecond;

Frame frame_of(std::uint32_t kind, std::span<const std::byte> image, std::span<const std::byte> text = {}) {
  const std::size_t bytes = image.size() + text.size();
  Frame frame{.header = {.kind = kind, .bytes = static_cast<std::uint32_t>(bytes)},
              .own = std::make_shared_for_overwrite<std::byte[]>(bytes)};
  std::copy(text.begin(), text.end(), std::copy(image.begin(), image.end(), frame.own.get()));
  frame.data = frame.own.get();
  return frame;
}

}  // namespace

Links::Links(const Segment& segment, Connect connect)
    : segment_(segment),
      connect_(std::move(connect)),
      lost_(static_cast<std::size_t>(segment.size())),
      told_error_(static_cast<std::size_t>(segment.size())),
      connections_(*this) {}

void Links::reach(std::span<const int> peers, Nanoseconds timeout) {
  const Nanoseconds deadline = now() + timeout;
  for (const int peer : peers) {
    // Both ends may need it now: the higher rank leaves it to the lower for a moment.
    if (peer < segment_.rank()) connections_.wait_for(peer, kCourtesy);
    if (!connections_.reaches(peer)) connect_(peer, deadline - now());
  }
  for (const int peer : peers)
    while (!connections_.wait_for(peer, kLook)) {
      segment_.throw_if_aborted();
      if (now() >= deadline)
        throw Error(ErrorKind::timeout,
                    segment_.describe(peer) + " did not connect to rank " + std::to_string(segment_.rank()) +
                        " within " + in_seconds(timeout),
                    peer);
    }
}

void Links::slot_filled(int peer, int channel, std::uint64_t seq, const SlotValue& value) {
  const SlotHeader& slot = segment_.slot(segment_.rank(), channel, seq);
  const bool packed = value.packed != nullptr;
  connections_.send(peer, {.header = {.kind = FrameKind::slot,
                                      .bytes = static_cast<std::uint32_t>(packed ? value.packed_bytes : slot.bytes),
                                      .channel = static_cast<std::uint32_t>(channel),
                                      .seq = seq,
                                      .tag = slot.fingerprint,
                                      .total = slot.bytes,
                                      .packing = packed ? value.packing : Packing::none},
                           .data = packed ? value.packed.get() : value.data,
                           .own = value.packed,
                           .lent = value.lent && !packed});
}

void Links::message_filled(int peer, std::uint64_t seq) {
  MessageHeader& slot = segment_.message(segment_.rank(), peer, seq);
  connections_.send(peer, {.header = {.kind = FrameKind::message,
                                      .bytes = slot.bytes,
                                      .seq = seq,
                                      .tag = slot.tag,
                                      .total = slot.message_bytes,
                                      .dtype = slot.dtype},
                           .data = slot.payload()});
}

void Links::slot_read(int peer, int channel, std::uint64_t seq) {
  connections_.hold(peer, {.kind = FrameKind::slot_read, .channel = static_cast<std::uint32_t>(channel), .seq = seq},
                    std::max<std::size_t>(1, segment_.geometry().depth / 4));
}

void Links::message_read(int peer, std::uint64_t seq) {
  connections_.send(peer, {.header = {.kind = FrameKind::message_read, .seq = seq}}, Connections::When::first);
}

void Links::tell(bool at_once) {
  std::lock_guard lock(telling_);
  const Nanoseconds t = now();
  if (!at_once && t < next_tell_) return;
  next_tell_ = t + kTellEvery;
  const ControlImage image = image_of(segment_.control(segment_.rank()));
  const AbortRecord& record = segment_.abort_record();
  const bool aborted = record.state.load(std::memory_order_acquire) == 2;
  for (int peer = 0; peer < segment_.size(); ++peer) {
    if (!connections_.reaches(peer)) continue;
    connections_.send(peer, frame_of(FrameKind::control, std::as_bytes(std::span(&image, 1))),
                      Connections::When::latest);
    if (!aborted || told_error_[static_cast<std::size_t>(peer)]) continue;
    told_error_[static_cast<std::size_t>(peer)] = true;
    const ErrorImage error{.kind = record.kind, .culprit = record.culprit, .reporter = record.reporter};
    const std::span text(record.message, strnlen(record.message, sizeof record.message - 1));
    connections_.send(peer, frame_of(FrameKind::error, std::as_bytes(std::span(&error, 1)), std::as_bytes(text)),
                      Connections::When::first);
  }
}

// A slot may be filled when what it held has been given back, and given back when it has been filled.
std::byte* Links::place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) {
  const int own = segment_.rank(), channel = static_cast<int>(header.channel);
  const auto demand = [&](bool holds, const std::string& what) {
    if (!holds) throw Error(ErrorKind::mismatch, "it sent " + what, peer);
  };
  const auto put_aside = [&] {
    aside.resize(header.bytes);
    return aside.data();
  };
  const std::string wrong = objection(header, segment_.geometry());
  demand(wrong.empty(), "a frame that is none: " + wrong);
  switch (header.kind) {
    case FrameKind::slot: {
      SlotHeader& slot = segment_.slot(peer, channel, header.seq);
      const std::uint64_t held = slot.stamp.load(std::memory_order_relaxed);
      demand(header.seq + 1 > held &&
                 (held == 0 || segment_.acknowledgement(own, peer, channel, header.seq).load() >= held),
             "a slot that had not been given back");
      return header.packing == Packing::none ? slot.payload() : put_aside();
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
      return put_aside();
    default:
      return nullptr;
  }
}

void Links::deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) {
  const int own = segment_.rank(), channel = static_cast<int>(header.channel);
  switch (header.kind) {
    case FrameKind::slot: {
      SlotHeader& slot = segment_.slot(peer, channel, header.seq);
      if (header.packing != Packing::none)
        unpack(header.packing, slot.payload(), aside.data(), header.total / sizeof(float));
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
      std::memcpy(&image, aside.data(), sizeof image);
      store(image, segment_.control(peer));
      break;
    }
    case FrameKind::error:
      deliver_error(aside);
      break;
  }
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

void Links::left(int peer) { segment_.control(peer).state.store(RankState::left, std::memory_order_seq_cst); }

void Links::lost(int peer) {
  lost_[static_cast<std::size_t>(peer)] = true;
  moved();
}

void Links::moved() { segment_.wake(segment_.rank()); }  // the other threads of this rank

void Links::attend(bool woken) {
  if (woken) return tell(true);
  try {
    // It may be that no rank waits that could notice the death of this one's peer.
    segment_.throw_if_over(0);
  } catch (const Error&) {
    tell();  // it may be the error of another rank of this host, whose peers need not be this one's
  }
}

std::vector<int> Links::lost() const {
  std::vector<int> result;
  for (int peer = 0; peer < segment_.size(); ++peer)
    if (lost_[static_cast<std::size_t>(peer)]) result.push_back(peer);
  return result;
}

void Links::leave() {
  tell(true);  // which calls this rank has completed
  connections_.leave();
}

}  // namespace ringreduce
