// Incoming requests of a server, from lanes and from other hosts. They are checked before the shard gets them.
#include <memory>

#include "parameter_server/server-inl.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {

bool Server::take_requests() {
  bool moved = false;
  for (const auto& [worker, port] : ports_)
    for (std::uint64_t most = kMostOutstanding; most > 0 && port->alive && take_request(*port); --most) moved = true;
  return moved;
}

bool Server::take_request(Port& port) {
  RequestSlot slot;
  if (!may_take() || !port.next(slot, turn_)) return false;
  take(port, slot);
  return true;
}

// Takes the requests that have arrived from other hosts, and sends what can be sent to them.
bool Server::take_frames() {
  bool moved = wire_->connections().progress();
  if (!serves_) {  // a backup: requests wait until it has taken over
    for (const auto& [worker, why] : wire_->take_lost())
      if (Port* const port = find(ports_, worker)) port->gone = true;
    return moved;
  }
  if (holds_back() || !may_take()) return moved;
  for (const auto& [worker, slot] : wire_->take_requests()) {
    if (Port* const port = find(ports_, worker); port != nullptr && port->alive) take(*port, slot);
    moved = true;
  }
  for (const auto& [worker, why] : wire_->take_lost()) {
    if (Port* const port = find(ports_, worker); port != nullptr && port->alive) end(*port);
    moved = true;
  }
  send_replies();
  return moved;
}

void Server::take(Port& port, const RequestSlot& slot) {
  port.expect(slot, blocks_, turn_);
  pass(Step::taken);
  decide(request_of(port.spec.id, slot, port.payload_of(slot, blocks_)));
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

void Server::end(Port& port) {
  // Takes the requests that it had written before it ended.
  for (std::uint64_t most = kMostOutstanding; most > 0 && take_request(port); --most) {
  }
  port.alive = false;
  decide(Lose{port.spec.id});
}

}  // namespace ringreduce::parameter_server
