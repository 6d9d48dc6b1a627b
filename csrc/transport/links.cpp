#include "transport/links.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/interrupt.h"

namespace ringreduce {
namespace {

constexpr Nanoseconds kTellEvery = 100 * kMillisecond;
constexpr Nanoseconds kCourtesy = 50 * kMillisecond;
constexpr Nanoseconds kLook = 20 * kMillisecond;

}  // namespace

Links::Links(int rank, const Layout& layout, Region own, Fate& fate, Connect connect)
    : rank_(rank),
      layout_(layout),
      own_(own),
      fate_(fate),
      connect_(std::move(connect)),
      mirrors_(layout.ranks),
      told_error_(layout.ranks),
      connections_(*this) {}

void Links::admit(int peer, Region mirror) {
  mirrors_[static_cast<std::size_t>(peer)] = mirror;
  alone_ = std::ranges::count_if(mirrors_, [](const Region& its) { return bool(its); }) + 1 == std::ssize(mirrors_);
}

void Links::reach(std::span<const int> peers, Nanoseconds timeout) {
  Nanoseconds deadline = now() + timeout;
  Standstill standstill;
  for (const int peer : peers) {
    // Both ends may need it now: the higher rank leaves it to the lower for a moment.
    if (peer < rank_) connections_.wait_for(peer, kCourtesy);
    if (!connections_.reaches(peer)) connect_(peer, deadline - now());
  }
  for (const int peer : peers)
    while (!connections_.wait_for(peer, kLook)) {
      const Nanoseconds t = now();
      if (ctrl_c_came()) fate_.interrupt("reaching " + fate_.describe(peer));
      fate_.throw_if_aborted();
      deadline += standstill.before(t);
      if (t >= deadline)
        throw Error(
            ErrorKind::timeout,
            fate_.describe(peer) + " did not connect to " + fate_.number(rank_) + " within " + in_seconds(timeout),
            peer);
    }
}

void Links::slot_filled(int peer, int channel, std::uint64_t seq, const SlotValue& value) {
  const SlotHeader& slot = own_.slot(channel, seq);
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
  // Before the message, since the receiver compares the calls that both ranks have made.
  if (own_.control().entered.load(std::memory_order_acquire) != told_calls_) tell(true);
  MessageHeader& slot = own_.message(peer, seq);
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
                    std::max<std::size_t>(1, layout_.depth / 4));
}

void Links::message_read(int peer, std::uint64_t seq) {
  connections_.send(peer, {.header = {.kind = FrameKind::message_read, .seq = seq}}, Connections::When::first);
}

void Links::tell(bool at_once) {
  std::lock_guard lock(telling_);
  const Nanoseconds t = now();
  if (!at_once && t < next_tell_) return;
  next_tell_ = t + kTellEvery;
  const ControlImage image = image_of(own_.control());
  told_calls_ = image.entered;
  const AbortRecord* const record = fate_.error();
  for (int peer = 0; peer < static_cast<int>(layout_.ranks); ++peer) {
    if (!connections_.reaches(peer)) continue;
    connections_.send(peer, frame_of(FrameKind::control, bytes_of(image)), Connections::When::latest);
    if (record == nullptr || told_error_[static_cast<std::size_t>(peer)]) continue;
    const ErrorImage error{.kind = record->kind, .culprit = record->culprit, .reporter = record->reporter};
    const std::span text(record->message, strnlen(record->message, kErrorText));
    connections_.send(peer, frame_of(FrameKind::error, bytes_of(error), std::as_bytes(text)), Connections::When::first);
    told_error_[static_cast<std::size_t>(peer)] = true;
  }
}

// A slot may be filled when what it held has been given back, and given back when it has been filled.
std::byte* Links::place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) {
  const int channel = static_cast<int>(header.channel);
  const Region& theirs = mirror(peer);
  const auto demand = [&](bool holds, const std::string& what) {
    if (!holds) throw Error(ErrorKind::mismatch, "it sent " + what, peer);
  };
  const auto put_aside = [&] {
    aside.resize(header.bytes);
    return aside.data();
  };
  demand(bool(theirs), "a frame, though it is on this host");
  const std::string wrong = objection(header, layout_);
  demand(wrong.empty(), "a frame that is none: " + wrong);
  switch (header.kind) {
    case FrameKind::slot: {
      SlotHeader& slot = theirs.slot(channel, header.seq);
      const std::uint64_t held = slot.stamp.load(std::memory_order_relaxed);
      demand(header.seq + 1 > held && (held == 0 || own_.acknowledgement(peer, channel, header.seq).load() >= held),
             "a slot that had not been given back");
      return header.packing == Packing::none ? slot.payload() : put_aside();
    }
    case FrameKind::message: {
      MessageHeader& slot = theirs.message(rank_, header.seq);
      const std::uint64_t held = slot.stamp.load(std::memory_order_relaxed);
      demand(header.seq + 1 > held && slot.consumed.load() >= held, "a part of a message before there was room");
      return slot.payload();
    }
    case FrameKind::slot_read:
      demand(own_.slot(channel, header.seq).stamp.load() == header.seq + 1, "back a slot that it did not have");
      return nullptr;
    case FrameKind::message_read:
      demand(own_.message(peer, header.seq).stamp.load() == header.seq + 1, "back what it did not have");
      return nullptr;
    case FrameKind::control:
    case FrameKind::error:
      return put_aside();
    default:
      return nullptr;
  }
}

void Links::deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) {
  const int channel = static_cast<int>(header.channel);
  const Region& theirs = mirror(peer);
  switch (header.kind) {
    case FrameKind::slot: {
      SlotHeader& slot = theirs.slot(channel, header.seq);
      if (header.packing != Packing::none)
        unpack(header.packing, slot.payload(), aside.data(), header.total / sizeof(float));
      slot.fingerprint = header.tag;
      slot.bytes = header.total;
      slot.place = Place::slot;
      slot.address = 0;
      slot.returned = 0;
      slot.stamp.store(header.seq + 1, std::memory_order_seq_cst);  // releases the payload
      break;
    }
    case FrameKind::message: {
      MessageHeader& slot = theirs.message(rank_, header.seq);
      slot.message_bytes = header.total;
      slot.bytes = header.bytes;
      slot.dtype = header.dtype;
      slot.tag = header.tag;
      slot.stamp.store(header.seq + 1, std::memory_order_seq_cst);
      break;
    }
    case FrameKind::slot_read:
      theirs.acknowledgement(rank_, channel, header.seq).store(header.seq + 1, std::memory_order_seq_cst);
      break;
    case FrameKind::message_read:
      own_.message(peer, header.seq).consumed.store(header.seq + 1, std::memory_order_seq_cst);
      break;
    case FrameKind::control: {
      ControlImage image;
      std::memcpy(&image, aside.data(), sizeof image);
      store(image, theirs.control());
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
  const auto rank_or_none = [&](std::int32_t rank) {
    return rank >= 0 && rank < static_cast<int>(layout_.ranks) ? rank : -1;
  };
  fate_.abort(Error(known ? static_cast<ErrorKind>(image.kind) : ErrorKind::system,
                    std::string(reinterpret_cast<const char*>(text.data()), text.size()), rank_or_none(image.culprit)),
              rank_or_none(image.reporter));
}

void Links::left(int peer) { mirror(peer).control().state.store(RankState::left, std::memory_order_seq_cst); }

void Links::lost(int peer, const std::string& why) {
  fate_.lost(peer, why);
  moved();
}

void Links::failed(const std::bad_alloc& error) {
  fate_.abort(Error(ErrorKind::system, fate_.number(rank_) + ": links to other hosts: " + reason(error), rank_));
}

void Links::moved() { own_.control().wake(); }  // the other threads of this rank

void Links::attend(bool woken) {
  if (woken) return tell(true);
  try {
    // It may be that no rank waits that could notice the death of this one's peer.
    fate_.throw_if_over(0);
  } catch (const Error&) {
    tell();  // it may be the error of another rank of this host, whose peers need not be this one's
  }
}

void Links::leave() {
  try {
    tell(true);  // which calls this rank has completed
  } catch (const std::bad_alloc& error) {
    failed(error);
  }
  connections_.leave();
}

}  // namespace ringreduce
