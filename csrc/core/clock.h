// Time. All durations and instants in csrc are nanoseconds of the monotonic clock, comparable between the processes of
// a host.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

namespace ringreduce {

using Nanoseconds = std::int64_t;

inline constexpr Nanoseconds kMicrosecond = 1'000;
inline constexpr Nanoseconds kMillisecond = 1'000'000;
inline constexpr Nanoseconds kSecond = 1'000'000'000;
inline constexpr Nanoseconds kForever = INT64_MAX;
// No duration that comes from outside is longer, so an instant plus a duration does not overflow: ten years.
inline constexpr Nanoseconds kLongest = 10 * 365 * 24 * 3600 * kSecond;

// A duration from outside, cut to kLongest.
constexpr Nanoseconds nanoseconds(std::chrono::milliseconds duration) {
  constexpr std::chrono::milliseconds longest(kLongest / kMillisecond);
  return std::clamp(duration, -longest, longest).count() * kMillisecond;
}
constexpr Nanoseconds nanoseconds(double seconds) {
  constexpr auto longest = static_cast<double>(kLongest / kSecond);
  return static_cast<Nanoseconds>(std::clamp(seconds, -longest, longest) * kSecond);
}

inline Nanoseconds now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Finds the time in which this process was stopped or frozen during a wait, so that a timeout does not count it.
class Standstill {
 public:
  // To be called at each look, much more often than kLeast. How long the process stood still since the latest one.
  Nanoseconds before(Nanoseconds t) {
    const Nanoseconds since = std::exchange(looked_, t);
    return since != 0 && t - since >= kLeast ? t - since : 0;
  }
  // The waiting begins anew at `t`; without `t`, at the next look.
  void restart(Nanoseconds t = 0) { looked_ = t; }

 private:
  static constexpr Nanoseconds kLeast = kSecond;  // more than a thread waits for its core
  Nanoseconds looked_ = 0;
};

constexpr double seconds(Nanoseconds duration) { return static_cast<double>(duration) / kSecond; }

// "1.5 s"
inline std::string in_seconds(Nanoseconds duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds(duration));
  return text;
}

}  // namespace ringreduce
