// The part of a backup that repeats what its server writes to the log (near_log.h).
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "parameter_server/server/partner.h"
#include "parameter_server/server/replica.h"

namespace ringreduce::parameter_server {

class Follower {
 public:
  Follower(Replica& replica, std::unique_ptr<Partner> its) : server(std::move(its)), replica_(replica) {}

  // Repeats the next record of the log. Returns its kind, or nothing if there is none. What is to be carried out is in
  // Replica::decided afterwards.
  std::optional<Record::Kind> repeat_next();
  // Drops kept operations that the server has published.
  void drop_published();
  // Called when the server has ended. Copies its blocks as they were published, and schedules the updates that were not
  // published.
  void adopt_values();

  const std::unique_ptr<Partner> server;

 private:
  void repeat(Entry& entry);
  void repeat_join(Entry& entry);
  void repeat_lose(WorkerId worker, Nanoseconds elapsed);
  void keep_decided();
  void take_state(Entry& entry);
  const BlockWords& words_of_server(const Block& block) const;

  Replica& replica_;
  std::map<BlockId, std::deque<Operation>> kept_;  // operations that the server may not have carried out
};

}  // namespace ringreduce::parameter_server
