// The worker's half of the protocol with one shard. It numbers the requests, keeps each until it is answered so that it
// can be sent again, and determines the round of each push. Like block/shard.h, it does no input or output.
#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "parameter_server/messages.h"

namespace ringreduce::parameter_server {

class Session {
 public:
  explicit Session(WorkerId worker) : worker_(worker) {}

  // Whether another request may be made now, if `more` requests that already wait are made first.
  bool has_room(std::size_t more = 0) const { return next_ + more - seen_ <= kMostOutstanding; }

  // The number of the next request.
  std::uint64_t next() const { return next_; }

  // Completes a request, of which the caller has set kind, block, priority, weight and payload. The caller sends it
  // now. It is kept, with its payload, until it is answered. Where there is no memory for it, nothing has changed.
  const Request& make(Request request) {
    Place& place = places_[request.block];  // now, since a reply may need it and must not need memory
    Request& made = outstanding_.emplace(next_, std::move(request)).first->second;
    made.worker = worker_;
    made.number = next_++;
    made.seen = seen_;
    if (made.kind == RequestKind::push) {
      made.round = place.round++;
      made.pulled = place.pulled;
    }
    if (made.kind == RequestKind::change) made.round = place.round;
    return made;
  }

  // Takes a reply. Returns the request that it answers, or nothing if that had been answered before. Needs no memory.
  std::optional<Request> take(const Reply& reply) {
    const auto found = outstanding_.find(reply.number);
    if (found == outstanding_.end()) return std::nullopt;
    Request request = std::move(found->second);
    outstanding_.erase(found);
    answered_.set(reply.number % kMostOutstanding);
    for (; answered_[(seen_ + 1) % kMostOutstanding]; ++seen_) answered_.reset((seen_ + 1) % kMostOutstanding);
    // The worker may have missed rounds, or joined when some were over. Its next push belongs to the open round.
    if (request.kind <= RequestKind::pull) raise_round(request.block, reply.version);
    return request;
  }

  // Records that the worker has read this version of the block.
  void read(BlockId block, std::uint64_t version) {
    places_[block].pulled = version;
    raise_round(block, version);
  }

  // The requests without an answer, in order, to be sent again to a backup.
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
    std::uint64_t pulled = 0;  // the latest version that the worker has read
  };

  void raise_round(BlockId block, std::uint64_t version) {
    std::uint64_t& round = places_[block].round;
    if (round < version) round = version;
  }

  WorkerId worker_;
  std::uint64_t next_ = 1;
  std::uint64_t seen_ = 0;
  std::map<std::uint64_t, Request> outstanding_;
  std::bitset<kMostOutstanding> answered_;  // of the numbers greater than seen_, of which there are no more
  std::map<BlockId, Place> places_;
};

}  // namespace ringreduce::parameter_server
