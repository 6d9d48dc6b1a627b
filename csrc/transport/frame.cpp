#include "transport/frame.h"

namespace ringreduce {
namespace {

constexpr Nanoseconds kLately = kSecond / 2;

std::string beyond(const char* field, std::uint64_t value, std::uint64_t most) {
  return value <= most ? ""
                       : std::string(field) + " is " + std::to_string(value) + ", the most is " + std::to_string(most);
}

std::string objection_to_slot(const FrameHeader& header, const Geometry& geometry) {
  const auto packing = static_cast<std::uint32_t>(header.packing);
  if (packing >= kPackings) return beyond("packing", packing, kPackings - 1);
  if (header.total > geometry.slot_bytes) return beyond("bytes of a slot's value", header.total, geometry.slot_bytes);
  if (header.packing != Packing::none && header.total % sizeof(float) != 0)
    return "bytes of a packed value are " + std::to_string(header.total) + ", no multiple of 4";
  const std::size_t bytes =
      header.packing == Packing::none ? header.total : packed_bytes(header.packing, header.total / sizeof(float));
  return header.bytes == bytes
             ? ""
             : "bytes of a slot are " + std::to_string(header.bytes) + " where its value has " + std::to_string(bytes);
}

}  // namespace

std::string objection(const FrameHeader& header, const Geometry& geometry) {
  if (header.magic != FrameHeader::kMagic) return "it does not begin like a frame";
  if (header.channel >= geometry.channels) return beyond("channel", header.channel, geometry.channels - 1);
  // Sequence numbers become stamps by adding 1, and are compared with stamps of `depth` before and after them.
  if (header.seq >= std::uint64_t{1} << 62) return beyond("seq", header.seq, (std::uint64_t{1} << 62) - 1);
  switch (header.kind) {
    case FrameKind::slot:
      return objection_to_slot(header, geometry);
    case FrameKind::message:
      return beyond("bytes of a message's part", header.bytes, geometry.mailbox_slot_bytes);
    case FrameKind::slot_read:
    case FrameKind::message_read:
    case FrameKind::leave:
      return beyond("bytes of a frame without a payload", header.bytes, 0);
    case FrameKind::control:
      return header.bytes == sizeof(ControlImage) ? ""
                                                  : "a control block has " + std::to_string(header.bytes) + " bytes";
    case FrameKind::error:
      if (header.bytes < sizeof(ErrorImage)) return "an error has " + std::to_string(header.bytes) + " bytes";
      return beyond("bytes of an error", header.bytes, sizeof(ErrorImage) + kErrorText);
  }
  return "its kind, " + std::to_string(header.kind) + ", is unknown";
}

ControlImage image_of(const RankControl& control) {
  constexpr auto acquire = std::memory_order_acquire;
  const Nanoseconds t = now();
  ControlImage image;
  image.completed = control.completed.load(acquire);
  image.entered = control.entered.load(acquire);
  image.barriers_entered = control.barriers_entered.load(acquire);
  image.barriers_given_up = control.barriers_given_up.load(acquire);
  image.waits = t - control.heartbeat.load(acquire) < kLately;
  image.waiting_for = control.waiting_for.load(acquire);
  image.gpu_waits = t - control.gpu_heartbeat.load(acquire) < kLately;
  image.gpu_waiting_for = control.gpu_waiting_for.load(acquire);
  for (std::size_t i = 0; i < CallHistory::kKept && i < image.entered; ++i)
    image.calls[i] = control.calls.find(image.entered - i).value_or(CallHeader{});
  return image;
}

void store(const ControlImage& image, RankControl& mirror) {
  constexpr auto release = std::memory_order_release;
  // Over several connections an older image may come after a newer one: what only grows must not shrink.
  const auto grow = [](std::atomic<std::uint64_t>& word, std::uint64_t value) {
    if (word.load(std::memory_order_relaxed) < value) word.store(value, std::memory_order_seq_cst);
  };
  for (const CallHeader& call : image.calls) mirror.calls.add(call);
  const Nanoseconds t = now();
  mirror.waiting_for.store(image.waiting_for, release);
  mirror.gpu_waiting_for.store(image.gpu_waiting_for, release);
  if (image.waits != 0) mirror.heartbeat.store(t, release);
  if (image.gpu_waits != 0) mirror.gpu_heartbeat.store(t, release);
  grow(mirror.entered, image.entered);
  grow(mirror.completed, image.completed);
  grow(mirror.barriers_given_up, image.barriers_given_up);
  grow(mirror.barriers_entered, image.barriers_entered);
}

}  // namespace ringreduce
