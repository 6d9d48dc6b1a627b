// Whether an engine on GPUs works, found out without harm to the group if it does not.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "engine/gpu/gpu_engine.h"

namespace ringreduce {

// In the place of the group's engine on the host while GPUs are tried: keeps an error to itself.
class TrialHost final : public Engine {
 public:
  explicit TrialHost(std::shared_ptr<Engine> group)
      : Engine(group->rank(), group->size(), 1, {}, kCacheLine), group_(std::move(group)) {}

  Tally run(const Call& call, const Buffers& buffers) override { return group_->run(call, buffers); }
  void fail(const Error& error) override;
  void throw_if_aborted() const override;
  int reporter() const override { return group_->reporter(); }
  std::string number(int rank) const override { return group_->number(rank); }
  std::string describe(int rank) const override { return group_->describe(rank); }
  std::vector<int> gone() const override { return group_->gone(); }

 private:
  const std::shared_ptr<Engine> group_;
  mutable std::mutex mutex_;
  std::optional<Error> error_;
};

// Sums over all ranks what a rank can compute alone, with the plans that the engine has for it. All ranks must call.
// Throws Error: what went wrong, `timeout` over, or wrong results.
void try_out(GpuEngine& engine, Nanoseconds timeout);

}  // namespace ringreduce
