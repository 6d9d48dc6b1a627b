// A worker's half of the protocol with one shard: numbers its requests, keeps them until they are answered so that they
// can be sent again, and knows which round its next push is for. Pure, as shard.h is.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "parameter_server/shard.h"

namespace ringreduce::parameter_server {

class Session {
 public:
  explicit Session(WorkerId worker) : worker_(worker) {}

  // Whether another request may be made, after `more` that are to be, before more replies have come.
  bool has_room(std::size_t more = 0) const { return next_ + more - seen_ <= kMostOutstanding; }

  // Completes a request (kind, block, priority, weight and payload are the caller's), to be sent now. It is kept, with
  // its payload, until it is answered.
  const Request& make(Request request) {
    request.worker = worker_;
    request.number = next_++;
    request.seen = seen_;
    if (request.kind == RequestKind::push) {
      Place& place = places_[request.block];
      request.round = place.round++;
      request.pulled = place.pulled;
    }
    return outstanding_.emplace(request.number, std::move(request)).first->second;
  }

  // Takes a reply. Returns the request that it answers, or nothing if it had been answered before.
  std::optional<Request> take(const Reply& reply) {
    const auto found = outstanding_.find(reply.number);
    if (found == outstanding_.end()) return std::nullopt;
    Request request = std::move(found->second);
    outstanding_.erase(found);
    answered_.insert(reply.number);
    while (answered_.erase(seen_ + 1) > 0) ++seen_;
    // A round that this worker missed, or that others began before it came, is over: it goes on with the present one.
    if (request.kind <= RequestKind::pull) raise_round(request.block, reply.version);
    return request;
  }

  // The worker has read this version of the block.
  void read(BlockId block, std::uint64_t version) {
    places_[block].pulled = version;
    raise_round(block, version);
  }

  // What is not answered, in order: to be sent again over a new connection.
  std::vector<Request> unanswered() const {
    std::vector<Request> requests;
    for (const auto& [number, request] : outstanding_) {
      requests.push_back(request);
      requests.back().seen = seen_;
    }
    return requests;
  }

  std::size_t outstanding() const { return outstanding_.size(); }

 private:
  struct Place {
    std::uint64_t round = 0;   // of the next push
    std::uint64_t pulled = 0;  // the latest version that was read
  };

  void raise_round(BlockId block, std::uint64_t version) {
    std::uint64_t& round = places_[block].round;
    if (round < version) round = version;
  }

  WorkerId worker_;
  std::uint64_t next_ = 1;
  std::uint64_t seen_ = 0;
  std::map<std::uint64_t, Request> outstanding_;
  std::set<std::uint64_t> answered_;  // above seen_
  std::map<BlockId, Place> places_;
};

}  // namespace ringreduce::parameter_server
