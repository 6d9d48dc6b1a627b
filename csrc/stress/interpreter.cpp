// The GPU's interpreter under load: plans of every shape, any number of lanes, tiny slots, ranks that are late.
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

#include "engine/call.h"
#include "stress/harness.h"
#include "stress/interpreter_on_cpu.h"
#include "stress/plans.h"

namespace ringreduce::stress {
namespace {

struct Outcome {
  std::vector<std::vector<std::int64_t>> outputs;
  std::vector<gpu::Report> reports;
};

struct GroupDeleter {
  void operator()(gpu::Group* group) const { gpu::drop_group(group); }
};
using GroupPtr = std::unique_ptr<gpu::Group, GroupDeleter>;

constexpr std::uint32_t kMostLanes = 3, kMostChannels = 2;

GroupPtr make_group(int size) {
  return GroupPtr(gpu::make_group(static_cast<std::uint32_t>(size), kMostLanes * kMostChannels, 8, 1024));
}

// An all_reduce in which rank r gives r * count + i as element i. `absent`: who never comes; -1: all do.
Outcome all_reduce(gpu::Group& group, const Lowered& plan, int size, int channels, std::size_t count, Random& random,
                   int absent, Nanoseconds timeout) {
  const auto ranks = static_cast<std::size_t>(size);
  std::vector<std::vector<std::int64_t>> inputs(ranks, std::vector<std::int64_t>(count));
  Outcome outcome{std::vector(ranks, std::vector<std::int64_t>(count)), std::vector<gpu::Report>(ranks)};
  std::vector<gpu::Tensors> from(ranks), to(ranks);
  const auto absents = std::make_unique<bool[]>(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    std::iota(inputs[r].begin(), inputs[r].end(), static_cast<std::int64_t>(r * count));
    from[r].data[0] = reinterpret_cast<char*>(inputs[r].data());
    to[r].data[0] = reinterpret_cast<char*>(outcome.outputs[r].data());
    from[r].count[0] = to[r].count[0] = count;
    absents[r] = static_cast<int>(r) == absent;
  }
  const std::vector<double> factors(ranks, 1.0);
  const std::vector<std::uint64_t> fingerprints(ranks, 1);
  const gpu::GroupCall call{.lowered = plan.data(),
                            .words = plan.size(),
                            .kernel = "uint64_sum",
                            .operation = static_cast<std::int32_t>(Operation::all_reduce),
                            .root = 0,
                            .channels = channels,
                            .element = 8,
                            .parts = 1,
                            .lanes = static_cast<std::uint32_t>(random_int(random, 1, kMostLanes)),
                            .launches = 2,
                            .slice = static_cast<std::uint64_t>(8 * random_int(random, 1, 16)),
                            .largest = count,
                            .timeout = static_cast<std::uint64_t>(timeout),
                            .divisor = 1,
                            .factors = factors.data(),
                            .fingerprints = fingerprints.data(),
                            .absent = absents.get(),
                            .batches = nullptr,
                            .inputs = from.data(),
                            .outputs = to.data(),
                            .reports = outcome.reports.data(),
                            .unlike = nullptr,
                            .weighs = false,
                            .scaled = false,
                            .stepwise = random_int(random, 0, 2) == 0,
                            .threaded = random_int(random, 0, 1) == 0};
  check(gpu::make_call(&group, &call), "the interpreter's plan is malformed");
  return outcome;
}

}  // namespace

void stress_interpreter() {
  Random random(17);
  constexpr int kGroups = 8, kCalls = 20;  // of a group
  for (int k = 0; k < kGroups; ++k) {
    const int size = 1 + k % 4;
    const GroupPtr group = make_group(size);
    for (int c = 0; c < kCalls; ++c) {
      const int shape = random_int(random, 0, 3);
      const Lowered plan = shape == 0   ? one_shot(size)
                           : shape == 1 ? two_shot(size)
                           : shape == 2 ? ring(size)
                                        : two_rings(size);
      const auto count = static_cast<std::size_t>(random_int(random, 0, 700));
      const Outcome outcome = all_reduce(*group, plan, size, shape == 3 ? 2 : 1, count, random, -1, 60 * kSecond);
      for (std::size_t r = 0; r < outcome.outputs.size(); ++r) {
        check(outcome.reports[r].gave_up == 0, "a block of the interpreter gave up");
        for (std::size_t i = 0; i < count; ++i) {
          const std::size_t ranks = outcome.outputs.size(), wanted = ranks * i + count * (ranks * (ranks - 1) / 2);
          check(outcome.outputs[r][i] == static_cast<std::int64_t>(wanted), "the interpreter gave a wrong sum");
        }
      }
      check(gpu::words_in_use(group.get()) == 0, "the interpreter left words in use");
    }
  }
  for (int k = 0; k < 4; ++k) {
    const GroupPtr group = make_group(3);
    const Outcome late = all_reduce(*group, ring(3), 3, 1, 100, random, 1, 50 * kMillisecond);
    for (std::size_t r : {std::size_t{0}, std::size_t{2}})
      check(late.reports[r].gave_up == static_cast<std::uint32_t>(gpu::GaveUp::timeout),
            "no timeout for an absent rank");
  }
  std::printf("interpreter: %d calls, then some with a rank that does not come\n", kGroups * kCalls);
}

}  // namespace ringreduce::stress
