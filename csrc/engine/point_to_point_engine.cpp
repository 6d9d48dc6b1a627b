#include "engine/point_to_point_engine.h"

#include <vector>

#include "core/partition.h"
#include "kernels/accumulate.h"

namespace ringreduce {
namespace {

class Cpu final : public Device {
 public:
  std::byte* take() override {
    if (free_.empty()) {
      cells_.push_back(std::make_unique_for_overwrite<Line[]>(ceil_div(bytes_, sizeof(Line))));
      free_.push_back(cells_.back()[0].bytes);
    }
    std::byte* cell = free_.back();
    free_.pop_back();
    return cell;
  }
  void give(std::byte* cell) override { free_.push_back(cell); }
  void resize(std::size_t bytes) override {
    if (bytes <= bytes_) return;
    free_.clear();
    cells_.clear();
    bytes_ = bytes;
  }

  void accumulate(const Call& call, std::span<void* const> dsts, std::span<const void* const> srcs, std::size_t count,
                  const Average& average) override {
    kernels::accumulate(call.dtype, call.reduce_op, dsts, srcs, count, average.divisor, average.weights);
  }
  void scale(const Call& call, void* dst, const void* src, std::size_t count) override {
    kernels::scale(call.dtype, dst, src, count, call.factor);
  }
  void copy(void* dst, const void* src, std::size_t bytes) override { kernels::copy({&dst, 1}, src, bytes); }

 private:
  struct alignas(kCacheLine) Line {
    std::byte bytes[kCacheLine];
  };

  std::size_t bytes_ = 0;
  std::vector<std::unique_ptr<Line[]>> cells_;
  std::vector<std::byte*> free_;
};

constexpr std::size_t kAnySlice = std::size_t{1} << 30;

}  // namespace

PointToPointEngine::PointToPointEngine(std::shared_ptr<PointToPoint> wire, int channels, const Options& options)
    : Engine(wire->rank(), wire->size(), channels, options, kAnySlice),
      wire_(std::move(wire)),
      device_(std::make_unique<Cpu>()) {}

Tally PointToPointEngine::run(const Call& asked, const Buffers& given) {
  wire_->throw_if_aborted();
  check(asked, size());
  Call call = asked;
  Buffers buffers = given;
  // An empty tensor would produce no message, so a barrier reduces one byte.
  std::byte token{};
  std::byte* const token_data = &token;
  const std::size_t token_count = 1;
  if (call.operation == Operation::barrier) {
    call.count = call.largest = token_count;
    buffers.input = buffers.output = {{&token_data, 1}, {&token_count, 1}};
  }
  const auto [program, slice] = or_tell_the_others(call, [&] { return plan_of(call); });
  const std::uint64_t seq = next_call();
  const std::string what = title(call, seq);
  const Nanoseconds deadline = now() + call.timeout;
  try {
    Tally tally{.waited = compare(header_of(asked, seq, program->digest), what, deadline)};
    const Timetable& timetable = timetables_.try_emplace(program, *program).first->second;
    Exchange exchange(*wire_, *device_, {*program, timetable, call, buffers, slice});
    try {
      exchange.run(deadline);
    } catch (const Error& error) {
      throw Error(error.kind(), what + ": " + error.what() + ", in " + exchange.position(), error.culprit());
    }
    tally.waited += exchange.waited();
    return tally;
  } catch (const Error& error) {
    wire_->abort(error);
    wire_->throw_if_aborted();  // the group's first error, which need not be this one
    throw;
  } catch (const std::exception& error) {  // out of memory: the peers must not wait for this rank
    wire_->abort(Error(ErrorKind::system, what + ": " + reason(error), rank()));
    throw;
  }
}

// Returns only if all ranks mean the same call, with the time that the comparison took. In round k each rank shows its
// call to the rank 2^k after it, and stops at a call that differs. A call that passed all rounds has been compared with
// every rank's, by way of others (the dissemination barrier of Hensgen, Finkel and Manber, 1988). The partners of a
// round do not depend on the call, because ranks with different plans may not agree about who talks to whom.
Nanoseconds PointToPointEngine::compare(const CallHeader& own, const std::string& title, Nanoseconds deadline) const {
  const Nanoseconds began = now();
  for (int hops = 1; hops < size(); hops *= 2) {
    const int after = (rank() + hops) % size(), before = (rank() - hops + size()) % size();
    CallHeader theirs{};
    const Outgoing outgoing{after, reinterpret_cast<const std::byte*>(&own), sizeof(own)};
    const Incoming incoming{before, reinterpret_cast<std::byte*>(&theirs), sizeof(theirs)};
    try {
      wire_->exchange({&outgoing, 1}, {&incoming, 1}, deadline - now());
    } catch (const Error& error) {
      throw Error(error.kind(), title + ": " + error.what() + ", at the start of " + ringreduce::describe(own),
                  error.culprit());
    }
    if (theirs.fingerprint == own.fingerprint) continue;
    const std::string its = ringreduce::describe(theirs);
    throw Error(ErrorKind::mismatch,
                title + ": ranks of the group made different calls: " + number(rank()) + " called " +
                    ringreduce::describe(own) + ", " + wire_->describe(before) + " called " +
                    (its.empty() ? "what this version of ringreduce does not know" : its) +
                    ". All ranks of a group must make the same calls in the same order",
                before);
  }
  return now() - began;
}

}  // namespace ringreduce
