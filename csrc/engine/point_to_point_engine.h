// The engine of ranks that only have messages between two of them: the same plans as in shared memory, with the same
// bits, over whatever transport offers PointToPoint. Ranks may be on several hosts.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "engine/exchange.h"
#include "transport/point_to_point.h"

namespace ringreduce {

class PointToPointEngine final : public Engine {
 public:
  // `channels`: the most that a plan may have. Only the options about slices count.
  PointToPointEngine(std::shared_ptr<PointToPoint> wire, int channels, const Options& options);

  Tally run(const Call& call, const Buffers& buffers) override;
  void fail(const Error& error) override { wire_->abort(error); }
  void throw_if_aborted() const override { wire_->throw_if_aborted(); }
  int reporter() const override { return wire_->reporter(); }
  std::string number(int rank) const override { return wire_->number(rank); }
  std::string describe(int rank) const override { return wire_->describe(rank); }

 private:
  Nanoseconds compare(const CallHeader& own, const std::string& title, Nanoseconds deadline) const;

  const std::shared_ptr<PointToPoint> wire_;
  const std::unique_ptr<Device> device_;
  std::map<const Program*, Timetable> timetables_;
};

}  // namespace ringreduce
