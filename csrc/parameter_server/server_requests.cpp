// Incoming requests of a server, from lanes and from other hosts. They are checked before the shard gets them.
#include <memory>

#include "parameter_server/server-inl.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {

bool Server::take_requests() {
  bool moved = false;
  for (auto& [worker, connection] : connections_)
    for (std::uint64_t most = kMostOutstanding; most > 0 && connection.alive && take_request(connection); --most)
      moved = true;
  return moved;
}

bool Server::take_request(Connection& connection) {
  if (connection.lane == nullptr || !may_take()) return false;
  if (!connection.attached && !(connection.attached = connection.lane->turn.load(std::memory_order_acquire) == turn_))
    return false;
  if (connection.lane->asked.load(std::memory_order_acquire) == connection.taken) return false;
  take(connection, RequestSlot(connection.lane->requests[connection.taken++ % kMostOutstanding]));
  return true;
}

// Takes the requests that have arrived from other hosts, and sends what can be sent to them.
bool Server::take_frames() {
  bool moved = wire_->connections().progress();
  if (!serves_) {  // a backup: requests wait until it has taken over
    for (const auto& [worker, why] : wire_->take_lost())
      if (const auto found = connections_.find(worker); found != connections_.end()) found->second.gone = true;
    return moved;
  }
  if (holds_back() || !may_take()) return moved;
  for (const auto& [worker, slot] : wire_->take_requests()) {
    const auto found = connections_.find(worker);
    if (found != connections_.end() && found->second.alive) take(found->second, slot);
    moved = true;
  }
  for (const auto& [worker, why] : wire_->take_lost()) {
    const auto found = connections_.find(worker);
    if (found != connections_.end() && found->second.alive) end(found->second);
    moved = true;
  }
  for (auto& [worker, connection] : connections_)
    if (connection.lane == nullptr) send_to(connection);
  return moved;
}

void Server::take(Connection& connection, const RequestSlot& slot) {
  if (slot.kind == RequestKind::pull) keep_pull(connection, slot);
  if (turn_ > 0 && connection.lane == nullptr && connection.asked.size() < 2 * kMostOutstanding)
    connection.asked.insert(slot.number);
  pass(Step::taken);
  decide(request_of(connection.spec.id, slot, payload_of(connection, slot)));
}

Request Server::request_of(WorkerId worker, const RequestSlot& slot, std::shared_ptr<const Payload> payload) {
  Request request;
  request.kind = slot.kind;
  request.worker = worker;
  request.number = slot.number;
  request.seen = slot.seen;
  request.block = slot.block;
  request.priority = slot.priority;
  request.round = slot.round;
  request.pulled = slot.pulled;
  request.weight = slot.weight;
  if (slot.kind == RequestKind::initialise || slot.kind == RequestKind::push || slot.kind == RequestKind::restore) {
    const bool is_dense = blocks_.have(slot.block) && !blocks_[slot.block].is_table();
    const bool has_none = slot.kind == RequestKind::push && slot.bytes == 0 && is_dense;
    if (!has_none) request.payload = std::move(payload);
    if (request.payload == nullptr && !has_none)
      request.block = UINT32_MAX;  // no such block: the shard refuses the request
    else
      statistics_.bytes += slot.bytes;
  }
  ++statistics_.requests;
  return request;
}

// Returns the data of a request; nullptr if it has none or describes it wrongly.
std::shared_ptr<const Payload> Server::payload_of(const Connection& connection, const RequestSlot& slot) const {
  const bool pushes =
      slot.kind == RequestKind::initialise || slot.kind == RequestKind::push || slot.kind == RequestKind::restore;
  const auto& window = connection.window;
  const std::size_t room = window->memory.bytes() - window->data_begin;
  if (!pushes || !blocks_.have(slot.block) || slot.bytes > room || slot.offset > room - slot.bytes) return nullptr;
  if (!blocks_[slot.block].fits(slot)) return nullptr;
  return std::make_shared<Lent>(window, window->data_begin + slot.offset, static_cast<std::size_t>(slot.bytes));
}

// Remembers a pull whose reply brings values. A pull with invalid fields is answered without a value.
void Server::keep_pull(Connection& connection, const RequestSlot& slot) {
  if (!blocks_.have(slot.block) || connection.pulls.size() >= kMostOutstanding) return;
  Pull pull{slot.block};
  const Block& block = blocks_[slot.block];
  if (block.is_table()) {
    const std::size_t room = connection.window->memory.bytes() - connection.window->data_begin;
    if (slot.offset > room || slot.offset % sizeof(std::int64_t) != 0 || slot.bytes % sizeof(std::int64_t) != 0) return;
    pull.count = slot.bytes / sizeof(std::int64_t);
    if (pull.count > (room - slot.offset) / (sizeof(std::int64_t) + block.value_bytes(1))) return;
    pull.offset = connection.window->data_begin + slot.offset;
  } else if (connection.lane != nullptr) {
    return;  // a worker on this host reads the value itself
  } else if (slot.packing != Packing::none) {
    if (static_cast<std::uint32_t>(slot.packing) >= kPackings) return;
    if (block.spec.dtype != DType::float32) return;
    pull.packing = slot.packing;
  }
  connection.pulls.emplace(slot.number, pull);
}

void Server::end(Connection& connection) {
  // Takes the requests that it had written before it ended.
  for (std::uint64_t most = kMostOutstanding; most > 0 && take_request(connection); --most) {
  }
  connection.alive = false;
  decide(Lose{connection.spec.id});
}

}  // namespace ringreduce::parameter_server
