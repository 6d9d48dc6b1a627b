// Incoming requests of a server, from lanes and from other hosts. They are checked before the shard gets them.

#include <unistd.h>

#include "parameter_server/server/server.h"

namespace ringreduce::parameter_server {

bool Server::take_requests() {
  bool moved = false;
  for (const auto& [worker, port] : replica_.ports)
    for (std::uint64_t most = kMostOutstanding; most > 0 && port->alive && take_request(*port); --most) moved = true;
  return moved;
}

bool Server::take_request(Port& port) {
  RequestSlot slot;
  if (!may_take() || !port.next(slot, replica_.turn)) return false;
  take(port, slot);
  return true;
}

// Takes the requests that have arrived from other hosts, and sends what can be sent to them.
bool Server::take_frames() {
  bool moved = wire_->connections().progress();
  if (wire_->has_run_out())
    hooks_.warn("a server in process " + std::to_string(getpid()) +
                " may have given up a worker of another host: " + reason(std::bad_alloc()));
  if (!in_charge()) {  // a backup: requests wait until it has taken over
    for (const auto& [worker, why] : wire_->take_lost())
      if (Port* const port = find(replica_.ports, worker)) port->gone = true;
    return moved;
  }
  if (!holds_back() && may_take()) {
    for (const auto& [worker, slot] : wire_->take_requests()) {
      if (Port* const port = find(replica_.ports, worker); port != nullptr && port->alive) take(*port, slot);
      moved = true;
    }
    for (const auto& [worker, why] : wire_->take_lost()) {
      if (Port* const port = find(replica_.ports, worker); port != nullptr && port->alive) end(*port);
      moved = true;
    }
  }
  // While the backup is out of reach it may serve in this one's place, so nothing is shown.
  if (leader_ == nullptr || !leader_->backup->silent()) send_replies();
  return moved;
}

void Server::take(Port& port, const RequestSlot& slot) {
  port.expect(slot, replica_.blocks, replica_.turn);
  replica_.pass(Step::taken);
  decide(replica_.request_of(port.spec.id, slot, port.payload_of(slot, replica_.blocks)));
}

void Server::end(Port& port) {
  // Takes the requests that it had written before it ended.
  for (std::uint64_t most = kMostOutstanding; most > 0 && take_request(port); --most) {
  }
  port.alive = false;
  decide(Lose{port.spec.id});
}

}  // namespace ringreduce::parameter_server
