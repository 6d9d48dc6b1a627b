// The choice of the fastest way, for costs that are given: it finds the fastest, sees when that changes, and is not
// taken in by a way that is fast in trials only, nor by a program whose calls repeat.
#include "core/fastest.h"

#include <array>
#include <cstddef>
#include <cstdio>

#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

constexpr int kWays = 3, kCalls = 4000;

// How many of so many calls go each way, if call `i` costs `cost(i, way, calls since the way was changed)`.
template <class Cost>
std::array<int, kWays> chosen(Fastest<kWays>& ways, const Cost& cost) {
  std::array<int, kWays> counts{};
  std::size_t before = kWays;
  int since = 0;
  for (int i = 0; i < kCalls; ++i) {
    const auto [way, timed, trial] = ways.next();
    since = way == before ? since + 1 : 0;
    before = way;
    if (timed) ways.note(way, cost(i, way, since));
    ++counts[way];
  }
  return counts;
}

}  // namespace

void stress_fastest() {
  constexpr int kFew = kCalls / 50;
  Fastest<kWays> ways;
  for (const std::size_t best : {std::size_t{1}, std::size_t{2}, std::size_t{0}}) {
    const auto counts = chosen(ways, [&](int, std::size_t way, int) { return way == best ? 100 : 130; });
    check(counts[best] > kCalls - kCalls / 5, "fastest: it does not follow a change");
  }

  Fastest<kWays> taken_in;
  const auto cold = chosen(taken_in, [](int, std::size_t way, int since) { return way == 1 && since > 0 ? 500 : 100; });
  check(cold[1] < 2 * kFew, "fastest: it keeps a way that is fast in trials only");

  Fastest<kWays> repeats;  // calls of three sizes in turn, which cost in proportion
  const auto turns =
      chosen(repeats, [](int i, std::size_t way, int) { return (way == 2 ? 100 : 130) * (2 + i % 3) / 2; });
  check(turns[2] > kCalls * 2 / 3, "fastest: a program that repeats hides it");
  std::printf("fastest: found among %d ways in all cases\n", kWays);
}

}  // namespace ringreduce::stress
