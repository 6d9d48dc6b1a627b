#include "parameter_server/server/port.h"

#include <algorithm>

#include "core/bytes.h"
#include "core/error.h"

namespace ringreduce::parameter_server {
namespace {

constexpr std::size_t kCopies = 8 * 1024 * 1024;  // most bytes of values on their way to one worker

}  // namespace

void visit(Archive& archive, WorkerSpec& spec) {
  archive(spec.id, spec.group, spec.window_bytes, spec.servers, spec.lane, spec.name);
}

std::shared_ptr<const Payload> Port::payload_of(const RequestSlot& slot, const Blocks& blocks) const {
  const bool pushes =
      slot.kind == RequestKind::initialise || slot.kind == RequestKind::push || slot.kind == RequestKind::restore;
  const std::size_t room = window->memory.bytes() - window->data_begin;
  if (!pushes || !blocks.have(slot.block) || slot.bytes > room || slot.offset > room - slot.bytes) return nullptr;
  if (!blocks[slot.block].fits(slot)) return nullptr;
  return std::make_shared<Lent>(window, window->data_begin + slot.offset, static_cast<std::size_t>(slot.bytes));
}

void Port::expect(const RequestSlot& slot, const Blocks& blocks, std::uint32_t) {
  if (slot.kind != RequestKind::pull || pulls_.size() >= kMostOutstanding) return;
  if (const auto pull = pull_of(slot, blocks)) pulls_.emplace(slot.number, *pull);
}

std::optional<Port::Pull> Port::pull_of(const RequestSlot& slot, const Blocks& blocks) const {
  if (!blocks.have(slot.block)) return std::nullopt;
  Pull pull{slot.block};
  const Block& block = blocks[slot.block];
  if (block.is_table()) {
    const std::size_t room = window->memory.bytes() - window->data_begin;
    if (slot.offset > room || slot.offset % sizeof(std::int64_t) != 0 || slot.bytes % sizeof(std::int64_t) != 0)
      return std::nullopt;
    pull.count = slot.bytes / sizeof(std::int64_t);
    if (pull.count > (room - slot.offset) / (sizeof(std::int64_t) + block.value_bytes(1))) return std::nullopt;
    pull.offset = window->data_begin + slot.offset;
  } else if (!far()) {
    return std::nullopt;  // the worker reads the value itself
  } else if (slot.packing != Packing::none) {
    if (static_cast<std::uint32_t>(slot.packing) >= kPackings) return std::nullopt;
    if (block.spec.dtype != DType::float32) return std::nullopt;
    pull.packing = slot.packing;
  }
  return pull;
}

bool Port::prepare(const ReplySlot& slot, const Blocks& blocks, std::uint32_t turn) {
  const auto pull = pulls_.extract(slot.number);
  if (!listens(slot.number, turn)) return false;
  answered_ = true;
  if (pull.empty() || slot.outcome != Outcome::ready) return true;
  const auto& [block, offset, rows, packing] = pull.mapped();
  if (blocks[block].is_table()) {  // copied now, before later updates change the rows
    std::byte* const ids = window->memory.at(offset);
    blocks[block].read(ids, rows, ids + rows * sizeof(std::int64_t));
  }
  return !defers(pull.mapped(), slot);
}

void Port::tell(News news, std::span<const int> given) {
  if (const int socket = descriptors()[2]; socket >= 0) {
    news.lane = static_cast<std::uint32_t>(spec.lane);
    untold = !send_message(socket, &news, sizeof news, given);
  }
}

// ---- On this host -------------------------------------------------------------------------------------------------

std::shared_ptr<Window> NearPort::window_of(WorkerSpec& spec) {
  return std::make_shared<Window>(std::move(spec.window), spec.window_bytes, spec.servers);
}

NearPort::NearPort(std::shared_ptr<Window> its_window, WorkerSpec&& its) : Port(std::move(its), std::move(its_window)) {
  if (spec.lane >= spec.servers || spec.servers > 65536 || spec.window_bytes < lanes_bytes(spec.servers))
    throw Error(ErrorKind::invalid_argument, "a window of " + std::to_string(spec.window_bytes) +
                                                 " bytes has no lane " + std::to_string(spec.lane) + " of " +
                                                 std::to_string(spec.servers));
  lane_ = &window->lane(spec.lane);
}

bool NearPort::next(RequestSlot& slot, std::uint32_t turn) {
  if (!attached_ && !(attached_ = lane_->turn.load(std::memory_order_acquire) == turn)) return false;
  if (lane_->asked.load(std::memory_order_acquire) == taken_) return false;
  slot = lane_->requests[taken_++ % kMostOutstanding];
  return true;
}

void NearPort::put(const ReplySlot& slot) {
  answered_ = true;
  const std::uint64_t index = lane_->answered.load(std::memory_order_relaxed);
  lane_->replies[index % kMostOutstanding] = slot;
  lane_->answered.store(index + 1, std::memory_order_release);
}

bool NearPort::send(const Blocks&) {
  if (std::exchange(answered_, false)) window->bell().ring();
  return true;
}

// ---- On another host ----------------------------------------------------------------------------------------------

FarPort::FarPort(WorkerSpec its, std::shared_ptr<Window> its_window, ServerWire& wire)
    : Port(std::move(its), std::move(its_window)), wire_(wire) {
  wire.admit(spec.id, window, window->memory.at(window->data_begin), window->memory.bytes() - window->data_begin);
}

FarPort::~FarPort() {
  if (!fork_.forked()) wire_.drop(spec.id);
}

void FarPort::expect(const RequestSlot& slot, const Blocks& blocks, std::uint32_t turn) {
  Port::expect(slot, blocks, turn);
  if (turn > 0 && asked_.size() < 2 * kMostOutstanding) asked_.insert(slot.number);
}

bool FarPort::defers(const Pull& pull, const ReplySlot& slot) {
  values_.emplace_back(pull, slot);
  return true;
}

// Sends all waiting replies, and values up to the limit of kCopies. A slow connection would delay the second update
// after a value was asked for, which overwrites the buffer, so a value is sent from a copy.
bool FarPort::send(const Blocks& blocks) {
  std::size_t under_way = 0;
  std::erase_if(copies_, [&](const auto& copy) {
    under_way += copy.first.expired() ? 0 : copy.second;
    return copy.first.expired();
  });
  while (!values_.empty() && alive) {
    auto [pull, reply] = values_.front();
    const std::size_t bytes = blocks[pull.block].value_bytes(pull.count), sent = wire_bytes(pull.packing, bytes);
    if (under_way > 0 && under_way + sent > kCopies) break;
    values_.pop_front();
    under_way += sent;
    const auto value = value_for(pull, reply, blocks);
    copies_.emplace_back(value, sent);
    for (std::size_t begin = 0; begin < bytes; begin += kFragment) {
      const std::size_t some = std::min(kFragment, bytes - begin);
      const FrameHeader header = packed(
          {.kind = WireKind::value, .bytes = static_cast<std::uint32_t>(some), .seq = begin, .tag = reply.number},
          pull.packing);
      wire_.connections().send(static_cast<int>(spec.id),
                               {header, value.get() + wire_bytes(pull.packing, begin), value});
    }
    replies_.push_back(reply);
  }
  for (std::size_t begin = 0; begin < replies_.size(); begin += kMostOutstanding) {
    const std::size_t count = std::min<std::size_t>(kMostOutstanding, replies_.size() - begin);
    Frame frame = frame_of(WireKind::replies, std::as_bytes(std::span(replies_).subspan(begin, count)));
    copies_.emplace_back(frame.own, 0);
    wire_.connections().send(static_cast<int>(spec.id), std::move(frame));
  }
  replies_.clear();
  // A worker that keeps to kMostOutstanding never has more than this.
  return !alive || std::max(copies_.size(), values_.size()) <= 2 * kMostOutstanding;
}

// Returns the value to send: a copy of a block as it is now, or the rows in this server's copy of the worker's window.
std::shared_ptr<std::byte[]> FarPort::value_for(const Pull& pull, ReplySlot& reply, const Blocks& blocks) const {
  Block& block = blocks[pull.block];
  if (block.is_table())
    return {window->memory.at(pull.offset + pull.count * sizeof(std::int64_t)), [its = window](const std::byte*) {}};
  const std::size_t bytes = block.value_bytes(0);
  auto copy = unwritten_bytes(bytes);
  reply.version = block.read(nullptr, 0, copy.get());
  return pull.packing == Packing::none ? copy : pack_for_wire(pull.packing, copy.get(), bytes);
}

}  // namespace ringreduce::parameter_server
